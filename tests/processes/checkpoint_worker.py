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
from jshard._compat import coordinator
from jshard._processes import exchange
from jshard.checkpoint import saving, storage
from jshard.checkpoint.ownership import draft_of
from jshard.checkpoint.packed import file_io
from jshard.checkpoint.packed.host_snapshot import HostSnapshot
from jshard.checkpoint.saving import SaveOperation
from jshard.checkpoint.series import shared_folder
from jshard.errors import FourPartError
from tests.checkpoint.checkpoint_states import LAYOUTS, abstract, differences, filled

PROCESS, FOLDER = int(sys.argv[1]), Path(sys.argv[3])
SHARED = [layout for layout in LAYOUTS if layout != "one device"]  # a process of two cannot use one device alone
DRAFT = draft_of(FOLDER / "apart")
DEADLINE_S = 4.0
SLOW_S = 1.0


def reported(call):
    """What an error says, and who raised it."""
    try:
        call()
    except FourPartError as error:
        return {"type": type(error).__name__, "text": str(error)}
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


def bucket():
    """A series in a bucket; the second process may not upload its part of the third checkpoint."""
    with checkpoint.Checkpointer(os.environ["SERIES"], keep=2) as series:
        for step in (1, 2):
            series.save(step, filled(SHARED[0], step))
        error = reported(lambda: series.save(3, filled(SHARED[0], 3)))
        assert series.agreed_latest() == 2
        restored = series.restore(abstract(SHARED[1]))
    return {"error": error, "differences": differences(restored, SHARED[1], 2)}


def not_shared():
    """Each process is given a folder of its own."""
    shared_folder.SHOWN_S = 0.5
    own = checkpoint.Checkpointer(FOLDER / f"own-{PROCESS}")  # it meets no one, and makes nothing
    assert own.latest() is None and not own.folder.exists()
    return reported(lambda: own.save(1, state(1)))


def balance():
    """Bytes that each process writes of arrays that both hold whole, and the same after a restore."""
    everywhere = NamedSharding(js.mesh(), PartitionSpec())
    values = {f"w{i}": np.full((256 + i, 256), i, np.float32) for i in range(16)}
    held = {
        name: jax.make_array_from_callback(x.shape, everywhere, lambda box, x=x: x[box]) for name, x in values.items()
    }
    before = written_bytes()
    checkpoint.save(FOLDER / "balance", held)
    found = {"bytes": written_bytes() - before}
    restored = checkpoint.restore(FOLDER / "balance", like=held)
    found["equal"] = all(np.array_equal(restored[name], x) for name, x in values.items())
    found["sharding"] = all(restored[name].sharding == everywhere for name in values)
    return found


def written_bytes():
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def once():
    """What both hold, in shards of 1 KiB to 4 MiB: the bytes that this process reads, and errors of one and of both."""
    mesh, path = js.mesh(replica=2, fsdp=4), FOLDER / "once"
    shapes = {"large": ((4096, 1024), "float32"), "odd": ((4, 7, 3), "bool"), "scalar": ((), "int8")}
    shapes |= {f"small{n}": ((256, 4 + n), "bfloat16") for n in range(100)} | {"key": ((), "key")}
    on_mesh = lambda ndim: NamedSharding(mesh, PartitionSpec(*["fsdp"][:ndim]))
    held = {}
    for number, (name, (shape, dtype)) in enumerate(shapes.items()):
        if dtype == "key":
            held[name] = jax.jit(lambda: jax.random.key(7), out_shardings=on_mesh(0))()
        else:
            values = np.random.default_rng(number).integers(0, 100, shape).astype(jnp.dtype(dtype))
            held[name] = jax.make_array_from_callback(shape, on_mesh(len(shape)), lambda box, x=values: x[box])
    held["host"], held["step"] = np.arange(1000), 3
    checkpoint.save(path, held)
    restore = lambda like=held: checkpoint.restore(path, like, read_once=True, timeout_s=300)
    differ = lambda found: [name for name, value in held.items() if not all_equal(found[name], value)]
    restore()  # what is imported, and the connections
    before = read_bytes()
    found = {"differ": differ(restore()), "bytes": read_bytes() - before}
    found["forecast"] = checkpoint.forecast(path, held, read_once=True).touched_bytes
    found["other leaves"] = reported(lambda: restore({"large": held["large"], "step": 0} if PROCESS else held))

    read = file_io.LocalFolder.read
    if PROCESS == 1:
        file_io.LocalFolder.read = lambda self, *where: fails() if where[1] > 1 << 20 else read(self, *where)
    found["one fails"] = reported(restore)
    file_io.LocalFolder.read = read
    (file,) = (path / "arrays").glob("00001-*")
    if PROCESS == 1:
        with file.open("r+b") as changed:
            changed.seek(1 << 20)
            byte = changed.read(1)
            changed.seek(1 << 20)
            changed.write(bytes([byte[0] ^ 1]))
    exchange("changed", "", timeout_s=800)
    found["a bit"] = reported(restore)
    return found


def all_equal(a, b):
    if not isinstance(b, jax.Array):
        return np.array_equal(a, b)
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    same = a.sharding.is_equivalent_to(b.sharding, a.ndim)
    return same and all(np.array_equal(x.data, y.data) for x, y in pairs)


def read_bytes():
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


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


def apart():
    """What fails in one process fails in both at once, and the same path is good the next time."""
    found = {}
    mine = {"key": jax.random.key(1), "count": jnp.asarray(3), "grid": jnp.arange(6.0).reshape(2, 3)}
    checkpoint.save(FOLDER / "local", {**state(1), **mine})
    restored = checkpoint.restore(FOLDER / "local", like={**state(0), **mine})
    found["local"] = is_state(restored, 1) and all(same(restored[name], mine[name]) for name in mine)
    found["alone"] = same(checkpoint.restore(FOLDER / "local", like={"key": jax.random.key(0)})["key"], mine["key"])
    found["kept"] = kept("/local/")

    save = lambda timeout_s=600, form="packed", **others: reported(
        lambda: checkpoint.save(FOLDER / "apart", {**state(1), **others}, timeout_s=timeout_s, format=form)
    )
    found["other values"] = save(key=jax.random.key(PROCESS))
    found["no data"] = save(f=print if PROCESS == 1 else 1)
    for process, owner, part in (
        (0, SaveOperation, "_prepare"),
        (1, HostSnapshot, "__init__"),
        (1, saving, "write_files"),
        (0, saving, "seal"),
        (0, storage, "name_draft"),
        (1, storage, "save_async"),
    ):
        works = getattr(owner, part)
        if process == PROCESS:
            setattr(owner, part, fails)
        is_in_orbax = part == "save_async"
        found[part] = save(timeout_s=2, form="orbax") if is_in_orbax else save()  # Orbax waits for the other one
        found[f"draft after {part}"] = DRAFT.exists()
        setattr(owner, part, works)
    exchange("before one is too late", "", timeout_s=800)  # one heard at once what the other one waited for
    seal = saving.seal
    if PROCESS == 0:
        saving.seal = lambda *args: (time.sleep(6), seal(*args))
    found["too late"] = save(timeout_s=2)
    found["named"] = (FOLDER / "apart").exists()
    saving.seal = seal
    exchange("afterwards", "", timeout_s=800)
    found["afterwards"] = save()
    found["equal"] = is_state(checkpoint.restore(FOLDER / "apart", like=state(0)), 1)
    found["kept"] += kept("/apart/")
    return found


def kept(part):
    """What the processes have left to one another at their meetings, once it has not gone for a while."""
    until, read = time.monotonic() + 200, coordinator().key_value_dir_get
    # The other one may be on its way out of the last meeting, and further on.
    left = lambda: [key for key, _ in read("jshard/") if part in key and "/failed/" not in key]
    while left() and time.monotonic() < until:
        time.sleep(0.01)
    return left()


def same(a, b):
    keys = jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
    a, b = (jax.random.key_data(x) if keys else x for x in (a, b))
    return np.array_equal(a, b)


def fails(*args, **options):
    raise ValueError("not foreseen")


def slow():
    """Process 1 is slow to write."""
    write = saving.write_files
    if PROCESS == 1:
        saving.write_files = lambda *args, **options: (time.sleep(SLOW_S), write(*args, **options))[1]
    checkpoint.Checkpointer(FOLDER / "slow").save(1, state(1))
    saving.write_files = write


def stall():
    """Process 1 is stopped, before a save and in the middle of one; process 0 is to say so in time."""
    ckpt = checkpoint.Checkpointer(FOLDER / "stalled")
    ckpt.save(1, state(1))
    patient_s, ckpt.timeout_s = ckpt.timeout_s, DEADLINE_S
    pids = exchange("pids", str(os.getpid()), timeout_s=800)
    found = []
    write = saving.write_files

    def stopped_in_the_middle(*args, **options):
        written = write(*args, **options)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # a signal to the process stops the other threads a moment later
        return written

    for step in (2, 3):
        if PROCESS == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if PROCESS == 1 and step == 3:
            saving.write_files = stopped_in_the_middle
        found.append(reported(lambda step=step: ckpt.save(step, state(step))))
        if PROCESS == 0:
            while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)  # a signal that came before the stop would be lost
            os.kill(int(pids[1]), signal.SIGCONT)
        saving.write_files = write
        exchange(f"after {step}", "", timeout_s=800)
    ckpt.timeout_s = patient_s
    ckpt.save(4, state(4))  # what failed does not stand in the way
    latest = ckpt.agreed_latest()
    return {"errors": found, "steps": ckpt.steps(), "equal": is_state(ckpt.restore(like=state(0)), latest)}


def die():
    """Saves until process 1 is killed, by itself, at a moment that hangs on the file `when`."""
    ckpt = checkpoint.Checkpointer(FOLDER / "dying", timeout_s=DEADLINE_S)
    ckpt.save(1, state(1))
    if PROCESS == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, float((FOLDER / "when").read_text()))
    for step in range(2, 1000):
        if found := reported(lambda step=step: ckpt.save(step, state(step))):
            return found
    return None


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, PROCESS)
    for part in sys.argv[4:]:
        result = globals()[part]()
        (FOLDER / f"{part}-{PROCESS}.json").write_text(json.dumps(result))
    if "die" not in sys.argv:
        jax.distributed.shutdown()  # together: a process that is left when process 0 has gone is aborted
    os._exit(0)
