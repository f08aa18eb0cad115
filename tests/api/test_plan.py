"""The plan says where every parameter lies, from shapes alone, and the arrays do lie there."""

import dataclasses
import json

import jax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from tests.helpers import Block, Config, abstract, annotator, builder, sharded, with_placement

WIDTH = 64


class Pair(nnx.Module):
    """Two layers that share a kernel."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def plan_of(module_type, *, mesh=None, **settings) -> js.ShardPlan:
    mesh = mesh or js.mesh()
    build = lambda: module_type(nnx.Rngs(0))
    return js.plan(js.abstract_init(build, lambda m: js.fully_shard(m, mesh=mesh, **with_placement(**settings))))


@pytest.mark.parametrize("scanned", [False, True])
def test_arrays_lie_where_the_plan_says(scanned: bool):
    config = Config(scanned=scanned, tied=False)
    model = sharded(config, js.mesh(replica=2))
    plan = js.plan(model)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {"/".join(map(str, path)): variable.get_raw_value() for path, variable in flat}
    assert set(arrays) == {leaf.path for leaf in plan.leaves}
    for leaf in plan.leaves:
        array, placement = arrays[leaf.path], leaf.placement
        assert (array.shape, array.dtype.name) == (placement.shape, placement.dtype)
        assert array.sharding.spec == placement.partition_spec
        assert {s.data.nbytes for s in array.addressable_shards} == {placement.bytes_per_device}
    assert plan.num_parameters == sum(x.size for x in arrays.values())
    assert plan.logical_bytes == sum(x.nbytes for x in arrays.values())


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


def test_the_plan_survives_json_and_is_frozen():
    precision = js.MixedPrecision(param="bfloat16", reduce="float32")
    plan = js.plan(abstract(Config(), js.mesh(replica=2), mixed_precision=precision))
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["mesh"] == [["replica", 2], ["fsdp", 4], ["tensor", 1]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mesh = ()


def test_the_same_plan_without_devices_and_without_arrays():
    plans = [
        js.plan(sharded(Config(), js.mesh())),
        js.plan(abstract(Config(), js.mesh())),
        js.plan(abstract(Config(), js.mesh(devices=8))),
    ]
    assert plans[0] == plans[1] == plans[2]


def test_a_plan_of_175_billion_parameters_makes_no_array():
    config = Config(layers=96, width=12_288, hidden=49_152, heads=96, vocab=50_000, scanned=True, tied=False)
    live = len(jax.live_arrays())
    plan = js.plan(abstract(config, js.mesh(replica=4, fsdp=128, devices=512)))
    assert len(jax.live_arrays()) == live
    assert plan.num_parameters > 174e9
    small = sum(leaf.placement.logical_bytes for leaf in plan.replicated)
    assert plan.bytes_per_device == (plan.logical_bytes - small) / 128 + small


def test_the_largest_dim_that_divides_is_sharded_and_never_the_layers():
    plan = js.plan(abstract(Config(layers=8, scanned=True), js.mesh()))
    dims = {leaf.path: leaf.placement.dim for leaf in plan.leaves}
    assert dims["blocks/up/kernel"] == 2  # (8, 64, 256)
    assert dims["blocks/down/kernel"] == 1  # (8, 256, 64)
    assert dims["blocks/attention/out/kernel"] == 1  # (8, 64, 64): the first of equal ones
    assert dims["embed/embedding"] == 0


def test_a_parameter_is_replicated_with_the_reason():
    plan = js.plan(abstract(Config(), js.mesh()))
    small = plan.leaf("norm/scale").placement
    assert (small.dim, small.shards, small.bytes_per_device) == (None, 1, small.logical_bytes)
    assert small.because == "smaller than min_size (64 < 1024 elements)"
    assert all(leaf.placement.because for leaf in plan.replicated)
    assert not any(leaf.placement.because for leaf in plan.leaves if leaf not in plan.replicated)

    alone = plan_of(Pair, mesh=js.mesh(replica=8, fsdp=1))
    assert {leaf.placement.because for leaf in alone.leaves} == {"the fsdp axis has degree 1"}
    ignored = plan_of(Pair, ignored="first/*", allow_replicated=["*"])
    assert ignored.leaf("first/kernel").placement.because == "ignored by the annotation"

    class Odd(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.even = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.odd = nnx.Linear(31, 41, rngs=rngs)

    indivisible = plan_of(Odd, allow_replicated=["odd/*"])  # named, so without a warning
    assert indivisible.leaf("odd/kernel").placement.because == "no dim divides by 8 (shape (31, 41))"


def test_the_dim_asked_for_is_sharded():
    plan = plan_of(Pair, shard_dim=lambda path, shape: 1 if path == "first/kernel" else None)
    assert plan.leaf("first/kernel").placement.spec == (None, "fsdp")


def test_tied_parameters_appear_once_with_their_other_names():
    mesh = js.mesh()
    model = nnx.eval_shape(lambda: Pair(nnx.Rngs(0)))
    js.fully_shard(model.first, mesh=mesh)
    js.fully_shard(model.second, mesh=mesh)
    js.fully_shard(model, mesh=mesh)
    plan = js.plan(model)
    tied = plan.leaf("first/kernel")
    assert (tied.aliases, tied.unit) == (("second/kernel",), "(root)")
    assert plan.leaf("second/kernel") is tied
    assert plan.num_parameters == WIDTH * WIDTH + 2 * WIDTH


def test_dtypes_stored_gathered_and_reduced():
    precision = js.MixedPrecision(param="bfloat16", reduce="float32")
    placement = plan_of(Pair, mixed_precision=precision).leaf("first/kernel").placement
    assert (placement.dtype, placement.gathered_dtype, placement.reduce_dtype) == ("float32", "bfloat16", "float32")
    assert (placement.logical_bytes, placement.gathered_bytes) == (4 * WIDTH**2, 2 * WIDTH**2)
    follows = plan_of(Pair, mixed_precision=js.MixedPrecision(param="bfloat16")).leaf("first/kernel").placement
    assert follows.reduce_dtype == "bfloat16"


def test_modules_given_in_one_list_are_one_unit():
    mesh = js.mesh()

    def annotate(model):
        js.fully_shard([model.norm, model.head], mesh=mesh)
        js.fully_shard(model, mesh=mesh)

    plan = js.plan(js.abstract_init(builder(Config(tied=False)), annotate))
    assert "head+norm" in [unit.name for unit in plan.units]
    assert {leaf.path for leaf in plan.unit_leaves("head+norm")} == {"head/kernel", "norm/scale"}


def test_the_one_call_form_gives_the_same_plan():
    mesh = js.mesh()
    by_hand = js.plan(abstract(Config(), mesh))
    for units in (Block, "blocks/*", lambda path, module: isinstance(module, Block)):
        made = js.abstract_init(builder(Config()), lambda m, units=units: js.fully_shard(m, units=units, mesh=mesh))
        assert js.plan(made) == by_hand


def test_a_forgotten_root_is_an_error():
    model = nnx.eval_shape(lambda: Pair(nnx.Rngs(0)))
    js.fully_shard(model.second, mesh=js.mesh())
    with pytest.raises(AnnotationError) as caught:
        js.plan(model)
    assert str(caught.value) == (
        "The root of the model is not annotated.\n"
        "  where: Pair: 1 units inside (second)\n"
        "  why:   parameters outside the inner units belong to the root, and one call into the root is one sharded"
        " region.\n"
        "  do:    js.fully_shard(model, mesh=mesh)  # after its submodules"
    )


def test_annotating_changes_no_name_and_no_tree():
    plain = nnx.eval_shape(builder(Config()))
    names = [path for path, _ in nnx.to_flat_state(nnx.state(plain))]
    annotator(js.mesh())(plain)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(plain))] == names
