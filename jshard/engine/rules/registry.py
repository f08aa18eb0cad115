"""The registry: one record for each primitive, with all that the engine knows of it.

`docs/adding_a_rule.md` adds a primitive, step by step.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import jax
from jax.extend.core import JaxprEqn

from jshard.engine.rules.values import Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner
else:  # the partitioner imports the registry
    Partitioner = object

Rule = Callable[[Partitioner, JaxprEqn, list[Value]], list[Value] | None]
"""Runs an equation on a shard's operands. Returns its results, each in a state, or None if a shard cannot compute its
part alone: then the operands are gathered, and every device computes the equation whole."""

RuleFunction = TypeVar("RuleFunction", bound=Rule)

OperandDims = Callable[[Partitioner, JaxprEqn, Sequence[Value], int], Sequence[int | None] | None]
"""For a result that is to be split along a dim: returns the dim along which each operand is split, or None where it is
whole. None instead of a sequence: such a result cannot be computed from split operands."""

ComputeShard = Callable[[Partitioner, Value, int], jax.Array | None]
"""Returns this shard's part, along a dim, of a value that is known without data; None if it cannot be computed."""

IndexDim = Callable[[JaxprEqn, Sequence[Value]], int | None]
"""Returns the dim whose index a result is at each position, or None."""


class OperandStates(enum.Enum):
    """The states in which a rule takes its operands; the partitioner converts them before it calls the rule.

    Stored operands are gathered, except for `ANY_OR_STORED`. The last two kinds of rules are called in any case, and
    always return results; the first two only if an operand is split.
    """

    WHOLE_OR_SPLIT = enum.auto()
    """Partial operands are summed before. So a rule that reads their arrays is right without a thought of sums."""

    PARTIAL_BESIDE_SPLIT = enum.auto()
    """Partial operands are passed. The rule reads operands by `p.whole` and `p.split` alone, and they take the sum: by
    a reduce-scatter, where a shard needs its part only."""

    ANY = enum.auto()
    """Whole, split or partial."""

    ANY_OR_STORED = enum.auto()
    """Also stored shards, which the rule passes on unread."""

    @property
    def is_always_called(self) -> bool:
        """Whether the rule is called even if no operand is split."""
        return self in (OperandStates.ANY, OperandStates.ANY_OR_STORED)


@dataclasses.dataclass(frozen=True)
class Linear:
    """In which operands a primitive is linear: those may be partial, and then its result is.

    A wrong entry is silent: the sum over the shards of f(x_i) would be taken for f of the sum. So an entry needs a
    proof that f(x + y) = f(x) + f(y) for all x and y, with the other operands whole (the same on every shard):

    * Floating-point numbers are treated as real numbers: rounding differs as between any two orders of a sum. Where one
      device has an infinity, the sum may have NaN.
    * Integers are treated modulo 2**bits, because their sums also wrap on one device. A conversion to fewer bits keeps
      that; one to more bits, to floating point or to bool does not. `linear.py` examines the dtypes of all of them.
    * A constant term is not linear: a `gather` that fills out-of-bounds elements is linear for a fill of 0 or NaN only.

    Attributes:
        operands: positions of the operands. All others (indices, a predicate) must be whole.
        is_joint: whether it is linear in these operands together, like a sum: f(x + x', y + y') = f(x, y) + f(x', y').
            Whole ones among them are made partial. Otherwise it is linear in each alone, like a product: exactly one is
            partial.
        condition: whether an equation of the primitive is linear at all, which may depend on its parameters and types.
    """

    operands: slice
    is_joint: bool = True
    condition: Callable[[JaxprEqn], bool] | None = None

    def positions(self, num_operands: int) -> range:
        """Returns the positions of the operands in which an equation with so many is linear."""
        return range(num_operands)[self.operands]


IN_ALL = Linear(slice(None))
"""Each element of the result is an element of the operands, or a sum of elements, or of their parts, with signs."""

IN_FIRST = Linear(slice(1))
"""The others, such as indices, are whole."""

IN_EITHER = Linear(slice(2), is_joint=False)
"""Products."""


@dataclasses.dataclass(frozen=True)
class DataFree:
    """How a shard of a result is computed where the whole is known without data, like masks, positions, random bits.

    So no device computes anything as large as the global batch. A missing entry makes a model slow, and not wrong: the
    value is computed whole on each device.

    Attributes:
        operand_dims: the result is known if an operand is. The dims along which the operands are split for a split of
            the result; it is the inverse of the rule, which is then applied to the split operands.
        compute_shard: of a source: its result is known in any case, or is needlessly large.
        is_costly: whether a shard of the result is worth keeping; it is computed again where that is cheap.
    """

    operand_dims: OperandDims | None = None
    compute_shard: ComputeShard | None = None
    is_costly: bool = False

    @property
    def is_source(self) -> bool:
        """Whether the result is known even if no operand is."""
        return self.compute_shard is not None


@dataclasses.dataclass(frozen=True)
class PrimitiveRecord:
    """All that the engine knows of one primitive. An absent fact makes a model slow, never wrong.

    Attributes:
        rule: runs its equations on a shard. None: they are computed whole, from gathered operands.
        operand_states: in which states the rule takes its operands.
        linear: in which operands it is linear. None: partial operands are summed before, unless the rule takes them.
        data_free: how a shard of a result is computed that is known without data. None: no result counts as known.
        index_dim: which dim's index a result is. None: no result counts as an index.
        is_elementwise: whether each element of the result is computed from the elements at its position.
        resizes_batch: whether a split dim of its result is a batch dim of another size, merged with a dim or divided.
            Constants with a dim of that size are kept as shards from there on: see `Partitioner.batch_sizes`.
    """

    rule: Rule | None = None
    operand_states: OperandStates = OperandStates.WHOLE_OR_SPLIT
    linear: Linear | None = None
    data_free: DataFree | None = None
    index_dim: IndexDim | None = None
    is_elementwise: bool = False
    resizes_batch: bool = False


# Filled while the modules of rules are imported, which the partitioner does; a user's rule may be entered later.
PRIMITIVES: dict[str, PrimitiveRecord] = {}
"""The record of each primitive, by name. `jshard.engine.partitioner` imports all rules: it is incomplete before."""

_UNKNOWN = PrimitiveRecord()  # without any fact: computed whole, which is right for every primitive


def record_of(eqn: JaxprEqn) -> PrimitiveRecord:
    """Returns the record of an equation's primitive; an empty one if nothing is known of it."""
    return PRIMITIVES.get(eqn.primitive.name, _UNKNOWN)


def rule(
    *names: str,
    operands: OperandStates = OperandStates.WHOLE_OR_SPLIT,
    linear: Linear | None = None,
    is_elementwise: bool = False,
    resizes_batch: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Enters a function as the rule of primitives. The arguments are facts of all of them: see `PrimitiveRecord`."""

    def enter(function: RuleFunction) -> RuleFunction:
        _enter(
            names,
            rule=function,
            operand_states=operands,
            linear=linear,
            is_elementwise=is_elementwise,
            resizes_batch=resizes_batch,
        )
        return function

    return enter


def inverse_rule(*names: str, is_costly: bool = False) -> Callable[[OperandDims], OperandDims]:
    """Enters the inverse of a rule, for operands that are known without data: see `DataFree.operand_dims`."""

    def enter(operand_dims: OperandDims) -> OperandDims:
        _enter(names, data_free=DataFree(operand_dims=operand_dims, is_costly=is_costly))
        return operand_dims

    return enter


def data_free_source(*names: str, is_costly: bool = False) -> Callable[[ComputeShard], ComputeShard]:
    """Enters a function that computes a shard of what primitives make of nothing: see `DataFree.compute_shard`."""

    def enter(compute_shard: ComputeShard) -> ComputeShard:
        _enter(names, data_free=DataFree(compute_shard=compute_shard, is_costly=is_costly))
        return compute_shard

    return enter


def index_dim(*names: str) -> Callable[[IndexDim], IndexDim]:
    """Enters a function that finds the dim whose index a result is: see `PrimitiveRecord.index_dim`."""

    def enter(function: IndexDim) -> IndexDim:
        _enter(names, index_dim=function)
        return function

    return enter


def _enter(names: Iterable[str], **facts: object) -> None:
    """Adds facts to the records of primitives."""
    # Added, not replaced: what is known of a primitive is said beside the rule that it belongs to, in several places.
    # By name, not by the primitive: those of kernels and of newer versions of JAX need not be imported, nor exist.
    for name in names:
        before = PRIMITIVES.get(name, _UNKNOWN)
        PRIMITIVES[name] = dataclasses.replace(before, **facts)
