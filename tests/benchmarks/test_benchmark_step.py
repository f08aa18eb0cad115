"""The step benchmark: every framework trains the same model on the same data, and its ratios are what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step.merging import merged
from benchmarks.step.place import place_of
from benchmarks.step.summary import difference, losses, overhead, ratios
from tests.compiling import XLA_FLAGS

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_JOB_ID": "3", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
SLURM |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.wide
def test_two_processes_of_each_framework_get_equal_losses_and_a_report_is_written(tmp_path):
    options = ["--quick", "--processes", "2", "--only", "jshard chain,raw Flax", "--out", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "step", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (figures,), (text,) = tmp_path.glob("*_step.json"), tmp_path.glob("*_step.md")
    report = json.loads(figures.read_text())
    assert not report["left_out"]
    found = report["candidates"]
    assert found.keys() == {"jshard chain", "raw Flax"}
    assert len(losses(found["raw Flax"])) == 1 + 2 * 3  # the first step; two turns of a step to warm up and two more
    assert difference(found, sharded=True) < 1e-5
    assert losses(found["jshard chain"])[-1] < losses(found["jshard chain"])[0]
    # Between processes on CPUs, gradients are summed on arrival.
    assert found["jshard chain"]["facts"]["collectives"]["all-to-all"] > 0
    assert report["worker_versions"].keys() >= {"jax", "flax", "optax"}
    assert text.read_text() in run.stdout and "Quick run" in text.read_text()
    assert {path.name[11:] for path in tmp_path.glob("*.svg")} == {"step_steps.svg", "step_losses.svg"}


def row(*rounds: float, alone: str = "", process: int = 0) -> dict:
    described = [{"step_s": s, "host_s": 0.001, "losses": [2.0, 1.0], "grad_norms": [1.0, 1.0]} for s in rounds]
    return {
        "sharded": bool(alone),
        "alone": alone,
        "restarted": False,
        "facts": {"device": "cpu"},
        "processes": {str(process): {"first_loss": 3.0, "rounds": described}},
    }


def both(first: dict, second: dict) -> dict:
    return first | {"processes": first["processes"] | second["processes"]}


def test_overhead_is_the_median_of_ratios_within_rounds():
    # The machine is three times slower in the second round: a ratio of medians would not see that all rounds agree.
    candidates = {"ours": row(1.2, 3.3, 1.0, alone="plain"), "plain": row(1.0, 3.0, 1.0)}
    found = overhead(candidates, "ours")
    assert (found.least, round(found.median, 6), round(found.most, 6)) == (1.0, 1.1, 1.2)
    assert overhead(candidates, "plain") is None


def test_a_sharded_step_takes_as_long_as_its_slowest_process_and_others_their_mean():
    sharded = both(row(1.0, alone="x"), row(2.0, alone="x", process=1))
    alone = both(row(1.0), row(2.0, process=1))
    assert ratios(sharded, alone).median == 2.0 / 1.5


def test_losses_of_models_that_train_alone_are_means_over_processes():
    other = row(1.0, process=1)
    other["processes"]["1"]["rounds"][0]["losses"] = [4.0, 3.0]
    assert losses(both(row(1.0), other)) == [3.0, 3.0, 2.0]
    assert difference({"a": row(1.0), "b": row(1.0)}, sharded=False) == 0
    assert difference({"a": row(1.0)}, sharded=False) is None


def session(process: int) -> dict:
    return {
        "case": "step", "quick": True, "sizes": {}, "device": "gpu", "processes": 2, "rounds": 1, "steps": 2,
        "alive": True,
        "worker_versions": {"jax": "1"}, "measured_processes": [process], "devices": ["H100"], "left_out": {},
        "load_per_core_before": 0.1 * process, "candidates": {"ours": row(1.0 + process, alone="x", process=process)},
    }  # fmt: skip


def test_reports_of_all_processes_become_one():
    whole = merged([session(1), session(0)])
    assert whole["measured_processes"] == [0, 1]
    assert whole["candidates"]["ours"]["processes"].keys() == {"0", "1"}
    assert whole["load_per_core_before"] == 0.1


def test_reports_that_are_not_of_one_run_are_refused():
    with pytest.raises(SystemExit, match="differ in rounds"):
        merged([session(0), session(1) | {"rounds": 3}])
    with pytest.raises(SystemExit, match="processes 1"):
        merged([session(0)])


def test_a_task_of_slurm_measures_its_own_process():
    place = place_of(None, SLURM)
    assert (place.processes, place.mine, place.first_position, place.host) == (4, (3,), 1, "node1")
    assert place.address(2) == place_of(None, SLURM | {"SLURM_PROCID": "0"}).address(2)
    assert place_of(2, SLURM).mine == (0, 1)
