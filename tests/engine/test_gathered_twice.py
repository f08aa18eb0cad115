"""A step gathers each unit twice, whatever loop and checkpoint of the user's it is in: for forward, and for backward.

What forward ran again for a checkpoint has gathered serves the backward that follows it.
"""

import collections
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jshard as js
from tests.helpers import equations_and_trips
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


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize(
    ("remat", "settings"), [(False, {}), (True, {"prefetch": 0}), (True, {"reshard_after_forward": 4})]
)
def test_each_unit_is_gathered_once_a_pass(settings, remat, scan):
    assert_gathered(2 * LAYERS, remat, scan, settings)


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_what_is_kept_is_gathered_once(scan):
    assert_gathered(LAYERS, False, scan, {"reshard_after_forward": False})


def assert_gathered(times: int, remat: bool, scan: bool, settings: dict[str, Any]) -> None:
    model = js.fully_shard(Tower(remat, scan), mesh=js.mesh(), units=Layer, **settings)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    grad = jax.grad(lambda params: (model.apply({"params": params}, X) ** 2).mean())
    found = collections.Counter()
    for eqn, trips in equations_and_trips(jax.make_jaxpr(grad)(params).jaxpr):
        if eqn.primitive.name == "all_gather":
            found[eqn.outvars[0].aval.shape] += trips
    assert found == {(WIDTH, 4 * WIDTH): times, (4 * WIDTH, WIDTH): times}
