"""Measured times of a kernel's settings, and the best setting according to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jshard.kernels.backend import Occupancy

MOST_SLOWER = 1.15
"""A kernel whose time alone exceeds XLA's by this factor is dropped: no overlap can make up for it."""
_ALIKE = 1.25  # ratio of call times for which one latency may be stated to the scheduler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One setting, measured."""

    setting: Occupancy | None  # of the kernel; None for XLA's own product
    alone_ns: int  # of one call with nothing beside it
    both_ns: int  # until the call and the load beside it have ended


Calls = Sequence[tuple[Sequence[Timing], int]]
"""The measurements of some shapes, and how often each is called."""


def quickest(calls: Calls) -> Timing:
    """Returns the times of the setting with the least time beside the load.

    Settings above 1.15 times XLA's time alone are excluded. For several shapes, the total time of all their calls is
    compared, for settings measured with all shapes.
    """
    fast_enough = [_fast_enough(timings) for timings, _ in calls]
    first, *others = fast_enough
    totals = []
    for setting in first:
        if all(setting in settings for settings in others):
            totals.append(total(setting, calls))

    def preference(timing: Timing) -> tuple[int, int, bool]:
        # Of equal times XLA's own comes first: it needs no kernel.
        return timing.both_ns, timing.alone_ns, timing.setting is not None

    return min(totals, key=preference)


def _fast_enough(timings: Sequence[Timing]) -> list[Occupancy | None]:
    """Returns the settings that are not much slower alone than XLA's own; that one is among them."""
    limit_ns = round(MOST_SLOWER * _timing_of(None, timings).alone_ns)
    return [timing.setting for timing in timings if timing.alone_ns <= limit_ns]


def total(setting: Occupancy | None, calls: Calls) -> Timing:
    """Adds up the times of all calls with one setting."""
    alone_ns = 0
    both_ns = 0
    for timings, count in calls:
        timing = _timing_of(setting, timings)
        alone_ns += timing.alone_ns * count
        both_ns += timing.both_ns * count
    return Timing(setting=setting, alone_ns=alone_ns, both_ns=both_ns)


def latency_of(setting: Occupancy, calls: Calls) -> int | None:
    """Returns the mean time of one call alone; None if it differs much by shape."""
    by_shape_ns = [_timing_of(setting, timings).alone_ns for timings, _ in calls]
    if max(by_shape_ns) > _ALIKE * min(by_shape_ns):
        return None
    num_calls = sum(count for _, count in calls)
    return total(setting, calls).alone_ns // num_calls


def _timing_of(setting: Occupancy | None, timings: Sequence[Timing]) -> Timing:
    return next(timing for timing in timings if timing.setting == setting)


def setting_text(setting: Occupancy | None) -> str:
    """Describes a setting in a few words."""
    if setting is None:
        return "XLA's own"
    tiles = f"{setting.tile_m}x{setting.tile_n}x{setting.tile_k}/{setting.stages}"
    if setting.persistent:
        text = f"{tiles} persistent"
        if setting.reserved_sms:
            text += f", reserved_sms={setting.reserved_sms}"
        return text
    if setting.smem_pad_bytes:
        return f"{tiles}, smem_pad_bytes={setting.smem_pad_bytes}"
    return tiles
