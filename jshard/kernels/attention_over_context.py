"""Attention to a sequence that is split over the mesh axis `context`: each device has a part of the positions.

There are two ways. Heads are exchanged for positions: during attention each device has all positions of some heads,
so that any form of attention can run, as on one device (this file). Or keys and values circulate (`ring.py`).
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.engine.context import during, region_mesh
from jshard.engine.inner import exchanged
from jshard.kernels.backend import KernelError, check_known
from jshard.plans.mesh import CONTEXT, TENSOR, degree

_WAYS = ("auto", "heads", "ring")


@dataclasses.dataclass(frozen=True)
class SplitHeads:
    """The heads of a call of attention whose sequence is split.

    Attributes:
        num_heads: of queries.
        num_key_heads: of keys and values.
        goes_round: whether keys and values circulate.
    """

    num_heads: int
    num_key_heads: int
    goes_round: bool

    def computes_alike(self, degrees: tuple[int, int], others: tuple[int, int]) -> bool:
        """Returns whether a device has the same work on each head that it has, with other degrees.

        Args:
            degrees: of `context` and `tensor`.
            others: the other ones.
        """
        if self.goes_round:
            return degrees[0] == others[0]  # in so many steps
        for context, tensor in (degrees, others):
            if self.num_heads % (context * tensor):
                return degrees == others
        return self._repeats(*degrees) == self._repeats(*others)

    def _repeats(self, context: int, tensor: int) -> int:
        return repeats_of_keys(self.num_heads, self.num_key_heads, context, tensor)


# The calls of attention in a trace, if they are asked for.
_noted: contextvars.ContextVar[set[SplitHeads] | None] = contextvars.ContextVar("split_heads", default=None)


@contextlib.contextmanager
def noted_heads() -> Iterator[set[SplitHeads]]:
    """A context to trace a model; yields what attention there has split over the axis, once it is traced."""
    heads: set[SplitHeads] = set()
    with during(_noted, heads):
        yield heads


def note_heads(q: jax.Array, k: jax.Array, *, goes_round: bool) -> None:
    """Records the heads of a call of attention whose sequence is split."""
    heads = _noted.get()
    if heads is not None:
        heads.add(SplitHeads(q.shape[2], k.shape[2], goes_round))


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
    """Splits arrays along heads instead of positions; too few heads of keys and values are repeated.

    If `tensor` splits heads too, they are in another order afterwards, which is that of `in_order_of_devices`.
    """
    repeats = repeats_of_keys(q.shape[2], k.shape[2], context_degree(), _tensor_degree())
    if repeats > 1:
        k = jnp.repeat(k, repeats, axis=2)
        v = jnp.repeat(v, repeats, axis=2)
    return _with_own_heads(q), _with_own_heads(k), _with_own_heads(v)


def repeats_of_keys(num_heads: int, num_key_heads: int, context: int, tensor: int) -> int:
    """Returns how often each head of keys and values is needed, so that every device has those of its queries.

    Args:
        num_heads: of queries.
        num_key_heads: of keys and values, which divide them.
        context: the degree of the axis; it divides the heads of queries.
        tensor: the degree of the other axis.
    """
    num_parts = context
    if num_heads % (context * tensor) == 0:
        num_parts = context * tensor  # then `tensor` can split the heads of each device further
    # Both numbers divide the heads of q, and so does their least multiple. `jnp.repeat` puts copies beside each other:
    # each head of q finds its own group at the same part of the heads, and so on the same device.
    return math.lcm(num_key_heads, num_parts) // num_key_heads


def with_own_positions(y: jax.Array) -> jax.Array:
    """Splits the result along positions again: the inverse of `with_all_positions`."""
    if not _is_split_over_both(y.shape[2]):
        return exchanged(y, CONTEXT, 2, 1)
    parts = y.reshape(*y.shape[:2], context_degree(), _tensor_degree(), -1, y.shape[3])
    own_positions: jax.Array = exchanged(jnp.swapaxes(parts, 2, 3), CONTEXT, 3, 1, 2)
    return _kept_over_tensor(own_positions.reshape(y.shape))


def _with_own_heads(x: jax.Array) -> jax.Array:
    """Splits an array (B, T, H, K) along heads instead of positions.

    Where `tensor` splits the heads, each of its devices exchanges its own, and nothing is sent over `tensor`.
    """
    if not _is_split_over_both(x.shape[2]):
        return exchanged(x, CONTEXT, 1, 2)
    parts = x.reshape(*x.shape[:2], _tensor_degree(), context_degree(), -1, x.shape[3])
    own_heads: jax.Array = exchanged(parts, CONTEXT, 1, 3, 2)
    # A part of a dim that an axis of the region splits is one piece. So `context` is now the outer one of both.
    return _kept_over_tensor(jnp.swapaxes(own_heads, 2, 3).reshape(x.shape))


def _kept_over_tensor(x: jax.Array) -> jax.Array:
    """Has the compiler keep the heads of an array (B, T, H, K) split over `tensor`."""
    return lax.with_sharding_constraint(x, NamedSharding(_mesh(), P(None, None, TENSOR, None)))


def in_order_of_devices(x: jax.Array, dim: int) -> jax.Array:
    """Returns an array whose heads are along `dim`, in the order that `with_all_positions` leaves them in."""
    num_heads = x.shape[dim]
    if num_heads == 1 or not _is_split_over_both(num_heads):
        return x
    parts = x.reshape(*x.shape[:dim], _tensor_degree(), context_degree(), -1, *x.shape[dim + 1 :])
    return jnp.swapaxes(parts, dim, dim + 1).reshape(x.shape)


def _is_split_over_both(num_heads: int) -> bool:
    """Returns whether `tensor` splits the heads of a device, of which it has a part over `context`."""
    tensor = _tensor_degree()
    return tensor > 1 and num_heads % (tensor * context_degree()) == 0


def _tensor_degree() -> int:
    return degree(_mesh(), TENSOR)


def _mesh() -> Mesh:
    mesh = region_mesh()
    assert mesh is not None, "only a traced model on a mesh has sequences that are split"
    return mesh
