"""Published pipelines, estimated by one of their stages: the bubble, and what the first and the last stage hold."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.published_pipelines import Division, Pipeline, pipeline_cost
from benchmarks.published_pytorch import EagerMicrobatch
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

LLAMA = load_model_file(str(Path(__file__).parents[2] / "models" / "llama.py"))
SETTINGS = (
    "model.scan=true",
    "model.n_layer=8",
    "model.compute_dtype=bfloat16",
    "model.remat=full",
    "batch_size=64",
    "accumulate=4",
    "sync=last",
)
UNITS = {"reshard_after_forward": False}


def recipe_with(*settings):
    return override(override(LLAMA.recipe("tiny")[1], SETTINGS), settings)


def planned(pipe, *settings):
    """The pipeline of eight layers on eight H100, the costs of a stage, and a function that estimates a pipeline."""
    recipe = recipe_with(*settings)
    pipeline = Pipeline.of(recipe, {"replica": 1, "fsdp": 8 // pipe, "pipe": pipe})
    cluster = PlannedCluster(parse_topology("h100:1x8"))
    machine = dataclasses.replace(cluster.machine, num_devices=8 // pipe)
    of_batch = override(recipe, pipeline.batch_settings)

    def stage_of(num_layers):
        return Costs(LLAMA, override(of_batch, (f"model.n_layer={num_layers}",)), machine)

    def cost(pipeline):
        with traced_for_device(cluster.topology.device):
            return pipeline_cost(stage_of, pipeline, UNITS, lambda costs: EagerMicrobatch())

    return pipeline, stage_of(pipeline.layers_of_stage), cost


def test_the_batch_goes_through_the_stages_in_its_microbatches():
    pipeline = Pipeline.of(recipe_with(), {"replica": 1, "fsdp": 2, "pipe": 4})
    assert pipeline.rows == 64 // 4 // 8 == 2
    assert pipeline.num_microbatches == 16  # of two data shards: 16 x 2 x 2 sequences
    assert pipeline.num_rounds == 19 and pipeline.num_in_flight == 4
    assert pipeline.batch_settings == ("batch_size=76", "accumulate=19")
    assert pipeline.mesh == {"replica": 1, "fsdp": 2}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_s", "division"),
    [
        (8, 2, 0.0, Division(4, 4, 4.0)),
        (8, 2, 2.0, Division(5, 3, 5.0)),
        (40, 4, 2.0, Division(11, 9, 11.0)),
        (7, 3, 0.5, Division(3, 2, 3.0)),
        (8, 2, 9.0, Division(8, 0, 9.0)),
    ],
)
def test_layers_are_divided_so_that_the_slowest_stage_is_fast(num_layers, num_stages, head_s, division):
    pipeline = Pipeline(num_layers, num_stages, num_microbatches=8, rows=1, mesh={})
    assert pipeline.divided(1.0, head_s) == division


def test_fewer_microbatches_wait_longer():
    """Of m microbatches on p stages, a step takes as long as m + p - 1."""
    pipeline, _, many = planned(4, "batch_size=1024", "accumulate=64")
    few_pipeline, _, few = planned(4, "batch_size=64", "accumulate=4")
    ratio = few(few_pipeline).step_s / many(pipeline).step_s
    assert ratio == pytest.approx((16 + 3) / (256 + 3), rel=0.1)


def test_the_first_stage_holds_more_microbatches_the_more_stages_there_are():
    pipeline, costs, cost = planned(4, "batch_size=1024", "accumulate=2", "model.remat=minimal_flash")
    alone = dataclasses.replace(pipeline, num_microbatches=1)
    assert (pipeline.num_in_flight, alone.num_in_flight) == (4, 1)
    with traced_for_device(PlannedCluster(parse_topology("h100:1x8")).topology.device):
        saved = costs.saved(Variant(name="", mesh=pipeline.mesh, units=UNITS))
    of_layers_bytes = saved.saved_bytes - saved.outside_bytes
    held, with_one = cost(pipeline).step_bytes, cost(alone).step_bytes
    assert with_one < held <= with_one + 3 * of_layers_bytes


def test_no_stage_has_both_tables():
    """Of an untied model the first stage has the tokens' table, and the last one the head's."""
    pipeline, costs, cost = planned(2)
    with traced_for_device(PlannedCluster(parse_topology("h100:1x8")).topology.device):
        alone = costs.of(Variant(name="", mesh=pipeline.mesh, units=UNITS))
        saved = costs.saved(Variant(name="", mesh=pipeline.mesh, units=UNITS))
    in_flight = saved.saved_bytes - saved.outside_bytes
    assert cost(pipeline).step_bytes < alone.memory.step_bytes + in_flight
