"""Targets and budgets: which clusters are considered, which is the answer, and what failures and slow links cost."""

import dataclasses
import shlex

import pytest

from jshard.checkpoint.series.ettr import best_interval_s, ettr
from jshard.cluster import model_traces
from jshard.cluster.answer import Answer
from jshard.cluster.answer_report import AnswerReport
from jshard.cluster.cases import Cases
from jshard.cluster.compile import Variant
from jshard.cluster.failures import SavedState, failures_of
from jshard.cluster.goals import Pace, parse_budget, parse_target
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.outlook import Outlook, fewer_hosts
from jshard.cluster.sizing import Size, Workload, growing, prepared, smallest_reaching
from jshard.cluster.topology import parse_topology
from tests.cluster.fake_compiler import cluster_of, costs_of

# ---- questions


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("tokens/s >= 2e6", 2e6),
        ("tokens/s/device>=4000", 4000.0),
        ("step <= 2.5s", 2.5),
        (" step <= 250 ms ", 0.25),
        ("days <= 10", 10.0),
    ],
)
def test_a_target_is_a_figure_and_its_limit(text, limit):
    assert parse_target(text).limit == pytest.approx(limit)


def test_a_rate_is_reached_from_below_and_a_time_from_above():
    pace = Pace(step_s=2.0, num_devices=8, tokens_per_step=1000, num_steps=86400, ettr=0.5)
    for text, is_reached in {
        "tokens/s >= 500": True,
        "tokens/s >= 501": False,
        "tokens/s/device >= 62.5": True,
        "tokens/s/device >= 63": False,
        "step <= 2": True,
        "step <= 1.9": False,
        "days <= 4": True,  # half of the time trains
        "days <= 3.9": False,
        "hours <= 96": True,
    }.items():
        assert parse_target(text).is_reached(pace) == is_reached, text


@pytest.mark.parametrize("text", ["tokens/s >= 5e9", "step <= 1us", "days <= 0.001"])
def test_what_an_unreached_target_is_eased_to_is_reached(text):
    pace = Pace(step_s=0.12345, num_devices=8, tokens_per_step=1000, num_steps=86400)
    target = parse_target(text)
    assert not target.is_reached(pace)
    eased = parse_target(target.eased_to(pace))
    assert eased.is_reached(pace)
    nearer = Pace(step_s=0.12345 * 1.11, num_devices=8, tokens_per_step=1000, num_steps=86400)
    assert not eased.is_reached(nearer)


def test_a_run_that_never_ends_is_eased_to_its_rate():
    pace = Pace(step_s=0.1, num_devices=8, tokens_per_step=1000, num_steps=86400, ettr=0.0)
    assert parse_target("days <= 10").eased_to(pace) == "tokens/s >= 1e+04"


def test_a_budget_names_its_devices_or_has_those_of_the_topology():
    budget = parse_budget("512xh100:24h", topology=None)
    assert budget.topology.text == "h100:64x8" and budget.seconds == 24 * 3600
    assert parse_budget("4xa100-80:1h", topology=None).topology.text == "a100-80:1x4"
    assert parse_budget("36xgb200:1h", topology=None).topology.text == "gb200:9x4"
    pod = parse_topology("v5p:4x4x4")
    budget = parse_budget("1.5d", topology=pod)
    assert budget.topology is pod and budget.seconds == 36 * 3600


# ---- clusters of growing size


@pytest.mark.parametrize(
    ("text", "smaller"),
    [
        ("h100:1x8", []),
        ("h100:6x8", ["h100:1x8", "h100:2x8", "h100:4x8"]),
        ("h100:2x4x8", ["h100:1x8", "h100:2x8", "h100:4x8"]),
        ("v5e:2x4x4", ["v5e:2x2", "v5e:2x4", "v5e:4x4"]),
        ("v5p:4x4x8", ["v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"]),
    ],
)
def test_clusters_double_up_to_the_one_that_is_named(text, smaller):
    sizes = growing(parse_topology(text))
    assert [topology.text for topology in sizes] == [*smaller, text]
    for topology in sizes:  # its text is one that can be pasted
        assert parse_topology(topology.text).num_devices == topology.num_devices


def workload(*settings, topology="h100:4x8", **sizes):
    costs = costs_of(cluster_of(topology), "model.n_layer=1", *settings)
    return Workload(costs=costs, sizes=sizes, num_steps=1000)


def with_the_first(size):
    """Stands where a cluster is searched: what the search begins with is its best."""
    cost = size.costs.of(Variant(name="first", mesh=size.mesh))
    return dataclasses.replace(size, best=cost)


class Searches:
    """What of a row of clusters is searched for a target; each step takes `step_s` divided by its devices."""

    def __init__(self, workload, topology, target, *, step_s):
        self.searched = []
        self._step_s = step_s
        clusters = [PlannedCluster(size, {}) for size in growing(parse_topology(topology))]
        self.sizing = smallest_reaching(
            workload, clusters, parse_target(target), pace_of=self._pace_of, searched=self._searched
        )
        self._workload = workload

    def _searched(self, size):
        self.searched.append(size.cluster.topology.text)
        return with_the_first(size)

    def _pace_of(self, size):
        num_devices = size.cluster.topology.num_devices
        return Pace(step_s=self._step_s / num_devices, num_devices=num_devices, tokens_per_step=1000, num_steps=10)


def test_the_answer_is_the_smallest_cluster_that_reaches_it():
    """8, 16 and 32 devices train 8000, 16000 and 32000 tokens a second."""
    run = Searches(workload("batch_size=64"), "h100:8x8", "tokens/s >= 12000", step_s=1.0)
    assert run.sizing.is_reached and run.sizing.nearest.cluster.topology.text == "h100:2x8"
    assert run.searched == ["h100:1x8", "h100:2x8"]  # and no larger one
    assert [size.cluster.topology.text for size in run.sizing.considered] == run.searched


def test_a_cluster_whose_products_alone_take_too_long_is_not_searched():
    small = workload("batch_size=64")
    bound_s = prepared(small, cluster_of("h100:2x8")).costs.least_step_s({"replica": 1, "fsdp": 16, "tensor": 1})
    run = Searches(small, "h100:4x8", f"step <= {1.01 * bound_s:.4g}", step_s=1e-9)
    assert run.searched == ["h100:2x8"]
    first = run.sizing.considered[0]
    assert first.best is None and first.why_not.startswith("its products alone make step ")


def test_of_a_target_that_nothing_reaches_the_nearest_is_the_answer():
    run = Searches(workload("batch_size=64"), "h100:4x8", "tokens/s >= 1e5", step_s=1.0)
    assert not run.sizing.is_reached and run.sizing.nearest.cluster.topology.text == "h100:4x8"
    assert run.searched == ["h100:1x8", "h100:2x8", "h100:4x8"]
    # Beyond what the products allow anywhere, only the largest is searched.
    run = Searches(workload("batch_size=64"), "h100:4x8", "tokens/s >= 1e30", step_s=1.0)
    assert run.searched == ["h100:4x8"] and run.sizing.nearest.best is not None


def test_a_batch_that_does_not_divide_is_a_reason():
    run = Searches(
        workload("batch_size=16"),
        "h100:4x8",
        "tokens/s >= 1e5",
        step_s=1.0,
    )
    assert run.searched == ["h100:1x8", "h100:2x8", "h100:4x8"]  # there, sequences or layers are split
    named = workload("batch_size=16", tensor=1, context=1)
    run = Searches(named, "h100:4x8", "tokens/s >= 1e5", step_s=1.0)
    assert run.searched == ["h100:1x8", "h100:2x8"]
    assert run.sizing.considered[-1].why_not == "a batch of 16 does not divide over 32 shards"


def test_a_state_that_cannot_fit_is_a_reason():
    cluster = cluster_of("h100:1x8")
    device = dataclasses.replace(cluster.topology.device, hbm_bytes=1000)
    tiny = PlannedCluster(dataclasses.replace(cluster.topology, device=device), {})
    size = prepared(workload("batch_size=64"), tiny)
    assert size.costs is None and size.why_not.startswith("state and gradients alone take")


def test_microbatches_that_do_not_divide_become_fewer():
    size = prepared(workload("batch_size=64", "accumulate=8"), cluster_of("h100:2x8"))
    assert size.costs.recipe.accumulate == 4 and size.costs.recipe.batch_size == 64


def test_another_machine_shares_what_is_traced(monkeypatch):
    costs = costs_of(cluster_of("h100:1x8"), "model.n_layer=1", "batch_size=64")
    variant = Variant(name="", mesh={"replica": 1, "fsdp": 8, "tensor": 1}, units={"remat": "full"})
    here = costs.of(variant)

    def traced_again(*args, **kwargs):
        raise AssertionError

    for name in ("abstract_model", "saved_arrays", "traced_gradient", "partitioned_step"):
        monkeypatch.setattr(model_traces, name, traced_again)
    slower = cluster_of("h100:1x8", matmul_efficiency=0.01).machine
    there = costs.on(slower).of(variant)
    assert there.memory == here.memory and there.step_s > 2 * here.step_s


# ---- failures


def test_the_best_interval_has_the_best_ratio():
    times = {"stall_s": 2.0, "save_s": 30.0, "mtbf_s": 20_000.0}
    best_s = best_interval_s(**times)
    ratios = {factor: ettr(interval_s=factor * best_s, load_s=60, **times) for factor in (0.5, 0.9, 1, 1.1, 2)}
    assert max(ratios, key=ratios.get) == 1
    assert best_interval_s(stall_s=1e-9, save_s=30, mtbf_s=20_000) == 30


def state(gib=1.0):
    return SavedState(device_bytes=int(gib * 2**30), host_bytes=int(8 * gib * 2**30), copy_bytes_per_s=2**30)


def failures(num_hosts, **known):
    step_s = Cases(stated=1.0, best=1.0, worst=1.0)
    return failures_of(state(), num_hosts=num_hosts, step_s=step_s, checkpoint_every=1000, known=known)


def test_more_nodes_fail_more_often():
    small, large = failures(8), failures(2048)
    assert small.mtbf_s.stated == 256 * large.mtbf_s.stated
    assert large.mtbf_s.stated == pytest.approx(54 * 86400 / 419)  # one in three hours, as published
    for found in (small, large):
        assert found.ettr.worst < found.ettr.stated < found.ettr.best < 1
        assert found.lost_s.best < found.lost_s.stated < found.lost_s.worst
        assert found.recipe_ettr.stated < found.ettr.stated
    assert large.ettr.stated < small.ettr.stated
    assert large.ettr.stated == pytest.approx(0.93, abs=0.02)  # published: more than 90 %


def test_the_times_of_a_run_replace_those_that_are_assumed():
    found = failures(64, save_s=100.0, load_s=50.0, stall_s=3.0, restart_s=(60.0, 180.0), node_mtbf_days=(10.0, 30.0))
    assert found.save_s == Cases(stated=100.0, best=100.0, worst=100.0)
    assert found.restart_s == Cases(stated=120.0, best=60.0, worst=180.0)
    assert found.mtbf_s == Cases(stated=20 * 86400 / 64, best=30 * 86400 / 64, worst=10 * 86400 / 64)
    interval_s = found.steps
    assert interval_s == round((2 * 3 * found.mtbf_s.stated) ** 0.5)
    assert found.lost_s.stated == pytest.approx(50 + 120 + 100 + (interval_s + 3) / 2)
    assert failures(64).save_s.stated == pytest.approx(8 * 2**30 / (2e12 / 2048))
    assert failures(64).stall_s.stated == 1.0


def test_what_several_devices_hold_is_saved_once():
    costs = costs_of(cluster_of("h100:2x8"), "model.n_layer=1", "batch_size=64")
    sharded = costs.of(Variant(name="", mesh={"replica": 1, "fsdp": 16, "tensor": 1})).memory
    whole = costs.of(Variant(name="", mesh={"replica": 16, "fsdp": 1, "tensor": 1})).memory
    places = {"devices_per_host": 8, "copy_bytes_per_s": None}
    of_sharded = SavedState.of(sharded, devices_per_replica=16, **places)
    of_whole = SavedState.of(whole, devices_per_replica=1, **places)
    assert of_sharded.host_bytes == 8 * sharded.held_bytes
    assert of_whole.host_bytes == whole.held_bytes


# ---- what may differ


def outlook_of(topology, *settings, mesh=None, **known):
    cluster = cluster_of(topology, **known)
    asked = workload(*settings)
    size = prepared(asked, cluster)
    if mesh is not None:
        size = dataclasses.replace(size, mesh=mesh)
    return Outlook.of(asked, with_the_first(size), known_of_failures={})


def test_slow_links_cost_where_they_limit():
    outlook = outlook_of("h100:2x8", "batch_size=64", slow_bytes_per_s=1e7)
    slower = outlook.slower_network()
    assert slower.stated == pytest.approx(1 / 0.9, rel=0.02)  # all that it does is wait
    fast = outlook_of("h100:2x8", "batch_size=64", slow_bytes_per_s=1e15)
    assert fast.slower_network().stated < 1.001
    one_host = outlook_of("h100:1x8", "batch_size=64", fast_bytes_per_s=1e7)
    assert one_host.slower_network().stated == pytest.approx(1 / 0.9, rel=0.02)


def test_the_range_of_a_step_is_that_of_the_assumptions():
    outlook = outlook_of("h100:2x8", "batch_size=64", slow_bytes_per_s=(1e8, 2e8))
    assert outlook.step_s.best < outlook.step_s.stated < outlook.step_s.worst
    rate = outlook.figure(lambda pace: pace.tokens_per_s)
    assert rate.worst < rate.stated < rate.best
    assert rate.text(lambda value: f"{value:.0f}").startswith(f"{rate.stated:.0f} ({rate.worst:.0f} to ")


def test_without_a_node_the_run_continues_on_the_most_that_divide():
    replicas = {"replica": 4, "fsdp": 8, "tensor": 1}
    outlook = outlook_of("h100:4x8", "batch_size=96", "accumulate=3", mesh=replicas)
    fewer = fewer_hosts(outlook)
    assert fewer.num_hosts == 3 and fewer.step_s > outlook.cost.step_s
    assert fewer_hosts(outlook_of("h100:4x8", "batch_size=64", mesh=replicas)) is None


# ---- the answer


@pytest.fixture(scope="module")
def reached():
    outlook = outlook_of("h100:2x8", "batch_size=64")
    size = Size(cluster=outlook.cluster, costs=outlook.costs, best=outlook.cost)
    not_searched = Size(cluster=cluster_of("h100:1x8"), why_not="a reason")
    target = parse_target("tokens/s >= 1")
    sizing = smallest_reaching(
        outlook.workload, [outlook.cluster], target, pace_of=lambda size: outlook.pace, searched=lambda _: size
    )
    sizing = dataclasses.replace(sizing, considered=(not_searched, *sizing.considered))
    return Answer(
        name="micro",
        outlook=outlook,
        command="jshard plan x",
        target=target,
        sizing=sizing,
        price=2.0,
        slower=outlook.slower_network(),
        fewer=None,
    )


def test_the_answer_is_in_the_first_line(reached):
    first, *rest = str(AnswerReport(reached)).splitlines()
    assert first.startswith("micro: tokens/s >= 1 is reached by 16 x NVIDIA H100")
    assert ", estimated" in " ".join((first, rest[0]))
    text = str(AnswerReport(reached))
    for part in ("a reason", "ETTR ", "2 a device-hour", "links between hosts 10% slower", "one of 2 nodes lost"):
        assert part in text
    assert "node_mtbf_days 264 (42.1 to 427)" in text


def test_the_price_is_that_of_the_devices_for_the_time(reached):
    (line,) = (line for line in str(AnswerReport(reached)).splitlines() if "for a million tokens" in line)
    outlook = reached.outlook
    tokens = outlook.workload.tokens_per_step
    per_million = 2.0 * 16 * outlook.step_s.stated / outlook.failures.ettr.stated / 3600 / tokens * 1e6
    assert float(shlex.split(line)[1]) == pytest.approx(per_million, rel=0.01)
