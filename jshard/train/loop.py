"""The loop: steps, evaluations and checkpoints until the run is done, stopped on request, or has failed.

`fit` combines a `TrainStep`, a `Loader`, trackers and a `Checkpointer`, which your own script can call in the same
order. Between steps the processes agree (`Agreement`) on whether one was asked to stop, and which is the slowest.

The host runs one step ahead of the devices: while a step runs, the scalars of the step before are read. A separate
thread reads the next batches and copies them to the devices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jshard._processes import exchange
from jshard.data.loader import HeldOutBatches
from jshard.errors import RunError
from jshard.launch import StopSignal, doing, note, stall, step_done
from jshard.plans.batch import shard_batch
from jshard.plans.mesh import num_processes
from jshard.recipes.step import EvalStep, HeldModel, Scalars, TrainStep
from jshard.train.progress import Meter, StepProfile
from jshard.train.records import Tracker

_ASK_EVERY_S, _ASK_SHARE = 0.1, 0.1
_MEETINGS = 15  # from which the slowest process is found
_SLOW_S, _SLOW_SHARE = 0.001, 0.05  # of a step: below both no process is named


class Agreement:
    """Whether any process was asked to stop; all learn it after the same step, because all take part in the save.

    A signal reaches the processes at different times, or only one of them. So they communicate every 0.1 s, or as
    rarely as keeps this below a tenth of the time, and whenever the devices are idle anyway. The number of steps until
    the next meeting follows from the data exchanged at the last one, and is the same for all.

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
        self._last: tuple[int, float] | None = None  # step and time
        self._took_s = 0.0
        self._due = 0
        self._meetings: collections.deque[np.ndarray] = collections.deque(maxlen=_MEETINGS)
        self._spent_s = {"data": 0.0, "save": 0.0}  # since the last meeting
        self.slowest = dict[str, float]()

    def begin(self) -> None:
        """Waits for all before the first step: they may be compiling, and gloo's first collective fails after 30 s."""
        if not self.alone:
            exchange("first step", None)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the block's time as waiting of the main thread for "data" or a "save"."""
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
        # The last to arrive at the meeting waits least: that time is the cost of the meeting itself.
        self._due = step + max(1, int(max(_ASK_EVERY_S, min(took_s) / _ASK_SHARE) / max(steps_s)))
        return signal.Signals(max(numbers)) if any(numbers) else None

    def _compare(self, parts_s: Sequence[np.ndarray], step_s: float) -> None:
        """Finds the slowest, by each process's waits for data and saves per step, and its lateness at meetings."""
        self._meetings.append(np.array(parts_s))
        seen = np.array(self._meetings)
        late_s = np.median(seen[:, 2], axis=0)  # being late once is not slow
        data_s, save_s = (each - each.min() for each in seen[:, :2].mean(axis=0))
        process = int(np.argmax(np.max([data_s, save_s, late_s], axis=0)))
        parts = {"data": data_s[process], "save": save_s[process], "step": late_s[process]}
        slow_s = float(max(parts.values()))
        self.slowest = {}
        if slow_s > max(_SLOW_S, _SLOW_SHARE * step_s):
            self.slowest = {"slow_process": process, "slow_s": slow_s}
            self.slowest |= {f"slow_{part}_s": float(each_s) for part, each_s in parts.items()}


FirstLoss = Callable[[int, Any, Mapping[str, float]], RunError]
"""Creates the error of a step before any update, from its number, its batch and the scalars that are not finite."""

_AHEAD = 2  # batches on their way to the devices
_END_S = 5.0  # for the reading thread, when a run stops early


@dataclasses.dataclass(frozen=True)
class Fitted:
    """How a run ended.

    Attributes:
        step: the last completed step.
        val_loss: that of the last evaluation; None without one.
        stopped_by: the signal that ended the run early.
    """

    step: int
    val_loss: float | None = None
    stopped_by: signal.Signals | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """An action that runs after every so many steps, and after the last one.

    Attributes:
        steps: the interval; None: only after the last step.
        do: the action; receives the number of completed steps.
        check: called after every step; raises errors that have occurred since.
    """

    steps: int | None
    do: Callable[[int], Any]
    check: Callable[[], None] = lambda: None

    def is_due(self, step: int, last: int) -> bool:
        """Whether it runs after this step."""
        return step == last or (self.steps is not None and step % self.steps == 0)


def to_devices(batches: Iterable[Any], mesh: Mesh, *, ahead: int = _AHEAD) -> Generator[Any, None, None]:
    """Batches of the host as sharded arrays, read and copied ahead in a separate thread.

    Args:
        batches: this process's rows of each batch.
        mesh: the mesh of the model.
        ahead: number of batches to keep on the devices in advance.

    Returns:
        An iterator of global batches, sharded over the data axes on the leading dim.
    """
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
    stop = threading.Event()

    def work() -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                ready.put((shard_batch(batch, mesh), None))
                if stop.is_set():
                    return
        except BaseException as raised:
            error = raised
        ready.put((None, error or StopIteration()))

    thread = threading.Thread(target=work, name="to_devices", daemon=True)
    thread.start()
    try:
        while (item := ready.get())[1] is None:
            yield item[0]
        if not isinstance(item[1], StopIteration):
            raise item[1]
    finally:
        stop.set()
        _end(thread, ready)


def _end(thread: threading.Thread, ready: queue.Queue) -> None:
    """Waits for the thread, which may be waiting for space, but not for data that never arrive."""
    deadline_s = time.monotonic() + _END_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()
        thread.join(0.01)


def evaluate(step: TrainStep | HeldModel, eval_step: EvalStep, batches: Iterable[Any]) -> dict[str, float]:
    """Mean "loss" and metrics over batches of one size, dropout off.

    Args:
        step: holds the parameters.
        eval_step: the compiled loss.
        batches: this process's rows of each batch. Those of `Loader.held_out` count as many times as they have samples.

    Returns:
        The means, after waiting for the devices. A `js.WeightedMean` is the sum of its totals over that of its weights.
    """
    leaves, found = step.model_leaves, []
    doing(stall.DATA)
    with contextlib.closing(to_devices(batches, step.mesh)) as arriving:
        for batch in arriving:
            doing(stall.EVALUATION)
            found.append(eval_step.with_weights(leaves, batch))
            if len(found) > _AHEAD:
                found[-1 - _AHEAD][0]["loss"].block_until_ready()  # else every batch would be in flight at once
            doing(stall.DATA)
    doing(stall.EVALUATION)
    found = jax.device_get(found)
    counts = batches.num_samples if isinstance(batches, HeldOutBatches) else [1] * len(found)
    return {name: _mean_over_batches(name, found, counts) for name in found[0][0]}


def _mean_over_batches(name: str, found: Sequence[tuple[Scalars, Scalars]], counts: Sequence[int]) -> float:
    """The mean of a scalar, by the number of samples in each batch and by its weights."""
    weights = [count * float(weights.get(name, 1)) for count, (_, weights) in zip(counts, found, strict=True)]
    values = [float(scalars[name]) for scalars, _ in found]
    # The mean of a batch without any weight is not a number.
    total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return total / sum(weights) if sum(weights) else math.nan


def fit(
    step: TrainStep,
    batches: Iterable[Any],
    *,
    num_steps: int,
    start_step: int = 0,
    tracker: Tracker | None = None,
    meter: Meter | None = None,
    evaluation: Every | None = None,
    checkpoint: Every | None = None,
    copies: Every | None = None,
    stop: StopSignal | None = None,
    profile: StepProfile | None = None,
    first_loss: FirstLoss | None = None,
) -> Fitted:
    """Trains until `num_steps` steps are done or a stop is requested.

    Args:
        step: the compiled step, which holds the state.
        batches: this process's rows of the batches of steps `start_step` on, as from `Loader.train`.
        num_steps: steps of the whole run, including those before `start_step`.
        start_step: steps done before, by the run that this one continues.
        tracker: receives the scalars of every step and evaluation. None records nothing, as in all processes
            but the first.
        meter: measures; its figures are added to the scalars.
        evaluation: its `do` returns the result of `evaluate`.
        checkpoint: its `do` saves. Also called when a stop is requested, and in a single process when reading data
            fails.
        copies: its `do` copies the state to memory. Not called after the last step or when a stop is requested.
        stop: requests a stop; with several processes the request of any one is enough.
        profile: records some of the steps; the devices are idle when it begins and ends.
        first_loss: creates the error if loss or gradients are not finite before any update.

    Returns:
        How the run ended.

    Raises:
        RunError: the loss or the gradient norm is not finite.
    """
    meter, stop, first_loss = meter or Meter(), stop or StopSignal(), first_loss or unexplained
    agreement = Agreement(step.mesh)
    loop = _Loop(step, tracker, meter, evaluation, checkpoint, copies, stop, profile, first_loss, agreement)
    return loop.run(batches, start_step, num_steps)


@dataclasses.dataclass
class _Loop:
    """The state of one call of `fit`."""

    step: TrainStep
    tracker: Tracker | None
    meter: Meter
    evaluation: Every | None
    checkpoint: Every | None
    copies: Every | None
    stop: StopSignal
    profile: StepProfile | None
    first_loss: FirstLoss
    agreement: Agreement
    in_flight: collections.deque[tuple[int, Any, Scalars]] = dataclasses.field(default_factory=collections.deque)
    stopped_by: signal.Signals | None = None
    val_loss: float | None = None
    saved: int = 0
    is_updated: bool = False

    def run(self, batches: Iterable[Any], start_step: int, num_steps: int) -> Fitted:
        with contextlib.closing(to_devices(batches, self.step.mesh)) as arriving:
            try:
                return self._steps(arriving, start_step, num_steps)
            finally:
                if self.profile is not None:  # the run stopped within the profile
                    self.profile.end()

    def _steps(self, arriving: Iterator[Any], start_step: int, num_steps: int) -> Fitted:
        done = self.saved = start_step
        while done < num_steps and self.stopped_by is None:
            doing(stall.DATA)
            with self.agreement.waiting("data"):
                batch = self._next(arriving, done)
            doing(stall.STEP)
            if batch is None:
                break
            if done == start_step:
                self.agreement.begin()
            done += 1
            scalars = self._do(batch, done)
            self.in_flight.append((done, None if self.is_updated else batch, scalars))
            self._wait(in_flight=1)
            if self.checkpoint is not None:
                self.checkpoint.check()
            self._between_steps(done, last=num_steps)
        self._wait(in_flight=0)
        if self.stopped_by is None:  # requested during the last evaluation or save: there may be no time for more
            self._ask(done, is_idle=True)
        return Fitted(done, self.val_loss, self.stopped_by)

    def _ask(self, step: int, *, is_idle: bool) -> None:
        """Decides whether the run stops here."""
        doing(stall.MEETING)
        self.stopped_by = self.agreement.asked(self.stop.received, step, is_idle=is_idle)
        doing(stall.OTHER)
        if self.stopped_by is not None:
            self.stop.report()

    def _do(self, batch: Any, number: int) -> Scalars:
        """Starts a step, within the profile if it is one of its steps."""
        profile = self.profile
        if profile is None or number not in profile.steps:
            return self.step(batch)
        if not profile.is_recording:
            self._idle(then=profile.begin)
        with profile.mark(number):
            return self.step(batch)

    def _idle(self, *, then: Callable[[], None]) -> None:
        """Runs a function while the devices are idle."""
        self._wait(in_flight=0)
        jax.block_until_ready(self.step.model_leaves)  # on every device: a loss is read from one
        doing(stall.PROFILE)
        then()
        doing(stall.STEP)
        self.meter.pause()

    def _next(self, arriving: Iterator[Any], done: int) -> Any:
        """The next batch; None after the last one."""
        try:
            return next(arriving, None)
        except RunError:
            # Reading data failed, but the state is sound. Several processes could not agree to save it.
            if self.agreement.alone and done > self.saved:
                self._wait(in_flight=0)
                self._save(done)
            raise

    def _wait(self, *, in_flight: int) -> None:
        """Reads the scalars of the oldest steps until only so many are in flight."""
        while len(self.in_flight) > in_flight:
            doing(stall.STEP)
            step, batch, on_devices = self.in_flight.popleft()
            scalars = {name: float(value) for name, value in on_devices.items()}  # waits; jax.device_get costs more
            step_done(step)
            note(step=step)
            doing(stall.OTHER)
            scalars |= {**self.meter.done(step), **self.agreement.slowest}
            if self.tracker is not None:
                self.tracker.log(step, scalars)
            self._check_finite(step, batch, scalars)

    def _between_steps(self, step: int, *, last: int) -> None:
        """Evaluates and saves when due; the devices are idle meanwhile."""
        evaluates = self.evaluation is not None and self.evaluation.is_due(step, last)
        saves = self.checkpoint is not None and self.checkpoint.is_due(step, last)
        self._ask(step, is_idle=evaluates or saves)
        if self.profile is not None and self.profile.is_recording and step == self.profile.steps[-1]:
            self._idle(then=self.profile.end)
        copies = self.copies is not None and step < last and self.copies.is_due(step, last)
        if not (evaluates or saves or copies or self.stopped_by):
            return
        self._wait(in_flight=0)
        if self.stopped_by is not None:  # a stop request may not leave time for an evaluation
            self._save(step)
        if evaluates:
            assert self.evaluation is not None
            doing(stall.EVALUATION)
            found = {f"val_{name}": float(value) for name, value in self.evaluation.do(step).items()}
            self.val_loss = found["val_loss"]
            doing(stall.OTHER)
            if self.tracker is not None:
                self.tracker.log(step, found)
        # After the evaluation: a run that continues from here finds its result in the record.
        if copies and self.stopped_by is None:
            self._do_saving(self.copies, step)
        if saves and self.stopped_by is None:
            self._save(step)
        if evaluates or saves:
            self.meter.pause()

    def _save(self, step: int) -> None:
        if self.checkpoint is not None:
            self._do_saving(self.checkpoint, step)
            self.saved = step

    def _do_saving(self, what: Every | None, step: int) -> None:
        assert what is not None
        doing(stall.SAVE)
        with self.agreement.waiting("save"):
            what.do(step)
        doing(stall.OTHER)

    def _check_finite(self, step: int, batch: Any, scalars: dict[str, float]) -> None:
        wrong = {name: scalars[name] for name in ("loss", "grad_norm") if not math.isfinite(scalars[name])}
        if not wrong:
            self.is_updated = True
        elif scalars.get("loss_scale", 0) <= 1:  # above, the step was skipped and the next has a smaller scale
            raise self.first_loss(step, batch, wrong) if not self.is_updated else _diverged(step, wrong)


def unexplained(step: int, batch: Any, wrong: Mapping[str, float]) -> RunError:
    """The error of a step before any update, if the model is not known."""
    return RunError(
        f"Loss or gradients are NaN/inf at step {step}, before any update.",
        where=[f"{name} = {value}" for name, value in wrong.items()],
        why="the cause is a value in the batch, a parameter, or the model itself, not the learning rate.",
        do="with js.global_view(), jax.debug_nans(True): loss_fn(model, batch)  # names the operation",
    )


def _diverged(step: int, wrong: Mapping[str, float]) -> RunError:
    return RunError(
        f"Loss or gradients became NaN/inf at step {step}.",
        where=[f"{name} = {value}" for name, value in wrong.items()],
        why="an update with it would spoil every parameter; nothing has been saved since.",
        do="lower the learning rate (--set learning_rate=...) or warm up longer, and resume from a checkpoint.",
    )
