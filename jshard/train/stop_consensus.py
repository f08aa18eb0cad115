"""How the processes of a run agree to stop after the same step, and which of them is the slowest.

All must stop after the same step, because all take part in the save. But a signal reaches them at different times, or
only one of them. So after some steps they meet: each says whether it was asked to stop, and how it spent its time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from jshard._processes import exchange
from jshard.plans.mesh import num_processes

_MEET_EVERY_S = 0.1
_MEETING_SHARE = 0.1  # of the time of a run, at most, is spent in meetings
_COMPARED_MEETINGS = 15
_SLOW_S = 0.001
_SLOW_SHARE = 0.05  # of a step: below both no process is named


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MeetingReport:
    """What a process says at a meeting.

    Attributes:
        signal: the number of the signal that it received; 0 for none.
        step_s: seconds per step since the last meeting; infinite at the first one.
        meeting_s: how long the last meeting took this process.
        data_s: how long it has waited for batches since then.
        save_s: how long it has waited for saves since then.
    """

    signal: int
    step_s: float
    meeting_s: float
    data_s: float
    save_s: float


@dataclasses.dataclass(frozen=True)
class _LastMeeting:
    """The last meeting: after which step it was, and when it ended."""

    step: int
    end_s: float


class StopConsensus:
    """Decides for all processes whether the run stops after a step.

    The processes meet every 0.1 s, or as rarely as keeps this below a tenth of the time, and whenever the devices are
    idle anyway. The number of steps until the next meeting follows from what was exchanged at the last one. So it is
    the same for all, and none waits for a meeting to which the others do not come.

    At these meetings they also find the slowest process: the last to arrive, or the longest to wait for data or a save.

    Args:
        mesh: the devices of all processes.

    Attributes:
        alone: whether there is only one process.
        slowest: the number of the slowest process, "slow_process", and by how much it is slower than the fastest, per
            step: in total "slow_s"; waiting for batches "slow_data_s" and saves "slow_save_s"; reaching meetings
            "slow_step_s". Empty while none is slower by a twentieth of a step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.alone = num_processes(mesh) == 1
        self.slowest: dict[str, float] = {}
        self._last_meeting: _LastMeeting | None = None
        self._meeting_s = 0.0
        self._next_meeting_step = 0
        self._waited_s = {"data": 0.0, "save": 0.0}  # since the last meeting
        # Per meeting the delays of each process: a row each for data, saves and lateness.
        self._delays: collections.deque[np.ndarray] = collections.deque(maxlen=_COMPARED_MEETINGS)

    def wait_for_all(self) -> None:
        """Waits for all before the first step: they may be compiling, and gloo's first collective fails after 30 s."""
        if not self.alone:
            exchange("first step", None)

    @contextlib.contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Counts the block's time as waiting of the main thread for "data" or a "save"."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s[kind] += time.perf_counter() - begin_s

    def agreed_signal(
        self, received: signal.Signals | None, step: int, *, is_idle: bool = False
    ) -> signal.Signals | None:
        """Returns the signal that ends the run after a step; None if it continues.

        All processes call it after each step.

        Args:
            received: the signal that this process has received.
            step: the number of completed steps.
            is_idle: whether the devices are idle after this step, in all processes.
        """
        if self.alone:
            return received
        if step < self._next_meeting_step and not is_idle:
            return None
        reports, steps = self._meet(received, step)
        # All compute with the slowest: with a time of its own each would choose another step for the next meeting.
        slowest_step_s = max(report.step_s for report in reports)
        if steps > 0:  # else there is no time of a step to compare with: twice after one step, or the first meeting
            self._compare(reports, steps, slowest_step_s)
        self._next_meeting_step = step + _steps_to_next_meeting(reports, slowest_step_s)
        # Of several signals all take the same; 0 if none was received.
        number = max(report.signal for report in reports)
        if number == 0:
            return None
        return signal.Signals(number)

    def _meet(self, received: signal.Signals | None, step: int) -> tuple[list[_MeetingReport], int]:
        """Exchanges reports; returns those of all, and the number of steps since the last meeting."""
        begin_s = time.monotonic()
        steps = 0
        step_s = math.inf
        if self._last_meeting is not None:
            steps = step - self._last_meeting.step
            if steps > 0:
                # At least a microsecond: the number of steps to the next meeting is divided by it.
                step_s = max(1e-6, begin_s - self._last_meeting.end_s) / steps
        report = _MeetingReport(
            signal=received or 0,
            step_s=step_s,
            meeting_s=self._meeting_s,
            data_s=self._waited_s["data"],
            save_s=self._waited_s["save"],
        )
        values = exchange("stop", list(dataclasses.astuple(report)))
        names = [field.name for field in dataclasses.fields(_MeetingReport)]
        reports = [_MeetingReport(**dict(zip(names, each, strict=True))) for each in values]
        # What was reported is not reported again.
        self._waited_s = {"data": 0.0, "save": 0.0}
        end_s = time.monotonic()
        self._last_meeting = _LastMeeting(step, end_s)
        self._meeting_s = end_s - begin_s
        return reports, steps

    def _compare(self, reports: Sequence[_MeetingReport], steps: int, step_s: float) -> None:
        """Finds the slowest, by each process's waits for data and saves per step, and its lateness at meetings."""
        meeting_s = np.array([report.meeting_s for report in reports])
        data_s = np.array([report.data_s for report in reports]) / steps
        save_s = np.array([report.save_s for report in reports]) / steps
        # Who comes last waits least for the others.
        late_s = meeting_s.max() - meeting_s
        self._delays.append(np.array([data_s, save_s, late_s]))
        delays = np.array(self._delays)
        # The mean of waits, as a rare long one is a cost, too.
        data_s, save_s = delays[:, :2].mean(axis=0)
        delay_s = {
            "data": data_s - data_s.min(),
            "save": save_s - save_s.min(),
            "step": np.median(delays[:, 2], axis=0),  # being late once is not slow
        }
        process = int(np.argmax(np.max(list(delay_s.values()), axis=0)))
        slow_s = float(max(each_s[process] for each_s in delay_s.values()))
        if slow_s <= max(_SLOW_S, _SLOW_SHARE * step_s):
            self.slowest = {}
            return
        self.slowest = {"slow_process": process, "slow_s": slow_s}
        for kind, each_s in delay_s.items():
            self.slowest[f"slow_{kind}_s"] = float(each_s[process])


def _steps_to_next_meeting(reports: Sequence[_MeetingReport], step_s: float) -> int:
    """Returns the same number in all processes, as it depends only on what all have received."""
    # The last to arrive at a meeting waits least: that time is the cost of the meeting itself.
    cost_s = min(report.meeting_s for report in reports)
    interval_s = max(_MEET_EVERY_S, cost_s / _MEETING_SHARE)
    return max(1, int(interval_s / step_s))
