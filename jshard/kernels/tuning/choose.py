"""Which setting of a kernel is best, by what was measured. Nothing here measures, and nothing is estimated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard._errors import RunError
from jshard.kernels.knobs import Occupancy

MOST_SLOWER = 1.15
"""A kernel that alone takes longer than this many times XLA's is dropped: no overlap repays it."""
_ALIKE = 1.25  # times of calls that one statement to the scheduler may stand for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One setting, measured.

    Attributes:
        setting: of the kernel; None for XLA's own product.
        alone_ns: of one call with nothing beside it.
        both_ns: until the call and the load beside it have ended.
    """

    setting: Occupancy | None
    alone_ns: int
    both_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What came of the measurements of one kernel and shape.

    Attributes:
        setting: the best; None where it is XLA's own product.
        alone_ns: of one call of it.
        both_ns: of it and the load together.
        plain_both_ns: the same of XLA's own.
        why: in words.
    """

    setting: Occupancy | None
    alone_ns: int
    both_ns: int
    plain_both_ns: int
    why: str


def choose(timings: Sequence[Timing]) -> Choice:
    """The setting with the least time beside the load; what is more than 1.15 times XLA's alone does not count.

    Args:
        timings: XLA's own among them.

    Raises:
        RunError: XLA's own was not measured, or a time is none.
    """
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

    Args:
        choices: by shape its measurements, and how often it is called.

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
