"""Two processes with four devices each train like one process with eight, through the public API."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jshard.train.metrics import read_metrics

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 280


def run_processes(number, folder):
    """Runs the worker in `number` processes and returns what each reported."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(process), str(number), str(port), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(number)
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, stderr) in zip(started, ended, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in ended]


# One test, not several over a fixture: parallel test workers would each start the processes anew.
@pytest.mark.timeout(2 * TIMEOUT_S + 20)
def test_two_processes_train_like_one(tmp_path):
    reports = {number: run_processes(number, tmp_path / str(number)) for number in (1, 2)}
    for strategy in ("zero3", "hsdp"):
        one, two = (losses(tmp_path / number / strategy) for number in ("1", "2"))
        assert len(one) == 4 + 2  # one line per step and evaluation: only the first process writes
        np.testing.assert_allclose(one, two, rtol=1e-5)
        first, second = (report[strategy] for report in reports[2])
        assert first["val_loss"] == second["val_loss"] == two[-1]
        # Each process holds its share of the parameters, reads its share of the batch, and restores.
        assert first["local_shards"] == second["local_shards"] == 4
        assert (first["rows"], second["rows"]) == (list(range(8)), list(range(8, 16)))
        assert first["restored_step"] == second["restored_step"] == 4
    assert [report["devices"] for report in reports[2]] == [[4, 8], [4, 8]]


def losses(folder):
    """Training and validation losses of a run, in order."""
    return [line.get("loss", line.get("val_loss")) for line in read_metrics(folder / "metrics.jsonl")]
