"""Some processes of a run save and restore a state by themselves, or are refused at once: none waits for the others."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jshard import checkpoint
from tests import compiling

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400
AT_ONCE_S = 5.0
VALUES = np.arange(48, dtype=np.float32).reshape(12, 4)  # as in the worker


def run_three(folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    worker = Path(__file__).with_name("group_worker.py")
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = []
    for process in range(3):
        with (folder / f"stderr-{process}").open("w") as stderr:
            command = [sys.executable, str(worker), str(process), port, str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
    try:
        return [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()


# One test, not several over a fixture: parallel test workers would each start the processes again.
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_three_processes(tmp_path):
    codes = run_three(tmp_path)
    assert codes == [0, 0, 0], [(tmp_path / f"stderr-{process}").read_text()[-3000:] for process in range(3)]
    said = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(3)]
    a_group_saves_and_restores(said, tmp_path)
    what_does_not_fit_is_refused_at_once(said)


def a_group_saves_and_restores(said, folder):
    for process, answers in enumerate(said):
        assert answers["all"] and answers["all again"] and answers["after all"] and answers["alone"], process
    assert said[0]["0 1"] and said[1]["0 1"]
    assert said[1]["1 2"] == said[2]["1 2"] == [True] * 3
    assert said[1]["background"] and said[2]["background"]
    # The values of a group on this process's devices, which verifies all checksums.
    for name in ("all", "0 1", "1 2 0", "alone 2", "background"):
        like = {
            "w": np.zeros_like(VALUES),
            "host": np.zeros_like(VALUES[4]),
            "own": np.zeros_like(VALUES[3]),
            "step": 0,
        }
        restored = checkpoint.restore(folder / name, like | {"replicated": np.zeros_like(VALUES[:3])})
        np.testing.assert_array_equal(restored["w"], VALUES)
        np.testing.assert_array_equal(restored["replicated"], VALUES[:3])
        np.testing.assert_array_equal(restored["own"], VALUES[3])
        np.testing.assert_array_equal(restored["host"], VALUES[4])


def what_does_not_fit_is_refused_at_once(said):
    refused = {
        "outside": "Process 2 does not save or restore this state.",
        "too few": "Other processes hold 2 arrays of the state, too.",
        "unknown": "These processes cannot save or restore together.",
        "orbax": "The state needs all processes",
        "twice": "that path already exists.",
        "missing": "1 of 2 processes did not reach a synchronization point.",
    }
    for name, text in refused.items():
        for answers in said:
            if answers.get(name) is not None:
                error, seconds = answers[name]
                assert text in error, (name, error)
                assert seconds < AT_ONCE_S, (name, seconds)
    assert said[2]["outside"] and said[0]["twice"] and said[1]["twice"] and said[0]["missing"]
