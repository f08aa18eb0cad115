"""How fast a run is: the time of a step, with evaluations and checkpoints left out."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable


class Speed:
    """Measures steps from one completion to the next.

    The first completion starts the clock: the step before it compiled.

    Args:
        window: steps that the shown time is averaged over.
        clock: gives seconds.

    Attributes:
        last_s: seconds of the last step alone; None before the second one, and where `done` skipped steps.

    Example:
        >>> speed = Speed()
        >>> for step, batch in enumerate(batches, start=1):
        ...     train_step(batch).block_until_ready()
        ...     speed.done(step)
        >>> speed.step_s
        0.131
    """

    def __init__(self, window: int = 50, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self._since: tuple[float, int] | None = None
        self.last_s: float | None = None

    def done(self, step: int) -> None:
        """Notes that this step, and all before it, have just come to their end."""
        now_s = self._clock()
        if self._since is not None and step > self._since[1]:
            took_s, steps = now_s - self._since[0], step - self._since[1]
            self._spans.append((took_s, steps))
            self.last_s = took_s if steps == 1 else None
        self._since = now_s, step

    def pause(self) -> None:
        """Leaves out the time since the last `done`. Call it after what is no step: an evaluation, a checkpoint."""
        if self._since is not None:
            self._since = self._clock(), self._since[1]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the last steps; None before the second one."""
        if not self._spans:
            return None
        return sum(took_s for took_s, _ in self._spans) / sum(steps for _, steps in self._spans)
