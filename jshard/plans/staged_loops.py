"""Loops over units on pipeline stages, as a trace has found them: what they gather, and what places send each other.

A plan is made from shapes, and cannot see the loops of a model. So a trace of its call leaves this with the plan; see
`jshard.engine.stages.records`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jshard.plans.stages import StageLayout, StageSchedule

FORWARD = "forward"
BACKWARD = "backward"

# When a parameter is gathered.
BY_ROUND = "round"
BY_TICK = "tick"

# What the purposes of all transfers of activations begin with.
ACTIVATIONS = "activations"

TO_ALL_PLACES = f"{ACTIVATIONS}, to all places"
TO_NEXT_PLACE = f"{ACTIVATIONS}, to the next place"
FROM_LAST_PLACE = f"{ACTIVATIONS}, from the last place"
TO_THEIR_STAGES = f"{ACTIVATIONS} of each layer, to its place"
OFF_THEIR_STAGES = f"{ACTIVATIONS} of each layer, from its place"


@dataclasses.dataclass(frozen=True)
class StagedParameter:
    """A parameter of which each layer of a loop has a row, or one of its own.

    Attributes:
        paths: of the parameter of each layer; or one path, of a stack of all layers.
        dtype: in which the places exchange it.
        gathered: when a place gathers it: `BY_ROUND`, or `BY_TICK`, once for each layer and microbatch.
    """

    paths: tuple[str, ...]
    dtype: str
    gathered: str


@dataclasses.dataclass(frozen=True)
class StagedGradient:
    """The gradient of such a parameter, which a place adds over its microbatches and reduces once.

    Attributes:
        paths: of its parameter, as in `StagedParameter`.
        dtype: in which it is added, and in which the places exchange it.
    """

    paths: tuple[str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class LoopOnStages:
    """A loop over units that ran on stages.

    Attributes:
        phase: `FORWARD`, or `BACKWARD` if it is in the program that computes gradients.
        units: names of the units whose parameters are gathered by round.
        schedule: which place runs which layer, and when.
        parameters: those that are gathered.
        gradients: those that are reduced.
        carry_bytes: of the carry of one microbatch, on one device.
        entering_bytes: of the arrays with the examples of all places that the loop begins with, on one device.
        times: how often it runs in a step.
    """

    phase: str
    units: tuple[str, ...]
    schedule: StageSchedule
    parameters: tuple[StagedParameter, ...]
    gradients: tuple[StagedGradient, ...]
    carry_bytes: int
    entering_bytes: int
    times: float = 1

    def repeated(self, trips: float) -> "LoopOnStages":
        """Returns the record multiplied by a loop's trips."""
        return dataclasses.replace(self, times=self.times * trips)


@dataclasses.dataclass(frozen=True)
class PlaceTransfer:
    """Activations that places along `pipe` send to each other.

    Attributes:
        kind: of the collective: `all-gather`, `all-to-all` or `collective-permute`.
        dtype: of the arrays.
        bytes: of the whole arrays in a step: the result of an all-gather, the array of one device of the others.
        purpose: what it is for: one of those in this module.
        phase: as in `LoopOnStages`.
    """

    kind: str
    dtype: str
    bytes: float
    purpose: str
    phase: str = FORWARD

    def repeated(self, trips: float) -> "PlaceTransfer":
        """Returns the record multiplied by a loop's trips."""
        return dataclasses.replace(self, bytes=self.bytes * trips)


@dataclasses.dataclass(frozen=True)
class TracedStages:
    """What the last traced calls of a model did on stages.

    Attributes:
        loops: its loops on stages.
        transfers: of activations, those in the loops included.
    """

    loops: tuple[LoopOnStages, ...] = ()
    transfers: tuple[PlaceTransfer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loops)

    @property
    def depths(self) -> list[int]:
        """How many layers a place has of each loop of forward."""
        return [loop.schedule.layout.layers_per_place for loop in self._forward]

    @property
    def num_layer_runs(self) -> int:
        """How often a place runs a layer in forward: each of its layers on each microbatch."""
        runs = [loop.schedule.layout.layers_per_place * loop.schedule.num_microbatches for loop in self._forward]
        return sum(runs)

    @property
    def _forward(self) -> list[LoopOnStages]:
        return [loop for loop in self.loops if loop.phase == FORWARD]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "TracedStages":
        """Returns what `dataclasses.asdict` has made a dict of."""
        loops = []
        for loop in fields["loops"]:
            schedule = {**loop["schedule"], "layout": StageLayout(**loop["schedule"]["layout"])}
            parameters = tuple(StagedParameter(**parameter) for parameter in loop["parameters"])
            gradients = tuple(StagedGradient(**gradient) for gradient in loop["gradients"])
            changed = {"schedule": StageSchedule(**schedule), "parameters": parameters, "gradients": gradients}
            loops.append(LoopOnStages(**{**loop, **changed}))
        return cls(tuple(loops), tuple(PlaceTransfer(**transfer) for transfer in fields["transfers"]))


NO_STAGES = TracedStages()
