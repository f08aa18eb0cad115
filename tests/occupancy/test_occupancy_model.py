"""The occupancy model: against a placement of blocks one by one, the table of NCCL on H200, paddings, plans, errors."""

import collections
import dataclasses
import itertools
import json
import os
import random

import pytest

import jshard as js
from jshard import cli, occupancy
from jshard.facts.devices import DEVICES
from jshard.occupancy import (
    COPY_ENGINE,
    GPUS,
    Block,
    CommFootprint,
    OccupancyError,
    OccupancyWarning,
    drain,
    fits,
    footprint,
    footprints,
    gpu,
    occupancy_report,
    pad_for,
    paddings,
    plans,
    refusals,
    resident,
    room_beside,
    shipped_kernels,
)
from tests.golden_texts import GoldenTexts
from tests.helpers import Config, abstract

H200 = GPUS["h200"]
POOLED = dataclasses.replace(H200, placement="pooled")
PLAN = js.plan(abstract(Config(), js.mesh(fsdp=8, devices=8)))
ALL_OF_THEM = CommFootprint(name="own", ctas=132, threads=640, registers=96, smem_bytes=0, source="made up")
SMALL = Block(128, 58, 41_024)
RING = {version: footprint("ring", gpu=H200, version=version) for version in ("2.28.9", "2.30.7")}


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
            asked = random_.randint(1, 4)
            found += [
                ("room", room_beside(facts, block, comm), beside),
                ("drain", drain(facts, block, comm), alone - beside),
                (
                    "fits",
                    fits(facts, (block, asked), (comm, 1)),
                    bool(put_in(facts, empty(facts), comm)) and asked <= beside,
                ),
            ]
        differ += [(facts.name, block, case, *row) for row in found if row[1] != row[2]]
        rooms[found[1][2] if case % 2 else None] += 1
    assert not differ
    assert all(rooms[n] > 50 for n in (0, 1, 2, 3)), rooms


# Threads x registers, shared memory of the kernel and its padding; blocks on an SM; drain beside 2.28.9 and 2.30.7 if
# registers were one pool, and as partitions give them out.
TABLE = [
    ((154, 131_136, 0), 1, (1, 1), (1, 1)),
    ((154, 163_904, 0), 1, (1, 1), (1, 1)),
    ((90, 90_176, 0), 2, (1, 1), (2, 2)),
    ((90, 90_176, 25_600), 1, (0, 1), (1, 1)),
    ((58, 41_024, 0), 5, (4, 4), (5, 5)),
    ((58, 41_024, 30_720), 3, (2, 2), (3, 3)),
    ((58, 41_024, 56_320), 2, (1, 1), (2, 2)),
    ((58, 41_024, 74_752), 1, (0, 1), (1, 1)),
    ((255, 114_752, 0), 2, (2, 2), (2, 2)),
    ((148, 81_984, 0), 2, (2, 2), (2, 2)),
]


@pytest.mark.parametrize(("kernel", "blocks", "pooled", "even"), TABLE)
def test_the_table_of_nccl_on_h200(kernel, blocks, pooled, even):
    registers, smem_bytes, pad = kernel
    block = Block(128, registers, smem_bytes).padded(pad)
    assert resident(H200, block) == blocks
    assert tuple(drain(POOLED, block, ring.block) for ring in RING.values()) == pooled
    assert tuple(drain(H200, block, ring.block) for ring in RING.values()) == even


def test_footprints_of_nccl():
    found = {
        (kind, name): footprint(kind, gpu=gpu(name), version="2.30.7")
        for kind in ("ring", "tree")
        for name in ("a100", "h200", "b200")
    }
    assert {key: (x.threads, x.registers, x.smem_bytes) for key, x in found.items()} == {
        ("ring", "a100"): (544, 96, 96_384),
        ("ring", "h200"): (544, 96, 120_064),
        ("ring", "b200"): (544, 96, 120_064),
        ("tree", "a100"): (640, 96, 96_384),
        ("tree", "h200"): (640, 96, 120_064),
        ("tree", "b200"): (640, 96, 120_064),
    }
    assert footprint("ring", gpu=gpu("a40"), version="2.28.9").smem_bytes == 89_344
    assert footprint("ring", gpu=H200).version == "2.32.3"
    assert "assumed to be the same" in footprint("ring", gpu=H200).source
    assert footprint("ring", gpu=H200, version="2.28.9", nccl_nthreads=256).threads == 288
    assert {footprint(kind, gpu=H200).threads for kind in ("nvls", "pat", "p2p")} == {640}
    symmetric = footprint("symmetric", gpu=H200)
    assert (symmetric.threads, symmetric.registers, symmetric.smem_bytes) == (512, 128, 0)
    assert footprint("copy-engine", gpu=H200) is COPY_ENGINE and COPY_ENGINE.block is None
    assert footprint("ring", gpu=H200, ctas=4).ctas == 4


def test_a_version_that_was_not_read_is_the_nearest_older_one_with_one_warning(monkeypatch):
    monkeypatch.setattr(footprints, "_warned", set())
    with pytest.warns(OccupancyWarning, match=r"NCCL 2\.29\.1 were not read: .* that of 2\.28\.9"):
        assert footprint("ring", gpu=H200, version="2.29.1").version == "2.28.9"
    assert footprint("tree", gpu=H200, version="2.29.1").version == "2.28.9"  # a second warning would be an error
    with pytest.warns(OccupancyWarning, match=r"2\.32\.3"):
        assert footprint("ring", gpu=H200, version="3.0").version == "2.32.3"


@pytest.mark.parametrize("facts", GPUS.values(), ids=lambda facts: facts.name)
def test_every_number_of_a_gpu_has_a_source(facts):
    numbers = {field.name for field in dataclasses.fields(facts)} - {"name", "title", "arch", "sources"}
    assert set(facts.sources) == numbers
    assert all(facts.sources.values())
    assert facts.registers_per_sm % facts.partitions == facts.warps_per_sm % facts.partitions == 0
    assert list(facts.splits_bytes) == sorted(facts.splits_bytes)
    assert facts.splits_bytes[-1] == facts.smem_per_sm_bytes


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "h200": ["H200", "NVIDIA H200"],
        "h100": ["NVIDIA H100 80GB HBM3"],
        "a100": ["a100-80", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
        "gb200": ["NVIDIA GB200"],
        "a40": ["NVIDIA A40"],
    }.items(),
)
def test_a_gpu_is_found_by_what_its_driver_says(name, said):
    assert {gpu(each).name for each in said} == {name}


def test_gpus_of_plans_have_their_numbers():
    for name, device in {"a100": "a100-40", "h200": "h200", "b200": "b200"}.items():
        target = DEVICES[device].target
        assert target is not None
        assert GPUS[name].num_sms == target.core_count
        assert GPUS[name].smem_per_block_bytes == target.shared_memory_per_block_optin


@pytest.mark.parametrize("name", ["a40", "h200"])
def test_paddings_are_the_least_and_aligned(name):
    facts, random_ = gpu(name), random.Random(1)
    for _ in range(200):
        block = random_block(random_, facts)
        tried = {}
        for pad in range(0, facts.smem_per_block_bytes - block.smem_bytes + 1, occupancy.PAD_UNIT_BYTES):
            tried.setdefault(resident(facts, block.padded(pad)), pad)
        assert dict(paddings(facts, block)) == {n: pad for n, pad in tried.items() if n}
        for n, pad in paddings(facts, block):
            assert pad_for(facts, block, n) == pad


def test_plans_of_a_kernel_whose_blocks_come_and_go():
    best, *rest = plans(H200, SMALL, RING["2.30.7"])
    assert (best.how, best.blocks_per_sm, best.smem_pad_bytes, best.drain) == ("drain", 1, 74_752, 1)
    assert [(plan.blocks_per_sm, plan.drain) for plan in rest] == [(5, 5), (4, 4), (3, 3), (2, 2)]
    assert len(rest) + 1 <= resident(H200, SMALL) + 2
    assert "a higher priority" in best.why and "5 blocks must end" in rest[0].why
    # As if registers were one pool, two blocks wait for one; and beside the smaller blocks of 2.28.9 one fits.
    best = plans(POOLED, SMALL, RING["2.30.7"])[0]
    assert (best.blocks_per_sm, best.drain) == (2, 1)
    single = [plan for plan in plans(POOLED, SMALL, RING["2.28.9"]) if plan.blocks_per_sm == 1]
    assert [(plan.how, plan.drain) for plan in single] == [("co-resident", 0)]
    assert "if the L1 cache leaves 228 KiB" in single[0].why
    (alone,) = plans(H200, SMALL, COPY_ENGINE)
    assert (alone.how, alone.blocks_per_sm, alone.drain) == ("as it is", 5, 0)


def test_plans_of_a_persistent_kernel():
    large = Block(384, 168, 204_800)
    reserve, as_it_is = plans(H200, large, RING["2.30.7"], persistent=True)
    assert (reserve.how, reserve.reserved_sms, as_it_is.drain) == ("reserve", 16, None)
    assert "16 of 132 multiprocessors" in reserve.why
    # Two blocks of a symmetric kernel with 64 registers share an SM.
    slim = CommFootprint(name="own", ctas=15, threads=512, registers=64, smem_bytes=0, source="made up")
    assert plans(H200, large, slim, persistent=True)[0].reserved_sms == 8
    small = Block(128, 32, 1_024)
    tiny = dataclasses.replace(slim, threads=32, ctas=1)
    first, second = plans(H200, Block(64, 32, 100_000), tiny, persistent=True)
    assert (first.how, first.blocks_per_sm, second.how) == ("co-resident", 2, "reserve")
    hows = [plan.how for plan in plans(H200, small, slim, persistent=True)]
    assert hows == ["reserve", "co-resident", "as it is"]


ERRORS = {
    "gpu: unknown": lambda: gpu("h20"),
    "gpu: unknown to the driver's words": lambda: gpu("NVIDIA GeForce RTX 4090"),
    "gpu: a card with fewer multiprocessors": lambda: gpu("NVIDIA H100 PCIe"),
    "gpu: a part of one": lambda: gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    "block: negative": lambda: Block(0, -1, -4),
    "block: too many threads": lambda: occupancy.check(H200, Block(1_056, 32)),
    "block: too many registers": lambda: occupancy.check(H200, Block(128, 256)),
    "block: too many registers together": lambda: occupancy.check(H200, Block(1_024, 96)),
    "block: too much shared memory": lambda: occupancy.check(H200, Block(128, 58, 232_449)),
    "block: too much of everything": lambda: plans(gpu("a40"), Block(2_000, 300, 200_000), COPY_ENGINE),
    "pad: impossible": lambda: pad_for(H200, SMALL, 6),
    "pad: none": lambda: pad_for(H200, SMALL, 0),
    "footprint: unknown": lambda: footprint("rings", gpu=H200),
    "footprint: NVLS before Hopper": lambda: footprint("nvls", gpu=gpu("a100")),
    "footprint: no version": lambda: footprint("ring", gpu=H200, version="v2"),
    "footprint: too old a version": lambda: footprint("ring", gpu=H200, version="2.18.3"),
    "footprint: numbers": lambda: footprint("ring", gpu=H200, ctas=65, nccl_nthreads=100),
    "footprint: a lever it does not heed": lambda: footprint("tree", gpu=H200, nccl_nthreads=256),
    "plans: no multiprocessor is left": lambda: plans(
        H200,
        Block(384, 168, 204_800),
        ALL_OF_THEM,
        persistent=True,
    ),
    "overlap: unknown device": lambda: js.overlap(PLAN, device="h20"),
    "overlap: unknown footprint": lambda: js.overlap(PLAN, device="h200", comm="circle"),
    "overlap: too old for copy engines": lambda: js.overlap(PLAN, device="h200", comm="copy-engine", nccl="2.27.1"),
    "overlap: no version": lambda: js.overlap(PLAN, device="h200", comm="copy-engine", nccl="new"),
    "overlap: every multiprocessor": lambda: js.overlap(PLAN, device="h200", comm=ALL_OF_THEM),
}
LINES = {
    "command: unknown GPU": "occupancy --gpu h201",
    "command: unknown kernel": "occupancy --gpu h200 --kernel matmull",
    "command: a block that cannot be read": "occupancy --block 128,90",
    "command: a block that cannot run": "occupancy --gpu h200 --block 2048,90,0",
    "command: much at once": "occupancy --plot nowhere/a.png --footprint rings --kernel matmul --block 128,90,0",
    "command: unknown NCCL": "occupancy --gpu h200 --nccl newest",
}


GOLDEN = GoldenTexts("occupancy_errors.txt", [*ERRORS, *LINES])


@pytest.mark.parametrize("name", ERRORS)
def test_text(name):
    with pytest.raises(OccupancyError) as caught:
        ERRORS[name]()
    GOLDEN.check(name, caught.value)


@pytest.mark.parametrize("name", LINES)
def test_text_of_the_command(name, capsys):
    assert cli.main(LINES[name].split()) == 2
    error = capsys.readouterr().err.rstrip("\n").replace(os.getcwd(), "FOLDER")
    GOLDEN.check(name, f"$ jshard {LINES[name]}\n{error}")


def test_no_golden_text_is_left_over():
    GOLDEN.check_names()


def test_a_report_of_kernels_on_a_gpu_that_cannot_run_them():
    a40 = gpu("a40")
    report = occupancy_report(a40, shipped_kernels(a40), [footprint("ring", gpu=a40)])
    refused = [row.kernel.label for row in report.rows if row.refusals]
    assert refused and all(refusals(a40, row.kernel.block) == row.refusals for row in report.rows)
    assert all("not compiled for sm_86" in row.kernel.source for row in report.rows)
    assert json.loads(report.to_json())["kernels"][0]["refusals"]
