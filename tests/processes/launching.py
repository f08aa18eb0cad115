"""What the tests of runs in several processes share: fake workers, and reports without what differs from run to run."""

import json
import re
import socket
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def fake(*extra, **actions):
    """The command of a worker that does `actions`, by process: p0="wait"."""
    table = {name.removeprefix("p"): action for name, action in actions.items()}
    return [sys.executable, str(HERE / "fake_worker.py"), json.dumps(table), *map(str, extra)]


def plain(text, ports=()):
    """A report without the machine, the pids and the ports."""
    for port, name in zip(ports, ("PORT", "ROLL"), strict=False):
        text = text.replace(str(port), name)
    return re.sub(r"pid \d+", "pid N", re.sub(r"host [^\s)]+", "host H", text).replace(socket.gethostname(), "H"))


def killed(number):
    """The report of a run of so many processes whose process 1 was killed."""
    return f"""\
RunError: Process 1 of {number} was lost.
  where: process 1 (pid N, host H)
         last step reported: 12
         last good checkpoint: runs/a/checkpoints/10
  why:   it was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer.
         The others cannot continue without it and are stopped.
  do:    jshard train gpt.py --out runs/a --resume
"""


def gone(pid):
    """Whether a process is over; one that no one has asked for its exit code yet is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until(condition, limit_s=800):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def children(pid):
    """The processes that a process has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
