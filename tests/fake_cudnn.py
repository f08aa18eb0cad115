"""cuDNN's attention on a CPU: JAX's two operations with other insides, which compute what the library does.

All around them is JAX's own: the choice of operands, the derivative, the partitioning. Backward goes by the sums of
exponentials and the result that forward has kept, as the library does.
"""

import contextlib
import importlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

from jshard import _compat
from jshard.kernels.device import TracedDevice

H100 = TracedDevice("gpu", "NVIDIA H100 80GB HBM3", capability=9)


def _scores(q, k, bias, kv_lengths, *, scale, mask_type, variadic_args, sliding_window_length, **_):
    """(B, H, T, S), in float32."""
    group = q.shape[2] // k.shape[2]
    scores = scale * jnp.einsum("bthk,bshk->bhts", q.astype(jnp.float32), jnp.repeat(k, group, 2).astype(jnp.float32))
    if variadic_args[0]:
        scores += jnp.broadcast_to(bias.astype(jnp.float32), scores.shape)
    T, S = scores.shape[2:]
    seen = jnp.ones(scores.shape, bool)
    if "CAUSAL" in mask_type.name:
        seen &= jnp.broadcast_to(jnp.tril(jnp.ones((T, S), bool)), seen.shape)
    if sliding_window_length:
        seen &= jnp.broadcast_to(jnp.triu(jnp.ones((T, S), bool), 1 - sliding_window_length), seen.shape)
    if "PADDING" in mask_type.name:
        seen &= jnp.arange(S)[None, None, None] < kv_lengths[:, None, None, None]
    return jnp.where(seen, scores, -jnp.inf)


def _forward(q, k, v, bias, q_lengths, kv_lengths, *rest, is_training, **how):
    scores = _scores(q, k, bias, kv_lengths, **how)
    sums_BHT = jax.nn.logsumexp(scores, axis=-1)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], 2).astype(jnp.float32)
    y = jnp.einsum("bhts,bshk->bthk", jnp.exp(scores - sums_BHT[..., None]), values).astype(q.dtype)
    return [y, sums_BHT] if is_training else [y]


def _backward(q, k, v, bias, q_lengths, kv_lengths, *rest, **how):
    sums_BHT, y, dy = rest[4:7]
    group, wide = q.shape[2] // k.shape[2], lambda x: x.astype(jnp.float32)
    weights = jnp.exp(_scores(q, k, bias, kv_lengths, **how) - sums_BHT[..., None])
    dweights = jnp.einsum("bthk,bshk->bhts", wide(dy), wide(jnp.repeat(v, group, 2)))
    along = jnp.einsum("bthk,bthk->bht", wide(dy), wide(y))
    dscores = weights * (dweights - along[..., None])
    grouped = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)
    dq = how["scale"] * jnp.einsum("bhts,bshk->bthk", dscores, wide(jnp.repeat(k, group, 2)))
    dk = how["scale"] * grouped(jnp.einsum("bhts,bthk->bshk", dscores, wide(q)))
    dv = grouped(jnp.einsum("bhts,bthk->bshk", weights, wide(dy)))
    found = [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)]
    if how["variadic_args"][1]:
        found.append((dscores.sum(0, keepdims=True) if bias.shape[0] == 1 else dscores).astype(bias.dtype))
    return found


def trace_for(monkeypatch: pytest.MonkeyPatch, device: TracedDevice) -> None:
    """From here on attention is traced for a device."""
    monkeypatch.setattr(importlib.import_module("jshard.kernels.attention"), "device_in_use", lambda: device)


@contextlib.contextmanager
def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, models are traced for an H100, and cuDNN's attention runs on the CPU."""
    from jax._src.cudnn import fused_attention_stablehlo as module

    for name, function in (("fwd", _forward), ("bwd", _backward)):
        primitive = getattr(module, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu")
    trace_for(monkeypatch, H100)
    with _compat.cudnn_assumed((9, 10), (9, 0)):
        yield
