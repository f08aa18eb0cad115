"""A run keeps, evaluates, saves, resumes, samples and exports an average of its weights, from any step to any other."""

import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from jshard import cli
from jshard.checkpoint.readers import own_checkpoint
from jshard.train.records import read_metrics
from tests.micro_gpt import USERS_FILE

SMALL = ["--data", "text.txt", "--set", "model.n_layer=1", "--set", "learning_rate=2e-2", "--set", "eval_every=2"]
EVERY = ["--set", "checkpoint_every=3", "--track", "--sample-tokens", "0", "--mesh", "fsdp=8"]
AVERAGE = ["--set", "ema_decay=0.9", "--set", "ema_warmup=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with two runs of six steps, of which one has an average."""
    folder = tmp_path_factory.mktemp("average")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "my_model.py").write_text(USERS_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path[:])
        for out, more in (("plain", []), ("averaged", AVERAGE)):
            assert cli.main(["train", "my_model.py", *SMALL, *EVERY, *more, "--steps", "6", "--out", out]) == 0
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs a command; its exit code, and what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    capsys.readouterr()

    def call(*arguments):
        code = cli.main([*map(str, arguments)])
        said = capsys.readouterr()
        return code, said.err if code else said.out

    return call


def evaluations(path):
    lines = read_metrics(path / "metrics.jsonl")
    names = ("step", "val_loss", "val_ema_loss", "loss")
    return [{name: line[name] for name in names if name in line} for line in lines]


def stored(path, prefix=""):
    opened = own_checkpoint(path.absolute())
    arrays = {name: leaf for name, leaf in opened.arrays.items() if name.startswith(prefix)}
    return {name: opened.read(name, tuple(slice(0, size) for size in leaf.shape)) for name, leaf in arrays.items()}


def continued(run, folder, source, out, *settings, without="6"):
    """A copy of a run without its last checkpoint, resumed."""
    shutil.copytree(folder / source, folder / out)
    if without is not None:
        shutil.rmtree(folder / out / "checkpoints" / without)
    code, said = run("train", "my_model.py", *EVERY, "--out", out, "--resume", *settings)
    assert code == 0, said
    return said


def test_both_are_evaluated(folder):
    lines = [line for line in evaluations(folder / "averaged") if "val_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["val_ema_loss"] != line["val_loss"] for line in lines)
    plain = [line for line in evaluations(folder / "plain") if "val_loss" in line]
    assert [line["val_loss"] for line in plain] == [line["val_loss"] for line in lines]
    assert not any("val_ema_loss" in line for line in plain)


def test_a_resumed_run_is_equal_bit_for_bit(run, folder):
    said = continued(run, folder, "averaged", "again")
    assert "resumed from again/checkpoints/3" in said and "average of the weights" not in said
    assert evaluations(folder / "again") == evaluations(folder / "averaged")
    whole, again = (stored(folder / name / "checkpoints" / "6", "ema/") for name in ("averaged", "again"))
    assert whole.keys() == again.keys() and "ema/count" in whole and whole["ema/count"] == 6
    for path, value in whole.items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)


def test_an_average_that_begins_later(run, folder):
    said = continued(run, folder, "plain", "later", *AVERAGE)
    assert "ema_decay is 0.9, was None" in said
    assert "the average of the weights begins after step 3, with those of that step" in said
    assert stored(folder / "later" / "checkpoints" / "6", "ema/count")["ema/count"] == 3
    assert ["val_ema_loss" in line for line in evaluations(folder / "later") if "val_loss" in line] == [0, 1, 1]


def test_an_average_that_ends(run, folder):
    said = continued(run, folder, "averaged", "ended", "--set", "ema_decay=none")
    assert "the average of the weights ends here: ema_decay is none; older checkpoints have it" in said
    assert not stored(folder / "ended" / "checkpoints" / "6", "ema/")
    assert stored(folder / "ended" / "checkpoints" / "3", "ema/")


@pytest.mark.wide
def test_a_run_of_an_earlier_version_continues_without_remarks(run, folder):
    """Its record has none of these settings; only one that has another value now is a change."""
    new = ("ema_decay", "ema_dtype", "ema_start_step", "ema_warmup", "monitor", "monitor_mode", "patience", "keep_best")
    for out, settings in (("old", []), ("old-averaged", AVERAGE)):
        shutil.copytree(folder / "plain", folder / out)
        record = json.loads((folder / out / "run.json").read_text())
        for name in (*new, "min_delta"):
            del record["recipe"][name]
        (folder / out / "run.json").write_text(json.dumps(record))
        said = continued(run, folder, out, f"{out}-resumed", *settings)
        assert ("was nothing" in said) == bool(settings)
        assert ("ema_decay is 0.9, was nothing" in said) == bool(settings)
        assert evaluations(folder / f"{out}-resumed")[-1]["val_loss"] == evaluations(folder / "plain")[-1]["val_loss"]


def test_eval_takes_the_average(run, folder):
    last = evaluations(folder / "averaged")[-1]
    for weights, name in (("model", "val_loss"), ("ema", "val_ema_loss")):
        code, text = run("eval", "averaged", "--json", "--weights", weights)
        assert code == 0, text
        assert json.loads(text)[name] == pytest.approx(last[name], abs=1e-6)
    assert "after 6 steps, of the average of the weights" in run("eval", "averaged", "--weights", "ema")[1]
    again = json.loads(run("eval", "averaged", "--json", "--weights", "ema", "--mesh", "replica=2,fsdp=4")[1])
    assert again["val_ema_loss"] == pytest.approx(last["val_ema_loss"], abs=1e-5)


def test_sample_takes_the_average(run):
    asked = ["sample", "averaged", "--tokens", "24", "--temperature", "2"]
    texts = {run(*asked, "--weights", weights)[1] for weights in ("model", "ema")}
    assert len(texts) == 2


def test_export_takes_the_average(run, folder):
    code, text = run("ckpt", "export", "averaged", "exported", "--weights", "ema")
    assert code == 0, text
    exported = load_file(folder / "exported" / "model.safetensors")
    averages = stored(folder / "averaged" / "checkpoints" / "6", "ema/weights/")
    assert len(exported) == len(averages)
    sums = sorted(float(x.sum()) for x in exported.values())
    assert sums == pytest.approx(sorted(float(x.sum()) for x in averages.values()), abs=1e-4)


@pytest.mark.parametrize("command", [["eval", "plain"], ["sample", "plain"], ["ckpt", "export", "plain", "none"]])
def test_a_run_without_an_average_says_so(run, command):
    code, said = run(*command, "--weights", "ema")
    assert code == 2 and "The run has no average of the weights." in said and "--weights model" in said


def test_the_plan_counts_the_average(run, folder):
    plans = [json.loads(run("plan", "my_model.py", "--json", "--mesh", "fsdp=8", *more)[1]) for more in ([], AVERAGE)]
    without, with_average = (plan["memory_per_device"] for plan in plans)
    assert without["averages_bytes"] == 0
    assert with_average["averages_bytes"] == with_average["parameters_bytes"]  # both are float32
    more = with_average["averages_bytes"]
    assert with_average["held_bytes"] == without["held_bytes"] + more
    assert with_average["step_bytes"] == without["step_bytes"] + more
    assert "averages of the weights" in run("plan", "my_model.py", "--mesh", "fsdp=8", *AVERAGE)[1]


@pytest.mark.wide
def test_a_dtype_that_loses_most_updates_is_said(run):
    coarse = ["--set", "ema_decay=0.999", "--set", "ema_dtype=bfloat16"]
    code, said = run("train", "my_model.py", *SMALL, *EVERY, *coarse, "--steps", "1", "--out", "coarse")
    assert code == 0 and "ema_dtype=bfloat16 rounds to 0.0078125, and an update is 0.001 of the difference" in said


@pytest.mark.parametrize("setting", ["ema_decay=1", "ema_decay=0", "ema_decay=-0.5", "ema_dtype=int8"])
def test_invalid_settings(run, setting):
    code, said = run("train", "my_model.py", *SMALL, "--set", setting, "--dry-run")
    assert code == 2 and "The recipe has invalid values." in said and setting.partition("=")[0] in said
