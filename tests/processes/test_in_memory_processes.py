"""Two processes gather, load and reshard together, and one hands its weights to the other."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 800


# One test, not several over a fixture: parallel test workers would each start the processes again.
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    worker = Path(__file__).with_name("in_memory_worker.py")
    environment = {**os.environ, **compiling.environment(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = []
    for process in range(2):
        with (tmp_path / f"stderr-{process}").open("w") as stderr:
            command = [sys.executable, str(worker), str(process), str(port), str(tmp_path)]
            processes.append(subprocess.Popen(command, env=environment, stderr=stderr))
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], [(tmp_path / f"stderr-{process}").read_text()[-3000:] for process in range(2)]
    for process in range(2):
        found = json.loads((tmp_path / f"found-{process}.json").read_text())
        gathered = found["gathered_and_loaded"]
        assert gathered["host"] == gathered["all"] == gathered["loaded"] == gathered["loaded from all"] == []
        assert gathered["process0"] == ([] if process == 0 else ["None"])
        assert gathered["whole"] and gathered["placed"]
        resharded = found["resharded"]
        assert (resharded["model"], resharded["optimizer"], resharded["step"]) == ([], [], 7)
        assert resharded["moved"] == 1 and resharded["between"]
        # Nothing of the target was there: all of it is moved, and in half the bytes.
        assert found["handed_over"]["moved"] == found["handed_over"]["total"]
        assert found["alone"] == ({"model": []} if process == 0 else {})
        if process == 1:
            assert found["handed_over"]["served"] == []
        assert "head  stored (3,)  wanted nothing" in found["mistakes"]["text"]
