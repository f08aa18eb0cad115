"""The benchmark of the host's work runs, and says all that is needed to judge its figures. No time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import XLA_FLAGS

ROOT = Path(__file__).parents[2]
WAYS = ("nnx_jit_ms", "cached_partial_ms", "train_step_ms", "launch_ms", "fit_ms", "around_ms")


@pytest.mark.wide
def test_quick_run_writes_table_and_figures(tmp_path):
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", "dispatch", "--quick", "--out", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (figures,), (text,) = tmp_path.glob("*_dispatch.json"), tmp_path.glob("*_dispatch.md")
    report = json.loads(figures.read_text())
    assert report["quick"]
    assert {"date", "machine", "load_per_core_before", "versions"} <= report.keys()
    assert {"python", "jax", "flax", "optax"} <= report["versions"].keys()
    (row,) = report["rows"]
    assert all(row[way] > 0 and row["smallest_ms"][way] <= row[way] <= row["largest_ms"][way] for way in WAYS)
    assert row["ratio"] == row["nnx_jit_ms"] / row["train_step_ms"]
    assert row["arrays"] > 12 and row["devices"] == 2
    assert row["iterations"] >= row["late_batches"] >= 0
    assert row["around_us"].keys() == {"trackers", "batch and scalars"}
    assert row["recipe"]["model"]["n_layer"] == 1
    assert text.read_text() in run.stdout
    assert "Quick run" in text.read_text() and "| 1 narrow layer, 2 |" in text.read_text()
