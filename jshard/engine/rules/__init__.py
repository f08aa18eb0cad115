"""The states of values on one data shard, and the table of how each primitive propagates them.

`RULES[name]` is called with operands of which at least one is split and none is partial. It returns the results, or
None if a shard cannot compute its part alone: then the operands are gathered and the equation is computed whole.
Operations that may act on partial values are in the sets of `LINEAR`.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jshard.plans.placement import Placement

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner
else:  # which imports the table
    Partitioner = Any

Eqn = Any  # jax.extend.core.JaxprEqn
PARTIAL = "partial"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The state of a value that is stored like a parameter: split over `fsdp`, and the same over `replica`."""

    placement: Placement
    pieces: int = 0  # 0: a stored shard. Else the number of pieces of a gathered parameter, for a group of neighbours


State = int | str | Shard | None
"""A dim: split along it. PARTIAL: the sum over the shards is the value. A `Shard`: stored as a parameter, and gathered
by its reader. None: whole on every shard."""


class MadeFrom(NamedTuple):
    """The equation that made a whole value from other values known without data."""

    eqn: Eqn
    values: list["Value"]
    index: int


@dataclasses.dataclass(eq=False)
class Value:
    """A value on one shard: the array that the shard holds, and how the shards' arrays make up the value."""

    x: Any
    state: State = None
    source: MadeFrom | None = None  # how a shard of a whole value is made, instead of cut from the whole
    done: dict[State, "Value"] = dataclasses.field(default_factory=dict)  # the value in states it was converted to
    counted: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of indices: `{column: dim}`, where `[..., column]` is the index along that dim, in global view."""
    parameter: str = ""  # path of the parameter that it is, perhaps cast; empty for anything else, such as a gradient

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


def array_bytes(x: Any) -> int:
    """Bytes of an array or of its shape and dtype; a typed key counts as one word."""
    is_extended = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return math.prod(x.shape) * (4 if is_extended else np.dtype(x.dtype).itemsize)


# ---- the table

Rule = Callable[[Partitioner, Eqn, list[Value]], list[Value] | None]

RULES: dict[str, Rule] = {}
TAKE_PARTIAL: set[str] = set()
"""Primitives whose rule takes operands in any state, and is always called."""
KEEP_STORED: set[str] = set()
"""Of these, the ones whose rule takes stored shards unchanged."""
CONVERT_PARTIAL: set[str] = set()
"""Primitives whose rule reads no operand but by `whole` and `split`, and so takes partial ones beside a split one."""


def rule(
    *names: str, takes_partial: bool = False, keeps_stored: bool = False, converts_partial: bool = False
) -> Callable[[Rule], Rule]:
    """Enters a function into the table, for primitives; see the sets above."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        if takes_partial or keeps_stored:
            TAKE_PARTIAL.update(names)
        if keeps_stored:
            KEEP_STORED.update(names)
        if converts_partial:
            CONVERT_PARTIAL.update(names)
        return function

    return enter


# ---- values known without data

OperandDims = Callable[[Eqn, Sequence[Value], int], Sequence[int | None] | None]
"""For a result that is to be split along a dim: the dim along which each operand is split, or None where it is whole.
None instead of a sequence: such a result cannot be computed from split operands."""


@dataclasses.dataclass(frozen=True)
class DataFree:
    """How a primitive passes on values that are known without data, such as masks and positions.

    Its result is known if an operand is. A shard of the result is then computed by the primitive's rule from shards of
    the operands, and no device computes the whole value.

    Attributes:
        operand_dims: which split of the operands gives a split of the result; the inverse of the rule.
        is_costly: whether a shard of the result is worth keeping; it is computed again where it is cheap.
    """

    operand_dims: OperandDims
    is_costly: bool = False


DATA_FREE: dict[str, DataFree] = {}


def data_free(*names: str, is_costly: bool = False) -> Callable[[OperandDims], OperandDims]:
    """Registers how primitives pass on values known without data. Write it below their `rule`; see `DataFree`.

    A missing entry makes a model slow, and not wrong: the value is computed whole on each device.
    """

    def register(operand_dims: OperandDims) -> OperandDims:
        DATA_FREE.update(dict.fromkeys(names, DataFree(operand_dims, is_costly)))
        return operand_dims

    return register


def same(p: Partitioner, eqn: Eqn, values: Sequence[Value], state: State, **params: Any) -> list[Value]:
    """The equation on the shards' arrays; all results in one state."""
    return [Value(x, state) for x in p.bind(eqn, [v.x for v in values], **params)]


def traced(p: Partitioner, run: Callable[..., list[Value]], *xs: Any) -> tuple[Any, list[State]]:
    """A function of arrays that returns values, as a program that returns arrays; and the states of the results."""
    states: list[State] = []

    def arrays(*xs: Any) -> list[Any]:
        with p.own_trace():
            values = run(*xs)
        states[:] = [v.state for v in values]
        return [v.x for v in values]

    return jax.make_jaxpr(arrays)(*xs), states


def split_dim(values: Sequence[Value]) -> int:
    """The dim that the largest split operand is split along."""
    return max((v for v in values if v.is_split), key=lambda v: v.bytes).dim


def shared_dim(left: Value, right: Value, mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Which of the dims that two operands have in common is split in one of them."""
    if left.is_split and left.dim in mine:
        return tuple(mine).index(left.dim)
    if right.is_split and right.dim in theirs:
        return tuple(theirs).index(right.dim)
    return None


def can_be_partial(value: Value) -> bool:
    """Whether a dtype has sums."""
    return jnp.issubdtype(value.x.dtype, jnp.number)


def free_dim(p: Partitioner, shape: Sequence[int], taken: Collection[int]) -> int | None:
    """A dim of an array that can be split, other than those taken."""
    return next((i for i, n in enumerate(shape) if i not in taken and p.divides(n)), None)


def beside(
    p: Partitioner,
    eqn: Eqn,
    values: list[Value],
    taken: Collection[int],
    run: Callable[[list[Value]], list[Value] | None] | None = None,
) -> list[Value] | None:
    """An equation that acts along the dims `taken`, of operands and results of one rank, on values split along another.

    If they are split along one of those, they are temporarily split along another, which moves a shard twice and
    gathers nothing. `run` is the equation on operands split along one dim; by default unchanged.
    """
    dim = split_dim(values)
    other = dim if dim not in taken else free_dim(p, eqn.invars[0].aval.shape, taken)
    if other is None:
        return None
    values = [p.split(v, other) if v.ndim else v for v in values]
    found = same(p, eqn, values, other) if run is None else run(values)
    if found is None or other == dim:
        return found
    return [p.split(v, dim) if v.state == other and p.divides(v.shape[dim]) else v for v in found]


# ---- equations that hold a program

CALLS = frozenset(
    """
    remat2 jit closed_call custom_jvp_call custom_vjp_call custom_vmap_call composite custom_linear_solve linear_call
    remat_opt eval_jaxpr
    """.split()
)


def program(eqn: Eqn) -> tuple[Any, Any]:
    """The program that a call holds, and its constants."""
    if eqn.primitive.name == "custom_linear_solve":
        return opened(eqn.params["jaxprs"].solve)
    names = ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr")
    return opened(next(eqn.params[name] for name in names if eqn.params.get(name) is not None))


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def operands(eqn: Eqn, given: Sequence[Any]) -> list[Any]:
    """Which of a call's operands its program takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return list(given)
    lengths = eqn.params["const_lengths"]
    begin = lengths.matvec + lengths.vecmat
    return [*given[begin : begin + lengths.solve], *given[sum(lengths) :]]


@rule(*CALLS, keeps_stored=True)
def call(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The program, in place: derivatives were taken before, in global view."""
    if eqn.primitive.name == "remat2":
        values = _behind_barrier(p, eqn, values)
    gradients = [k for k, a in enumerate(eqn.outvars) if p.is_for_gradients(a)]
    name = eqn.params.get("name")
    with jax.named_scope(name if isinstance(name, str) else eqn.primitive.name):
        return p.run(*program(eqn), operands(eqn, values), gradients=gradients)


def _behind_barrier(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Operands of a remat in a backward pass: without a barrier XLA would reuse forward's computation."""
    prevents = eqn.params["prevent_cse"]
    if isinstance(prevents, bool):
        prevents = (prevents,) * len(values)
    if not (eqn.params["differentiated"] and any(prevents)):
        return values
    values = [v if v.is_stored else p.cross(v) for v in values]
    tied = [k for k, v in enumerate(values) if prevents[k] and not v.is_stored and not v.is_known]
    for k, x in zip(tied, lax.optimization_barrier([values[k].x for k in tied]), strict=True):
        values[k] = values[k].with_array(x)
    return values


@rule("compute_on", "xla_metadata_call", takes_partial=True)
def annotated_call(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Calls that annotate the program they hold: the same call around the program on a shard."""
    values = [p.land(v) for v in values]

    def on_shard(*xs: Any) -> list[Value]:
        found = p.run(*program(eqn), [v.with_array(x) for v, x in zip(values, xs, strict=True)])
        return [p.land(v) for v in found]

    jaxpr, states = traced(p, on_shard, *[v.x for v in values])
    return [Value(x, s) for x, s in zip(p.bind(eqn, [v.x for v in values], jaxpr=jaxpr), states, strict=True)]


# ---- operations that may act on partial values: equations that are linear in them
#
# A wrong entry here is silent: the sum over the shards of f(x_i) would be taken for f of the sum. So an entry needs a
# proof that f(x + y) = f(x) + f(y) for all x and y, with the other operands whole (the same on every shard):
#
# * Floating-point numbers are treated as real numbers: rounding differs as between any two orders of a sum.
#   Where one device has an infinity, the sum may have NaN.
# * Integers are treated modulo 2**bits, because their sums also wrap on one device. A conversion to fewer bits keeps
#   that; one to more bits, to floating point or to bool does not.
# * A constant term is not linear: a `gather` that fills out-of-bounds elements is linear for a fill of 0 (or NaN) only.

MOVES = frozenset(
    """
    broadcast_in_dim copy name over_axis reshape rev slice split squeeze stop_gradient tile transpose unstack
    all_gather all_to_all psum reduce_scatter
    """.split()
)
"""Each element of the result is an element of the operand; of collectives over other axes, or a sum of elements."""

SUMS = frozenset("conj cumsum imag neg real reduce_sum reduce_window_sum".split())
"""Each element of the result is a sum of elements, or of their parts, with signs. Windows are padded with zeros."""

JOINED = dict.fromkeys("add add_any complex concatenate pad stack sub".split(), slice(0, None)) | {
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, None, 2),
    "scatter-sub": slice(0, None, 2),
    "select_n": slice(1, None),
}
"""Linear in several operands together, those of the slice: whole ones among them are made partial. The others (indices,
a predicate) must be whole."""

BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
"""Linear in each of two operands, while the other is whole."""

TAKES = frozenset("dynamic_slice gather".split())
"""Linear in the first operand; the indices must be whole."""

LINEAR = MOVES | SUMS | JOINED.keys() | BILINEAR | TAKES | {"div", "convert_element_type"}


def apply_linear(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The equation on partial values, if it is linear in them; None: they must be summed before."""
    if not eqn.outvars or any(v.is_split for v in values) or not _is_sound(eqn, values):
        return None
    name, partial = eqn.primitive.name, [k for k, v in enumerate(values) if v.is_partial]
    grows = math.prod(eqn.outvars[0].aval.shape) > sum(math.prod(values[k].shape) for k in partial)
    if name in JOINED:
        joined = range(len(values))[JOINED[name]]
        is_linear = all(k in joined for k in partial)
    elif name in BILINEAR:
        is_linear = len(partial) == 1
    elif name in TAKES or name == "div":
        is_linear = partial == [0]
    else:
        is_linear = name in MOVES or name in SUMS or name == "convert_element_type"
    if not is_linear:
        return None
    if name in JOINED:
        values = [p.partial(v) if k in joined else v for k, v in enumerate(values)]
    if grows and not p.is_for_gradients(eqn.outvars[0]):  # sum before it grows
        return None
    return same(p, eqn, values, PARTIAL)


def _is_sound(eqn: Eqn, values: list[Value]) -> bool:
    """Whether dtypes and fills keep an equation linear."""
    name, new = eqn.primitive.name, eqn.outvars[0].aval.dtype
    bits = lambda dtype: np.dtype(dtype).itemsize
    for old in (v.x.dtype for v in values if v.is_partial):
        if jnp.issubdtype(old, jnp.inexact):
            sound = jnp.issubdtype(new, jnp.inexact) and bits(new) > 1  # a float of 8 bits is a quantisation
        else:
            sound = jnp.issubdtype(new, jnp.integer) and bits(new) <= bits(old) and name != "div"
        if not sound:
            return False
    if name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        fill = eqn.params["fill_value"]
        return jnp.issubdtype(new, jnp.inexact) if fill is None else bool(fill == 0 or math.isnan(fill))
    return True


def needed_elsewhere(jaxpr: Any, gradients: Collection[int]) -> set[Any]:
    """Variables of a program that do not flow to its gradients (outputs, by number) alone, by linear equations alone.

    The others may stay partial even where they grow: they are summed once, as gradients.
    """
    elsewhere = {a for k, a in enumerate(jaxpr.outvars) if k not in gradients and not isinstance(a, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        free = [k for k, a in enumerate(eqn.outvars) if a not in elsewhere]
        if eqn.primitive.name in CALLS:
            inner, _ = program(eqn)
            held = needed_elsewhere(inner, free)
            given = operands(eqn, eqn.invars)
            used = [a for a, inside in zip(given, inner.invars, strict=True) if inside in held]
        elif eqn.primitive.name in LINEAR and len(free) == len(eqn.outvars):
            used = []
        else:
            used = eqn.invars
        elsewhere.update(a for a in used if not isinstance(a, jex.Literal))
    return elsewhere
