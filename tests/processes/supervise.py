"""A supervisor in a process of its own.

python supervise.py '{"processes": 2, "peer_s": 1.0}' COMMAND ...
Without "processes", the place in the cluster is read from the environment. With "most", the run is restarted so often;
"meshes" and "wait_s" are of `Restarts`. A worker that continues is given the folder and the mesh as last arguments.
"""

import json
import sys

from jshard import launch

options = json.loads(sys.argv[1])
deadlines = launch.Deadlines(**{name: options[name] for name in ("init_s", "peer_s", "grace_s") if name in options})
processes = options.get("processes")
cluster = None if processes else launch.detect()
restarts = None
if "most" in options:
    restarts = launch.Restarts(
        most=options["most"],
        command=lambda folder, mesh: [*sys.argv[2:], f"folder={folder} mesh={mesh}"],
        meshes={int(number): mesh for number, mesh in options.get("meshes", {}).items()} or None,
        wait_s=options.get("wait_s", 60.0),
    )
print("supervisor is up", flush=True)
sys.exit(launch.supervise(sys.argv[2:], processes=processes, cluster=cluster, deadlines=deadlines, restarts=restarts))
