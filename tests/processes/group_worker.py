"""One of three processes, two devices each, some of which save and restore together.

python group_worker.py PROCESS PORT FOLDER

What a process has to say goes to FOLDER/PROCESS.json.
"""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard import checkpoint
from jshard.errors import FourPartError

PROCESS, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
NUM = 3
VALUES = np.arange(48, dtype=np.float32).reshape(12, 4)
DEADLINE_S = 60.0


def array(mesh, spec, values):
    """An array on a mesh that this process is in."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda box: values[box])


def state_on(processes, add=0.0):
    """A state on the devices of some processes, with an array that each has for itself, and one on the host."""
    devices = [device for device in jax.devices() if device.process_index in processes]
    mesh = jax.sharding.Mesh(np.array(devices), "fsdp")
    rows = array(mesh, PartitionSpec("fsdp"), VALUES + add)
    return {
        "w": rows,
        "replicated": array(mesh, PartitionSpec(), VALUES[:3] + add),
        "own": jax.device_put(VALUES[3] + add, jax.local_devices()[0]),
        "host": VALUES[4] + add,
        "step": 7,
    }


def error_of(call):
    """The text of the error that a call raises, and the seconds that it took."""
    begin_s = time.monotonic()
    try:
        call()
    except FourPartError as error:
        return str(error), time.monotonic() - begin_s
    return "", time.monotonic() - begin_s


def local_rows(value):
    """The values of an array that this process holds, by their first row."""
    return {str(shard.index[0].start or 0): np.asarray(shard.data).tolist() for shard in value.addressable_shards}


def round_trip(members, name, **options):
    """Saves and restores a state on some processes; returns whether all values on this one are right."""
    state = state_on(members)
    checkpoint.save(FOLDER / name, state, timeout_s=DEADLINE_S, **options)
    restored = checkpoint.restore(FOLDER / name, state_on(members, add=1.0), timeout_s=DEADLINE_S, **options)
    right = all(local_rows(restored[key]) == local_rows(state[key]) for key in ("w", "replicated"))
    right &= np.array_equal(restored["own"], VALUES[3]) and np.array_equal(restored["host"], VALUES[4])
    return bool(right and restored["step"] == 7)


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", NUM, PROCESS)
    said = {}
    # All, then pairs that share a process, then each alone, at the same time: none waits for another group.
    said["all"] = round_trip((0, 1, 2), "all")
    if PROCESS in (0, 1):
        said["0 1"] = round_trip((0, 1), "0 1")
    if PROCESS in (1, 2):
        said["1 2"] = [round_trip((1, 2), f"1 2 {number}") for number in range(3)]
    said["alone"] = round_trip((PROCESS,), f"alone {PROCESS}", processes=[PROCESS])
    said["background"] = None
    if PROCESS in (1, 2):
        checkpoint.save_async(FOLDER / "background", state_on((1, 2))).wait()
        said["background"] = True
    said["all again"] = round_trip((0, 1, 2), "all again")

    # What does not fit is refused at once, by each process for itself.
    said["outside"] = None
    if PROCESS == 2:
        abstract = {"w": jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=pair_sharding())}
        said["outside"] = error_of(lambda: checkpoint.restore(FOLDER / "0 1", abstract, extra="ignore"))
    said["too few"] = error_of(lambda: checkpoint.save(FOLDER / "x", state_on((0, 1, 2)), processes=[PROCESS]))
    said["unknown"] = error_of(lambda: checkpoint.save(FOLDER / "x", state_on((0, 1, 2)), processes=[0, 3]))
    said["orbax"] = error_of(
        lambda: checkpoint.save(FOLDER / "x", state_on((PROCESS,)), processes=[PROCESS], format="orbax")
    )
    said["twice"] = None
    if PROCESS in (0, 1):  # a failure of one is one of the group
        said["twice"] = error_of(lambda: checkpoint.save(FOLDER / "0 1", state_on((0, 1)), timeout_s=DEADLINE_S))
    if PROCESS == 0:  # the other does not come
        said["missing"] = error_of(lambda: checkpoint.save(FOLDER / "y", state_on((0, 1)), timeout_s=3.0))
    said["after all"] = round_trip((0, 1, 2), "after all")
    (FOLDER / f"{PROCESS}.json").write_text(json.dumps(said))


def pair_sharding():
    """A sharding over the processes 0 and 1."""
    devices = [device for device in jax.devices() if device.process_index < 2]
    return NamedSharding(jax.sharding.Mesh(np.array(devices), "fsdp"), PartitionSpec("fsdp"))


main()
