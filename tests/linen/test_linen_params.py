"""Parameters of a Linen model that are tuples or other pytrees: each of their arrays is placed and trained."""

import collections
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard as js
from jshard.recipes.building import batch_of, create
from jshard.train import TrainStep, load_model_file
from tests import micro_linen

D = 64
X = np.random.default_rng(0).normal(size=(16, D)).astype(np.float32)

Pair = collections.namedtuple("Pair", "g, v")


@flax.struct.dataclass
class Record:
    g: Any
    v: Any
    name: str = flax.struct.field(pytree_node=False, default="factors")


FORMS = {
    "tuple": (lambda g, v: (g, v), lambda p: p),
    "list": (lambda g, v: [g, v], lambda p: p),
    "namedtuple": (Pair, lambda p: (p.g, p.v)),
    "dataclass": (Record, lambda p: (p.g, p.v)),
    "nested": (lambda g, v: {"a": (g, {"v": v})}, lambda p: (p["a"][0], p["a"][1]["v"])),
    "boxes": (lambda g, v: (g, nn.Partitioned(v, (None, None))), lambda p: p),
}


class Factors(nn.Module):
    """A weight as a scale of each column and the rest."""

    form: str
    width: int = D

    @nn.compact
    def __call__(self, x):
        make, take = FORMS[self.form]

        def init(key, shape):
            w = jax.random.normal(key, shape) / 8
            g = jnp.exp(jax.random.normal(key, (1, shape[-1])))
            return make(g, w / g)

        g, v = take(self.param("kernel", init, (x.shape[-1], self.width)))
        return x @ (g * v)


class TwoFactors(nn.Module):
    form: str
    width: int = D

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(Factors(self.form, self.width, name="first")(x))
        return nn.Dense(8)(Factors(self.form, self.width, name="second")(x))


def numbers(tree):
    return [np.asarray(x) for x in jax.tree.leaves(nn.unbox(tree))]


def same(found, wanted, tolerance=2e-5):
    for x, y in zip(numbers(found), numbers(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-6)


def trained(model, params, tx, grad=None):
    loss_fn = lambda params, x: (model.apply({"params": params}, x) ** 2).mean()
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        loss, grads = (grad or jax.value_and_grad)(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(3):
        params, state, loss = step(params, state, X)
        losses.append(float(loss))
    return params, state, losses


def annotated(form, width=D, mesh=None, **settings):
    model = js.fully_shard(TwoFactors(form, width), mesh=mesh or js.mesh(), **settings)
    return model, js.shard_init(lambda: model.init(jax.random.key(0), X)["params"], model)


@pytest.mark.parametrize("units", [None, Factors], ids=["root", "units"])
@pytest.mark.parametrize("form", FORMS)
def test_it_trains_as_in_plain_flax_and_is_sharded(form, units):
    plain = TwoFactors(form)
    params = plain.init(jax.random.key(0), X)["params"]
    wanted = trained(plain, params, optax.adamw(1e-2))
    model, params = annotated(form, units=units)
    shapes = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params["first"])}
    assert shapes == {(1, D), (D // 8, D)}, "the matrix is sharded, the scale is small"
    found = trained(model, params, js.shard_optimizer(model, optax.adamw(1e-2)))
    same(found, wanted, 1e-4)
    assert jax.tree.structure(found[0]) == jax.tree.structure(params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(found[0]), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    text = str(js.explain(model))
    assert "first/kernel/" in text and "second/kernel/" in text
    step = jax.jit(jax.grad(lambda params, x: (model.apply({"params": params}, x) ** 2).mean()))
    report = js.audit(step.lower(params, X).compile(), model=model)
    assert report.ok, report


@pytest.mark.wide
def test_a_padded_one_trains_too():
    plain = TwoFactors("tuple", 65)
    wanted = trained(plain, plain.init(jax.random.key(0), X)["params"], optax.adam(1e-2))
    model, params = annotated("tuple", 65, placement=js.PlacementPolicy(shard_dim=lambda p, shape: len(shape) - 1))
    found = trained(model, params, js.shard_optimizer(model, optax.adam(1e-2)))
    logical = [np.asarray(x) for x in jax.tree.leaves(found, is_leaf=lambda x: hasattr(x, "padding"))]
    for x, y in zip(logical, numbers(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_microbatches_and_a_part_of_the_parameters(sync):
    plain = TwoFactors("tuple")
    params = plain.init(jax.random.key(0), X)["params"]
    loss_of = lambda model: lambda params, x: (model.apply({"params": params}, x) ** 2).mean()
    wanted = jax.value_and_grad(loss_of(plain))(params, X)
    model, params = annotated("tuple")
    run = functools.partial(js.value_and_grad, loss_of(model), model=model, accumulate=2, sync=sync)
    same(jax.jit(run())(params, X), wanted)
    _, grads = jax.jit(run(wrt="*/kernel/1"))(params, X)
    assert [x.shape for x in jax.tree.leaves(grads)] == [(D, D)] * 2


@pytest.mark.parametrize("form", ["tuple", "namedtuple", "dataclass"])
def test_it_is_saved_and_restored_on_another_mesh(form, tmp_path):
    model, params = annotated(form)
    js.checkpoint.save(tmp_path / "a", {"params": params})
    other, like = annotated(form, mesh=js.mesh(replica=2, fsdp=4))
    like = jax.tree.map(jnp.zeros_like, like)
    restored = js.checkpoint.restore(tmp_path / "a", like={"params": like})["params"]
    same(restored, params, 0)
    np.testing.assert_allclose(
        other.apply({"params": restored}, X), model.apply({"params": params}, X), rtol=1e-5, atol=1e-5
    )


def test_stacked_layers_of_it_are_gathered_one_by_one():
    class ScannedFactors(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(Factors("tuple", name="inner")(x)), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(ScannedFactors, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(name="layers")(x, None)[0]

    plain = Deep()
    params = plain.init(jax.random.key(0), X)
    loss_of = lambda model: jax.jit(jax.value_and_grad(lambda v: (model.apply(v, X) ** 2).mean()))
    model = js.fully_shard(Deep(), units=ScannedFactors, mesh=js.mesh())
    placed = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    same(loss_of(model)(placed), loss_of(plain)(params))

    compiled = loss_of(model).lower(placed).compile()
    windows = js.audit(compiled, model=model).schedule.windows
    layer_bytes = 64 * 64 * 4  # of its kernel; the vectors are small, and replicated
    assert {window.full_bytes for window in windows if window.kind == "all-gather"} == {layer_bytes}


def test_a_model_file_trains_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        Path(micro_linen.__file__).read_text()
        + """

import flax.linen as nn
import jax
import jax.numpy as jnp


class Adapted(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, ids):
        y = self.inner(ids)
        size = y.shape[-1]
        init = lambda key: (jnp.ones((1, 1, size)), jax.random.normal(key, (size, size)) * 0.02)
        g, v = self.param("kernel", init)
        return y + (y @ v) * g


def build(config, rngs):
    return Adapted(Decoder(config.depth, config.rate, config.norm))
"""
    )
    model_file = load_model_file(file)
    recipe = model_file.recipes["micro"]()
    model, optimizer = create(model_file, recipe, js.mesh())
    assert {leaf.path for leaf in js.plan(model).leaves} >= {"kernel/0", "kernel/1"}
    before = jax.tree.map(np.asarray, model.variables["params"]["kernel"])
    assert isinstance(before, tuple)
    batch = batch_of(model_file, recipe, 16, js.mesh())
    step = TrainStep(model_file.loss_fn, model, optimizer, batch)
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), batch)
    losses = [float(step(zeros)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    after = step.model.variables["params"]["kernel"]
    assert not np.allclose(before[1], after[1])
