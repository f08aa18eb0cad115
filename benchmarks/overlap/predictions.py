"""What the model says of the grid before it is measured, by both rules of placement, and whether it came so."""

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
    """A claim about settings of one form.

    Attributes:
        name: P1 to P4.
        form: how the form begins.
        blocks_per_sm: of the settings; 0 for the kernel as it is.
        reserved: whether multiprocessors are left for all of the load's blocks.
        priorities: of the load.
    """

    name: str
    form: str
    blocks_per_sm: int = 0
    reserved: bool = False
    priorities: tuple[str, ...] = ("default", "high")

    def is_about(self, row: Row) -> bool:
        """Whether a row is one of its settings."""
        if not row.form.startswith(self.form) or row.mode == "sequential" or priority_of(row) not in self.priorities:
            return False
        if self.reserved:
            return row.reserved_sms > 0 and row.drain_even == row.drain_pooled == "0"
        return row.blocks_per_sm == self.blocks_per_sm if self.blocks_per_sm else not row.is_shaped


PREDICTIONS = (
    Prediction(name="P1", form="persistent"),
    Prediction(name="P2", form="persistent", reserved=True),
    Prediction(name="P3a", form="tiled 64x64", priorities=("default",)),
    Prediction(name="P3b", form="tiled 64x64", blocks_per_sm=2),
    Prediction(name="P3c", form="tiled 64x64", blocks_per_sm=1),
    Prediction(name="P4", form="tiled 64x128", priorities=("high",)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A prediction beside a row.

    Attributes:
        name: of the prediction.
        row: what was measured.
        even: the bounds by the rule "even".
        pooled: by the rule "pooled".
    """

    name: str
    row: Row
    even: tuple[float, float] | None
    pooled: tuple[float, float] | None


def bounds(drain: str, priority: str) -> tuple[float, float] | None:
    """The ratio that the model expects of a load of half the product's time."""
    if drain == "0" or (drain == "1" and priority == "high"):
        return 0, HIDES
    if drain == "1":
        return STARVES, _MOST
    if drain == "kernel" or (drain.isdecimal() and priority == "default"):
        return _SERIAL, _MOST
    return None


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Every prediction beside what was measured of it, with a load of half the product's time."""
    return [
        Outcome(
            name=claim.name,
            row=row,
            even=bounds(row.drain_even, priority_of(row)),
            pooled=bounds(row.drain_pooled, priority_of(row)),
        )
        for claim in PREDICTIONS
        for row in rows
        if row.load.endswith("half") and claim.is_about(row)
    ]


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


def holds(ratio: float, wanted: tuple[float, float] | None) -> str:
    """Whether a ratio is as predicted, in a word."""
    return "-" if wanted is None else "yes" if wanted[0] <= ratio <= wanted[1] else "no"


def said(wanted: tuple[float, float] | None) -> str:
    """Bounds in words."""
    if wanted is None:
        return "open"
    low, most = wanted
    return f">= {low}" if low else f"<= {most}"


def priority_of(row: Row) -> str:
    """Of the load's stream."""
    return "high" if row.mode.endswith("priority") else "default"
