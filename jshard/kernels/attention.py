"""`attention`: cuDNN on NVIDIA GPUs, JAX's splash kernel on TPUs (neither stores scores), and elsewhere plain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard._text import CONTEXT as SAVED
from jshard._text import scope
from jshard.engine.context import note_attention, region_mesh
from jshard.engine.inner import exchanged
from jshard.engine.per_example import per_example
from jshard.kernels.backend import (
    KernelError,
    TracedDevice,
    automatic_axes,
    check_known,
    check_shapes,
    may_be_split,
    place,
)
from jshard.kernels.ring import RingSettings, ring_attention
from jshard.plans.mesh import CONTEXT, TENSOR, degree

AttentionBackend = Literal["auto", "cudnn", "splash", "xla"]
OverContext = Literal["auto", "heads", "ring"]
_OVER_CONTEXT = ("auto", "heads", "ring")
_BACKENDS = ("auto", "cudnn", "splash", "xla")
_AMPERE, _HOPPER = 8, 9  # compute capabilities
_WIDEST, _WIDEST_BEFORE_HOPPER = 256, 128  # head dims that cuDNN supports


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    lengths: jax.Array | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    queries_at_once: int | None = None,
    backend: AttentionBackend = "auto",
    over_context: OverContext = "auto",
) -> jax.Array:
    """Multi-head attention: `softmax(scale * q @ k.T + bias) @ v` for each head.

    In bfloat16 and float16 it runs `jax.nn.dot_product_attention(implementation="cudnn")` on NVIDIA GPUs from Ampere
    on, and JAX's splash attention on TPUs: neither makes a (T, S) array, and a causal mask halves the arithmetic.
    Elsewhere it runs JAX's function in plain form. The form is chosen at trace time from the devices of the mesh, so
    a compile for an absent cluster also chooses the right one. `js.audit` reports the form.

    The result is named "context" for `jax.checkpoint` policies; `remat=` policies that keep "context" also keep what
    a kernel's backward needs from its forward.

    Args:
        q: (B, T, H, K).
        k: (B, S, G, K), where G divides H: groups of query heads may share a head of keys and values.
        v: (B, S, G, K).
        bias: (1 or B, H, T, S), added to the scores.
        lengths: (B,) int32: the number of real keys in each sequence; the rest is padding.
        is_causal: each position sees the positions up to its own; the last query is aligned with the last key.
        window: in causal attention with as many queries as keys, the number of positions that each one sees, its own
            included; all up to its own by default.
        scale: factor of the scores; 1 / sqrt(K) by default.
        queries_at_once: in plain form, compute the scores of this many queries at a time, and recompute them in
            backward. For causal attention without bias and lengths.
        backend: "auto"; "cudnn" or "splash", which raise if the kernel cannot run; "xla" for the plain form.
        over_context: on a mesh whose `context` axis splits the sequence: "heads" exchanges heads for positions; "ring"
            circulates keys and values, in plain form, without bias, lengths and window; "auto" is "heads" where the
            degree divides the heads of `q`.

    Returns:
        (B, T, H, K) in the dtype of `q`.

    Raises:
        KernelError: the requested kernel cannot run, or the settings are incompatible.

    Example:
        >>> q, k = jnp.ones((2, 16, 8, 64)), jnp.ones((2, 16, 2, 64))
        >>> js.kernels.attention(q, k, k, is_causal=True).shape
        (2, 16, 8, 64)
    """
    _check_window(window, q, k, is_causal)
    over, is_alone = _context_degree(), bias is None and lengths is None and window is None
    may_go_round = is_alone and backend not in ("cudnn", "splash")
    goes_round = over > 1 and _goes_round(over_context, over, q, k, is_causal, may_go_round)
    has_all_positions = over > 1 and not goes_round
    if has_all_positions:
        q, k, v = _with_all_positions(q, k, v)
    form = "xla" if goes_round else _form(backend, q, k, bias, window)
    if goes_round:
        settings = RingSettings(is_causal, _factor(scale, q), queries_at_once or q.shape[1])
        run: Callable[..., jax.Array] = functools.partial(ring_attention, settings)
    else:
        how: dict[str, Any] = {
            "bias": bias,
            "lengths": lengths,
            "is_causal": is_causal,
            "window": window,
            "scale": scale,
        }
        run = _function(form, q, k, queries_at_once, **how)
    if note_attention():
        run = jax.checkpoint(run)
    with jax.named_scope(scope("attention", form)):
        y = run(q, k, v)
        y = _moved(y, 2, 1) if has_all_positions else y
        return checkpoint_name(y, SAVED) if form == "xla" else y


def _function(
    form: str,
    q: jax.Array,
    k: jax.Array,
    queries_at_once: int | None,
    *,
    bias: jax.Array | None,
    lengths: jax.Array | None,
    is_causal: bool,
    window: int | None,
    scale: float | None,
) -> Callable[..., jax.Array]:
    """The function of q, k and v for a form."""
    if form == "splash":
        return _splash(_factor(scale, q), is_causal=is_causal, lengths=lengths)
    if form == "xla" and queries_at_once is not None:
        is_fit = bias is None and lengths is None and is_causal and q.shape[1] == k.shape[1]
        why = "queries_at_once needs causal attention with as many queries as keys, without bias and lengths."
        check_shapes("attention", {"q": q, "k": k}, {}, [] if is_fit else [why])
        return functools.partial(_in_parts, scale=scale, queries_at_once=queries_at_once, window=window)
    by_cudnn = {}
    if form == "cudnn":
        by_cudnn, bias = {"implementation": "cudnn"}, None if bias is None else bias.astype(q.dtype)
    how: dict[str, Any] = {"bias": bias, "key_value_seq_lengths": lengths, "is_causal": is_causal, "scale": scale}
    if window is not None:
        how["local_window_size"] = (window - 1, 0)  # before and after a position, without its own
    return functools.partial(jax.nn.dot_product_attention, **how, **by_cudnn)


def _check_window(window: int | None, q: jax.Array, k: jax.Array, is_causal: bool) -> None:
    """Raises unless a window, if there is one, has a meaning for these arrays."""
    if window is None:
        return
    is_fit = is_causal and window > 0 and q.shape[1] == k.shape[1]
    why = f"window={window} must be above 0, and needs causal attention with as many queries as keys."
    check_shapes("attention", {"q": q, "k": k}, {}, [] if is_fit else [why])


def _factor(scale: float | None, q: jax.Array) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


# ---- a sequence that is split over the mesh: during attention each device has all positions of some heads


def _context_degree() -> int:
    """The number of devices over which the traced model's sequences are split."""
    mesh = region_mesh()
    return 1 if mesh is None else degree(mesh, CONTEXT)


def _goes_round(how: str, over: int, q: jax.Array, k: jax.Array, is_causal: bool, is_alone: bool) -> bool:
    """Whether keys and values circulate (True) or heads are exchanged; raises if neither is possible."""
    check_known("attention", "over_context", how, _OVER_CONTEXT)
    parts = 2 * over  # a causal mask pairs chunks
    heads_not = [f"q has {q.shape[2]} heads, not divisible by {over}."] if q.shape[2] % over else []
    ring_not = [] if is_alone else ["a ring takes no bias, no lengths and no window, and cannot use cuDNN."]
    ring_not += [f"{parts} does not divide {n} positions." for n in sorted({q.shape[1], k.shape[1]}) if n % parts]
    ring_not += ["a causal mask needs as many queries as keys."] if is_causal and q.shape[1] != k.shape[1] else []
    reasons = {"heads": heads_not, "ring": ring_not}
    tried = [how] if how != "auto" else ["heads", "ring"]
    if all(reasons[one] for one in tried):
        fitting = math.gcd(q.shape[2], over)
        raise KernelError(
            "attention cannot be split over the context axis.",
            where=[f"mesh axis {CONTEXT!r} of degree {over}", f"q: {q.shape}", f"k: {k.shape}"],
            why="\n".join(f"{one}: {reason}" for one in tried for reason in reasons[one]),
            do=f"--mesh context={fitting}  # a degree that divides the heads",
        )
    if how == "auto" and heads_not and _is_16_bits(q) and not _cudnn_reasons(place(), q, k, None)[0]:
        _compat.warn_user(
            f"attention runs as a ring over {CONTEXT}={over} in plain form, without cuDNN: {heads_not[0]}"
            ' js.kernels.attention(over_context="ring") silences this warning.'
        )
    return next(one for one in tried if not reasons[one]) == "ring"


def _with_all_positions(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays split along heads instead of positions; too few heads of keys and values are repeated."""
    over, mesh, num_heads = _context_degree(), region_mesh(), q.shape[2]
    by_tensor = over * (1 if mesh is None else degree(mesh, TENSOR))
    times = math.lcm(k.shape[2], by_tensor if num_heads % by_tensor == 0 else over) // k.shape[2]
    if times > 1:
        k, v = jnp.repeat(k, times, axis=2), jnp.repeat(v, times, axis=2)
    return tuple(_moved(x, 1, 2) for x in (q, k, v))


def _moved(x: jax.Array, old: int, new: int) -> jax.Array:
    """An array (B, T, H, K) split along another dim; if `tensor` splits heads, meanwhile split along K."""
    mesh = region_mesh()
    assert mesh is not None, "checked by the caller"
    tensor = degree(mesh, TENSOR)
    if tensor == 1 or x.shape[2] % (tensor * _context_degree()) or x.shape[3] % tensor:
        return exchanged(x, CONTEXT, old, new)
    held = lambda x, *dims: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))
    x = exchanged(held(x, None, None, None, TENSOR), CONTEXT, old, new, 3)
    return held(x, None, None, TENSOR, None)


def _in_parts(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float | None, queries_at_once: int, window: int | None
) -> jax.Array:
    """Causal attention in plain form, some queries at a time: each part sees the keys up to its end."""
    T, parts = q.shape[1], []
    for start in range(0, T, queries_at_once):
        end = min(start + queries_at_once, T)
        first = 0 if window is None else max(0, start - window + 1)  # no query of the part sees earlier keys
        parts.append(_look_back(scale, window, q[:, start:end], k[:, first:end], v[:, first:end]))
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _look_back(
    scale: float | None, window: int | None, q_BNHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> jax.Array:
    """Attention of the last N of S positions to those up to their own; backward recomputes the scores."""
    N, S = q_BNHK.shape[1], k_BSGK.shape[1]
    mask_NS = jnp.tril(jnp.ones((N, S), bool), S - N)
    if window is not None:
        mask_NS &= jnp.triu(jnp.ones((N, S), bool), S - N - window + 1)
    return jax.nn.dot_product_attention(q_BNHK, k_BSGK, v_BSGK, mask=mask_NS[None, None], scale=scale)


# ---- on a TPU

_TPU_BLOCKS = 512, 256, 128  # positions of a block, as in MaxText; the largest that divides the lengths


def _splash(factor: float, *, is_causal: bool, lengths: jax.Array | None) -> Callable[..., jax.Array]:
    """JAX's splash attention on the examples of a shard, and on a part of the heads with a `tensor` axis."""

    def examples(q_BHTK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, *real_B: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds  # slow to import

        (H, T), S = q_BHTK.shape[1:3], k_BGSK.shape[2]
        kernel = _splash_kernel(T, S, H, is_causal=is_causal)

        def example(q: jax.Array, k: jax.Array, v: jax.Array, *real: jax.Array) -> jax.Array:
            segments = [SegmentIds(jnp.ones(T, jnp.int32), (jnp.arange(S) < n).astype(jnp.int32)) for n in real]
            return kernel(q, k, v, *segments)

        return jax.vmap(example)(q_BHTK, k_BGSK, v_BGSK, *real_B)

    run: Callable[..., jax.Array] = per_example(examples)
    mesh, axes, lengths_B = region_mesh(), tuple(automatic_axes()), () if lengths is None else (lengths,)
    if mesh is not None and axes:
        spec = P(None, axes)
        ins = (spec,) * 3 + (P(),) * len(lengths_B)
        run = jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=spec, axis_names=set(axes), check_vma=False)

    def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
        q_BTHK = (q_BTHK * jnp.asarray(factor, jnp.float32)).astype(q_BTHK.dtype)
        return run(*(x.swapaxes(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK)), *lengths_B).swapaxes(1, 2)

    return attend


def _splash_kernel(T: int, S: int, H: int, *, is_causal: bool) -> Callable[..., jax.Array]:
    """The kernel for one example; its result and its sums are named "context" for `jax.checkpoint` policies."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    one = splash_attention_mask.CausalMask((T, S), S - T) if is_causal else splash_attention_mask.FullMask((T, S))
    t, s = _tpu_block(T), _tpu_block(S)
    assert t and s, "checked by the caller"
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([one] * H),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=t, block_kv=s, block_q_dkv=t, block_kv_dkv=s, block_q_dq=t, block_kv_dq=s
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
    )
    return kernel


def _tpu_block(length: int) -> int | None:
    return next((block for block in _TPU_BLOCKS if length % block == 0), None)


# ---- which form


def _form(backend: str, q: jax.Array, k: jax.Array, bias: jax.Array | None, window: int | None) -> str:
    """The form to run: the kernel of the device, or the plain form."""
    check_known("attention", "backend", backend, _BACKENDS)
    if backend == "xla":
        return "xla"
    here = place()
    kernel = backend if backend != "auto" else "splash" if here.platform == "tpu" else "cudnn"
    title = {"cudnn": "with cuDNN", "splash": "with the TPU kernel"}[kernel]
    reasons = _cudnn_reasons if kernel == "cudnn" else _splash_reasons
    here_not, these_not = reasons(here, q, k, bias)
    if kernel == "splash" and window is not None:
        these_not.append("it takes no window")
    if backend != "auto" and (here_not or these_not):
        raise KernelError(
            f"attention cannot run {title} here.",
            where=[f"backend={backend!r}", f"device: {here.kind}", f"q: {q.dtype}{list(q.shape)}"],
            why="\n".join(f"{reason}." for reason in (*here_not, *these_not)),
            do='backend="auto"  # runs in plain form where the kernel cannot run',
        )
    if these_not and not here_not and _is_16_bits(q):  # the kernel is not expected in 32 bits
        _compat.warn_user(
            f"attention runs in plain form, which makes arrays of {q.shape[1]} x {k.shape[1]} scores for each head:"
            f' {"; ".join(these_not)}. js.kernels.attention(backend="xla") silences this warning.'
        )
    return "xla" if here_not or these_not else kernel


Reasons = tuple[list[str], list[str]]
"""Why a kernel cannot run: on this device, and with these arrays."""


def _cudnn_reasons(here: TracedDevice, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> Reasons:
    """The reasons of cuDNN 9.10, following the limits in `jax.nn.dot_product_attention`."""
    is_there = here.platform == "gpu" and here.capability >= _AMPERE
    here_not = [] if is_there else [f"cuDNN attention needs an NVIDIA GPU from Ampere on, not {here.kind}"]
    width, widest = q.shape[-1], _WIDEST if here.capability >= _HOPPER else _WIDEST_BEFORE_HOPPER
    found = [] if _is_16_bits(q) else [f"it needs bfloat16 or float16, and q is {q.dtype}"]
    if width > widest or width % 8:
        found.append(f"the head dim must be a multiple of 8, at most {widest}, and is {width}")
    if bias is not None and (q.shape[1] % 2 or k.shape[1] % 2):
        found.append(f"with a bias the lengths must be even, and are {q.shape[1]} and {k.shape[1]}")
    return here_not, found


def _splash_reasons(here: TracedDevice, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> Reasons:
    """The reasons of the TPU kernel."""
    here_not = [] if here.platform == "tpu" else [f"it needs a TPU, not {here.kind}"]
    found = [] if _is_16_bits(q) else [f"it needs bfloat16 or float16, and q is {q.dtype}"]
    if may_be_split() or (region_mesh() is None and automatic_axes()):
        found.append("it needs whole arrays; outside a sharded model they may be split over the devices")
    if bias is not None:
        found.append("it takes no bias")
    if not (_tpu_block(q.shape[1]) and _tpu_block(k.shape[1])):
        found.append(f"the lengths must be multiples of 128, and are {q.shape[1]} and {k.shape[1]}")
    if q.shape[-1] % 64:
        found.append(f"the head dim must be a multiple of 64, and is {q.shape[-1]}")
    heads, parts = k.shape[2], math.prod(automatic_axes().values())
    if heads % parts:
        found.append(f"{heads} heads of keys and values cannot be split over {parts} devices")
    return here_not, found


def _is_16_bits(x: jax.Array) -> bool:
    return x.dtype.name in ("bfloat16", "float16")
