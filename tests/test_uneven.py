"""Parameters that no dim divides: stored padded, read without the padding, trained like on one device."""

import functools
import json
import math
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import jshard as js
from jshard import checkpoint
from jshard._padded import padding_of
from jshard.inspect.memory import memory_of
from tests.helpers import Config, Decoder, builder, loss_fn, placed, token_batch
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, Trained, compare, flat, train, worst

UNEVEN, EVEN = (251, 47, 151), (256, 64, 256)  # vocabulary, width, hidden: nothing divides the first ones
GPT2_VOCABULARY = 50257
ADAMW = optax.adamw(1e-2, eps=1e-3)  # gradients that are zero but for rounding stay small


def config(sizes=UNEVEN, *, tied: bool = True, scanned: bool = False, layers: int = 1) -> Config:
    vocab, width, hidden = sizes
    return Config(
        layers=layers, width=width, hidden=hidden, vocab=vocab, tied=tied, scanned=scanned, heads=1, attends=False
    )


def mesh_of(degree: str) -> jax.sharding.Mesh:
    if degree == "2x4":
        return js.mesh(replica=2, fsdp=4)
    return js.mesh(devices=jax.devices()[: int(degree)])


def annotator(mesh, **settings):
    """Everything is cut along its first dim that indexes no layers, biases too: all are padded where it is odd."""

    def annotate(model: Decoder) -> None:
        stacked = int(model.config.scanned)
        first = lambda path, shape: stacked
        for block in [model.blocks] if stacked else model.blocks:
            js.fully_shard(block, mesh=mesh, shard_dim=first, stacked=stacked, **settings)
        precision = {k: v for k, v in settings.items() if k == "mixed_precision"}
        js.fully_shard(model, mesh=mesh, shard_dim=0, **precision)

    return annotate


@functools.cache
def batch(vocab: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    return token_batch(Config(vocab=vocab), batch=size, length=4)


@functools.cache
def one_device(made: Config, size: int = 16) -> Trained:
    return train(builder(made)(), loss_fn, batch(made.vocab, size), steps=3, tx=ADAMW)


def assert_like_one_device(made: Config, mesh, size: int = 16, grad=None, **settings) -> None:
    model = placed(builder(made), annotator(mesh, **settings))
    found = train(model, loss_fn, batch(made.vocab, size), steps=3, tx=ADAMW, grad=grad)
    wanted = one_device(made, size)
    apart = compare(found, wanted)
    assert apart.gradient <= GRADIENT_TOLERANCE, apart
    assert apart.parameters <= PARAMETER_TOLERANCE, apart
    assert found.traces == 1
    table = "embed/embedding"
    assert found.gradients[table].shape == (made.vocab, made.width)
    assert worst(found.gradients[table], wanted.gradients[table]) <= GRADIENT_TOLERANCE
    moved = np.abs(found.parameters[table] - np.asarray(builder(made)().embed.embedding[...]))
    assert moved.max(1).min() > 0  # every row was updated, those of the last device too
    for variable in jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        assert not np.asarray(variable.get_raw_value())[tuple(slice(n, None) for n in variable.shape[:1])].any()


@pytest.mark.parametrize("degree", ["1", "2", "8", "2x4"])
@pytest.mark.parametrize("sizes", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_equal_to_one_device(tied, sizes, degree):
    assert_like_one_device(config(sizes, tied=tied), mesh_of(degree))


@pytest.mark.parametrize("degree", [3, 5, 6])
def test_on_odd_numbers_of_devices(degree):
    assert_like_one_device(config(), mesh_of(str(degree)), size=30)


@pytest.mark.parametrize("reshard", [False, 4])
def test_copies_that_are_kept_whole_or_in_part(reshard):
    assert_like_one_device(config(), js.mesh(), reshard_after_forward=reshard)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_accumulated(sync):
    grad = lambda loss: js.value_and_grad(loss, accumulate=2, sync=sync)
    assert_like_one_device(config(), js.mesh(), grad=grad)


def test_in_a_stack_of_layers():
    assert_like_one_device(config(scanned=True, layers=3), js.mesh(replica=2))
