"""One of several processes that save, restore and verify, and say how often they met.

python meetings_worker.py PROCESS NUM PORT FOLDER

What a process has to say goes to FOLDER/PROCESS.json: of each operation, its meetings, and the number of all barriers
and waits at the service, whichever library called them.
"""

import json
import random
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard import checkpoint
from jshard._compat import coordinator
from jshard._compat.private_names import DISTRIBUTED_CLIENT
from jshard._processes import exchange, record_meetings

PROCESS, NUM, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])


class CountingClient:
    """The client of the service, which counts what waits for other processes, and the main thread's requests."""

    def __init__(self, client):
        self._client = client
        self.num_waits = 0
        self.num_of_main_thread = 0

    def __getattr__(self, name):
        if name in ("wait_at_barrier", "blocking_key_value_get", "blocking_key_value_get_bytes"):
            self.num_waits += 1
        if threading.current_thread() is threading.main_thread():
            self.num_of_main_thread += 1
        return getattr(self._client, name)


def state():
    sharding = NamedSharding(js.mesh(), PartitionSpec("fsdp"))
    values = np.arange(8.0 * 64, dtype=np.float32).reshape(8, 64)
    sharded = jax.make_array_from_callback(values.shape, sharding, lambda box: values[box])
    return {"sharded": sharded, "host": np.arange(4), "step": 7}


def counted(client, operation):
    """The meetings of an operation, and what other waits it has."""
    num_before = client.num_waits
    num_requests_before = client.num_of_main_thread
    with record_meetings() as meetings:
        operation()
    topics = [meeting.topic.split(" ")[0] for meeting in meetings]
    return {
        "meetings": topics,
        "blocking": [meeting.is_in_main_thread for meeting in meetings],
        "requests of the main thread": client.num_of_main_thread - num_requests_before,
        "other waits": client.num_waits - num_before - len(meetings),
    }


def measured(client, folder):
    """Every operation once."""
    live = state()
    series = checkpoint.Checkpointer(folder / "series")
    said = {}
    said["save"] = counted(client, lambda: checkpoint.save(folder / "one", live))
    said["asynchronous save"] = counted(client, lambda: checkpoint.save_async(folder / "two", live).wait())
    said["restore"] = counted(client, lambda: checkpoint.restore(folder / "one", live))
    said["first save of a series"] = counted(client, lambda: series.save(1, live))
    said["next save of a series"] = counted(client, lambda: series.save(2, live))
    said["latest of a series"] = counted(client, series.agreed_latest)
    said["restore of a series"] = counted(client, lambda: series.restore(live))
    said["verify"] = counted(client, lambda: checkpoint.verify(folder / "one"))
    said["save in Orbax's form"] = counted(client, lambda: checkpoint.save(folder / "zarr", live, format="orbax"))
    return said


def all_differ():
    """Whether exchanges of one topic return the values of their own round, to slow processes too."""
    pauses = random.Random(PROCESS)
    for number in range(50):
        if pauses.random() < 0.3:
            time.sleep(0.01 * pauses.random())
        values = exchange("numbers", [PROCESS, number])
        if values != [[process, number] for process in range(NUM)]:
            return False
    return True


def left_at_service():
    """What the processes have left to one another, once it has not gone for a while."""
    until = time.monotonic() + 100
    while True:
        keys = [key for key, _ in coordinator().key_value_dir_get("jshard/")]
        # The others may be on their way out of the last meeting.
        if not keys or time.monotonic() > until:
            return keys
        time.sleep(0.01)


def main():
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"localhost:{PORT}", NUM, PROCESS)
    jax.devices()  # they need the client itself
    client = CountingClient(coordinator())
    DISTRIBUTED_CLIENT.replace(client)
    measured(client, FOLDER / "first")  # JAX itself meets when it runs something for the first time
    said = {"operations": measured(client, FOLDER / "second")}
    said["right rounds"] = all_differ()
    said["left"] = left_at_service()
    (FOLDER / f"{PROCESS}.json").write_text(json.dumps(said))
    jax.distributed.shutdown()


main()
