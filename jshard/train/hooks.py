"""Hooks: what `fit` does between two steps, such as an evaluation or a checkpoint.

`fit` runs the hooks that are due in the order in which they are listed. List the evaluation before the checkpoint: a
run that continues from that checkpoint then finds the evaluation in its record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from jshard.launch import phases


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeriodicHook:
    """Runs an action after every so many steps, and after the last one.

    The devices are idle meanwhile, and the time is not counted as that of a step. A subclass with a schedule of its own
    overrides `is_due`.

    Attributes:
        every: the interval in steps; None: only after the last step.
        run: the action; receives the number of completed steps.
        check: called after every step; raises errors that have occurred since.

    Example:
        >>> hook = PeriodicHook(every=100, run=lambda step: print(f"{step} steps are done"))
        >>> js.train.fit(step, loader.train(1000), num_steps=1000, hooks=[hook])
    """

    phase: ClassVar[str] = phases.OTHER
    """The phase of the run meanwhile, which decides how long the run may take; see `launch.StallWatch`."""
    runs_at_stop: ClassVar[bool] = False
    """Whether it runs when a stop is requested, due or not, and before all others."""
    is_part_of_step: ClassVar[bool] = False
    """Whether it is short and frequent: its time is counted as that of a step, and it does not run at a stop."""

    every: int | None
    run: Callable[[int], object]
    check: Callable[[], object] = _nothing

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether it runs after this step of a run that ends after step `last`."""
        if step == last:  # whatever the interval: the end of a run is evaluated and saved
            return True
        return self.every is not None and step % self.every == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationHook(PeriodicHook):
    """Evaluates, and passes the result to the tracker under names that begin with "val_".

    Attributes:
        run: returns scalars by name, with a "loss", as `evaluate` does.
        until: receives the step and these scalars under the names of the record, and returns why the run ends now, or
            None: see `EarlyStopping`. With several processes, the results of the first one count.
    """

    phase: ClassVar[str] = phases.EVALUATION

    run: Callable[[int], Mapping[str, float]]
    until: Callable[[int, Mapping[str, float]], str | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointHook(PeriodicHook):
    """Saves the state. Also runs when a stop is requested, and in a single process when reading data fails.

    Attributes:
        run: saves, or begins to.
    """

    phase: ClassVar[str] = phases.SAVE
    runs_at_stop: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestCheckpointHook(PeriodicHook):
    """Saves the state after an evaluation if that was one of the best."""

    phase: ClassVar[str] = phases.SAVE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCopyHook(PeriodicHook):
    """Copies the state to memory. Does not run after the last step, as no step follows that could be lost."""

    phase: ClassVar[str] = phases.SAVE
    is_part_of_step: ClassVar[bool] = True

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether it runs after this step."""
        # The base class runs after the last step in any case.
        return step < last and super().is_due(step, last)


def at_early_end(hooks: Sequence[PeriodicHook], done: Sequence[PeriodicHook], step: int) -> list[PeriodicHook]:
    """Returns the hooks to run after a step that has become the last one, except those that have run."""
    return [hook for hook in hooks if hook not in done and hook.is_due(step, step)]


def at_stop(hooks: Sequence[PeriodicHook], due: Sequence[PeriodicHook]) -> list[PeriodicHook]:
    """Returns the hooks to run after the last step of a run that is asked to stop, in their order.

    Args:
        hooks: all hooks.
        due: those that would run without the stop.
    """
    # The process may be killed at any time from now on, so what must not be lost comes first.
    urgent = [hook for hook in hooks if hook.runs_at_stop]
    others = [hook for hook in due if not hook.runs_at_stop and not hook.is_part_of_step]
    return urgent + others
