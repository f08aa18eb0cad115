"""Dropout masks, BatchNorm statistics, codebooks and counts of two processes with four devices each: one device's."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import compiling
from tests.engine.one_device import NAMES, apart
from tests.engine.test_one_device import AFTER_STEPS, trained_alone
from tests.wide import wide

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 800


FEW = ("nnx: batch norms", "Linen: norms and dropout in blocks", "nnx: an EMA codebook", "masks")


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("names", [FEW, wide(tuple(name for name in NAMES if name not in FEW))], ids=["few", "others"])
def test_two_processes_have_the_state_of_trained_alone(names, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    logs = [tmp_path / f"stderr-{process}" for process in range(2)]
    started = []
    for process, log in enumerate(logs):
        arguments = [str(process), str(port), str(tmp_path / "found.npz"), *names]
        command = [sys.executable, "-m", "tests.engine.one_device", *arguments]
        with log.open("w") as stderr:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=stderr, stderr=stderr))
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [log.read_text()[-3000:] for log in logs]
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    with np.load(tmp_path / "found.npz") as stored:
        for key in stored:
            mesh, name, path = key.split("|")
            found.setdefault(mesh, {}).setdefault(name, {})[path] = stored[key]
    with jax.numpy_rank_promotion("allow"):
        wanted = {name: trained_alone(name) for name in names}
    assert len(found) == 2 and sorted(name for of_mesh in found.values() for name in of_mesh) == sorted(names)
    for mesh, of_mesh in found.items():
        for name, arrays in of_mesh.items():
            assert max(apart(arrays, wanted[name]).values()) <= AFTER_STEPS, (mesh, name)
