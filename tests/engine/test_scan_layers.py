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
from jshard.inspect import collectives, full_bytes
from tests.helpers import Config, Decoder, compile_to_read, loss_fn, placed, token_batch, with_placement
from tests.parity import GRADIENT_TOLERANCE, flat, worst
from tests.wide import wide

DEEP = Config(layers=6, attends=False)  # some rounds of the loop, beside the layers before and after it
BATCH = token_batch(DEEP, batch=16, length=8)


class Scanning(Decoder):
    """The decoder, with `scan_layers` in the place of its loop."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = js.scan_layers(self.blocks, self.embed(ids))
        return self.embed.attend(self.norm(x))


def build(config: Config = DEEP) -> Scanning:
    return Scanning(config, nnx.Rngs(0))


@functools.cache
def builder(config: Config) -> Any:
    return lambda: build(config)


def annotate(model: Scanning, mesh: Any, **settings: Any) -> None:
    if model.config.scanned:
        js.fully_shard(model.blocks, mesh=mesh, **with_placement(stacked=1, **settings))
    else:
        for block in model.blocks:
            js.fully_shard(block, mesh=mesh, **with_placement(**settings))
    js.fully_shard(model, mesh=mesh)


def annotated(mesh: Any, config: Config = DEEP, **settings: Any) -> Scanning:
    """Made whole and then placed: a program that makes its layers is dearer than all else here."""
    return placed(builder(config), lambda model: annotate(model, mesh, **settings))


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
        (LIST, {}, {}),
        (LIST, {"prefetch": 0, "remat": "full"}, {}),
        (LIST, {"reshard_after_forward": 2}, {}),
        wide(LIST, {"prefetch": "600KiB", "remat": "full"}, {}),
        wide(LIST, {"prefetch": 2, "remat": "dots"}, {"replica": 2}),
        wide(LIST, {"prefetch": None}, {}),
        (STACKED, {"remat": "full"}, {"replica": 2}),
        wide(STACKED, {"prefetch": 2, "reshard_after_forward": 2}, {}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_loop_on_one_device(scanned, settings, axes):
    mesh = js.mesh(**({"fsdp": -1} | axes))
    model = annotated(mesh, dataclasses.replace(DEEP, scanned=scanned), **settings)
    assert_equal(gradients(model), wanted(scanned))


def test_plain_and_in_global_view_it_is_the_loop():
    assert_equal(gradients(build()), wanted(False))
    model = annotated(js.mesh(fsdp=-1))
    with js.global_view():
        assert_equal(gradients(model), wanted(False))
    stacked = dataclasses.replace(DEEP, scanned=True)
    assert_equal(gradients(build(stacked)), wanted(True))


def test_microbatches_with_one_reduction():
    model = annotated(js.mesh(fsdp=4, devices=jax.devices()[:4]))
    grad = js.value_and_grad(loss_fn, accumulate=4, sync="last")
    _, grads = nnx.jit(lambda model, *batch: grad(model, *batch))(model, *BATCH)
    assert_equal(flat(grads), wanted(False))


@pytest.mark.parametrize(
    ("settings", "gathers"), [({}, 2.0), ({"prefetch": 2, "reshard_after_forward": False}, 1.0)], ids=str
)
def test_nothing_is_gathered_or_reduced_in_vain(settings, gathers):
    """The root is next to nothing beside a layer."""
    config, mesh = Config(layers=6, width=256, hidden=1024, heads=4, vocab=64), js.mesh(fsdp=-1)
    model = js.abstract_init(lambda: build(config), lambda m: annotate(m, mesh, remat="full", **settings))
    run = nnx.jit(lambda model, *batch: nnx.value_and_grad(loss_fn)(model, *batch))
    found = collectives(compile_to_read(run.lower(model, *token_batch(config, 8, 8)).lowered))
    part = lambda kind: full_bytes(found, kind, over=1) / js.plan(model).logical_bytes
    assert part("all-gather") == pytest.approx(gathers, abs=0.01)
    assert part("reduce-scatter") == pytest.approx(1.0, abs=0.01) and part("all-reduce") < 0.01


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


@functools.cache
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
        js.fully_shard(layer, mesh=mesh, remat=remat, placement=js.ShardPlacement(min_size=256))
    js.fully_shard(model, mesh=mesh)
    grad = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param)))
    return [flat(grad(model, *batch)) for _ in range(2)], flat(nnx.state(model, nnx.Not(nnx.Param)))


@pytest.mark.parametrize("remat", [wide("none"), "full"])
def test_dropout_statistics_caches_and_auxiliary_losses(remat):
    (loop_grads, loop_state), (scan_grads, scan_state) = noisy(True, "none"), noisy(False, remat)
    for a, b in zip(scan_grads, loop_grads, strict=True):
        assert_equal(a, b)
    assert any(worst(loop_grads[0][k], loop_grads[1][k]) > 0.01 for k in loop_grads[0])  # the masks are fresh ones
    for key in loop_state:
        np.testing.assert_allclose(scan_state[key], loop_state[key], rtol=1e-5, atol=1e-6, err_msg=key)
    assert scan_state[f"layers/{NOISY - 1}/calls"] == 2


@pytest.mark.parametrize("settings", [{"prefetch": 2}, {"delay_reduce": False}], ids=str)
def test_settings_that_have_no_effect_any_more_are_named(settings):
    layers = [linear(), linear(seed=1)]
    with pytest.warns(FutureWarning, match=r"have no effect any more(.|\n)*js.fully_shard"):
        found = js.scan_layers(layers, jnp.ones((16, 32)), **settings)
    np.testing.assert_array_equal(found, layers[1](layers[0](jnp.ones((16, 32)))))


def linear(size: int = 32, seed: int = 0) -> nnx.Linear:
    return nnx.Linear(32, size, rngs=nnx.Rngs(seed))
