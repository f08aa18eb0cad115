"""`js.kernels.attention` on TPUs: JAX's splash kernel, step by step on a CPU, has the numbers of the plain form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import jshard as js
from jshard.kernels import KernelError
from jshard.kernels.device import TracedDevice
from tests.engine.test_attention import arrays, traced
from tests.fake_cudnn import trace_for
from tests.helpers import equations_run

V5E = TracedDevice("tpu", "TPU v5 lite")
B, T, H, G, K = 4, 256, 4, 2, 64
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "all, scaled": {"scale": 0.3},
    "lengths": {"lengths": jnp.array([256, 3, 129, 1], jnp.int32)},
}


@pytest.fixture(autouse=True)
def splash(monkeypatch):
    """On one TPU, whose kernels run step by step."""
    trace_for(monkeypatch, V5E)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)


TOLERANCE = 0.03


def largest_error(result: Any, expected: Any) -> float:
    """The largest difference in any array of a tree, as a share of the largest value expected there."""
    errors = []
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        x = np.asarray(x, np.float64)
        y = np.asarray(y, np.float64)
        errors.append(np.abs(x - y).max() / np.abs(y).max())
    return max(errors)


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_numbers_of_the_plain_form_and_its_gradients(case):
    rng = np.random.default_rng(1)
    ct = jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.float32)
    given = [rng.normal(size=(B, T, heads, K)) for heads in (H, G, G)]

    def outcome(dtype, backend):
        loss = lambda *xs: (js.kernels.attention(*xs, **CASES[case], backend=backend).astype(jnp.float32) * ct).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(x, dtype) for x in given))

    assert largest_error(outcome("bfloat16", "splash"), outcome("float32", "xla")) <= TOLERANCE


class ScalesHeads(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones((H, 3 * K)))

    def __call__(self, x, backend):
        x = js.parallel.hold((x * self.scale[None, None]).astype(jnp.bfloat16), None, None, "tensor")
        q, k, v = jnp.split(x, 3, axis=-1)
        return js.kernels.attention(q, k, v, is_causal=True, backend=backend).astype(jnp.float32)


def kernels_in(model: ScalesHeads, x: jax.Array) -> list[Any]:
    """The kernels of a step, whose numbers are those of the plain form."""

    @nnx.jit(static_argnames="backend")
    def step(model, x, backend):
        return nnx.value_and_grad(lambda m: jnp.sin(m(x, backend)).sum())(model)

    assert largest_error(step(model, x, "splash"), step(model, x, "xla")) <= TOLERANCE
    graph, state = nnx.split(model)
    program = jax.make_jaxpr(lambda state, x: step(nnx.merge(graph, state), x, "splash"))(state, x)
    return [e for e in equations_run(program.jaxpr) if e.primitive.name == "pallas_call"]


@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), ("minimal_flash", 1), ("dots", 1), ("full", 2)])
def test_on_data_shards_it_runs_on_the_examples_of_each(remat, forwards):
    """Policies that keep "context" keep what its backward needs: forward runs once."""
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    model = js.fully_shard(ScalesHeads(), mesh=mesh, remat=remat)
    x = js.shard_batch(jnp.asarray(np.random.default_rng(2).normal(size=(8, 128, H, 3 * K)), jnp.float32), mesh)
    assert sum("splash_mha_fwd" in str(e.params["name"]) for e in kernels_in(model, x)) == forwards


def test_over_a_tensor_axis_it_runs_on_a_part_of_the_heads():
    mesh = js.mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    model = js.fully_shard(ScalesHeads(), mesh=mesh)
    x = js.shard_batch(jnp.asarray(np.random.default_rng(2).normal(size=(4, 128, H, 3 * K)), jnp.float32), mesh)
    assert {e.invars[-2].aval.shape[:2] for e in kernels_in(model, x)} == {(2, H // 2)}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (arrays("float32", length=128), "it needs bfloat16 or float16"),
        (arrays(width=72, length=128), "head dim must be a multiple of 64, and is 72"),
        (arrays(length=200), "the lengths must be multiples of 128, and are 200 and 200"),
    ],
)
def test_what_it_does_not_take_is_computed_in_plain_form(given, why):
    if "float16" not in why:
        with pytest.warns(UserWarning, match=why):
            assert "per_example" not in traced(*given)
    with pytest.raises(KernelError, match=rf"cannot run with the TPU kernel here(.|\n)*{why}"):
        traced(*given, backend="splash")


def test_elsewhere_it_is_refused(monkeypatch):
    assert "per_example" in traced(*arrays(length=128))
    trace_for(monkeypatch, TracedDevice("cpu", "cpu"))
    assert "per_example" not in traced(*arrays(length=128))
    with pytest.raises(KernelError, match="it needs a TPU, not cpu"):
        traced(*arrays(length=128), backend="splash")
