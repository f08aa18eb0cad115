"""A figure under the stated assumptions, and with all unknowns at their best or worst."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jshard._types import Json


@dataclasses.dataclass(frozen=True)
class Cases:
    """A figure as stated, and its range."""

    stated: float
    best: float
    worst: float

    @classmethod
    def of(cls, value_of: Callable[..., float], *figures: Cases) -> Cases:
        """Returns a figure that is computed from others, case by case."""
        return cls(
            stated=value_of(*(figure.stated for figure in figures)),
            best=value_of(*(figure.best for figure in figures)),
            worst=value_of(*(figure.worst for figure in figures)),
        )

    def text(self, written: Callable[[float], str]) -> str:
        """Returns the stated value with its range; alone if the range is none.

        Args:
            written: writes a value.
        """
        low, high = sorted((self.best, self.worst))
        ends = {written(low), written(high)}
        if len(ends) == 1:
            return written(self.stated)
        return f"{written(self.stated)} ({written(low)} to {written(high)})"

    def to_dict(self) -> dict[str, Json]:
        """Returns the values for JSON; None for one that is not finite."""
        values = dataclasses.asdict(self)
        return {name: value if math.isfinite(value) else None for name, value in values.items()}
