"""The plan: one pure function makes it from shapes, for nnx and Linen alike, and everyone reads it."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from jshard.plans.plan import Leaf, make_plan
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import NESTED, OUTER, OWN, Unit, nested_units, unit_of
from tests.helpers import Config, abstract, with_placement
from tests.toy_models import TwoLayers

WIDTH = 128


def record(mesh) -> Unit:
    return Unit(mesh, UnitPolicy(), js.PlacementPolicy(ignored=False), kind="Layer")


def test_a_plan_is_made_without_a_model():
    unit = record(js.mesh(fsdp=8, devices=8))
    root, a, b = (), ("blocks", 0), ("blocks", 1)
    leaves = {
        (*a, "kernel"): Leaf((64, 128), "float32", around=((root, a),)),
        (*b, "kernel"): Leaf((64, 128), "bfloat16", (None, "tensor"), around=((root, b),)),
        (*a, "table"): Leaf((512, 8), "float32", aliases=((*b, "table"),), around=((root, a), (root, b))),
        ("scale",): Leaf((8,), "float32", around=((root,),)),
    }
    plan = make_plan(leaves, {root: unit, a: unit, b: unit})
    assert [(leaf.path, leaf.unit, leaf.placement.spec) for leaf in plan.leaves] == [
        ("blocks/0/kernel", "blocks/0", (None, "fsdp")),
        ("blocks/1/kernel", "blocks/1", (None, "fsdp")),
        ("blocks/0/table", "(root)", ("fsdp", None)),
        ("scale", "(root)", (None,)),
    ]
    assert plan.leaf("blocks/1/table") is plan.leaf("blocks/0/table")
    assert [unit.name for unit in plan.units] == ["(root)", "blocks/0", "blocks/1"]
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    seen = plan.seen_from(b, {root: unit, a: unit, b: unit})
    assert [(leaf.path, leaf.keys, leaf.owner) for leaf in seen.leaves] == [
        ("kernel", (("kernel",),), ()),
        ("table", (("table",),), None),  # a unit around it gathers that
    ]


def test_all_parameters_that_cannot_be_placed_are_in_one_error():
    unit = record(js.mesh(fsdp=4, tensor=2, devices=8))
    leaves = {(name,): Leaf((63, 64), "float32", ("tensor",), around=(((),),)) for name in "ab"}
    with pytest.raises(AnnotationError, match=r"a  shape \(63, 64\)(.|\n)*b  shape \(63, 64\)"):
        make_plan(leaves, {(): unit})


def test_nnx_and_linen_have_one_plan():
    class HasALayer(nnx.Module):
        def __init__(self, rngs):
            self.layer = TwoLayers(WIDTH, 2 * WIDTH, 1009, rngs)
            self.head = nnx.Linear(1009, 33, rngs=rngs)

    class LinenLayer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1009, name="down")(nn.Dense(2 * WIDTH, name="up")(x))

    class LinenModel(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(33, name="head")(LinenLayer(name="layer")(x))

    mesh = js.mesh()
    settings = {"mesh": mesh, "ignored": "layer/up/bias", "mixed_precision": js.MixedPrecision(param_dtype="bfloat16")}
    one = js.plan(
        js.abstract_init(
            lambda: HasALayer(nnx.Rngs(0)), lambda m: js.fully_shard(m, units=TwoLayers, **with_placement(**settings))
        )
    )
    linen = js.fully_shard(LinenModel(), units=LinenLayer, **with_placement(**settings))
    jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((8, WIDTH)))
    other = js.plan(linen)
    assert {leaf.path: leaf for leaf in one.leaves} == {leaf.path: leaf for leaf in other.leaves}
    assert one.leaf("head/kernel").placement.stored_shape == (1016, 33)
    assert one.leaf("layer/up/bias").placement.because == "ignored by the annotation"
    unnamed = lambda plan: [dataclasses.replace(unit, kind="") for unit in plan.units]
    assert unnamed(one) == unnamed(other) and one.mesh == other.mesh


def test_a_unit_sees_its_part_of_the_plan():
    model = abstract(Config(layers=3, tied=True), js.mesh())
    plan = js.plan(model)
    for path, module in nested_units(model):
        for member in unit_of(module).members:
            leaf = plan.leaf("/".join(map(str, (*path, *member.keys[0]))))
            here = leaf.unit == ("/".join(map(str, path)) or "(root)")
            assert member.placement == leaf.placement
            assert (member.role == OWN) == here and member.role in (OWN, NESTED, OUTER)
            assert unit_of(module).by_path[member.keys[0]] == member
    assert type(model.blocks[0]) is type(model.blocks[2])  # equal layers have equal records
    assert js.plan(model.blocks[1]).leaves == js.plan(model.blocks[2]).leaves


def test_units_come_root_first_and_own_each_parameter_once():
    plan = js.plan(abstract(Config(layers=3), js.mesh()))
    assert [unit.name for unit in plan.units] == ["(root)", "blocks/0", "blocks/1", "blocks/2"]
    assert [unit.kind for unit in plan.units] == ["Decoder", "Block", "Block", "Block"]
    owned = [leaf for unit in plan.units for leaf in plan.unit_leaves(unit.name)]
    assert sorted(leaf.path for leaf in owned) == sorted({leaf.path for leaf in plan.leaves})
    assert {leaf.path for leaf in plan.unit_leaves("(root)")} == {"embed/embedding", "norm/scale"}


def test_reshard_after_forward_is_resolved():
    plan = js.plan(abstract(Config(), js.mesh()))
    assert [unit.reshard_after_forward for unit in plan.units] == [False, True, True]
    plan = js.plan(abstract(Config(), js.mesh(), reshard_after_forward=4, remat="full"))
    assert [unit.reshard_after_forward for unit in plan.units] == [False, 4, 4]
    assert [unit.remat for unit in plan.units] == ["none", "full", "full"]


def test_a_plan_is_one_line_in_a_notebook():
    model = js.fully_shard(nnx.Linear(512, 512, rngs=nnx.Rngs(0)), mesh=js.mesh())
    said = repr(js.plan(model))
    assert said.startswith("<ShardPlan of 1 units, 2 arrays, 262,656 parameters, 130")
    assert "\n" not in said


def test_the_plan_survives_json_and_is_frozen():
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    plan = js.plan(abstract(Config(), js.mesh(replica=2), mixed_precision=precision))
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["mesh"] == [["replica", 2], ["fsdp", 4], ["tensor", 1]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mesh = ()


def test_a_plan_of_175_billion_parameters_makes_no_array():
    config = Config(layers=96, width=12_288, hidden=49_152, heads=96, vocab=50_000, scanned=True, tied=False)
    live = len(jax.live_arrays())
    plan = js.plan(abstract(config, js.mesh(replica=4, fsdp=128, devices=512)))
    assert len(jax.live_arrays()) == live
    assert plan.num_parameters > 174e9
    small = sum(leaf.placement.logical_bytes for leaf in plan.replicated)
    assert plan.bytes_per_device == (plan.logical_bytes - small) / 128 + small


def test_dtypes_stored_gathered_and_reduced():
    placed = lambda **dtypes: js.plan(abstract(Config(), js.mesh(), mixed_precision=js.MixedPrecision(**dtypes)))
    placement = placed(param_dtype="bfloat16", reduce_dtype="float32").leaf("blocks/0/up/kernel").placement
    assert (placement.dtype, placement.gathered_dtype, placement.reduce_dtype) == ("float32", "bfloat16", "float32")
    assert placement.logical_bytes == 2 * placement.gathered_bytes == 4 * 64 * 256
    assert placed(param_dtype="bfloat16").leaf("blocks/0/up/kernel").placement.reduce_dtype == "bfloat16"
