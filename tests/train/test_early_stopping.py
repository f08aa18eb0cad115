"""A run ends when its metric no longer improves, and keeps its best checkpoints, also after it was resumed."""

import json
import math
import os
import shutil
import sys

import numpy as np
import pytest

import jshard as js
from jshard import cli
from jshard.train import EarlyStopping, EvaluationHook, Monitor, PeriodicHook, fit
from jshard.train.hooks import at_early_end
from jshard.train.monitoring import Evaluated, MetricError, history_in
from jshard.train.records import read_metrics
from tests.micro_gpt import USERS_FILE

NAN = math.nan


def history(*values):
    return [Evaluated(10 * number, value) for number, value in enumerate(values, 1)]


def stopped(values, **settings):
    """The number of the evaluation that ends the run; None if none does."""
    patience = settings.pop("patience", 2)
    until = EarlyStopping(Monitor(metric="val_x", **settings), patience=patience)
    for number, value in enumerate(values, 1):
        if until(10 * number, {"val_loss": 0.0, "val_x": value}) is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "ends"),
    [
        ([3, 2, 1, 0], {}, None),
        ([3, 2, 2, 2], {}, 4),
        ([3, 4, 2, 3, 3], {}, 5),
        ([3, 4, 5], {"mode": "max"}, None),
        ([3, 2, 1], {"mode": "max"}, 3),
        ([3, 2.9, 2.8], {"min_delta": 0.5}, 3),
        ([3, 2.9, 2.4], {"min_delta": 0.5}, None),  # compared with the last improvement
        ([3, NAN, NAN], {}, 3),
        ([NAN, NAN], {}, 2),
        ([NAN, 3, NAN, 2], {}, None),
        ([3, -math.inf, -math.inf], {}, 3),
        ([3, 4, 5, 6], {"patience": 4}, None),
        ([3] * 9, {"patience": None}, None),
    ],
)
def test_when_a_run_ends(values, settings, ends):
    assert stopped(values, **settings) == ends


def test_the_reason_says_what_was_best():
    until = EarlyStopping(Monitor(min_delta=0.5), patience=2, history=history(3.0, 2.0, 1.9))
    assert until(40, {"val_loss": 1.8}) == (
        "val_loss has not improved by more than 0.5 in 2 evaluations; its best is 2 after step 20"
    )
    none = EarlyStopping(Monitor(), patience=1, history=history(NAN))
    assert none.reason() == "val_loss was not a number in 1 evaluation"


def test_which_evaluations_are_among_the_best():
    low = Monitor()
    assert low.is_among_best(history(3, 2), 1) and not low.is_among_best(history(2, 3), 1)
    assert low.is_among_best(history(2, 3), 2) and low.is_among_best(history(2, 2), 1)  # the later of equal ones
    assert not low.is_among_best(history(2, NAN), 2) and low.is_among_best(history(NAN, 2), 1)
    assert Monitor(mode="max").is_among_best(history(2, 3), 1)
    assert not low.is_among_best([], 1)


def test_a_metric_that_does_not_exist_is_refused_with_those_that_do():
    until = EarlyStopping(Monitor(metric="val_acuracy"), patience=2)
    with pytest.raises(MetricError, match="they return val_loss, val_accuracy") as caught:
        until(10, {"val_loss": 1.0, "val_accuracy": 0.5})
    assert "--set monitor=val_loss" in str(caught.value)


def test_the_history_is_that_of_the_record():
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "val_loss": 2.0}, {"step": 4, "val_loss": None}]
    found = history_in([*lines, {"step": 6, "val_loss": 1.0}], "val_loss", until_step=4)
    assert found[0] == (2, 2.0) and found[1].step == 4 and math.isnan(found[1].value) and len(found) == 2


# In a run.

SMALL = ["--data", "text.txt", "--set", "model.n_layer=1", "--set", "eval_every=1", "--mesh", "fsdp=8"]
QUIET = ["--track", "--sample-tokens", "0"]
NEVER_BETTER = ["--set", "patience=2", "--set", "min_delta=100"]  # only the first evaluation is an improvement


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "my_model.py").write_text(USERS_FILE)
    return folder


@pytest.fixture
def train(folder, monkeypatch, capsys):
    """Trains into a folder; the exit code, and what was printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    capsys.readouterr()

    def call(out, *arguments):
        code = cli.main(["train", "my_model.py", "--out", out, *QUIET, *arguments])
        said = capsys.readouterr()
        return code, said.err if code else said.out

    return call


def steps_in(folder):
    return sorted(int(name) for name in os.listdir(folder / "checkpoints") if name.isdigit())


def evaluated(folder):
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "val_loss" in line]


@pytest.fixture
def ended(train, folder):
    """A run that has ended early."""
    shutil.rmtree(folder / "ended", ignore_errors=True)
    code, said = train("ended", *SMALL, *NEVER_BETTER, "--steps", "8")
    assert code == 0, said
    return said


def test_a_run_ends_early_is_saved_and_says_why(ended, folder):
    assert "stopped early after step 3: val_loss has not improved by more than 100 in 2 evaluations" in ended
    assert evaluated(folder / "ended") == [1, 2, 3] and steps_in(folder / "ended") == [3]
    record = json.loads((folder / "ended" / "run.json").read_text())
    assert record["attempts"][-1]["cause"].startswith("stopped early: val_loss has not improved")


@pytest.mark.wide
def test_a_run_that_has_ended_early_continues_only_if_asked_to(ended, train, folder):
    code, said = train("ended", "--resume")
    assert code == 0 and "nothing is left to train after step 3: val_loss has not improved" in said
    assert evaluated(folder / "ended") == [1, 2, 3]
    code, said = train("ended", "--resume", "--set", "patience=none", "--steps", "5")
    assert code == 0 and evaluated(folder / "ended") == [1, 2, 3, 4, 5]


@pytest.mark.wide
def test_evaluations_before_a_resume_count(train, folder):
    more = [*SMALL, *NEVER_BETTER]
    assert train("resumed", *more, "--steps", "2")[0] == 0  # one evaluation is an improvement, one is not
    code, said = train("resumed", "--resume", "--steps", "8")
    assert code == 0 and "stopped early after step 3" in said
    assert evaluated(folder / "resumed") == [1, 2, 3] and steps_in(folder / "resumed") == [2, 3]


def test_the_best_checkpoints_are_kept(train, folder):
    """The loss falls, so that with the largest as the best the first ones are kept."""
    best = ["--set", "monitor_mode=max", "--set", "keep_best=2", "--set", "keep_checkpoints=1"]
    code, said = train("best", *SMALL, *best, "--set", "checkpoint_every=4", "--steps", "5")
    assert code == 0, said
    losses = {}
    for line in read_metrics(folder / "best" / "metrics.jsonl"):
        if "val_loss" in line:
            losses[line["step"]] = line["val_loss"]
    best_steps = sorted(sorted(losses, key=losses.__getitem__)[-2:])
    assert steps_in(folder / "best") == [*best_steps, 5] != [3, 4, 5]
    code, said = train("best", "--resume", "--steps", "7")
    assert code == 0 and steps_in(folder / "best") == [*best_steps, 7]


def test_an_unknown_metric_is_refused_before_the_first_step(train, folder):
    code, said = train("unknown", *SMALL, "--set", "monitor=val_accuracy", "--set", "patience=2")
    assert code == 2 and "they return val_loss" in said and "monitor='val_accuracy'" in said
    assert not (folder / "unknown").exists()


@pytest.mark.parametrize("setting", ["patience=0", "min_delta=-1", "keep_best=-1"])
def test_invalid_settings_of_the_monitor(train, setting):
    code, said = train("none", *SMALL, "--set", setting)
    assert code == 2 and "The recipe has invalid values." in said


def test_hooks_of_the_end_run_after_an_early_end():
    evaluation = EvaluationHook(every=1, run=lambda step: {"loss": 1.0})
    last = PeriodicHook(every=None, run=lambda step: None)
    often = PeriodicHook(every=2, run=lambda step: None)
    assert at_early_end([evaluation, last, often], [evaluation, often], 4) == [last]


def test_equal_hooks_are_two():
    def run(step):
        return None

    first, second = PeriodicHook(every=2, run=run), PeriodicHook(every=2, run=run)
    assert at_early_end([first, second], [first], 2) == [second]


def test_one_of_two_evaluations_may_end_the_loop():
    class Step:
        """A step that computes nothing."""

        mesh = js.mesh()
        model_leaves = ()

        def __call__(self, batch):
            return {"loss": 2.0, "grad_norm": 1.0}

    def evaluation(until):
        return EvaluationHook(every=2, run=lambda step: {"loss": 0.5}, until=until)

    hooks = [evaluation(lambda step, scalars: "enough"), evaluation(lambda step, scalars: None)]
    fitted = fit(Step(), [{"x": np.zeros((8, 1), np.float32)}] * 5, num_steps=5, hooks=hooks)
    assert (fitted.step, fitted.stopped_early) == (2, "enough")
