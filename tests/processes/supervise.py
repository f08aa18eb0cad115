"""A supervisor in a process of its own.

python supervise.py '{"processes": 2, "peer_s": 1.0}' COMMAND ...
Without "processes", the place in the cluster is read from the environment. With "most", the run is restarted so often;
a worker that goes on is given the folder as its last argument.
"""

import json
import sys

from jshard import launch

options = json.loads(sys.argv[1])
deadlines = launch.Deadlines(**{name: options[name] for name in ("init_s", "peer_s", "grace_s") if name in options})
processes = options.get("processes")
cluster = None if processes else launch.detect()
print("supervisor is up", flush=True)
code = launch.supervise(
    sys.argv[2:],
    processes=processes,
    cluster=cluster,
    deadlines=deadlines,
    max_restarts=options.get("most", 0),
    resumed=lambda folder: [*sys.argv[2:], f"folder={folder}"],
)
sys.exit(code)
