"""Every wait of a run in several processes, in one place."""

from __future__ import annotations

import dataclasses

from jshard._errors import ShardingError

TICK_S = 0.1
"""A supervisor looks at its workers and peers this often."""
HOLD_S = 1.0
"""What process 0 writes to stderr is passed on this much later: it may turn out to be the echo of a lost peer."""
REPEAT_S = 1.0
"""Signals closer together than this are one: launchers and terminals often send the same one twice."""
VERDICT_S = 3.0
"""A supervisor gives process 0's this long to name the lost process, before it names the one that it knows of."""
GOODBYE_S = 2.0
"""A connection that is closed waits this long for the other side to have read its last message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the processes of a run wait for each other.

    A process that ends is reported within `settle_s` and a second, in a cluster within `settle_s` and four; one that
    is frozen, or whose machine is gone, within `peer_s` more. The others are stopped `grace_s` after the report.

    Args:
        init_s: from the start of the first process until all have come, and then until each worker is up.
        peer_s: a process without a sign of life for so long is lost.
        grace_s: what the others have, to end by themselves, after one is lost.
        settle_s: after a process ends badly, how long to hear of others: one that dies takes its peers along within
            milliseconds, and the report shall name the first.
    """

    init_s: float = 300.0
    peer_s: float = 60.0
    grace_s: float = 5.0
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        for name, option in (("init_s", "--init-timeout"), ("peer_s", "--peer-timeout")):
            # Not `<= 0`: a NaN is refused as well.
            if not 0 < getattr(self, name) < 1e7:
                raise ShardingError(
                    "The time-out is not a positive number of seconds.",
                    where=f"{option} {getattr(self, name)}",
                    why="a process waits some time for its peers, and not for ever.",
                    do=f"{option} {getattr(Deadlines, name):.0f}",
                )

    @property
    def beat_s(self) -> float:
        """Time between two signs of life."""
        return min(2.0, self.peer_s / 4)
