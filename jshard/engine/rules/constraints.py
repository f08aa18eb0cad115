"""Where arrays lie: sharding constraints, `device_put`, memories. No number depends on them.

Data axes say nothing inside the region. The axes that stay the compiler's (tensor, expert) are kept, and memories are.
"""

from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules.table import rule
from jshard.engine.values import Eqn, Value

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
