"""Stalls: a run without progress is reported, with the process that is behind and its status, and ends.

The loop reports its phase (`set_phase`) and the completed steps (`step_done`). A watch in its own thread checks whether
anything has changed within the deadline. In a run of a single process it reports and ends the process; otherwise it
informs the supervisor, which requests the status of all processes and names the one that is behind.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from jshard import _stacks
from jshard.launch import phases
from jshard.launch.cluster import RESUME, check_seconds, stopped_code
from jshard.launch.process_status import WorkerState, process_status, stalled_error
from jshard.launch.stop_signal import StopSignal, unsaved_text

LEAST_S = 60.0
MOST_S = 1800.0
MEDIANS = 20
"""The limit of a step is this multiple of the median, within these bounds; that of a save is the upper bound."""
_WARN_S = 60.0  # without progress until a line says so, at most
_STEPS_FOR_MEDIAN = 5
_MEASURED_STEPS = 101
_TICK_S = 0.25


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The limit of a phase.

    Attributes:
        limit_s: None: the phase may take any time.
        text: a description of the limit, and the reason for it.
    """

    limit_s: float | None
    text: str = ""

    @property
    def warn_s(self) -> float | None:
        """Returns the time without progress after which a line is printed; None without a limit."""
        if self.limit_s is None:
            return None
        return min(_WARN_S, self.limit_s / 4)


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
        self.timeout_s = timeout_s
        self.stop_s = stop_s
        self._again = again or "the same command with --resume"
        # Written by the main thread, read by that of the watch.
        self.phase = phases.STARTING
        self.marks = 0
        self.step = 0
        self._step_done_s: float | None = None
        self._step_times_s: collections.deque[float] = collections.deque(maxlen=_MEASURED_STEPS)
        # Written by the thread of the watch.
        self._idle_s = 0.0
        self._warned_s = 0.0
        self._stalled = ""  # "stalled", or "asked" if it was asked to stop
        self._median_s: float | None = None  # of the steps, once there are enough
        # Set by `over`.
        self._stop = StopSignal()
        self._folder = ""
        self._say: Callable[[str], object] = lambda line: None
        self._describe_saved: Callable[[], str] | None = None
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def over(
        self,
        folder: Path,
        *,
        stop: StopSignal,
        describe_saved: Callable[[], str] | None,
        say: Callable[[str], object],
    ) -> Iterator[None]:
        """Watches while the context is open.

        Args:
            folder: for the stacks of a stall; created when one occurs.
            stop: the signals that ask the run to stop.
            describe_saved: for a process without supervisor, which ends itself: describes what is saved. None for the
                others.
            say: prints the line of a run without progress.
        """
        global _watch
        self._folder = str(folder)
        self._stop = stop
        self._describe_saved = describe_saved
        # Only they know it, and the main thread may be the first to hear of a signal.
        stop.ends_at_once = self._ends_at_once
        stop.describe_saved = describe_saved
        self._say = say
        _stacks.ready("the run")
        outer_watch = _watch
        _watch = self
        thread = threading.Thread(target=self._run, daemon=True, name="jshard-stall")
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            # Not for long: it may be writing stacks, or waiting for a disk that hangs.
            thread.join(1.0)
            _watch = outer_watch

    def set_phase(self, phase: str) -> None:
        """Passes a mark: the main thread enters this phase."""
        self.phase = phase
        self.marks += 1

    def step_done(self, step: int) -> None:
        """Records that a step's result was read."""
        now_s = time.monotonic()
        # From one result to the next: the first one has none before it.
        if self._step_done_s is not None:
            self._step_times_s.append(now_s - self._step_done_s)
        self._step_done_s = now_s
        self.step = step

    def deadline(self) -> Deadline:
        """Returns the limit of the phase."""
        if self.phase in phases.LONG:
            return self._long_deadline()
        if self.phase not in phases.SHORT:
            return Deadline(None)
        if self._step_done_s is None:  # before the first step other processes may still compile
            return self._long_deadline()
        if self.timeout_s is not None:
            return Deadline(self.timeout_s, f"{self.timeout_s:.0f} s (--stall-timeout)")
        if self._median_s is None:
            return Deadline(MOST_S, f"{MOST_S:.0f} s (fewer than {_STEPS_FOR_MEDIAN} steps are measured)")
        limit_s = max(LEAST_S, min(MOST_S, MEDIANS * self._median_s))
        reason = f"{MEDIANS} x the median step of {self._median_s:.3g} s, from {LEAST_S:.0f} to {MOST_S:.0f} s"
        return Deadline(limit_s, f"{limit_s:.0f} s ({reason})")

    def _long_deadline(self) -> Deadline:
        limit_s = max(self.timeout_s or 0.0, MOST_S)
        return Deadline(limit_s, f"{limit_s:.0f} s")

    def state(self) -> WorkerState:
        """Returns what the supervisor is informed of."""
        deadline = self.deadline()
        state: WorkerState = {
            "phase": self.phase,
            "marks": self.marks,
            "idle_s": round(self._idle_s, 1),
            "stalls": self._folder,
            "warn_s": deadline.warn_s,
        }
        if self._stalled:
            state["stalled"] = self._stalled
            state["deadline"] = deadline.text
        if self._stalled == "asked":
            state["deadline"] = f"{self.stop_s or 0.0:.0f} s (--stop-deadline)"
        return state

    def _run(self) -> None:
        seen_marks = self.marks
        last_s = time.monotonic()
        while not self._is_over.wait(_TICK_S):
            now_s = time.monotonic()
            # Not the clock: time in which this thread did not run either, as in a stopped process, is not a stall.
            passed_s = min(now_s - last_s, 4 * _TICK_S)
            last_s = now_s
            if self.marks == seen_marks:
                self._idle_s += passed_s
            else:
                self._idle_s = 0.0
            seen_marks = self.marks
            self._measure()
            self._look(now_s)

    def _measure(self) -> None:
        # A copy: the main thread may append meanwhile, and `median` would raise.
        step_times_s = list(self._step_times_s)
        self._median_s = None
        if len(step_times_s) >= _STEPS_FOR_MEDIAN:
            self._median_s = statistics.median(step_times_s)

    def _look(self, now_s: float) -> None:
        """Ends the run if it is stalled, or does not stop in time."""
        stop_requested_at_s = self._stop.stop_requested_at_s()
        if self._stop.requested_by is not None:
            self._end_unless_needed(self._stop.requested_by)
        deadline = self.deadline()
        self._stalled = self._is_stalled(now_s, stop_requested_at_s, deadline)
        if self._describe_saved is None:  # the next sign of life reports it to the supervisor
            return
        if self._stalled:
            self._end_alone(self._describe_saved())
        elif deadline.warn_s is not None:
            self._warned_s = warn(self._idle_s, self._warned_s, deadline.warn_s, self.phase, self._say)

    def _is_stalled(self, now_s: float, stop_requested_at_s: float | None, deadline: Deadline) -> str:
        """Returns "asked" if the run does not stop in time, "stalled" if it makes no progress, and else ""."""
        if stop_requested_at_s is not None:
            waited_s = now_s - stop_requested_at_s
            if self.stop_s is not None and waited_s > self.stop_s:
                return "asked"
        if deadline.limit_s is not None and self._idle_s > deadline.limit_s:
            return "stalled"
        return ""

    @property
    def _is_preparing(self) -> bool:
        """Returns whether this start has nothing to save, and the main thread may not hear a signal for minutes."""
        is_before_steps = self.phase == phases.STARTING or self.phase.startswith(phases.COMPILING)
        return self._step_done_s is None and is_before_steps

    def _ends_at_once(self) -> bool:
        """Returns whether a signal ends the run, as it has nothing to save."""
        # All processes of one machine get the signal. In a cluster it may be only one, and they stop together.
        is_for_all = self._describe_saved is not None or os.environ.get("JSHARD_CLUSTER") == "local"
        return self._is_preparing and is_for_all

    def _end_unless_needed(self, requested_by: signal.Signals) -> None:
        """Ends a run that was asked to stop and has nothing to save, or was asked twice."""
        is_alone = self._describe_saved is not None
        if self._stop.is_insisted and is_alone:
            _end_now(unsaved_text(requested_by, self._describe_saved), code=128 + requested_by)
        if self._ends_at_once():
            reason = f"{requested_by.name} while {self.phase}: nothing is trained yet, and the run ends at once."
            _end_now(f"\n{reason}\ncontinue it with: {self._again}\n", code=stopped_code(requested_by))

    def _end_alone(self, saved: str) -> None:
        error = stalled_error(
            process_status(os.getpid(), self.state(), process=0, step=self.step),
            who=f"pid {os.getpid()}",
            what="The run",
            lines=[f"last step: {self.step}", saved],
            others="",
            again=self._again,
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
    # There was progress since: the next line comes after `first_s` again.
    if idle_s < first_s:
        return 0.0
    if idle_s < 2 * warned_s:
        return warned_s
    say(f"no step for {idle_s:.0f} s: {where}")
    return idle_s


_watch: StallWatch | None = None


def set_phase(phase: str) -> None:
    """Reports the new phase of the main thread; has no effect without a watch."""
    if _watch is not None:
        _watch.set_phase(phase)


def step_done(step: int) -> None:
    """Reports that a step's result was read; has no effect without a watch."""
    if _watch is not None:
        _watch.step_done(step)


def state_of_watch() -> WorkerState:
    """Returns what this process's watch reports to the supervisor."""
    if _watch is None:
        return {"warn_s": None}
    return _watch.state()
