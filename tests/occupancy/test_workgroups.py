"""The occupancy model of AMD's compute units: against a placement of workgroups one by one, LLVM's answers, errors."""

import collections
import itertools
import random

import pytest

from jshard.facts.amd_gpus import is_amd_gpu
from jshard.occupancy import AMD_GPUS, OccupancyError, Workgroup, amd_gpu, rccl_footprint, workgroups

MI250X = AMD_GPUS["mi250x"]
RCCL = rccl_footprint(gpu=MI250X).workgroup

# A compute unit in the hand: what is free in each SIMD (vector registers, scalar registers, places of waves), the local
# memory and the slots of workgroups. Workgroups are put in one by one, in every way that differs; no division is made.


def empty(facts):
    simd = facts.vgprs_per_simd, facts.sgprs_per_simd, facts.waves_per_simd
    return {((simd,) * facts.simds, facts.lds_per_cu_bytes, facts.workgroups_per_cu)}


def put_in(facts, states, workgroup):
    """Every state after one more workgroup, up to the order of the SIMDs."""
    waves = len(range(0, workgroup.work_items, facts.wave_size))
    vgprs = len(range(0, workgroup.vgprs, facts.vgpr_unit)) * facts.vgpr_unit
    lds = len(range(0, workgroup.lds_bytes, facts.lds_unit_bytes)) * facts.lds_unit_bytes
    results = set()
    for simds, lds_left, slots in states:
        if lds_left < lds or not slots:
            continue
        rest = waves
        while rest >= facts.simds:  # a wave into each
            simds = tuple((v - vgprs, s - workgroup.sgprs, places - 1) for v, s, places in simds)
            rest -= facts.simds
        for chosen in itertools.combinations(range(facts.simds), rest):
            after = []
            for i, (v, s, places) in enumerate(simds):
                more = int(i in chosen)
                after.append((v - vgprs * more, s - workgroup.sgprs * more, places - more))
            if all(min(simd) >= 0 for simd in after):
                results.add((tuple(sorted(after)), lds_left - lds, slots - 1))
    return results


def counted(facts, states, workgroup):
    """How many workgroups go in, one after another."""
    for count in itertools.count():
        states = put_in(facts, states, workgroup)
        if not states:
            return count
    raise AssertionError


def drawn(random):
    return Workgroup(
        # More than one wave: a single one needs no slot. Whole rounds of waves, or nearly: others have many placements.
        work_items=random.choice((128, 256, 256, 320, 512, 1024)),
        vgprs=random.choice((16, 32, 40, 64, 96, 128, 173, 256)),
        sgprs=random.choice((0, 16, 48, 80, 96, 106)),
        lds_bytes=random.choice((0, 1_728, 8_192, 16_384, 32_768, 65_536)),
    )


def test_as_many_workgroups_fit_as_can_be_put_in_one_by_one():
    source = random.Random(0)
    seen = collections.Counter()
    for _ in range(150):
        facts = source.choice([*AMD_GPUS.values()])
        kernel = drawn(source)
        assert workgroups.resident(facts, kernel) == counted(facts, empty(facts), kernel), kernel
        seen[workgroups.resident(facts, kernel)] += 1
    assert len(seen) > 5


def test_as_many_leave_room_for_one_of_a_collective():
    source = random.Random(1)
    seen = collections.Counter()
    for _ in range(150):
        kernel = drawn(source)
        comm = source.choice((RCCL, drawn(source)))
        beside = counted(MI250X, put_in(MI250X, empty(MI250X), comm), kernel)
        # A compute unit may hold as many of the kernel as before: none waits for them.
        expected = min(beside, workgroups.resident(MI250X, kernel))
        assert workgroups.room_beside(MI250X, kernel, comm) == expected, (kernel, comm)
        seen[workgroups.drain(MI250X, kernel, comm)] += 1
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("work_items", "vgprs", "sgprs", "waves"),
    [
        (512, 50, 30, 8),  # the example of llvm-calc-occupancy for gfx90a
        (256, 64, 0, 8),
        (256, 97, 0, 4),  # rounded to 104
        (256, 128, 0, 4),
        (256, 259, 0, 1),
        (256, 32, 100, 8),
        (256, 32, 106, 7),
    ],
)
def test_waves_are_those_that_llvm_computes(work_items, vgprs, sgprs, waves):
    kernel = Workgroup(work_items=work_items, vgprs=vgprs, sgprs=sgprs)
    waves_of_a_simd = work_items // MI250X.wave_size // MI250X.simds
    assert workgroups.resident(MI250X, kernel) * waves_of_a_simd == waves


def test_a_single_wave_needs_no_slot():
    assert workgroups.resident(MI250X, Workgroup(work_items=64, vgprs=32)) == 32
    assert workgroups.resident(MI250X, Workgroup(work_items=128, vgprs=32)) == 16


def test_padding_reaches_every_number_with_the_least_memory():
    kernel = Workgroup(work_items=256, vgprs=64, lds_bytes=16_384)
    achieved = workgroups.paddings(MI250X, kernel)
    assert achieved == ((4, 0), (3, 512), (2, 5632), (1, 16_896))
    for count, pad_bytes in achieved:
        assert workgroups.resident(MI250X, kernel.padded(pad_bytes)) == count
        if pad_bytes:
            assert workgroups.resident(MI250X, kernel.padded(pad_bytes - MI250X.lds_unit_bytes)) == count + 1


def test_every_number_has_a_source():
    for facts in AMD_GPUS.values():
        numbers = [name for name in vars(facts) if name not in ("name", "title", "gfx", "sources")]
        assert sorted(facts.sources) == sorted(numbers)
    assert "assumed" in rccl_footprint(gpu=AMD_GPUS["mi300x"]).source
    assert "assumption" in rccl_footprint(gpu=MI250X).source


def test_a_gpu_goes_by_the_name_of_its_driver():
    assert amd_gpu("AMD Instinct MI250X") is MI250X
    assert is_amd_gpu("AMD Instinct MI300X") and not is_amd_gpu("NVIDIA H200") and not is_amd_gpu("")


def test_what_cannot_run_is_refused_with_every_limit():
    with pytest.raises(OccupancyError) as caught:
        workgroups.check(MI250X, Workgroup(work_items=2048, vgprs=600, lds_bytes=70_000))
    assert "2,048 work items" in caught.value.why and "600 vector registers" in caught.value.why
    assert "70,000 bytes of LDS" in caught.value.why
    with pytest.raises(OccupancyError, match="its 16 waves do not fit on a compute unit"):
        workgroups.check(MI250X, Workgroup(work_items=1024, vgprs=256))
    with pytest.raises(OccupancyError, match="vgprs is 0, the minimum is 1"):
        Workgroup(work_items=256, vgprs=0)
    with pytest.raises(OccupancyError, match="There is no AMD GPU 'h200'"):
        amd_gpu("h200")
    with pytest.raises(OccupancyError, match="is unknown for AMD MI250X"):
        rccl_footprint("nvls", gpu=MI250X)
    with pytest.raises(OccupancyError, match="has 1 to 32 channels"):
        rccl_footprint(gpu=MI250X, workgroups=33)
