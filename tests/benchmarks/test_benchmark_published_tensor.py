"""What devices along `tensor` divide in published programs, and what is sent once a step."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.published_pytorch import PyTorchProgram
from benchmarks.published_sums import broadcasts_s, more_once_s, whole_sums_s
from benchmarks.published_tensor import divided_s, split_head_s, sums_s, tables_elsewhere
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster, assumptions_of
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

LLAMA = load_model_file(str(Path(__file__).parents[2] / "models" / "llama.py"))
SETTINGS = (
    "model.scan=true",
    "model.n_layer=8",
    "model.d_model=1024",
    "model.n_head=8",
    "model.n_kv_head=8",
    "model.d_ff=2048",
    "model.vocab_size=32000",
    "model.compute_dtype=bfloat16",
    "model.reduce_dtype=bfloat16",
    "model.remat=minimal_flash",
    "model.block_size=2048",
    "sequence_length=2048",
    "batch_size=128",
    "accumulate=4",
    "sync=last",
)
UNITS = {"reshard_after_forward": False}
PLAIN = PyTorchProgram(remat="none")
CLUSTER = PlannedCluster(parse_topology("a100-80:2x8"))
A100 = assumptions_of(parse_topology("a100-80:1x8"))
ROWS = 4


@pytest.fixture(scope="module")
def costs():
    """The costs of a small Llama of 16 bits on sixteen A100."""
    with traced_for_device(CLUSTER.topology.device):
        yield Costs(LLAMA, override(LLAMA.recipe("tiny")[1], SETTINGS), CLUSTER.machine)


def mesh_of(tensor):
    return {"replica": 1, "fsdp": 16 // tensor, "tensor": tensor}


def program(**changes):
    return dataclasses.replace(PLAIN, **changes)


def traffic_s(costs, tensor):
    """What a microbatch takes beside its products, on each device along `tensor`."""
    recipe = override(costs.recipe, (f"batch_size={4 * ROWS * 16 // tensor}", "accumulate=4"))
    of_batch = Costs(costs.model_file, recipe, costs.machine, traces=costs.traces)
    return of_batch.of(Variant(name="", mesh=mesh_of(tensor), units=UNITS)).work.traffic_s / 4


# ---- what is divided


def test_a_head_that_is_divided_is_quicker(costs):
    settings = {"rows": 8, "assumptions": A100}
    assert split_head_s(costs.recipe, {"fsdp": 8}, whole=False, **settings) == 0.0
    parted_s = split_head_s(costs.recipe, {"fsdp": 2, "tensor": 4}, whole=False, **settings)
    assert parted_s < 0.0
    assert parted_s < split_head_s(costs.recipe, {"fsdp": 2, "tensor": 4}, whole=True, **settings)


def test_nothing_is_divided_without_tensor(costs):
    assert divided_s(program(split_sequence=True), costs, mesh_of(1), rows=ROWS) == 0.0


def test_a_loss_over_words_reads_and_writes_a_part_of_the_logits(costs):
    """In single operations they are read and written several times, in 32 bits."""
    mesh = mesh_of(4)
    beside_head_s = []
    for whole in (False, True):
        head_s = split_head_s(costs.recipe, mesh, rows=ROWS, whole=whole, assumptions=costs.machine.assumptions)
        beside_head_s.append(divided_s(program(whole_logits=whole), costs, mesh, rows=ROWS) - head_s)
    of_words_s, of_whole_s = beside_head_s
    assert of_whole_s == pytest.approx(0.0, abs=1e-12)
    logits_bytes = 4 * ROWS * 2048 * 32000
    once_s = logits_bytes / CLUSTER.machine.assumptions.memory_bytes_per_s
    assert -20 * once_s < of_words_s < -2 * once_s * 3 / 4


def test_with_split_sequences_a_device_reads_and_writes_its_part_of_everything(costs):
    mesh = mesh_of(8)
    head_s = split_head_s(costs.recipe, mesh, rows=ROWS, whole=False, assumptions=costs.machine.assumptions)
    less_s = divided_s(program(split_sequence=True), costs, mesh, rows=ROWS) - head_s
    alone_s, over_tensor_s = traffic_s(costs, 1), traffic_s(costs, 8)
    assert less_s < divided_s(PLAIN, costs, mesh, rows=ROWS) - head_s < 0.0
    # Gradients that are added are part of both, and a gap after each kernel is divided in none.
    assert alone_s / 8 < over_tensor_s + less_s < alone_s / 4


def test_whole_logits_are_not_divided_with_sequences(costs):
    mesh = mesh_of(4)
    of_words_s = divided_s(program(split_sequence=True), costs, mesh, rows=ROWS)
    assert of_words_s < divided_s(program(split_sequence=True, whole_logits=True), costs, mesh, rows=ROWS) < 0.0


def test_devices_along_tensor_have_a_part_of_both_tables_and_a_stage_has_one(costs):
    plan = costs.traces.plan(tuple(mesh_of(4).items()), tuple(UNITS.items()))
    whole = tables_elsewhere(costs, plan, tensor=4, is_stage=False)
    assert sorted(whole.values()) == [0.75, 0.75]
    assert sorted(tables_elsewhere(costs, plan, tensor=4, is_stage=True).values()) == [0.75, 1.0]
    assert whole.keys() == tables_elsewhere(costs, plan, tensor=1, is_stage=True).keys()


# ---- sums over tensor


def sums_on(mesh, costs, **changes):
    return sums_s(program(**changes), costs, mesh, UNITS, rows=ROWS)


def test_without_tensor_or_its_words_sums_are_as_planned(costs):
    assert sums_on(mesh_of(1), costs, blocking_sums=True, sums_each_product=True) == 0.0
    assert sums_on(mesh_of(4), costs) == 0.0


def test_blocking_sums_hide_nothing(costs):
    """A microbatch then waits for all that is sent, and computes as fast as beside nothing."""
    mesh = mesh_of(4)
    cost = costs.of(Variant(name="", mesh=mesh, units=UNITS))
    more_s = 4 * sums_on(mesh, costs, blocking_sums=True)
    assert more_s > 0
    alone_s = cost.work.microbatches_s + cost.work.update_s
    assert cost.step_s + more_s == pytest.approx(alone_s + cost.communication_s)


def test_each_product_of_a_gated_mlp_has_a_sum_of_its_own(costs):
    mesh = mesh_of(4)
    more_s = sums_on(mesh, costs, sums_each_product=True)
    sum_s = CLUSTER.machine.assumptions.transfer_s("all-reduce", 2 * ROWS * 2048 * 1024, range(4))
    assert more_s == pytest.approx(8 * sum_s)
    assert sums_on(mesh, costs, sums_each_product=True, split_sequence=True) == 0.0


def test_communication_of_each_microbatch_stays_hidden(costs):
    each = Costs(LLAMA, override(costs.recipe, ("sync=each",)), CLUSTER.machine, traces=costs.traces)
    assert sums_on(mesh_of(4), each, blocking_sums=True) == 0.0


# ---- what is sent once a step


def test_a_model_without_tensor_sends_what_is_planned(costs):
    assert more_once_s(PLAIN, costs, mesh_of(1), UNITS, is_stage=False) == 0.0


def test_a_stage_sends_less_than_a_model_with_both_tables(costs):
    parted_s = more_once_s(PLAIN, costs, mesh_of(4), UNITS, is_stage=False)
    assert more_once_s(PLAIN, costs, mesh_of(4), UNITS, is_stage=True) < parted_s < 0.0


def test_whole_sums_in_float32_take_four_times_as_long_as_parts_in_16_bits(costs):
    more_s = more_once_s(program(whole_sums=True), costs, mesh_of(1), UNITS, is_stage=False)
    # Of each parameter 2 bytes are reduced and scattered as planned, there 4 are reduced and gathered again.
    num_parameters = 8 * (4 * 1024**2 + 3 * 1024 * 2048) + 2 * 32000 * 1024
    assumptions = CLUSTER.machine.assumptions
    scattered_s = assumptions.transfer_s("reduce-scatter", 2 * num_parameters, range(16))
    in_buckets_s = 24 * num_parameters / (assumptions.memory_bytes_per_s * assumptions.memory_efficiency)
    assert more_s == pytest.approx(3 * scattered_s + in_buckets_s, rel=0.1)


def test_a_broadcast_for_each_device_goes_around_the_ring_each_time(costs):
    """As much is sent as in one gather; all but one are the more latency."""
    more_s = more_once_s(program(broadcasts=True), costs, mesh_of(1), UNITS, is_stage=False)
    latency_s = CLUSTER.machine.assumptions.transfer_s("all-gather", 1e-3, range(16))
    assert more_s == pytest.approx(15 * latency_s, rel=0.01)


def test_there_are_no_more_broadcasts_than_parameters(costs):
    """Those of a layer in a loop are as many as the layers."""
    plan = costs.traces.plan((("replica", 1), ("fsdp", 256)), tuple(UNITS.items()))
    num_parameters = 8 * 9 + 3
    latency_s = A100.transfer_s("all-gather", 1e-3, range(256))
    assert broadcasts_s(plan, A100) == pytest.approx((num_parameters - 1) * latency_s, rel=0.01)


def test_buckets_are_read_and_written_too():
    sent_s = A100.transfer_s("all-reduce", 4 * 1e9, range(8))
    assert sent_s + 24e9 / A100.memory_bytes_per_s < whole_sums_s(1e9, range(8), A100) < sent_s + 0.05


def test_gradients_that_are_reduced_in_each_microbatch_are_as_planned(costs):
    each = Costs(LLAMA, override(costs.recipe, ("sync=each",)), CLUSTER.machine, traces=costs.traces)
    assert more_once_s(program(whole_sums=True), each, mesh_of(4), UNITS, is_stage=False) == 0.0
