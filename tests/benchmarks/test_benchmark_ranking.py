"""Pairs of published configurations: which there are, who orders them, and what fits."""

import math

import pytest

from benchmarks.ranking import (
    Configuration,
    Fits,
    Knobs,
    Pair,
    Score,
    Verdict,
    apart,
    by_plan,
    by_rule,
    fits,
    is_conflicting,
    pairs_of,
    score,
    separated,
    worst,
)


def knobs(remat="none", tensor=1, pipe=1, microbatch=1):
    return Knobs(remat=remat, tensor=tensor, pipe=pipe, microbatch=microbatch)


def configuration(name, published, planned=1.0, *, group="lab_7b", fits=True, **values):
    return Configuration(
        id=name, group=group, knobs=knobs(**values), published=published, planned=planned, planned_to_fit=fits
    )


def pair(faster, slower):
    """Of two configurations with these knobs, the first of which was faster."""
    return Pair(configuration("fast", 2.0, **faster), configuration("slow", 1.0, **slower))


def test_pairs_are_those_of_a_group_that_both_ran_the_faster_one_first():
    a, b, c = configuration("a", 100.0), configuration("b", 120.0), configuration("c", 105.0)
    out_of_memory = configuration("d", None)
    elsewhere = configuration("e", 50.0, group="lab_13b")
    pairs = pairs_of([a, b, out_of_memory, elsewhere, c])
    assert [(each.faster.id, each.slower.id) for each in pairs] == [("b", "a"), ("c", "a"), ("b", "c")]
    assert [(each.faster.id, each.slower.id) for each in apart(pairs)] == [("b", "a"), ("b", "c")]


@pytest.mark.parametrize(
    ("faster", "slower", "verdict"),
    [
        ({}, {"remat": "selective"}, Verdict.RIGHT),
        ({"remat": "selective"}, {"remat": "full"}, Verdict.RIGHT),
        ({"remat": "full"}, {"remat": "none", "tensor": 8}, Verdict.WRONG),  # remat decides before the others
        ({"tensor": 2, "pipe": 8}, {"tensor": 4, "pipe": 1}, Verdict.RIGHT),
        ({"pipe": 2}, {"pipe": 4, "microbatch": 8}, Verdict.RIGHT),
        ({"microbatch": 4}, {"microbatch": 2}, Verdict.RIGHT),
        ({"microbatch": 1}, {"microbatch": 2}, Verdict.WRONG),
        ({"tensor": 2}, {"tensor": 2}, Verdict.TIED),
    ],
)
def test_the_first_knob_that_differs_decides_by_the_rule(faster, slower, verdict):
    assert by_rule(pair(faster, slower)) is verdict


@pytest.mark.parametrize(
    ("faster", "slower", "conflicting"),
    [
        ({"remat": "none", "tensor": 4}, {"remat": "full", "tensor": 1}, True),
        ({"remat": "full", "microbatch": 8}, {"remat": "none", "microbatch": 1}, True),
        ({"tensor": 2, "pipe": 1}, {"tensor": 1, "pipe": 2}, True),
        ({"remat": "none", "tensor": 1}, {"remat": "full", "tensor": 4}, False),
        ({"microbatch": 2}, {"microbatch": 1}, False),
        ({}, {}, False),
    ],
)
def test_knobs_that_prefer_different_configurations_are_recognised(faster, slower, conflicting):
    assert is_conflicting(pair(faster, slower)) is conflicting
    assert is_conflicting(pair(slower, faster)) is conflicting


def test_a_plan_is_right_where_it_orders_as_measured_and_ties_count_half():
    a, b = configuration("a", 200.0, planned=30.0), configuration("b", 100.0, planned=20.0)
    c, d = configuration("c", 80.0, planned=25.0), configuration("d", 60.0, planned=25.0)
    result = score(pairs_of([a, b, c, d]), by_plan)
    assert result == Score(right=3, tied=1, wrong=2)
    assert result.share == pytest.approx(3.5 / 6)
    assert math.isnan(score([], by_plan).share)


def test_the_worst_are_those_that_the_plan_turns_around_the_most():
    a, b = configuration("a", 200.0, planned=10.0), configuration("b", 100.0, planned=20.0)
    c = configuration("c", 150.0, planned=12.0)
    wrong = worst(pairs_of([a, b, c]), 2)
    assert [(each.faster.id, each.slower.id) for each in wrong] == [("a", "b"), ("c", "b")]
    assert wrong[0].gap == pytest.approx(1.0) and wrong[0].planned_gap == pytest.approx(-0.5)


def test_what_ran_and_what_ran_out_of_memory_are_counted_apart():
    ran = [configuration("a", 1.0), configuration("b", 1.0, fits=False)]
    failed = [configuration("c", None, fits=False), configuration("d", None), configuration("e", None, fits=False)]
    elsewhere = configuration("f", None, group="lab_13b", fits=False)
    counts = fits([*ran, *failed, elsewhere])
    assert counts == Fits(ran=2, ran_as_planned=1, out_of_memory=4, out_of_memory_as_planned=3)
    assert counts.share == pytest.approx(4 / 6)
    assert separated([*ran, *failed, elsewhere]) == (6, 2)  # a beside c and beside e
