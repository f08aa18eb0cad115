"""Host memory: a restore takes little beside the state, and saving for ever takes no more than saving twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a minute, and gigabytes of disk

PROGRAM = """
import os, sys, json, shutil, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jshard as js

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.mib, self.stopped = 0.0, False
        self.start()
    def run(self):
        while not self.stopped:
            self.mib = max(self.mib, resident())
            time.sleep(0.002)

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), P("fsdp"))
what, folder, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
shape = (4096, 2048)  # 32 MiB
state = lambda: {f"l{i}": jax.device_put(np.full(shape, i, np.float32), sharding) for i in range(layers)}
if what == "save":
    js.checkpoint.save(folder, state())
elif what == "restore":
    like = {f"l{i}": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for i in range(layers)}
    js.checkpoint.restore(folder, {"l0": like["l0"]})  # what libraries take once
    before, peak = resident(), Peak()
    restored = js.checkpoint.restore(folder, like)
    peak.stopped = True
    print(json.dumps({"state": 32 * layers, "peak": peak.mib - before, "after": resident() - before}))
else:
    held, seen = state(), []
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with js.checkpoint.Checkpointer(folder, keep=1) as checkpoints:
        for number in range(50):
            checkpoints.save_async(number, held)
            held = jax.block_until_ready(step(held))
            checkpoints.wait()
            seen.append(round(resident()))
    print(json.dumps(seen))
"""


def run(*args):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, args)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout) if ended.stdout else None


def test_a_restore_takes_300_mib_beside_the_state(tmp_path):
    run("save", tmp_path / "c", 64)  # 2 GiB
    found = run("restore", tmp_path / "c", 64)
    assert found["peak"] <= found["state"] + 300, found


def test_fifty_saves_take_no_more_than_two(tmp_path):
    seen = run("saves", tmp_path / "c", 8)  # 256 MiB
    assert seen[-1] <= 1.1 * seen[1] and max(seen) <= 1.25 * seen[1], seen
