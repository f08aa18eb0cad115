"""What the processes of a run agree on between two steps: whether one was asked to stop, and which is the slowest."""

from __future__ import annotations

import collections
import contextlib
import math
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from jshard._processes import exchange
from jshard.plans.mesh import num_processes

_ASK_EVERY_S, _ASK_SHARE = 0.1, 0.1
_MEETINGS = 15  # that the slowest process is found from
_SLOW_S, _SLOW_SHARE = 0.001, 0.05  # of a step: less than both names nobody


class Agreement:
    """Whether any process was asked to stop, known to all after the same step: the save is the work of all.

    A signal reaches the processes at different times, or only one of them. So they ask one another, every 0.1 s or as
    seldom as keeps it below a tenth of the time, and wherever the devices are idle anyway. After how many steps follows
    from what all of them said the last time, and is the same for all.

    At the same meetings they find the slowest of them: the one that comes last, or waits longest for data or a save.

    Args:
        mesh: the devices of all processes.

    Attributes:
        alone: whether there is one process, which has nobody to ask.
        slowest: of the slowest process "slow_process", and by how much it is slower than the fastest, per step: in
            all "slow_s"; waiting for batches "slow_data_s" and saves "slow_save_s"; coming to meetings "slow_step_s".
            Empty while none is slower by a twentieth of a step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.alone = num_processes(mesh) == 1
        self._last: tuple[int, float] | None = None  # step and time
        self._took_s = 0.0
        self._due = 0
        self._meetings: collections.deque[np.ndarray] = collections.deque(maxlen=_MEETINGS)
        self._spent_s = {"data": 0.0, "save": 0.0}  # since the last meeting
        self.slowest = dict[str, float]()

    def begin(self) -> None:
        """Waits for all before the first step: they may still compile, and gloo's first meeting fails after 30 s."""
        if not self.alone:
            exchange("first step", None)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time of a block as one in which the main thread waits for "data" or a "save"."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[what] += time.perf_counter() - begin_s

    def asked(self, received: signal.Signals | None, step: int, *, is_idle: bool = False) -> signal.Signals | None:
        """The signal that ends the run after a step. All processes call it after each step."""
        if self.alone or (step < self._due and not is_idle):
            return received if self.alone else None
        begin_s, step_s = time.monotonic(), math.inf
        steps = 0 if self._last is None else step - self._last[0]
        if self._last is not None and steps > 0:
            step_s = max(1e-6, begin_s - self._last[1]) / steps
        said = [received or 0, step_s, self._took_s, *self._spent_s.values()]
        numbers, steps_s, took_s, *waits_s = zip(*exchange("stop", said), strict=True)
        if steps > 0:
            self._compare([*(np.array(waits_s) / steps), max(took_s) - np.array(took_s)], max(steps_s))
        self._spent_s = dict.fromkeys(self._spent_s, 0.0)
        self._last, self._took_s = (step, time.monotonic()), time.monotonic() - begin_s
        # Who came last to the meeting has waited least: that time is what it costs.
        self._due = step + max(1, int(max(_ASK_EVERY_S, min(took_s) / _ASK_SHARE) / max(steps_s)))
        return signal.Signals(max(numbers)) if any(numbers) else None

    def _compare(self, parts_s: Sequence[np.ndarray], step_s: float) -> None:
        """Finds the slowest: of what each has waited for data and saves per step, and how late it came to meetings."""
        self._meetings.append(np.array(parts_s))
        seen = np.array(self._meetings)
        late_s = np.median(seen[:, 2], axis=0)  # one that is late once is not slow
        data_s, save_s = (each - each.min() for each in seen[:, :2].mean(axis=0))
        process = int(np.argmax(np.max([data_s, save_s, late_s], axis=0)))
        parts = {"data": data_s[process], "save": save_s[process], "step": late_s[process]}
        slow_s = float(max(parts.values()))
        self.slowest = {}
        if slow_s > max(_SLOW_S, _SLOW_SHARE * step_s):
            self.slowest = {"slow_process": process, "slow_s": slow_s}
            self.slowest |= {f"slow_{part}_s": float(each_s) for part, each_s in parts.items()}
