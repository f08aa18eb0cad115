"""Attention to a sequence that is split over the mesh axis `context`: each device has a part of the positions.

There are two ways. Heads are exchanged for positions: during attention each device has all positions of some heads,
so that any form of attention can run, as on one device (this file). Or keys and values circulate (`ring.py`).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.engine.context import region_mesh
from jshard.engine.inner import exchanged
from jshard.kernels.backend import KernelError, check_known
from jshard.plans.mesh import CONTEXT, TENSOR, degree

_WAYS = ("auto", "heads", "ring")


def context_degree() -> int:
    """Returns the number of devices over which the traced model's sequences are split."""
    mesh = region_mesh()
    return 1 if mesh is None else degree(mesh, CONTEXT)


def heads_fault(q: jax.Array, num_devices: int) -> str | None:
    """Returns why heads cannot be exchanged for positions; None if they can."""
    num_heads = q.shape[2]
    if num_heads % num_devices:
        return f"q has {num_heads} heads, not divisible by {num_devices}."
    return None


def is_ring(requested: str, q: jax.Array, k: jax.Array, *, is_causal: bool, is_plain: bool) -> bool:
    """Returns whether keys and values circulate; otherwise heads are exchanged.

    Args:
        requested: "heads", "ring", or "auto": heads where their number allows it.
        q: queries, (B, T, H, K).
        k: keys, (B, S, G, K).
        is_causal: whether there is a causal mask.
        is_plain: whether nothing is requested that a ring does not have.

    Raises:
        KernelError: what is requested is not possible.
    """
    check_known("attention", "over_context", requested, _WAYS)
    num_devices = context_degree()
    faults = {
        "heads": [fault for fault in [heads_fault(q, num_devices)] if fault is not None],
        "ring": _ring_faults(q, k, num_devices, is_causal=is_causal, is_plain=is_plain),
    }
    tried = ["heads", "ring"] if requested == "auto" else [requested]
    # In their order: heads, where they are possible, can use the kernels; a ring has only the plain form.
    for way in tried:
        if not faults[way]:
            return way == "ring"
    # With this degree heads can be exchanged.
    fitting_degree = math.gcd(q.shape[2], num_devices)
    raise KernelError(
        "attention cannot be split over the context axis.",
        where=[f"mesh axis {CONTEXT!r} of degree {num_devices}", f"q: {q.shape}", f"k: {k.shape}"],
        why="\n".join(f"{way}: {fault}" for way in tried for fault in faults[way]),
        do=f"--mesh context={fitting_degree}  # a degree that divides the heads",
    )


def _ring_faults(q: jax.Array, k: jax.Array, num_devices: int, *, is_causal: bool, is_plain: bool) -> list[str]:
    faults = []
    if not is_plain:
        faults.append("a ring takes no bias, no lengths and no window, and cannot use cuDNN.")
    num_queries = q.shape[1]
    num_keys = k.shape[1]
    num_chunks = 2 * num_devices  # a causal mask pairs chunks
    for length in sorted({num_queries, num_keys}):
        if length % num_chunks:
            faults.append(f"{num_chunks} does not divide {length} positions.")
    if is_causal and num_queries != num_keys:
        faults.append("a causal mask needs as many queries as keys.")
    return faults


def with_all_positions(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits arrays along heads instead of positions; too few heads of keys and values are repeated."""
    mesh = _mesh()
    num_parts = degree(mesh, CONTEXT)
    num_parts_with_tensor = num_parts * degree(mesh, TENSOR)
    if q.shape[2] % num_parts_with_tensor == 0:
        num_parts = num_parts_with_tensor  # then `tensor` can split the heads of each device further
    num_heads = k.shape[2]
    # Both numbers divide the heads of q, and so does their least multiple. `jnp.repeat` puts copies beside each other:
    # each head of q finds its own group at the same part of the heads, and so on the same device.
    repeats = math.lcm(num_heads, num_parts) // num_heads
    if repeats > 1:
        k = jnp.repeat(k, repeats, axis=2)
        v = jnp.repeat(v, repeats, axis=2)
    return _exchanged(q, 1, 2), _exchanged(k, 1, 2), _exchanged(v, 1, 2)


def with_own_positions(y: jax.Array) -> jax.Array:
    """Splits the result along positions again: the inverse of `with_all_positions`."""
    return _exchanged(y, 2, 1)


def _exchanged(x: jax.Array, old: int, new: int) -> jax.Array:
    """Splits an array (B, T, H, K) along another dim; if `tensor` splits heads, meanwhile along K.

    Otherwise the compiler would gather the heads over `tensor` before it exchanges them.
    """
    mesh = _mesh()
    tensor_degree = degree(mesh, TENSOR)
    num_heads, width = x.shape[2:]
    # Heads are to be split over both axes afterwards, and K over one of them meanwhile.
    can_split_both = num_heads % (tensor_degree * context_degree()) == 0 and width % tensor_degree == 0
    if tensor_degree == 1 or not can_split_both:
        return exchanged(x, CONTEXT, old, new)
    over_width = NamedSharding(mesh, P(None, None, None, TENSOR))
    over_heads = NamedSharding(mesh, P(None, None, TENSOR, None))
    # Between the two constraints each device of `tensor` has all heads, and a part of each.
    x = lax.with_sharding_constraint(x, over_width)
    x = exchanged(x, CONTEXT, old, new, 3)
    return lax.with_sharding_constraint(x, over_heads)


def _mesh() -> Mesh:
    mesh = region_mesh()
    assert mesh is not None, "only a traced model on a mesh has sequences that are split"
    return mesh
