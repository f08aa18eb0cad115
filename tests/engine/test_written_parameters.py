"""Parameters that a call writes, as Flax's WeightNorm and SpectralNorm do: as in plain Flax, or an error that helps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js

D = 64
X = np.random.default_rng(0).standard_normal((16, D)).astype("f")


class Weight(nnx.Module):
    width = D

    def __init__(self, rngs):
        width = self.width
        self.first = nnx.Linear(D, width, rngs=rngs)
        self.normed = nnx.List([nnx.WeightNorm(nnx.Linear(width, width, rngs=rngs), rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.normed:
            x = x + jnp.tanh(layer(x))
        return x


class Uneven(Weight):
    """Its layers are stored padded."""

    width = 65


class Spectral(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.normed = nnx.List([nnx.SpectralNorm(nnx.Linear(D, D, rngs=rngs), rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.normed:
            x = x + jnp.tanh(layer(x, update_stats=True))
        return x


class Clipped(nnx.Module):
    """A method of the user's own, which writes a parameter of a layer inside, and reads it again."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(D, D, rngs=rngs)

    @nnx.remat
    def through(self, x):
        return self.inner(x)

    def __call__(self, x):
        self.inner.kernel.set_value(jnp.clip(self.inner.kernel[...], -0.1, 0.1))
        return self.through(x) + self.inner.kernel[...].sum()


def trained(model, optimizer, calls=1):
    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return sum((model(x + i) ** 2).mean() for i in range(calls))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, X)) for _ in range(3)]


SETTINGS = {
    "root": {},
    "units": {"units": (nnx.WeightNorm, nnx.SpectralNorm)},
    "kept": {"units": (nnx.WeightNorm, nnx.SpectralNorm), "reshard_after_forward": False},
    "remat": {"remat": "full"},
    "padded": {"placement": js.PlacementPolicy(shard_dim=0, min_size=1)},
}


CASES = [(kind, settings) for kind in (Weight, Spectral, Clipped) for settings in ("root", "units", "kept", "remat")]


@pytest.mark.parametrize(("kind", "settings"), [*CASES, (Uneven, "padded")])
def test_three_steps_of_adam_equal_plain_flax(kind, settings):
    given = dict(SETTINGS[settings])
    if "units" in given:
        given["units"] = lambda path, module, kinds=given["units"]: isinstance(module, kinds) or path == "inner"
    plain = kind(nnx.Rngs(0))
    wanted = trained(plain, nnx.Optimizer(plain, optax.adam(1e-2), wrt=nnx.Param), calls=2)
    model = js.fully_shard(kind(nnx.Rngs(0)), mesh=js.mesh(), **given)
    shardings = {path: v.get_raw_value().sharding for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    found = trained(model, js.shard_optimizer(model, optax.adam(1e-2)), calls=2)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    states = [nnx.to_pure_dict(nnx.state(one, nnx.Any(nnx.Param, nnx.BatchStat))) for one in (model, plain)]
    logical = [jax.tree.map(np.asarray, state) for state in states]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), *logical)
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert v.get_raw_value().sharding.is_equivalent_to(shardings[path], v.get_raw_value().ndim), path


def test_a_call_that_is_not_differentiated_writes_too():
    plain, model = Weight(nnx.Rngs(0)), js.fully_shard(Weight(nnx.Rngs(0)), mesh=js.mesh())
    before = model.normed[0].layer_instance.kernel[...]
    sharding = before.sharding
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-5)
    kernel = model.normed[0].layer_instance.kernel[...]
    np.testing.assert_allclose(kernel, plain.normed[0].layer_instance.kernel[...], rtol=1e-5, atol=1e-6)
    assert not np.allclose(kernel, before) and kernel.sharding == sharding
    report = js.check(model, X)
    assert report.worst < 1e-4


def test_a_parameter_that_the_call_has_rounded_is_refused_with_what_helps():
    half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    mesh = js.mesh()
    model = js.fully_shard(Weight(nnx.Rngs(0)), mesh=mesh, mixed_precision=half)
    with pytest.raises(js.ShardingError, match="A parameter was written inside the call") as caught:
        model(X)
    assert "normed/0/layer_instance/kernel  stored as float32, used as bfloat16" in str(caught.value)
    model = Weight(nnx.Rngs(0))
    for layer in model.normed:  # what the error says
        exec(caught.value.do, {"js": js, "mesh": mesh, "model": type("", (), {"layer": layer})})
    js.fully_shard(model, mesh=mesh, mixed_precision=half)
    trained(model, js.shard_optimizer(model, optax.adam(1e-2)))
    wire = js.MixedPrecision(gather_dtype="float8_e4m3fn")
    model = js.fully_shard(Spectral(nnx.Rngs(0)), mesh=mesh, mixed_precision=wire)
    with pytest.raises(js.ShardingError, match="used as float8_e4m3fn"):
        model(X)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_microbatches_refuse_it(sync):
    model = js.fully_shard(Weight(nnx.Rngs(0)), mesh=js.mesh())
    run = js.value_and_grad(lambda model, x: (model(x) ** 2).mean(), accumulate=2, sync=sync)
    with pytest.raises(js.ShardingError, match=r"written inside the call[\s\S]*accumulate=1"):
        run(model, X)
    rematted = js.fully_shard(Rematted(nnx.Rngs(0)), mesh=js.mesh())  # passes its parameters on as they are
    loss, _ = js.value_and_grad(lambda model, x: (model(x) ** 2).mean(), accumulate=2, sync=sync)(rematted, X)
    assert np.isfinite(loss)


class Rematted(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(D, D, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


class Reshaped(Rematted):
    def __call__(self, x):
        y = self.inner(x)
        self.inner.kernel.set_value(self.inner.kernel[...][:8])
        return y


def test_a_parameter_of_another_shape_is_refused():
    model = js.fully_shard(Reshaped(nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(js.ShardingError, match=r"inner/kernel[\s\S]*another shape"):
        model(X)


def test_scanned_layers_name_the_loop_that_runs_them():
    class Scanned(Weight):
        def __call__(self, x):
            return js.scan_layers(self.normed, self.first(x))

    model = js.fully_shard(Scanned(nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(js.ShardingError, match="for layer in layers: x = layer"):
        model(X)
