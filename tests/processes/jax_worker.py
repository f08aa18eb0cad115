"""A real worker: the processes of the run add up their ids, with gloo between them.

python jax_worker.py ROUNDS [PROCESS THAT IS KILLED HALFWAY]

With 0 rounds, it finds the disk full before it has met the others.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from jshard import launch
from jshard.errors import RunError

rounds = int(sys.argv[1])
killed = int(sys.argv[2]) if len(sys.argv) > 2 else None
jax.config.update("jax_num_cpu_devices", 2)
assert launch.is_worker()
if rounds == 0:
    error = RunError("The disk is full.", where="/data", why="0 bytes are free.", do="df -h")
    print(f"RunError: {error}", file=sys.stderr)
    launch.leave(1, error=error)
launch.start_worker()
# What a native library prints to the file descriptor of stdout does not reach stdout.
os.write(1, b"native chatter\n")
try:
    for step in range(rounds):
        total = int(multihost_utils.process_allgather(jnp.int32(jax.process_index() + 1)).sum())
        launch.note(step=step, checkpoint=f"checkpoints/{step}")
        if step == 0 and jax.process_index() == 0:
            print(f"total {total}, {jax.local_device_count()} of {jax.device_count()} devices", flush=True)
        if step == rounds // 2 and jax.process_index() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
except Exception as error:
    print(f"failed: {type(error).__name__}", file=sys.stderr)
    launch.leave(1, error=error)
launch.leave(0)
