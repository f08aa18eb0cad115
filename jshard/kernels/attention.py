"""`attention`: cuDNN on NVIDIA GPUs, JAX's splash kernel on TPUs (neither stores scores), and elsewhere plain.

Shapes, as suffixes: B examples; T, S queries and keys; H, G heads of queries and of keys; K elements of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jshard import _compat
from jshard._text import CONTEXT as SAVED
from jshard._text import scope
from jshard.engine.context import note_attention
from jshard.kernels.attention_kernels import (
    KernelReasons,
    cudnn_reasons,
    is_16_bits,
    splash_attention,
    splash_reasons,
)
from jshard.kernels.attention_over_context import (
    context_degree,
    heads_fault,
    in_order_of_devices,
    is_ring,
    note_heads,
    with_all_positions,
    with_own_positions,
)
from jshard.kernels.backend import KernelError, check_known, check_shapes
from jshard.kernels.device import TracedDevice, device_in_use
from jshard.kernels.ring import RingSettings, ring_attention
from jshard.plans.mesh import CONTEXT

AttentionBackend = Literal["auto", "cudnn", "splash", "xla"]
OverContext = Literal["auto", "heads", "ring"]
_BACKENDS = ("auto", "cudnn", "splash", "xla")
_TITLES = {"cudnn": "with cuDNN", "splash": "with the TPU kernel"}

Run = Callable[..., jax.Array]
"""Computes the result from q, k and v."""


class _AttentionOptions(NamedTuple):
    """Arguments of `attention` beside q, k and v; the docstring there explains them."""

    bias: jax.Array | None
    lengths: jax.Array | None
    is_causal: bool
    window: int | None
    scale: float | None
    queries_at_once: int | None

    def scale_of(self, q: jax.Array) -> float:
        """Returns the factor of the scores."""
        if self.scale is None:
            return q.shape[-1] ** -0.5
        return self.scale


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
    """Computes multi-head attention: `softmax(scale * q @ k.T + bias) @ v` for each head.

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

    Examples:
        >>> q, k = jnp.ones((2, 16, 8, 64)), jnp.ones((2, 16, 2, 64))
        >>> js.kernels.attention(q, k, k, is_causal=True).shape
        (2, 16, 8, 64)
    """
    options = _AttentionOptions(bias, lengths, is_causal, window, scale, queries_at_once)
    _check_window(q, k, options)
    is_split = context_degree() > 1
    goes_round = is_split and _goes_round(over_context, backend, q, k, options)
    exchanges_heads = is_split and not goes_round
    if is_split:
        note_heads(q, k, goes_round=goes_round)
    if exchanges_heads:
        # Before the form is chosen: from here on each device has all positions, and any form can run.
        q, k, v = with_all_positions(q, k, v)
        if bias is not None:
            options = options._replace(bias=in_order_of_devices(bias, 1))
    if goes_round:
        # What the audit reports: a ring is plain arithmetic on each device.
        form = "xla"
        settings = RingSettings(is_causal, options.scale_of(q), queries_at_once or q.shape[1])
        run: Run = functools.partial(ring_attention, settings)
    else:
        form = _choose_form(backend, q, k, options)
        run = _run_in(form, q, k, options)

    # In a unit whose policy has backward run attention again, and keeps the rest.
    if note_attention():
        run = jax.checkpoint(run)
    with jax.named_scope(scope("attention", form)):
        y = run(q, k, v)
        if exchanges_heads:
            y = with_own_positions(y)
        if form == "xla":
            # Policies find the results of kernels without it: splash names its own, and cuDNN's operation is known.
            y = checkpoint_name(y, SAVED)
        return y


# ---- how it runs


def _goes_round(over_context: str, backend: str, q: jax.Array, k: jax.Array, options: _AttentionOptions) -> bool:
    """Returns whether keys and values circulate, for a split sequence; warns if that is a surprise."""
    has_simple_mask = options.bias is None and options.lengths is None and options.window is None
    is_plain = has_simple_mask and backend not in ("cudnn", "splash")
    goes_round = is_ring(over_context, q, k, is_causal=options.is_causal, is_plain=is_plain)
    if goes_round and over_context == "auto" and is_16_bits(q):
        without_cudnn = cudnn_reasons(device_in_use(), q, k, None).of_device
        if not without_cudnn:
            _compat.warn_user(
                f"attention runs as a ring over {CONTEXT}={context_degree()} in plain form, without cuDNN:"
                f" {heads_fault(q, context_degree())}"
                ' js.kernels.attention(over_context="ring") silences this warning.'
            )
    return goes_round


def _choose_form(backend: str, q: jax.Array, k: jax.Array, options: _AttentionOptions) -> str:
    """Returns the form to run: the kernel of the device, or "xla", the plain form."""
    check_known("attention", "backend", backend, _BACKENDS)
    if backend == "xla":
        return "xla"
    device = device_in_use()
    kernel = backend
    if backend == "auto":
        # On a CPU cuDNN: its reasons then say that there is no GPU.
        kernel = "splash" if device.platform == "tpu" else "cudnn"
    if kernel == "cudnn":
        reasons = cudnn_reasons(device, q, k, options.bias)
    else:
        reasons = splash_reasons(device, q, k, options.bias, options.window)

    if not reasons.of_device and not reasons.of_arrays:
        return kernel
    if backend != "auto":
        raise _cannot_run(kernel, device, q, reasons)
    # A surprise: the device has the kernel, and these arrays do not suit it.
    if not reasons.of_device and is_16_bits(q):  # the kernel is not expected in 32 bits
        _compat.warn_user(
            f"attention runs in plain form, which makes arrays of {q.shape[1]} x {k.shape[1]} scores for each head:"
            f' {"; ".join(reasons.of_arrays)}. js.kernels.attention(backend="xla") silences this warning.'
        )
    return "xla"


def _cannot_run(kernel: str, device: TracedDevice, q: jax.Array, reasons: KernelReasons) -> KernelError:
    return KernelError(
        f"attention cannot run {_TITLES[kernel]} here.",
        where=[f"backend={kernel!r}", f"device: {device.kind}", f"q: {q.dtype}{list(q.shape)}"],
        why="\n".join(f"{reason}." for reason in (*reasons.of_device, *reasons.of_arrays)),
        do='backend="auto"  # runs in plain form where the kernel cannot run',
    )


def _run_in(form: str, q: jax.Array, k: jax.Array, options: _AttentionOptions) -> Run:
    """Returns the function of q, k and v for a form."""
    if form == "splash":
        return splash_attention(options.scale_of(q), is_causal=options.is_causal, lengths=options.lengths)
    if form == "xla" and options.queries_at_once is not None:
        _check_queries_at_once(q, k, options)
        return functools.partial(
            _in_parts, scale=options.scale, queries_at_once=options.queries_at_once, window=options.window
        )
    arguments: dict[str, Any] = {
        "bias": options.bias,
        "key_value_seq_lengths": options.lengths,
        "is_causal": options.is_causal,
        "scale": options.scale,
    }
    if options.window is not None:
        arguments["local_window_size"] = (options.window - 1, 0)  # before and after a position, without its own
    if form == "cudnn":
        arguments["implementation"] = "cudnn"
        if options.bias is not None:
            arguments["bias"] = options.bias.astype(q.dtype)  # cuDNN takes all arrays in one dtype
    return functools.partial(jax.nn.dot_product_attention, **arguments)


def _check_window(q: jax.Array, k: jax.Array, options: _AttentionOptions) -> None:
    """Raises for a window that has no meaning for these arrays."""
    window = options.window
    if window is None:
        return
    if options.is_causal and window > 0 and q.shape[1] == k.shape[1]:
        return
    why = f"window={window} must be above 0, and needs causal attention with as many queries as keys."
    check_shapes("attention", {"q": q, "k": k}, {}, [why])


def _check_queries_at_once(q: jax.Array, k: jax.Array, options: _AttentionOptions) -> None:
    """Raises for attention that is not computed in parts."""
    has_only_keys_before = options.is_causal and q.shape[1] == k.shape[1]
    if has_only_keys_before and options.bias is None and options.lengths is None:
        return
    why = "queries_at_once needs causal attention with as many queries as keys, without bias and lengths."
    check_shapes("attention", {"q": q, "k": k}, {}, [why])


# ---- the plain form, some queries at a time


def _in_parts(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    scale: float | None,
    queries_at_once: int,
    window: int | None,
) -> jax.Array:
    """Computes causal attention of some queries at a time: each part attends to the keys up to its end."""
    num_queries = q_BTHK.shape[1]
    ys: list[jax.Array] = []
    for start in range(0, num_queries, queries_at_once):
        end = min(start + queries_at_once, num_queries)
        # Slices, and not only a mask: the products with keys after the part are never computed.
        first = 0
        if window is not None:
            first = max(0, start - window + 1)  # no query of the part sees earlier keys
        ys.append(_attend_back(scale, window, q_BTHK[:, start:end], k_BSGK[:, first:end], v_BSGK[:, first:end]))
    return jnp.concatenate(ys, axis=1)


# So that the scores of only one part exist at a time in backward, too.
@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _attend_back(
    scale: float | None, window: int | None, q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> jax.Array:
    """Computes attention of the last T of S positions to those up to their own; backward recomputes the scores."""
    T = q_BTHK.shape[1]
    S = k_BSGK.shape[1]
    # The last query is aligned with the last key: query t is at position S - T + t.
    mask_TS = jnp.tril(jnp.ones((T, S), bool), S - T)
    if window is not None:
        mask_TS &= jnp.triu(jnp.ones((T, S), bool), S - T - window + 1)
    return jax.nn.dot_product_attention(q_BTHK, k_BSGK, v_BSGK, mask=mask_TS[None, None], scale=scale)
