"""Hooks of a recipe run after steps, evaluations and saves, receive what the record has, and are named if they fail."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.readers import own_checkpoint
from jshard.data import load_text
from jshard.errors import ShardingError
from jshard.train import (
    EvaluatedHook,
    EvaluationHook,
    PeriodicHook,
    Recipe,
    RunOptions,
    SavedHook,
    StepHook,
    fit,
    load_model_file,
    run_recipe,
)
from jshard.train.records import read_metrics
from tests.micro_gpt import micro

MODEL_FILE = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
seen: list = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(Recipe):
    """Notes what its hooks receive; one of them may fail."""

    fails: str = ""

    def hooks(self, step):
        def note(point):
            def run(number, *details):
                seen.append((point, number, *details))
                if point == self.fails:
                    raise LookupError("no route to host")

            run.__module__ = "users_file"
            return run

        def between(number):
            seen.append(("between", number, step.model))

        return [
            StepHook(every=2, run=note("step")),
            EvaluatedHook(run=note("evaluated")),
            SavedHook(run=note("saved")),
            PeriodicHook(every=2, run=between),
        ]


def recipe(kind=Watched, **settings):
    small = dataclasses.replace(micro().model, n_layer=1)
    how = {"model": small, "num_steps": 4, "eval_every": 2, "checkpoint_every": 2, **settings}
    return kind(**{**vars(micro()), **how})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return load_text([text], sequence_length=micro().sequence_length)


def trained(data, out, recipe, **more):
    seen.clear()
    options = RunOptions(mesh=js.mesh(), data=data, out=out, sample_tokens=0, say=lambda line: None, **more)
    return run_recipe(MODEL_FILE, recipe, options)


def points(*names):
    return [(point, number) for point, number, *_ in seen if point in names]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    finished = trained(data, tmp_path_factory.mktemp("whole") / "run", recipe())
    return finished, list(seen)


def test_hooks_run_after_their_points(whole):
    _, calls = whole
    by_point = {}
    for point, number, *_ in calls:
        by_point.setdefault(point, []).append(number)
    assert by_point == {"step": [2, 4], "evaluated": [2, 4], "saved": [2, 4], "between": [2, 4]}
    order = [(point, number) for point, number, *_ in calls if number == 2 and point != "saved"]
    assert order == [("step", 2), ("evaluated", 2), ("between", 2)]


def test_they_receive_what_the_record_has(whole):
    finished, calls = whole
    lines = read_metrics(finished.out / "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    validation = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    for point, number, *details in calls:
        if point == "step":
            assert details[0]["loss"] == losses[number]
        if point == "evaluated":
            assert details[0] == {"val_loss": validation[number]}
        if point == "saved":
            assert details[0] == finished.out / "checkpoints" / str(number)
            assert own_checkpoint(finished.out.absolute() / "checkpoints" / "4").manifest.step == 4
        if point == "between":
            assert hasattr(details[0], "blocks")


@pytest.mark.wide
def test_a_resumed_run_runs_those_of_its_own_steps(data, tmp_path):
    trained(data, tmp_path / "run", recipe(num_steps=2))
    trained(data, tmp_path / "run", recipe(), resume=True)
    assert points("step", "evaluated", "saved") == [("step", 4), ("evaluated", 4), ("saved", 4)]


@pytest.mark.parametrize(
    ("point", "kind", "last_step"),
    [("step", "StepHook", 2), ("evaluated", "EvaluatedHook", 2), ("saved", "SavedHook", 2)],
)
def test_an_error_in_a_hook_ends_the_run_and_names_it(data, tmp_path, point, kind, last_step):
    with pytest.raises(LookupError, match="no route to host") as caught:
        trained(data, tmp_path / "run", recipe(fails=point))
    note, advice = caught.value.__notes__
    assert re.match(rf"raised in a {kind} after step 2: .*note.*run, .*test_own_hooks.py, line \d+", note)
    assert "--resume" in advice


def test_what_is_no_hook_is_refused(data, tmp_path):
    class Wrong(Recipe):
        def hooks(self, step):
            return [print]

    with pytest.raises(ShardingError, match="This is no hook"):
        trained(data, tmp_path / "run", recipe(Wrong))


def test_a_run_has_its_own_evaluations(data, tmp_path):
    class Twice(Recipe):
        def hooks(self, step):
            return [EvaluationHook(every=1, run=lambda number: {"loss": 1.0})]

    with pytest.raises(ShardingError, match="A run has its own evaluations"):
        trained(data, tmp_path / "run", recipe(Twice))


def test_a_loop_of_ones_own_takes_them():
    class Step:
        """A step that computes nothing."""

        mesh = js.mesh()
        model_leaves = ()

        def __call__(self, batch):
            return {"loss": 2.0, "grad_norm": 1.0}

    calls = []
    hooks = [
        EvaluationHook(every=3, run=lambda step: {"loss": 0.5}, until=lambda step, scalars: "enough"),
        EvaluatedHook(run=lambda step, scalars: calls.append((step, scalars["val_loss"]))),
        StepHook(run=lambda step, scalars: calls.append((step, scalars["loss"]))),
        PeriodicHook(every=None, run=lambda step: calls.append((step, "end"))),
    ]
    batches = [{"x": np.zeros((8, 1), np.float32)}] * 5
    fitted = fit(Step(), batches, num_steps=5, hooks=hooks)
    assert (fitted.step, fitted.stopped_early, fitted.val_loss) == (3, "enough", 0.5)
    assert calls == [(1, 2.0), (2, 2.0), (3, 2.0), (3, 0.5), (3, "end")]
    with pytest.raises(ShardingError, match="does not know when a checkpoint is complete"):
        fit(Step(), batches, num_steps=5, hooks=[SavedHook(run=print)])
