"""`jshard train --max-restarts`: kill -9 changes no number of a run, and its record has each step once."""

import json
import os
import signal
import socket

import numpy as np
import pytest

from tests.processes.launching import children, until
from tests.processes.test_two_processes import TIMEOUT_S, TWO, Command, record


def attempts(out):
    return json.loads((out / "run.json").read_text())["attempts"]


def killed(command, process, step):
    """Kills a worker once a step is done."""
    command.reaches(step)
    os.kill(command.workers()[process], signal.SIGKILL)


def test_a_single_process_continues_bit_for_bit(tmp_path):
    plain = Command(tmp_path, "plain", "--mesh", "fsdp=2")
    assert plain.ends()[0] == 0
    lost = Command(tmp_path, "lost", "--mesh", "fsdp=2", "--max-restarts", "1")
    killed(lost, 0, 9)
    code, stdout, stderr = lost.ends()
    assert code == 0 and "restarts left: 0." in stderr, stderr
    assert "\nETTR " in stdout and "2 attempts" in stdout
    assert record(lost.out) == record(plain.out)
    first, second = attempts(lost.out)
    assert "killed by signal 9" in first["cause"] and second["cause"] == "done"
    assert first["last_step"] == second["first_step"] in (4, 8) and first["steps_lost"] > 0
    assert second["last_step"] == 16 and 0 < json.loads((lost.out / "run.json").read_text())["ettr"] < 1


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_processes_continue_bit_for_bit_whichever_is_killed(tmp_path):
    plain = Command(tmp_path, "plain", *TWO)
    assert plain.ends()[0] == 0
    lost = Command(tmp_path, "lost", *TWO, "--max-restarts", "3")
    killed(lost, 1, 6)
    until(lambda: lost.out.joinpath("run.json").read_text().count('"begin"') == 2)
    killed(lost, 0, 13)
    code, _, stderr = lost.ends()
    assert code == 0 and "restarts left: 2." in stderr and "restarts left: 1." in stderr, stderr
    assert record(lost.out) == record(plain.out)
    assert len(attempts(lost.out)) == 3


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_fewer_continue_to_rounding(tmp_path, monkeypatch):
    """Of three processes two go on, without process 0."""
    options = ("--mesh", "fsdp=6", "--set=batch_size=12", "--set=eval_sequences=12")
    plain = Command(tmp_path, "plain", *options)
    assert plain.ends()[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{ports[0]}")
    monkeypatch.setenv("JSHARD_ROLL_CALL_PORT", str(ports[1]))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    commands = []
    for process in range(3):
        monkeypatch.setenv("JAX_PROCESS_ID", str(process))
        commands.append(Command(tmp_path, "lost", *options, "--max-restarts", "1", "--min-processes", "2"))
    commands[0].reaches(6)
    workers = children(commands[0].process.pid)
    commands[0].process.kill()
    ended = [command.ends() for command in commands]
    assert [code for code, *_ in ended] == [-9, 0, 0], ended
    assert "2 processes can continue: --mesh fsdp=4" in ended[0][2]
    assert "restarts left: 0." in ended[1][2] and workers
    for ours, theirs in zip(record(plain.out), record(commands[0].out), strict=True):
        assert [x is None for x in ours] == [x is None for x in theirs]
        np.testing.assert_allclose(*([x for x in line if x is not None] for line in (ours, theirs)), rtol=1e-5)
    starts = json.loads((commands[0].out / "run.json").read_text())["starts"]
    assert [(start["processes"], start["mesh"]["fsdp"]) for start in starts] == [(3, 6), (2, 4)]
