"""The load of other programs on the machine, while ours wait."""

from __future__ import annotations

import time
from pathlib import Path

_SAMPLE_S = 0.3
_QUIET = 0.1  # of the cores' time


def busy_share(seconds: float = _SAMPLE_S) -> float | None:
    """The share of the cores' time used by programs, over a moment; None if the system does not report it."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def wait_for_quiet(limit_s: float) -> bool:
    """Waits until no other program works, up to a limit.

    Returns:
        Whether the machine is quiet, as far as is known.
    """
    end = time.monotonic() + limit_s
    while (busy := busy_share(1.0)) is not None and busy > _QUIET:
        if time.monotonic() > end:
            return False
    return True


def _ticks() -> tuple[int, int] | None:
    """Busy ticks and all ticks, since the machine started."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, idle, iowait, *others = map(int, first.split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + iowait
