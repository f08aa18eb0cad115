"""Ring attention for a sequence that is split over `context`: keys and values circulate between the devices.

Each device keeps its own queries. Keys and values pass from device to device, and the partial results are combined by
their sums of exponentials; in backward they circulate once more, with the gradients of keys and values. Under a causal
mask the first positions have little work: the sequence is cut into twice as many chunks as there are devices, and
device i takes chunks i and 2N-1-i, so that all have the same work at every step.

It is one equation of a traced program. Over axes other than `context` it is split along the batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core import JaxprEqn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.rules import OperandStates, Partitioner, Value, rule, same, type_of
from jshard.plans.mesh import CONTEXT, TENSOR


class RingSettings(NamedTuple):
    """The settings of the attention; a parameter of the equation."""

    is_causal: bool
    scale: float
    queries_at_once: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(how: RingSettings, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention, (B, T, H, K); keys and values may have fewer heads, (B, S, G, K)."""
    return _ring_p.bind(q, k, v, how=how)[0]


def _forward(how: RingSettings, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, sums_BHT = _ring_p.bind(q, k, v, how=how)
    return y, (q, k, v, y, sums_BHT)


ring_attention.defvjp(_forward, lambda how, kept, dy: tuple(_ring_p.bind(*kept, dy, how=how)))

# From (q, k, v): the result and its sums. From these five and the result's gradient: the gradients of q, k and v.
_ring_p = jex.Primitive("ring_attention")
_ring_p.multiple_results = True
_alone = lambda *xs, how: _on_part(1, how, *xs)
_ring_p.def_impl(_alone)
_ring_p.def_abstract_eval(lambda *avals, how: jax.make_jaxpr(functools.partial(_alone, how=how))(*avals).out_avals)
mlir.register_lowering(_ring_p, mlir.lower_fun(_alone, multiple_results=True))


@rule("ring_attention", operands=OperandStates.PARTIAL_BESIDE_SPLIT)
def _split(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """Over `context` along the sequence, where it communicates; over any other axis along the batch."""
    shapes = [p.full_shape(v) for v in values]
    if CONTEXT not in p.axes:
        return same(p, eqn, [p.split(v, 0) for v in values], 0) if p.divides(shapes[0][0]) else None
    if any(shape[1] % (2 * p.degree) for shape in shapes[:3]):
        return None
    of_array = lambda x: 1 if len(x.shape) == 4 else 2  # sums are (B, H, T)
    run = _on_heads(functools.partial(_on_part, p.degree, eqn.params["how"]), eqn)
    found = run(*[p.split(v, of_array(v)).x for v in values])
    return [Value(x, of_array(x)) for x in found]


def _on_heads(run: Callable[..., list[jax.Array]], eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """The same on each part of the heads where the compiler split them over `tensor`, else it would gather them."""
    over = _compat.automatic_axes().get(TENSOR, 1)
    if over == 1 or any(type_of(a).shape[2] % over for a in eqn.invars[:3]):
        return run
    spec = lambda a: PartitionSpec(*[None] * (2 if type_of(a).ndim == 4 else 1), TENSOR)
    ins, outs = tuple(map(spec, eqn.invars)), list(map(spec, eqn.outvars))
    return jax.shard_map(run, in_specs=ins, out_specs=outs, axis_names={TENSOR}, check_vma=False)


# ---- on one device of `num`; a device that has the whole sequence sends nothing


def _on_part(num: int, how: RingSettings, *xs: jax.Array) -> list[jax.Array]:
    apart, together = _zigzag(num) if how.is_causal and num > 1 else (lambda x: [x], lambda parts: parts[0])
    q, k, v = map(apart, xs[:3])
    if len(xs) == 3:
        found = _looked_around(num, how, q, k, v)
        return [together([y.astype(x.dtype) for y, x in zip(found[0], q, strict=True)]), together(found[1])]
    grads = _gradients_around(num, how, q, k, v, *map(apart, xs[3:]))
    return [together(parts).astype(x.dtype) for parts, x in zip(grads, xs, strict=False)]


def _zigzag(num: int) -> tuple[Callable[[jax.Array], list[jax.Array]], Callable[[list[jax.Array]], jax.Array]]:
    """Maps a device's two neighbouring chunks to an early and a late one, and back."""
    place = lambda chunk: min(chunk, 2 * num - 1 - chunk)
    ways = [[(i, place(2 * i + side)) for i in range(num)] for side in (0, 1)]
    is_even = lax.axis_index(CONTEXT) % 2 == 0  # an even device has an even early chunk and an odd late one
    swapped = lambda a, b: (jnp.where(is_even, a, b), jnp.where(is_even, b, a))
    dim = lambda x: 1 if x.ndim == 4 else 2

    def apart(x: jax.Array) -> list[jax.Array]:
        parts = jnp.split(x, 2, axis=dim(x))
        return [*swapped(*(lax.ppermute(part, CONTEXT, way) for part, way in zip(parts, ways, strict=True)))]

    def together(parts: list[jax.Array]) -> jax.Array:
        home = [[(to, at) for at, to in way] for way in ways]
        parts = [lax.ppermute(part, CONTEXT, way) for part, way in zip(swapped(*parts), home, strict=True)]
        return jnp.concatenate(parts, axis=dim(parts[0]))

    return apart, together


Side = int | jax.Array
"""Which of two parts: its number, or whether it is the first."""


def _blocks(num: int, how: RingSettings, step: int) -> list[tuple[Side, Side, bool]]:
    """The blocks of a step: the part of the queries, of the keys, and whether these are the same positions."""
    if num == 1 or not how.is_causal:
        return [(0, 0, how.is_causal)]
    if step == 0:
        return [(0, 0, True), (1, 0, False), (1, 1, True)]
    # The keys are those of the device `step` places before. If that device has a lower index, both chunks attend to its
    # early chunk; else the late chunk attends to both of its chunks.
    is_later = lax.axis_index(CONTEXT) >= step
    return [(1, 0, False), (is_later, is_later, False)]


def _of(parts: Sequence[jax.Array], side: Side) -> jax.Array:
    return parts[side] if isinstance(side, int) else jnp.where(side, *parts)


def _set(parts: list[jax.Array], side: Side, x: jax.Array) -> None:
    if isinstance(side, int):
        parts[side] = x
    else:
        parts[:] = jnp.where(side, x, parts[0]), jnp.where(side, parts[1], x)


def _pass_on(num: int, x: Any) -> Any:
    return lax.ppermute(x, CONTEXT, [(i, (i + 1) % num) for i in range(num)]) if num > 1 else x


def _looked_around(num: int, how: RingSettings, q: list, k: list, v: list) -> tuple[list, list]:
    """Attention of the queries to all keys, in float32, and the logarithms of the sums of exponentials."""
    ys = [jnp.zeros((*x.shape[:3], v[0].shape[3]), jnp.float32) for x in q]
    sums = [jnp.full((x.shape[0], x.shape[2], x.shape[1]), -jnp.inf) for x in q]
    weight = lambda x_BHT: jnp.exp(jnp.swapaxes(x_BHT, 1, 2))[..., None]
    for step in range(num):
        for mine, theirs, is_diagonal in _blocks(num, how, step):
            y, total = _looked(how, _of(q, mine), _of(k, theirs), _of(v, theirs), is_diagonal)
            before = _of(sums, mine)
            after = jnp.logaddexp(before, total)
            _set(ys, mine, _of(ys, mine) * weight(before - after) + y * weight(total - after))
            _set(sums, mine, after)
        if step + 1 < num:
            k, v = _pass_on(num, (k, v))
    return ys, sums


def _gradients_around(num: int, how: RingSettings, q: list, k: list, v: list, y: list, sums: list, dy: list) -> tuple:
    """The gradients of q, k and v, in float32; those of keys and values circulate with them, then one step home."""
    along = [jnp.einsum("bthk,bthk->bht", _wide(a), _wide(b)) for a, b in zip(y, dy, strict=True)]
    dq, dk, dv = ([jnp.zeros(x.shape, jnp.float32) for x in parts] for parts in (q, k, v))
    for step in range(num):
        for mine, theirs, is_diagonal in _blocks(num, how, step):
            given = [_of(parts, mine) for parts in (q, dy, sums, along)] + [_of(parts, theirs) for parts in (k, v)]
            grads = _gradients(how, is_diagonal, *given)
            for parts, side, grad in zip((dq, dk, dv), (mine, theirs, theirs), grads, strict=True):
                _set(parts, side, _of(parts, side) + grad)
        dk, dv = _pass_on(num, (dk, dv))
        if step + 1 < num:
            k, v = _pass_on(num, (k, v))
    return dq, dk, dv


# ---- of some queries and some keys


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _parts(how: RingSettings, num_queries: int, num_keys: int, is_diagonal: bool) -> list[tuple[slice, slice]]:
    """The queries that are processed at a time, and the keys that they attend to."""
    starts = range(0, num_queries, how.queries_at_once)
    parts = [slice(start, min(start + how.queries_at_once, num_queries)) for start in starts]
    return [(part, slice(0, part.stop if is_diagonal else num_keys)) for part in parts]


def _grouped(x_BTHK: jax.Array, num_groups: int) -> jax.Array:
    B, T, H, K = x_BTHK.shape
    return x_BTHK.reshape(B, T, num_groups, H // num_groups, K)


def _scores(how: RingSettings, q_BTGHK: jax.Array, k_BSGK: jax.Array, is_diagonal: bool) -> jax.Array:
    """(B, G, H / G, T, S); on the diagonal the last query is aligned with the last key."""
    s = how.scale * jnp.einsum("btghk,bsgk->bghts", q_BTGHK, k_BSGK, preferred_element_type=jnp.float32)
    T, S = s.shape[3:]
    return jnp.where(jnp.tril(jnp.ones((T, S), bool), S - T), s, -jnp.inf) if is_diagonal else s


def _looked(how: RingSettings, q: jax.Array, k: jax.Array, v: jax.Array, is_diagonal: bool) -> tuple:
    """Attention of the queries to these keys alone, and the log-sums of exponentials."""
    ys, sums, (B, T, H, _), G = [], [], q.shape, k.shape[2]
    for at, seen in _parts(how, T, k.shape[1], is_diagonal):
        s = _scores(how, _grouped(q[:, at], G), k[:, seen], is_diagonal)
        total = jax.nn.logsumexp(s, axis=-1)
        weights = jnp.exp(s - total[..., None]).astype(v.dtype)
        y = jnp.einsum("bghts,bsgk->btghk", weights, v[:, seen], preferred_element_type=jnp.float32)
        ys.append(y.reshape(B, -1, H, v.shape[3]))
        sums.append(total.reshape(B, H, -1))
    return jnp.concatenate(ys, axis=1), jnp.concatenate(sums, axis=2)


def _gradients(
    how: RingSettings,
    is_diagonal: bool,
    q: jax.Array,
    dy: jax.Array,
    sums: jax.Array,
    along: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contributions of one block to the gradients of queries, keys and values."""
    (B, T, H, _), G, dqs = q.shape, k.shape[2], []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    for at, seen in _parts(how, T, k.shape[1], is_diagonal):
        q_BTGHK, dy_BTGHK = _grouped(q[:, at], G), _grouped(dy[:, at], G)
        of_rows = lambda x_BHT, at=at: x_BHT[:, :, at].reshape(B, G, H // G, -1, 1)
        weights = jnp.exp(_scores(how, q_BTGHK, k[:, seen], is_diagonal) - of_rows(sums))
        dweights = product("btghk,bsgk->bghts", dy_BTGHK, v[:, seen])
        ds = (how.scale * weights * (dweights - of_rows(along))).astype(q.dtype)
        dqs.append(product("bghts,bsgk->btghk", ds, k[:, seen]).reshape(B, -1, H, q.shape[3]))
        dk = dk.at[:, seen].add(product("bghts,btghk->bsgk", ds, q_BTGHK))
        dv = dv.at[:, seen].add(product("bghts,btghk->bsgk", weights.astype(dy.dtype), dy_BTGHK))
    return jnp.concatenate(dqs, axis=1), dk, dv
