"""Parameters that no dim divides: stored padded, read without the padding, trained like on one device."""

import functools
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
from jshard.inspect.memory import memory_of
from jshard.plans.padding import padding_of
from tests.helpers import Config, Decoder, builder, compile_to_read, fresh, loss_fn, placed, token_batch, with_placement
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, Trained, compare, train, worst
from tests.toy_models import Tower

ADAMW = optax.adamw(1e-2, eps=1e-3)  # gradients that are zero but for rounding stay small


def config(**settings: Any) -> Config:
    """Nothing divides its sizes."""
    return Config(**{"layers": 1, "vocab": 251, "width": 47, "hidden": 151, "heads": 1, "attends": False} | settings)


def annotator(mesh, **settings):
    """Everything is cut along its first dim that indexes no layers, biases too: all are padded where it is odd."""

    def annotate(model: Decoder) -> None:
        stacked = int(model.config.scanned)
        first = lambda path, shape: stacked
        for block in [model.blocks] if stacked else model.blocks:
            js.fully_shard(block, mesh=mesh, **with_placement(shard_dim=first, stacked=stacked, **settings))
        js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0))

    return annotate


@functools.cache
def one_device(made: Config, size: int = 16) -> Trained:
    return train(fresh(builder(made)), loss_fn, token_batch(made, batch=size, length=4), steps=3, tx=ADAMW)


def assert_like_one_device(made: Config, mesh, size: int = 16, grad=None, **settings) -> None:
    model = placed(builder(made), annotator(mesh, **settings))
    found = train(model, loss_fn, token_batch(made, batch=size, length=4), steps=3, tx=ADAMW, grad=grad)
    wanted = one_device(made, size)
    apart = compare(found, wanted)
    assert apart.gradient <= GRADIENT_TOLERANCE, apart
    assert apart.parameters <= PARAMETER_TOLERANCE, apart
    assert found.traces == 1
    table = "embed/embedding"
    assert found.gradients[table].shape == (made.vocab, made.width)
    assert worst(found.gradients[table], wanted.gradients[table]) <= GRADIENT_TOLERANCE
    moved = np.abs(found.parameters[table] - np.asarray(fresh(builder(made)).embed.embedding[...]))
    assert moved.max(1).min() > 0  # every row was updated, those of the last device too
    for variable in jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        assert not np.asarray(variable.get_raw_value())[tuple(slice(n, None) for n in variable.shape[:1])].any()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("tied", "mesh", "size"),
    [(False, {"replica": 2}, 16), (True, {"devices": jax.devices()[:3]}, 30)],
)
def test_equal_to_one_device(tied, mesh, size):
    assert_like_one_device(config(tied=tied), js.mesh(**mesh), size=size)


@pytest.mark.parametrize("settings", [{"reshard_after_forward": 4}, {"offload": "params"}], ids=str)
def test_copies_that_are_kept_in_part_and_host_memory(settings):
    assert_like_one_device(config(), js.mesh(), **settings)


def test_accumulated():
    grad = lambda loss: js.value_and_grad(loss, accumulate=2, sync="last")
    assert_like_one_device(config(), js.mesh(), grad=grad)


@pytest.mark.wide
def test_in_a_stack_of_layers():
    assert_like_one_device(config(scanned=True, layers=3), js.mesh(replica=2))


# What the user sees: logical shapes and values.


class OddTable(nnx.Module):
    """Rows and columns that nothing divides."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (501, 47)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


def table() -> OddTable:
    return OddTable(nnx.Rngs(0))


def shard_table(model: OddTable) -> None:
    js.fully_shard(model, mesh=js.mesh())


def plain_values() -> np.ndarray:
    return np.asarray(table().kernel[...])


def test_born_padded_with_the_values_of_the_plain_model():
    model = js.shard_init(table, shard_table)
    kernel = model.kernel
    assert kernel.shape == (501, 47) and (kernel.ndim, kernel.size, len(kernel)) == (2, 501 * 47, 501)
    np.testing.assert_array_equal(kernel[...], plain_values())
    stored = kernel.get_raw_value()
    assert stored.shape == (504, 47) and {s.data.shape for s in stored.addressable_shards} == {(63, 47)}
    assert not np.asarray(stored)[501:].any()
    assert type(kernel).__name__ == "Param" and isinstance(kernel, nnx.Param)
    abstract = js.abstract_init(table, shard_table).kernel
    assert abstract.shape == (501, 47) and abstract.get_raw_value().sharding == stored.sharding


def test_reads_are_of_the_logical_array():
    kernel, values = placed(table, shard_table).kernel, plain_values()
    np.testing.assert_array_equal(kernel[-1], values[-1])
    np.testing.assert_array_equal(kernel[490:, 3], values[490:, 3])
    np.testing.assert_allclose(kernel.mean(), values.mean(), rtol=1e-4)
    np.testing.assert_allclose(jnp.mean(kernel), values.mean(), rtol=1e-4)
    assert kernel.T.shape == (47, 501) and (kernel + 1).shape == (501, 47)
    assert nnx.to_pure_dict(nnx.state(kernel_holder := placed(table, shard_table)))["kernel"].shape == (501, 47)
    assert nnx.state(kernel_holder)["kernel"].shape == (501, 47)


def test_writes_are_of_the_logical_array():
    model, values = placed(table, shard_table), plain_values()
    stored = model.kernel.get_raw_value().sharding
    for write in (
        lambda: model.kernel.set_value(2 * values),
        lambda: model.kernel.__setitem__(..., 2 * values),
        lambda: nnx.update(model, {"kernel": jnp.asarray(2 * values)}),
        lambda: nnx.update(model, jax.tree.map(lambda x: 2 * x, nnx.state(table()))),
    ):
        model.kernel[...] = jnp.zeros((501, 47))
        write()
        np.testing.assert_array_equal(model.kernel[...], 2 * values)
        assert model.kernel.get_raw_value().shape == (504, 47)
    model.kernel[-1] = jnp.zeros(47)
    assert not np.asarray(model.kernel[-1]).any() and np.asarray(model.kernel[-2]).any()
    assert model.kernel.get_raw_value().sharding == stored


# Optimizers see logical arrays: means over them are exact.

OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "muon": lambda: optax.contrib.muon(1e-2),
    "several steps": lambda: optax.MultiSteps(ADAMW, 2).gradient_transformation(),
}


def table_loss(model: OddTable) -> jax.Array:
    """In global view, outside any call."""
    kernel = model.kernel[...]
    return ((kernel - jnp.sin(jnp.arange(501.0)[:, None])) ** 4).mean()


def by_rows() -> optax.GradientTransformation:
    """A user's own transformation, with a mean over rows."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g / jnp.sqrt((g**2).mean(0, keepdims=True) + 1e-12), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS["the user's own"] = by_rows


@nnx.jit
def table_step(model: OddTable, optimizer: nnx.Optimizer) -> None:
    optimizer.update(model, nnx.grad(table_loss)(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_updates_of_one_device(name):
    tx, found, wanted = OPTIMIZERS[name](), placed(table, shard_table), table()
    optimizer, plain = js.shard_optimizer(found, tx), nnx.Optimizer(wanted, tx, wrt=nnx.Param)
    for _ in range(3):
        table_step(found, optimizer)
        table_step(wanted, plain)
    np.testing.assert_allclose(found.kernel[...], wanted.kernel[...], rtol=0, atol=2e-6)
    assert np.abs(wanted.kernel[...] - plain_values()).max() > 1e-4  # it did train
    shapes = lambda optimizer: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(optimizer)))
    assert shapes(optimizer) == shapes(plain)
    state = jax.tree.leaves(nnx.state(optimizer))
    for x in state:
        assert x.nbytes < 4096 or {s.data.nbytes for s in x.addressable_shards} == {x.nbytes // 8}
    held = memory_of(js.plan(found), optimizer=tx).optimizer_bytes
    assert held == sum(x.addressable_shards[0].data.nbytes for x in state)


def test_an_update_gathers_no_parameter():
    model = placed(table, shard_table)
    for name in ("adafactor", "muon"):
        optimizer = js.shard_optimizer(model, OPTIMIZERS[name]())
        text = table_step.lower(model, optimizer).compile().as_text()
        gathered = [math.prod(map(int, found.split(","))) for found in _shapes_of_gathers(text)]
        assert max(gathered, default=0) <= 504, name  # rows of Adafactor's


def _shapes_of_gathers(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
    return [line.split("[", 1)[1].split("]", 1)[0] for line in lines]


# Any other optimizer sees stored arrays: without js.shard_optimizer there are no gradients for it.


def called_loss(model: OddTable, x: jax.Array) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def with_an_optimizer(model: OddTable, x: jax.Array) -> None:
    optimizer = nnx.Optimizer(model, by_rows(), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(called_loss)(model, x))


def by_hand(model: OddTable, x: jax.Array) -> None:
    grads = nnx.grad(called_loss)(model, x)
    nnx.update(model, jax.tree.map(lambda p, g: p - g / jnp.abs(g).mean(), nnx.state(model, nnx.Param), grads))


def accumulated(model: OddTable, x: jax.Array) -> None:
    js.value_and_grad(called_loss, accumulate=2, sync="last")(model, x)


def in_global_view(model: OddTable, x: jax.Array) -> None:
    with js.global_view():
        by_hand(model, x)


def inside_jit_and_checkpoint(model: OddTable, x: jax.Array) -> None:
    loss = jax.checkpoint(lambda params, rest: jax.jit(called_loss)(nnx.merge(graphdef, params, rest), x))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    jax.grad(loss)(params, rest)


@functools.cache
def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((16, 501), np.float32)


@pytest.mark.parametrize(
    "update",
    [nnx.jit(with_an_optimizer), by_hand, accumulated, in_global_view, inside_jit_and_checkpoint],
    ids=lambda update: update.__name__,
)
def test_a_padded_parameter_has_no_gradient_for_an_optimizer_that_would_see_the_padding(update):
    model = placed(table, shard_table)
    with pytest.raises(AnnotationError, match=r"kernel  float32\[501, 47\], stored \[504, 47\]") as refused:
        update(model, rows())
    assert refused.value.do == "optimizer = js.shard_optimizer(model, tx); optimizer.update(model, grads)"
    np.testing.assert_array_equal(model.kernel[...], plain_values())


def test_calls_checks_and_frozen_padded_parameters_need_no_optimizer():
    class Adapted(nnx.Module):
        def __init__(self):
            self.table, self.adapter = table(), nnx.LoRAParam(jnp.ones((47, 8)))

        def __call__(self, x):
            return self.table(x) @ self.adapter

    model = placed(Adapted, shard_table)
    np.testing.assert_allclose(model(rows()), Adapted()(rows()), rtol=1e-4, atol=1e-4)
    assert js.check(model, rows()).worst < 1e-4
    loss = lambda model, x: (model(x) ** 2).mean()
    assert "activations" in str(js.explain(model, loss_fn=loss, batch=rows()))
    for grad in (nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)), js.value_and_grad(loss, wrt=nnx.LoRAParam)):
        assert jax.tree.leaves(nnx.jit(lambda model, x, grad=grad: grad(model, x))(model, rows()))
    with pytest.raises(AnnotationError, match="Adapted: table/kernel "):
        nnx.grad(loss)(model, rows())


def test_an_optimizer_counts_for_its_model_only_and_for_copies_of_it():
    graphdef, state = nnx.split(model := placed(table, shard_table))
    step = nnx.jit(lambda model, x: nnx.grad(called_loss)(model, x))
    js.shard_optimizer(model, optax.sgd(1e-2))
    for one in (model, nnx.clone(model), nnx.merge(graphdef, state)):
        step(one, rows())
    with pytest.raises(AnnotationError, match=r"js\.shard_optimizer was not called"):
        step(placed(table, shard_table), rows())


# Where padding is chosen, and what the plan says of it.


def test_the_root_may_name_what_a_unit_would_pad():
    """The unit is annotated first, and has padded it by then."""
    root = Tower([table()])
    js.fully_shard(root.blocks[0], mesh=js.mesh())
    assert padding_of(root.blocks[0].kernel) is not None
    js.fully_shard(root, mesh=js.mesh(), placement=js.PlacementPolicy(allow_replicated=["blocks/0/kernel"]))
    assert js.plan(root).leaf("blocks/0/kernel").placement.dim is None
    assert padding_of(root.blocks[0].kernel) is None
    np.testing.assert_array_equal(root.blocks[0].kernel.get_raw_value(), plain_values())


def test_the_compiled_program_sends_what_the_plan_says():
    model = js.abstract_init(builder(config(scanned=True, layers=3)), annotator(js.mesh(replica=2)))
    js.shard_optimizer(model, ADAMW)
    step = nnx.jit(lambda model, *batch: nnx.value_and_grad(loss_fn)(model, *batch))
    report = js.audit(compile_to_read(step.lower(model, *token_batch(config(), length=4)).lowered), model=model)
    assert report.ok, report


# Checkpoints hold logical arrays: padding is a matter of the mesh.
