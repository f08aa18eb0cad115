"""The place of a process among those of a run, how long they wait for each other, and the exit codes of a run."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping

from jshard.errors import ShardingError

TICK_S = 0.1
"""The interval at which a supervisor checks its workers and peers."""
REQUEST = 2
"""Exit code of a run that refused the request: the same command would be refused again."""
RESUME = 75
"""Exit code of a run that stopped, or lost a peer: the same command with --resume continues the run. (EX_TEMPFAIL.)"""
GOOD = (0, 128 + signal.SIGINT, RESUME)
"""Exit codes of a worker that did its work, or stopped because it was asked to."""


def stopped_code(signum: int) -> int:
    """Returns the exit code of a run that a signal has stopped: 130 after Ctrl-C, else that of one to be resumed."""
    if signum == signal.SIGINT:
        return 128 + signum
    return RESUME


def is_worker(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process was started by a supervisor."""
    return environ.get("JSHARD_WORKER") == "1"


def check_seconds(option: str, seconds: float, *, usual: float) -> None:
    """Refuses a time-out that is not a positive number of seconds."""
    if not 0 < seconds < 1e7:  # not `<= 0`: this refuses NaN, too
        raise ShardingError(
            "The time-out is not a positive number of seconds.",
            where=f"{option} {seconds}",
            why="it is how long a run waits before it ends, and not for ever.",
            do=f"{option} {usual:.0f}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the processes of a run wait for each other.

    A process that ends is reported within `settle_s` plus one second, in a cluster `settle_s` plus four; one that is
    frozen, or whose machine is gone, within `peer_s` more. The others are stopped `grace_s` after the report, or at
    once if they only wait for it.

    Args:
        init_s: from the start of the first process until all have come, and then until each worker is up.
        peer_s: a process without a sign of life for this long is lost.
        grace_s: how long the others have to end by themselves after one is lost.
        settle_s: how long to wait for other failures after one: a process that dies brings down its peers within
            milliseconds, and the report must name the first.
    """

    init_s: float = 300.0
    peer_s: float = 60.0
    grace_s: float = 5.0
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        check_seconds("--init-timeout", self.init_s, usual=Deadlines.init_s)
        check_seconds("--peer-timeout", self.peer_s, usual=Deadlines.peer_s)

    @property
    def beat_s(self) -> float:
        """Returns the interval between two signs of life."""
        # Several fit into the limit: a late one is no loss yet.
        return min(2.0, self.peer_s / 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The place of this process among those of a run.

    Args:
        kind: its source: "jax variables", "slurm", "torchrun" and others of `launchers`; "local" for
            processes that jshard starts on one machine.
        coordinator: "host:port" of JAX's service in process 0.
        num_processes: two or more.
        process_id: from 0.
        variables: the environment variables that were read, for reports.
        local_id: from 0, among the processes that the launcher started on this machine; None if unknown.
        local_size: the number of these processes.
    """

    kind: str
    coordinator: str
    num_processes: int
    process_id: int
    variables: Mapping[str, str]
    local_id: int | None = None
    local_size: int | None = None

    @property
    def host(self) -> str:
        """Returns the machine of process 0."""
        # The brackets of an IPv6 address are no part of it.
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def is_local(self) -> bool:
        """Returns whether only processes of this machine can take part."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def port(self) -> int:
        """Returns the port of JAX's service."""
        return int(self.coordinator.rpartition(":")[2])

    def seen(self) -> list[str]:
        """Returns the variables as lines of NAME=value."""
        return [f"{name}={value}" for name, value in self.variables.items()]
