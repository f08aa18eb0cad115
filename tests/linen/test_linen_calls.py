"""Forms of a call of a Linen model: by a function, of a bound model and its submodules, and in global view."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard as js
from tests.linen_models import Residual

D = 64
X = np.random.default_rng(0).normal(size=(16, D)).astype(np.float32)


class Trunk(nn.Module):
    def setup(self):
        self.blocks = [Residual(2 * D) for _ in range(2)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D)(x)


class TrunkAndHead(nn.Module):
    head: nn.Module

    def setup(self):
        self.trunk = nn.remat(Trunk)()

    def __call__(self, x):
        return self.head(self.trunk(x))


def parts(model, x, scale=1.0):
    return model.head(model.trunk(x)) * scale


def blocks(model, x):
    for block in model.trunk.blocks:
        x = block(x)
    return model.head(x)


FORMS = {
    "function": lambda m, v, x: m.apply(v, x, method=parts),
    "partial": lambda m, v, x: m.apply(v, x, method=functools.partial(parts, scale=3.0)),
    "closure over the batch": lambda m, v, x: m.apply(v, method=lambda s: parts(s, x)),
    "bound method of another instance": lambda m, v, x: m.apply(v, x, method=TrunkAndHead(Head()).__call__),
    "nn.apply": lambda m, v, x: nn.apply(parts, m)(v, x),
    "mutable": lambda m, v, x: m.apply(v, x, method=parts, mutable=["batch_stats"])[0],
    "bind": lambda m, v, x: m.bind(v)(x),
    "bound submodules": lambda m, v, x: parts(m.bind(v), x),
    "submodules of bound submodules": lambda m, v, x: blocks(m.bind(v), x),
    "submodules of a dropped model": lambda m, v, x: m.bind(v).head(m.bind(v).trunk(x)),
}


@functools.cache
def models():
    plain = TrunkAndHead(Head())
    model = js.fully_shard(TrunkAndHead(Head()), units=Residual, mesh=js.mesh())
    params = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    return plain, plain.init(jax.random.key(0), X), model, params


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_is_a_region(form):
    plain, variables, model, params = models()
    loss_of = lambda m, v, x: (FORMS[form](m, v, x) ** 2).mean()
    wanted = jax.value_and_grad(functools.partial(loss_of, plain))(variables, X)
    step = jax.jit(jax.value_and_grad(functools.partial(loss_of, model)))
    compiled = step.lower(params, X).compile()
    found = compiled(params, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)
    report = js.audit(compiled, model=model)
    if jax.__version_info__ < (0, 12):  # from then on XLA:CPU runs one gather of the same program twice
        assert report.ok, report
    assert report.amount("reduce-scatter") == pytest.approx(1, abs=0.05)
    with js.global_view():
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), jax.jit(step)(params, X), wanted
        )


def test_init_by_a_function_places_the_parameters():
    model = js.fully_shard(TrunkAndHead(Head()), units=Residual, mesh=js.mesh())
    params = js.shard_init(lambda: model.init(jax.random.key(0), X, method=parts), model)
    kernel = params["params"]["head"]["Dense_0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (D // 8, D)
    assert js.explain(model)


def test_the_root_s_own_parameters_are_gathered_in_a_function():
    class ReadByHand(nn.Module):
        def setup(self):
            self.table = self.param("table", nn.initializers.normal(0.02), (128, D))

        def __call__(self, ids):
            return self.table[ids]

    score = lambda m, h: h @ m.table.T
    model = js.fully_shard(ReadByHand(), mesh=js.mesh())
    params = js.shard_init(lambda: model.init(jax.random.key(0), np.arange(16)), model)
    compiled = jax.jit(jax.grad(lambda v, x: (model.apply(v, x, method=score) ** 2).mean())).lower(params, X).compile()
    report = js.audit(compiled, model=model)
    assert report.ok, report


def test_a_submodule_called_before_init_is_traced_warns_once_with_what_helps():
    _, variables, *_ = models()
    model = js.fully_shard(TrunkAndHead(Head()), units=Residual, mesh=js.mesh())
    with pytest.warns(
        UserWarning, match=r"trunk of TrunkAndHead runs in global view[\s\S]*jax\.eval_shape\(model\.init"
    ):
        found = model.bind(variables).trunk(X)
    model.bind(variables).trunk(X)  # a second warning would be an error
    np.testing.assert_allclose(found, TrunkAndHead(Head()).bind(variables).trunk(X), rtol=1e-5, atol=1e-6)
    jax.eval_shape(model.init, jax.random.key(0), X)
    text = jax.jit(lambda v, x: model.bind(v).trunk(x)).lower(variables, X).as_text()
    assert "all_gather" in text


class Sampler(nn.Module):
    """Public methods that return what only the model's own scope can use."""

    width: int = D
    log: Any = None

    def setup(self):
        self.out = nn.Dense(self.width)

    def sampler(self):
        return self._noise

    def scaled(self, by):
        return lambda x: self.out(x) * by

    def layer(self):
        return self.out

    def twice(self, x):
        return self.layer()(self.layer()(x))

    def _noise(self, shape):
        return jax.random.normal(self.make_rng("gen"), shape)

    def __call__(self, x):
        x = x + self.sampler()(x.shape)
        return self.scaled(2.0)(x)


@pytest.mark.wide
@pytest.mark.parametrize("width", [D, 65], ids=["even", "padded"])
def test_in_global_view_a_model_calls_its_own_methods_as_plain_flax_does(width):
    x, rngs = np.ones((16, width), np.float32), {"gen": jax.random.key(1)}
    plain = Sampler(width)
    variables = plain.init({"params": jax.random.key(0), **rngs}, x)
    placement = js.PlacementPolicy(shard_dim=0)
    model = js.fully_shard(Sampler(width), mesh=js.mesh(), placement=placement)
    params = js.shard_init(lambda: model.init({"params": jax.random.key(0), **rngs}, x), model)
    js.shard_optimizer(model, optax.sgd(0.1))
    for call in (
        lambda m, v: m.apply(v, x, rngs=rngs),
        lambda m, v: m.apply(v, x, method="twice"),
        lambda m, v: m.apply(v, x, method=lambda s, x: s.layer()(x) + s.sampler()(x.shape), rngs=rngs),
    ):
        wanted = call(plain, variables)
        with js.global_view():
            for found in (call(model, params), jax.jit(functools.partial(call, model))(params)):
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
            grads = jax.jit(jax.grad(lambda v: (call(model, v) ** 2).mean()))(params)  # noqa: B023
            assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
    if width == D:
        with js.global_view():  # a bound model is the caller's own, not a copy
            bound = model.bind(params, rngs=rngs)
            np.testing.assert_allclose(bound.sampler()((3,)), plain.bind(variables, rngs=rngs).sampler()((3,)))
            assert bound.layer() is bound.out
