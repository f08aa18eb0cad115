"""`attention`: cuDNN's on NVIDIA GPUs, which keeps no scores; JAX's plain form elsewhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard._text import CONTEXT, scope
from jshard.engine.context import note_attention, region_mesh
from jshard.engine.partitioner import exchanged
from jshard.kernels.backend import KernelError, TracedDevice, check_known, check_shapes, place
from jshard.kernels.ring import RingSettings, ring_attention
from jshard.plans.mesh import CONTEXT as CONTEXT_AXIS
from jshard.plans.mesh import TENSOR, degree

AttentionBackend = Literal["auto", "cudnn", "xla"]
OverContext = Literal["auto", "heads", "ring"]
_OVER_CONTEXT = ("auto", "heads", "ring")
_BACKENDS = ("auto", "cudnn", "xla")
_AMPERE, _HOPPER = 8, 9  # compute capabilities
_WIDEST, _WIDEST_BEFORE_HOPPER = 256, 128  # heads that cuDNN takes


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    lengths: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    queries_at_once: int | None = None,
    backend: AttentionBackend = "auto",
    over_context: OverContext = "auto",
) -> jax.Array:
    """Attention of each query to the keys of its sequence: `softmax(scale * q @ k.T + bias) @ v`, by heads.

    On an NVIDIA GPU since Ampere it is `jax.nn.dot_product_attention(implementation="cudnn")` for bfloat16 and
    float16: no array of (T, S) is made, and a causal mask halves the arithmetic. Elsewhere it is the same function in
    plain form. The choice is made while the model is traced, by the devices of its mesh, so it is right for a cluster
    that is not there, too. `js.audit` says which form a program has.

    In plain form its result is named "context" for policies of `jax.checkpoint`; policies of `remat=` that keep
    "context" keep what cuDNN's backward needs of its forward.

    Args:
        q: (B, T, H, K).
        k: (B, S, G, K), where G divides H: heads of keys and values may be shared by groups of queries.
        v: (B, S, G, K).
        bias: (1 or B, H, T, S), added to the scores.
        lengths: (B,) int32: how many of the keys of each sequence are real; what follows is padding.
        is_causal: each position sees those up to its own; the last query is at the place of the last key.
        scale: of the scores; 1 / sqrt(K) by default.
        queries_at_once: in plain form, make the scores of so many queries at a time, and again for backward. Takes
            neither bias nor lengths, and is for causal attention.
        backend: "auto"; "cudnn", or an error that says why it cannot run; "xla" for the plain form.
        over_context: on a mesh whose `context` axis splits the sequence: "heads" exchanges heads for positions; "ring"
            passes keys and values round, in plain form, without bias and lengths; "auto" is "heads" where the heads
            of `q` divide by the degree.

    Returns:
        (B, T, H, K) in the dtype of `q`.

    Raises:
        KernelError: cuDNN is asked for and cannot run, or the settings do not go together.

    Example:
        >>> q, k = jnp.ones((2, 16, 8, 64)), jnp.ones((2, 16, 2, 64))
        >>> js.kernels.attention(q, k, k, is_causal=True).shape
        (2, 16, 8, 64)
    """
    over = _context_degree()
    is_alone = bias is None and lengths is None
    goes_round = over > 1 and _goes_round(over_context, over, q, k, is_causal, is_alone and backend != "cudnn")
    if over > 1 and not goes_round:
        q, k, v = _with_all_positions(q, k, v)
    form = "xla" if goes_round else _form(backend, q, k, bias)
    how: dict[str, Any] = {"bias": bias, "key_value_seq_lengths": lengths, "is_causal": is_causal, "scale": scale}
    run: Callable[..., jax.Array]
    if goes_round:
        settings = RingSettings(
            is_causal, q.shape[-1] ** -0.5 if scale is None else scale, queries_at_once or q.shape[1]
        )
        run = functools.partial(ring_attention, settings)
    elif form == "cudnn":
        how["bias"] = None if bias is None else bias.astype(q.dtype)
        run = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **how)
    elif queries_at_once is None:
        run = functools.partial(jax.nn.dot_product_attention, **how)
    else:
        is_alone = is_alone and is_causal
        why = "queries_at_once is for causal attention without bias and lengths, of as many queries as keys."
        check_shapes("attention", {"q": q, "k": k}, {}, [] if is_alone and q.shape[1] == k.shape[1] else [why])
        run = functools.partial(_in_parts, scale=scale, queries_at_once=queries_at_once)
    if note_attention():
        run = jax.checkpoint(run)
    with jax.named_scope(scope("attention", form)):
        y = run(q, k, v)
        y = _moved(y, 2, 1) if over > 1 and not goes_round else y
        return y if form == "cudnn" else checkpoint_name(y, CONTEXT)


# ---- a sequence that is split over the mesh: each device has all positions of some heads for as long as it takes


def _context_degree() -> int:
    """Over how many devices the sequences of the model that is traced are split."""
    mesh = region_mesh()
    return 1 if mesh is None else degree(mesh, CONTEXT_AXIS)


def _goes_round(how: str, over: int, q: jax.Array, k: jax.Array, is_causal: bool, is_alone: bool) -> bool:
    """Whether keys and values go round, or heads are exchanged; an error if it can be neither."""
    check_known("attention", "over_context", how, _OVER_CONTEXT)
    parts = 2 * over  # a causal mask pairs chunks
    heads_not = [f"q has {q.shape[2]} heads, and {over} does not divide them."] if q.shape[2] % over else []
    ring_not = [] if is_alone else ["keys and values go round without bias, lengths and cuDNN."]
    ring_not += [f"{parts} does not divide {n} positions." for n in sorted({q.shape[1], k.shape[1]}) if n % parts]
    ring_not += ["a causal mask is for as many queries as keys."] if is_causal and q.shape[1] != k.shape[1] else []
    reasons = {"heads": heads_not, "ring": ring_not}
    tried = [how] if how != "auto" else ["heads", "ring"]
    if all(reasons[one] for one in tried):
        fitting = math.gcd(q.shape[2], over)
        raise KernelError(
            "attention cannot be split over the context axis.",
            where=[f"mesh axis {CONTEXT_AXIS!r} of degree {over}", f"q: {q.shape}", f"k: {k.shape}"],
            why="\n".join(f"{one}: {reason}" for one in tried for reason in reasons[one]),
            do=f"--mesh context={fitting}  # a degree that divides the heads",
        )
    if how == "auto" and heads_not and _is_16_bits(q) and not _device_reasons(place()):
        _compat.warn_user(
            f"attention goes round over {CONTEXT_AXIS}={over} in plain form, without cuDNN: {heads_not[0]}"
            ' js.kernels.attention(over_context="ring") says that this is meant.'
        )
    return next(one for one in tried if not reasons[one]) == "ring"


def _with_all_positions(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """The same, split along the heads; those of keys and values, if they are too few, repeated."""
    over, mesh, num_heads = _context_degree(), region_mesh(), q.shape[2]
    by_tensor = over * (1 if mesh is None else degree(mesh, TENSOR))
    times = math.lcm(k.shape[2], by_tensor if num_heads % by_tensor == 0 else over) // k.shape[2]
    if times > 1:
        k, v = jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2)
    return tuple(_moved(x, 1, 2) for x in (q, k, v))


def _moved(x: jax.Array, old: int, new: int) -> jax.Array:
    """An array (B, T, H, K) that is split along another dim, and on the way along K where `tensor` has heads."""
    mesh = region_mesh()
    assert mesh is not None, "who asks has looked"
    tensor = degree(mesh, TENSOR)
    if tensor == 1 or x.shape[2] % (tensor * _context_degree()) or x.shape[3] % tensor:
        return exchanged(x, CONTEXT_AXIS, old, new)
    held = lambda x, *dims: lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))
    x = exchanged(held(x, None, None, None, TENSOR), CONTEXT_AXIS, old, new, 3)
    return held(x, None, None, TENSOR, None)


def _in_parts(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None, queries_at_once: int) -> jax.Array:
    """Causal attention in plain form, of some queries at a time: each part sees the keys up to its end."""
    T, N = q.shape[1], queries_at_once
    ends = [min(start + N, T) for start in range(0, T, N)]
    return jnp.concatenate([_look_back(scale, q[:, (e - 1) // N * N : e], k[:, :e], v[:, :e]) for e in ends], axis=1)


@functools.partial(jax.checkpoint, static_argnums=0)
def _look_back(scale: float | None, q_BNHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """What the last N of S positions find in those up to their own; backward makes the scores again."""
    N, S = q_BNHK.shape[1], k_BSGK.shape[1]
    mask_NS = jnp.tril(jnp.ones((N, S), bool), S - N)
    return jax.nn.dot_product_attention(q_BNHK, k_BSGK, v_BSGK, mask=mask_NS[None, None], scale=scale)


# ---- which form


def _form(backend: str, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> str:
    """What it runs as: by cuDNN, or in plain form."""
    check_known("attention", "backend", backend, _BACKENDS)
    if backend == "xla":
        return "xla"
    here = place()
    here_not, these_not = _device_reasons(here), _array_reasons(here, q, k, bias)
    if backend == "cudnn" and (here_not or these_not):
        raise KernelError(
            "attention cannot run by cuDNN here.",
            where=[f"backend={backend!r}", f"device: {here.kind}", f"q: {q.dtype}{list(q.shape)}"],
            why="\n".join(f"{reason}." for reason in (*here_not, *these_not)),
            do='backend="auto" takes the plain form where cuDNN cannot run.',
        )
    if these_not and not here_not and _is_16_bits(q):  # in 32 bits nobody expects it
        _compat.warn_user(
            f"attention runs in plain form, which makes arrays of {q.shape[1]} x {k.shape[1]} scores for each head:"
            f' {"; ".join(these_not)}. js.kernels.attention(backend="xla") says that this is meant.'
        )
    return "xla" if here_not or these_not else "cudnn"


def _device_reasons(here: TracedDevice) -> list[str]:
    is_there = here.platform == "gpu" and here.capability >= _AMPERE
    return [] if is_there else [f"{here.kind} is no NVIDIA GPU since Ampere, for which cuDNN has it"]


def _array_reasons(here: TracedDevice, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> list[str]:
    """Why cuDNN does not take arrays, as of 9.10, by the limits in `jax.nn.dot_product_attention`."""
    width, widest = q.shape[-1], _WIDEST if here.capability >= _HOPPER else _WIDEST_BEFORE_HOPPER
    found = [] if _is_16_bits(q) else [f"it takes bfloat16 or float16, and q is {q.dtype}"]
    if width > widest or width % 8:
        found.append(f"it takes heads up to {widest} wide, in multiples of 8, and these are {width} wide")
    if bias is not None and (q.shape[1] % 2 or k.shape[1] % 2):
        found.append(f"with a bias it takes even lengths, and these are {q.shape[1]} and {k.shape[1]}")
    return found


def _is_16_bits(x: jax.Array) -> bool:
    return x.dtype.name in ("bfloat16", "float16")
