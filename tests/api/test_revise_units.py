"""`js.revise`: other settings for units of an annotated model, by unit or by pattern."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from tests.helpers import Block, Config, abstract, annotator, builder, loss_fn, placed, token_batch

CONFIG = Config(layers=3)
PRECISION = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")


def settings_of(model):
    return {unit.name: unit for unit in js.plan(model).units}


@pytest.mark.parametrize("choice", [lambda model: model.blocks[1], lambda model: "blocks/1"], ids=["module", "pattern"])
def test_one_unit_is_changed_by_itself(choice):
    model = abstract(CONFIG, js.mesh())
    assert js.revise(model, choice(model), remat="full", reshard_after_forward=4, prefetch=2) is model
    units = settings_of(model)
    changed = units["blocks/1"]
    assert (changed.remat, changed.reshard_after_forward, changed.prefetch) == ("full", 4, "2")
    others = [unit for name, unit in units.items() if name != "blocks/1"]
    assert {(unit.remat, unit.prefetch) for unit in others} == {("none", "1"), ("auto", "1")}  # the root, and blocks


@pytest.mark.parametrize("units", [Block, "blocks/*", lambda path, module: isinstance(module, Block)])
def test_a_class_a_pattern_and_a_function_choose_units(units):
    model = js.revise(abstract(CONFIG, js.mesh()), units, remat="dots")
    remat = {name: unit.remat for name, unit in settings_of(model).items()}
    assert remat == {"(root)": "none", "blocks/0": "dots", "blocks/1": "dots", "blocks/2": "dots"}


def test_without_a_choice_every_unit_is_changed_and_remat_leaves_the_root():
    model = js.revise(abstract(CONFIG, js.mesh()), reshard_after_forward=False, remat="full", prefetch=3)
    units = settings_of(model)
    assert {unit.reshard_after_forward for unit in units.values()} == {False}
    assert {unit.prefetch for unit in units.values()} == {"3"}
    assert {name for name, unit in units.items() if unit.remat == "full"} == {"blocks/0", "blocks/1", "blocks/2"}


def test_other_dtypes_are_in_the_plan_and_the_placement_stays():
    model = abstract(CONFIG, js.mesh())
    before = js.plan(model)
    js.revise(model, "blocks/*", mixed_precision=PRECISION)
    for leaf, earlier in zip(js.plan(model).leaves, before.leaves, strict=True):
        expected = "bfloat16" if leaf.unit.startswith("blocks") else "float32"
        assert leaf.placement.gathered_dtype == expected
        assert leaf.placement.partition_spec == earlier.placement.partition_spec
        assert leaf.placement.stored_shape == earlier.placement.stored_shape


@pytest.mark.parametrize(
    "settings",
    [
        {"remat": "full"},
        {"reshard_after_forward": False, "prefetch": 2},
        {"mixed_precision": PRECISION},
        {"prefetch": "compiler"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_revised_model_computes_like_one_annotated_so(settings):
    batch = token_batch(CONFIG)
    step = nnx.jit(nnx.value_and_grad(loss_fn))
    model = placed(builder(CONFIG), annotator(js.mesh()))
    step(model, *batch)  # the program of the first settings must not be used again
    js.revise(model, Block, **settings)
    revised_loss, revised = step(model, *batch)

    def annotate(model):
        for block in model.blocks:
            js.fully_shard(block, mesh=js.mesh(), **settings)
        js.fully_shard(model, mesh=js.mesh())

    loss, grads = step(placed(builder(CONFIG), annotate), *batch)
    np.testing.assert_array_equal(revised_loss, loss)
    for a, b in zip(jax.tree.leaves(revised), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_next_step_is_compiled_again_and_a_change_back_is_not():
    traces = []

    @nnx.jit
    def step(model, *batch):
        traces.append(1)
        return loss_fn(model, *batch)

    model = placed(builder(CONFIG), annotator(js.mesh()))
    batch = token_batch(CONFIG)
    for reshard in (True, False, True, False):
        js.revise(model, Block, reshard_after_forward=reshard)
        step(model, *batch)
    assert len(traces) == 2


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(nn.gelu(x))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Layer()(x)
        return nn.Dense(8, name="head")(x)


def test_a_linen_model_is_revised_as_a_copy():
    x = jnp.ones((8, 64))
    model = js.fully_shard(Layers(), mesh=js.mesh(), units=[Layer, "head"])
    params = js.shard_init(lambda: model.init(jax.random.key(0), x), model)
    revised = js.revise(model, Layer, remat="full", prefetch=2)

    def loss(params, model):
        return (model.apply(params, x) ** 2).mean()

    grads = jax.jit(jax.grad(loss), static_argnums=1)(params, revised)
    expected = jax.jit(jax.grad(loss), static_argnums=1)(params, model)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    remat = {unit.name: unit.remat for unit in js.plan(revised).units}
    assert remat == {"(root)": "none", "Layer_0": "full", "Layer_1": "full", "head": "auto"}
    assert [unit.remat for unit in js.plan(model).units] == ["none", "auto", "auto", "auto"]


@pytest.mark.parametrize(
    ("units", "settings", "message"),
    [
        ("blocks/9", {"remat": "full"}, "No unit matches"),
        (None, {"depth": 2}, "no such setting"),
        (None, {}, "no such setting"),
        ("blocks/*", {"remat": "most"}, "remat"),
        ("blocks/*", {"reshard_after_forward": 3}, "group size"),
    ],
)
def test_what_cannot_be_changed_is_refused_and_nothing_is_changed(units, settings, message):
    model = abstract(CONFIG, js.mesh())
    before = js.plan(model)
    with pytest.raises(AnnotationError, match=message):
        js.revise(model, units, **settings)
    assert js.plan(model) == before


def test_a_model_without_annotation_is_refused():
    with pytest.raises(AnnotationError, match="not annotated"):
        js.revise(builder(CONFIG)(), remat="full")
