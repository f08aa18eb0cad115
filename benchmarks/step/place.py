"""Where the processes of a session are: all on this machine, or one in each task of a cluster's launcher."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping

from jshard.launch import detect

_FIRST_PORT = 23456


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The processes that this session starts, of those that train together.

    Attributes:
        processes: that train together.
        mine: those that are started here.
        first_position: of the first of them among all processes of this machine; each has the GPU of its position.
        host: of process 0.
        first_port: ports from here on are taken, one for each start of a candidate; None: any free one.
    """

    processes: int
    mine: tuple[int, ...]
    first_position: int = 0
    host: str = "localhost"
    first_port: int | None = None

    def address(self, number: int) -> str:
        """Where the processes of the start of this number meet; every session of a cluster says the same."""
        if self.first_port is not None:
            return f"{self.host}:{self.first_port + number}"
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return f"{self.host}:{free.getsockname()[1]}"


def place_of(processes: int | None, environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this session: of so many processes here, or of one, as the variables of a launcher or of JAX say."""
    cluster = detect(environ) if processes is None else None
    if cluster is None:
        count = processes or 1
        return Place(processes=count, mine=tuple(range(count)))
    return Place(
        processes=cluster.num_processes,
        mine=(cluster.process_id,),
        first_position=cluster.local_id or 0,
        host=cluster.host,
        first_port=int(environ.get("BENCHMARK_PORT", _FIRST_PORT)),
    )
