"""What the model says of the grid before it is measured, and whether it came so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.overlap.conclusion import HIDES, STARVES, baseline_of
from benchmarks.overlap.records import Row

_SERIAL = 0.95
_MOST = 9.0  # more than any ratio
KILL_RULE = (
    f"Kill rule: if the 64x64 kernel as it is, whose drain is the largest, has a ratio of at most {HIDES} with a higher"
    " priority alone, the GPU keeps slots back for it, and padding is needless: reserved SMs and the latency statement"
    " are what helps. Any kernel over 1.15 times XLA's dot alone is dropped: no overlap repays it."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A claim about settings of one form."""

    name: str  # P1 to P4
    form: str  # how the form begins
    blocks_per_sm: int = 0  # of the settings; 0 for the kernel as it is
    reserved: bool = False  # whether multiprocessors are left for all of the load's blocks
    priorities: tuple[str, ...] = ("default", "high")  # of the load

    def is_about(self, row: Row) -> bool:
        """Whether a row is one of its settings."""
        if not row.form.startswith(self.form) or row.mode == "sequential" or priority_of(row) not in self.priorities:
            return False
        if self.reserved:
            return row.reserved_sms > 0 and row.drain == "0"
        return row.blocks_per_sm == self.blocks_per_sm if self.blocks_per_sm else not row.is_shaped


PREDICTIONS = (
    Prediction(name="P1", form="persistent"),
    Prediction(name="P2", form="persistent", reserved=True),
    Prediction(name="P3a", form="tiled 64x64", priorities=("default",)),
    Prediction(name="P3b", form="tiled 64x64", blocks_per_sm=2),
    Prediction(name="P3c", form="tiled 64x64", blocks_per_sm=1),
    Prediction(name="P4", form="tiled 64x128", priorities=("high",)),
)


def outcomes(rows: Sequence[Row]) -> list[tuple[Prediction, Row]]:
    """Every prediction beside what was measured of it, with a load of half the product's time."""
    half = [row for row in rows if row.load.endswith("half")]
    return [(claim, row) for claim in PREDICTIONS for row in half if claim.is_about(row)]


def bounds(row: Row) -> tuple[float, float] | None:
    """The ratio that the model expects of a row; None where it claims nothing."""
    drain, high = row.drain, priority_of(row) == "high"
    if drain == "0" or (drain == "1" and high):
        return 0, HIDES
    if drain == "1":
        return STARVES, _MOST
    return (_SERIAL, _MOST) if drain == "kernel" or (drain.isdecimal() and not high) else None


def longer_alone(row: Row, rows: Sequence[Row], num_sms: int) -> str:
    """What P2 says of the product alone: with fewer multiprocessors it takes as much longer as there are fewer."""
    base = baseline_of(row, rows)
    if base is None:
        return ""
    left = num_sms - row.reserved_sms
    return (
        f"P2, {row.size}: with {row.reserved_sms} SMs reserved the product alone takes"
        f" {row.comp_ms / base.comp_ms:.3f} times as long; predicted is {num_sms} / {left} = {num_sms / left:.3f}."
    )


def priority_of(row: Row) -> str:
    """Of the load's stream."""
    return "high" if row.mode.endswith("priority") else "default"
