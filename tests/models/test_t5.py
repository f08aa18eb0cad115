"""models/t5.py: T5 in its sizes, trained on spans that can be put back, padding left out, equal when sharded."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.data import load_text
from tests.models.model_files import (
    assert_parity_of,
    assert_plans,
    data_of,
    first_batches,
    model_file,
    module,
    neighbour,
    smaller,
    tiny,
)

FILE, t5, spans = model_file("t5"), module("t5"), neighbour("spans")
RECIPE = smaller(tiny("t5"), sequence_length=64, n_head=2, d_model=64, d_kv=16, d_ff=96)
MICRO = RECIPE.model


def build(config=MICRO):
    return t5.T5(config, rngs=nnx.Rngs(0))


def abstract(config, mesh):
    return js.abstract_init(lambda: build(config), lambda model: t5.annotate(model, mesh))


def tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(spans.FIRST_BYTE, 250, shape), jnp.int32)


@nnx.jit
def call(model, inputs, before):
    return model(inputs, before)


# ---- Sizes and units ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_parameters", "degrees"),
    [
        ("t5_611m", 611_838_976, {"fsdp": 64}),
        ("t5_2b", 2_280_642_560, {"replica": 2, "fsdp": 64}),
        ("t5_11b", 11_307_321_344, {"fsdp": 512}),
    ],
)
def test_recipe_of_the_paper_plans_from_its_shapes(name, num_parameters, degrees):
    assert_plans("t5", name, num_parameters=num_parameters, **degrees)


@pytest.mark.parametrize("variant", [{}, {"tied": False, "gated": True}], ids=["v1.0", "v1.1"])
def test_every_layer_is_a_unit_and_every_parameter_has_a_name_at_hugging_face(variant):
    config = dataclasses.replace(MICRO, **variant)
    plan = js.plan(abstract(config, js.mesh()))
    head = {"head"} if variant else set()
    assert {unit.name for unit in plan.units} - {"", "(root)"} - head == {
        f"{half}/{n}" for half in ("encoder", "decoder") for n in range(2)
    }
    assert plan.leaf("tokens/embedding").unit == plan.units[0].name
    names = t5.hf_names(config)
    assert names.keys() == {leaf.path for leaf in plan.leaves}
    assert all(getattr(theirs, "transpose", False) == path.endswith("kernel") for path, theirs in names.items())
    theirs = [getattr(name, "names", (name,))[0] for name in names.values()]
    assert len({*theirs}) == len(theirs)
    assert names["decoder/1/mlp/down/kernel"].names == ("decoder.block.1.layer.2.DenseReluDense.wo.weight",)
    assert names["decoder/0/input_attention_norm/scale"] == "decoder.block.0.layer.1.layer_norm.weight"


# ---- Data --------------------------------------------------------------------------------------


def put_back(inputs, targets):
    """The text, from inputs and targets alone."""
    cut_out, text = {}, []
    for token in targets:
        if token > 258:  # a sentinel
            current = cut_out.setdefault(token, [])
        elif token not in (spans.PAD, spans.END):
            current.append(token)
    for token in inputs:
        text += cut_out.pop(token, [token] if token > spans.END else [])
    assert not cut_out
    return np.array(text)


@pytest.mark.parametrize("length", [2, 10, 568])
def test_inputs_and_targets_give_the_text_back(length):
    recipe = dataclasses.replace(RECIPE, sequence_length=length)
    text = np.random.default_rng(length).integers(spans.FIRST_BYTE, 259, length)
    inputs, targets = spans.corrupt(text, recipe, np.random.default_rng(0))
    assert (inputs.size, targets.size) == spans.lengths(recipe)
    assert spans.lengths(FILE.recipe("t5_11b")[1]) == (512, 114)
    np.testing.assert_array_equal(put_back(inputs, targets), text)


def test_samples_are_lines_of_real_text_with_a_share_cut_out():
    data, text = data_of("t5", RECIPE), load_text(sequence_length=RECIPE.sequence_length)
    padding = 0
    for i in range(50):
        sample, again = data.train[i], t5.data(RECIPE).train[i] if i < 2 else data.train[i]
        for name in sample:
            np.testing.assert_array_equal(sample[name], again[name])
        found = put_back(sample["inputs"], sample["targets"]) - spans.FIRST_BYTE
        window = text.train[i]["inputs"]
        np.testing.assert_array_equal(found, window[: found.size])
        assert found.size == window.size or found[-1] == ord("\n")
        cut_out = ((sample["targets"] >= spans.FIRST_BYTE) & (sample["targets"] < 259)).sum()
        assert cut_out == max(round(0.15 * found.size), 1)
        padding += (sample["inputs"] == spans.PAD).sum()
    assert padding > 0


def test_a_vocabulary_without_room_for_sentinels_is_refused():
    with pytest.raises(ValueError, match="vocab_size=260"):
        t5.data(smaller(RECIPE, vocab_size=260))


# ---- The model ---------------------------------------------------------------------------------


def test_decoder_sees_the_whole_input_and_the_past_of_the_target():
    model, inputs, before = build(), tokens((2, 20)), tokens((2, 12), seed=1)
    logits = call(model, inputs, before)
    changed = call(model, inputs, before.at[:, 7].add(1))
    np.testing.assert_array_equal(logits[:, :7], changed[:, :7])
    assert (jnp.abs(logits - changed)[:, 7:].max(-1) > 1e-4).all()
    for position in (0, 19):
        other = call(model, inputs.at[:, position].add(1), before)
        assert (jnp.abs(logits - other).max(-1) > 1e-4).all()


@pytest.mark.wide
def test_padding_does_not_count():
    model, inputs, targets = build(), tokens((4, 20)), tokens((4, 12), seed=1)
    loss = nnx.jit(FILE.loss)
    more = {"inputs": jnp.pad(inputs, ((0, 0), (0, 9))), "targets": jnp.pad(targets, ((0, 0), (0, 5)))}
    whole = loss(model, {"inputs": inputs, "targets": targets})
    np.testing.assert_allclose(loss(model, more), whole, rtol=1e-6)
    # One token of each of the first two, twelve of the others: tokens have equal weight, not samples.
    short = {"inputs": inputs, "targets": targets.at[:2, 1:].set(spans.PAD)}
    first = loss(model, {"inputs": inputs[:2], "targets": targets[:2, :1]})
    rest = loss(model, {"inputs": inputs[2:], "targets": targets[2:]})
    np.testing.assert_allclose(loss(model, short), (2 * first + 24 * rest) / 26, rtol=1e-6)


def test_distances_fall_into_the_buckets_of_t5():
    """As Hugging Face's T5Attention has them."""
    distance = [-300, -128, -100, -50, -20, -16, -15, -9, -8, -7, -1, 0, 1, 7, 8, 9, 20, 100, 300]
    both = [15, 15, 15, 13, 10, 10, 9, 8, 8, 7, 1, 0, 17, 23, 24, 24, 26, 31, 31]
    past = [31, 31, 30, 24, 17, 16, 15, 9, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    for both_ways, wanted in ((True, both), (False, past)):
        np.testing.assert_array_equal(t5.buckets(jnp.array(distance), MICRO, both_ways=both_ways), wanted)


def test_flops_are_those_of_the_traced_loss():
    recipe = smaller(RECIPE, sequence_length=512, d_model=128, d_kv=64, d_ff=256)
    names = ("inputs", "targets")
    batch = {name: jnp.zeros((8, length), jnp.int32) for name, length in zip(names, spans.lengths(recipe), strict=True)}
    model = nnx.eval_shape(lambda: build(recipe.model))
    forward = nnx.jit(t5.loss_fn).lower(model, batch).lowered.cost_analysis()["flops"]
    assert t5.flops(recipe)[0] == pytest.approx(3 * forward, rel=0.04)


# ---- Sharded -----------------------------------------------------------------------------------


@pytest.mark.wide
def test_sharded_training_is_that_of_one_device():
    real = [(batch["targets"] != spans.PAD).sum(-1) for batch in first_batches("t5", RECIPE)]
    assert len({int(number) for number in np.concatenate(real)}) > 1  # shards have different numbers of tokens
    assert_parity_of("t5", smaller(RECIPE, n_layer=1), replica=2, fsdp=4)  # of each kind
