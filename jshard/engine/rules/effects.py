"""What a program does besides computing: constraints on sharding, memories, barriers, callbacks."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules.building_blocks import behind_barrier, for_inner_trace_all, whole_all
from jshard.engine.rules.registry import OperandStates, Partitioner, rule
from jshard.engine.rules.values import Value, array_bytes, arrays_of, type_of
from jshard.errors import CallError
from jshard.plans.model_axes import axes_of

# ---- where values are


@rule("sharding_constraint", "reshard", operands=OperandStates.ANY)
def constraint(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Applies `with_sharding_constraint`, `reshard` and Flax's constraints by logical axes, without the data axes."""
    # Not by the data axes: over those the state decides, and the region is manual over them.
    name = "sharding" if "sharding" in eqn.params else "dst_sharding"
    sharding = eqn.params[name]
    free_dims = frozenset(eqn.params.get("unconstrained_dims", ()))
    return [_placed(v, sharding, free_dims) for v in operands]


@rule("device_put", operands=OperandStates.ANY)
def device_put(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves to a memory, or to a sharding without the data axes."""
    return [_placed(v, target) for v, target in zip(operands, eqn.params["devices"], strict=True)]


def _placed(value: Value, target: object, free_dims: Collection[int] = ()) -> Value:
    """Returns a value where the user wants it, in the state that it has.

    Args:
        value: the value.
        target: a memory or a sharding. A device has no meaning on a shard, and the value stays where it is.
        free_dims: dims that the user leaves to the compiler.
    """
    x = value.x
    axes = _compat.automatic_axes()
    if isinstance(target, NamedSharding) and axes:
        x = lax.with_sharding_constraint(x, _spec_over_axes(target.spec, value.ndim, axes, free_dims))
    memory = _memory_of(target)
    if memory is not None:
        is_on_host = memory == jax.memory.Space.Host
        if is_on_host != _compat.on_host(x):
            x = jax.device_put(x, memory)
    if x is value.x:
        return value  # the same one, with its conversions: what it was converted to need not be sent again
    return value.with_array(x)


def _spec_over_axes(spec: P, ndim: int, axes: Collection[str], free_dims: Collection[int]) -> P:
    """Returns a spec without the axes that are not the compiler's: over those the value is in a state, or whole."""
    dims: list[Any] = [*spec, *[None] * (ndim - len(spec))]
    for i, dim in enumerate(dims):
        if i in free_dims or dim is P.UNCONSTRAINED:
            # Not None, which would gather what the compiler has split.
            dims[i] = P.UNCONSTRAINED
            continue
        axes_left = tuple(axis for axis in axes_of(dim) if axis in axes)
        dims[i] = axes_left or None  # None: the user wants it whole over the compiler's axes
    return P(*dims)


def _memory_of(target: object) -> Any | None:
    """Returns the `jax.memory.Space` that a target of `device_put` names."""
    if isinstance(target, jax.memory.Space):
        return target
    kind = getattr(target, "memory_kind", None)
    if not kind:
        return None
    return jax.memory.Space.Host if kind.endswith("_host") else jax.memory.Space.Device


# ---- when they are computed


@rule("optimization_barrier", operands=OperandStates.ANY)
def optimization_barrier(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Ties the arrays of a shard; all states stay. What is known without data need not wait."""
    # What is tied loses its equation: it could no longer be split without being computed whole. So what is cheap passes
    # by, and what is costly, such as random bits, is made an array.
    values = for_inner_trace_all(p, operands)
    tied_positions = [i for i, v in enumerate(values) if not v.is_data_free]
    return behind_barrier(values, tied_positions)


# ---- what is done once: on the first shard, for all


@rule("debug_callback", "debug_print", "io_callback", "pure_callback", operands=OperandStates.ANY)
def callback(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Calls the user's function once, on the first shard, with whole values."""
    if p.degree > 1 and eqn.primitive.name.startswith("debug") and _is_ordered(eqn):
        raise CallError(
            "An ordered debug callback inside the model cannot run on several devices.",
            where=_compat.user_place(eqn),
            why=f"the model runs on {p.degree} data shards, and JAX orders debug callbacks on one device only.",
            do="jax.experimental.io_callback(f, None, x, ordered=True)  # or ordered=False",
        )
    # Gathered before the branch: inside of it the other shards would not take part in the collectives.
    arrays = arrays_of(whole_all(p, operands))

    def call(*xs: jax.Array) -> list[jax.Array]:
        return p.bind(eqn, xs)

    def call_nothing(*xs: jax.Array) -> list[jax.Array]:
        zeros = []
        for variable in eqn.outvars:
            result_type = type_of(variable)
            zeros.append(jnp.zeros(result_type.shape, result_type.dtype))
        return zeros

    # The other shards skip the call: its effects happen once, as on one device. Their zeros are of its types,
    # and are dropped below.
    results = lax.cond(p.shard == 0, call, call_nothing, *arrays)
    return _of_first_shard(p, eqn, results)


def _is_ordered(eqn: JaxprEqn) -> bool:
    effect = eqn.params.get("effect")
    return eqn.params.get("ordered") or "Ordered" in type(effect).__name__


@rule("rng_uniform", operands=OperandStates.ANY)
def rng_uniform(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Draws from the device's own generator: every shard gets the numbers of the first one."""
    return _of_first_shard(p, eqn, p.bind(eqn, arrays_of(whole_all(p, operands))))


def _of_first_shard(p: Partitioner, eqn: JaxprEqn, arrays: Sequence[jax.Array]) -> list[Value]:
    """Returns what the first shard has, on every shard."""
    # Gathered, not summed with zeros: a result of any dtype, such as a bool, can be gathered.
    results = []
    for x in arrays:
        with p.sends("move", eqn, array_bytes(x) * p.degree):
            of_all_shards = p.gather(x[None], 0)
            results.append(Value(of_all_shards[0]))
    return results
