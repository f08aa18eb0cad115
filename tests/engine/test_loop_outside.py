"""A loop outside of any region calls one layer of an annotated stack at a time: the numbers are those of one device."""

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.parity import GRADIENT_TOLERANCE, flat, worst
from tests.wide import wide

WIDTH = 64
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def stack(layers: int) -> nnx.Linear:
    build = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=layers)(build)(nnx.Rngs(0))


def loss_fn(layers: nnx.Linear) -> jax.Array:
    run = nnx.scan(lambda x, layer: nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return (run(X, layers) ** 2).mean()


@pytest.mark.parametrize(("layers", "stacked"), [(5, 1), (128, 0), wide(5, 0), wide(128, 1)])
def test_a_layer_is_a_row_of_its_stack(layers, stacked):
    """128 layers are the largest dim, along which the stack is split; of 5 a dim of the layer is."""
    placement = js.ShardPlacement(stacked=stacked)
    wanted, gradients = nnx.jit(nnx.value_and_grad(loss_fn))(stack(layers))
    sharded = js.shard_init(lambda: stack(layers), lambda m: js.fully_shard(m, mesh=js.mesh(), placement=placement))
    found, of_sharded = nnx.jit(nnx.value_and_grad(loss_fn))(sharded)
    assert abs(float(found - wanted)) <= 1e-6
    of_sharded, gradients = flat(of_sharded), flat(gradients)
    assert max(worst(of_sharded[path], x) for path, x in gradients.items()) <= GRADIENT_TOLERANCE
