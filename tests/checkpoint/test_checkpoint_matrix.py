"""What is saved under one strategy comes back under every other, bit for bit, and training continues from there.

The same with two processes is in tests/processes/test_checkpoint_processes.py.
"""

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard import checkpoint
from tests.checkpoint.checkpoint_states import LAYOUTS, abstract, differences, filled, mesh_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint for each layout, of numbers of its own."""
    folder = tmp_path_factory.mktemp("matrix")
    for seed, layout in enumerate(LAYOUTS):
        checkpoint.save(folder / layout, filled(layout, seed))
    return folder


NAMES = list(LAYOUTS)
PAIRS = [(source, NAMES[number - step]) for number, source in enumerate(NAMES) for step in (0, 1, 2)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_restores_onto_itself_and_others(folder, source, target):
    """Every layout is a source and a target; tests/processes has further pairs."""
    restored = checkpoint.restore(folder / source, like=abstract(target))
    assert differences(restored, target, NAMES.index(source)) == []


def test_the_differences_are_seen(folder):
    """The test above can fail."""
    assert len(differences(filled("zero3", 0), "hsdp", 1)) > 20
    moved = differences(filled("zero3", 0), "replicate", 0)
    assert moved and all("is as" in line for line in moved)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def train(state, mesh, steps=3):
    x = js.shard_batch(np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32), mesh)
    return [float(step(state["model"], state["optimizer"], x)) for _ in range(steps)]


def test_training_continues_as_if_never_saved(tmp_path):
    """Bit for bit on the same mesh; on another, sums add in another order."""
    state = filled("zero3", 0)
    for name, value in nnx.to_flat_state(nnx.state(state["optimizer"])):
        if "nu" in name:
            value[...] = abs(value[...])  # squares
    with jax.threefry_partitionable(True):
        train(state, mesh_of("zero3"), 1)
        checkpoint.save(tmp_path / "c", state)
        unbroken = train(state, mesh_of("zero3"))
        same = checkpoint.restore(tmp_path / "c", like=abstract("zero3"))
        assert train(same, mesh_of("zero3")) == unbroken
        other = checkpoint.restore(tmp_path / "c", like=abstract("hsdp"))
        np.testing.assert_allclose(train(other, mesh_of("hsdp")), unbroken, rtol=1e-5)
