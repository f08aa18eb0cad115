"""A worker without JAX: does what its process id is reported, and gives signs of life meanwhile.

python fake_worker.py '{"0": "wait", "1": "killed"}' [FOLDER]

With a folder, it leaves the file up-PROCESS there when it listens to signals. "killed then done": the second is for
the second attempt and all after it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

process = os.environ["JAX_PROCESS_ID"]
attempt = json.loads(os.environ.get("JSHARD_ATTEMPT", "{}")).get("attempt", 1)
actions = json.loads(sys.argv[1]).get(process, "wait").split(" then ")
action = actions[min(attempt, len(actions)) - 1]
reports = int(os.environ["JSHARD_REPORT_FD"])


def report(**state):
    os.write(reports, json.dumps(state).encode() + b"\n")


def beat():
    while True:
        try:
            report()
        except OSError:
            os._exit(9)  # the supervisor is gone
        time.sleep(0.1)


def note_signal(signum, _):
    print(f"signal {signum}", flush=True)
    if action == "aborts when stopped":
        time.sleep(0.2)
        os.abort()
    if action != "deaf":
        # Long enough to hear a second one, if there is.
        time.sleep(0.5)
        print("saved", flush=True)
        sys.exit(130 if signum == signal.SIGINT else 75)


if action != "unprepared":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note_signal)
report(step=12, checkpoint="runs/a/checkpoints/10", again="jshard train gpt.py --out runs/a --resume", folder="runs/a")
threading.Thread(target=beat, daemon=True).start()
of, resumed = os.environ["JAX_NUM_PROCESSES"], sys.argv[-1] if sys.argv[-1].startswith("folder=") else ""
print(f"process {process} is up" + (f": attempt {attempt}, of {of}, {resumed}" if resumed else ""), flush=True)
if len(sys.argv) > 2 and not resumed:
    Path(sys.argv[2], f"up-{process}").touch()
if action == "done":
    print("[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number", file=sys.stderr)
    print("1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", file=sys.stderr)
    print(f"a warning of process {process}", file=sys.stderr)
    sys.exit(0)
time.sleep(0.3)
if action == "killed":
    # What it started must not outlive it.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if len(sys.argv) > 2 and not resumed:
        Path(sys.argv[2], "child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
if action == "stalls":
    time.sleep(4)  # all others have said where they stand
    report(phase="in a step", marks=9, idle_s=8.0, deadline="8 s (--stall-timeout)", stalled="stalled")
if action == "is on time":
    report(phase="in a step", marks=9, idle_s=7.0)
if action == "waits for a peer":
    report(phase="in a step", marks=9, idle_s=1.5, warn_s=15.0)
if action == "is behind":
    report(phase="waiting for data", marks=5, idle_s=7.0)
if action == "frozen":
    os.kill(os.getpid(), signal.SIGSTOP)
if action == "refuses":
    sys.stderr.write("ShardingError: There is no recipe.\n  do:    --recipe tiny\n")
    sys.exit(2)
if action == "fails and says why":
    report(explained=True)
    sys.stderr.write("RunError: The disk is full.\n")
    sys.exit(1)
if action == "fails":
    sys.stderr.write("Traceback (most recent call last):\nKeyError: 3\n")
    sys.exit(1)
if action == "aborts after":
    sys.stderr.write("F0000 coordination_service_agent.cc: Terminating process\n")
    sys.stderr.flush()
    time.sleep(0.3)
    os.abort()
if action == "blames a peer":
    report(blames_peer=True)
    sys.stderr.write("jax.errors.JaxRuntimeError: Gloo all-reduce failed\n")
    sys.exit(1)
time.sleep(600)
