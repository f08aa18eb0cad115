"""What a program does besides computing: constraints, memories, callbacks, barriers, references."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules.table import rule
from jshard.engine.values import Eqn, Value, array_bytes
from jshard.errors import CallError

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


@rule("sharding_constraint", "reshard", takes_partial=True)
def constraint(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """`with_sharding_constraint`, `reshard`, and what Flax makes of logical axes: without the data axes."""
    sharding = eqn.params["sharding" if "sharding" in eqn.params else "dst_sharding"]
    free = eqn.params.get("unconstrained_dims", frozenset())
    return [placed(v, sharding, frozenset(free)) for v in values]


@rule("device_put", takes_partial=True)
def device_put(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """A memory, or a sharding without the data axes; a single device says nothing here."""
    return [placed(v, to) for v, to in zip(values, eqn.params["devices"], strict=True)]


@rule("layout_constraint", takes_partial=True)
def layout_constraint(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """The order of dims in memory."""
    return [v.with_array(p.bind(eqn, [v.x])[0]) for v in values]


def placed(value: Value, to: Any, free: frozenset[int] = frozenset()) -> Value:
    """A value at the place that the user asked for; the value itself where that says nothing on a shard.

    Args:
        value: in any state, which stays.
        to: a memory, a sharding, a device or None.
        free: dims that the user leaves to the compiler.
    """
    x = value.x
    if isinstance(to, jax.memory.Space):
        memory = to
    else:
        memory = None if to is None else _memory(getattr(to, "memory_kind", None))
    if isinstance(to, NamedSharding):
        axes = _compat.automatic_axes()
        if axes:
            x = lax.with_sharding_constraint(x, _kept(to.spec, axes, value.ndim, free))
    if memory is not None and (memory == jax.memory.Space.Host) != _compat.on_host(x):
        x = jax.device_put(x, memory)
    return value if x is value.x else value.with_array(x)


def _kept(spec: P, axes: dict[str, int], ndim: int, free: frozenset[int]) -> P:
    """A spec without the axes that are not the compiler's."""
    dims: list[Any] = []
    for i in range(ndim):
        dim = spec[i] if i < len(spec) else None
        if i in free or dim is P.UNCONSTRAINED:
            dims.append(P.UNCONSTRAINED)
        else:
            dims.append(tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a in axes) or None)
    return P(*dims)


def _memory(kind: str | None) -> Any:
    if kind is None:
        return None
    return jax.memory.Space.Host if kind.endswith("_host") else jax.memory.Space.Device


# What a program does besides computing: callbacks, barriers, references.


@rule("optimization_barrier", takes_partial=True)
def optimization_barrier(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """States stay; known values have nothing to wait for."""
    values = [p.cross(v) for v in values]
    tied = iter(lax.optimization_barrier([v.x for v in values if not v.is_known]))
    return [v if v.is_known else v.with_array(next(tied)) for v in values]


@rule("debug_callback", "debug_print", "io_callback", "pure_callback", takes_partial=True)
def callback(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """Called once, on the first shard, with whole values."""
    name, params = eqn.primitive.name, eqn.params
    is_ordered = params.get("ordered") or "Ordered" in type(params.get("effect")).__name__
    if p.degree > 1 and is_ordered and name.startswith("debug"):
        raise CallError(
            "An ordered debug callback inside the model cannot run on several devices.",
            where=_compat.user_place(eqn),
            why=f"the model runs on {p.degree} data shards, and JAX orders debug callbacks on one device only.",
            do="jax.experimental.io_callback(f, None, x, ordered=True)  # or ordered=False",
        )
    xs = [p.whole(v).x for v in values]
    nothing = lambda *xs: [jnp.zeros(a.aval.shape, a.aval.dtype) for a in eqn.outvars]
    found = lax.cond(p.shard == 0, lambda *xs: p.bind(eqn, xs), nothing, *xs)
    return [_of_first_shard(p, eqn, x) for x in found]


@rule("rng_uniform", takes_partial=True)
def rng_uniform(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """Numbers of the device's own generator: those of the first shard, on every shard."""
    return [_of_first_shard(p, eqn, x) for x in p.bind(eqn, [p.whole(v).x for v in values])]


def _of_first_shard(p: "Partitioner", eqn: Eqn, x: Any) -> Value:
    with p.sends("move", eqn, array_bytes(x) * p.degree):
        return Value(p.gather(x[None], 0)[0])
