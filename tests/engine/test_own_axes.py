"""A model that names mesh axes for its parameters trains under the three lines, whatever the mesh has of them."""

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
NAMES = {"up": ("fsdp", "tp"), "down": ("tp", "fsdp")}


class Block(nnx.Module):
    """Names that public models have: `fsdp`, and a tensor axis of their own."""

    def __init__(self, names, rngs):
        self.up, self.down = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))
        self.up.kernel.set_metadata(out_sharding=names["up"], eager_sharding=False)
        self.down.kernel.set_metadata(out_sharding=names["down"], eager_sharding=False)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def specs(model) -> dict:
    return {leaf.path: leaf.placement.spec for leaf in js.plan(model).leaves if leaf.path.endswith("kernel")}


def test_axes_that_split_nothing_are_dropped():
    model = js.fully_shard(Block(NAMES, nnx.Rngs(0)), mesh=js.mesh())
    assert specs(model) == {"up/kernel": ("fsdp", None), "down/kernel": ("fsdp", None)}
    grad = nnx.jit(nnx.grad(lambda model: (model(X) ** 2).mean()))
    found, wanted = grad(model), grad(Block(NAMES, nnx.Rngs(0)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_fsdp_moves_beside_a_tensor_axis_that_is_kept():
    names = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
    model = js.fully_shard(Block(names, nnx.Rngs(0)), mesh=js.mesh(fsdp=4, tensor=2))
    assert specs(model) == {"up/kernel": ("fsdp", "tensor"), "down/kernel": ("tensor", "fsdp")}


def test_an_unknown_axis_is_an_error_where_it_could_be_the_tensor_axis():
    with pytest.raises(AnnotationError, match="'tp': the mesh has"):
        js.fully_shard(Block(NAMES, nnx.Rngs(0)), mesh=js.mesh(fsdp=4, tensor=2))
