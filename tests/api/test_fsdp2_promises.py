"""What FSDP2's users do by hand or in hooks, and the line that does it here: the table in docs/from_fsdp2.md."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from tests.helpers import compile_to_read

WIDTH = 256
LAYERS = 8
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def on(mesh: Any) -> Any:
    def annotate(model: Model) -> None:
        js.fully_shard(model, units=Block, mesh=mesh)

    return annotate


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(16, WIDTH)), jnp.float32)


def mean_square(model: Model, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean(-1).mean()


def sum_of_squares(model: Model, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean(-1).sum()


def gradients(model: Model, loss: Any = mean_square) -> nnx.State:
    return nnx.jit(nnx.grad(loss))(model, batch())


def assert_equal(results: Any, expected: Any) -> None:
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-6)


def test_gradients_are_read_whole_like_parameters():
    """FSDP1's `summon_full_params(with_grads=True)`."""
    model = js.shard_init(Model, on(js.mesh()))
    values = js.gather(gradients(model))
    assert_equal(values, nnx.to_pure_dict(gradients(Model())))
    assert all(isinstance(value, np.ndarray) for value in jax.tree.leaves(values))


def test_one_unit_is_read_changed_and_written():
    """FSDP1's `summon_full_params(recurse=False, writeback=True)`."""
    model = js.shard_init(Model, on(js.mesh()))
    values = js.gather(model.blocks[3])
    values["linear"]["kernel"] *= 2
    model = js.load(model, {"blocks": {3: values}}, missing="init", only="blocks/3")
    plain = Model()
    plain.blocks[3].linear.kernel[...] *= 2
    assert_equal(js.gather(model), nnx.to_pure_dict(nnx.state(plain)))


def test_nothing_stays_gathered_after_a_call():
    """FSDP2's `reshard()`: a gathered copy is a value of the step, and no state of the model."""
    model = js.shard_init(Model, on(js.mesh()))
    x = batch()
    before = live_bytes()
    y = nnx.jit(lambda model, x: model(x))(model, x)
    assert live_bytes() - before == y.nbytes
    assert sum(bytes_on_a_device(x) for x in jax.tree.leaves(nnx.state(model))) == PARAMETER_BYTES // 8


def live_bytes() -> int:
    """Memory of all arrays on all devices."""
    return sum(bytes_on_a_device(array) * len(array.sharding.device_set) for array in jax.live_arrays())


def bytes_on_a_device(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def test_a_loss_that_is_a_sum_has_the_gradients_of_a_sum():
    """FSDP2's `set_gradient_divide_factor(1.0)`."""
    model = js.shard_init(Model, on(js.mesh(replica=2)))
    assert_equal(
        jax.tree.leaves(gradients(model, sum_of_squares)), [16 * x for x in jax.tree.leaves(gradients(Model()))]
    )


def test_a_function_of_gradients_stands_between_them_and_the_update():
    """FSDP2's `set_all_reduce_hook`, on gradients that are reduced."""

    def normalised(gradient: jax.Array) -> jax.Array:
        return gradient / jnp.linalg.norm(gradient)  # of the whole matrix

    @nnx.jit
    def run(model: Model, x: jax.Array) -> nnx.State:
        return jax.tree.map(normalised, nnx.grad(mean_square)(model, x))

    model = js.shard_init(Model, on(js.mesh(replica=2)))
    assert_equal(jax.tree.leaves(run(model, batch())), jax.tree.leaves(run(Model(), batch())))


def test_units_on_different_meshes_are_refused():
    """FSDP2's `shard_placement_fn` may return a mesh; here a parameter has axes of the one mesh."""
    model = Model()
    js.fully_shard(model.blocks[0], mesh=js.mesh(fsdp=4, devices=jax.devices()[:4]))
    with pytest.raises(AnnotationError, match="Units of one model are on different meshes"):
        js.fully_shard(model, mesh=js.mesh())


def temporaries_bytes(tx: optax.GradientTransformation) -> int:
    """Memory of a training step on one device beside its state, which is donated."""
    mesh = js.mesh(devices=jax.devices()[:1])
    model = js.abstract_init(Model, on(mesh))

    def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return loss

    lowered = nnx.jit(step, donate_argnums=(0, 1)).lower(model, js.shard_optimizer(model, tx), batch())
    memory = compile_to_read(lowered.lowered).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_a_gradient_is_freed_by_its_update_unless_a_norm_needs_all():
    """The optimizer in backward: the compiler does each update when its gradient is there."""
    updates = optax.adamw(1e-3)
    assert temporaries_bytes(updates) < PARAMETER_BYTES / 2
    assert temporaries_bytes(optax.chain(optax.clip_by_global_norm(1.0), updates)) >= PARAMETER_BYTES
