"""The loop: what is done after which step, how it stops, and that it never continues with numbers that are none.

A step is stood in for by a program that costs nothing; the real one is tested in test_train_step.
"""

import contextlib
import io
import os
import re
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.errors import RunError
from jshard.train import (
    CheckpointHook,
    EvaluationHook,
    Meter,
    PeriodicHook,
    StopSignal,
    fit,
    stop_consensus,
    to_devices,
)
from jshard.train.hooks import MemoryCopyHook
from jshard.train.loop import Fitted
from jshard.train.progress import Progress
from jshard.train.stop_consensus import StopConsensus

MESH = js.mesh()


class Step:
    """Counts its calls; the loss is the mean of the batch, unless set otherwise."""

    mesh = MESH

    def __init__(self, log, losses=None):
        self._log, self._losses, self.calls = log, losses or {}, 0

    def __call__(self, batch):
        self.calls += 1
        self._log.append(f"start {self.calls}")
        loss = self._losses.get(self.calls, batch["x"].mean())
        return {"loss": jnp.asarray(loss), "grad_norm": jnp.asarray(1.0)}


class Recorder:
    def __init__(self, log):
        self._log, self.scalars = log, []

    def log(self, step, scalars):
        self._log.append(f"log {step} {'val_loss' if 'val_loss' in scalars else 'loss'}")
        self.scalars.append((step, dict(scalars)))

    def close(self):
        raise AssertionError("the loop does not own its tracker")


def batches(number, log=None):
    for i in range(number):
        if log is not None:
            log.append(f"batch {i + 1}")
        yield {"x": np.full((8, 2), i + 1, np.float32)}


def run(number=6, *, losses=None, start_step=0, on_log=lambda entry: None, **settings):
    class Log(list):
        def append(self, entry):
            super().append(entry)
            on_log(entry)

    log = Log()
    recorder = Recorder(log)
    hooks = []
    if "evaluation" in settings:
        evaluate = lambda step: log.append(f"evaluate {step}") or {"loss": 0.5}
        hooks.append(EvaluationHook(every=settings.pop("evaluation"), run=evaluate))
    if "checkpoint" in settings:
        hooks.append(CheckpointHook(every=settings.pop("checkpoint"), run=lambda step: log.append(f"save {step}")))
    hooks += settings.pop("hooks", [])
    step = Step(log, losses)
    fitted = fit(
        step,
        batches(number - start_step),
        num_steps=number,
        start_step=start_step,
        tracker=recorder,
        hooks=hooks,
        **settings,
    )
    return fitted, list(log), recorder.scalars


def test_every_step_is_reported_with_its_own_loss():
    fitted, _, scalars = run()
    assert fitted == Fitted(6)
    assert [(step, s["loss"]) for step, s in scalars] == [(i, float(i)) for i in range(1, 7)]
    assert all(isinstance(value, float) for _, s in scalars for name, value in s.items() if name != "host_bytes")


def test_the_host_is_one_step_ahead_and_no_further():
    _, log, _ = run()
    starts, reported = ({e.split()[1]: i for i, e in enumerate(log) if e.startswith(kind)} for kind in ("start", "log"))
    for step in range(1, 5):
        assert starts[str(step + 1)] < reported[str(step)] < starts[str(step + 2)]


def test_evaluations_and_checkpoints_come_in_order_and_after_the_last_step():
    fitted, log, _ = run(5, evaluation=2, checkpoint=4)
    assert fitted == Fitted(5, val_loss=0.5)
    pauses = [entry for entry in log if not entry.startswith("start") and not entry.endswith(" loss")]
    assert pauses == [
        *("evaluate 2", "log 2 val_loss"),
        *("evaluate 4", "log 4 val_loss", "save 4"),
        *("evaluate 5", "log 5 val_loss", "save 5"),
    ]
    # No step is at work meanwhile, and every line up to a checkpoint is written before it.
    assert log.index("log 4 loss") < log.index("evaluate 4")
    assert log.index("save 4") < log.index("start 5")


def test_hooks_of_ones_own_run_when_due_and_are_checked_after_every_step():
    ran, checked = [], []

    class OnlyStepTwo(PeriodicHook):
        def is_due(self, step, last):
            return step == 2

    hooks = [
        PeriodicHook(every=3, run=lambda step: ran.append(f"third {step}"), check=lambda: checked.append(None)),
        OnlyStepTwo(every=None, run=lambda step: ran.append(f"second {step}")),
    ]
    run(7, hooks=hooks)
    assert ran == ["second 2", "third 3", "third 6", "third 7"]
    assert len(checked) == 7


def test_copies_in_memory_are_made_neither_after_the_last_step_nor_at_a_stop():
    copied = []
    hooks = [MemoryCopyHook(every=2, run=copied.append)]
    run(6, hooks=hooks)
    assert copied == [2, 4]
    copied.clear()
    with StopSignal() as stop:
        at_step_4 = lambda entry: os.kill(os.getpid(), signal.SIGTERM) if entry == "start 4" else None
        fitted, log, _ = run(9, hooks=hooks, checkpoint=50, stop=stop, on_log=at_step_4)
    assert fitted.step == 4 and copied == [2] and log[-1] == "save 4"


def test_a_continued_run_counts_on():
    fitted, log, scalars = run(6, start_step=4, checkpoint=5)
    assert fitted.step == 6
    assert [step for step, _ in scalars] == [5, 6]
    assert [entry for entry in log if entry.startswith("save")] == ["save 5", "save 6"]


@pytest.mark.usefixtures("signals_as_usual")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_stops(number):
    def on_log(entry):
        if entry == "start 3":
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with StopSignal() as stop:
        fitted, log, scalars = run(50, checkpoint=20, evaluation=20, stop=stop, on_log=on_log)
    assert fitted == Fitted(3, stopped_by=number)
    assert log[-1] == "save 3"
    assert not any(entry.startswith("evaluate") for entry in log)
    assert [step for step, _ in scalars] == [1, 2, 3]  # the record is complete
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("signals_as_usual")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_known_before_python_hands_it_to_the_main_thread(number):
    with StopSignal() as stop:
        assert stop.stop_requested_at_s() is None
        os.write(stop._wakeup[1], bytes([number]))  # as the interpreter does, while that is in native code
        assert stop.stop_requested_at_s() is not None and stop.received is None
    assert stop.stop_requested_at_s() is not None


def test_a_stop_saves_before_it_evaluates():
    with StopSignal() as stop:
        at_step_4 = lambda entry: os.kill(os.getpid(), signal.SIGTERM) if entry == "start 4" else None
        fitted, log, _ = run(9, checkpoint=4, evaluation=4, stop=stop, on_log=at_step_4)
    assert fitted == Fitted(4, val_loss=0.5, stopped_by=signal.SIGTERM)
    assert log[-3:] == ["save 4", "evaluate 4", "log 4 val_loss"]


def test_a_signal_during_the_last_save_ends_the_run_there():
    """What would come next, a sample, may not fit into the time that is left."""
    with StopSignal() as stop:
        at_the_end = lambda entry: os.kill(os.getpid(), signal.SIGTERM) if entry == "save 4" else None
        fitted, _, _ = run(4, checkpoint=None, stop=stop, on_log=at_the_end)
    assert fitted == Fitted(4, stopped_by=signal.SIGTERM)


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_second_signal_a_second_later_ends_the_program_unless_a_supervisor_decides(monkeypatch, capfd, is_worker):
    raised = []
    monkeypatch.setattr("signal.raise_signal", raised.append)
    monkeypatch.setenv("JSHARD_WORKER", str(int(is_worker)))
    with StopSignal() as stop:
        for now_s in (10.0, 10.5, 11.5):  # the launcher's, the same from the terminal, and somebody who is impatient
            monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
            assert not raised
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert raised == [] if is_worker else [signal.SIGTERM]
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) is not is_worker
    assert capfd.readouterr().err.count("SIGTERM: the run saves after this step and stops") == 1


def test_all_processes_meet_before_the_first_step(monkeypatch):
    """The second one compiles for long: gloo, which connects them in the first collective, waits for it 30 s only."""
    met = []
    monkeypatch.setattr(stop_consensus, "num_processes", lambda mesh: 2)
    monkeypatch.setattr(stop_consensus, "exchange", lambda topic, said: met.append(topic) or [said, said])
    run(4, start_step=2, on_log=lambda entry: met.append(entry) if entry.startswith("start") else None)
    assert met[:2] == ["first step", "start 1"] and met.count("first step") == 1


def test_processes_ask_one_another_after_the_same_steps_and_seldom_where_that_is_dear(monkeypatch):
    """The second process computes as long, and is sent the signal after step 70."""
    consensus, now_s, asked_at = StopConsensus(MESH), [0.0], []
    consensus.alone = False

    def exchange(topic, mine):
        asked_at.append(step)
        now_s[0] += 0.02  # the other one waits as long
        return [mine, [signal.SIGTERM if step > 70 else 0, *mine[1:]]]

    monkeypatch.setattr(stop_consensus, "exchange", exchange)
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    for step in range(1, 200):
        now_s[0] += 0.01
        if (found := consensus.agreed_signal(None, step)) is not None:
            break
    assert (found, step) == (signal.SIGTERM, asked_at[-1])
    apart = np.diff(asked_at).tolist()
    assert apart[0] == 1 and all(19 <= steps <= 21 for steps in apart[1:])  # 0.02 s: a tenth of 20 steps
    step += 1
    assert (
        consensus.agreed_signal(None, step) is None
        and consensus.agreed_signal(None, step, is_idle=True) == signal.SIGTERM
    )
    assert consensus.slowest == {}


@pytest.mark.parametrize("part", ["data", "step"])
def test_the_slowest_process_is_named(monkeypatch, part):
    """The second process waits 5 ms per step for its data, or comes 5 ms late to every meeting."""
    consensus, now_s, before, step = StopConsensus(MESH), [0.0], {"took_s": 0.0, "step": 0}, 0
    consensus.alone = False

    def exchange(topic, mine):
        now_s[0] += 0.02
        data_s = 0.005 * max(1, step - before["step"]) if part == "data" else 0.0
        theirs = [*mine[:2], before["took_s"], data_s, 0.0]
        before.update(took_s=0.015 if part == "step" else 0.02, step=step)
        return [mine, theirs]

    monkeypatch.setattr(stop_consensus, "exchange", exchange)
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    for step in range(1, 300):
        now_s[0] += 0.01
        assert consensus.agreed_signal(None, step) is None
    found = consensus.slowest
    assert found["slow_process"] == 1 and found["slow_s"] == found[f"slow_{part}_s"] == pytest.approx(0.005, rel=0.1)
    line = Progress(300, stream=io.StringIO())._describe(299, {"loss": 1.0, "step_s": 0.01, **found})[-1]
    assert re.fullmatch(rf"slowest: process 1, \+[45](\.\d+)? ms/step, {part}", line), line


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run_before_it_saves(bad):
    saved = []
    with pytest.raises(RunError) as error:
        run(9, losses={4: bad}, checkpoint=4, on_log=lambda entry: saved.append(entry) if "save" in entry else None)
    assert "at step 4" in str(error.value)
    assert f"loss = {bad}" in str(error.value)
    assert saved == []


def test_data_that_fail_do_not_take_the_trained_steps_along():
    def failing():
        yield from batches(7)
        raise RunError("A sample cannot be read.", where="data", why="the disk", do="mend it")

    log = []
    with pytest.raises(RunError, match="cannot be read"):
        fit(
            Step(log),
            failing(),
            num_steps=50,
            hooks=[CheckpointHook(every=3, run=lambda step: log.append(f"save {step}"))],
        )
    # Every batch that could be read is trained on.
    assert log[-2:] == ["start 7", "save 7"]


def test_batches_are_on_the_devices_before_they_are_asked_for():
    log = []
    arriving = to_devices(batches(5, log), MESH, ahead=2)
    first = next(arriving)
    while len(log) < 4:
        time.sleep(0.01)
    time.sleep(0.1)
    assert log == ["batch 1", "batch 2", "batch 3", "batch 4"]  # two are ready, the next one waits for room
    assert len(first["x"].sharding.device_set) == 8
    assert [float(b["x"][0, 0]) for b in [first, *arriving]] == [1, 2, 3, 4, 5]


class Profile:
    """Stands in for a `StepProfile`: notes when it begins and ends, and which steps it marks."""

    def __init__(self, log, steps):
        self._log, self.steps, self.is_recording = log, steps, False

    def begin(self):
        self._log.append("profile begins")
        self.is_recording = True

    def mark(self, step):
        return contextlib.nullcontext(self._log.append(f"mark {step}"))

    def end(self):
        if self.is_recording:
            self._log.append("profile ends")
        self.is_recording, self.steps = False, range(0)


def profiled(number, steps, losses=None, **settings):
    log = []

    class Pausing(Meter):
        def pause(self):
            log.append("pause")

    step = Step(log, losses)
    step.model_leaves = []
    fit(
        step,
        batches(number),
        num_steps=number,
        tracker=Recorder(log),
        meter=Pausing(),
        profile=Profile(log, steps),
        **settings,
    )
    return log


def test_profiled_steps_are_whole_and_what_the_profiler_takes_is_no_steps_time():
    log = profiled(6, range(3, 5), hooks=[EvaluationHook(every=4, run=lambda step: {"loss": 0.5})])
    begin, end = log.index("profile begins"), log.index("profile ends")
    assert log[begin - 1 : begin + 4] == ["log 2 loss", "profile begins", "pause", "mark 3", "start 3"]
    assert log[end - 1 : end + 2] == ["log 4 loss", "profile ends", "pause"]
    assert [entry for entry in log if entry.startswith("mark")] == ["mark 3", "mark 4"]
    assert end < log.index("log 4 val_loss")  # the evaluation is not in it


def test_a_run_that_fails_among_the_profiled_steps_ends_the_profile():
    log = []
    step = Step(log, {4: np.nan})
    step.model_leaves = []
    with pytest.raises(RunError):
        fit(step, batches(9), num_steps=9, profile=Profile(log, range(3, 8)))
    assert log[-1] == "profile ends"
