"""`fit` in measurable rounds: the time of an iteration, and its parts."""

from __future__ import annotations

import collections
import gc
import io
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import train

_LATE_S = 1e-3  # a batch that is not there so long after it was asked for was waited for
_SKIPPED = 6  # iterations at the start of a round: the pipeline fills


class Iterations:
    """Rounds of `fit`, with one loader and one set of trackers for all of them.

    Args:
        step: a `TrainStep`, or `Instant`.
        batches: an endless iterator of host batches.
        tracker: receives the scalars.
        meter: creates a meter for a round.
        num_steps: iterations in a round.

    Attributes:
        num_late: iterations in which the loop waited for the loader.
        num_iterations: all measured iterations.
    """

    def __init__(
        self,
        step: Any,
        batches: Generator[Any, None, None],
        *,
        tracker: train.Tracker,
        meter: Callable[[], train.Meter],
        num_steps: int,
    ) -> None:
        self._step, self._batches, self._meter, self._num_steps = step, batches, meter, num_steps
        self._tracker = _Timed(tracker)
        self._rounds_s: list[float] = []
        self.num_late = self.num_iterations = 0

    def __enter__(self) -> Iterations:
        self.round()  # the first one imports and compiles
        self._rounds_s, self._tracker.times_s = [], []
        self.num_late = self.num_iterations = 0
        return self

    def __exit__(self, *error: object) -> None:
        self._batches.close()
        self._tracker.close()

    def round(self) -> float:
        """Mean milliseconds of CPU time of an iteration, from one start of the step to the next."""
        late: list[bool] = []
        num_steps = self._num_steps + _SKIPPED
        if isinstance(self._step, Instant):
            self._step.prepare(num_steps)
        gc.collect()  # not the garbage of the others
        step: Any = _Clocked(self._step)
        train.fit(step, self._timed(late), num_steps=num_steps, tracker=self._tracker, meter=self._meter())
        self.num_late += sum(late[-self._num_steps :])  # later than the first ones, which all are asked for at once
        self.num_iterations += self._num_steps
        starts_s = step.starts_s[-self._num_steps - 1 :]
        self._rounds_s.append((starts_s[-1] - starts_s[0]) / self._num_steps)
        return self._rounds_s[-1] * 1e3

    def parts_us(self) -> dict[str, float]:
        """The parts of an iteration's CPU time, in microseconds."""
        whole_s, tracker_s = statistics.median(self._rounds_s), statistics.median(self._tracker.times_s)
        return {"trackers": tracker_s * 1e6, "batch and scalars": (whole_s - tracker_s) * 1e6}

    def _timed(self, late: list[bool]) -> Iterator[Any]:
        """The batches. Records whether the thread that copies them to the devices had to wait."""
        while True:
            wall_s = time.perf_counter()
            batch = next(self._batches)
            late.append(time.perf_counter() - wall_s > _LATE_S)
            yield batch


class _Clocked:
    """A step that records when it is called, in CPU time of the training thread."""

    def __init__(self, step: Any) -> None:
        self._step, self.mesh = step, step.mesh
        self.starts_s: list[float] = []

    def __call__(self, batch: Any) -> Any:
        self.starts_s.append(time.thread_time())
        return self._step(batch)


class Instant:
    """A step that returns at once: the rest of an iteration is the loop's own work.

    Args:
        mesh: the mesh of its scalars.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._scalars: collections.deque[Any] = collections.deque()

    def prepare(self, count: int) -> None:
        """Creates the scalars of the next calls: each is fetched from the devices once, as those of a real step."""
        everywhere, one = NamedSharding(self.mesh, PartitionSpec()), np.float32(1)
        self._scalars.clear()
        for _ in range(count):
            self._scalars.append({name: jax.device_put(one, everywhere) for name in ("loss", "grad_norm")})
        jax.block_until_ready(list(self._scalars))

    def __call__(self, batch: Any) -> Any:
        """The scalars, as returned by a `TrainStep`."""
        return self._scalars.popleft()


class Terminal(io.StringIO):
    """Makes `Progress` rewrite its line, as on a terminal."""

    def isatty(self) -> bool:
        """Claims to be a terminal."""
        return True


class _Timed:
    """A tracker, and the CPU time of its calls."""

    def __init__(self, tracker: train.Tracker) -> None:
        self._tracker = tracker
        self.times_s: list[float] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        start_s = time.thread_time()
        self._tracker.log(step, scalars)
        self.times_s.append(time.thread_time() - start_s)

    def close(self) -> None:
        self._tracker.close()
