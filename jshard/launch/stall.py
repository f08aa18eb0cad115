"""Stalls: a run without progress is reported, with the process that is behind and its position, and ends.

The loop reports its phase (`doing`) and the completed steps (`step_done`). A watch in its own thread checks whether
anything has changed within the deadline. In a run of a single process it reports and ends the process; otherwise it
informs the supervisor, which requests the positions of all processes and names the one that is behind.

All processes of a run pass the same marks in the same order. So the one that has passed the fewest is behind; among
equals one that is stopped, and then one whose main thread does not wait for others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jshard import _stacks
from jshard._files import write_text
from jshard.errors import RunError
from jshard.launch.cluster import RESUME, StopSignal, check_seconds, stopped_code, unsaved_text

DATA, STEP, EVALUATION, SAVE = "waiting for data", "in a step", "evaluating", "saving"
MEETING, OTHER = "meeting the others between two steps", "at work between two steps"
PROFILE, SAMPLE = "writing a profile", "writing the sample"
STARTING, COMPILING = "starting", "compiling"
_LONG, _SHORT = (SAVE, PROFILE, SAMPLE), (DATA, STEP, EVALUATION, MEETING, OTHER)
LEAST_S, MOST_S, MEDIANS = 60.0, 1800.0, 20
"""The limit of a step is this multiple of the median, within these bounds; that of a save is the upper bound."""
_WARN_S = 60.0
_NEEDED = 5  # steps, for a median
_TICK_S = 0.25
_STUCK_S = 1.0
_FRAMES, _TEXT = 4, 300
# Functions in which a main thread waits for the devices, for Orbax, or for a meeting of the processes.
_WAITS = ("/jax/_src/", "/jaxlib/", "/orbax/", "/tensorstore/", "jshard/_processes.py:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stand:
    """The position of a process in a stalled run.

    Args:
        phase: a description of its phase.
        marks: the number of marks passed.
        idle_s: seconds since the last one.
        deadline: a description of its limit, and the reason for it.
        state: the state of the process, if it does not run: "T (stopped)".
        waits: whether its main thread waits for other processes.
        place: the innermost frames, a line each; those of the data reader, if it waits for data.
        asked: whether it was asked to stop, and did not in time.
        folder: the folder of the stacks.
    """

    phase: str = "starting"
    marks: int = 0
    idle_s: float = 0.0
    deadline: str = ""
    state: str = ""
    waits: bool = False
    place: str = ""
    asked: bool = False
    folder: str = ""

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts the one that is behind to the front."""
        return self.state[:1].upper() != "T", self.marks, self.waits


def is_stuck(noted: Mapping[str, Any]) -> bool:
    """Whether a process whose peer is gone makes no progress between the marks of the loop, so waits for that peer."""
    return bool(noted.get("warn_s")) and noted.get("idle_s", 0.0) >= _STUCK_S


def stand(pid: int, noted: Mapping[str, Any], *, process: int, step: int | None) -> Stand:
    """The position of a process of this machine, from the notes of its watch; its stacks go into a file."""
    phase = str(noted.get("phase", "starting"))
    main, *others = [(one, _stacks.stacks(one)) for one in (pid, *_stacks.children(pid))]
    workers = [(worker, one) for worker, one in others if one is not None]
    own = main[1]
    place = () if own is None else own.main[:_FRAMES]
    if phase == DATA:
        place = _place_of_data(own, workers) or place
    folder = str(noted.get("stalls") or "")
    if folder:
        name = f"step-{step or 0}-process-{process}.txt"
        text = "\n".join(f"{one.name}, {phase}\n{one.text}" for one in (own, *(one for _, one in workers)) if one)
        with contextlib.suppress(OSError):  # a full disk: the report has the important place
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_text(Path(folder, name), text)
    return Stand(
        phase=phase,
        marks=int(noted.get("marks", 0)),
        idle_s=float(noted.get("idle_s", 0.0)),
        deadline=str(noted.get("deadline", "")),
        state=_stacks.state(pid),
        waits=bool(place) and any(words in place[0] for words in _WAITS),
        place="\n".join(line[-_TEXT:] for line in place),
        asked=noted.get("stalled") == "asked",
        folder=folder,
    )


def _place_of_data(main: _stacks.Stacks | None, workers: list[tuple[int, _stacks.Stacks]]) -> tuple[str, ...]:
    """The place that delays the data: a worker process that is stopped or reads a sample, or a thread."""
    for pid, one in workers:
        stopped = _stacks.state(pid)
        if stopped[:1] == "T" or (one.main and "multiprocessing/connection.py" not in one.main[0]):
            return f"{one.name} (pid {pid}){f', {stopped}' if stopped else ''}", *one.main[:_FRAMES]
    for frames in () if main is None else main.others:
        if any("jshard/data/" in line for line in frames):
            return frames[:_FRAMES]
    return ()


def stalled_error(one: Stand, *, who: str, what: str, lines: list[str], others: str, again: str) -> RunError:
    """The error of a run that is stalled, or did not stop in time, with the position of the process that is behind."""
    phase = f"{one.phase}{f', {one.state}' if one.state else ''}"
    ended = (
        f"It was asked to stop, and did not within {one.deadline}"
        if one.asked
        else (f"no progress for {one.idle_s:.0f} s; allowed: {one.deadline}")
    )
    kept = f"\nthe stacks of all processes: {one.folder}" if one.folder else ""
    return RunError(
        f"{what} did not stop in time: {phase}." if one.asked else f"{what} is stalled: {phase}.",
        where=[who, *one.place.splitlines(), *lines],
        why=f"{ended}.{others}{kept}",
        do=again,
    )


class StallWatch:
    """Watches the progress of this process's part of a run.

    Args:
        timeout_s: the limit for a step, a batch, or a batch of an evaluation; by default 20 times the median step, from
            60 to 1800 seconds. Saves, profiles, the sample and the first step have 1800 seconds, or this if it is
            longer. While a run starts, initialises, restores or compiles, there is no limit.
        stop_s: the limit for stopping after a request; none by default.
        again: the command line that continues the run.

    Raises:
        ShardingError: a time-out is not a positive number.
    """

    def __init__(self, *, timeout_s: float | None = None, stop_s: float | None = None, again: str = "") -> None:
        for option, value in (("--stall-timeout", timeout_s), ("--stop-deadline", stop_s)):
            if value is not None:
                check_seconds(option, value, usual=600)
        self.timeout_s, self.stop_s = timeout_s, stop_s
        self.phase, self.marks, self.step = STARTING, 0, 0
        self._stop = StopSignal()
        self._say: Callable[[str], object] = lambda line: None
        self._alone: Callable[[], str] | None = None
        self._again, self._folder = again, ""
        self._idle_s, self._warned_s, self._stalled = 0.0, 0.0, ""
        self._spans: collections.deque[float] = collections.deque(maxlen=101)
        self._median_s: float | None = None  # of the steps, once there are enough; the watch's thread computes it
        self._done_at = 0.0
        self._over = threading.Event()

    @contextlib.contextmanager
    def over(
        self,
        folder: Path,
        *,
        stop: StopSignal,
        alone: Callable[[], str] | None,
        say: Callable[[str], object],
    ) -> Iterator[None]:
        """Watches while the context is open.

        Args:
            folder: for the stacks of a stall; created when one occurs.
            stop: the signals that ask the run to stop.
            alone: for a process without supervisor, which ends itself: returns a description of what is saved. None
                for the others.
            say: prints the line of a run without progress.
        """
        global _watch
        self._folder = str(folder)
        self._stop = stop
        self._alone = alone
        self._say = say
        _stacks.ready("the run")
        _watch, before = self, _watch
        thread = threading.Thread(target=self._run, daemon=True, name="jshard-stall")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(1.0)
            _watch = before

    def doing(self, phase: str) -> None:
        """A mark: the main thread enters this phase."""
        self.phase = phase
        self.marks += 1

    def step_done(self, step: int) -> None:
        """A step's result was read."""
        now_s = time.monotonic()
        if self._done_at:
            self._spans.append(now_s - self._done_at)
        self._done_at, self.step = now_s, step

    def deadline(self) -> tuple[float | None, str]:
        """The limit of the phase, None without one; and a description of it."""
        if self.phase not in (*_LONG, *_SHORT):
            return None, ""
        if self.phase in _LONG or not self._done_at:  # before the first step other processes may still compile
            limit_s, why = max(self.timeout_s or 0.0, MOST_S), ""
        elif self.timeout_s is not None:
            limit_s, why = self.timeout_s, " (--stall-timeout)"
        elif self._median_s is None:
            limit_s, why = MOST_S, f" (fewer than {_NEEDED} steps are measured)"
        else:
            limit_s = max(LEAST_S, min(MOST_S, MEDIANS * self._median_s))
            why = f" ({MEDIANS} x the median step of {self._median_s:.3g} s, from {LEAST_S:.0f} to {MOST_S:.0f} s)"
        return limit_s, f"{limit_s:.0f} s{why}"

    def noted(self) -> dict[str, Any]:
        """The notes for the supervisor."""
        deadline_s, why = self.deadline()
        found: dict[str, Any] = {
            "phase": self.phase,
            "marks": self.marks,
            "idle_s": round(self._idle_s, 1),
            "stalls": self._folder,
            "warn_s": None if deadline_s is None else min(_WARN_S, deadline_s / 4),
        }
        if self._stalled:
            asked = f"{self.stop_s or 0.0:.0f} s (--stop-deadline)"
            found |= {"stalled": self._stalled, "deadline": asked if self._stalled == "asked" else why}
        return found

    def _run(self) -> None:
        seen, last_s = self.marks, time.monotonic()
        while not self._over.wait(_TICK_S):
            now_s = time.monotonic()
            # Not the clock: time in which this thread did not run either, as in a stopped process, is not a stall.
            passed_s, last_s = min(now_s - last_s, 4 * _TICK_S), now_s
            self._idle_s = self._idle_s + passed_s if self.marks == seen else 0.0
            seen = self.marks
            self._measure()
            self._look(now_s)

    def _measure(self) -> None:
        spans = list(self._spans)
        self._median_s = statistics.median(spans) if len(spans) >= _NEEDED else None

    def _look(self, now_s: float) -> None:
        deadline_s, _ = self.deadline()
        asked_s = self._stop.asked_s()
        if self._stop.asked_by is not None:
            self._end_unless_needed(self._stop.asked_by)
        if self.stop_s is not None and asked_s is not None and now_s - asked_s > self.stop_s:
            self._stalled = "asked"
        elif deadline_s is not None and self._idle_s > deadline_s:
            self._stalled = "stalled"
        else:
            self._stalled = ""
        if self._alone is None:  # the next sign of life reports it to the supervisor
            return
        if self._stalled:
            self._end_alone(self._alone())
        elif deadline_s is not None:
            self._warned_s = warn(self._idle_s, self._warned_s, min(_WARN_S, deadline_s / 4), self.phase, self._say)

    @property
    def _is_preparing(self) -> bool:
        """Whether this start of the run has nothing to save, and the main thread may not hear a signal for minutes."""
        return not self._done_at and (self.phase == STARTING or self.phase.startswith(COMPILING))

    def _end_unless_needed(self, asked_by: signal.Signals) -> None:
        """Ends a run that was asked to stop and has nothing to save, or was asked twice."""
        if self._stop.is_insisted and self._alone is not None:
            _end_now(unsaved_text(asked_by), code=128 + asked_by)
        # All processes of one machine get the signal. In a cluster it may be only one, and they stop together.
        is_for_all = self._alone is not None or os.environ.get("JSHARD_CLUSTER") == "local"
        if self._is_preparing and is_for_all:
            again = self._again or "the same command with --resume"
            text = f"\n{asked_by.name} while {self.phase}: nothing is trained yet, and the run ends at once.\n"
            _end_now(f"{text}continue it with: {again}\n", code=stopped_code(asked_by))

    def _end_alone(self, kept: str) -> None:
        one = stand(os.getpid(), self.noted(), process=0, step=self.step)
        error = stalled_error(
            one,
            who=f"pid {os.getpid()}",
            what="The run",
            lines=[f"last step: {self.step}", kept],
            others="",
            again=self._again or "the same command with --resume",
        )
        _end_now(f"\n{type(error).__name__}: {error}\n", code=RESUME)


def _end_now(text: str, *, code: int) -> NoReturn:
    """Ends this process, whatever its main thread does."""
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        sys.stderr.write(text)
        sys.stderr.flush()
    for worker in multiprocessing.active_children():  # a sleeping one would not notice that this process is gone
        worker.kill()
    os._exit(code)


def warn(idle_s: float, warned_s: float, first_s: float, where: str, say: Callable[[str], object]) -> float:
    """Reports the time without a step: first, and whenever it has doubled. Returns the time of the last line."""
    if idle_s < first_s:
        return 0.0
    if idle_s < 2 * warned_s:
        return warned_s
    say(f"no step for {idle_s:.0f} s: {where}")
    return idle_s


_watch: StallWatch | None = None


def doing(phase: str) -> None:
    """Reports the new phase of the main thread; has no effect without a watch."""
    if _watch is not None:
        _watch.doing(phase)


def step_done(step: int) -> None:
    """Reports that a step's result was read; has no effect without a watch."""
    if _watch is not None:
        _watch.step_done(step)


def noted() -> dict[str, Any]:
    """The notes of this process's watch for the supervisor."""
    return {"warn_s": None} if _watch is None else _watch.noted()
