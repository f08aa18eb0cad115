"""`jshard train --max-restarts`: kill -9 changes no number of a run, and its record has each step once."""

import json
import os
import signal

import pytest

from tests.processes.launching import until
from tests.processes.test_two_processes import TIMEOUT_S, TWO, Command, record


def starts(out):
    return [start["step"] for start in json.loads((out / "run.json").read_text())["starts"]]


def killed(command, process, step):
    """Kills a worker once a step is done."""
    command.reaches(step)
    os.kill(command.workers()[process], signal.SIGKILL)


def test_a_single_process_goes_on_bit_for_bit(tmp_path):
    plain = Command(tmp_path, "plain", "--mesh", "fsdp=2")
    assert plain.ends()[0] == 0
    lost = Command(tmp_path, "lost", "--mesh", "fsdp=2", "--max-restarts", "1")
    killed(lost, 0, 9)
    code, _, stderr = lost.ends()
    assert code == 0 and "restarts left: 0." in stderr, stderr
    assert record(lost.out) == record(plain.out)
    assert starts(lost.out)[1] in (4, 8)


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_processes_go_on_bit_for_bit_whichever_is_killed(tmp_path):
    plain = Command(tmp_path, "plain", *TWO)
    assert plain.ends()[0] == 0
    lost = Command(tmp_path, "lost", *TWO, "--max-restarts", "3")
    killed(lost, 1, 6)
    until(lambda: len(starts(lost.out)) == 2)
    killed(lost, 0, 13)
    code, _, stderr = lost.ends()
    assert code == 0 and "restarts left: 2." in stderr and "restarts left: 1." in stderr, stderr
    assert record(lost.out) == record(plain.out)
    assert len(starts(lost.out)) == 3
