"""What a program does besides computing: callbacks, barriers, references."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard._errors import CallError
from jshard.engine.rules.table import rule
from jshard.engine.values import Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


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
