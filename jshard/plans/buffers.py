"""Arrays in buffers of their own.

A step that donates its arguments would give away a shared buffer twice, which ends the process. `jax.device_put` shares
the buffer of the source on the device where that is.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jshard.plans.numeric import NUMBERS, Value

_Buffer = tuple[int, int]
"""The id of a device, and an address in its memory."""


def as_array(x: Value) -> Value:
    """Returns an array for a number of Python or NumPy's; arrays of JAX and shapes are returned unchanged.

    NumPy's memory is copied: its owner may write to it. A number stays weakly typed, as under `jax.jit`.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return np.array(x, jax.typeof(x).dtype)
    if isinstance(x, NUMBERS):
        return jnp.asarray(x)
    return x


def placed_apart(x: Value, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns an array with a sharding, which shares no buffer with the given one unless it is that one."""
    placed = jax.device_put(x, sharding)
    # The same array is one buffer under one name.
    if placed is x or not isinstance(x, jax.Array):
        return placed
    return apart([x, placed])[1]


def apart(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays, with a copy in place of each that shares a buffer with an earlier one."""
    used: set[_Buffer] = set()
    result = []
    for x in arrays:
        if not used.isdisjoint(_buffers(x)):
            # Local, unlike jnp.copy: other processes may share none of their buffers, and need not take part.
            x = jax.device_put(x, x.sharding if x.committed else None, may_alias=False)
        # After the copy: of the copy's buffers, not of those it was made from.
        used |= _buffers(x)
        result.append(x)
    return result


def _buffers(x: jax.Array) -> set[_Buffer]:
    """Returns the buffers of this process's part of an array; none if it is empty or deleted."""
    if x.is_deleted() or not x.size:
        return set()
    buffers = set()
    for shard in x.addressable_shards:
        (device,) = shard.data.devices()
        buffers.add((device.id, shard.data.unsafe_buffer_pointer()))
    return buffers
