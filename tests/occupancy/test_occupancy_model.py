"""The occupancy model: against a placement of blocks one by one, footprints, paddings, plans, errors.

The table of every kernel on every GPU is in tests/golden/occupancy_table.txt.
"""

import collections
import dataclasses
import itertools
import random

import pytest

import jshard as js
from jshard import cli, occupancy
from jshard.occupancy import (
    COPY_ENGINE,
    GPUS,
    Block,
    CommFootprint,
    OccupancyError,
    OccupancyWarning,
    drain,
    footprint,
    gpu,
    paddings,
    plans,
    resident,
    room_beside,
)
from tests.golden_texts import GoldenTexts
from tests.helpers import Config, abstract

H200 = GPUS["h200"]
ALL_OF_THEM = CommFootprint(name="own", ctas=132, threads=640, registers=96, smem_bytes=0, source="made up")
SMALL, LARGE = Block(128, 58, 41_024), Block(384, 168, 204_800)
RING = footprint("ring", gpu=H200, version="2.30.7")


# A multiprocessor in the hand: what is free in each partition (registers, places of warps), the shared memory and the
# block slots. Blocks are put in one by one, in every way that differs; no division is made.


def empty(facts):
    part = facts.registers_per_sm // facts.partitions, facts.threads_per_sm // facts.warp_size // facts.partitions
    return {((part,) * facts.partitions, facts.smem_per_sm_bytes, facts.blocks_per_sm)}


def put_in(facts, states, block):
    """Every state after one more block, up to the order of the partitions."""
    warps = len(range(0, block.threads, facts.warp_size))
    registers = len(range(0, block.registers * facts.warp_size, facts.register_unit)) * facts.register_unit
    smem = len(range(0, block.smem_bytes + facts.smem_reserved_bytes, facts.smem_unit_bytes)) * facts.smem_unit_bytes
    if block.smem_bytes > facts.smem_per_block_bytes:
        return set()
    found = set()
    for parts, smem_left, slots in states:
        if smem_left < smem or not slots:
            continue
        rest = warps
        while rest >= facts.partitions:  # a warp into each
            parts = tuple((free - registers, places - 1) for free, places in parts)
            rest -= facts.partitions
        for chosen in itertools.combinations(range(facts.partitions), rest):
            after = [(free - registers * (i in chosen), n - (i in chosen)) for i, (free, n) in enumerate(parts)]
            if all(free >= 0 and places >= 0 for free, places in after):
                found.add((tuple(sorted(after)), smem_left - smem, slots - 1))
    return found


def counted(facts, states, block):
    """How many blocks go in, one after another."""
    for count in itertools.count():
        states = put_in(facts, states, block)
        if not states:
            return count
    raise AssertionError


def random_block(random, facts):
    # Blocks of few warps are slow by hand, for there are so many places for them.
    warps = (
        random.randint(1, 3)
        if random.random() < 0.003
        else random.randint(4, facts.threads_per_block // facts.warp_size)
    )
    threads = warps * facts.warp_size - random.choice((0, 0, random.randrange(facts.warp_size)))
    most = random.choice((64, 128, facts.registers_per_thread))
    smem = random.choice(
        (0, random.randrange(facts.smem_per_block_bytes // 8), random.randrange(facts.smem_per_block_bytes))
    )
    return Block(threads, random.randint(1, most), smem)


def test_the_model_is_the_placement_by_hand():
    random_ = random.Random(0)
    kinds, differ, rooms = list(GPUS.values()), [], collections.Counter()
    for case in range(10_000):
        facts = random_.choice(kinds)
        block = random_block(random_, facts)
        alone = counted(facts, empty(facts), block)
        found = [("resident", resident(facts, block), alone)]
        if case % 2:
            comm = random_.choice((Block(544, 96, 104_832 % facts.smem_per_block_bytes), random_block(random_, facts)))
            beside = counted(facts, put_in(facts, empty(facts), comm), block)
            found += [
                ("room", room_beside(facts, block, comm), beside),
                ("drain", drain(facts, block, comm), alone - beside),
            ]
        differ += [(facts.name, block, case, *row) for row in found if row[1] != row[2]]
        rooms[found[1][2] if case % 2 else None] += 1
    assert not differ
    assert all(rooms[n] > 50 for n in (0, 1, 2, 3)), rooms


def test_footprints_of_nccl():
    taken = lambda kind, name, version: dataclasses.astuple(footprint(kind, gpu=gpu(name), version=version))[2:5]
    assert taken("ring", "a100", "2.30.7") == (544, 96, 96_384)
    assert taken("ring", "a40", "2.28.9") == (544, 96, 89_344)
    assert taken("ring", "h200", "2.28.9") == (544, 96, 104_832)
    assert taken("ring", "b200", "2.30.7") == (544, 96, 120_064)
    assert {taken(kind, "h200", "2.30.7") for kind in ("tree", "nvls", "pat", "p2p")} == {(640, 96, 120_064)}
    assert taken("symmetric", "h200", None) == (512, 128, 0)
    newest = footprint("ring", gpu=H200, ctas=4)
    assert (newest.version, newest.ctas) == ("2.32.3", 4) and "assumed for others" in newest.source
    assert footprint("ring", gpu=H200, version="2.28.9", nccl_nthreads=256).threads == 288
    assert footprint("copy-engine", gpu=H200) is COPY_ENGINE and COPY_ENGINE.block is None


def test_every_number_of_a_gpu_has_a_source_and_its_parts_are_whole():
    for facts in GPUS.values():
        numbers = {field.name for field in dataclasses.fields(facts)} - {"name", "title", "arch", "sources"}
        assert set(facts.sources) == numbers and all(facts.sources.values())
        assert facts.registers_per_sm % facts.partitions == facts.warps_per_sm % facts.partitions == 0


def test_a_gpu_is_found_by_what_its_driver_says():
    found = ["a100-80", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA GB200"]
    assert [gpu(name).name for name in found] == ["a100", "a100", "a100", "h100", "gb200"]
    for fewer in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(OccupancyError, match="has fewer multiprocessors"):
            gpu(fewer)


@pytest.mark.parametrize(("asked", "nearest"), [("2.29.1", "2.28.9"), ("3.0", "2.32.3")])
def test_a_version_that_was_not_read_is_the_nearest_older_one_with_a_warning(asked, nearest):
    with pytest.warns(OccupancyWarning, match=rf"NCCL {asked} were not read: .* that of {nearest}"):
        assert footprint("ring", gpu=H200, version=asked).version == nearest


@pytest.mark.parametrize("name", ["a40", "h200"])
def test_paddings_are_the_least_and_aligned(name):
    facts, random_ = gpu(name), random.Random(1)
    for _ in range(50):
        block = random_block(random_, facts)
        tried = {}
        for pad in range(0, facts.smem_per_block_bytes - block.smem_bytes + 1, 1024):
            tried.setdefault(resident(facts, block.padded(pad)), pad)
        assert dict(paddings(facts, block)) == {n: pad for n, pad in tried.items() if n}


def test_plans_of_a_kernel_whose_blocks_come_and_go():
    best, *rest = plans(H200, SMALL, RING)
    assert (best.how, best.blocks_per_sm, best.smem_pad_bytes, best.drain) == ("drain", 1, 74_752, 1)
    assert [(plan.blocks_per_sm, plan.drain) for plan in rest] == [(5, 5), (4, 4), (3, 3), (2, 2)]
    assert "a higher priority" in best.why and "5 blocks must end" in rest[0].why
    (alone,) = plans(H200, SMALL, COPY_ENGINE)
    assert (alone.how, alone.blocks_per_sm, alone.drain) == ("as it is", 5, 0)
    beside = plans(H200, Block(64, 32, 1_024), dataclasses.replace(ALL_OF_THEM, threads=64, registers=32))
    assert any(plan.how == "co-resident" and plan.drain == 0 for plan in beside)


def test_plans_of_a_persistent_kernel():
    reserve, as_it_is = plans(H200, LARGE, RING, persistent=True)
    assert (reserve.how, reserve.reserved_sms, as_it_is.drain) == ("reserve", 16, None)
    assert "16 of 132 multiprocessors" in reserve.why
    # Two blocks of a symmetric kernel with 64 registers share an SM.
    slim = CommFootprint(name="own", ctas=15, threads=512, registers=64, smem_bytes=0, source="made up")
    assert plans(H200, LARGE, slim, persistent=True)[0].reserved_sms == 8
    tiny = dataclasses.replace(slim, threads=32, ctas=1)
    first, second = plans(H200, Block(64, 32, 100_000), tiny, persistent=True)
    assert (first.how, first.blocks_per_sm, second.how) == ("co-resident", 1, "reserve")


@pytest.fixture(scope="module")
def plan():
    return js.plan(abstract(Config(), js.mesh(fsdp=8, devices=8)))


ERRORS = {
    "block: negative": lambda _: Block(0, -1, -4),
    "block: too many registers together": lambda _: occupancy.check(H200, Block(1_024, 96)),
    "block: too much of everything": lambda _: plans(gpu("a40"), Block(2_000, 300, 200_000), COPY_ENGINE),
    "footprint: unknown": lambda _: footprint("rings", gpu=H200),
    "footprint: NVLS before Hopper": lambda _: footprint("nvls", gpu=gpu("a100")),
    "footprint: no version": lambda _: footprint("ring", gpu=H200, version="v2"),
    "footprint: too old a version": lambda _: footprint("ring", gpu=H200, version="2.18.3"),
    "footprint: blocks and threads": lambda _: footprint("ring", gpu=H200, ctas=65, nccl_nthreads=100),
    "plans: no multiprocessor is left": lambda _: plans(H200, LARGE, ALL_OF_THEM, persistent=True),
    "overlap: unknown device": lambda plan: js.tune_overlap(plan, device="h20"),
    "overlap: unknown footprint": lambda plan: js.tune_overlap(plan, device="h200", comm="circle"),
    "overlap: too old": lambda plan: js.tune_overlap(plan, device="h200", comm="copy-engine", nccl="2.27.1"),
}
LINES = {
    "command: unknown GPU": "occupancy --gpu h201",
    "command: a part of one": "occupancy --gpu h100-mig",
    "command: unknown kernel": "occupancy --gpu h200 --kernel matmull",
    "command: a block that cannot be read": "occupancy --block 128,90",
    "command: a block that cannot run": "occupancy --gpu h200 --block 2048,90,0",
    "command: much at once": "occupancy --plot nowhere/a.png --footprint rings --kernel matmul --block 128,90,0",
    "command: NCCL of an AMD GPU": "occupancy --gpu mi250x --nccl 2.30.7",
    "command: kernels of an AMD GPU": "occupancy --gpu mi250x --kernel matmul",
    "command: a plot of an AMD GPU": "occupancy --gpu mi300x --plot a.png",
    "command: NVLS of an AMD GPU": "occupancy --gpu mi300x --footprint nvls",
    "command: too many channels": "occupancy --gpu mi250x --ctas 64",
    "command: a workgroup that cannot be read": "occupancy --gpu mi250x --block 256,64",
    "command: a workgroup that cannot run": "occupancy --gpu mi250x --block 1024,256,0",
}
GOLDEN = GoldenTexts("occupancy_errors.txt", [*ERRORS, *LINES])


def test_texts(plan):
    for name, call in ERRORS.items():
        with pytest.raises(OccupancyError) as caught:
            call(plan)
        GOLDEN.check(name, caught.value)


def test_texts_of_the_command(capsys):
    for name, line in LINES.items():
        assert cli.main(line.split()) == 2
        error = capsys.readouterr().err.rstrip("\n")
        GOLDEN.check(name, f"$ jshard {line}\n{error}")
    GOLDEN.check_names()
