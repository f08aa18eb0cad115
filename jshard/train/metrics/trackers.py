"""The interface of what records a run, and several of them as one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol


class Tracker(Protocol):
    """Takes the scalars of a run. One process of the run has trackers, the others have none.

    Example:
        >>> class Prints:
        ...     def log(self, step, scalars):
        ...         print(step, dict(scalars))
        ...
        ...     def close(self):
        ...         pass
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the scalars of a step that is done, or of the evaluation after it.

        Args:
            step: steps that are done.
            scalars: by name; of a step at least "loss" and "grad_norm", of an evaluation "val_loss".
        """
        ...

    def close(self) -> None:
        """Ends the record; called once, also when the run fails."""
        ...


class Trackers:
    """Several trackers as one.

    Args:
        *needed: trackers without which the run must not go on, as its own record.
        optional: trackers that are left out once they fail, as a service on the network: the run goes on.
        warn: is told, once, of each that is left out.

    Example:
        >>> trackers = Trackers(Jsonl(out / "metrics.jsonl"), optional=[TensorBoard(out / "tensorboard")])
    """

    def __init__(
        self,
        *needed: Tracker,
        optional: Iterable[Tracker] = (),
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._needed, self._optional, self._warn = needed, list(optional), warn

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tells every tracker."""
        for tracker in self._needed:
            tracker.log(step, scalars)
        for tracker in tuple(self._optional):
            try:
                tracker.log(step, scalars)
            except Exception as error:
                self._optional.remove(tracker)
                self._warn(f"{_failure(tracker, error)} It is left out from step {step} on; the run goes on.")

    def close(self) -> None:
        """Closes every tracker, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for tracker in reversed(self._needed):
                stack.callback(tracker.close)
            while self._optional:
                tracker = self._optional.pop(0)
                try:
                    tracker.close()
                except Exception as error:
                    self._warn(f"{_failure(tracker, error)} Its last steps may be missing there.")


def _failure(tracker: Tracker, error: Exception) -> str:
    return f"{type(tracker).__name__} failed ({type(error).__name__}: {error})."
