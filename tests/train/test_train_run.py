"""A run leaves its record, continues bit for bit after it was stopped or killed, and sees the same samples anywhere."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard as js
from jshard.checkpoint import Checkpointer, CheckpointWarning, saving
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.series import history
from jshard.data import Loader, load_text
from jshard.errors import RunError, ShardingError
from jshard.launch import StallWatch
from jshard.recipes.building import create_from, restore
from jshard.train import RunOptions, load_model_file, register_tracker, run_recipe, trackers, training_run
from jshard.train.records import read_metrics
from tests.micro_gpt import MODELS, micro
from tests.parity import numbers_of

GPT = load_model_file(MODELS / "gpt.py")
MODEL_FILE = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
DROPOUT = dataclasses.replace(micro().model, n_layer=1, dropout=0.1)
RECIPE = dataclasses.replace(
    micro(), model=DROPOUT, num_steps=8, learning_rate=1e-2, eval_every=4, checkpoint_every=3, keep_checkpoints=2
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "fox.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return load_text([text], sequence_length=RECIPE.sequence_length)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "_trackers", dict(trackers._trackers))
        register_tracker("uploads")(lambda tracked: Uploads(tracked.folder, lines))
        finished = run_recipe(
            MODEL_FILE,
            RECIPE,
            RunOptions(
                mesh=js.mesh(),
                data=data,
                out=out,
                sample_tokens=8,
                command_options={"seed": None},
                track=["uploads"],
                say=lines.append,
            ),
        )
    return finished, lines


class Uploads:
    """A tracker that sends the files of the run when it is closed, as that of W&B does."""

    def __init__(self, out, sent):
        self._out, self._sent = out, sent
        sent.append("opened the tracker")

    def log(self, step, scalars):
        pass

    def close(self):
        self._sent += [f"sent {path.name}" for path in self._out.iterdir()]


class SpySource:
    """Reports which samples are read, and may do something at one of them."""

    def __init__(self, source, at=None, do=None):
        self._source, self._at, self._do, self.read = source, at, do, []

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        self.read.append(index)
        if self._at is not None and len(self.read) == self._at:
            self._do()
        return self._source[index]


def state_of(finished, mesh):
    model, optimizer, step, _ = restore(MODEL_FILE, RECIPE, mesh, Checkpointer(finished.out / "checkpoints"))
    return step, [np.asarray(numbers_of(x)) for x in jax.tree.leaves(nnx.state((model, optimizer)))]


def record(finished):
    return [
        {k: v for k, v in line.items() if k in ("step", "loss", "grad_norm", "val_loss")} for line in metrics(finished)
    ]


def metrics(finished):
    return read_metrics(finished.out / "metrics.jsonl")


def test_a_run_leaves_its_record(whole):
    finished, lines = whole
    assert (finished.step, finished.stopped_by) == (8, None)
    names = {path.name for path in finished.out.iterdir()} - {".lock"}
    assert names == {"run.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints"}
    assert [line["step"] for line in metrics(finished) if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in metrics(finished) if "val_loss" in line] == [4, 8]
    assert metrics(finished)[-1]["val_loss"] == finished.val_loss < metrics(finished)[0]["loss"]
    assert {"grad_norm", "step_s", "tokens_per_s", "peak_bytes", "host_bytes"} < metrics(finished)[-2].keys()
    assert "mfu" not in metrics(finished)[-2]
    assert (finished.out / "loss.png").stat().st_size > 1000
    assert len(finished.sample.encode()) >= 32 + 8 - 3  # the prompt, and the last bytes may be part of a character
    assert (finished.out / "sample.txt").read_text() == finished.sample + "\n"
    assert finished.checkpoint == finished.out / "checkpoints" / "8"
    assert {path.name for path in (finished.out / "checkpoints").iterdir() if path.is_dir()} == {"6", "8"}
    run = json.loads((finished.out / "run.json").read_text())
    assert run["recipe"]["model"]["dropout"] == 0.1
    assert [start["step"] for start in run["starts"]] == [0]
    assert any(line.startswith("no MFU: it is a share of the devices' peak") for line in lines)
    assert {"sent loss.png", "sent sample.txt"} < set(lines)


def test_trackers_are_opened_before_the_step_is_compiled(whole):
    _, lines = whole
    assert lines.index("opened the tracker") < next(i for i, line in enumerate(lines) if "compiling the step" in line)


def test_a_warmup_that_is_longer_than_the_run_is_said(data, tmp_path):
    lines = []
    recipe = dataclasses.replace(RECIPE, num_steps=2, warmup_steps=9)
    run_recipe(
        MODEL_FILE,
        recipe,
        RunOptions(mesh=js.mesh(), data=data, out=tmp_path / "run", sample_tokens=0, say=lines.append),
    )
    assert lines[0].startswith("warmup_steps=9: the learning rate rises over all 2 steps; --set warmup_steps=1 ")


def test_the_sample_in_the_end_has_a_deadline(whole, data, tmp_path, monkeypatch):
    shutil.copytree(whole[0].out, tmp_path / "run")
    watch, seen = StallWatch(), []
    monkeypatch.setattr(
        training_run, "sample_text", lambda *_, **__: seen.append((watch.phase, watch.deadline().limit_s))
    )
    how = {"mesh": js.mesh(), "resume": True, "watch": watch, "sample_tokens": 8}
    run_recipe(MODEL_FILE, RECIPE, RunOptions(data=data, out=tmp_path / "run", **how))
    assert seen == [("writing the sample", 1800.0)]


def test_a_stopped_run_continues_bit_for_bit(whole, data, tmp_path):
    # In the middle between two checkpoints, while the loader is some batches ahead.
    source = SpySource(data.train, at=6 * RECIPE.batch_size, do=lambda: os.kill(os.getpid(), signal.SIGTERM))
    arguments = {"mesh": js.mesh(), "out": tmp_path / "run", "sample_tokens": 0, "say": lambda line: None}
    stopped = run_recipe(MODEL_FILE, RECIPE, RunOptions(data=dataclasses.replace(data, train=source), **arguments))
    assert stopped.stopped_by == signal.SIGTERM
    assert 0 < stopped.step < 8
    assert stopped.checkpoint == stopped.out / "checkpoints" / str(stopped.step)
    # What a run wrote after its last checkpoint, and a line that it did not finish, are done again.
    with (stopped.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": stopped.step + 1, "loss": 77.0}) + '\n{"step": ')

    lines = []
    resumed = run_recipe(MODEL_FILE, RECIPE, RunOptions(data=data, resume=True, **arguments | {"say": lines.append}))
    assert f"resumed from {stopped.checkpoint}" in lines
    assert record(resumed) == record(whole[0])
    for ours, theirs in zip(state_of(resumed, js.mesh()), state_of(whole[0], js.mesh()), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    run = json.loads((resumed.out / "run.json").read_text())
    assert [start["step"] for start in run["starts"]] == [0, stopped.step]

    (resumed.out / "loss.png").unlink()
    (resumed.out / "loss.png").mkdir()  # a picture that cannot be written fails no run
    again = run_recipe(MODEL_FILE, RECIPE, RunOptions(data=data, resume=True, **arguments | {"say": lines.append}))
    assert (again.step, again.stopped_by) == (8, None)
    assert lines[-1].startswith("sample.txt or loss.png could not be written: ")
    assert record(again) == record(whole[0])


@pytest.mark.wide
def test_another_mesh_sees_the_same_samples(data, tmp_path):
    source = SpySource(data.train)
    recipe = dataclasses.replace(RECIPE, num_steps=3, eval_every=100, accumulate=2)
    finished = run_recipe(
        MODEL_FILE,
        dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dropout=0.0)),
        RunOptions(
            mesh=js.mesh(replica=2, fsdp=2, devices=jax.devices()[:4]),
            data=dataclasses.replace(data, train=source),
            out=tmp_path / "run",
            sample_tokens=0,
            say=lambda line: None,
        ),
    )
    loader = Loader(data=data, batch_size=16, seed=0, rows=range(16))
    wanted = [index for step in range(3) for index in loader.sample_ids(step)]
    assert source.read[-len(wanted) :] == wanted  # before them are the loader's checks
    assert finished.step == 3


@pytest.mark.wide
def test_a_run_continues_with_batches_of_another_size(whole, data, tmp_path):
    """With the next samples, none of them twice."""
    out, source = shutil.copytree(whole[0].out, tmp_path / "run"), SpySource(data.train)
    recipe = dataclasses.replace(RECIPE, batch_size=8, num_steps=10, eval_every=100)
    how = {"mesh": js.mesh(), "out": out, "resume": True, "sample_tokens": 0}
    lines = []
    run_recipe(MODEL_FILE, recipe, RunOptions(data=dataclasses.replace(data, train=source), say=lines.append, **how))
    loader = Loader(data=data, batch_size=16, seed=0, rows=range(16))
    assert "batch_size is 8, was 16" in lines and source.read[-16:] == loader.sample_ids(8)


# What a run makes of its checkpoints.


def trained(data, out, mesh=None, **more):
    recipe = dataclasses.replace(RECIPE, num_steps=more.pop("steps", 8))
    lines: list[str] = []
    finished = run_recipe(
        MODEL_FILE,
        recipe,
        RunOptions(mesh=mesh or js.mesh(), data=data, out=out, sample_tokens=0, say=lines.append, **more),
    )
    return finished, lines


def test_saves_are_at_work_while_the_run_continues(whole):
    """The history says how long each save kept the run waiting; all but the last had a step beside them."""
    finished, _ = whole
    saves = history.read(finished.out / "checkpoints")
    assert [save["step"] for save in saves] == [3, 6, 8]
    assert all(save["error"] is None and save["blocked_s"] > 0 for save in saves)
    manifest = own_checkpoint(finished.checkpoint.absolute()).manifest
    assert manifest.step == 8 and manifest.metrics == {"val_loss": finished.val_loss}


def test_a_damaged_checkpoint_costs_its_steps_and_no_more(whole, data, tmp_path):
    """A flipped bit: the run goes back to the checkpoint before, says so, and ends as if nothing had happened."""
    finished, _ = whole
    out = shutil.copytree(finished.out, tmp_path / "run")
    values = max((out / "checkpoints" / "8").rglob("*"), key=lambda file: file.stat().st_size)
    raw_bytes = bytearray(values.read_bytes())
    raw_bytes[100] ^= 4
    values.write_bytes(raw_bytes)
    with pytest.warns(CheckpointWarning) as warned:
        again, lines = trained(data, out, resume=True)
    texts = [str(warning.message) for warning in warned]
    assert any("is damaged; going back to step 6" in text and "checkpoints/8" in text for text in texts)
    assert any("is now named 8.damaged" in text for text in texts)
    assert any(line == f"resumed from {out / 'checkpoints' / '6'}" for line in lines)
    for a, b in zip(state_of(again, js.mesh())[1], state_of(finished, js.mesh())[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_save_that_fails_in_the_background_ends_the_run_at_the_next_step(data, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving._manifest, "write", full)
    with pytest.raises(RunError, match=r"(?s)of step 3 could not be written.*No space left on device") as caught:
        trained(data, tmp_path / "run")
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] < 8
    assert "no checkpoint was saved yet" in caught.value.__notes__[0]


def test_a_run_begins_with_the_parameters_of_another(whole, data, tmp_path):
    """From a run, on another mesh: parameters equal, and the optimizer is new."""
    finished, _ = whole
    mesh = js.mesh(replica=2, fsdp=2, devices=jax.devices()[:4])
    model, optimizer = create_from(MODEL_FILE, RECIPE, mesh, finished.out)
    saved = state_of(finished, js.mesh())[1]
    params = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(any(np.array_equal(x, y) for y in saved) for x in params) == len(params) > 4
    assert not np.any([np.any(x) for x in jax.tree.leaves(nnx.state(optimizer)) if np.ndim(x) > 0])
    begun, lines = trained(data, tmp_path / "run", mesh=mesh, steps=1, init_from=finished.out)
    assert f"parameters of {finished.out}" in lines
    assert metrics(begun)[0]["loss"] < 0.9 * metrics(finished)[0]["loss"]
    _, lines = trained(data, tmp_path / "run", mesh=mesh, steps=1, resume=True, init_from=tmp_path / "gone")
    assert any("gone, and continues with its own" in line for line in lines)


def test_a_source_that_does_not_fit_leaves_no_run_behind(whole, data, tmp_path):
    wider = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, d_ff=2 * RECIPE.model.d_ff))
    save_file({"transformer.wte.weight": np.zeros((256, 8), np.float32)}, tmp_path / "x.safetensors")
    bad = {
        "There is no checkpoint to restore": (RECIPE, tmp_path / "gone"),
        "The checkpoint does not fit": (wider, whole[0].out),
        r"(?s)have no names in other formats.*gpt\.py, line \d+\n.*rotary": (RECIPE, tmp_path / "x.safetensors"),
    }
    for text, (recipe, source) in bad.items():
        with pytest.raises(ShardingError, match=text) as caught:
            run_recipe(
                dataclasses.replace(MODEL_FILE, path=GPT.path, hf_names=GPT.hf_names),
                recipe,
                RunOptions(mesh=js.mesh(), data=data, out=tmp_path / "run", init_from=source),
            )
        assert not hasattr(caught.value, "__notes__") and not (tmp_path / "run").exists()
