"""How often processes meet in a save and a restore: a fixed number of times, whatever the number of processes.

A meeting costs every process the time until the slowest one has come, so a new one is a decision.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 800

# What they agree on at each:
#   begin     the state and the path are good on all, and all hold copies of their values
#   written   all files are on disk, with their checksums, which the manifest needs
#   complete  the checkpoint has its name, or why it does not
#   read      all have read and verified their values
#   folder    the name of a file that process 0 has written into the folder of a series
#   latest    the newest step that process 0 sees
SAVE = ["begin", "written", "complete"]
MEETINGS = {
    "save": SAVE,
    "asynchronous save": SAVE,
    "restore": ["read"],
    "first save of a series": ["folder", "folder", *SAVE],
    "next save of a series": SAVE,
    "latest of a series": ["latest"],
    "restore of a series": ["read"],
    "verify": [],
}
ORBAX_FORM = ["begin", "all", "written", "sealed", "complete"]


def run(folder, num):
    """Runs the worker in so many processes; returns what each has said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    worker = Path(__file__).with_name("meetings_worker.py")
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = []
    for process in range(num):
        with (folder / f"stderr-{process}").open("w") as stderr:
            command = [sys.executable, str(worker), str(process), str(num), port, str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr))
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * num, [(folder / f"stderr-{process}").read_text()[-3000:] for process in range(num)]
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(num)]


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.wide), pytest.param(8, marks=pytest.mark.wide)])
def test_the_number_of_meetings_does_not_grow_with_the_processes(tmp_path, num):
    for answers in run(tmp_path, num):
        assert answers["right rounds"]
        assert answers["left"] == []
        said = answers["operations"]
        in_orbax = said.pop("save in Orbax's form")
        assert in_orbax["meetings"] == ORBAX_FORM
        assert {operation: each["meetings"] for operation, each in said.items()} == MEETINGS
        # There is no other wait, such as in Orbax.
        assert {operation: each["other waits"] for operation, each in said.items()} == dict.fromkeys(MEETINGS, 0)
        # Training waits for one only.
        assert said["asynchronous save"]["blocking"] == [True, False, False]
        # In that: which round it is, its report, the barrier, and the reports of all. What remains is done later.
        assert said["asynchronous save"]["requests of the main thread"] == 4
