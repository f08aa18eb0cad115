"""Workers that are started again go on from the copy in memory: bit for bit, on any mesh, or else from the disk."""

import os
import re
import signal

import numpy as np
import pytest

from jshard.launch.cluster import Cluster
from jshard.launch.keeper import Keeper, KeeperClient
from tests.processes.test_two_processes import MESH, TIMEOUT_S, TWO, Command, record

STEPS, EVERY = 40, 5
RARE = ("checkpoint_every=1000", "eval_every=7", "model.dropout=0.1", "model.n_layer=1")
KEPT = ("--keep-in-memory", str(EVERY), "--sample-tokens", "0")


def command(folder, name, *options, **variables):
    return Command(folder, name, *options, "--sample-tokens", "0", steps=STEPS, settings=RARE, **variables)


def killed_after(run, step):
    run.reaches(step)
    os.kill(run.workers()[1], signal.SIGKILL)
    code, _, stderr = run.ends()
    assert code == 75, stderr
    return record(run.out)[-1][0]


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_workers_go_on_from_the_copy(tmp_path):
    whole = command(tmp_path, "whole", *TWO)
    code, _, stderr = whole.ends()
    assert code == 0, stderr
    with Keeper() as keeper:
        copies = ("--keep-in-memory", str(EVERY))
        last = killed_after(command(tmp_path, "lost", *TWO, *copies, **keeper.environ), 13)
        again = command(tmp_path, "lost", *TWO, *copies, "--resume", **keeper.environ)
        code, stdout, stderr = again.ends()
        assert code == 0, stderr
        at = int(re.search(r"resumed from the copy in memory of step (\d+)", stdout)[1])
        assert last - at <= EVERY + 1  # one more if the copy was on its way
        assert record(again.out) == record(whole.out)
