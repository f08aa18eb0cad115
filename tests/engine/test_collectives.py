"""The compiled step communicates what was asked: kinds, bytes, groups, dtypes, and nothing else.

Amounts are in units of P, the bytes of all parameters, and of whole arrays: one all-gather of every parameter is
1.00. Scanned layers, because XLA:CPU of jax 0.10 merges the second gather of unrolled ones with the first.
"""

import pytest

from jshard.inspect import collectives
from jshard.inspect.communication import traffic_of
from tests.helpers import Config, Program, full_bytes, program

# The root, which is gathered once and kept, is 0.1 % of this model, so that the round figures show.
DECODER = Config(layers=12, width=512, hidden=2048, vocab=64, scanned=True, attends=False)


def amounts(made: Program) -> dict[str, float]:
    """All-gathers, reduce-scatters and all-reduces in units of P."""
    found = collectives(made.compiled)
    kinds = "all-gather", "reduce-scatter", "all-reduce"
    return {kind: full_bytes(found, kind, over=1) / made.plan.logical_bytes for kind in kinds}


FOUR = {"batch": (32, 8), "accumulate": 4}
HOISTED = 3 / DECODER.layers  # the first layer's waits for no batch: XLA:CPU gathers it once for all four


@pytest.mark.parametrize(
    ("settings", "gathers", "reduces"),
    [
        ({}, 2, 1),
        ({"reshard_after_forward": False}, 1, 1),
        (FOUR | {"sync": "last"}, 1, 1),
        (FOUR | {"sync": "each"}, 8 - HOISTED, 4),
    ],
    ids=["zero3", "zero2", "reduced once", "reduced each time"],
)
def test_how_often_parameters_are_gathered_and_gradients_reduced(settings, gathers, reduces):
    found = amounts(program(DECODER, **settings))
    assert found["all-gather"] == pytest.approx(gathers, rel=0.01)
    assert found["reduce-scatter"] == pytest.approx(reduces, rel=0.01)
    assert found["all-reduce"] < 0.02


@pytest.mark.parametrize(
    "asked",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"replica": -1, "fsdp": 1},
        {"replica": 2, "remat": "full"},
    ],
    ids=str,
)
def test_compiled_bytes_are_those_of_the_plan(asked: dict):
    made = program(DECODER, **asked)
    planned: dict[tuple, int] = {}
    for traffic in traffic_of(made.plan):
        key = traffic.kind, traffic.axes, traffic.group_size
        planned[key] = planned.get(key, 0) + traffic.full_bytes
    compiled: dict[tuple, int] = {}
    for one in collectives(made.compiled, mesh=made.mesh):
        key = one.kind, one.axes, len(one.group)
        if len(one.group) > 1:
            compiled[key] = compiled.get(key, 0) + one.total_bytes
    assert compiled.keys() == planned.keys()
    for key, total in planned.items():
        # Backward needs no biases, so the compiler drops their second gather; the loss is summed in 4 bytes.
        assert compiled[key] == pytest.approx(total, abs=0.005 * made.plan.logical_bytes), key


def test_hsdp_reduces_only_the_shard_over_replica():
    made = program(DECODER, replica=2, remat="full")
    over_replica = [c for c in collectives(made.compiled, mesh=made.mesh) if c.axes == ("replica",)]
    assert {c.kind for c in over_replica} == {"all-reduce"}
    total = sum(c.total_bytes for c in over_replica) / made.plan.logical_bytes
    assert total == pytest.approx(1 / 4, abs=0.01)
    assert amounts(made)["all-gather"] == pytest.approx(2.00, abs=0.02)


def test_hpz_gathers_for_backward_among_neighbours():
    made = program(DECODER, reshard_after_forward=2)
    gathers = [c for c in collectives(made.compiled) if c.kind == "all-gather"]
    by_group = {c.group: 0 for c in gathers}
    for c in gathers:
        by_group[c.group] += c.total_bytes
    assert set(by_group) == {tuple(range(8)), (0, 1)}
    for total in by_group.values():
        assert total / made.plan.logical_bytes == pytest.approx(1.00, abs=0.02)
