"""Values known without data (masks, positions, random bits): whole ones, from whose equations shards are computed.

So no device computes anything as large as the global batch. `backwards` defines which split each operand of an equation
needs for a result that is split along a dim; then the rule of the table is applied to the split operands.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard.engine.rules import DATA_FREE, RULES, Eqn, MadeFrom, Partitioner, Value
from jshard.engine.rules.shapes import ELEMENTWISE, draws_alone

MAKERS = frozenset({"iota", "iota_2x32_shape", "random_bits", "broadcast_in_dim"})
"""Their result is known without data, or is needlessly large."""

FOLLOW = ELEMENTWISE | frozenset(
    """
    reshape slice rev pad tile reduce_sum reduce_max reduce_min reduce_or reduce_and cumsum cumprod cummax cummin split
    dynamic_slice dynamic_update_slice scatter scatter-add argmax argmin sort random_wrap random_unwrap
    """.split()
)
"""Their result is known if an operand is. To be moved to `DATA_FREE`, one by one."""

COSTLY = frozenset({"random_bits", "threefry2x32", "sort", "erf_inv"})
"""A shard of their result is worth keeping; for others it is cheaper to recompute it. As `FOLLOW`."""


def can_be_known(eqn: Eqn, values: list[Value]) -> bool:
    """Whether a shard of the result can be computed for an equation on whole values."""
    name = eqn.primitive.name
    if name in MAKERS:
        return True
    passes_on = name in DATA_FREE or name in FOLLOW
    return passes_on and any(v.source is not None for v in values)


def is_costly(value: Value, seen: dict[int, bool] | None = None) -> bool:
    """Whether a value is computed from random bits or the like."""
    seen = {} if seen is None else seen
    if id(value) not in seen:
        source = value.source
        seen[id(value)] = source is not None and (
            _is_costly_primitive(source.eqn.primitive.name) or any(is_costly(v, seen) for v in source.values)
        )
    return seen[id(value)]


def _is_costly_primitive(name: str) -> bool:
    entry = DATA_FREE.get(name)
    return name in COSTLY or (entry is not None and entry.is_costly)


def enter(value: Value, memo: dict[int, tuple[Value, Value]]) -> Value:
    """A value for another trace: its equations are repeated there, and nothing of this trace is used.

    `memo` is what has entered that trace; it keeps the originals alive, as their ids are its keys.
    """
    if id(value) not in memo:
        source = value.source
        if source is not None:
            source = MadeFrom(source.eqn, [enter(v, memo) for v in source.values], source.index)
        memo[id(value)] = Value(value.x, value.state, source), value
    return memo[id(value)][0]


def land(p: Partitioner, value: Value, skip: Sequence[int] = ()) -> Value:
    """A value as an array that leaves this trace; a known one is not split along the dims to skip.

    A known value leaves as a shard if it was requested as one, or has a dim of the size of the batch.
    """
    if not value.is_known:
        return value
    dim = next((d for d in value.done if isinstance(d, int) and d not in skip), None)
    if dim is None:
        sizes = enumerate(value.shape)
        dim = next((i for i, n in sizes if i not in skip and n in p.batch_sizes and p.divides(n)), None)
    return value if dim is None else p.split(value, dim)


def shard_of(p: Partitioner, value: Value, dim: int) -> Any | None:
    """This shard's part of a known value, computed from its equation; None if that is not possible."""
    assert value.source is not None
    eqn, values, index = value.source
    with _compat.running(eqn):
        name = eqn.primitive.name
        shape = [n // p.degree if i == dim else n for i, n in enumerate(value.shape)]
        if name == "iota":
            if dim != eqn.params["dimension"]:
                return lax.broadcasted_iota(value.x.dtype, shape, eqn.params["dimension"])
            # rounded once, as on one device
            return (lax.broadcasted_iota(jnp.int32, shape, dim) + p.shard * shape[dim]).astype(value.x.dtype)
        if name == "iota_2x32_shape":
            return positions(shape, value.shape, dim, p.shard * shape[dim])[index]
        if name == "broadcast_in_dim":
            dims, (operand, *_) = eqn.params["broadcast_dimensions"], values
            if dim in dims and operand.shape[dims.index(dim)] == value.shape[dim]:
                operand = p.split(operand, dims.index(dim))
            return lax.broadcast_in_dim(operand.x, shape, dims)
        if name == "random_bits":
            return _random_bits(p, value, dim)
        wanted = backwards(p, eqn, values, dim)
        if wanted is None or all(w is None for w in wanted):
            return None
        if any(w is not None and not p.divides(v.shape[w]) for v, w in zip(values, wanted, strict=True)):
            return None
        found = RULES[name](p, eqn, [v if w is None else p.split(v, w) for v, w in zip(values, wanted, strict=True)])
        return found[index].x if found is not None and found[index].state == dim else None


def _random_bits(p: Partitioner, value: Value, dim: int) -> Any | None:
    assert value.source is not None
    eqn, (key, *_), _ = value.source
    if value.ndim == 0 or not draws_alone(key):
        return None
    if key.ndim:  # a key for each row
        return p.bind(eqn, [p.split(key, dim).x])[0] if dim < key.ndim else None
    if str(jax.random.key_impl(key.x)) != "threefry2x32":
        return None
    data, width = jax.random.key_data(key.x), eqn.params["bit_width"]
    if (width, value.shape, dim) not in p.random_bits:

        def of_shard(data: Any) -> Any:
            program = jax.make_jaxpr(lambda data: _compat.threefry_bits(data, width, value.shape))(data)
            (found,) = p.run(program.jaxpr, program.consts, [Value(data)])
            return p.split(found, dim).x

        closed, _ = _compat.without_dead_code(jax.make_jaxpr(of_shard)(data), [True])
        p.random_bits[width, value.shape, dim] = jax.jit(lambda data: jex.jaxpr_as_fun(closed)(data)[0])
    return p.random_bits[width, value.shape, dim](data)


def positions(shape: Sequence[int], whole: Sequence[int], dim: int, start: Any) -> tuple[jax.Array, jax.Array]:
    """`iota_2x32_shape` of one shard: positions in the whole array as (high, low) words, also beyond 2**32.

    The shard has `shape`, the array `whole`; along `dim` the shard's first element has the index `start`.
    """
    high, low, half = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32), np.uint32(16)
    word = lambda n: np.uint32(n & 0xFFFFFFFF)
    for i in range(len(shape)):
        stride = math.prod(whole[i + 1 :])
        at = lax.broadcasted_iota(jnp.uint32, shape, i)
        if i == dim:
            at = at + start.astype(jnp.uint32)
        total = low + at * word(stride)
        if math.prod(whole) > 2**32:  # at * stride in two words, by halves of words
            at_low, at_high = at & np.uint32(0xFFFF), at >> half
            by_low, by_high = word(stride & 0xFFFF), word(stride >> 16 & 0xFFFF)
            middle = at_high * by_low + (at_low * by_low >> half)
            other = at_low * by_high + (middle & np.uint32(0xFFFF))
            product_high = at_high * by_high + (middle >> half) + (other >> half) + at * word(stride >> 32)
            high = high + product_high + (total < low).astype(jnp.uint32)
        low = total
    return high, low


def backwards(p: Partitioner, eqn: Eqn, values: list[Value], dim: int) -> Sequence[int | None] | None:
    """The dim along which each operand must be split, for a result split along `dim`; None: not possible."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    one = values[0]
    if name in DATA_FREE:
        return DATA_FREE[name].operand_dims(eqn, values, dim)
    if name in ELEMENTWISE:
        return [dim if dim < v.ndim and v.shape[dim] == shape[dim] else None for v in values]
    match name:
        case "reshape" if params["dimensions"] is None:
            outer = math.prod(shape[:dim])
            found = (i for i, n in enumerate(one.shape) if math.prod(one.shape[:i]) == outer and p.divides(n))
            return next(([i] for i in found), None)
        case "sort":
            return [dim] * len(values) if dim != params["dimension"] else None
        case "rev":
            return [dim] if dim not in params["dimensions"] else None
        case "cumsum" | "cumprod" | "cummax" | "cummin" | "split":
            return [dim] if dim != params["axis"] else None
        case "random_wrap" | "random_unwrap":
            return [dim] if dim < min(one.ndim, len(shape)) else None
        case "tile":
            return [dim] if params["reps"][dim] == 1 else None
        case "slice" | "dynamic_slice" | "dynamic_update_slice" | "pad" | "scatter" | "scatter-add":
            return [dim, *[None] * (len(values) - 1)]
    if name.startswith(("reduce_", "arg")):
        return [[i for i in range(one.ndim) if i not in params["axes"]][dim]]
    return None
