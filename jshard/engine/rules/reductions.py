"""Reductions, sorts, windows, linear algebra: operations that act along some dims and are batched over the others."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jshard.engine.rules.table import rule, same, split_dim
from jshard.engine.values import PARTIAL, Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

_LARGEST = {"reduce_max": lax.pmax, "reduce_or": lax.pmax, "reduce_min": lax.pmin, "reduce_and": lax.pmin}


@rule(*"reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor argmax argmin".split())
def reduce(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Over other dims: split as before. Over the split dim: a sum is partial, a maximum is one over the shards."""
    (value,) = values
    axes, name = eqn.params["axes"], eqn.primitive.name
    if value.dim not in axes:
        return same(p, eqn, values, value.dim - sum(a < value.dim for a in axes))
    if name == "reduce_sum":
        return same(p, eqn, values, PARTIAL)
    if name not in _LARGEST:
        return None
    (x,) = p.bind(eqn, [value.x])
    p.note("max", eqn, array_bytes(x))
    if x.dtype == bool:
        return [Value(_LARGEST[name](x.astype(jnp.int32), p.axes).astype(bool))]
    return [Value(_LARGEST[name](x, p.axes))]


@rule(*"cumsum cumprod cummax cummin cumlogsumexp sort split concatenate top_k approx_top_k rev fft".split())
def along(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Operations along some dims, of operands and results of one rank; split along another dim."""
    dim = split_dim(values)
    if dim in acts_along(eqn):
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)


def acts_along(eqn: Eqn) -> tuple[int, ...]:
    """The dims that an operation of `along` acts along."""
    params = eqn.params
    if eqn.primitive.name == "fft":
        ndim = eqn.invars[0].aval.ndim
        return tuple(range(ndim - len(params["fft_lengths"]), ndim))
    if eqn.primitive.name == "rev":
        return tuple(params["dimensions"])
    ndim = eqn.invars[0].aval.ndim
    axis = next(params[name] for name in ("axis", "dimension", "reduction_dimension", "operand") if name in params)
    return (axis % ndim,)


@rule(
    *"reduce_window_sum reduce_window_max reduce_window_min reduce_window".split(),
    *"select_and_scatter_add select_and_gather_add".split(),
)
def window(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Windows of one element along the split dim."""
    dim, params = split_dim(values), eqn.params
    alone = {
        "window_dimensions": 1,
        "window_strides": 1,
        "padding": (0, 0),
        "base_dilation": 1,
        "window_dilation": 1,
    }
    for name, one in alone.items():
        if params.get(name) and name != "window_dilation" and params[name][dim] != one:
            return None
    return same(p, eqn, [p.split(v, dim) if v.ndim else p.whole(v) for v in values], dim)


@rule(*"cholesky eigh eig qr geqrf svd lu triangular_solve householder_product tridiagonal_solve".split())
def linalg(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Batched over all dims but the last two."""
    dim = split_dim(values)
    if dim >= values[0].ndim - 2 or any(v.ndim != values[0].ndim for v in values):
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)
