"""Hooks: what a run does between two steps, such as an evaluation or a checkpoint, and code of the user's own.

`fit` runs the hooks that are due in the order in which they are listed. List the evaluation before the checkpoint: a
run that continues from that checkpoint then finds the evaluation in its record.

A run that continues from a checkpoint does the steps after it again, and runs the hooks of these steps again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

from jshard.checkpoint.buckets import Place
from jshard.errors import ShardingError
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

    Examples:
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
class StepHook:
    """Receives the scalars of every so many steps, while the next step is at work: the devices do not wait for it.

    All processes call it.

    Attributes:
        run: receives the number of completed steps, and the scalars of the last of them as in the record.
        every: the interval in steps.

    Examples:
        >>> hook = StepHook(every=10, run=lambda step, scalars: print(step, scalars["loss"]))
    """

    run: Callable[[int, Mapping[str, float]], object]
    every: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedHook:
    """Receives the results of every evaluation, before the state is saved. All processes call it.

    Attributes:
        run: receives the number of completed steps, and the results under the names of the record, such as "val_loss".

    Examples:
        >>> hook = EvaluatedHook(run=lambda step, scalars: print(step, scalars["val_loss"]))
    """

    run: Callable[[int, Mapping[str, float]], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedHook:
    """Receives every checkpoint of a run when it is complete and on the disk.

    It is called some steps after the save began, and in the first process only: the processes learn of it at different
    times. The next save waits for it. Of two checkpoints that are complete since the last call, it receives the newer.

    Attributes:
        run: receives the step of the checkpoint, and its folder, or its address in a bucket.

    Examples:
        >>> hook = SavedHook(run=lambda step, folder: shutil.copytree(folder, f"/backup/{step}"))
    """

    run: Callable[[int, Place], object]


UserHook = PeriodicHook | StepHook | EvaluatedHook | SavedHook
"""What a recipe may list."""


@contextlib.contextmanager
def named(hook: UserHook, step: int) -> Iterator[None]:
    """Adds a note with the hook to an error of its action, if that is the user's."""
    try:
        yield
    except Exception as error:
        module = getattr(hook.run, "__module__", None) or ""
        if not module.startswith("jshard."):
            error.add_note(f"raised in a {type(hook).__name__} after step {step}: {_name_of(hook.run)}")
        raise


def _name_of(run: Callable[..., object]) -> str:
    """Returns the name of a function, and where it is if it has no name of its own."""
    name = getattr(run, "__qualname__", type(run).__qualname__)
    code = getattr(run, "__code__", None)
    if code is None:
        return name
    return f"{name}, {code.co_filename}, line {code.co_firstlineno}"


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
    # By identity: two hooks may be equal.
    done_ids = {id(hook) for hook in done}
    return [hook for hook in hooks if id(hook) not in done_ids and hook.is_due(step, step)]


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


class HookLists(NamedTuple):
    """Hooks by the points at which they run."""

    periodic: list[PeriodicHook]
    step: list[StepHook]
    evaluated: list[EvaluatedHook]
    saved: list[SavedHook]


def by_point(hooks: Sequence[UserHook], *, where: str) -> HookLists:
    """Returns hooks by the points at which they run, each in its order; raises for anything else.

    Args:
        hooks: of all kinds.
        where: they were listed.
    """
    lists = HookLists([], [], [], [])
    for hook in hooks:
        if isinstance(hook, PeriodicHook):
            lists.periodic.append(hook)
        elif isinstance(hook, StepHook):
            lists.step.append(hook)
        elif isinstance(hook, EvaluatedHook):
            lists.evaluated.append(hook)
        elif isinstance(hook, SavedHook):
            lists.saved.append(hook)
        else:
            raise ShardingError(
                "This is no hook.",
                where=f"{where}: {hook!r}",
                why="hooks are a StepHook, an EvaluatedHook, a SavedHook, or a PeriodicHook.",
                do="js.train.StepHook(every=10, run=lambda step, scalars: print(step, scalars))",
            )
    return lists


def hooks_of_recipe(hooks: Sequence[UserHook], *, where: str) -> HookLists:
    """Returns the hooks that a recipe lists by point; raises for a kind that every run has by itself."""
    lists = by_point(hooks, where=where)
    for hook in lists.periodic:
        if isinstance(hook, EvaluationHook | CheckpointHook):
            raise ShardingError(
                "A run has its own evaluations and checkpoints.",
                where=f"{where}: {type(hook).__name__}",
                why="eval_every and checkpoint_every say when; another one would mix its results with theirs.",
                do="js.train.EvaluatedHook(run=...), js.train.SavedHook(run=...)  # run after those",
            )
    return lists
