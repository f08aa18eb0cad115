"""A run of a Linen model file: what no dim divides is padded, state may lie in host memory; it trains the same."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jshard as js
from jshard.engine.context import plain_flax
from jshard.recipes.state import create
from jshard.train import TrainStep
from tests.linen.test_linen_model_file import RECIPE, VOCAB, Block, Decoder, batches, cross_entropy, file_of


class Odd(nn.Module):
    """A kernel of 30 x 127, in a box of the user's own if it is to be."""

    boxed: bool = False

    @nn.compact
    def __call__(self, ids):
        init = nn.initializers.normal(0.1)
        x = nn.Embed(VOCAB, 30, name="table")(ids)
        kernel = nn.with_partitioning(init, (None, None)) if self.boxed else init
        x = nn.Dense(127, name="odd", kernel_init=kernel)(x)
        return nn.Dense(VOCAB, name="head")(nn.gelu(x))


def run_losses(file):
    """The state of a run after its steps, and their losses."""
    mesh = js.mesh()
    model, optimizer = create(file, RECIPE, mesh)
    step = TrainStep(file.loss_fn, model, optimizer, js.shard_batch(batches()[0], mesh))
    losses = [float(step(js.shard_batch(batch, mesh))["loss"]) for batch in batches()]
    return step, losses


def plain_losses(model):
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), batches()[0]["inputs"])["params"])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=RECIPE.optimizer())
    losses = []
    for batch in batches():
        loss_fn = lambda params, batch=batch: cross_entropy(
            model.apply({"params": params}, batch["inputs"]), batch["targets"]
        )
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.params)
        state = state.apply_gradients(grads=grads)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("boxed", [False, True], ids=["", "nn.Partitioned"])
@pytest.mark.wide
def test_a_parameter_that_no_dim_divides_is_padded(boxed):
    file = file_of(Odd(boxed), nn.Dense, shard_dim=lambda path, shape: 1 if shape == (30, 127) else None)
    step, losses = run_losses(file)
    assert js.plan(step.model).leaf("odd/kernel").placement.stored_shape == (30, 128)
    np.testing.assert_allclose(losses, plain_losses(Odd(boxed)), rtol=1e-5)


def test_state_and_parameters_lie_in_host_memory_and_the_losses_are_the_same():
    kinds = None, "optimizer", "params"
    steps, losses = zip(*(run_losses(file_of(Decoder(1), Block, offload=kind)) for kind in kinds), strict=True)
    memories = lambda held: "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(held))}
    assert [memories(step.optimizer) for step in steps] == [False, True, True]
    assert [memories(step.model) for step in steps] == [False, False, True]
    for away in losses[1:]:
        np.testing.assert_allclose(away, losses[0], rtol=1e-6)
    with plain_flax():  # what jshard is compared with
        batch = batches()[0]["inputs"]
        np.testing.assert_allclose(steps[2].model(batch), steps[0].model(batch), atol=1e-5)
