"""Values on one data shard, and the states that say how the shards' arrays make up a value."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.typing import DTypeLike

from jshard.plans.placement import Placement
from jshard.plans.stages import StageLayout

PARTIAL = "partial"

ShardArray: TypeAlias = jax.Array | np.ndarray | ShapedArray | jax.ShapeDtypeStruct | None
"""What a shard holds of a value: an array; its type, or None, where only states matter."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The state of a value that is stored like a parameter: split over `fsdp`, and the same over `replica`.

    Attributes:
        placement: how it is stored.
        pieces: 0 for a stored shard; else the number of pieces into which a group of neighbours cuts a gathered
            parameter.
    """

    placement: Placement
    pieces: int = 0


@dataclasses.dataclass(frozen=True)
class Staged:
    """The state of a stack that has a row for each layer of a loop, where places along `pipe` have rows of their own.

    The array of a place has its rows in the order of rounds. The rows of a layer are split along the other data axes.

    Attributes:
        layout: which layers are on which place.
        row_dim: the dim along which a row is split; None if it is whole.
    """

    layout: StageLayout
    row_dim: int | None


State = int | str | Shard | Staged | None
"""How the shards' arrays make up a value:

    a dim      each shard has the part of the value along that dim that has its number
    PARTIAL    the value is the sum over the shards
    a Shard    it is stored like a parameter, and gathered by its reader
    a Staged   a stack that is dealt to the stages of a pipeline
    None       whole: every shard has all of it
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Provenance:
    """Where a value that is known without data comes from.

    Attributes:
        eqn: the equation that computes it.
        operands: the values that the equation took, whole as well.
        index: which of the equation's results it is.
    """

    eqn: JaxprEqn
    operands: list["Value"]
    index: int

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        return self.eqn.primitive.name


# Compared by identity: values are keys of what was gathered, planned or is pending, and their arrays are tracers, which
# cannot be compared. Mutable: where a barrier orders an array that the program already holds, all of its readers must
# see the one behind the barrier.
@dataclasses.dataclass(eq=False)
class Value:
    """A value on one shard: the array that the shard holds, and how the shards' arrays make up the value.

    Attributes:
        x: the array; a type where nothing reads it, or where the array is yet to be reduced.
        state: how the shards' arrays make up the value.
        provenance: of a whole value that is known without data, how it is computed. A shard of it is computed in the
            same way, instead of cut from the whole.
        conversions: the value in the other states that it was converted to, so that no collective runs twice.
        index_dims: of the indices of a gather, which columns count up: `{column: dim}` says that `[..., column]` is
            the index along that dim, in global view. A shard of such indices stays within the same shard of a table.
        parameter: path of the parameter that it is, perhaps cast; empty for anything else, such as a gradient.
        row_parameters: of a stack of parameters, the path of each row; `parameter` is then that of the first.
        widened_from: of an array that was cast to a wider dtype, the narrower one, in which all its elements are exact.
    """

    x: Any  # a `ShardArray`; not declared so, as most of its readers know that it is an array
    state: State = None
    provenance: Provenance | None = None
    conversions: dict[State, "Value"] = dataclasses.field(default_factory=dict)
    index_dims: dict[int, int] = dataclasses.field(default_factory=dict)
    parameter: str = ""
    row_parameters: tuple[str, ...] = ()
    widened_from: np.dtype | None = None

    def __post_init__(self) -> None:
        # Dims computed with numpy would fail `isinstance(state, int)`, and the value would count as whole.
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
    def is_staged(self) -> bool:
        """Whether it is a stack that is dealt to the stages of a pipeline."""
        return isinstance(self.state, Staged)

    @property
    def is_partial(self) -> bool:
        """Whether the sum over the shards is the value."""
        return self.state == PARTIAL

    @property
    def is_data_free(self) -> bool:
        """Whether it is whole, and known without data: a mask, positions, random bits."""
        return self.provenance is not None and self.state is None

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
    def staged(self) -> Staged:
        """How a stack is dealt to stages."""
        assert isinstance(self.state, Staged), f"the value is not on stages: {self.state}"
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

    @property
    def narrowest_dtype(self) -> np.dtype:
        """The narrowest dtype that is known to have all elements of the array: to send them in it rounds none."""
        return self.x.dtype if self.widened_from is None else self.widened_from

    def in_dtype(self, dtype: DTypeLike) -> "Value":
        """Returns the value cast; a wider one remembers the narrower."""
        result = self.with_array(self.x.astype(dtype))
        result.remember_narrower(self)
        return result

    def remember_narrower(self, before: "Value") -> None:
        """Notes the dtype of the value that it was cast from, if that is a narrower float: no element was rounded."""
        is_float = jnp.issubdtype(before.x.dtype, jnp.floating)
        if is_float and before.x.dtype.itemsize < self.x.dtype.itemsize:
            self.widened_from = before.narrowest_dtype

    def move_behind_barrier(self, x: ShardArray) -> None:
        """Takes the value's array from behind a barrier: whatever reads the value later depends on the barrier."""
        self.x = x
        self.conversions.clear()  # they are of the array before the barrier

    def with_array(self, x: ShardArray) -> "Value":
        """Returns another array in the same state, without conversions and provenance."""
        # Those are of the old array: its equation does not compute the new one.
        return Value(
            x,
            self.state,
            index_dims=self.index_dims,
            parameter=self.parameter,
            row_parameters=self.row_parameters,
        )


def arrays_of(values: Iterable[Value]) -> list[jax.Array]:
    """Returns the arrays that a shard holds."""
    return [v.x for v in values]


def states_of(values: Iterable[Value]) -> list[State]:
    """Returns the states of values."""
    return [v.state for v in values]


def in_states(xs: Sequence[jax.Array], states: Sequence[State]) -> list[Value]:
    """Returns values of arrays, each in its state."""
    return [Value(x, state) for x, state in zip(xs, states, strict=True)]


def any_is_stored(values: Iterable[Value]) -> bool:
    """Returns whether there is a stored shard among values."""
    return any(v.is_stored for v in values)


def have_same_state(values: Iterable[Value]) -> bool:
    """Returns whether all values have one state; true of no values."""
    return len(set(states_of(values))) <= 1


def with_arrays(values: Sequence[Value], xs: Sequence[jax.Array]) -> list[Value]:
    """Returns the same states of other arrays: see `Value.with_array`."""
    return [v.with_array(x) for v, x in zip(values, xs, strict=True)]


def array_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array, or of its shape and dtype. A typed key counts as one word."""
    # By shape and dtype, not by `x.nbytes`: a type has no such attribute.
    num_elements = math.prod(x.shape)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # no dtype of NumPy's
        return num_elements * 4
    return num_elements * np.dtype(x.dtype).itemsize


def variables_of(atoms: Iterable[Var | Literal]) -> list[Var]:
    """Returns those of an equation's operands, or of a program's results, that are variables.

    Literals cannot be hashed: a set or a dict of operands takes the variables alone.
    """
    return [atom for atom in atoms if isinstance(atom, Var)]


def count_uses(jaxpr: Jaxpr) -> collections.Counter[Var]:
    """Returns how often each variable of a program is an operand, or a result of the program."""
    num_uses = collections.Counter(variables_of(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        num_uses.update(variables_of(eqn.invars))
    return num_uses


def used_once_as_result(jaxpr: Jaxpr) -> set[Var]:
    """Returns the variables of a program that are one of its results, and read by nothing else."""
    read: set[Var] = set()
    for eqn in jaxpr.eqns:
        read.update(variables_of(eqn.invars))
    num_results = collections.Counter(variables_of(jaxpr.outvars))
    returned_once = {variable for variable, count in num_results.items() if count == 1}
    return returned_once - read


def type_of(atom: Var | Literal) -> ShapedArray:
    """Returns the type of an operand or a result of an equation. Its shape is that in global view."""
    return cast(ShapedArray, atom.aval)
