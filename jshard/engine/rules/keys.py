"""Typed PRNG keys, and what is drawn from them."""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from jshard import _compat
from jshard.engine.rules.building_blocks import same, split_all, split_dim
from jshard.engine.rules.registry import Partitioner, data_free_source, inverse_rule, rule
from jshard.engine.rules.values import Value, type_of


def draws_alone(key: Value) -> bool:
    """Returns whether each key of a batch draws the same as alone; with `rbg` the first key draws for all of them."""
    return str(jax.random.key_impl(key.x)).startswith(("threefry", "philox"))


@rule("random_wrap", "random_unwrap")
def wrap_keys(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits along the dims of the keys, which are the first in all their forms."""
    (value,) = operands
    if value.dim >= _num_common_dims(eqn, operands):
        return None
    return same(p, eqn, operands, value.dim)


@inverse_rule("random_wrap", "random_unwrap")
def _wrap_keys_operands(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int] | None:
    if dim >= _num_common_dims(eqn, operands):
        return None
    return [dim]


def _num_common_dims(eqn: JaxprEqn, operands: Sequence[Value]) -> int:
    return min(operands[0].ndim, type_of(eqn.outvars[0]).ndim)


@rule("random_split", "random_bits")
def draw(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits along the dims of the keys, which are also the first of what they draw."""
    (key,) = operands
    # With `rbg` the first key draws for the batch: a shard's own first key would draw other bits.
    if not draws_alone(key) or key.dim >= _num_common_dims(eqn, operands):
        return None
    return same(p, eqn, operands, key.dim)


@rule("random_gamma")
def random_gamma(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits along the dims of the keys alone: each key is split by the number of the samples that it draws."""
    # With one key for all samples each shard would split it by its own number of samples, and draw others.
    key = operands[0]
    dim = split_dim(operands)
    if dim >= key.ndim or not draws_alone(key):
        return None
    return same(p, eqn, split_all(p, operands, dim), dim)


@data_free_source("random_bits", is_costly=True)
def _random_bits_shard(p: Partitioner, value: Value, dim: int) -> jax.Array | None:
    """Draws a shard of the bits, equal to those of one device: each bit is a function of its position and the key."""
    assert value.provenance is not None
    eqn = value.provenance.eqn
    key = value.provenance.operands[0]
    if value.ndim == 0 or not draws_alone(key):
        return None
    if key.ndim > 0:
        if dim >= key.ndim:
            return None  # a key draws all of its bits at once
        return p.bind(eqn, [p.split(key, dim).x])[0]  # the dims of the keys are first
    if str(jax.random.key_impl(key.x)) != "threefry2x32":
        return None  # only of threefry do we know how a bit comes from its position
    if _compat.threefry_bits() is None:
        return None

    data = jax.random.key_data(key.x)
    bit_width = eqn.params["bit_width"]
    # One jitted function for all draws of a shape: to trace the generator for each is slow.
    cache_key = (bit_width, value.shape, dim)
    if cache_key not in p.random_bits:
        p.random_bits[cache_key] = _shard_of_bits_function(p, data, bit_width, value.shape, dim)
    return p.random_bits[cache_key](data)


def _shard_of_bits_function(
    p: Partitioner, data: jax.Array, bit_width: int, shape: tuple[int, ...], dim: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns a jitted function of a key's data that returns a shard of its bits.

    The generator's own program is partitioned: its positions are a source, and everything after is elementwise.
    """
    draw_bits = _compat.threefry_bits()
    assert draw_bits is not None, "checked by the caller"

    # Traced in global view: the positions that the bits are made of are those in the whole array.
    def whole_bits(data: jax.Array) -> jax.Array:
        return draw_bits(data, bit_width, shape)

    def shard_of_bits(data: jax.Array) -> jax.Array:
        program = jax.make_jaxpr(whole_bits)(data)
        (bits,) = p.run(program.jaxpr, program.consts, [Value(data)])
        return p.split(bits, dim).x

    # What computes the whole bits is traced as well, and nothing reads it.
    closed, _ = _compat.without_dead_code(jax.make_jaxpr(shard_of_bits)(data), [True])
    return jax.jit(lambda data: jaxpr_as_fun(closed)(data)[0])
