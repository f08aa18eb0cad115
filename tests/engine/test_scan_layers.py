"""`js.scan_layers` is the loop over layers in every schedule: the same gradients, the communication asked for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.helpers import Config, Decoder, Scanning, annotator, loss_fn, placed, token_batch
from tests.parity import GRADIENT_TOLERANCE, flat, worst

DEEP = Config(layers=4, attends=False)  # some rounds of the loop, beside the layers before and after it
BATCH = token_batch(DEEP, batch=16, length=8)


@functools.cache
def wanted(scanned: bool) -> dict[str, np.ndarray]:
    """Gradients of the plain loop on one device."""
    model = Decoder(dataclasses.replace(DEEP, scanned=scanned), nnx.Rngs(0))
    return flat(nnx.jit(nnx.grad(loss_fn))(model, *BATCH))


def gradients(model: nnx.Module) -> dict[str, np.ndarray]:
    return flat(nnx.jit(nnx.grad(loss_fn))(model, *BATCH))


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    apart = {k: worst(found[k], expected[k]) for k in expected}
    assert max(apart.values()) <= GRADIENT_TOLERANCE, max(apart.items(), key=lambda item: item[1])


LIST, STACKED = False, True


@pytest.mark.parametrize(
    ("scanned", "settings", "axes"),
    [
        (LIST, {"reshard_after_forward": 2}, {}),
        (STACKED, {"remat": "full"}, {"replica": 2}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loop_on_one_device(scanned, settings, axes):
    config, mesh = dataclasses.replace(DEEP, scanned=scanned), js.mesh(**axes)
    model = placed(lambda: Scanning(config, nnx.Rngs(0)), annotator(mesh, **settings))
    assert_equal(gradients(model), wanted(scanned))


def test_plain_and_in_global_view_it_is_the_loop():
    build = lambda: Scanning(DEEP, nnx.Rngs(0))
    assert_equal(gradients(build()), wanted(False))
    model = placed(build, annotator(js.mesh()))
    with js.global_view():
        assert_equal(gradients(model), wanted(False))


NOISY = 3  # layers


class Noisy(nnx.Module):
    """A layer with all that is hard: dropout, statistics, an argument and an output of its own, an auxiliary loss."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(32, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, carry: dict, cache: jax.Array, mask: jax.Array, *, scale: float = 1.0) -> tuple[dict, Any]:
        self.calls[...] += 1
        x = carry["x"]
        h = self.dropout(jax.nn.gelu(self.inner(self.norm(x) * mask[None])))
        y = x + scale * self.outer(h) + cache
        return {"x": y, "depth": carry["depth"] + 1}, {"aux": (h**2).mean(-1), "cache": y}


class NoisyStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, loop: bool):
        self.layers = nnx.List([Noisy(rngs) for _ in range(NOISY)])
        self.loop = loop

    def __call__(self, x: jax.Array, caches: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        carry = {"x": x, "depth": jnp.zeros((), jnp.int32)}
        caches = jnp.moveaxis(caches, 1, 0)
        if self.loop:
            found = []
            for i, layer in enumerate(self.layers):
                carry, out = layer(carry, caches[i], mask, scale=0.5)
                found.append(out)
            outs = jax.tree.map(lambda *rows: jnp.stack(rows), *found)
        else:
            carry, outs = js.scan_layers(self.layers, carry, mask, xs=caches, collect=True, scale=0.5)
        return carry["x"], outs["aux"].sum(0), jnp.moveaxis(outs["cache"], 0, 1)


def noisy(loop: bool, remat: str) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Gradients of two steps, and the state after them."""
    mesh = js.mesh(replica=2, fsdp=4)
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=s).astype(np.float32) for s in ((16, 32), (16, NOISY, 32))] + [np.ones(32, np.float32)]

    def loss(model, x, caches, mask):
        y, aux, new = model(x, caches, mask)
        return (y**2).mean() + aux.mean() + (new * caches).mean()

    model = NoisyStack(nnx.Rngs(0), loop)
    for layer in model.layers:
        js.fully_shard(layer, mesh=mesh, remat=remat, placement=js.PlacementPolicy(min_size=256))
    js.fully_shard(model, mesh=mesh)
    grad = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param)))
    return [flat(grad(model, *batch)) for _ in range(2)], flat(nnx.state(model, nnx.Not(nnx.Param)))


@pytest.mark.wide
def test_dropout_statistics_caches_and_auxiliary_losses():
    (loop_grads, loop_state), (scan_grads, scan_state) = noisy(True, "none"), noisy(False, "full")
    for a, b in zip(scan_grads, loop_grads, strict=True):
        assert_equal(a, b)
    assert any(worst(loop_grads[0][k], loop_grads[1][k]) > 0.01 for k in loop_grads[0])  # the masks are fresh ones
    for key in loop_state:
        np.testing.assert_allclose(scan_state[key], loop_state[key], rtol=1e-5, atol=1e-6, err_msg=key)
    assert scan_state[f"layers/{NOISY - 1}/calls"] == 2
