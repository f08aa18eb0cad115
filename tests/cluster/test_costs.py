"""Estimates of ways before anything is compiled: the memory is explain's, and each thing that is changed shows."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jshard as js
from jshard.cluster import model_traces
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Costs
from jshard.cluster.model_traces import ModelTraces
from jshard.cluster.search import is_same
from jshard.recipes.building import abstract_model
from jshard.recipes.overrides import override
from tests.cluster.fake_compiler import GPT, cluster_of, costs_of, mesh_of
from tests.micro_gpt import micro
from tests.wide import wide

HOST = cluster_of("h100:1x8")
SETTINGS = ("batch_size=96",)


@pytest.fixture(scope="module")
def costs():
    return costs_of(HOST, *SETTINGS)


def cost(costs, *, replica=1, fsdp=8, accumulate=None, **units):
    mesh = {"replica": replica, "fsdp": fsdp, "tensor": 1}
    return costs.of(Variant(name="", mesh=mesh, accumulate=accumulate, units=units))


def explained(costs: Costs, variant: Variant):
    """The memory that `js.explain` reports for a whole microbatch on the real mesh."""
    model_file, recipe = costs.model_file.with_units(variant.units), costs.recipe
    mesh = js.mesh(**variant.mesh, devices=costs.machine.num_devices)
    model = abstract_model(model_file, recipe, mesh)
    rows = recipe.batch_size // (variant.accumulate or recipe.accumulate)
    tokens = jax.ShapeDtypeStruct((rows, recipe.sequence_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    return js.explain(model, optimizer=recipe.optimizer(), loss_fn=GPT.loss_fn, batch=batch).memory


@pytest.mark.parametrize(
    ("replica", "accumulate", "units"),
    [(2, 2, {"prefetch": 2}), (1, 3, {"remat": "full"}), wide(4, None, {"remat": "dots"})],
    ids=["hsdp", "full", "dots"],
)
def test_memory_is_what_explain_reports(costs, replica, accumulate, units):
    """Though only two small batches on two devices are traced: what is saved grows as a straight line."""
    found = cost(costs, replica=replica, fsdp=8 // replica, accumulate=accumulate, **units)
    reported = dataclasses.asdict(explained(costs, found.variant))
    # A call of the loss knows of one microbatch only.
    reported["sums_bytes"] = reported["gradients_bytes"] if (accumulate or 1) > 1 else 0
    for name, value in dataclasses.asdict(found.memory).items():  # but for the loss, a number of the whole batch
        assert value == (pytest.approx(reported[name], abs=4) if isinstance(value, int) else reported[name]), name


@pytest.mark.wide
def test_of_a_stack_of_layers_too():
    """The few sequences that are traced are chosen so that no array of them looks like one of so many layers."""
    found = costs_of(HOST, *SETTINGS, "model.scan=true", "model.n_layer=5")
    one = cost(found, remat="full")
    assert one.memory.live_outside_bytes > 12 * 32 * 256 * 4  # the logits at least
    assert one.memory.step_bytes == pytest.approx(explained(found, one.variant).step_bytes, rel=1e-4)


def test_what_layers_keep_gathered_counts(costs):
    asked, kept = cost(costs), cost(costs, reshard_after_forward=False)
    added = kept.memory.kept_bytes - asked.memory.kept_bytes
    blocks = 2 * asked.memory.largest_unit_bytes  # the root keeps its own either way
    assert added == blocks > 0
    assert kept.memory.activations_bytes == asked.memory.activations_bytes
    assert kept.memory.step_bytes == pytest.approx(explained(costs, kept.variant).step_bytes, rel=0.06)


def test_microbatches_hold_less_and_wait_more(costs):
    whole, parts = cost(costs), cost(costs, accumulate=4)
    assert parts.memory.activations_bytes < 0.3 * whole.memory.activations_bytes
    assert parts.memory.held_bytes == whole.memory.held_bytes
    assert parts.communication_s == pytest.approx(4 * whole.communication_s)
    assert parts.exposed_s > whole.exposed_s


def test_gradients_reduced_once_a_step_are_held_whole_and_sent_once(costs):
    """As `js.value_and_grad(sync="last")`: whole copies of parameters, and whole sums in the reduce dtype."""
    each = cost(costs, accumulate=4)
    last = cost(costs.on(costs.machine, settings=("sync=last",)), accumulate=4)
    num_elements = costs.traces.plan((("replica", 1), ("fsdp", 8)), ()).num_parameters
    assert each.memory.sums_bytes < last.memory.sums_bytes == pytest.approx(4 * num_elements, rel=0.01)
    assert last.memory.gradients_bytes == last.memory.sums_bytes
    assert last.memory.kept_bytes == pytest.approx(4 * num_elements, rel=0.03)  # but for what is replicated
    assert last.memory.held_bytes == each.memory.held_bytes
    assert last.communication_s < each.communication_s / 3
    assert last.exposed_s == pytest.approx(last.communication_s)  # nothing hides it


def test_of_one_microbatch_gradients_are_reduced_at_once_in_any_case(costs):
    once = cost(costs.on(costs.machine, settings=("sync=last",)))
    assert is_same(once, cost(costs))


def test_more_devices_have_smaller_shards_of_gradients():
    """The sequences of a device are as many; what it reads and writes of gradients that are reduced is less."""
    found = costs_of(HOST, "batch_size=96")
    many = found.on(cluster_of("h100:4x8").machine, settings=("batch_size=384",))
    few_s, many_s = cost(found).work.traffic_s, cost(many, fsdp=32).work.traffic_s
    assert few_s > many_s > 0.9 * few_s


def test_layers_that_are_gathered_after_a_reduction_hold_less(costs):
    """Then the parameters of the next layer and the gradients of the one before are not there at once."""
    beside = dataclasses.replace(cost(costs, remat="full").memory, prefetched_bytes=2**30, layer_gradient_bytes=2**29)
    in_turn = dataclasses.replace(beside, gathers_in_turn=True)
    assert beside.in_layer_bytes - in_turn.in_layer_bytes == 2**29


def test_remat_holds_less_and_computes_more():
    """More products; on a model so small that traffic to the memory is most of the time, only there."""
    known = {"memory_bytes_per_s": 1e18}
    found = costs_of(cluster_of("h100:1x8", **known), *SETTINGS)
    none, dots, full = (cost(found, remat=remat) for remat in ("none", "dots", "full"))
    assert none.memory.step_bytes > dots.memory.step_bytes > full.memory.step_bytes
    # A third more in layers: their forward runs twice. The head's does not.
    assert 1.2 * none.work.products_s < full.work.products_s < 4 / 3 * none.work.products_s
    assert dots.work.products_s == pytest.approx(none.work.products_s, rel=1e-3)


def test_auto_costs_what_the_policy_costs_that_it_chooses():
    """The batch of the request counts, for which only full fits; not the small ones that are traced for estimates."""
    found = costs_of(HOST, f"batch_size={2**21}", "model.scan=true")
    asked = cost(found)
    assert found.traces.remat == "auto" and found.remat_of(asked.variant) == "full"
    assert is_same(asked, cost(found, remat="full")) and not is_same(asked, cost(found, remat="dots"))


def test_replicas_wait_less_for_slow_links_and_hold_more():
    costs = costs_of(cluster_of("h100:2x8", slow_bytes_per_s=4e8), *SETTINGS)
    zero3, hsdp = cost(costs, fsdp=16), cost(costs, replica=2, fsdp=8)
    assert hsdp.exposed_s < 0.8 * zero3.exposed_s
    assert hsdp.memory.held_bytes > 1.5 * zero3.memory.held_bytes
    near = cost(costs, fsdp=16, reshard_after_forward=8)  # backward gathers within a host
    assert near.exposed_s < zero3.exposed_s and near.memory.kept_bytes > zero3.memory.kept_bytes


def test_all_computation_can_hide_is_hidden():
    """Where it takes long enough only the ends are exposed: the root's, a row's first gather and last reduction."""
    slow = cluster_of("h100:1x8", matmul_efficiency=1e-5)
    fast = cluster_of("h100:1x8", launch_s=1e-12, memory_bytes_per_s=1e18)
    found, quick = cost(costs_of(slow, *SETTINGS)), cost(costs_of(fast, *SETTINGS))
    assert found.communication_s == quick.communication_s
    assert 0 < found.exposed_s < 0.8 * quick.exposed_s
    nothing_ahead = cost(costs_of(slow, *SETTINGS), prefetch=0)
    assert nothing_ahead.exposed_s > found.exposed_s


def test_nothing_is_hidden_where_the_state_alone_fills_the_memory():
    """XLA's scheduler starts a collective early only where there is memory for its result."""
    costs = costs_of(HOST, *SETTINGS)
    held_bytes = cost(costs).memory.held_bytes
    small = dataclasses.replace(costs.machine, capacity_bytes=int(1.2 * held_bytes))
    found = cost(costs.on(small, settings=SETTINGS))
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert cost(costs).exposed_s < 0.9 * found.exposed_s
    assert cost(costs.on(dataclasses.replace(small, device=None), settings=SETTINGS)).exposed_s == cost(costs).exposed_s


def test_collectives_between_hosts_start_as_early_as_the_scheduler_takes_them_for_slow():
    """In one host, and on an A100, they end one after another; so they do beside sums over `tensor`."""
    assert HOST.machine.expected_assumptions is None
    assert cluster_of("a100-80:2x8").machine.expected_assumptions is None
    hosts = cluster_of("h100:2x8").machine
    assert hosts.expected_assumptions is not None
    group = range(16)
    expected_s = hosts.expected_assumptions.transfer_s("all-gather", 1e9, group)
    assert 1.5 < expected_s / hosts.assumptions.transfer_s("all-gather", 1e9, group) < 3
    assert hosts.expected_assumptions.transfer_s("all-gather", 1e9, range(8)) < expected_s


def test_copies_to_the_host_have_a_price_where_their_rate_is_known():
    held = cost(costs_of(HOST, *SETTINGS))
    offloaded = cost(costs_of(HOST, *SETTINGS, "model.offload=optimizer"))
    copied_bytes = offloaded.memory.host_optimizer_bytes
    rate = HOST.assumptions.host_bytes_per_s
    assert copied_bytes > 0 and rate is not None
    assert offloaded.exposed_s - held.exposed_s == pytest.approx(copied_bytes / rate)
    unknown = costs_of(cluster_of("v5e:2x4"), *SETTINGS, "model.offload=optimizer")
    assert cost(unknown).left_out == ("copies to and from the host",)


def test_another_degree_of_tensor_is_not_traced_again(monkeypatch):
    """One degree is traced for all."""
    settings = ("batch_size=8", "model.n_head=4", "model.n_layer=1")
    units = {"remat": "none"}
    traces = ModelTraces(GPT, override(micro(), settings))
    costs = Costs(GPT, traces.recipe, HOST.machine, traces=traces)
    by_two = costs.of(Variant(name="", mesh=mesh_of(HOST, tensor=2), units=units))

    def traced_again(*args, **kwargs):
        raise AssertionError

    for name in ("saved_arrays", "traced_gradient", "partitioned_step"):
        monkeypatch.setattr(model_traces, name, traced_again)
    by_four = costs.of(Variant(name="", mesh=mesh_of(HOST, tensor=4), units=units))
    # Half of each product, of twice as many rows.
    assert by_four.work.products_s == pytest.approx(by_two.work.products_s)


def test_what_a_mesh_needs_at_least(costs):
    whole, halves = costs.held_bytes(mesh_of(HOST)), costs.held_bytes(mesh_of(HOST, replica=2))
    found = cost(costs).memory
    assert whole == found.held_bytes + found.gradients_bytes
    assert 1.8 * whole < halves < 2 * whole
