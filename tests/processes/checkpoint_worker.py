"""One of several processes, four devices each, that save, restore, stall and die.

python checkpoint_worker.py PROCESS PORT FOLDER PART ...

Each part is a function below. What a process has to say goes to FOLDER/PART-PROCESS.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard import checkpoint
from jshard._errors import FourPartError
from jshard.checkpoint import storage
from jshard.checkpoint.meeting import exchange
from tests.checkpoint_states import LAYOUTS, abstract, differences, filled

PROCESS, FOLDER = int(sys.argv[1]), Path(sys.argv[3])
SHARED = [layout for layout in LAYOUTS if layout != "one device"]  # a process of two cannot use one device alone
DEADLINE_S = 4.0


def told(call):
    """What an error says, who raised it, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except FourPartError as error:
        return {"type": type(error).__name__, "text": str(error), "after_s": time.monotonic() - begin}
    return None


def matrix():
    """Saves every layout, and restores what one process saved, each from the layout before it, and the other way."""
    found = {}
    for seed, layout in enumerate(SHARED):
        checkpoint.save(FOLDER / f"two {layout}", filled(layout, seed))
    for seed, source in enumerate(SHARED):
        for target in (source, SHARED[seed - 1]):
            restored = checkpoint.restore(FOLDER / f"two {source}", like=abstract(target))
            found[f"two {source} -> {target}"] = differences(restored, target, seed)
    for seed, source in enumerate(LAYOUTS):
        target = SHARED[seed - 1]
        restored = checkpoint.restore(FOLDER / f"one {source}", like=abstract(target))
        found[f"one {source} -> {target}"] = differences(restored, target, seed)
    return found


def not_shared():
    """Each process is given a folder of its own."""
    checkpoint.shared_folder._SHOWN_S = 0.5
    return told(lambda: checkpoint.Checkpointer(FOLDER / f"own-{PROCESS}"))


def series(name):
    return checkpoint.Checkpointer(FOLDER / name, timeout_s=DEADLINE_S)


def state(number):
    mesh = js.mesh()
    values = np.random.default_rng(number).standard_normal((64, 1024)).astype(np.float32)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = jax.make_array_from_callback(values.shape, sharding, lambda box: values[box])
    return {"w": w, "ids": np.arange(8) + number, "step": number}


def is_state(found, number):
    """Whether this process's part of a restored state is that of `state(number)`."""
    wanted = state(number)
    pairs = zip(found["w"].addressable_shards, wanted["w"].addressable_shards, strict=True)
    same = all(bool(jnp.array_equal(a.data, b.data)) for a, b in pairs)
    return same and np.array_equal(found["ids"], wanted["ids"]) and found["step"] == number


def stall():
    """Process 1 is stopped, before a save and in the middle of one; process 0 is to say so in time."""
    ckpt = series("stalled")
    ckpt.save(1, state(1))
    pids = exchange("pids", str(os.getpid()), timeout_s=60)
    found = []
    write = storage.save_async

    def stopped_in_the_middle(*args, **options):
        wait = write(*args, **options)
        os.kill(os.getpid(), signal.SIGSTOP)
        return wait

    for step in (2, 3):
        if PROCESS == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if PROCESS == 1 and step == 3:
            storage.save_async = stopped_in_the_middle
        found.append(told(lambda step=step: ckpt.save(step, state(step))))
        if PROCESS == 0:
            os.kill(int(pids[1]), signal.SIGCONT)
        storage.save_async = write
        exchange(f"after {step}", "", timeout_s=60)
    ckpt.save(4, state(4))  # what failed does not stand in the way
    latest = ckpt.agreed_latest()
    return {"errors": found, "steps": ckpt.steps(), "equal": is_state(ckpt.restore(like=state(0)), latest)}


def die():
    """Saves until process 1 is killed, by itself, at a moment that hangs on the file `when`."""
    ckpt = series("dying")
    ckpt.save(1, state(1))
    if PROCESS == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, float((FOLDER / "when").read_text()))
    for step in range(2, 1000):
        if found := told(lambda step=step: ckpt.save(step, state(step))):
            return found
    return None


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, PROCESS)
    for part in sys.argv[4:]:
        result = globals()[part]()
        (FOLDER / f"{part}-{PROCESS}.json").write_text(json.dumps(result))
    if "die" not in sys.argv:
        jax.distributed.shutdown()  # together: whoever is left when process 0 has gone is aborted
    os._exit(0)
