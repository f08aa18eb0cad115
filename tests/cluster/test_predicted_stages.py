"""Loops on pipeline stages before a trace: those that a trace finds, and a search considers between hosts."""

import jax
import pytest
from flax import nnx

import jshard as js
from jshard.cluster.costs import Costs
from jshard.cluster.machine import Machine, assumptions_of
from jshard.cluster.predicted_stages import compute_factor, with_carries, with_predicted_stages
from jshard.cluster.search import search
from jshard.cluster.topology import parse_topology
from jshard.engine.layer_stacks import as_traced
from jshard.inspect.communication import unit_traffic
from jshard.inspect.staged_memory import stages_memory
from jshard.plans.stages import Stages
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from tests.micro_gpt import MODELS
from tests.stages_model import BATCH, LENGTH, WIDTH, StagedBlock, StagedConfig, StagedDecoder, token_loss, uneven_tokens

LAYERS = 5


def plans(stages: Stages):
    """The plan with predicted loops, and the plan with those that a trace has found."""
    mesh = js.mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])

    def annotate(model):
        js.fully_shard(model, units=StagedBlock, mesh=mesh)
        js.revise(model, stages=stages)

    model = js.abstract_init(lambda: StagedDecoder(StagedConfig(layers=LAYERS), nnx.Rngs(0)), annotate)
    plan = js.plan(model)
    layers = {unit.name for unit in plan.units if unit.name.startswith("blocks/")}
    jax.eval_shape(nnx.value_and_grad(token_loss), model, uneven_tokens())
    return with_predicted_stages(plan, layers, stages), as_traced(plan)


@pytest.mark.parametrize("stages", [Stages(), Stages(microbatches=4, late=True, sum_dtype="bfloat16")], ids=str)
def test_predicted_loops_are_those_of_the_trace(stages):
    predicted, traced = plans(stages)
    assert [loop.schedule for loop in predicted.stages.loops] == [loop.schedule for loop in traced.stages.loops]
    for layer in range(LAYERS):
        name = f"blocks/{layer}"
        assert unit_traffic(predicted, name) == unit_traffic(traced, name)
    layer_input_bytes = BATCH // 4 * LENGTH * WIDTH * 4
    expected = stages_memory(traced)
    memory = stages_memory(with_carries(predicted, layer_input_bytes))
    assert (memory.num_rounds, memory.rounds_bytes) == (expected.num_rounds, expected.rounds_bytes)
    assert (memory.sums_bytes, memory.reduced_bytes) == (expected.sums_bytes, expected.reduced_bytes)
    # Only a trace knows that backward does not read some biases.
    assert memory.layers_bytes == pytest.approx(expected.layers_bytes, rel=0.1)
    assert memory.activations_bytes == pytest.approx(expected.activations_bytes, rel=0.05)
    assert compute_factor(predicted) > 1


def searched(topology: str, tokens: int, *settings: str):
    """A search for GPT-3 with a sequence on each device, as `jshard plan --auto` makes it."""
    cluster = parse_topology(topology)
    model_file = load_model_file(MODELS / "gpt.py")
    recipe = override(
        model_file.recipes["gpt3_175b"](), [f"sequence_length={tokens}", f"batch_size={cluster.num_devices}", *settings]
    )
    assumptions = assumptions_of(cluster)
    machine = Machine(cluster.num_devices, cluster.device.hbm_bytes, cluster.fast_group, assumptions)
    return search(Costs(model_file, recipe, machine), {"replica": 1, "fsdp": cluster.num_devices})


def degrees_of_pipe(result):
    return {cost.variant.mesh.get("pipe", 1) for cost in (*result.ranked, *result.too_large)}


def test_stages_are_considered_between_hosts_and_chosen_for_few_tokens():
    result = searched("h100:64x8", tokens=512)
    assert degrees_of_pipe(result) == {1, 2, 4, 8, 16, 32, 64}
    assert result.ranked[0].variant.mesh["pipe"] > 1
    assert "stages" in result.ranked[0].variant.name


@pytest.mark.wide
@pytest.mark.parametrize(("topology", "tokens"), [("h100:64x8", 2048), ("h100:1x8", 512)])
def test_stages_are_not_chosen_where_communication_is_hidden(topology, tokens):
    result = searched(topology, tokens)
    best = min((*result.ranked, *result.too_large), key=lambda cost: cost.step_s)
    assert best.variant.mesh.get("pipe", 1) == 1


@pytest.mark.wide
def test_stages_that_the_microbatches_do_not_fit_are_left_out():
    """8 microbatches are too few for 16 places and more, and 2 or 4 places have no 8 examples, with one on each."""
    result = searched("h100:64x8", 512, "stages.microbatches=8")
    assert degrees_of_pipe(result) == {1, 8}
    reasons = {mesh: why for mesh, why in result.refused.items() if "pipe" in mesh}
    assert len(reasons) == 3
    assert set(reasons.values()) == {"The pipeline has too few microbatches."}
