"""The loop: steps, and hooks between them, until the run is done, stopped on request, or has failed.

`fit` combines a `TrainStep`, a `Loader`, trackers and a `Checkpointer`, which your own script can call in the same
order. Between steps the processes agree (`StopConsensus`) on whether one was asked to stop.

The host runs one step ahead of the devices: while a step runs, the scalars of the step before are read. A separate
thread reads the next batches and copies them to the devices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax

from jshard._processes import exchange
from jshard._types import PyTree
from jshard.errors import RunError, ShardingError
from jshard.launch import StopSignal, note, phases, set_phase, step_done
from jshard.recipes.step import Scalars, TrainStep
from jshard.train.device_batches import to_devices
from jshard.train.hooks import (
    EvaluatedHook,
    EvaluationHook,
    PeriodicHook,
    StepHook,
    at_early_end,
    at_stop,
    by_point,
    named,
)
from jshard.train.progress import Meter, StepProfile
from jshard.train.records import Tracker
from jshard.train.stop_consensus import StopConsensus

FirstLoss = Callable[[int, PyTree, Mapping[str, float]], RunError]
"""Creates the error of a step before any update, from its number, its batch and the scalars that are not finite."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """How a run ended.

    Attributes:
        step: the last completed step.
        val_loss: that of the last evaluation; None without one.
        stopped_by: the signal that ended the run early.
        stopped_early: why an evaluation ended the run, see `EarlyStopping`.
    """

    step: int
    val_loss: float | None = None
    stopped_by: signal.Signals | None = None
    stopped_early: str | None = None


def fit(
    step: TrainStep,
    batches: Iterable[PyTree],
    *,
    num_steps: int,
    start_step: int = 0,
    hooks: Sequence[PeriodicHook | StepHook | EvaluatedHook] = (),
    tracker: Tracker | None = None,
    meter: Meter | None = None,
    stop: StopSignal | None = None,
    profile: StepProfile | None = None,
    first_loss: FirstLoss | None = None,
) -> Fitted:
    """Trains until `num_steps` steps are done, an evaluation ends the run, or a stop is requested.

    Args:
        step: the compiled step, which holds the state.
        batches: this process's rows of the batches of steps `start_step` on, as from `Loader.train`.
        num_steps: steps of the whole run, including those before `start_step`.
        start_step: steps done before, by the run that this one continues.
        hooks: what to do between steps, in this order: an `EvaluationHook`, a `CheckpointHook`, a `PeriodicHook` for
            anything else; a `StepHook` after a step, an `EvaluatedHook` after an evaluation. An error in one ends the
            run, with a note that names it.
        tracker: receives the scalars of every step and evaluation. None records nothing, as in all processes
            but the first.
        meter: measures; its figures are added to the scalars.
        stop: requests a stop; with several processes the request of any one is enough.
        profile: records some of the steps; the devices are idle when it begins and ends.
        first_loss: creates the error if loss or gradients are not finite before any update.

    Returns:
        How the run ended.

    Raises:
        RunError: the loss or the gradient norm is not finite.

    Examples:
        >>> hooks = [
        ...     EvaluationHook(every=50, run=lambda done: evaluate(step, eval_step, loader.held_out(100))),
        ...     CheckpointHook(every=200, run=lambda done: checkpointer.save(done, {"model": step.model})),
        ... ]
        >>> fit(step, loader.train(1000), num_steps=1000, hooks=hooks)
    """
    lists = by_point(hooks, where="fit(hooks=...)")
    if lists.saved:
        raise _no_series()
    loop = _Loop(
        step=step,
        num_steps=num_steps,
        start_step=start_step,
        hooks=lists.periodic,
        step_hooks=lists.step,
        evaluated_hooks=lists.evaluated,
        tracker=tracker,
        meter=meter or Meter(),
        stop=stop or StopSignal(),
        profile=profile,
        first_loss=first_loss or unexplained,
        consensus=StopConsensus(step.mesh),
    )
    return loop.run(batches)


@dataclasses.dataclass(frozen=True)
class _StepInFlight:
    """A step whose scalars were not read yet.

    Attributes:
        number: counted from 1.
        scalars: its results, on the devices.
        batch: kept for the error of a first loss that is not finite; None once an update was made.
    """

    number: int
    scalars: Scalars
    batch: PyTree


@dataclasses.dataclass(kw_only=True)
class _Loop:
    """The arguments of one call of `fit`, and how far it is.

    Every change of the phase is a mark. All processes pass the same marks in the same order, by which the watch finds
    the one that is behind: see `launch.stall`. So no call of `set_phase` may depend on what only one process knows.

    Attributes:
        in_flight: the oldest first.
        stopped_by: the signal that ends the run, once the processes have agreed on it.
        stopped_early: why an evaluation ends the run.
        val_loss: that of the last evaluation.
        saved_step: the step of the last save.
        is_updated: whether a step had a finite loss and finite gradients.
    """

    step: TrainStep
    num_steps: int
    start_step: int
    hooks: Sequence[PeriodicHook]
    step_hooks: Sequence[StepHook]
    evaluated_hooks: Sequence[EvaluatedHook]
    tracker: Tracker | None
    meter: Meter
    stop: StopSignal
    profile: StepProfile | None
    first_loss: FirstLoss
    consensus: StopConsensus
    in_flight: collections.deque[_StepInFlight] = dataclasses.field(default_factory=collections.deque)
    stopped_by: signal.Signals | None = None
    stopped_early: str | None = None
    val_loss: float | None = None
    saved_step: int = 0
    is_updated: bool = False

    def run(self, batches: Iterable[PyTree]) -> Fitted:
        """Trains on batches of the host."""
        with contextlib.closing(to_devices(batches, self.step.mesh)) as on_devices:
            try:
                return self._train(on_devices)
            finally:
                if self.profile is not None:  # the run stopped within the profile
                    self.profile.end()

    def _train(self, batches: Iterator[PyTree]) -> Fitted:
        done = self.start_step
        self.saved_step = done
        while done < self.num_steps and self.stopped_by is None and self.stopped_early is None:
            set_phase(phases.DATA)
            with self.consensus.waiting("data"):
                batch = self._next_batch(batches, done)
            set_phase(phases.STEP)
            if batch is None:  # there are fewer batches than steps
                break
            # Once: from here on the processes meet in the step itself.
            if done == self.start_step:
                self.consensus.wait_for_all()
            done += 1
            self._start_step(batch, done)
            # One step stays in flight: the devices never wait for the host to read scalars.
            self._read_scalars(until_in_flight=1)
            # A save in the background may have failed: the run ends now, and not when it is done.
            for hook in self.hooks:
                hook.check()
            self._between_steps(done)
        # The record has the last step before the run says how it ended.
        self._read_scalars(until_in_flight=0)
        if self.stopped_by is None:  # requested during the last evaluation or save: there may be no time for more
            self._agree_to_stop(done, is_idle=True)
        return Fitted(done, self.val_loss, self.stopped_by, self.stopped_early)

    def _next_batch(self, batches: Iterator[PyTree], done: int) -> PyTree:
        """Returns the next batch; None after the last one."""
        try:
            return next(batches, None)
        except RunError:
            # Reading data failed, but the state is sound. Several processes could not agree to save it.
            if self.consensus.alone and done > self.saved_step:
                self._read_scalars(until_in_flight=0)
                for hook in self.hooks:
                    if hook.runs_at_stop:
                        self._run_hook(hook, done)
            raise

    def _start_step(self, batch: PyTree, number: int) -> None:
        """Starts a step, within the profile if it is one of its steps, and does not wait for it."""
        profile = self.profile
        if profile is None or number not in profile.steps:
            scalars = self.step(batch)
        else:
            if not profile.is_recording:
                # No earlier step is at work: the profile has whole steps.
                self._while_idle(profile.begin)
            with profile.mark(number):
                scalars = self.step(batch)
        kept_batch = None if self.is_updated else batch  # the batch of a later step is freed with the step
        self.in_flight.append(_StepInFlight(number, scalars, kept_batch))

    def _while_idle(self, action: Callable[[], None]) -> None:
        """Begins or ends the profile while the devices are idle."""
        self._read_scalars(until_in_flight=0)
        jax.block_until_ready(self.step.model_leaves)  # on every device: a loss is read from one
        set_phase(phases.PROFILE)
        action()
        set_phase(phases.STEP)
        self.meter.pause()

    def _read_scalars(self, *, until_in_flight: int) -> None:
        """Reads the scalars of the oldest steps, which waits for these steps, until only so many are in flight."""
        while len(self.in_flight) > until_in_flight:
            set_phase(phases.STEP)
            oldest = self.in_flight.popleft()
            # Each float waits; `jax.device_get` would cost more.
            scalars = {name: float(value) for name, value in oldest.scalars.items()}
            step_done(oldest.number)
            note(step=oldest.number)
            set_phase(phases.OTHER)
            scalars |= self.meter.done(oldest.number)
            scalars |= self.consensus.slowest
            # Before the check: the record of a run that ends with a NaN has the line with it.
            self._track(oldest.number, scalars)
            self._check_finite(oldest, scalars)
            for hook in self.step_hooks:
                if oldest.number % hook.every == 0:
                    with named(hook, oldest.number):
                        hook.run(oldest.number, scalars)

    def _track(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.tracker is not None:
            self.tracker.log(step, scalars)

    def _between_steps(self, step: int) -> None:
        """Agrees on whether the run stops, and runs the hooks that are due; the devices are idle meanwhile."""
        due = [hook for hook in self.hooks if hook.is_due(step, self.num_steps)]
        # After any other step the devices are at work, and a meeting would keep them waiting.
        self._agree_to_stop(step, is_idle=any(not hook.is_part_of_step for hook in due))
        self._end_profile_after(step)
        if self.stopped_by is not None:
            due = at_stop(self.hooks, due)
        if not due:
            return
        # A hook must not save a state whose loss was not looked at, and the lines of all steps precede its own.
        self._read_scalars(until_in_flight=0)
        for hook in due:
            self._run_hook(hook, step)
        if self.stopped_early is not None and self.stopped_by is None:
            # The step has become the last one.
            for hook in at_early_end(self.hooks, due, step):
                self._run_hook(hook, step)
        if any(not hook.is_part_of_step for hook in due):
            self.meter.pause()

    def _agree_to_stop(self, step: int, *, is_idle: bool) -> None:
        """Decides whether the run stops here."""
        set_phase(phases.MEETING)
        self.stopped_by = self.consensus.agreed_signal(self.stop.received, step, is_idle=is_idle)
        set_phase(phases.OTHER)
        if self.stopped_by is not None:
            # Another process may have received the signal: the deadline of the stop runs here, too.
            self.stop.report()

    def _end_profile_after(self, step: int) -> None:
        profile = self.profile
        if profile is not None and profile.is_recording and step == profile.steps[-1]:
            self._while_idle(profile.end)

    def _run_hook(self, hook: PeriodicHook, step: int) -> None:
        with named(hook, step):
            self._run_unnamed(hook, step)

    def _run_unnamed(self, hook: PeriodicHook, step: int) -> None:
        set_phase(hook.phase)
        if isinstance(hook, EvaluationHook):
            scalars = {f"val_{name}": float(value) for name, value in hook.run(step).items()}
            self.val_loss = scalars["val_loss"]
            set_phase(phases.OTHER)  # a tracker may take long, and that is no evaluation
            self._track(step, scalars)
            self._end_after(hook, step, scalars)
            for evaluated_hook in self.evaluated_hooks:
                with named(evaluated_hook, step):
                    evaluated_hook.run(step, scalars)
            return
        if hook.phase == phases.SAVE:
            with self.consensus.waiting("save"):
                hook.run(step)
        else:
            hook.run(step)
        set_phase(phases.OTHER)
        if hook.runs_at_stop:
            self.saved_step = step

    def _end_after(self, hook: EvaluationHook, step: int, scalars: Mapping[str, float]) -> None:
        """Asks a hook whether the run ends after its evaluation."""
        if hook.until is None:
            return
        # Of one process: a hook of the user may evaluate other samples in each, and all must decide the same.
        if not self.consensus.alone:
            scalars = exchange("results of the evaluation", dict(scalars))[0]
        reason = hook.until(step, scalars)
        # Another evaluation of the same step may have ended the run.
        if reason is not None:
            self.stopped_early = reason

    def _check_finite(self, step: _StepInFlight, scalars: Mapping[str, float]) -> None:
        """Raises an error if the step has spoiled the parameters, or would have."""
        not_finite = {name: scalars[name] for name in ("loss", "grad_norm") if not math.isfinite(scalars[name])}
        if not not_finite:
            self.is_updated = True
            return
        if scalars.get("loss_scale", 0) > 1:  # the step was skipped, and the next has a smaller scale
            return
        if self.is_updated:
            raise _diverged(step.number, not_finite)
        raise self.first_loss(step.number, step.batch, not_finite)


def _no_series() -> ShardingError:
    return ShardingError(
        "A loop of your own does not know when a checkpoint is complete.",
        where="fit(hooks=[SavedHook(...)])",
        why="it is your CheckpointHook that saves; only a run of a recipe has a series of checkpoints of its own.",
        do="CheckpointHook(every=100, run=save, check=look)  # look is called after every step",
    )


def unexplained(step: int, batch: PyTree, not_finite: Mapping[str, float]) -> RunError:
    """Creates the error of a step before any update, if the model is not known."""
    return RunError(
        f"Loss or gradients are NaN/inf at step {step}, before any update.",
        where=[f"{name} = {value}" for name, value in not_finite.items()],
        why="the cause is a value in the batch, a parameter, or the model itself, not the learning rate.",
        do="with js.global_view(), jax.debug_nans(True): loss_fn(model, batch)  # names the operation",
    )


def _diverged(step: int, not_finite: Mapping[str, float]) -> RunError:
    return RunError(
        f"Loss or gradients became NaN/inf at step {step}.",
        where=[f"{name} = {value}" for name, value in not_finite.items()],
        why="an update with it would spoil every parameter; nothing has been saved since.",
        do="lower the learning rate (--set learning_rate=...) or warm up longer, and resume from a checkpoint.",
    )
