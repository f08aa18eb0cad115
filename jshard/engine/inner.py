"""An inner axis, `expert` or `context`: the program of a data shard, split further along the axis.

The program of a data shard, with its collectives, is traced for all experts and whole sequences. Then it is interpreted
again over that axis alone, by the same table: over `expert` the batch and the experts' parameters are split, over
`context` the sequences. Values that combine both move by an all-to-all, and gradients of everything else are partial
until they are stored shards.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax import lax
from jax.extend import core as jex
from jax.extend.core import JaxprEqn
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.mixing import Mixing
from jshard.engine.partitioner import Partitioner
from jshard.engine.rules import IN_ALL, PARTIAL, State, Value, rule, same
from jshard.plans.mesh import TENSOR

FUSED = "fused"
over_axis_p = jex.Primitive("over_axis")
"""Its operand. Over `axis` the result is split along `dim`; None: a sum over the axis is taken, if one is open;
`FUSED`: the collective that takes it next is over the axis, too, in one. The compiler has it split over `tensor` along
the dim `beside`, and keeps it so; None: as it likes."""
over_axis_p.def_impl(lambda x, axis, dim, beside: x)
over_axis_p.def_abstract_eval(lambda x, axis, dim, beside: x)
mlir.register_lowering(over_axis_p, lambda ctx, x, axis, dim, beside: [x])


def _batched(xs: Sequence[Any], dims: Sequence[int], *, axis: str, **given: int | str | None) -> tuple[Any, int]:
    (x,), (at,) = xs, dims
    more = {name: dim + (at <= dim) if isinstance(dim, int) else dim for name, dim in given.items()}
    return over_axis_p.bind(x, axis=axis, **more), at


batching.primitive_batchers[over_axis_p] = _batched


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def exchanged(x: jax.Array, axis: str, old: int, new: int, beside: int | None = None) -> jax.Array:
    """The array. It is split over an inner axis along `new` from here on, and its gradient along `old` before."""
    return over_axis_p.bind(x, axis=axis, dim=new, beside=beside)


exchanged.defvjp(
    lambda x, axis, old, new, beside: (over_axis_p.bind(x, axis=axis, dim=new, beside=beside), None),
    lambda axis, old, new, beside, _, ct: (over_axis_p.bind(ct, axis=axis, dim=old, beside=beside),),
)


@rule("over_axis", linear=IN_ALL)
def _of_another_axis(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Leaves the state as it is: for the partitioner of another axis this is the identity."""
    return same(p, eqn, operands, operands[0].state)


class InnerPartitioner(Partitioner):
    """The partitioner over one inner axis of a data shard's program."""

    _beside: int | None = None  # a dim of the moved array that is split over `tensor`

    _next: Value | None = None  # the operand of the next collective, if that is also over this axis

    def equation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs one equation; those that define what happens over the axis are not in the table."""
        name = eqn.primitive.name
        if name == "over_axis":
            return [self._over(eqn, values[0], **eqn.params)]
        if values and values[0] is self._next and (found := self._fused(eqn, values[0])) is not None:
            return [found]
        if name == "psum" and any(v.is_partial for v in values):
            everywhere = {"axes": (*eqn.params["axes"], *self.axes)}  # also over this axis: one all-reduce
            summed = [self.bind(eqn, [v.x], **(everywhere if v.is_partial else {}))[0] for v in values]
            return [Value(x) if v.is_partial else v.with_array(x) for v, x in zip(values, summed, strict=True)]
        return super().equation(eqn, values)

    def move(self, x: Any, old: int, new: int) -> Any:
        """An array split along a new dim. The compiler would gather it over `tensor` first."""
        if self._beside is None or TENSOR not in _compat.automatic_axes():
            return super().move(x, old, new)
        spec, run = PartitionSpec(*[None] * self._beside, TENSOR), functools.partial(super().move, old=old, new=new)
        return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names={TENSOR}, check_vma=False)(x)

    def _over(self, eqn: JaxprEqn, value: Value, *, axis: str, dim: Any, beside: int | None) -> Value:
        """An instruction for an axis: executed here if it is this axis, else left to the partitioner of the other."""
        if axis not in self.axes:
            found = value.with_array(self.bind(eqn, [value.x])[0])
            self._next = found if value is self._next else self._next
            return found
        if dim == FUSED:
            self._next = value
            return value
        return self._placed(value, dim, beside)

    def _fused(self, eqn: JaxprEqn, value: Value) -> Value | None:
        """A parameter's gather, or its gradient's reduction, also over this axis; None if there is nothing to do."""
        axes, q = (*eqn.params.get("axis_name", ()), *self.axes), eqn.params
        if eqn.primitive.name == "all_gather" and value.state == q["all_gather_dimension"]:
            return Value(lax.all_gather(value.x, axes, axis=value.dim, tiled=True))
        if eqn.primitive.name == "reduce_scatter" and value.is_partial:
            dim = q["scatter_dimension"]
            return Value(lax.psum_scatter(value.x, axes, scatter_dimension=dim, tiled=True), dim)
        return None

    def _placed(self, value: Value, dim: int | None, beside: int | None) -> Value:
        """A value in the state that the program requests; requests by the user or a gradient's sum are not noted."""
        if dim is None:
            return Value(self.sum(value.x)) if value.is_partial else value
        if not self.divides(self.full_shape(value)[dim]):
            return value
        self.is_quiet, self._beside = True, beside
        try:
            return self.split(value, dim)
        finally:
            self.is_quiet, self._beside = False, None


def over_axes(
    inner: Mapping[str, int],
    program: Callable,
    arrays: Sequence,
    states: Mapping[str, Sequence[State]],
    wanted: Mapping[str, Sequence[State]],
) -> list[Any]:
    """`over_axis` over all inner axes, given with their degrees, innermost last; the parts of the results."""
    for axis, degree in inner.items():
        how = states[axis], wanted.get(axis, ()), axis == [*inner][-1]
        program = functools.partial(_parts, axis, degree, program, *how)
    return program(*arrays)


def _parts(
    axis: str,
    degree: int,
    program: Callable,
    states: Sequence[State],
    wanted: Sequence[State],
    is_last: bool,
    *arrays: Any,
) -> list[Any]:
    return over_axis(axis, degree, program, arrays, states, wanted, is_last=is_last)[0]


def over_axis(
    axis: str,
    degree: int,
    program: Callable,
    arrays: Sequence,
    states: Sequence[State],
    wanted: Sequence[State],
    *,
    is_last: bool,
) -> tuple[list[Any], list[int | None], list[Mixing]]:
    """Runs a data shard's program, of arrays that are whole along an inner axis, on the part of one place along it.

    The arrays are this place's parts, each in a state: split along a dim, whole or partial. The first results leave in
    the requested states, the others in their own, summed. Returns the parts of the results, the dims that they are
    split along, and the collectives over the axis.
    """

    def whole(x: Any, dim: State) -> Any:
        return jax.typeof(x).update(shape=tuple(n * degree if i == dim else n for i, n in enumerate(x.shape)))

    closed = jax.make_jaxpr(program)(*map(whole, arrays, states))
    p = InnerPartitioner((axis,), degree)  # a shard's batch is small: other dims, such as layers, have its size
    p.is_last = is_last
    values = [Value(x, state) for x, state in zip(arrays, states, strict=True)]
    outs = p.run(closed.jaxpr, closed.consts, values, gradients=range(len(wanted)))
    for i, (v, dim) in enumerate(zip(outs, wanted, strict=False)):
        if not v.is_partial or dim == PARTIAL:
            outs[i] = p.in_state(v, dim)
        elif dim is None:  # a gradient's sum is planned, and no mixing of the model's own
            outs[i] = Value(p.sum(v.x))
        else:
            outs[i] = Value(lax.psum_scatter(v.x, p.axes, scatter_dimension=cast(int, dim), tiled=True), dim)
    outs[len(wanted) :] = [p.materialize(p.reduce_partial(v)) for v in outs[len(wanted) :]]
    return [v.x for v in outs], [v.dim if v.is_split else None for v in outs], p.moved
