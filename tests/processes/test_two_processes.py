"""`jshard train --processes 2` trains like one process, and ends with a report when a process is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint import Checkpointer
from jshard.data import Loader
from jshard.recipes.building import restore
from jshard.recipes.overrides import override
from jshard.train import load_model_file
from jshard.train.records import read_metrics
from tests.compiling import environment
from tests.parity import numbers_of
from tests.wide import wide

MODEL = Path(__file__).with_name("spied_model.py")
STEPS = 16
MESH = ("--mesh", "replica=2,fsdp=2")  # a sum over processes is dearer with more devices
TWO = (*MESH, "--processes", "2")
TIMEOUT_S = 800
SETTINGS = ("checkpoint_every=4", "eval_every=5", "model.dropout=0.1", "model.n_layer=1")


class Command:
    """`jshard train` on the spied model, in a process group of its own."""

    def __init__(self, folder, name, *options, steps=STEPS, model=MODEL, settings=SETTINGS, **variables):
        self.out = folder / name
        self.spy = folder / f"{name}-samples-{len(list(folder.iterdir()))}"
        self.spy.mkdir()
        env = environment(programs=folder / "programs") | {"SPY_FOLDER": str(self.spy), "PYTHONUNBUFFERED": "1"}
        settings = [f"--set={key}" for key in settings]
        arguments = ["train", str(model), "--out", str(self.out), "--steps", str(steps), "--track", *settings, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jshard", *arguments],
            env=env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ends(self):
        """Exit code, stdout and stderr."""
        try:
            stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, stdout, stderr

    def reaches(self, step):
        """Waits for a step to be in the record."""
        until = time.monotonic() + TIMEOUT_S
        while last_step(self.out) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)

    def workers(self):
        """The pids of its worker processes, by process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        environs = {int(pid): Path(f"/proc/{pid}/environ").read_bytes() for pid in children}
        ids = {pid: re.search(rb"JAX_PROCESS_ID=(\d)", environ) for pid, environ in environs.items()}
        return {int(found[1]): pid for pid, found in ids.items() if found}


def last_step(out):
    try:
        return read_metrics(out / "metrics.jsonl")[-1]["step"]
    except (OSError, IndexError):
        return 0


def record(out):
    return [
        [line.get(key) for key in ("step", "loss", "grad_norm", "val_loss")]
        for line in read_metrics(out / "metrics.jsonl")
    ]


def samples(command, steps=STEPS):
    """What each process has read for its last steps; before it are the loader's checks."""
    read = [list(map(int, path.read_text().split())) for path in sorted(command.spy.iterdir())]
    return [numbers[-steps * 16 // len(read) :] for numbers in read]


def leaves(out):
    """The last checkpoint of a run, restored in this process."""
    model_file = load_model_file(MODEL)
    recipe = override(model_file.recipe()[1], SETTINGS)
    model, optimizer, step, _ = restore(model_file, recipe, js.mesh(), Checkpointer(out / "checkpoints"))
    return step, [np.asarray(numbers_of(x)) for x in jax.tree.leaves(nnx.state((model, optimizer)))]


# One test, not several over a fixture: parallel test workers would each start the processes again.
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("interrupted", [False, wide(True)])
def test_two_processes_train_like_one(tmp_path, monkeypatch, interrupted):
    """Also if one of them is lost on the way, and the run that continues is stopped: it is as if nothing had been."""
    one = Command(tmp_path, "one", *MESH)
    code, _, stderr = one.ends()
    assert code == 0, stderr
    at = 0
    if interrupted:
        lost_with_a_report(tmp_path)
        at = stopped_where_it_is_saved(tmp_path)
    two = Command(tmp_path, "two", *TWO, "--resume")
    code, stdout, stderr = two.ends()
    assert code == 0, stderr
    assert not at or f"resumed from {two.out}/checkpoints/{at}\n" in stdout
    assert "Traceback" not in stderr
    assert "[Gloo]" not in stdout + stderr
    assert stdout.count(f"step {STEPS}: validation loss") == 1  # one process writes

    # The same losses, to rounding: a sum over two processes adds in another order.
    for ours, theirs in zip(record(one.out), record(two.out), strict=True):
        assert [x is None for x in ours] == [x is None for x in theirs]
        np.testing.assert_allclose(*([x for x in line if x is not None] for line in (ours, theirs)), rtol=1e-5)

    # The same samples, each process its rows.
    monkeypatch.setenv("SPY_FOLDER", str(tmp_path))
    recipe = load_model_file(MODEL).recipe()[1]
    loader = Loader(data=load_model_file(MODEL).data(recipe), batch_size=16, seed=0, rows=range(16))
    ids = np.array([loader.sample_ids(step) for step in range(STEPS)])
    assert samples(one) == [ids.ravel().tolist()]
    assert samples(two, STEPS - at) == [ids[at:, :8].ravel().tolist(), ids[at:, 8:].ravel().tolist()]

    # The same checkpoint; no matter who wrote it.
    (step, ours), (other_step, theirs) = leaves(one.out), leaves(two.out)
    assert step == other_step == STEPS
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5)
    assert [start["processes"] for start in json.loads((two.out / "run.json").read_text())["starts"]] == [2] * (
        3 if interrupted else 1
    )


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_an_id_beyond_the_table_is_named(tmp_path):
    """The processes look for it together, and one of them prints what they have found."""
    code, _, stderr = Command(tmp_path, "wrong", *TWO, "--set=model.vocab_size=96").ends()
    assert code == 1, stderr
    assert stderr.count("RunError: Row ") == 1, stderr
    assert "it has 96 rows, 0 to 95" in stderr and 'values of batch["inputs"] are out of range' in stderr


def lost_with_a_report(folder):
    """A process that is killed ends the run; what was profiled before is whole, of each process its devices."""
    lost = Command(folder, "two", *TWO, "--profile", "3:5")
    lost.reaches(9)  # the save of step 8 has waited for that of step 4
    os.kill(lost.workers()[1], signal.SIGKILL)
    code, stdout, stderr = lost.ends()
    assert code == 75
    assert " on 4 x cpu of 2 processes" in stdout
    assert re.search(r"process 1 .*pid \d+", stderr), stderr
    assert "SIGKILL" in stderr
    assert re.search(rf"{lost.out}/checkpoints/[48]\n", stderr), stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    trace = js.read_profile(lost.out)
    assert trace.devices == tuple(f"process {p} cpu:{d}" for p in range(2) for d in range(2))
    assert ([s.number for s in trace.steps], trace.has_units) == ([4, 5], True)


def stopped_where_it_is_saved(folder):
    """SIGTERM saves the step at work, which is returned; the steps that were lost are done again, bit for bit."""
    lost = record(folder / "two")
    stopped = Command(folder, "two", *TWO, "--resume")
    stopped.reaches(lost[-1][0] + 1)
    stopped.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = stopped.ends()
    assert code == 75, stderr
    assert re.search(rf"resumed from {stopped.out}/checkpoints/[48]\n", stdout), stdout
    assert record(stopped.out)[: len(lost)] == lost
    at = last_step(stopped.out)
    assert f"stopped by SIGTERM after step {at}: {stopped.out}/checkpoints/{at} is saved" in stdout
    return at
