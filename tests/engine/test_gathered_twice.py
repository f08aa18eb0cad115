"""A step gathers each unit twice, whatever loop and checkpoint of the user's it is in: for forward, and for backward.

What forward ran again for a checkpoint has gathered serves the backward that follows it.
"""

import collections
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import jshard as js
from tests.linen_models import WIDTH, Block

LAYERS = 4
X = jnp.zeros((16, WIDTH))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block()(x), None


class Tower(nn.Module):
    remat: bool
    scan: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            stacked: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(layer, length=LAYERS, **stacked)(name="layers")(x, None)[0]
        for _ in range(LAYERS):
            x, _ = layer()(x, None)
        return x


def gathered(jaxpr: Any, times: int, found: collections.Counter) -> collections.Counter:
    """How often arrays of each shape are gathered, loops counted."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            found[eqn.outvars[0].aval.shape] += times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jex.jaxprs_in_params(eqn.params):
            gathered(inner, times * trips, found)
    return found


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("settings", [{}, {"prefetch": 0}, {"reshard_after_forward": 4}], ids=str)
def test_each_unit_is_gathered_once_a_pass(settings, remat, scan):
    model = js.fully_shard(Tower(remat, scan), mesh=js.mesh(), units=Layer, **settings)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    grad = jax.grad(lambda params: (model.apply({"params": params}, X) ** 2).mean())
    found = gathered(jax.make_jaxpr(grad)(params).jaxpr, 1, collections.Counter())
    assert found == {(WIDTH, 4 * WIDTH): 2 * LAYERS, (4 * WIDTH, WIDTH): 2 * LAYERS}


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_what_is_kept_is_gathered_once(scan):
    model = js.fully_shard(Tower(remat=False, scan=scan), mesh=js.mesh(), units=Layer, reshard_after_forward=False)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    grad = jax.grad(lambda params: (model.apply({"params": params}, X) ** 2).mean())
    found = gathered(jax.make_jaxpr(grad)(params).jaxpr, 1, collections.Counter())
    assert found == {(WIDTH, 4 * WIDTH): LAYERS, (4 * WIDTH, WIDTH): LAYERS}


@pytest.mark.parametrize("settings", [{}, {"prefetch": 2}, {"reshard_after_forward": 4}], ids=str)
def test_gradients_through_a_checkpoint_in_a_loop_are_those_of_one_device(settings):
    """The last gradients of a trip are reduced in the next one, out of the checkpoint, too."""
    plain = Tower(remat=True, scan=True)
    model = js.fully_shard(plain, mesh=js.mesh(replica=2), units=Layer, **settings)
    params = jax.jit(plain.init)(jax.random.key(0), X)["params"]
    x = jax.random.normal(jax.random.key(1), X.shape)
    loss = lambda model, params: (model.apply({"params": params}, x) ** 2).mean()
    found, wanted = (jax.jit(jax.grad(functools.partial(loss, m)))(params) for m in (model, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, wanted)
