"""The `expert` axis: a program on one data shard, run once more on its part of the experts.

The program of a data shard, with its collectives, is traced for all experts and all of their batch. Then it is
interpreted again over `expert` alone, by the same table: the batch and the experts' parameters are split, what both
meet in moves by an all-to-all, and gradients of everything else are partial until they are stored shards.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
from jax.extend import core as jex
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jshard.engine.partitioner import Partitioner
from jshard.engine.rules.table import rule, same
from jshard.engine.values import PARTIAL, Eqn, Mixing, State, Value
from jshard.plans.mesh import EXPERT
from jshard.plans.placement import Placement, axes_of

# ---- where a value changes its state over `expert`

over_expert_p = jex.Primitive("over_expert")
"""Its operand. Over `expert` the result is split along `dim`; None: a sum over the axis is taken, if one is open."""
over_expert_p.def_impl(lambda x, dim: x)
over_expert_p.def_abstract_eval(lambda x, dim: x)
mlir.register_lowering(over_expert_p, lambda ctx, x, dim: [x])


def _batched(xs: Sequence[Any], dims: Sequence[int], *, dim: int | None) -> tuple[Any, int]:
    (x,), (at,) = xs, dims
    return over_expert_p.bind(x, dim=None if dim is None else dim + (at <= dim)), at


batching.primitive_batchers[over_expert_p] = _batched


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def exchanged(x: jax.Array, old: int, new: int) -> jax.Array:
    """The array. It is split over `expert` along `new` from here on, and its gradient along `old` before."""
    return over_expert_p.bind(x, dim=new)


exchanged.defvjp(
    lambda x, old, new: (over_expert_p.bind(x, dim=new), None),
    lambda old, new, _, ct: (over_expert_p.bind(ct, dim=old),),
)


def summed_over_expert(x: jax.Array) -> jax.Array:
    """A gradient whose sum over `expert` is taken here, in this dtype."""
    return over_expert_p.bind(x, dim=None)


@rule("over_expert")
def _on_data_shard(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """A data shard is all of the axis."""
    return same(p, eqn, values, values[0].state)


class ExpertPartitioner(Partitioner):
    """The partitioner over `expert` of a data shard's program."""

    _is_asked = False

    def equation(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """Runs one equation; those that say what happens over the axis are not the table's."""
        name = eqn.primitive.name
        if name == "over_expert":
            return [self._placed(values[0], eqn.params["dim"])]
        if name == "psum" and any(v.is_partial for v in values):
            everywhere = (*eqn.params["axes"], *self.axes)  # over `expert`, too: one all-reduce
            return [
                Value(self.bind(eqn, [v.x], axes=everywhere)[0])
                if v.is_partial
                else v.with_array(self.bind(eqn, [v.x])[0])
                for v in values
            ]
        return super().equation(eqn, values)

    def _placed(self, value: Value, dim: int | None) -> Value:
        """A value where the program says; what the user or a gradient's sum asks for is not noted."""
        if dim is None:
            return Value(self.sum(value.x)) if value.is_partial else value
        if not self.divides(self.full_shape(value)[dim]):
            return value
        self._is_asked = True
        try:
            return self.split(value, dim)
        finally:
            self._is_asked = False

    @contextlib.contextmanager
    def sends(self, kind: Any, eqn: Eqn | None, size: int) -> Iterator[None]:
        """What the program asks for is no mixing of the model's own: it is not recorded, and has no name of such."""
        if self._is_asked:
            yield
        else:
            with super().sends(kind, eqn, size):
                yield


# ---- the program


def expert_dim(placement: Placement) -> int | None:
    """The dim of a parameter that its experts are along, counted from the end; None if it is not one of experts."""
    found = (i for i, entry in enumerate(placement.spec) if EXPERT in axes_of(entry))
    return next((i - len(placement.spec) for i in found), None)


def with_experts(spec: PartitionSpec, dim: int | None) -> PartitionSpec:
    """A spec over the batch's axes with `expert` innermost along a dim."""
    if dim is None:
        return spec
    entries = [*spec, *[None] * (dim + 1 - len(spec))]
    entries[dim] = (*axes_of(entries[dim]), EXPERT)
    return PartitionSpec(*entries)


def over_experts(
    program: Callable[..., list[Any]],
    arrays: Sequence[Any],
    dims: Sequence[int | None],
    wanted: Sequence[State],
    degree: int,
) -> tuple[list[Any], list[int | None], list[Mixing]]:
    """Runs a data shard's program on the part of one place along `expert`.

    Args:
        program: the function of the data shard's arrays, each whole along `expert`.
        arrays: this place's parts of them.
        dims: the dim that each is split along over `expert`; None: it is whole.
        wanted: the states in which its first results leave; the others leave as they come, summed.
        degree: of the axis.

    Returns:
        The parts of the results, the dims that they are split along, and the collectives over `expert`.
    """
    whole = [_whole(x, dim, degree) for x, dim in zip(arrays, dims, strict=True)]
    closed = jax.make_jaxpr(program)(*whole)
    p = ExpertPartitioner((EXPERT,), degree)  # a shard's batch is small: other dims have its size, as that of layers
    values = [Value(x, dim) for x, dim in zip(arrays, dims, strict=True)]
    outs = p.run(closed.jaxpr, closed.consts, values, gradients=range(len(wanted)))
    ended = [_reduced(p, v, dim) for v, dim in zip(outs, wanted, strict=False)]
    ended += [p.land(p.settle(v)) for v in outs[len(wanted) :]]
    return [v.x for v in ended], [v.dim if v.is_split else None for v in ended], p.moved


def _reduced(p: Partitioner, value: Value, wanted: State) -> Value:
    """A gradient as it is stored. Its sum is planned, and no mixing of the model's own."""
    if not value.is_partial or wanted == PARTIAL:
        return p.in_state(value, wanted)
    dim = cast(int | None, wanted)
    return Value(p.sum(value.x)) if dim is None else Value(p.reduce_scatter(value.x, dim), dim)


def _whole(x: Any, dim: int | None, degree: int) -> jax.ShapeDtypeStruct:
    shape = [n * degree if i == dim else n for i, n in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)
