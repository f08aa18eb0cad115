"""Starts the workers of this machine, each with the environment that tells it its place."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from jshard._errors import RunError
from jshard.train.launch.cluster import Cluster
from jshard.train.launch.deadlines import Deadlines
from jshard.train.launch.devices import local_device_ids
from jshard.train.launch.worker_process import WorkerProcess


def start_local(command: Sequence[str], number: int, deadlines: Deadlines) -> list[WorkerProcess]:
    """Starts all workers of a run on this machine; they meet at a free port of 127.0.0.1.

    Raises:
        RunError: the system starts no more processes.
        ShardingError: the machine's GPUs cannot be shared out.
    """
    devices = local_device_ids(number)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers: list[WorkerProcess] = []
    try:
        for process, ids in enumerate(devices):
            place = Cluster(kind="local", coordinator=address, num_processes=number, process_id=process, variables={})
            # A run on one machine needs nothing that is open to the network.
            extra = {"JAX_COORDINATOR_BIND_ADDRESS": address} | ({} if ids is None else {"JAX_LOCAL_DEVICE_IDS": ids})
            workers.append(_start(command, place, deadlines, extra=extra, has_stdout=process == 0))
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def start_in_cluster(command: Sequence[str], cluster: Cluster, deadlines: Deadlines) -> list[WorkerProcess]:
    """Starts the one worker that has this process's place in the cluster.

    Raises:
        RunError: the system starts no more processes.
    """
    return [_start(command, cluster, deadlines, extra={}, has_stdout=True)]


def debug() -> bool:
    """Whether JSHARD_DEBUG asks for all that the workers write."""
    return os.environ.get("JSHARD_DEBUG", "") not in ("", "0")


def _start(
    command: Sequence[str], place: Cluster, deadlines: Deadlines, *, extra: Mapping[str, str], has_stdout: bool
) -> WorkerProcess:
    environ = {
        **os.environ,
        "JSHARD_WORKER": "1",
        "JSHARD_CLUSTER": place.kind,
        "JSHARD_INIT_TIMEOUT": str(deadlines.init_s),
        "JSHARD_PEER_TIMEOUT": str(deadlines.peer_s),
        "JAX_COORDINATOR_ADDRESS": place.coordinator,
        "JAX_NUM_PROCESSES": str(place.num_processes),
        "JAX_PROCESS_ID": str(place.process_id),
        **extra,
    }
    try:
        return WorkerProcess(
            command,
            process_id=place.process_id,
            environ=environ,
            has_stdout=has_stdout,
            live=place.process_id == 0 or (debug() and place.kind != "local"),
            deadlines=deadlines,
        )
    except OSError as error:
        raise RunError(
            f"Worker {place.process_id} could not be started.",
            where=f"{command[0]} on {socket.gethostname()}",
            why=str(error),
            do="see `ulimit -u` and the free memory of the machine, or start fewer: --processes 2",
        ) from error
