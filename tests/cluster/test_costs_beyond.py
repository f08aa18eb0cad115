"""Estimates price what a model sends over axes of its own and copies to the host; what they do not price, they tell."""

import dataclasses
import functools
import math

import pytest

from jshard import _compat
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Costs
from jshard.cluster.report import ClusterPlan
from jshard.cluster.search import search
from jshard.inspect.communication import Sent
from jshard.inspect.hlo.module import parse_module
from jshard.inspect.hlo.work import Worker
from jshard.recipes.overrides import override
from jshard.train import load_model_file
from tests.cluster.fake_compiler import cluster_of, costs_of, mesh_of, request_of, step_of
from tests.micro_gpt import MODELS
from tests.scheduled_text import program
from tests.wide import wide

HOST = cluster_of("h100:1x8")
FAST, COPIES = 0.82 * 450e9, 0.8 * 64e9  # of an H100: NVLink, PCIe 5
LATENCY, NEAR, FAR = 14e-6, 1.9e-6, 4e-6  # of a collective, and of a step to a neighbour and to another host
TWO = {"replica": 1, "fsdp": 4, "tensor": 2}


def cost(costs, mesh=None, **units):
    return costs.of(Variant(name="", mesh=mesh or mesh_of(HOST), units=units))


@functools.cache
def experts():
    """Three layers of 8 experts, 128 wide; of 128 tokens in a sequence 40 have a place at each."""
    model_file = load_model_file(MODELS / "moe.py")
    return Costs(model_file, override(model_file.recipe("tiny")[1], ["batch_size=32"]), HOST.machine)


# ---- axes of the model's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [wide("false"), "true"], ids=["list", "stack"])
def test_a_tensor_axis_costs_an_all_reduce_after_every_pair_of_products(scan):
    """Two layers with two in forward and two in backward, the table and the head; and three of a number for a token."""
    found = cost(costs_of(HOST, "batch_size=32", f"model.scan={scan}"), TWO)
    activation, numbers = 8 * 32 * 64 * 4, 8 * 32 * 4  # 8 sequences of 32 tokens, 64 wide, in float32
    sent = (4 * 2 + 2) * activation + 3 * numbers  # of two devices each sends a half, twice
    assert found.own_s == pytest.approx(13 * (LATENCY + 2 * NEAR) + sent / FAST)
    assert found.left_out == ()


def test_the_computation_waits_for_what_its_products_need():
    costs = costs_of(HOST, "batch_size=32")
    split = cost(costs, TWO)
    costs._own = lambda variant, rows: {}
    without = cost(costs, TWO)
    assert split.own_s > 0 == without.own_s
    assert split.exposed_s == pytest.approx(without.exposed_s + split.own_s)
    assert split.communication_s == pytest.approx(without.communication_s + split.own_s)
    assert split.compute_s == without.compute_s


def test_microbatches_wait_each_and_layers_computed_again_send_again():
    whole, parts = (cost(costs_of(HOST, "batch_size=32", f"accumulate={n}"), TWO) for n in (1, 4))
    assert parts.own_s == pytest.approx(whole.own_s + 3 * 13 * (LATENCY + 2 * NEAR))
    again = cost(costs_of(HOST, "batch_size=32"), TWO, remat="full")
    activation = 8 * 32 * 64 * 4  # of each layer the first of the two: nothing in backward needs the second
    assert again.own_s == pytest.approx(whole.own_s + 2 * (LATENCY + 2 * NEAR + activation / FAST))


def test_between_hosts_it_goes_over_their_adapters():
    found = cost(costs_of(cluster_of("h100:8x1"), "batch_size=32"), TWO)  # a GPU on each
    sent = 10 * 8 * 32 * 64 * 4 + 3 * 8 * 32 * 4
    assert found.own_s == pytest.approx(13 * (LATENCY + 2 * FAR) + sent / (0.84 * 50e9))


def test_tokens_travel_to_experts_and_back_in_forward_and_in_backward():
    found = cost(experts(), {"replica": 1, "fsdp": 4, "expert": 2, "tensor": 1})
    tokens = 8 * 4 * 40 * 128 * 4  # 8 experts, 4 sequences, 40 places, 128 wide, in float32
    assert found.own_s == pytest.approx(3 * 4 * (LATENCY + NEAR + tokens / 2 / FAST))


def test_sums_of_one_array_are_reduced_together_as_the_compiler_does_it():
    """Queries, keys and values are made of one array: its gradient is one sum, reduced once. As compiled for H100."""
    sent = experts()._sent(1, "", 2, 2)
    activation, tokens, numbers = 128 * 128 * 4, 4 * 2 * 40 * 128 * 4, 128 * 4  # 4 experts here, tokens of two shards
    assert sent[Sent("all-reduce", ("tensor",))] == (16, 7 * activation + 6 * tokens + 3 * numbers)
    assert sent[Sent("all-to-all", ("expert",))] == (12, 12 * 8 * 40 * 128 * 4)
    assert len(sent) == 2  # what is over the data axes is the plan's


def test_gradients_over_all_data_axes_are_priced():
    """Small parameters lie whole on each device of three axes."""
    mesh = {"replica": 2, "fsdp": 2, "expert": 2, "tensor": 1}
    found = cost(experts(), mesh)
    assert 0 < found.own_s < found.exposed_s < math.inf


def test_without_a_partitioner_to_ask_it_is_told(monkeypatch):
    monkeypatch.setattr(_compat, "partitioned", lambda lowered: None)
    traced = costs_of(HOST, "batch_size=32")
    costs = Costs(traced.model_file, traced.recipe, traced.machine)
    costs._model, costs._arrays = traced._model, traced._arrays
    found = cost(costs, TWO)
    assert found.own_s == 0
    assert found.left_out == ("collectives over tensor and expert, which this JAX does not show before it compiles",)


# ---- host memory --------------------------------------------------------------------------------------------------


def test_state_on_the_host_crosses_the_link_twice_in_a_step():
    found = cost(costs_of(HOST, "batch_size=32", "model.offload=optimizer"))
    state = found.memory.host_optimizer_bytes  # two moments of all but the small ones, on each of 8 devices
    assert state == 2 * 4 * (256 * 64 + 2 * (64 * 192 + 64 * 64 + 2 * 64 * 128)) // 8
    assert found.host_s == pytest.approx(state / COPIES)  # both ways at once


@pytest.mark.parametrize("parts", [1, 2])
def test_parameters_on_the_host_come_for_forward_backward_and_the_update(parts):
    found = cost(costs_of(HOST, "batch_size=32", "model.offload=params", f"accumulate={parts}"))
    part = found.memory.host_parameters_bytes
    kept = 256 * 64 * 4 // 8  # the root's copy, the table, stays from forward to backward
    update = 2 * part + 2 * part  # two moments; gradients, and parameters
    assert found.memory.host_gradients_bytes == part and found.memory.host_optimizer_bytes == 2 * part
    assert found.host_s == pytest.approx((parts * (part + part - kept) + update) / COPIES)


def test_activations_on_the_host_go_there_and_come_back():
    found = cost(costs_of(HOST, "batch_size=32"), remat="offload")
    saved = found.memory.host_activations_bytes
    assert saved > 0 and found.host_s == pytest.approx(2 * saved / COPIES)


def test_copies_wait_as_far_as_nothing_is_computed_beside_them():
    """Over a slow link for all but the computation; over a quick one for nothing."""
    plain = cost(costs_of(HOST, "batch_size=32"))
    slow, quick = (
        cost(costs_of(cluster_of("h100:1x8", host_bytes_per_s=rate), "batch_size=32", "model.offload=optimizer"))
        for rate in (1e6, 1e15)
    )
    assert quick.exposed_s == plain.exposed_s and quick.compute_s == plain.compute_s
    assert slow.host_s - plain.compute_s < slow.exposed_s - plain.exposed_s < slow.host_s


def test_a_link_of_unknown_rate_is_told_and_a_known_one_counts():
    slice_ = cluster_of("v5e:2x4")
    unknown = search(costs_of(slice_, "batch_size=32", "model.offload=optimizer"), mesh_of(slice_))
    assert unknown.default.host_s == 0
    (line,) = unknown.left_out
    assert line.startswith("not in the estimate: copies to and from the host") and "--assume host_bytes_per_s" in line
    known = cluster_of("v5e:2x4", host_bytes_per_s=5e10)
    found = search(costs_of(known, "batch_size=32", "model.offload=optimizer"), mesh_of(known))
    assert found.left_out == () and found.default.host_s > 0


def test_a_replay_of_a_compiled_step_tells_that_it_follows_no_copies():
    step = step_of(request_of(HOST), peak_bytes=2**30)
    away = dataclasses.replace(step.memory, host_arguments_bytes=2**31, host_temporaries_bytes=2**30)
    plans = [ClusterPlan.of(one, cluster=HOST, name="x") for one in (step, dataclasses.replace(step, memory=away))]
    assert plans[0].left_out == () and "not in the estimate" not in str(plans[0])
    (line,) = plans[1].left_out
    assert line == (
        "not in the estimate: copies to and from the host, where 3.00 GiB are;"
        " to move that once takes 62.9 ms at 51.2 GB/s"
    )
    assert line in " ".join(str(plans[1]).split()) and plans[1].to_dict()["left_out"] == [line]


def test_a_row_fetched_from_the_host_is_no_traffic_of_the_device():
    """Such a fusion names the whole stack: it would count as that, and in each round of a loop."""
    stack, row = "f32[4,1000]{1,0:S(5)}", "f32[1,1000]{1,0}"
    text = program(
        f"%stack = {stack} constant({{...}})",
        f"%begun = (({stack}, s32[]), {row}, u32[]) fusion-start(%stack), kind=kLoop",
        f"%row = {row} fusion-done(%begun)",
        f"%twice = {row} add(%row, %row)",
    )
    home = parse_module(text).computations["main"]
    worker = Worker(parse_module(text))
    work = {name: worker.work(home, home.by_name[name]).memory_bytes for name in ("begun", "row", "twice")}
    assert work["begun"] == work["row"] == 0 and work["twice"] > 0
