"""The parts, by how much they answer: each has a module with `measure(work)` and `table(figures)`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Protocol, cast

from benchmarks.first_gpu.worker import Figures, Work


class PartModule(Protocol):
    """A module of a part."""

    measure: Callable[[Work], None]
    """Measures, and keeps each figure as soon as it has it."""
    table: Callable[[Figures], list[str]]
    """Returns the lines of the report, of whatever figures there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Something to measure in a process of its own."""

    module: str
    title: str  # of its section in the report
    weight: int  # its share of the time, in comparison with the parts that follow

    def load(self) -> PartModule:
        """Returns the module."""
        return cast(PartModule, importlib.import_module(self.module))


CARD = "card"  # always first: without a GPU the others are not begun

PARTS = {
    CARD: Part(module="benchmarks.first_gpu.card", title="The card", weight=1),
    "step": Part(module="benchmarks.first_gpu.step", title="A training step beside raw Flax", weight=5),
    "plan": Part(module="benchmarks.first_gpu.plan", title="The plan beside the step", weight=4),
    "kernels": Part(module="benchmarks.first_gpu.kernels", title="Kernels", weight=4),
    "train": Part(module="benchmarks.first_gpu.train", title="A run that is killed and resumed", weight=3),
    "overlap": Part(module="benchmarks.first_gpu.overlap", title="Kernels beside a collective", weight=3),
}
"""In the order in which they run. A part has its weight's share of what is left, so later ones get unused time."""


def shares(names: list[str], left_s: float) -> float:
    """Returns the seconds of the first of these parts, when so many seconds are left for all of them."""
    weights = [PARTS[name].weight for name in names]
    return left_s * weights[0] / sum(weights)
