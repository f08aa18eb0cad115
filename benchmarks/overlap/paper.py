"""What the occupancy model says of the grid that a paper measured, beside what is known of its results.

The paper is arXiv 2606.09200. Its abstract was read, and two summaries of it by others; the whole text was not. Its
kernel is not public, so threads, registers and element size are assumptions: `ASSUMED`, and `ALTERNATIVES` for how much
they matter. Nothing here is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from benchmarks.overlap.grid import SIZES, Size
from benchmarks.tables import markdown_table
from jshard.occupancy import (
    AmdGpuFacts,
    Block,
    CommFootprint,
    GpuFacts,
    RcclFootprint,
    Workgroup,
    amd_gpu,
    footprint,
    gpu,
    rccl_footprint,
    reserved_for,
    resident,
    room_beside,
    workgroups,
)

# ---- what the paper measured


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile setting of the paper's kernel: a block computes m x n elements, k at a time."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def smem_bytes(self, element_bytes: int) -> int:
        """Returns the memory of one tile of each operand."""
        return (self.m + self.n) * self.k * element_bytes

    def blocks(self, size: Size) -> int:
        """Returns the number of tiles of a product."""
        return -(-size.m // self.m) * -(-size.n // self.n)


TILES = (Tile(64, 64, 32), Tile(64, 64, 64))
NVIDIA = ("a40", "a100", "h100")
AMD = ("mi250x",)
COLLECTIVES = {"all-reduce": "ring", "all-to-all": "p2p"}
"""The footprint of each of the paper's collectives."""

PRIORITY_GAIN = 0.255
"""The paper's highest gain: of priority, relative to two streams without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumption:
    """What is not known of the paper's kernel, and of its NCCL."""

    threads: int
    registers: int  # of a thread; on AMD GPUs vector registers of a wave
    element_bytes: int
    nccl: str


ASSUMED = Assumption(threads=256, registers=64, element_bytes=4, nccl="2.28.9")
ALTERNATIVES = tuple(
    Assumption(threads=threads, registers=registers, element_bytes=element_bytes, nccl=nccl)
    for threads, registers, element_bytes, nccl in itertools.product(
        (128, 256),
        (40, 64, 96, 128),
        (2, 4),
        ("2.28.9", "2.30.7"),
    )
)

# ---- what the model says of it


@dataclasses.dataclass(frozen=True)
class Room:
    """How a kernel's blocks and a collective's share the multiprocessors, or the compute units, of a GPU."""

    units: int  # multiprocessors or compute units
    per_unit: int  # blocks of the kernel at once on one of them
    beside: int  # the most of them that leave room for a block of the collective
    collective_units: int  # that have a block of the collective while it runs

    @property
    def drain(self) -> int:
        """The blocks that must end on a unit before a block of the collective starts there."""
        return self.per_unit - self.beside

    @property
    def blocks_without_waiting(self) -> int:
        """The most blocks of the kernel beside which the whole collective has room, if each unit has as many.

        With a drain of 0 there is room beside any number.
        """
        assert self.drain > 0
        return self.units * (self.beside + 1) - self.collective_units

    @property
    def lost_share(self) -> float:
        """The share of the kernel's places that the collective has while it runs."""
        return self.drain * self.collective_units / (self.per_unit * self.units)

    @property
    def most_gain(self) -> float:
        """The most by which running both at once is shorter than one after the other.

        The collective hides the more, the longer it is, until it is as long as the kernel beside it. The kernel then
        computes at (1 - lost share) of its rate for all of that time.
        """
        rate = 1 - self.lost_share
        return rate / (1 + rate)


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting of the grid."""

    title: str  # of the GPU
    tile: Tile
    collective: str
    room: Room
    least_drain: int  # among the alternative assumptions
    most_drain: int


def rows() -> tuple[Row, ...]:
    """Returns the model's answer for every GPU, tile and collective. The product changes only the number of blocks."""
    answers = []
    for name, tile, collective in itertools.product((*NVIDIA, *AMD), TILES, COLLECTIVES):
        drains = []
        for assumption in ALTERNATIVES:
            alternative = _room(name, tile, collective, assumption)
            if alternative.per_unit:
                drains.append(alternative.drain)
        room = _room(name, tile, collective, ASSUMED)
        answers.append(Row(_title(name), tile, collective, room, min(drains), max(drains)))
    return tuple(answers)


def _title(name: str) -> str:
    return "MI250X, a die" if name in AMD else name.upper()


def _room(name: str, tile: Tile, collective: str, assumption: Assumption) -> Room:
    kind = COLLECTIVES[collective]
    if name in AMD:
        facts = amd_gpu(name)
        return _amd_room(facts, tile, rccl_footprint(kind, gpu=facts), assumption)
    facts = gpu(name)
    return _nvidia_room(facts, tile, footprint(kind, gpu=facts, version=assumption.nccl), assumption)


def _nvidia_room(facts: GpuFacts, tile: Tile, comm: CommFootprint, assumption: Assumption) -> Room:
    block = Block(assumption.threads, assumption.registers, tile.smem_bytes(assumption.element_bytes))
    comm_block = comm.block
    assert comm_block is not None
    beside = room_beside(facts, block, comm_block)
    return Room(facts.num_sms, resident(facts, block), beside, reserved_for(facts, comm))


def _amd_room(facts: AmdGpuFacts, tile: Tile, comm: RcclFootprint, assumption: Assumption) -> Room:
    workgroup = Workgroup(
        work_items=assumption.threads,
        vgprs=assumption.registers,
        lds_bytes=tile.smem_bytes(assumption.element_bytes),
    )
    beside = workgroups.room_beside(facts, workgroup, comm.workgroup)
    # One workgroup of RCCL fills so many registers of a compute unit that two do not fit there.
    assert workgroups.resident(facts, comm.workgroup) == 1
    return Room(facts.num_cus, workgroups.resident(facts, workgroup), beside, comm.workgroups)


# ---- as Markdown


def markdown() -> list[str]:
    """Returns the lines of both tables: the model's answers, and what the paper states beside them."""
    answers = rows()
    return [*_grid_lines(answers), "", *_statement_lines(answers)]


def _grid_lines(answers: Sequence[Row]) -> list[str]:
    head = (
        "GPU",
        "tile",
        "collective",
        "at once",
        "beside",
        "drain",
        "drain, other assumptions",
        "has room up to",
        "rounds, both products",
        "two streams",
        "with priority",
        "gains at most",
    )
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in answers:
        # Both collectives have the same line where one kernel runs them, or where neither has room.
        lines.setdefault(_grid_cells(row), []).append(row.collective)
    cells = []
    for (title, tile, *others), collectives in lines.items():
        cells.append((title, tile, ", ".join(collectives), *others))
    return markdown_table(head, cells, num_words=3)


def _grid_cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row, but for the collective."""
    room = row.room
    rounds = []
    for size in SIZES:
        count = -(-row.tile.blocks(size) // (room.units * room.per_unit))
        rounds.append(f"{count:,}")
    return (
        row.title,
        str(row.tile),
        str(room.per_unit),
        str(room.beside),
        str(room.drain),
        _range(row.least_drain, row.most_drain),
        f"{room.blocks_without_waiting:,} blocks",
        ", ".join(rounds),
        _two_streams(room),
        _with_priority(room),
        _percent(room.most_gain),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(least: int, most: int) -> str:
    if least == most:
        return str(least)
    return f"{least} to {most}"


def _two_streams(room: Room) -> str:
    """Returns what becomes of a collective beside a grid of many rounds, by two streams of one priority."""
    if room.drain == 0:
        return "beside"
    return "serial"


def _with_priority(room: Room) -> str:
    if room.drain <= 1:
        return "beside"
    return "beside from a boundary"


def _statement_lines(answers: Sequence[Row]) -> list[str]:
    head = ("the paper", "the model", "agreement")
    return markdown_table(head, _statements(answers), num_words=3)


def _statements(answers: Sequence[Row]) -> list[tuple[str, str, str]]:
    nvidia = [row.room for row in answers if row.title in map(_title, NVIDIA)]
    amd = [row.room for row in answers if row.title in map(_title, AMD)]
    a40 = next(row.room for row in answers if row.title == _title("a40"))
    fewest = min(row.tile.blocks(size) for row in answers for size in SIZES)
    most_room = max(row.room.blocks_without_waiting for row in answers)
    # The collective is the shorter of the two: it is hidden at the rate that is left to the kernel.
    least_share = PRIORITY_GAIN / (1 - a40.lost_share)
    return [
        (
            "with few blocks two streams overlap, with many they become nearly serial",
            f"a collective has room beside {_span(nvidia)} blocks on NVIDIA's GPUs and {_span(amd)} on MI250X; a grid"
            f" with a block for each tile has {fewest:,} or more",
            f"yes: every full grid is above {most_room:,}",
        ),
        (
            f"priority gains up to {_percent(PRIORITY_GAIN)} over two streams: A40, compute-bound, all-reduce",
            f"at most {_percent(a40.most_gain)} there, and {_percent(PRIORITY_GAIN)} if the collective is"
            f" {_percent(least_share)} of the serial time. The drain is {a40.drain}, so priority alone is enough only"
            " from the boundary of two products",
            "within the bound; the model does not predict the figure",
        ),
        (
            "up to 90 % of the communication overlaps",
            "all of it may, if the product beside it is long enough",
            "not contradicted",
        ),
        (
            "MI250X: priority neutral, or slower, with many blocks",
            f"a drain of {_drains(amd)}, and {_gains(amd)} to gain at most: better than on NVIDIA's",
            "**no**. Neutral would follow if a place that becomes free is the collective's without priority, too;"
            " slower would not. The summaries blame small local memory and L2, and the model has no caches",
        ),
        (
            "the larger tile helps in memory-bound products, by a longer window",
            f"the drain is {_drains_of(answers, TILES[0])} with {TILES[0]}, and {_drains_of(answers, TILES[1])} with"
            f" {TILES[1]}",
            "open: under these assumptions shared memory limits only A40, and registers A100 and H100; the model has"
            " no times",
        ),
    ]


def _span(rooms: Sequence[Room]) -> str:
    counts = [room.blocks_without_waiting for room in rooms]
    return _range(min(counts), max(counts))


def _drains(rooms: Sequence[Room]) -> str:
    counts = [room.drain for room in rooms]
    return _range(min(counts), max(counts))


def _drains_of(answers: Sequence[Row], tile: Tile) -> str:
    drains = {}
    for row in answers:
        if row.tile == tile:
            drains[row.title.split(",")[0]] = row.room.drain
    return ", ".join(f"{count} on {title}" for title, count in drains.items())


def _gains(rooms: Sequence[Room]) -> str:
    return " or ".join(dict.fromkeys(_percent(room.most_gain) for room in rooms))
