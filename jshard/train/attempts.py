"""The attempts of a run in run.json: when each began and ended, why, and how much of its time counts.

The ratio is the ETTR, the effective training time ratio of Kokolis et al. 2024, "Revisiting Reliability in Large-Scale
Machine Learning Research Clusters" (arXiv:2410.21680): productive time over the wall-clock time since the run began. An
attempt is productive from the moment its first step may begin (parameters exist, the step is compiled) to the record of
the last step that the run has kept; evaluations and saves between steps are included. Start-up, repeated steps, and the
time from a failure to the next attempt are not: that time is lost, however late somebody resumed the run.

A pause is no lost time: the time from an attempt that ended on request (all its steps are done, or a signal stopped it
and it saved) to the next one. It is left out of the wall-clock time and recorded beside the ratio.

                 begin        ready                        end                         begin (of the next)
    an attempt     |  start-up  |  steps that count | lost   |  lost, or a pause          |
                                                    the last step that the run has kept
"""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from jshard._parsing import is_number
from jshard._text import clock_text, counted, duration
from jshard.errors import RunError
from jshard.launch.restarts import AttemptBefore
from jshard.train.records import iterate_metrics

_CLOCK_S = 1e-3  # the times in run.json are rounded to it


class _BegunAttempt(TypedDict):
    begin: str
    ready: str | None
    end: str | None
    first_step: int
    last_step: int


class Attempt(_BegunAttempt, total=False):
    """An attempt as in run.json; the further keys are those of one that has ended."""

    cause: str
    productive_s: float
    steps_lost: int
    seconds_lost: float
    on_request: bool


class _RecordedStep(NamedTuple):
    """A line of metrics.jsonl: when it was written, and its step."""

    time_s: float
    step: int


def begin_attempt(attempts: Sequence[Attempt], metrics: Path, *, step: int, known: AttemptBefore) -> list[Attempt]:
    """Adds an attempt that continues from a step, and records the losses of those before it.

    Args:
        attempts: the earlier attempts.
        metrics: the record of their steps, not yet cut back.
        step: the number of completed steps.
        known: what the supervisor knows of the last attempt: "cause" and "ended_at".
    """
    recorded = _recorded_steps(metrics)
    earlier = [attempt.copy() for attempt in attempts]
    if earlier and earlier[-1].get("end") is None:
        _close_lost(earlier[-1], recorded, known)
    # Before the record is cut back: later lines are needed to count what is lost.
    for attempt in earlier:
        if attempt["last_step"] > step:
            _drop_steps_after(attempt, recorded, step)
    begin = _moment(_process_start_s())
    new: Attempt = {"begin": begin, "ready": None, "end": None, "first_step": step, "last_step": step}
    return [*earlier, new]


def attempt_ready(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Records that the first step of the last attempt may begin."""
    *earlier, last = [attempt.copy() for attempt in attempts]
    # Of its own clock, as are the times of its lines in the record.
    last["ready"] = _moment(time.time())
    return [*earlier, last]


def end_attempt(attempts: Sequence[Attempt], metrics: Path, *, cause: str, on_request: bool = False) -> list[Attempt]:
    """Records that the last attempt ended by itself.

    Args:
        attempts: all attempts.
        metrics: the record of their steps.
        cause: why it ended.
        on_request: whether that was asked for. The time until the next attempt is then a pause.
    """
    *earlier, last = [attempt.copy() for attempt in attempts]
    _close(last, _recorded_steps(metrics), time.time(), cause)
    last["on_request"] = on_request
    return [*earlier, last]


def ettr(attempts: Sequence[Attempt]) -> float | None:
    """Returns the productive share of the time since the first start, without pauses.

    The time is that to now, or to the end of the last attempt.
    """
    if not attempts:
        return None
    running_s = _wall_s(attempts) - paused_s(attempts)
    if running_s <= 0:
        return None
    return _all_productive_s(attempts) / running_s


def paused_s(attempts: Sequence[Attempt]) -> float:
    """Returns the time between attempts that ended on request and the next ones."""
    # Only between attempts: what follows the last one is no pause yet.
    total_s = 0.0
    for attempt, following in itertools.pairwise(attempts):
        end = attempt["end"]
        if attempt.get("on_request") and end is not None:
            # Clocks of two machines differ: the next one may seem to begin earlier.
            total_s += max(seconds_of(following["begin"]) - seconds_of(end), 0.0)
    return round(total_s, 3)


def describe_losses(attempts: Sequence[Attempt]) -> str | None:
    """Returns one line for a run that has failed; None if each attempt so far ended on request, and lost nothing."""
    earlier = attempts[:-1]
    if all(attempt.get("on_request") for attempt in earlier):
        return None
    return describe_attempts(attempts)


def describe_attempts(attempts: Sequence[Attempt]) -> str:
    """Returns one line for a run of several attempts."""
    lost = sum(attempt.get("steps_lost", 0) for attempt in attempts)
    lost_time = duration(sum(attempt.get("seconds_lost", 0.0) for attempt in attempts))
    pause_s = paused_s(attempts)
    running = duration(_wall_s(attempts) - pause_s)
    productive = duration(_all_productive_s(attempts))
    attempts_text = counted(len(attempts), "attempt")
    lost_steps = counted(lost, f"step ({lost_time}) was lost", f"steps ({lost_time}) were lost")
    ratio = f"ETTR {ettr(attempts) or 0:.1%}"
    line = f"{ratio}: {productive} of steps that count in {running}, {attempts_text}; {lost_steps}"
    if pause_s == 0:
        return line
    return f"{line}; {clock_text(pause_s)} between stops on request and the next start are not counted"


def seconds_of(text: str) -> float:
    """Returns a time of run.json in seconds since 1970."""
    return datetime.datetime.fromisoformat(text).timestamp()


def _wall_s(attempts: Sequence[Attempt]) -> float:
    """Returns the time from the first start to now, or to the end of the last attempt."""
    end = attempts[-1]["end"]
    end_s = time.time() if end is None else seconds_of(end)
    return end_s - seconds_of(attempts[0]["begin"])


def _all_productive_s(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.get("productive_s", 0.0) for attempt in attempts)


def _close_lost(attempt: Attempt, recorded: Sequence[_RecordedStep], known: AttemptBefore) -> None:
    """Closes an attempt that did not record its end: the supervisor knows it, or it is that of the last line."""
    steps = _steps_of(attempt, recorded)
    end_s = seconds_of(attempt["ready"] or attempt["begin"])
    if steps:
        end_s = steps[-1].time_s
    # The later one: the supervisor waits some time before it regards a process as lost.
    known_end_s = float(known.get("ended_at", 0.0))
    _close(attempt, recorded, max(end_s, known_end_s), known.get("cause", "not known"))


def _close(attempt: Attempt, recorded: Sequence[_RecordedStep], end_s: float, cause: str) -> None:
    """Records how an attempt ended. The run has kept all its steps, as far as is known now."""
    steps = _steps_of(attempt, recorded)
    attempt["end"] = _moment(end_s)
    attempt["cause"] = cause
    attempt["last_step"] = steps[-1].step if steps else attempt["first_step"]
    attempt["productive_s"] = _productive_s(attempt, steps)
    # A later start may drop some: see `_drop_steps_after`.
    attempt["steps_lost"] = 0
    attempt["seconds_lost"] = 0.0


def _drop_steps_after(attempt: Attempt, recorded: Sequence[_RecordedStep], step: int) -> None:
    """Counts the later steps of the attempt as lost, as the run continues from an earlier one."""
    remaining = [line for line in _steps_of(attempt, recorded) if line.step <= step]
    # None of its steps may be left: then all of its time is lost.
    productive_s = _productive_s(attempt, remaining)
    last_step = max(step, attempt["first_step"])
    lost_s = attempt.get("productive_s", 0.0) - productive_s
    lost_steps = attempt["last_step"] - last_step
    # Added: an earlier restart may have lost some, too.
    attempt["seconds_lost"] = round(attempt.get("seconds_lost", 0.0) + lost_s, 3)
    attempt["steps_lost"] = attempt.get("steps_lost", 0) + lost_steps
    attempt["productive_s"] = productive_s
    attempt["last_step"] = last_step


def _productive_s(attempt: Attempt, steps: Sequence[_RecordedStep]) -> float:
    """Returns the time from the moment its first step may begin to the record of the last of these steps."""
    if not steps or attempt["ready"] is None:
        return 0.0
    return round(steps[-1].time_s - seconds_of(attempt["ready"]), 3)


def _steps_of(attempt: Attempt, recorded: Sequence[_RecordedStep]) -> list[_RecordedStep]:
    """Returns the lines written by an attempt."""
    begin_s = seconds_of(attempt["begin"])
    end_s = float("inf")
    if attempt["end"] is not None:
        end_s = seconds_of(attempt["end"]) + _CLOCK_S
    # By time first: an attempt that repeats steps writes lines with the numbers of an earlier one.
    return [line for line in recorded if begin_s <= line.time_s <= end_s and line.step >= attempt["first_step"]]


def _recorded_steps(metrics: Path) -> list[_RecordedStep]:
    steps = []
    try:
        for line in iterate_metrics(metrics):
            if is_number(line.get("time")):
                steps.append(_RecordedStep(line["time"], line["step"]))
    except (OSError, RunError):  # the next reader of the file reports the error
        return []
    return steps


def _process_start_s() -> float:
    """Returns when this process was started: the time to import JAX is a part of the start-up."""
    try:
        # After the name of the program, which may have spaces; the 20th of the rest is the start in ticks since boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return time.time()


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
