"""After a loss a run goes on from the copy in memory: bit for bit, on any mesh; from the disk if the copy is damaged."""

import os
import re
import shutil
import signal
import socket

import numpy as np
import pytest

from jshard.launch.keeper import Keeper
from tests.processes.launching import until
from tests.processes.test_two_processes import MESH, TIMEOUT_S, TWO, Command, record

STEPS, EVERY = 40, 5
RARE = ("checkpoint_every=1000", "eval_every=7", "model.dropout=0.1", "model.n_layer=1")
COPIES = ("--keep-in-memory", str(EVERY), "--max-restarts", "1")
FROM = r"resumed from the copy in memory of step (\d+)"


def command(folder, name, *options, **variables):
    return Command(folder, name, *options, "--sample-tokens", "0", steps=STEPS, settings=RARE, **variables)


def ends(run, code=0):
    found, stdout, stderr = run.ends()
    assert found == code, stderr
    return stdout, stderr


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_lost_worker_costs_an_interval_at_most(tmp_path):
    whole = command(tmp_path, "whole", *TWO)
    ends(whole)
    run = command(tmp_path, "lost", *TWO, *COPIES)
    run.reaches(13)
    os.kill(run.workers()[1], signal.SIGKILL)
    stdout, stderr = ends(run)
    copied, last = int(re.search(FROM, stdout)[1]), int(re.search(r"last step reported: (\d+)|$", stderr)[1] or 13)
    assert copied % EVERY == 0 and copied >= 5
    assert f"copy in memory of step {copied}" in stderr
    assert record(run.out) == record(whole.out)
