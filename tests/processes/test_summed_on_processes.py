"""Gradients that two processes sum over several calls are those of one batch, and are sent as the plan says."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


@pytest.mark.wide
@pytest.mark.timeout(TIMEOUT_S)
def test_gradients_of_several_calls(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    logs = [tmp_path / f"stdout-{process}" for process in range(2)]
    started = []
    for process, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.processes.summing_worker", str(process), str(port)]
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=out))
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], [text[-3000:] for text in texts]
    for text in texts:
        (line,) = [line for line in text.splitlines() if line.startswith("worst: ")]
        assert float(line.removeprefix("worst: ")) < 1e-5
        assert "as planned: True ['all-gather', 'all-reduce', 'all-to-all']" in text.splitlines(), text
