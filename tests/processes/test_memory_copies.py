"""After a loss a run goes on from the copy in memory: bit for bit, on any mesh; a damaged copy is not used."""

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


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_lost_worker_costs_an_interval_at_most(tmp_path):
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    run = command(tmp_path, "lost", *TWO, *KEPT, "--max-restarts", "1")
    run.reaches(13)
    os.kill(run.workers()[1], signal.SIGKILL)
    stdout, stderr = ends(run)
    assert copy_in(stdout) in (5, 10, 15)  # the first if that of step 10 was on its way, and the last if it was quick
    assert f"It goes on from the copy in memory of step {copy_in(stdout)} with 2 processes" in stderr
    assert record(run.out) == record(whole.out)


@pytest.mark.wide
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_lost_machine_is_replaced(tmp_path):
    """Worker, supervisor and keeper of process 1 are gone; what they held is read from the keeper of process 0."""
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    with Keeper() as kept, Keeper() as fresh:
        with Keeper() as lost:
            first, second = nodes(tmp_path, kept, lost)
            first.reaches(13)
            worker = second.workers()[1]
            os.kill(second.process.pid, signal.SIGKILL)
            os.kill(worker, signal.SIGKILL)
            ends(first, 75)
            second.ends()
        shutil.copytree(tmp_path / "nodes", tmp_path / "alone")
        shutil.copytree(tmp_path / "nodes", tmp_path / "damaged")
        step = on_another_mesh(tmp_path, kept, whole)
        not_if_damaged(tmp_path, kept, step)
        first, second = nodes(tmp_path, kept, fresh, "--resume")
        assert copy_in(ends(first)[0]) == step
        ends(second)
        assert record(first.out) == record(whole.out)


def nodes(folder, *keepers_and_options):
    """Two supervisors, each with a worker and a keeper, as on two machines."""
    *keepers, options = *keepers_and_options[:2], keepers_and_options[2:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [
        command(
            folder,
            "nodes",
            *MESH,
            *KEPT,
            *options,
            JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(process),
            **keeper.environ,
        )
        for process, keeper in enumerate(keepers)
    ]


def on_another_mesh(folder, keeper, whole):
    """One process reads both parts; its copies would be too rare to take the place of these."""
    alone = command(folder, "alone", "--mesh=fsdp=2", "--keep-in-memory=1000", "--resume", **keeper.environ)
    stdout, _ = ends(alone)
    for ours, theirs in zip(record(alone.out), record(whole.out), strict=True):
        np.testing.assert_allclose(*([x for x in line if x is not None] for line in (ours, theirs)), rtol=1e-5)
    return copy_in(stdout)


def not_if_damaged(folder, keeper, step):
    client = KeeperClient.of_supervisor(keeper.environ)
    part = next(part for part in client.parts()[0] if (part.step, part.process) == (step, 1))
    client.close()
    data = keeper._server.parts[part]
    data[-2] ^= 1
    stdout, _ = ends(command(folder, "damaged", *MESH, "--keep-in-memory=1000", "--resume", **keeper.environ))
    data[-2] ^= 1
    assert re.search(f"the copy in memory of step {step} is not used: .*sums differ", stdout), stdout
    assert "resumed" not in stdout
