"""Reductions, sorts, windows, linear algebra: operations that act along some dims and are batched over the others."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.engine.rules.indexing import counted_columns
from jshard.engine.rules.table import beside, rule, same, split_dim
from jshard.engine.values import PARTIAL, Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


@rule(*"reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor".split())
def reduce(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Over other dims: split as before. Over the split dim: first on each shard, then over the shards."""
    (value,), axes, name = values, eqn.params["axes"], eqn.primitive.name
    if value.dim not in axes:
        return same(p, eqn, values, value.dim - sum(a < value.dim for a in axes))
    found = same(p, eqn, values, PARTIAL)
    if name == "reduce_sum":
        return found
    is_extreme = name in ("reduce_max", "reduce_min")
    if is_extreme and not jnp.iscomplexobj(value.x):  # the largest of complex numbers has no all-reduce
        with p.sends("max", eqn, found[0].bytes):
            return [Value(extreme(p, name, found[0].x))]
    with p.sends("whole", eqn, found[0].bytes * p.degree):
        every = p.gather(found[0].x[None], 0)
    return [Value(x) for x in p.bind(eqn, [every], axes=(0,))]


def extreme(p: "Partitioner", name: str, x: Any) -> jax.Array:
    """The largest or the smallest of the shards' arrays; NaN where one of them has NaN.

    An all-reduce of floats may lose a NaN. So integers are compared, in the order of the floats, with NaN at the end.
    """
    across, is_max = (lax.pmax, True) if name == "reduce_max" else (lax.pmin, False)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return across(x, p.axes)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # integers of 16 bits have no all-reduce on GPUs
    limits = jnp.iinfo(f"int{wide.dtype.itemsize * 8}")
    ordered = lambda bits: jnp.where(bits < 0, bits ^ limits.max, bits)  # and back
    last = jnp.asarray(limits.max if is_max else limits.min, limits.dtype)
    bits = jnp.where(jnp.isnan(wide), last, ordered(lax.bitcast_convert_type(wide, limits.dtype)))
    return lax.bitcast_convert_type(ordered(across(bits, p.axes)), wide.dtype).astype(x.dtype)


@rule("argmax", "argmin")
def arg_reduce(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Along the split dim: the best of each shard, then the first of the best."""
    (value,), (axis,) = values, eqn.params["axes"]
    if value.dim != axis:
        return same(p, eqn, values, value.dim - (axis < value.dim))
    (index,) = p.bind(eqn, [value.x])
    best = jnp.take_along_axis(value.x, jnp.expand_dims(index, axis), axis)
    index = index + (p.shard * value.shape[axis]).astype(index.dtype)
    index = jnp.expand_dims(index, axis)
    with p.sends("whole", eqn, array_bytes(best) * p.degree):
        bests = p.gather(best, axis)
    with p.sends("whole", eqn, array_bytes(index) * p.degree):
        indices = p.gather(index, axis)
    (shard,) = p.bind(eqn, [bests])
    return [Value(jnp.take_along_axis(indices, jnp.expand_dims(shard, axis), axis).squeeze(axis))]


@rule("reduce")
def reduce_by(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """A reduction of the user's own, over other dims."""
    dim, dims = split_dim(values), eqn.params["dimensions"]
    if dim in dims:
        return None
    return same(p, eqn, [p.split(v, dim) if v.ndim else p.whole(v) for v in values], dim - sum(d < dim for d in dims))


@rule(*"cumsum cumprod cummax cummin cumlogsumexp sort split concatenate top_k approx_top_k rev fft".split())
def along(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Operations along some dims. Along the split one: split along another for as long as it takes."""
    found = beside(p, eqn, values, acts_along(eqn))
    if found is not None and eqn.primitive.name == "concatenate":
        found[0].counted = counted_columns(eqn, values)
    return found


def acts_along(eqn: Eqn) -> tuple[int, ...]:
    """The dims that an operation of `along` acts along."""
    params, ndim = eqn.params, eqn.invars[0].aval.ndim
    match eqn.primitive.name:
        case "fft":
            return tuple(range(ndim - len(params["fft_lengths"]), ndim))
        case "rev":
            return tuple(params["dimensions"])
        case "sort" | "concatenate":
            return (params["dimension"] % ndim,)
        case "approx_top_k":
            return (params["reduction_dimension"] % ndim,)
    return (params["axis"] % ndim,)


@rule(
    *"reduce_window_sum reduce_window_max reduce_window_min reduce_window".split(),
    *"select_and_scatter select_and_scatter_add select_and_gather_add".split(),
)
def window(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Windows of one element along the split dim."""
    dim = split_dim(values)
    alone = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
    if any(eqn.params.get(name) and eqn.params[name][dim] != one for name, one in alone.items()):
        return None
    return same(p, eqn, [p.split(v, dim) if v.ndim else p.whole(v) for v in values], dim)


@rule(
    *"cholesky eigh eig qr geqrf geqp3 svd lu triangular_solve householder_product tridiagonal_solve".split(),
    *"tridiagonal schur hessenberg ormqr symmetric_product lu_pivots_to_permutation cholesky_update".split(),
)
def linalg(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched over leading dims: those that all operands and results have."""
    dim = split_dim(values)
    batch = min(_batch_dims(eqn, k, a.aval.ndim) for k, a in enumerate(eqn.invars))
    if dim >= batch:
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)


def _batch_dims(eqn: Eqn, operand: int, ndim: int) -> int:
    """How many leading dims of an operand are batched."""
    vectors = {"householder_product": (1,), "ormqr": (1,), "geqp3": (1,), "cholesky_update": (1,)}
    vectors |= {"tridiagonal_solve": (0, 1, 2), "lu_pivots_to_permutation": (0,)}
    return ndim - (1 if operand in vectors.get(eqn.primitive.name, ()) else 2)
