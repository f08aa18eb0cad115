"""What is worth measuring for a product beside a collective, and which setting is best by what was measured."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from jshard.errors import RunError
from jshard.kernels.knobs import Occupancy, fitted, product_ns
from jshard.occupancy import (
    CommFootprint,
    GpuFacts,
    Plan,
    ShippedKernel,
    plans,
    refusals,
    reserved_for,
    shipped_kernels,
)

_TILES = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)")
_SHIPPED = "matmul"  # the other products are the same kernel with an epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A setting and what the model expects of it."""

    setting: Occupancy | None  # of the kernel; None for XLA's own product
    plan: Plan | None  # how it leaves room; None for XLA's own
    alone_ns: int  # an estimate of one call alone
    both_ns: int  # an estimate of the call and the collective together

    @property
    def how(self) -> str:
        """How it leaves room, in few words."""
        if self.plan is None:
            return "not known: taken to make the collective wait"
        waits = {None: "the collective waits for the kernel", 0: "", 1: "the collective has the next block's place"}
        found = waits.get(self.plan.drain, f"{self.plan.drain} blocks must end on one SM: taken to wait")
        return found or self.plan.how


def candidates(gpu: GpuFacts, comm: CommFootprint, *, m: int, n: int, k: int, load_ns: float) -> tuple[Candidate, ...]:
    """The settings, the best by the model first; XLA's own product is one of them.

    The model takes all tiles to reach the same part of the peak, which they do not: it ranks how settings leave room.
    """
    found: dict[Occupancy, Candidate] = {}
    for form, kernel in _forms(gpu).items():
        knobs = fitted(form, m, n, k)
        for plan in plans(gpu, kernel.block, comm, persistent=kernel.persistent):
            setting = dataclasses.replace(
                knobs, smem_pad_bytes=plan.smem_pad_bytes, reserved_sms=plan.reserved_sms if knobs.persistent else 0
            )
            found.setdefault(setting, _estimated(gpu, comm, setting, plan, (m, n, k), load_ns))
    alone_ns = product_ns(m, n, k, kind=gpu.name)
    waits_ns = 0 if not comm.ctas else alone_ns
    plain = Candidate(setting=None, plan=None, alone_ns=alone_ns, both_ns=int(max(alone_ns, waits_ns + load_ns)))
    return tuple(sorted([*found.values(), plain], key=lambda one: (one.both_ns, one.alone_ns)))


def _forms(gpu: GpuFacts) -> dict[Occupancy, ShippedKernel]:
    """The forms of the kernel that a GPU can run; of one and its transposed ones that with the most registers."""
    found: dict[Occupancy, ShippedKernel] = {}
    for kernel in shipped_kernels(gpu):
        tiles = _TILES.search(kernel.tiles)
        if tiles is None or not kernel.is_called(_SHIPPED) or refusals(gpu, kernel.block):
            continue
        tile_m, tile_n, tile_k, stages = map(int, tiles.groups())
        how = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "stages": stages}
        knobs = Occupancy(**how, persistent=kernel.persistent)
        if knobs not in found or kernel.registers > found[knobs].registers:
            found[knobs] = kernel
    return found


def _estimated(
    gpu: GpuFacts, comm: CommFootprint, setting: Occupancy, plan: Plan, sizes: tuple[int, int, int], load_ns: float
) -> Candidate:
    m, n, k = sizes
    each = 1 if setting.persistent else plan.blocks_per_sm  # tiles that a multiprocessor makes at once
    tiles = math.ceil(m / setting.tile_m) * math.ceil(n / setting.tile_n)
    rounds = math.ceil(tiles / ((gpu.num_sms - setting.reserved_sms) * each))
    round_ns = product_ns(m, n, k, kind=gpu.name) * gpu.num_sms * each / tiles
    alone_ns = rounds * round_ns
    both_ns = _together(gpu, comm, plan, alone_ns, alone_ns / rounds, load_ns)
    free = gpu.num_sms - math.ceil(tiles / each)
    if free >= reserved_for(gpu, comm):  # so few tiles that the collective finds empty multiprocessors
        both_ns = max(alone_ns, load_ns)
    return Candidate(setting=setting, plan=plan, alone_ns=int(alone_ns), both_ns=int(both_ns))


def _together(
    gpu: GpuFacts, comm: CommFootprint, plan: Plan, alone_ns: float, round_ns: float, load_ns: float
) -> float:
    """Until a kernel that fills the GPU, and a collective beside it, have ended."""
    if plan.reserved_sms or not comm.ctas:
        return max(alone_ns, load_ns)
    if plan.drain is None or plan.drain > 1:  # at worst the collective waits for the whole kernel
        return alone_ns + load_ns
    lost = plan.drain * min(comm.ctas, gpu.num_sms) / (gpu.num_sms * plan.blocks_per_sm)
    return max(alone_ns / (1 - min(lost, 0.99)), load_ns + plan.drain * round_ns)


# Which setting of a kernel is best, by what was measured. Nothing here measures, and nothing is estimated.

MOST_SLOWER = 1.15
"""A kernel that alone takes longer than this many times XLA's is dropped: no overlap repays it."""
_ALIKE = 1.25  # times of calls that one statement to the scheduler may stand for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One setting, measured."""

    setting: Occupancy | None  # of the kernel; None for XLA's own product
    alone_ns: int  # of one call with nothing beside it
    both_ns: int  # until the call and the load beside it have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What came of the measurements of one kernel and shape."""

    setting: Occupancy | None  # the best; None where it is XLA's own product
    alone_ns: int  # of one call of it
    both_ns: int  # of it and the load together
    plain_both_ns: int  # the same of XLA's own
    why: str  # in words


def choose(timings: Sequence[Timing]) -> Choice:
    """The setting with the least time beside the load; what is more than 1.15 times XLA's alone does not count."""
    plain = next((timing for timing in timings if timing.setting is None), None)
    bad = [timing for timing in timings if min(timing.alone_ns, timing.both_ns) <= 0]
    if plain is None or bad:
        raise RunError(
            "The measurements say nothing.",
            where=[str(timing) for timing in bad] or f"{len(timings)} settings of a kernel",
            why="a time is not positive." if bad else "there is none of XLA's own, with which all are compared.",
            do="run `jshard tune` again, with nothing else on the GPU.",
        )
    left = [timing for timing in timings if _is_quick(timing, plain)]
    best = min(left, key=lambda timing: (timing.both_ns, timing.alone_ns, timing is not plain))
    setting = best.setting and dataclasses.replace(best.setting, latency_ns=best.alone_ns)
    return Choice(
        setting=setting,
        alone_ns=best.alone_ns,
        both_ns=best.both_ns,
        plain_both_ns=plain.both_ns,
        why=_why(best, plain, len(timings) - len(left)),
    )


def together(choices: Mapping[str, tuple[Sequence[Timing], int]]) -> Timing | None:
    """One setting for several shapes: that with the least time of all their calls together.

    Returns:
        The setting, with the times of all calls added up; its `latency_ns` is set only where a call takes about as
        long with every shape. None where no setting was measured with all shapes.
    """
    kept = [_kept(timings) for timings, _ in choices.values()]
    common = [setting for setting in kept[0] if all(setting in other for other in kept[1:])] if kept else []
    counts = [count for _, count in choices.values()]
    sums = [
        Timing(
            setting=setting,
            alone_ns=sum(of[setting].alone_ns * count for of, count in zip(kept, counts, strict=True)),
            both_ns=sum(of[setting].both_ns * count for of, count in zip(kept, counts, strict=True)),
        )
        for setting in common
    ]
    if not sums:
        return None
    best = min(sums, key=lambda timing: (timing.both_ns, timing.alone_ns, timing.setting is not None))
    calls = [of[best.setting].alone_ns for of in kept]
    if best.setting is None or max(calls) > _ALIKE * min(calls):
        return best
    each_ns = best.alone_ns // sum(counts)
    return dataclasses.replace(best, setting=dataclasses.replace(best.setting, latency_ns=each_ns))


def _kept(timings: Sequence[Timing]) -> dict[Occupancy | None, Timing]:
    """By setting, what is not too slow alone."""
    plain = next(timing for timing in timings if timing.setting is None)
    return {timing.setting: timing for timing in timings if _is_quick(timing, plain)}


def _is_quick(timing: Timing, plain: Timing) -> bool:
    return timing.alone_ns <= round(MOST_SLOWER * plain.alone_ns)


def _why(best: Timing, plain: Timing, num_dropped: int) -> str:
    dropped = f"; {num_dropped} dropped, over {MOST_SLOWER} x XLA's alone" if num_dropped else ""
    if best is plain:
        return f"nothing was quicker beside the load than XLA's own{dropped}"
    part = best.both_ns / plain.both_ns
    return f"{part:.2f} x XLA's time beside the load, {best.alone_ns / plain.alone_ns:.2f} x alone{dropped}"
