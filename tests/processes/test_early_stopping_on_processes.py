"""Two processes end early after the same evaluation, resumed too, and average the weights as one process does."""

import json
import shutil

import numpy as np
import pytest

from jshard.train.records import read_metrics
from tests.processes.test_two_processes import MESH, TIMEOUT_S, TWO, Command

# No evaluation after the first is an improvement.
SETTINGS = (
    *("checkpoint_every=2", "eval_every=2", "model.n_layer=1", "ema_decay=0.9", "monitor=val_ema_loss"),
    *("patience=2", "min_delta=100", "keep_best=1", "keep_checkpoints=1", "monitor_mode=max"),
)


def evaluations(out):
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "val_loss" in line]
    return [[line[name] for name in ("step", "val_loss", "val_ema_loss")] for line in lines]


def ended_early(*arguments, **how):
    """A command that ends after the third evaluation, the second without an improvement."""
    command = Command(*arguments, steps=12, settings=SETTINGS, **how)
    code, stdout, stderr = command.ends()
    assert code == 0, stderr
    assert stdout.count("stopped early after step 6: val_ema_loss has not improved by more than 100 in 2") == 1, stdout
    cause = json.loads((command.out / "run.json").read_text())["attempts"][-1]["cause"]
    assert cause.startswith("stopped early: val_ema_loss")
    return command.out


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_processes_end_after_the_same_evaluation(tmp_path):
    one = evaluations(ended_early(tmp_path, "one", *MESH))
    out = ended_early(tmp_path, "two", *TWO)
    np.testing.assert_allclose(evaluations(out), one, rtol=1e-5)
    assert sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir()) == ["2", "6"]
    # From the best one: without the evaluation before it, the run would end later.
    shutil.rmtree(out / "checkpoints" / "6")
    again = evaluations(ended_early(tmp_path, "two", *TWO, "--resume"))
    np.testing.assert_allclose(again, one, rtol=1e-5)
