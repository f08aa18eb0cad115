"""`explain` says which loops run on pipeline stages, what they hold and what they send."""

import dataclasses
import functools
import json
import os
from pathlib import Path

import jax
import pytest
from flax import nnx

import jshard as js
from jshard.engine.layer_stacks import as_traced
from jshard.inspect.communication import traffic_of
from jshard.inspect.explain import explain
from tests.stages_model import StagedBlock, StagedConfig, StagedDecoder, token_loss, uneven_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "explain_stages.txt"


def annotated(layers: int = 8, rounds: int | None = None, **degrees: int) -> StagedDecoder:
    degrees = degrees or {"pipe": 2, "fsdp": 2}
    num_devices = functools.reduce(lambda x, y: x * y, degrees.values())
    mesh = js.mesh(**degrees, devices=jax.devices()[:num_devices])

    def annotate(model: StagedDecoder) -> None:
        placement = js.PlacementPolicy(min_size=256)
        js.fully_shard(model, units=StagedBlock, mesh=mesh, placement=placement)
        js.parallel.stages(model, rounds=rounds)

    return js.abstract_init(lambda: StagedDecoder(StagedConfig(layers=layers), nnx.Rngs(0)), annotate)


def test_the_text_after_a_call():
    model = annotated()
    text = f"{explain(model, loss_fn=token_loss, batch=(uneven_tokens(),))}\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_before_a_call_a_line_says_that_it_is_not_known_yet():
    model = annotated(layers=3)
    before = str(explain(model))
    assert "Stages: loops over units run on the 2 places along pipe" in before
    assert "ticks" not in before
    jax.eval_shape(lambda model, tokens: model(tokens), model, uneven_tokens()[:, :-1])
    after = str(explain(model))
    assert "2 of 3" in after and "until the first call" not in after


def test_without_pipe_nothing_is_said_of_stages():
    model = annotated(layers=2, fsdp=4)
    jax.eval_shape(lambda model, tokens: model(tokens), model, uneven_tokens()[:, :-1])
    found = explain(model)
    assert "tage" not in str(found).replace("StagedBlock", "").replace("StagedDecoder", "")
    assert "stages" not in json.loads(found.to_json())["memory_per_device"]
    assert "stages" not in json.loads(found.to_json())["plan"]


@pytest.fixture(scope="module")
def traced() -> tuple[js.ShardPlan, js.ShardPlan]:
    """The plan after forward alone, and after backward as well."""
    model = annotated(layers=4, rounds=1)
    jax.eval_shape(lambda model, tokens: model(tokens), model, uneven_tokens()[:, :-1])
    forward = as_traced(js.plan(model))
    jax.eval_shape(nnx.value_and_grad(token_loss), model, uneven_tokens())
    return forward, as_traced(js.plan(model))


def test_forward_alone_tells_most_of_backward(traced: tuple[js.ShardPlan, js.ShardPlan]):
    """But for the parameters that backward does not need, such as most biases."""
    forward, both = traced
    sent = sum(traffic.full_bytes for traffic in traffic_of(both))
    assert sum(traffic.full_bytes for traffic in traffic_of(forward)) == pytest.approx(sent, rel=0.02)


def test_a_plan_with_stages_is_read_back(traced: tuple[js.ShardPlan, js.ShardPlan]):
    _, plan = traced
    assert plan.stages
    assert js.ShardPlan.from_json(plan.to_json()) == plan


def test_memory_of_rounds(traced: tuple[js.ShardPlan, js.ShardPlan]):
    """Of one round a place holds all its layers, gathered; of gradients three rounds of sums."""
    _, plan = traced
    memory = explain(plan).memory
    # With the records of the model above: a plan is found by its class, mesh and placements.
    stages = memory.stages
    assert stages is not None and stages.num_rounds == 1
    gathered = 0
    for leaf in plan.leaves:
        if leaf.path.startswith("blocks/") and leaf.placement.dim is not None:
            gathered += leaf.placement.gathered_bytes
    assert stages.rounds_bytes == gathered // 2
    assert stages.sums_bytes == pytest.approx(3 * gathered / 2, rel=0.1)  # and those of biases
    assert memory.step_bytes > stages.total_bytes + memory.held_bytes
    assert dataclasses.replace(memory, stages=None).step_bytes < memory.step_bytes


def test_json_has_the_loops(traced: tuple[js.ShardPlan, js.ShardPlan]):
    _, plan = traced
    loops = json.loads(explain(plan).to_json())["plan"]["stages"]["loops"]
    assert [loop["phase"] for loop in loops] == ["forward", "backward"]
    assert loops[0]["schedule"]["num_microbatches"] == 2
