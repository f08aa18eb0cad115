"""`js.kernels.attention`: the same numbers by cuDNN and in plain form, on one device and on data shards."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.kernels import KernelError
from jshard.kernels.device import TracedDevice
from tests.fake_cudnn import H100, fake_cudnn, trace_for

B, T, H, G, K = 4, 16, 4, 2, 8
RNG = np.random.default_rng(0)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "all": {"scale": 1.0},
    "window": {"is_causal": True, "window": 5},
    "bias, causal": {"bias": RNG.normal(size=(1, H, T, T)), "is_causal": True},
    "bias of each example": {"bias": RNG.normal(size=(B, H, T, T))},
    "bias, lengths": {"bias": RNG.normal(size=(1, H, T, T)), "lengths": jnp.array([16, 3, 9, 1], jnp.int32)},
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2}  # of the largest element


@pytest.fixture
def cudnn(monkeypatch):
    with fake_cudnn(monkeypatch):
        yield


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-3)


def outcome(case: dict[str, Any], dtype: Any, **how: Any) -> Any:
    """The result and the gradients of q, k, v and bias, for numbers that do not depend on the dtype."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, heads, K)), dtype) for heads in (H, G, G))
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    given = {"bias": jnp.asarray(case["bias"], dtype)} if "bias" in case else {}
    fixed = {name: x for name, x in case.items() if name != "bias"}

    def loss(q, k, v, given):
        y = js.kernels.attention(q, k, v, **given, **fixed, **how)
        return (y.astype(jnp.float32) * ct).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, given)
    return y, grads


@pytest.mark.parametrize("case", CASES)
def test_cudnn_is_called_for_the_numbers_of_the_plain_form(cudnn, case):
    exact = outcome(CASES[case], "float32", backend="xla")
    by_cudnn = functools.partial(outcome, CASES[case], "bfloat16", backend="cudnn")
    assert "dot_product_attention_fwd" in str(jax.make_jaxpr(by_cudnn)())
    assert_close(by_cudnn(), exact, TOLERANCE["bfloat16"])


def test_a_window_hides_what_was_longer_ago():
    """In plain form whole and in parts, with the gradients of a mask."""
    ago = np.arange(T)[:, None] - np.arange(T)
    hidden = np.where((ago >= 0) & (ago < 5), 0.0, -1e9)
    exact, (*exact_grads, _) = outcome({"bias": np.broadcast_to(hidden, (1, H, T, T))}, "float32")
    for how in ({}, {"queries_at_once": 3}):
        y, (*grads, _) = outcome({"is_causal": True, "window": 5}, "float32", **how)
        assert_close((y, grads), (exact, exact_grads), TOLERANCE["float32"])


def test_a_window_is_for_causal_attention():
    q = jnp.ones((B, T, H, K))
    for options in ({"window": 5}, {"window": 0, "is_causal": True}):
        with pytest.raises(KernelError, match="above 0, and needs causal attention"):
            js.kernels.attention(q, q, q, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_queries_at_a_time_are_all_of_them(dtype):
    exact = outcome({"is_causal": True}, "float32")
    assert_close(outcome({"is_causal": True}, dtype, queries_at_once=5), exact, TOLERANCE[dtype])


def test_over_a_tensor_axis_it_runs_on_a_part_of_the_heads(cudnn):
    """XLA cannot partition the call in a region."""
    mesh, heads = js.mesh(fsdp=4, tensor=2), 4
    rng = np.random.default_rng(2)
    x, bias = rng.normal(size=(8, 16, heads, 3 * K)), rng.normal(size=(1, heads, 16, 16))

    class ScalesHeadsBesideABias(nnx.Module):
        def __init__(self):
            self.scale, self.bias = nnx.Param(jnp.ones((heads, 3 * K))), nnx.Param(jnp.asarray(bias, jnp.float32))

        def __call__(self, x, backend):
            qkv = (x * self.scale[None, None]).astype(jnp.bfloat16)
            q, k, v = jnp.split(js.parallel.hold(qkv, None, None, "tensor"), 3, axis=-1)
            y = js.kernels.attention(q, k, v, bias=self.bias[...], is_causal=True, backend=backend)
            return y.astype(jnp.float32)

    @nnx.jit(static_argnames="backend")
    def gradients(model, x, backend):
        return nnx.value_and_grad(lambda model: (jnp.sin(model(x, backend))).sum())(model)

    model = js.fully_shard(ScalesHeadsBesideABias(), mesh=mesh)
    given = js.shard_batch(jnp.asarray(x, jnp.float32), mesh)
    text = gradients.lower(model, given, "cudnn").as_text()
    assert f"4x16x2x{K}xbf16" in text or f"2x16x2x{K}xbf16" in text
    assert_close(gradients(model, given, "cudnn"), gradients(model, given, "xla"), 0.03)


# ---- which form


def arrays(dtype: Any = "bfloat16", width: int = 64, length: int = 16) -> Any:
    return [jax.ShapeDtypeStruct((2, length, 4, width), dtype)] * 3


def traced(*given: Any, **how: Any) -> str:
    return str(jax.make_jaxpr(lambda *xs: js.kernels.attention(*xs, **how))(*given))


A100 = dataclasses.replace(H100, kind="NVIDIA A100-SXM4-80GB", capability=8)
V100 = dataclasses.replace(H100, kind="NVIDIA V100", capability=7)


@pytest.mark.parametrize(
    ("device", "width", "dtype", "form"),
    [
        (H100, 256, "bfloat16", "cudnn"),
        (A100, 128, "float16", "cudnn"),
        (H100, 64, "float32", "xla"),
        (V100, 64, "float16", "xla"),
        (TracedDevice("cpu", "cpu"), 64, "bfloat16", "xla"),
        (TracedDevice("gpu", "AMD MI300X"), 64, "bfloat16", "xla"),
    ],
)
def test_by_cudnn_where_it_can_run(cudnn, monkeypatch, device, width, dtype, form):
    trace_for(monkeypatch, device)
    assert ("dot_product_attention_fwd" in traced(*arrays(dtype, width))) == (form == "cudnn")
    if form == "xla":
        with pytest.raises(KernelError, match="attention cannot run with cuDNN here"):
            traced(*arrays(dtype, width), backend="cudnn")


@pytest.mark.parametrize(("device", "width"), [(A100, 256), (H100, 264), (H100, 60)])
def test_heads_that_cudnn_does_not_take_are_computed_in_plain_form_and_said(cudnn, monkeypatch, device, width):
    trace_for(monkeypatch, device)
    with pytest.warns(UserWarning, match=f"and is {width}"):
        assert "dot_product_attention_fwd" not in traced(*arrays(width=width))
    assert "dot_product_attention_fwd" not in traced(*arrays(width=width), backend="xla")  # and no warning
    with pytest.raises(KernelError, match=rf"and is {width}(.|\n)*do: *backend=\"auto\""):
        traced(*arrays(width=width), backend="cudnn")


def test_settings_that_do_not_go_together():
    with pytest.raises(KernelError, match="does not have this backend"):
        traced(*arrays(), backend="flash")
    with pytest.raises(KernelError, match="queries_at_once needs causal attention"):
        traced(*arrays(), queries_at_once=4)
