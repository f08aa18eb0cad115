"""The attempts of a run, as run.json has them: when each began and ended and why, what it lost, and the ETTR.

The effective training time ratio is that of Kokolis et al. 2024, "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters" (arXiv:2410.21680): productive time over the wall-clock time since the run began. An attempt
is productive from the moment its first step may begin (parameters are there, the step is compiled) to the record of the
last step that the run has kept; evaluations and saves between steps count. Start-up, steps that are done again, and the
time between attempts do not. Time in which nobody had the run resumed is wall-clock time, too.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard._text import duration
from jshard.errors import RunError
from jshard.train.records import iterate_metrics

Attempt = dict[str, Any]
_Lines = Sequence[tuple[float, int]]  # time and step


def begin(attempts: Sequence[Attempt], metrics: Path, *, step: int, known: Mapping[str, Any]) -> list[Attempt]:
    """Adds an attempt that goes on from a step, and says of those before it what they have lost.

    Args:
        attempts: those before.
        metrics: the record of their steps, not yet cut back.
        step: the steps that are done.
        known: what the supervisor knows of the last one: "cause" and "ended_at".
    """
    lines = _lines(metrics)
    before = [dict(attempt) for attempt in attempts]
    if before and before[-1].get("end") is None:
        _close_lost(before[-1], lines, known)
    for attempt in before:
        if attempt["last_step"] > step:
            _give_back(attempt, lines, step)
    return [*before, {"begin": _text(_began_s()), "ready": None, "end": None, "first_step": step, "last_step": step}]


def end(attempts: Sequence[Attempt], metrics: Path, *, cause: str) -> list[Attempt]:
    """Notes that the last attempt has ended by itself."""
    *before, last = [dict(attempt) for attempt in attempts]
    _close(last, _lines(metrics), time.time(), cause)
    return [*before, last]


def ready(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Notes that the first step of the last attempt may begin."""
    return [*attempts[:-1], {**attempts[-1], "ready": _text(time.time())}]


def ettr(attempts: Sequence[Attempt]) -> float | None:
    """Productive time over the time from the first begin to now, or to the end of the last attempt."""
    if not attempts:
        return None
    last = attempts[-1]["end"]
    wall_s = (time.time() if last is None else _seconds(last)) - _seconds(attempts[0]["begin"])
    return sum(attempt.get("productive_s", 0.0) for attempt in attempts) / wall_s if wall_s > 0 else None


def describe(attempts: Sequence[Attempt]) -> str:
    """One line for a run of several attempts."""
    productive_s = sum(attempt.get("productive_s", 0.0) for attempt in attempts)
    lost = sum(attempt.get("steps_lost", 0) for attempt in attempts)
    lost_s = sum(attempt.get("seconds_lost", 0.0) for attempt in attempts)
    return (
        f"ETTR {ettr(attempts) or 0:.1%}: {duration(productive_s)} of steps that count, {len(attempts)} attempts; "
        f"{lost} steps ({duration(lost_s)}) were lost"
    )


def _close_lost(attempt: Attempt, lines: _Lines, known: Mapping[str, Any]) -> None:
    """It has not written its end: its supervisor knows it, or it is that of the last line."""
    own = _own(attempt, lines)
    last_s = own[-1][0] if own else _seconds(attempt["ready"] or attempt["begin"])
    _close(attempt, lines, max(last_s, float(known.get("ended_at", 0.0))), known.get("cause", "not known"))


def _close(attempt: Attempt, lines: _Lines, end_s: float, cause: str) -> None:
    own = _own(attempt, lines)
    attempt |= {"end": _text(end_s), "cause": cause, "last_step": own[-1][1] if own else attempt["first_step"]}
    attempt |= {"productive_s": _productive_s(attempt, own), "steps_lost": 0, "seconds_lost": 0.0}


def _give_back(attempt: Attempt, lines: _Lines, step: int) -> None:
    """The run goes on before the last step of the attempt: what came after does not count."""
    own = _own(attempt, lines)
    kept = [line for line in own if line[1] <= step]
    productive_s = _productive_s(attempt, kept)
    attempt["seconds_lost"] = round(attempt["seconds_lost"] + attempt["productive_s"] - productive_s, 3)
    attempt["steps_lost"] += attempt["last_step"] - max(step, attempt["first_step"])
    attempt |= {"productive_s": productive_s, "last_step": max(step, attempt["first_step"])}


def _productive_s(attempt: Attempt, own: _Lines) -> float:
    return round(own[-1][0] - _seconds(attempt["ready"]), 3) if own and attempt["ready"] is not None else 0.0


def _own(attempt: Attempt, lines: _Lines) -> _Lines:
    """The lines that an attempt has written."""
    since_s = _seconds(attempt["begin"])
    until_s = float("inf") if attempt["end"] is None else _seconds(attempt["end"])
    return [line for line in lines if since_s <= line[0] <= until_s + 1e-3 and line[1] >= attempt["first_step"]]


def _lines(metrics: Path) -> _Lines:
    try:
        return [(line["time"], line["step"]) for line in iterate_metrics(metrics) if line.get("time") is not None]
    except (OSError, RunError):  # whoever goes on with the file says what is wrong with it
        return []


def _began_s() -> float:
    """When this process was started."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot_s + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return time.time()


def _text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
