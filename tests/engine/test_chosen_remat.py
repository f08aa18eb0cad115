"""`remat="auto"`: what is chosen from made-up numbers, for layers in a loop and outside, and where it is stated."""

import dataclasses
import functools
import sys

import flax.linen as nn
import jax
import pytest
from flax import nnx

import jshard as js
from jshard.engine import program
from jshard.engine.chosen_remat import chosen_for
from jshard.engine.layer_stacks import as_traced
from jshard.facts.devices import DEVICES
from jshard.inspect.activations import saved_arrays
from jshard.plans.remat_choice import CANDIDATES, LayerGroup, RematWork, choose
from jshard.train import load_model_file
from tests.linen_models import VOCAB, WIDTH, Block, Decoder, Layer, Scanned, X, cross_entropy, differences
from tests.micro_gpt import MODELS, micro
from tests.wide import wide

GPT_FILE = load_model_file(MODELS / "gpt.py")
gpt = sys.modules[GPT_FILE.build.__module__]
H100 = DEVICES["h100"]
GB = 10**9


# ---- the choice, from made-up numbers


def layers(*, in_loop=True, none=16.0, dots=4.0, full=0.5, recomputed_ms=20.0):
    """Ten layers that save so many GB, and compute products again for so long under `full`."""
    works = (
        RematWork("none", none * GB, 0.0),
        RematWork("dots", dots * GB, 0.0),
        RematWork("full", full * GB, recomputed_ms / 1000),
    )
    return LayerGroup(10, in_loop, works)


@pytest.mark.parametrize(
    ("group", "room_gb", "chosen"),
    [
        (layers(), 50, "dots"),
        (layers(recomputed_ms=1), 50, "full"),  # cheap products
        (layers(none=4.0), 50, "none"),  # products are all there is to save
        (layers(), 3, "full"),  # the only one that fits
        (layers(), 0, "full"),  # nothing fits: what saves least
        (layers(recomputed_ms=4.36), 50, "full"),  # about as fast as dots, and saves less
        (layers(in_loop=False), 50, "none"),
        (layers(in_loop=False, recomputed_ms=0), 50, "none"),
        (layers(in_loop=False), 7, "dots"),  # `none` keeps 7.6 there
        (layers(in_loop=False), 3, "full"),
    ],
)
def test_the_fastest_that_fits(group, room_gb, chosen):
    (choice,) = choose([group], H100, room_gb * GB)
    assert choice.remat == chosen
    for policy in ("none", "dots", "full"):
        assert f"{policy} saves" in choice.because
    assert "NVIDIA H100" in choice.because and "10 layers" in choice.because


def test_groups_share_the_room():
    both = [layers(dots=4), layers(dots=6, recomputed_ms=40)]
    assert [choice.remat for choice in choose(both, H100, 11 * GB)] == ["dots", "dots"]
    assert [choice.remat for choice in choose(both, H100, 8 * GB)] == ["full", "dots"]  # whose products cost more


# ---- what is chosen for a model


def abstract(config):
    """A GPT on eight devices, and a batch of two sequences for each."""
    mesh = js.mesh(devices=8)
    model = js.abstract_init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh))
    ids = jax.ShapeDtypeStruct((16, config.block_size), "int32")
    return model, {"inputs": ids, "targets": ids}


@functools.cache
def traced_units(config, hbm_bytes=H100.hbm_bytes):
    """The units in the plan after a trace of the loss, by name; and what that saves."""
    model, batch = abstract(config)
    with chosen_for(dataclasses.replace(H100, hbm_bytes=hbm_bytes)):
        saved = saved_arrays(model, GPT_FILE.loss_fn, batch)
    return {unit.name: unit for unit in as_traced(js.plan(model)).units}, saved


CONFIG = dataclasses.replace(micro().model, n_layer=3, scan=True)
WIDE = dataclasses.replace(CONFIG, d_model=2048, d_ff=8192, n_head=16)


@pytest.mark.parametrize(("config", "chosen"), [(CONFIG, "full"), (WIDE, "dots")], ids=["narrow", "wide"])
def test_in_a_loop_as_products_cost_and_it_is_what_that_policy_saves(config, chosen):
    units, saved = traced_units(config)
    assert units["blocks"].remat == chosen and "3 layers in a loop" in units["blocks"].remat_because
    assert (units["(root)"].remat, units["(root)"].remat_because) == ("none", "")
    explicit, expected = traced_units(dataclasses.replace(config, remat=chosen))
    assert saved == expected
    assert (explicit["blocks"].remat, explicit["blocks"].remat_because) == (chosen, "")


def test_a_layer_is_derived_once_for_each_policy(monkeypatch):
    """The derivative of the chosen policy is the one that was made to choose it."""
    made, of = [], program.Gradient
    monkeypatch.setattr(program, "Gradient", lambda *args: made.append(args[0].remat) or of(*args))
    model, batch = abstract(CONFIG)
    saved_arrays(model, GPT_FILE.loss_fn, batch)
    assert [remat for remat in made if remat in CANDIDATES] == list(CANDIDATES)


def test_none_that_is_asked_for_stays():
    units, saved = traced_units(dataclasses.replace(WIDE, remat="none"))
    assert (units["blocks"].remat, units["blocks"].remat_because) == ("none", "")
    assert sum(saved.values()) > sum(traced_units(WIDE)[1].values())


def test_layers_called_one_after_another_keep_everything_if_it_fits():
    unrolled = dataclasses.replace(WIDE, scan=False)
    units, saved = traced_units(unrolled)
    assert {units[f"blocks/{i}"].remat for i in range(3)} == {"none"}
    assert "one after another" in units["blocks/0"].remat_because
    assert saved == traced_units(dataclasses.replace(unrolled, remat="none"))[1]
    units, _ = traced_units(unrolled, 2**20)
    assert units["blocks/0"].remat == "full"


# ---- Linen, and the numbers of one device


class Recomputed(nn.Module):
    """Layers in a loop, each in a `jax.checkpoint` of the model itself."""

    @nn.compact
    def __call__(self, ids):
        scan = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(WIDTH, name="layers")(nn.Embed(VOCAB, WIDTH, name="table")(ids), None)
        return nn.Dense(VOCAB, name="head")(x)


@pytest.mark.parametrize(
    ("plain", "layer", "remat", "reason"),
    [
        (Scanned(length=3), Layer, "full", "in a loop"),
        wide(Decoder(depth=2), Block, "none", "one after another"),
        wide(Recomputed(), Layer, "none", ""),
    ],
    ids=["scanned", "unrolled", "recomputed by the model"],
)
def test_linen_layers_and_gradients_as_on_one_device(plain, layer, remat, reason):
    variables = plain.init(jax.random.key(0), X)
    model = js.fully_shard(plain, mesh=js.mesh(), units=layer)
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda v, one=one: cross_entropy(one.apply(v, X))))(variables)
        for one in (model, plain)
    )
    assert max(differences(found, wanted).values()) <= 2e-6
    root, *units = as_traced(js.plan(model)).units
    assert root.remat == "none" and {unit.remat for unit in units} == {remat}
    reasons = {unit.remat_because for unit in units}
    assert all(reason in text for text in reasons) and any(reasons) == bool(reason)


# ---- where it is stated


def test_explain_says_what_was_chosen_and_why():
    model, batch = abstract(WIDE)
    assert js.plan(model).units[1].remat == "auto"
    text = str(js.explain(model, loss_fn=GPT_FILE.loss_fn, batch=batch))
    assert "auto: dots" in text
    assert "Remat auto of blocks: dots; estimated for NVIDIA H100" in text.replace("\n", " ")
    plan = as_traced(js.plan(model))
    assert js.ShardPlan.from_json(plan.to_json()) == plan
