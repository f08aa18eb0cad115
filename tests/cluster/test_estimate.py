"""The replay of a schedule takes the time that can be worked out by hand, and hides what the order allows to hide."""

import dataclasses
import math
from typing import Any

import pytest

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.estimate import Estimate, estimate, estimate_range
from jshard.cluster.plan_page import step_panels, timeline
from jshard.inspect.hlo.walk import read_schedule
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.inspect.timeline_page import Panel, Section, html_page
from jshard.inspect.timelines import Bar
from tests.scheduled_text import body, dot, gather, gathered, half_dot, loop, program, scatter, scattered

# A matrix product of the texts takes 1 ms, a collective of theirs 1 ms within a host; memory traffic nothing.
MS = 1e-3
MACHINE = Assumptions(
    name="round numbers",
    flops_per_s=1e12,
    memory_bytes_per_s=1e30,
    fast_bytes_per_s=7e9,
    fast_group=8,
    slow_bytes_per_s=7e8,
    latency_s=0.0,
    matmul_efficiency=1.0,
    memory_efficiency=1.0,
)


def ms(found: Estimate) -> tuple[float, float, float, float]:
    """Step, compute, communication and exposed time in milliseconds."""
    times = found.step_s, found.compute_s, found.communication_s, found.exposed_s
    return tuple(round(t / MS, 6) for t in times)  # type: ignore[return-value]


def run(*lines: str, computations: str = "", **changes: float) -> Estimate:
    machine = dataclasses.replace(MACHINE, **changes)
    return estimate(read_schedule(program(*lines, computations=computations)), machine)


def test_what_is_computed_beside_hides_a_collective():
    assert ms(run(gather("ag", 1), dot("a"), dot("b"), gathered("full", "ag"))) == (2, 2, 1, 0)
    assert ms(run(gather("ag", 1), gathered("full", "ag"), dot("a"), dot("b"))) == (3, 2, 1, 1)
    assert ms(run(gather("ag", 1), half_dot("a"), gathered("full", "ag"))) == (1, 0.5, 1, 0.5)


def test_a_collective_that_blocks_is_exposed():
    start = gather("ag", 1) + ', backend_config={"is_sync":true}'
    assert ms(run(start, dot("a"), gathered("full", "ag"))) == (2, 1, 1, 1)


def test_collectives_share_the_links():
    """Two of 1 ms beside 1.5 ms of computation: the second waits for the first."""
    found = run(
        gather("x", 1),
        gather("y", 2),
        dot("a"),
        half_dot("b"),
        gathered("full_x", "x"),
        gathered("full_y", "y"),
    )
    assert ms(found) == (2, 1.5, 2, 0.5)


def test_a_collective_begins_when_what_it_sends_has_been_computed():
    """Reduce-scatter of a gradient: the product before its start does not hide it, the one after does."""
    assert ms(run(dot("gradient_of"), scatter("rs", 1), half_dot("b"), scattered("part", "rs"))) == (2, 1.5, 1, 0.5)


def test_prefetch_in_a_loop_hides_all_but_the_first_gather():
    layer = body("layer", gather("ag", 2), dot("a"), gathered("full", "ag"))
    found = run(gather("first", 1), gathered("now", "first"), *loop("layer", 12, "%shard"), computations=layer)
    assert ms(found) == (13, 12, 13, 1)
    assert found.hidden == pytest.approx(12 / 13)
    assert found.hidden_in_loops == pytest.approx(1)


SLOW: dict[str, Any] = {"fast_bytes_per_s": 3.5e9}  # a collective takes 2 ms


def test_a_delayed_reduce_scatter_hides_more_though_both_have_products_between():
    """Not delayed, it waits for its own layer: a product stands between start and end, and most stays exposed."""
    own = body("layer", dot("a"), dot("b"), scatter("rs", 1), dot("c"), scattered("part", "rs"))
    delayed = body("layer", scatter("rs", 1), dot("a"), dot("b"), dot("c"), scattered("part", "rs"))
    schedules = [
        read_schedule(program(*loop("layer", 12, "%shard"), computations=computation)) for computation in (own, delayed)
    ]
    assert [schedule.not_overlapped() for schedule in schedules] == [(), ()]
    found = [estimate(schedule, dataclasses.replace(MACHINE, **SLOW)) for schedule in schedules]
    assert ms(found[0]) == (12 * 4, 36, 24, 12)
    assert ms(found[1]) == (12 * 3, 36, 24, 0)


CARRIED = "s32[], f32[250000]{0}, (f32[250000]{0}, f32[2000000]{0})"


def test_a_gather_that_is_under_way_from_one_round_to_the_next():
    """Of 1.5 ms beside 1 ms: 0.5 ms is exposed in each of the ten rounds, all of the first and the rest of the last."""
    layer = body(
        "layer",
        "%arriving = (f32[250000]{0}, f32[2000000]{0}) get-tuple-element(%state), index=2",
        gathered("full", "arriving"),
        gather("ag", 2),
        dot("a"),
        state=CARRIED,
        results="%next, %shard, %ag",
    )
    found = run(
        gather("first", 1),
        *loop("layer", 10, "%shard", "%first", state=CARRIED),
        "%last = (f32[250000]{0}, f32[2000000]{0}) get-tuple-element(%layer_loop), index=2",
        gathered("final", "last"),
        computations=layer,
        fast_bytes_per_s=7e9 / 1.5,
    )
    assert ms(found) == (16.5, 10, 16.5, 1.5 + 9 * 0.5 + 0.5)


def test_the_first_rounds_of_a_loop_may_be_slower():
    """The links are busy for 1 ms with what began before the loop: the first round waits for it, the others do not."""
    layer = body("layer", gather("ag", 2), dot("a"), gathered("full", "ag"))
    found = run(
        gather("before", 1),
        *loop("layer", 100, "%shard"),
        gathered("late", "before"),
        computations=layer,
    )
    assert ms(found) == (101, 100, 101, 1)


def test_a_loop_that_only_computes_hides_what_is_around_it():
    layer = body("layer", dot("a"))
    found = run(gather("ag", 1), *loop("layer", 100, "%shard"), gathered("full", "ag"), computations=layer)
    assert ms(found) == (100, 100, 1, 0)


NIC: dict[str, Any] = {"fast_group": 4}  # two hosts of four


def test_between_hosts_the_slower_links_count():
    """Eight devices on two hosts: each of the four links of a host carries a quarter, at a tenth of the rate."""
    assert ms(run(gather("ag", 1), gathered("full", "ag"), **NIC)) == (2.5, 0, 2.5, 2.5)
    fast = run(gather("ag", 1), gathered("full", "ag"), **NIC, slow_bytes_per_s=7e9)
    assert ms(fast) == (1, 0, 1, 1)


def test_groups_across_hosts_use_one_link_of_each():
    """Pairs, one device on each host: half of the array goes through one link; as many neighbours stay inside."""
    far, near = (
        ms(run(gather("ag", 1, groups=groups), gathered("full", "ag"), **NIC))
        for groups in ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "replica_groups={{0,1},{2,3},{4,5},{6,7}}")
    )
    assert far[0] == pytest.approx(8e6 / 2 / 7e8 / MS, abs=1e-5)
    assert near[0] == pytest.approx(8e6 / 2 / 7e9 / MS, abs=1e-5)


@pytest.mark.parametrize(("links", "milliseconds"), [(0, 1), (2, 3), (6, 1), (12, 1)])
def test_a_ring_in_one_dimension_of_a_torus_has_two_of_its_six_links(links: int, milliseconds: float):
    """All of them where the program does not say how many it uses, and where the devices of a chip share them."""
    colors = f', backend_config={{"strategy":"UniDirectionNDRingStrategy{{colors:{links} phases:3}}"}}'
    start = gather("ag", 1) + (colors if links else "")
    assert ms(run(start, gathered("full", "ag"), fast_links=6))[0] == milliseconds
    assert ms(run(start, gathered("full", "ag")))[0] == 1  # a GPU


def test_latency_efficiency_and_memory_traffic_count():
    assert ms(run(gather("ag", 1), gathered("full", "ag"), latency_s=0.25 * MS))[0] == 1.25
    assert ms(run(dot("a"), gather("ag", 1), gathered("f", "ag"), matmul_efficiency=0.5))[1] == 2
    megabytes = (1000 * 1000 + 2 * 1000 * 500) * 2 / 1e6
    found = run(dot("a"), gather("ag", 1), gathered("f", "ag"), memory_bytes_per_s=1e9, memory_efficiency=0.5)
    assert ms(found)[1] == pytest.approx(2 * megabytes)


def test_what_is_computed_beside_a_collective_takes_longer():
    """Of 2 ms alone 1 ms runs beside one of 1 ms: a quarter longer, 0.8 ms of it are done in that time."""
    found = run(gather("ag", 1), dot("a"), dot("b"), gathered("full", "ag"), contention=0.25)
    assert ms(found) == (2.2, 2.2, 1, 0)


def test_kernels_wait_to_be_launched_and_rings_go_step_by_step():
    assert ms(run(dot("a"), dot("b"), gather("ag", 1), gathered("f", "ag"), launch_s=0.1 * MS))[1] == 2.2
    hops = {"fast_hop_s": 0.1 * MS, "slow_hop_s": 1 * MS}
    assert ms(run(gather("ag", 1), gathered("full", "ag"), **hops))[0] == 1.7
    assert ms(run(gather("ag", 1), gathered("full", "ag"), **hops, **NIC))[0] == 2.5 + 6 * 0.1 + 1


def test_attention_in_one_kernel_has_an_efficiency_of_its_own():
    work = OpWork((EqualProducts("bf16", 1e9, 2, is_attention=True),))
    assert dataclasses.replace(MACHINE, attention_efficiency=0.5).compute_s(work) == pytest.approx(2 * MS)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ((1, 100 * 128, 256, 12_800), 0.99),  # a hundred tiles for as many multiprocessors, of a hundred steps and one
        ((1, 101 * 128, 256, 12_800), 101 / 150 * 0.99),  # a tile more: of half the size three waves for two
        ((1, 128, 256, 12_800), 2 * 8 / 100 * 100 / 108),  # one tile: halved, and in eight parts along K
        ((100, 128, 256, 128), 0.5),  # as long to fill the pipeline as to compute
    ],
    ids=["a whole wave", "a tile too many", "one tile", "little to contract"],
)
def test_products_take_whole_waves_of_tiles(sizes, part):
    flops = 2.0 * math.prod(sizes)
    machine = dataclasses.replace(MACHINE, multiprocessors=100)
    reached = flops / machine.compute_s(OpWork((EqualProducts("bf16", flops, sizes=sizes),))) / MACHINE.flops_per_s
    assert reached == pytest.approx(part, rel=0.01)


def test_wider_numbers_take_longer_unless_their_peak_is_given():
    wide = dot("a").replace("bf16", "f32").replace("%left, %right", "%wide, %wider")
    inputs = "%wide = f32[1000,1000]{1,0} constant({...})", "%wider = f32[1000,500]{1,0} constant({...})"
    lines = (*inputs, wide, gather("ag", 1), gathered("f", "ag"))
    assert ms(run(*lines))[1] == 2
    schedule = read_schedule(program(*lines))
    assert ms(estimate(schedule, dataclasses.replace(MACHINE, flops_per_s_of=(("f32", 1e11),))))[1] == 10


def test_a_range_goes_from_all_well_to_all_badly():
    layer = body("layer", gather("ag", 2), dot("a"), gathered("full", "ag"))
    schedule = read_schedule(program(*loop("layer", 12, "%shard"), computations=layer))
    machine = dataclasses.replace(MACHINE, fast_group=4, slow_bytes_per_s=1.75e9)  # a collective takes 1 ms
    ranges = {"slow_bytes_per_s": (7e8, 7e9), "matmul_efficiency": (0.5, 1.0)}
    found = estimate_range(schedule, machine, ranges)
    assert ms(found.stated) == (12, 12, 12, 0)
    assert [round(t / MS, 6) for t in found.span("step_s")] == [12, 30]
    assert [round(t / MS, 6) for t in found.span("exposed_s")] == [0, 6]
    assert found.span("hidden") == (pytest.approx(0.8), 1)
    assert found.fastest.assumptions.matmul_efficiency == 1.0
    waiting = estimate_range(schedule, machine, {"straggling": (0.0, 0.5)})
    assert (waiting.fastest.step_s, waiting.slowest.step_s) == (pytest.approx(12 * MS), pytest.approx(18 * MS))
    assert found.stated.to_dict()["assumptions"]["name"] == "round numbers"


def test_the_timeline_shows_a_loop_once_and_marks_what_is_exposed():
    layer = body("layer", dot("a"), scatter("rs", 1), half_dot_in_body(), scattered("part", "rs"))
    schedule = read_schedule(
        program(gather("ag", 2), gathered("f", "ag"), *loop("layer", 12, "%shard"), dot("z"), computations=layer)
    )
    bars = timeline(schedule, MACHINE)
    assert sum(bar.tip.startswith("reduce-scatter") for bar in bars) == 1
    exposed = [bar for bar in bars if bar.kind == "exposed"]
    assert [bar.lane for bar in exposed] == ["communication"] * 2
    assert [bar.label for bar in bars if bar.lane == "loops"] == ["x 12"]
    lengths = {bar.tip.split(" ")[0]: bar.end_s - bar.begin_s for bar in bars if bar.kind != "exposed"}
    assert lengths["a:"] == pytest.approx(2 * lengths["b:"], rel=0.01)
    assert [bar.label for bar in bars if bar.lane == "phase"] == ["forward", "backward and update"]
    page = html_page("micro <gpt>", "", [Section((), (Panel("", "", tuple(bars)),))], "")
    assert "micro &lt;gpt&gt;" in page and 'title="exposed 500 us of reduce-scatter' in page
    many = tuple(Bar("lane", at, at + 1, "products", "", "") for at in range(9000))
    small = html_page("", "", [Section((), (Panel("", "", many),))], "")
    assert small.count("title=") <= 3000  # bars that are too narrow to be seen are joined


def test_the_parts_of_a_step_say_which_part_they_are():
    layer = body("layer", dot("a"), scatter("rs", 1), half_dot_in_body(), scattered("part", "rs"))
    text = program(gather("ag", 2), gathered("f", "ag"), *loop("layer", 12, "%shard"), dot("z"), computations=layer)
    schedule = read_schedule(text)
    step_s = estimate(schedule, MACHINE).step_s
    first, rounds, last = step_panels(schedule, MACHINE, step_s)
    assert (first.title, first.note) == ("Forward", "1.00 ms of the step's 26.0 ms (4%), from 0 s on")
    assert (rounds.title, rounds.label) == ("One of 12 rounds of the backward loop", "backward x 12")
    assert rounds.note == "0 to 2.00 ms of one round; 12 rounds take 24.0 ms of the step's 26.0 ms (92%)"
    assert (last.title, last.note) == ("Computation", "1.00 ms of the step's 26.0 ms (4%), from 25.0 ms on")
    product, half, scattering, exposed = rounds.bars
    assert (product.kind, half.kind, exposed.kind) == ("products", "products", "exposed")
    assert (exposed.begin_s, exposed.end_s) == pytest.approx((1.5 * MS, 2 * MS))
    assert scattering.detail.endswith("over 8 devices; in the step 12 runs, 12.0 ms, of which 6.00 ms exposed")


def half_dot_in_body() -> str:
    return "%half = bf16[500,1000]{1,0} constant({...})\n  " + half_dot("b")
