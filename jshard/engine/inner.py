"""An inner axis, `expert` or `context`: the program of a data shard, split further along the axis.

The program of a data shard, with its collectives, is traced for all experts and whole sequences. Then it is interpreted
again over that axis alone, by the same table: over `expert` the batch and the experts' parameters are split, over
`context` the sequences. Values that combine both move by an all-to-all, and gradients of everything else are partial
until they are stored shards.

What the trace for data shards cannot express, it leaves as an instruction: the primitive `over_axis`, the identity
everywhere but in the interpretation over its axis.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.extend.core import JaxprEqn
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.mixing import Mixing
from jshard.engine.partitioner import Partitioner
from jshard.engine.rules import IN_ALL, PARTIAL, State, Value, rule, same
from jshard.engine.rules.values import arrays_of, in_states
from jshard.plans.mesh import TENSOR

# ---- the instruction

IrValue = TypeVar("IrValue")

FUSED = "fused"
over_axis_p = jex.Primitive("over_axis")
"""An instruction for the interpretation over an inner axis; its result is its operand.

Parameters:
    axis: the inner axis.
    dim: a number: the result is split along that dim, over the axis. None: a sum over the axis is taken, if one is
        open. `FUSED`: the collective that takes the result next is over the axis, too: both are one collective.
    tensor_dim: the dim that the compiler has split over `tensor`, and is to keep so; None leaves it to the compiler.
"""


@over_axis_p.def_impl
def _run(x: jax.Array, *, axis: str, dim: int | str | None, tensor_dim: int | None) -> jax.Array:
    return x


@over_axis_p.def_abstract_eval
def _result_type(x: ShapedArray, *, axis: str, dim: int | str | None, tensor_dim: int | None) -> ShapedArray:
    return x


def _lower(context: mlir.LoweringRuleContext, x: IrValue, **params: object) -> list[IrValue]:
    return [x]


mlir.register_lowering(over_axis_p, _lower)


def _batched(
    xs: Sequence[jax.Array], dims: Sequence[int], *, axis: str, dim: int | str | None, tensor_dim: int | None
) -> tuple[jax.Array, int]:
    """Binds the instruction to an array with one more dim, which `jax.vmap` has inserted."""
    (x,) = xs
    (batch_dim,) = dims

    def shifted(number: int | str | None) -> int | str | None:
        if isinstance(number, int) and batch_dim <= number:
            return number + 1
        return number  # before the new dim; or not the number of a dim

    result = over_axis_p.bind(x, axis=axis, dim=shifted(dim), tensor_dim=shifted(tensor_dim))
    return result, batch_dim


batching.primitive_batchers[over_axis_p] = _batched


# A rule of its own, because the gradient has to return to the dim of the operand. Without it the instruction would have
# no derivative.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def exchanged(x: jax.Array, axis: str, old: int, new: int, tensor_dim: int | None = None) -> jax.Array:
    """Returns the array, split over an inner axis along `new` from here on, and its gradient along `old` before."""
    return over_axis_p.bind(x, axis=axis, dim=new, tensor_dim=tensor_dim)


def _exchanged_forward(x: jax.Array, axis: str, old: int, new: int, tensor_dim: int | None) -> tuple[jax.Array, None]:
    return over_axis_p.bind(x, axis=axis, dim=new, tensor_dim=tensor_dim), None


def _exchanged_backward(
    axis: str, old: int, new: int, tensor_dim: int | None, residuals: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    return (over_axis_p.bind(cotangent, axis=axis, dim=old, tensor_dim=tensor_dim),)


exchanged.defvjp(_exchanged_forward, _exchanged_backward)


@rule("over_axis", linear=IN_ALL)
def _of_another_axis(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Leaves the state as it is: for the partitioner of another axis this is the identity."""
    return same(p, eqn, operands, operands[0].state)


# ---- the interpretation


class InnerPartitioner(Partitioner):
    """The partitioner over one inner axis of a data shard's program."""

    def __init__(self, axis: str, degree: int) -> None:
        # Without sizes of the batch: that of a shard is small, and other dims, such as layers, may have the same size.
        super().__init__((axis,), degree)
        self._tensor_dim: int | None = None  # of the array that moves, while a request is carried out
        self._fused_operand: Value | None = None  # the collective that takes it is also over this axis

    def equation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs one equation; those that define what happens over the axis are not in the table."""
        # Before the rules, because these collectives of the data shard's program are over other axes: as equations they
        # would be run over those alone, and the value be left split or partial over this one.
        name = eqn.primitive.name
        if name == "over_axis":
            return [self._follow(eqn, values[0], **eqn.params)]
        if values and values[0] is self._fused_operand:
            result = self._fused_collective(eqn, values[0])
            if result is not None:
                return [result]
        if name == "psum" and any(v.is_partial for v in values):
            return [self._sum_everywhere(eqn, v) for v in values]
        return super().equation(eqn, values)

    def _sum_everywhere(self, eqn: JaxprEqn, value: Value) -> Value:
        """Takes a sum over data shards; that of a partial value also over this axis, in one all-reduce."""
        # Summed apart, over one axis after the other, the second all-reduce would wait for the first.
        if not value.is_partial:
            (x,) = self.bind(eqn, [value.x])
            return value.with_array(x)
        (x,) = self.bind(eqn, [value.x], axes=(*eqn.params["axes"], *self.axes))
        return Value(x)

    def move(self, x: jax.Array, old: int, new: int) -> jax.Array:
        """Returns an array split along another dim than before. The compiler would gather it over `tensor` first."""
        if self._tensor_dim is None or TENSOR not in _compat.automatic_axes():
            return super().move(x, old, new)
        spec = PartitionSpec(*[None] * self._tensor_dim, TENSOR)
        run = functools.partial(super().move, old=old, new=new)
        return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names={TENSOR}, check_vma=False)(x)

    def _follow(
        self, eqn: JaxprEqn, value: Value, *, axis: str, dim: int | str | None, tensor_dim: int | None
    ) -> Value:
        """Follows an instruction for this axis; leaves one for another axis to the partitioner of that."""
        if axis not in self.axes:
            (x,) = self.bind(eqn, [value.x])
            result = value.with_array(x)
            if value is self._fused_operand:  # the other instruction stands between this one and its collective
                self._fused_operand = result
            return result
        if dim == FUSED:
            # By identity: the very next equation that takes this value is its collective.
            self._fused_operand = value
            return value
        return self._requested(value, cast(int | None, dim), tensor_dim)

    def _fused_collective(self, eqn: JaxprEqn, value: Value) -> Value | None:
        """Runs a parameter's gather, or its gradient's reduction, also over this axis.

        Returns None for a value that is whole over this axis: the collective over the other axes is all it needs.
        """
        params = eqn.params
        name = eqn.primitive.name
        if name == "all_gather" and value.state == params["all_gather_dimension"]:
            axes = (*params["axis_name"], *self.axes)
            return Value(lax.all_gather(value.x, axes, axis=value.dim, tiled=True))
        if name == "reduce_scatter" and value.is_partial:
            axes = (*params["axis_name"], *self.axes)
            dim = params["scatter_dimension"]
            return Value(lax.psum_scatter(value.x, axes, scatter_dimension=dim, tiled=True), dim)
        return None

    def _requested(self, value: Value, dim: int | None, tensor_dim: int | None) -> Value:
        """Returns a value split along the requested dim, or summed if none is requested."""
        if dim is None:
            if not value.is_partial:
                return value
            return Value(self.sum(value.x))
        if not self.divides(self.full_shape(value)[dim]):
            return value  # a request, not a promise: the result is the same either way
        with self._on_request(tensor_dim):
            return self.split(value, dim)

    @contextlib.contextmanager
    def _on_request(self, tensor_dim: int | None) -> Iterator[None]:
        """A context for what the user, or the sum of a gradient, requests: that is no mixing to be reported."""
        self.is_quiet = True
        self._tensor_dim = tensor_dim
        try:
            yield
        finally:
            self.is_quiet = False  # as before: an inner axis has more than one place, so what it sends is recorded
            self._tensor_dim = None


# ---- running a program over inner axes


def over_axes(
    inner: Mapping[str, int],
    program: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    states: Mapping[str, Sequence[State]],
    requested: Mapping[str, Sequence[State]],
) -> list[jax.Array]:
    """Runs `over_axis` over all inner axes, and returns the parts of the results.

    Args:
        inner: the axes and their degrees, innermost last.
        program: of a data shard.
        arrays: its arguments: the parts of this place.
        states: by axis, the state of each argument.
        requested: by axis, the states in which the first results leave.
    """
    # Each axis wraps the program of those before it: the last one is the outermost call, and runs first.
    last_axis = list(inner)[-1] if inner else None
    for axis, degree in inner.items():
        program = functools.partial(
            _parts_of_results, axis, degree, program, states[axis], requested.get(axis, ()), axis == last_axis
        )
    return list(program(*arrays))


def _parts_of_results(
    axis: str,
    degree: int,
    program: Callable[..., Sequence[jax.Array]],
    states: Sequence[State],
    requested: Sequence[State],
    is_last: bool,
    *arrays: jax.Array,
) -> list[jax.Array]:
    results, _, _ = over_axis(axis, degree, program, arrays, states, requested, is_last=is_last)
    return results


def over_axis(
    axis: str,
    degree: int,
    program: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    states: Sequence[State],
    requested: Sequence[State],
    *,
    is_last: bool,
) -> tuple[list[jax.Array], list[int | None], list[Mixing]]:
    """Runs a data shard's program, of arrays that are whole along an inner axis, on the part of one place along it.

    Args:
        axis: the inner axis.
        degree: its degree.
        program: of a data shard.
        arrays: its arguments: the parts of this place.
        states: the state of each over the axis: split along a dim, whole or partial.
        requested: the states in which the first results leave; the others leave in their own, summed.
        is_last: whether no other inner axis is left: see `Partitioner.is_last`.

    Returns:
        The parts of the results, the dims that they are split along, and the collectives over the axis.
    """
    # Traced for the whole axis, as a model is for the whole batch; then run on a part by the same rules.
    types = [_whole_type(x, state, degree) for x, state in zip(arrays, states, strict=True)]
    closed = jax.make_jaxpr(program)(*types)

    p = InnerPartitioner(axis, degree)
    p.is_last = is_last
    values = in_states(arrays, states)
    # Results with a requested state are gradients: what flows to them alone may stay partial until then.
    results = p.run(closed.jaxpr, closed.consts, values, gradients=range(len(requested)))
    num_requested = len(requested)
    leaving = []
    for result, state in zip(results[:num_requested], requested, strict=True):
        leaving.append(_in_requested_state(p, result, state))
    for result in results[num_requested:]:
        leaving.append(p.materialize(p.reduce_partial(result)))

    dims = [v.dim if v.is_split else None for v in leaving]
    return arrays_of(leaving), dims, p.moved


def _whole_type(x: jax.Array, state: State, degree: int) -> ShapedArray:
    """Returns the type of an array over the whole axis, of which `x` is the part of one place."""
    shape = list(x.shape)
    if isinstance(state, int):
        shape[state] *= degree
    return jax.typeof(x).update(shape=tuple(shape))


def _in_requested_state(p: InnerPartitioner, result: Value, state: State) -> Value:
    """Returns a result in the state in which it leaves; the sum of a gradient is planned, and no mixing to report."""
    if not result.is_partial or state == PARTIAL:
        return p.in_state(result, state)
    if state is None:
        return Value(p.sum(result.x))
    dim = cast(int, state)
    return Value(lax.psum_scatter(result.x, p.axes, scatter_dimension=dim, tiled=True), dim)
