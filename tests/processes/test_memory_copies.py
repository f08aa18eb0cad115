"""After a loss a run continues from the copy in memory: bit for bit, on any mesh; a damaged copy is not used."""

import os
import re
import shutil
import signal
import socket

import numpy as np
import pytest

from jshard.launch.keeper import Keeper, KeeperClient
from tests.processes.test_two_processes import MESH, TIMEOUT_S, TWO, Command, record

STEPS, EVERY = 40, 5
RARE = ("checkpoint_every=1000", "eval_every=7", "model.dropout=0.1", "model.n_layer=1")
KEPT = ("--keep-in-memory", str(EVERY))


def command(folder, name, *options, **variables):
    return Command(folder, name, *options, "--sample-tokens", "0", steps=STEPS, settings=RARE, **variables)


def ends(run, code=0):
    found, stdout, stderr = run.ends()
    assert found == code, stderr
    return stdout, stderr


def copy_in(stdout):
    return int(re.search(r"resumed from the copy in memory of step (\d+)", stdout)[1])


@pytest.mark.wide
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_lost_worker_costs_an_interval_at_most(tmp_path):
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    run = command(tmp_path, "lost", *TWO, *KEPT, "--max-restarts", "1")
    run.reaches(13)
    os.kill(run.workers()[1], signal.SIGKILL)
    stdout, stderr = ends(run)
    assert copy_in(stdout) in (5, 10, 15)  # the first if that of step 10 was on its way, and the last if it was quick
    assert f"It continues from the copy in memory of step {copy_in(stdout)} with 2 processes" in stderr
    assert record(run.out) == record(whole.out)


@pytest.mark.wide
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_lost_machine_is_replaced(tmp_path):
    """Worker, supervisor and keeper of process 1 are gone; what they held is read from the keeper of process 0."""
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def node(process):
        place = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
        place["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        return command(tmp_path, "nodes", *MESH, *KEPT, "--max-restarts", "1", **place)

    first, second = node(0), node(1)
    first.reaches(13)
    worker = second.workers()[1]
    os.kill(second.process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    second.ends()
    second = node(1)
    stdout, _ = ends(first)
    ends(second)
    assert copy_in(stdout) in (5, 10, 15)
    assert record(first.out) == record(whole.out)


@pytest.mark.wide
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_copy_is_read_onto_another_mesh_and_not_if_it_is_damaged(tmp_path):
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    with Keeper() as keeper:  # one that outlives the supervisor, too
        lost = command(tmp_path, "lost", *TWO, *KEPT, **keeper.environ)
        lost.reaches(13)
        os.kill(lost.workers()[1], signal.SIGKILL)
        ends(lost, 75)
        shutil.copytree(lost.out, tmp_path / "alone")

        # One process reads both parts; its copies would be too rare to take the place of these.
        rare = "--keep-in-memory=1000"
        alone = command(tmp_path, "alone", "--mesh=fsdp=2", rare, "--resume", **keeper.environ)
        stdout, _ = ends(alone)
        step = copy_in(stdout)
        for ours, theirs in zip(record(alone.out), record(whole.out), strict=True):
            np.testing.assert_allclose(*([x for x in line if x is not None] for line in (ours, theirs)), rtol=1e-5)

        damage_copy(keeper, step)
        stdout, _ = ends(command(tmp_path, "lost", *MESH, rare, "--resume", **keeper.environ))
        reason = "(sums differ|index is damaged)"
        assert re.search(f"the copy in memory of step {step} is not used: .*{reason}", stdout), stdout
        assert "resumed" not in stdout


def damage_copy(keeper, step):
    """Changes a bit of the part of process 1."""
    client = KeeperClient.of_supervisor(keeper.environ)
    part = next(part for part in client.parts()[0] if (part.step, part.process) == (step, 1))
    client.close()
    keeper._server.parts[part][-2] ^= 1
