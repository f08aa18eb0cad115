"""What the model says of the overlap paper's grid: the tables in the guide are those that the code prints."""

import pathlib

import pytest

from benchmarks.overlap import command, paper
from benchmarks.overlap.paper import ALTERNATIVES, AMD, ASSUMED, COLLECTIVES, NVIDIA, TILES, Room
from jshard.occupancy import Block, footprint, gpu
from jshard.occupancy.room_plans import plans

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
GRID = paper.rows()


def test_the_tables_of_the_guide_are_what_the_command_prints(capsys):
    assert command.main(["--model"]) == 0
    grid, statements = capsys.readouterr().out.strip().split("\n\n")
    guide = GUIDE.read_text()
    assert f"\n\n{grid}\n\n" in guide
    assert f"\n\n{statements}\n\n" in guide


def test_the_assumptions_of_the_guide_are_those_of_the_code():
    text = " ".join(GUIDE.read_text().split())
    assert (
        f"Assumed are {ASSUMED.threads} threads of {ASSUMED.registers} registers, float32 elements, 16 blocks of a"
        f" collective, and NCCL {ASSUMED.nccl}."
    ) in text
    assert ASSUMED.element_bytes == 4
    values = {name: {getattr(other, name) for other in ALTERNATIVES} for name in vars(ASSUMED)}
    assert all(getattr(ASSUMED, name) in values[name] for name in values)
    registers = sorted(values["registers"])
    assert (
        f"*Other assumptions* are {min(values['threads'])} threads, {registers[0]} to {registers[-1]} registers, 16-bit"
        f" elements and NCCL {max(values['nccl'])}."
    ) in text


def test_every_setting_of_the_paper_has_a_row():
    assert len(GRID) == len((*NVIDIA, *AMD)) * len(TILES) * len(COLLECTIVES)
    for row in GRID:
        assert row.least_drain <= row.room.drain <= row.most_drain
        assert 0 <= row.room.beside <= row.room.per_unit


def test_the_drain_is_that_of_jshard_occupancy():
    """The first tile on A40, from its numbers: (64 + 64) x 32 elements of 4 bytes are 16 KiB."""
    (row,) = [row for row in GRID if (row.title, row.tile, row.collective) == ("A40", TILES[0], "all-reduce")]
    a40 = gpu("a40")
    ways = plans(a40, Block(256, 64, 16_384), footprint("ring", gpu=a40, version="2.28.9"))
    assert {(way.blocks_per_sm, way.drain) for way in ways if not way.smem_pad_bytes} == {(4, 4)}
    assert (row.room.per_unit, row.room.drain) == (4, 4)


@pytest.mark.parametrize(
    ("room", "gain"),
    [
        # It takes a fifth of the units, so 0.8 / 1.8 are saved.
        (Room(units=10, per_unit=4, beside=0, collective_units=2), 0.8 / 1.8),
        # It takes one of four places on a fifth of the units.
        (Room(units=10, per_unit=4, beside=3, collective_units=2), 0.95 / 1.95),
        # It takes nothing: both end together in half of the time.
        (Room(units=10, per_unit=4, beside=4, collective_units=2), 0.5),
    ],
)
def test_the_gain_is_the_most_over_all_lengths(room, gain):
    assert room.most_gain == pytest.approx(gain)
    # By trial: a product of one hour beside collectives of any length.
    saved = [_saved(room.lost_share, minutes / 60) for minutes in range(1, 240)]
    assert max(saved) == pytest.approx(gain, abs=5e-3) and max(saved) <= gain + 1e-9


def test_room_for_the_whole_collective():
    # Nothing beside the collective: 10 units less the 2 that it needs.
    assert Room(units=10, per_unit=4, beside=0, collective_units=2).blocks_without_waiting == 8
    # Three beside it: 8 units hold 4 blocks, and 2 hold 3.
    assert Room(units=10, per_unit=4, beside=3, collective_units=2).blocks_without_waiting == 38


def _saved(lost_share, collective_h):
    """The share of time that is saved by running a collective beside a product of one hour."""
    done = min(1.0, (1 - lost_share) * collective_h)  # of the product, while the collective runs
    both_h = collective_h + (1 - done)  # what is left of the product runs alone
    return 1 - both_h / (1 + collective_h)
