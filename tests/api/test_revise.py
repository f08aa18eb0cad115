"""Settings of units from the command line, and the model as plain Flax would run it."""

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.api.revise import plan_of_layers, revise_layers
from jshard.engine.context import plain_flax
from jshard.errors import AnnotationError, ShardingError
from jshard.recipes.building import abstract_model
from jshard.recipes.overrides import parse_units
from tests.helpers import Config, abstract, annotator, builder, loss_fn, placed, token_batch
from tests.micro_gpt import MODELS, micro

UNTIED = Config(layers=3, tied=False)
PRECISION = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")


def units(model):
    return {unit.name: unit for unit in js.plan(model).units}


def untied(**settings):
    """Three blocks, and a head of its own that is kept."""

    def annotate(model):
        for block in model.blocks:
            js.fully_shard(block, mesh=js.mesh(), **settings)
        js.fully_shard(model.head, mesh=js.mesh(), reshard_after_forward=False)
        js.fully_shard(model, mesh=js.mesh())

    return js.abstract_init(builder(UNTIED), annotate)


def test_remat_and_resharding_go_to_the_layers_and_prefetch_to_all_units():
    model = untied()
    before = js.plan(model)
    revise_layers(model, {"remat": "full", "reshard_after_forward": 4, "prefetch": 2})
    found = units(model)
    for name in ("blocks/0", "blocks/1", "blocks/2"):
        assert (found[name].remat, found[name].reshard_after_forward, found[name].prefetch) == ("full", 4, "2")
    assert (found["head"].remat, found["head"].reshard_after_forward, found["head"].prefetch) == ("auto", False, "2")
    assert (found["(root)"].remat, found["(root)"].prefetch) == ("none", "1")
    assert js.plan(model).leaves == before.leaves


@pytest.mark.parametrize("settings", [{"remat": "full"}, {"reshard_after_forward": False, "prefetch": 2}])
def test_the_plan_of_other_layers_is_that_of_a_revised_model(settings):
    model = abstract(Config(), js.mesh())
    before = js.plan(model)
    found = plan_of_layers(model, settings)
    assert found != before and js.plan(model) == before
    revise_layers(model, settings)
    assert found == js.plan(model)


def test_a_stack_of_layers_is_a_layer():
    model = abstract(Config(layers=3, scanned=True), js.mesh())
    revise_layers(model, {"remat": "dots"})
    assert units(model)["blocks"].remat == "dots"


@pytest.mark.parametrize(
    "settings", [{"remat": "most"}, {"prefetch": "1 kilo"}, {"reshard_after_forward": 3}, {"x": 1}]
)
def test_what_fully_shard_refuses_is_refused(settings):
    with pytest.raises(AnnotationError):
        revise_layers(untied(), settings)


def test_the_settings_of_a_command_line():
    texts = "remat=none", "prefetch=512MiB", "reshard_after_forward=False"
    assert parse_units(texts) == {"remat": "none", "prefetch": "512MiB", "reshard_after_forward": False}
    assert parse_units(["prefetch=compiler", "reshard_after_forward=4"]) == {
        "prefetch": "compiler",
        "reshard_after_forward": 4,
    }
    for bad in (["remat"], ["remat="], ["mesh=1"], ["remat=full", "remat=dots"], ["reshard_after_forward=x"]):
        with pytest.raises(ShardingError, match="--unit"):
            parse_units(bad)
    with pytest.raises(AnnotationError):
        parse_units(["remat=most"])


def test_a_model_file_with_other_units():
    model_file = js.train.load_model_file(MODELS / "gpt.py")
    other = model_file.with_units({"remat": "full"})
    model = abstract_model(other, micro(), js.mesh())
    assert [unit.remat for unit in js.plan(model).units] == ["none", "full", "full"]


def test_plain_flax_computes_the_same():
    config = Config(scanned=True, attends=False)
    model = placed(builder(config), annotator(js.mesh(), remat="full"))
    batch = token_batch(config)
    step = nnx.jit(nnx.value_and_grad(loss_fn))
    loss, grads = step(model, *batch)
    with plain_flax():
        other_loss, other = step(model, *batch)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(np.abs(b).max()) + 1e-9)


def test_plain_flax_follows_dtypes_and_remat():
    model = abstract(Config(), js.mesh(), remat="full", mixed_precision=PRECISION)
    program = lambda: nnx.jit(nnx.value_and_grad(loss_fn)).lower(model, *token_batch(Config())).lowered.as_text()
    with plain_flax():
        text = program()
    assert "all_gather" not in text
    assert "64x256xbf16" in text and "optimization_barrier" in text  # whole, cast, and computed again
    with js.global_view():
        text = program()
    assert "bf16" not in text and "optimization_barrier" not in text
