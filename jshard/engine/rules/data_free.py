"""Values known without data (masks, positions, random bits): a shard of one is computed, not cut from the whole.

So no device computes anything as large as the global batch. A whole value remembers its equation, and the values that
the equation took. To split it, those are split, and so on back to the sources:

    iota (8, 4) --lt 3--> mask (8, 4) --select--> weights (8, 4)      to be split along 0
    iota (1, 4) + shard * 1 <--- mask (1, 4) <--- weights (1, 4)      what is computed instead

`DataFree.operand_dims` says which split of the operands gives a split of the result. The rule of the primitive is then
applied to the split operands, and has the last word: it must return that split. XLA removes the whole value if
nothing else reads it.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jshard import _compat
from jshard.engine.rules.registry import PRIMITIVES, Partitioner, data_free_source, index_dim, record_of
from jshard.engine.rules.values import Provenance, Value


def is_result_data_free(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Returns whether a shard of the result of an equation on whole operands can be computed from its provenance."""
    entry = record_of(eqn).data_free
    if entry is None:
        return False
    return entry.is_source or any(v.provenance is not None for v in operands)


def is_costly(value: Value, results: dict[Value, bool] | None = None) -> bool:
    """Returns whether a value is computed from random bits or the like, so that it is worth keeping.

    Args:
        value: the value.
        results: what is known of other values. Without it, a value that is used twice by each of many equations in
            a row would be visited exponentially often.
    """
    if results is None:
        results = {}
    if value not in results:
        results[value] = _is_costly(value.provenance, results)
    return results[value]


def _is_costly(provenance: Provenance | None, results: dict[Value, bool]) -> bool:
    if provenance is None:
        return False
    entry = record_of(provenance.eqn).data_free
    if entry is not None and entry.is_costly:
        return True
    # What is computed from costly values is costly itself: to repeat it in another trace is to repeat them.
    return any(is_costly(v, results) for v in provenance.operands)


def copy_into_trace(value: Value, copies: dict[Value, Value]) -> Value:
    """Returns a value for another trace: its equations are repeated there, and nothing of this trace is used.

    Args:
        value: a value of this trace.
        copies: what has been copied into that trace, by the original.
    """
    if value not in copies:
        provenance = value.provenance
        if provenance is not None:
            operands = [copy_into_trace(v, copies) for v in provenance.operands]
            provenance = Provenance(provenance.eqn, operands, provenance.index)
        copies[value] = Value(value.x, value.state, provenance)
    return copies[value]


def materialize(p: Partitioner, value: Value, skip: Sequence[int] = ()) -> Value:
    """Returns a value as an array that leaves its trace: a shard, if it was split before or has a dim of the batch.

    Outside, its equations are gone: whole, it would be as large as the global batch on every device.

    Args:
        p: the partitioner.
        value: any value; one that is not known without data is returned as it is.
        skip: dims along which it is not split.
    """
    if not value.is_data_free:
        return value
    # As it was split before: that shard exists already.
    for state in value.conversions:
        if isinstance(state, int) and state not in skip:
            return p.split(value, state)
    # By its size: nothing else says that a constant has a dim for the examples.
    if not p.may_have_examples(value):
        return value
    for dim, size in enumerate(value.shape):
        if dim not in skip and size in p.batch_sizes and p.divides(size):
            return p.split(value, dim)
    return value


def shard_of(p: Partitioner, value: Value, dim: int) -> jax.Array | None:
    """Computes this shard's part of a value that is known without data; None if that is not possible."""
    provenance = value.provenance
    assert provenance is not None
    entry = record_of(provenance.eqn).data_free
    assert entry is not None
    # Under the name and the line of the equation that made the value, and not of the one that reads its shard.
    with _compat.running(provenance.eqn):
        if entry.compute_shard is not None:
            return entry.compute_shard(p, value, dim)
        assert entry.operand_dims is not None
        dims = entry.operand_dims(p, provenance.eqn, provenance.operands, dim)
        if dims is None:
            return None
        return _apply_rule(p, provenance, dims, dim)


def _apply_rule(
    p: Partitioner, provenance: Provenance, operand_dims: Sequence[int | None], dim: int
) -> jax.Array | None:
    """Computes a shard of a result from split operands, by the rule of the primitive."""
    pairs = list(zip(provenance.operands, operand_dims, strict=True))
    split_sizes = [v.shape[d] for v, d in pairs if d is not None]
    # A rule runs on split operands: without any, its result is not split either.
    if not split_sizes or not all(map(p.divides, split_sizes)):
        return None
    # Each operand is split in the same way, back to the sources. One that is not known without data is cut.
    local_operands = [v if d is None else p.split(v, d) for v, d in pairs]
    rule = PRIMITIVES[provenance.name].rule
    assert rule is not None, f"{provenance.name} has an inverse, and no rule"
    results = rule(p, provenance.eqn, local_operands)
    if results is None:
        return None
    result = results[provenance.index]
    # The inverse proposes a split of the operands, and the rule decides what comes of it.
    if result.state != dim:
        return None  # the rule found another way to run, and this value would have to move
    return result.x


# ---- sources: `random_bits` is with the keys, `broadcast_in_dim` with the shapes


@data_free_source("iota")
def _iota_shard(p: Partitioner, value: Value, dim: int) -> jax.Array:
    assert value.provenance is not None
    counted_dim = value.provenance.eqn.params["dimension"]
    # The shape of one shard: no array as large as the whole is made, not even to be sliced.
    shape = list(value.shape)
    shape[dim] //= p.degree
    if dim != counted_dim:
        return lax.broadcasted_iota(value.x.dtype, shape, counted_dim)
    # Counted in integers and rounded once, as on one device: in bfloat16, 256 + 1 is 256.
    local = lax.broadcasted_iota(jnp.int32, shape, dim)
    return (local + p.shard * shape[dim]).astype(value.x.dtype)


@index_dim("iota")
def _iota_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int:
    return eqn.params["dimension"]


@data_free_source("iota_2x32_shape")
def _iota_2x32_shard(p: Partitioner, value: Value, dim: int) -> jax.Array:
    assert value.provenance is not None
    # Positions in the whole array, not in the shard: random bits are a function of them, and equal those of one device.
    shape = list(value.shape)
    shape[dim] //= p.degree
    words = positions(shape, value.shape, dim, p.shard * shape[dim])
    return words[value.provenance.index]


def positions(
    shape: Sequence[int], whole_shape: Sequence[int], dim: int, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the position of each element of a shard in the whole array: `iota_2x32_shape` of one shard.

    Args:
        shape: of the shard.
        whole_shape: of the array.
        dim: the dim that is split.
        start: along it, the index of the shard's first element.

    Returns:
        The high and the low words of the positions, which may be beyond 2**32.
    """
    high = jnp.zeros(shape, jnp.uint32)
    low = jnp.zeros(shape, jnp.uint32)
    # Most arrays have fewer elements: their positions fit into one word, and the other is 0.
    needs_high = math.prod(whole_shape) > 2**32
    for i in range(len(shape)):
        stride = math.prod(whole_shape[i + 1 :])
        index = lax.broadcasted_iota(jnp.uint32, shape, i)
        if i == dim:
            index = index + start.astype(jnp.uint32)
        new_low = low + index * _word(stride)  # wraps; what is lost is added to the high word
        if needs_high:
            product_high = _high_word_of_product(index, stride)
            carry = (new_low < low).astype(jnp.uint32)
            high = high + product_high + carry
        low = new_low
    return high, low


def _high_word_of_product(index: jax.Array, stride: int) -> jax.Array:
    """Returns bits 32 to 63 of `index * stride`, as XLA has no such product of 32-bit integers.

    It is long multiplication in halves of words, each product of which fits into a word (H: 2**16):

        index   =        a * H + b
        stride  =        c * H + d  (+ e * H**2)
        product = a*c * H**2 + (a*d + b*c) * H + b*d  (+ index*e * H**2)
    """
    half_bits = np.uint32(16)
    half_mask = np.uint32(0xFFFF)
    b = index & half_mask
    a = index >> half_bits
    d = _word(stride & 0xFFFF)
    c = _word(stride >> 16 & 0xFFFF)
    # What `b*d` and the halves of `a*d + b*c` carry is added one at a time: the sum of all may not fit into a word.
    middle = a * d + (b * d >> half_bits)
    other_middle = b * c + (middle & half_mask)
    return a * c + (middle >> half_bits) + (other_middle >> half_bits) + index * _word(stride >> 32)


def _word(number: int) -> np.uint32:
    """Returns the low 32 bits of a number."""
    return np.uint32(number & 0xFFFFFFFF)
