"""Stages along two processes of four devices: the steps of one device, also after a restore onto other stages."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jshard as js
from tests import compiling, parity
from tests.processes.staged_worker import steps_of

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


def steps_of_two(folder):
    """What the steps of two processes gave."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = []
    for process in range(2):
        with (folder / f"stderr-{process}").open("w") as stderr:
            command = [sys.executable, "-m", "tests.processes.staged_worker", str(process), port, str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [(folder / f"stderr-{process}").read_text()[-3000:] for process in range(2)]
    with np.load(folder / "steps.npz") as results:
        return dict(results)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_steps_are_those_of_one_device(tmp_path):
    one = js.mesh(fsdp=1, devices=jax.devices()[:1])
    wanted = steps_of(one, one, tmp_path / "one")
    results = steps_of_two(tmp_path)
    assert results.keys() == wanted.keys()
    assert results["0 loss"] == pytest.approx(wanted["0 loss"], rel=2e-6)
    assert results["1 loss"] == pytest.approx(wanted["1 loss"], rel=2e-6)
    assert parity.distance(results, wanted) <= parity.PARAMETER_TOLERANCE
