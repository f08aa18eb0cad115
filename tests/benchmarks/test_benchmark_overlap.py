"""The experiment about overlap, before it is run: what it measures, and what it will say of what was measured."""

import pytest

from benchmarks.overlap import (
    command,
    conclusion,
)
from benchmarks.overlap.grid import DOT, SIZES, Setting, groups
from benchmarks.overlap.records import Placement
from tests.benchmarks.made_up_overlap import H200, RING, row, small

# The grid.


def described(facts, comm=RING):
    return {group.form: group.settings for group in groups(facts, comm, SIZES[:1])}


def test_grid_of_an_h200():
    found = described(H200)
    assert list(found) == [
        "persistent 256x128x64/4",
        "tiled 128x128x64/4",
        "tiled 64x128x64/3",
        "tiled 64x64x64/2",
    ]
    assert all(settings[0] == Setting(form=DOT) for settings in found.values())
    assert all(not settings[1].is_shaped and all(s.is_shaped for s in settings[2:]) for settings in found.values())
    _, *walking = found["persistent 256x128x64/4"]
    assert [(s.reserved_sms, s.drain) for s in walking] == [(0, "kernel"), (8, "kernel"), (16, "0"), (32, "0")]
    _, *small = found["tiled 64x64x64/2"]
    assert [(s.blocks_per_sm, s.drain) for s in small] == [(5, "5"), (4, "4"), (3, "3"), (2, "2"), (1, "1")]
    assert [s.pad_bytes for s in small] == [0, 5120, 16_384, 35_840, 74_752]
    assert small[-1].described == "tiled 64x64x64/2, pad 74,752"


def test_what_is_measured_and_what_only_chooses():
    names = [task.name for task in command.tasks(H200, RING, quick=False)]
    assert {name.split("/")[0] for name in names} == {"placement", "cube", "kernels", "wide"}
    assert len(command.chosen(names, ["*/tiled 64x*", "placement"])) == 5 and command.chosen(names, []) == names


# The rules of the conclusion.


@pytest.mark.parametrize(
    ("began", "verdict"),
    [
        ("10000", "as assumed"),
        ("11110", "not as assumed (32: began, 58: began, 90: began, 104: began, 112: waited)"),
        ("00000", "void. The probe of 32 registers must begin, and that of 112 wait"),
        ("11111", "void. The probe of 32 registers must begin, and that of 112 wait"),
    ],
)
def test_placement(began, verdict):
    each = {n: did == "1" for n, did in zip(conclusion.PROBE_REGISTERS, began, strict=True)}
    sentence = conclusion.placement_verdict(Placement(began=each, long_sms=132, long_ms=20), H200)
    assert sentence.startswith(f"Placement: {verdict}")
    missing = conclusion.placement_verdict(Placement(began=each, long_sms=131, long_ms=20), H200)
    assert missing.startswith("Placement: void. The long blocks ran on 131 of 132 multiprocessors")


def test_kill_rule():
    high = "baseline + priority"
    killed = conclusion.kill_rule([small(2.2, high), small(2.2, "shaped + priority", blocks=1)])
    assert killed.startswith("kill rule: padding is needless here") and "0.733" in killed
    alive = conclusion.kill_rule([small(2.9, high)])
    assert alive.startswith("kill rule: does not apply") and "drain 5," in alive
    assert conclusion.kill_rule([small(2.9, "baseline"), row(2.0, mode=high)]) == ""
    assert conclusion.kill_rule([small(2.2, high, drain="1")]) == ""  # what it is about is a kernel that must drain


def test_best():
    starved = [row(3.0), small(3.1, "baseline")]
    good = conclusion.best([*starved, small(2.1, "shaped + priority", blocks=2)])
    assert "ratio 0.700 (perfect 0.667), +32.3% of its own baseline's time saved, +30.0% of that of XLA's dot" in good
    assert "Goal of a ratio of 0.72: reached. Goal of 25.5% below a baseline that starves: reached." in good
    poor = conclusion.best([*starved, small(2.5, "shaped + priority", blocks=2)])
    assert "Goal of a ratio of 0.72: missed. Goal of 25.5% below a baseline that starves: missed." in poor
    fed = conclusion.best([row(2.2), small(2.1, "baseline")])
    assert fed.endswith("The goal of 25.5% is for a baseline that starves, and this one does not.")
    assert conclusion.best([row(2.0, mode="sequential")]) == ""
    assert "its baseline was not measured" in conclusion.best([small(2.1, "shaped", blocks=2)])
    whole = conclusion.of_size([row(3.0, load="copies full")])
    assert len(whole) == 1 and "Goal" not in whole[0]
