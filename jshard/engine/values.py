"""What one data shard holds of a value of the global program."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jshard.plans.placement import Placement

PARTIAL = "partial"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The state of a value that is stored as a parameter is: split over `fsdp`, and the same over `replica`.

    Args:
        placement: of the parameter.
        pieces: 0: a stored shard. Else one of so many pieces of a gathered parameter, shared by a group of neighbours.
    """

    placement: Placement
    pieces: int = 0


State = int | str | Shard | None
"""A dim: split along it. PARTIAL: the sum over the shards is the value. A `Shard`: stored as a parameter, and gathered
by whoever reads it. None: whole on every shard."""

Eqn = Any  # jax.extend.core.JaxprEqn


class MadeFrom(NamedTuple):
    """The equation that made a whole value from others that are known without data."""

    eqn: Eqn
    values: list["Value"]
    index: int


@dataclasses.dataclass(eq=False)
class Value:
    """A value on one shard.

    Args:
        x: the array that this shard holds.
        state: how the shards' arrays make up the value.
        source: how a shard of a whole value is made from its equation, instead of cut from the whole.
        done: the same value in other states, as far as it was converted.
        counted: of indices: `{column: dim}`, where `[..., column]` is the index along that dim, in global view.
        parameter: path of the parameter that it is, perhaps cast; empty for anything else, as a gradient.
    """

    x: Any
    state: State = None
    source: MadeFrom | None = None
    done: dict[State, "Value"] = dataclasses.field(default_factory=dict)
    counted: dict[int, int] = dataclasses.field(default_factory=dict)
    parameter: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.state, np.integer):
            self.state = int(self.state)

    @property
    def is_split(self) -> bool:
        """Whether each shard has a part of it."""
        return isinstance(self.state, int)

    @property
    def is_stored(self) -> bool:
        """Whether it is a stored shard."""
        return isinstance(self.state, Shard)

    @property
    def is_partial(self) -> bool:
        """Whether the sum over the shards is the value."""
        return self.state == PARTIAL

    @property
    def is_known(self) -> bool:
        """Whole, and known without data: masks, positions, random bits."""
        return self.source is not None and self.state is None

    @property
    def dim(self) -> int:
        """The dim that a split value is split along."""
        assert isinstance(self.state, int), f"the value is not split: {self.state}"
        return self.state

    @property
    def shard(self) -> Shard:
        """How a stored value is stored."""
        assert isinstance(self.state, Shard), f"the value is not stored: {self.state}"
        return self.state

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this shard holds."""
        return self.x.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.x.shape)

    @property
    def bytes(self) -> int:
        """Bytes of what this shard holds."""
        return array_bytes(self.x)

    def with_array(self, x: Any) -> "Value":
        """The same state of another array, without conversions and source."""
        return Value(x, self.state, counted=self.counted, parameter=self.parameter)


_HOW = {
    "whole": "gathered from all data shards",
    "made whole": "a constant that every device makes whole",
    "sum": "summed over the data shards",
    "max": "reduced over the data shards",
    "move": "exchanged between data shards",
}


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A collective that is neither a parameter's gather nor a gradient's reduction, or all that a line sends in a step.

    Args:
        kind: "whole": a split value gathered; "sum", "max": a reduction whose result is needed; "move": split along
            another dim; "made whole": a constant of which no shard can be made, so that it is cut from the whole.
        operation: the primitive that needs it; "output" for what the program returns.
        where: "file:line (function)" of the user's code; empty for what the model returns.
        times: how many collectives.
        bytes: of their results on one device, in all trips of the loops around.
    """

    kind: str
    operation: str
    where: str
    times: int
    bytes: int

    def repeated(self, trips: float) -> "Mixing":
        """The same, as a loop makes it."""
        return dataclasses.replace(self, bytes=round(self.bytes * trips))

    @property
    def how(self) -> str:
        """What is sent, in words."""
        return _HOW[self.kind]

    @property
    def line(self) -> str:
        """The line, or what stands for it."""
        return self.where or "results and state of the model"

    def __str__(self) -> str:
        return f"{self.line}: {self.operation}, {self.how}, {self.bytes:,} bytes per step"


@dataclasses.dataclass(frozen=True)
class LocalProduct:
    """One product of arrays, or all of a loop.

    Args:
        flops: of one device.
        is_whole: every device computes the same: no operand is split.
        where: "file:line (function)" of the user's code.
    """

    flops: float
    is_whole: bool
    where: str

    def repeated(self, trips: float) -> "LocalProduct":
        """The same, as a loop makes it."""
        return dataclasses.replace(self, flops=self.flops * trips)


def array_bytes(x: Any) -> int:
    """Bytes of an array or of its shape and dtype; a typed key counts as one word."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return math.prod(x.shape) * 4
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
