"""One process that cannot write its part of a checkpoint ends the run of all, at once and in the same words."""

import resource
import time

import pytest

from tests.processes.test_two_processes import TWO, Command


@pytest.mark.wide
@pytest.mark.parametrize("process", [0, 1])
def test_one_process_that_cannot_write_ends_all(tmp_path, process):
    """A limit on the size of its files stands for a quota, or a full disk of one node."""
    run = Command(tmp_path, "run", *TWO, steps=100_000)
    run.reaches(9)  # the save of step 8 has waited for that of step 4
    resource.prlimit(run.workers()[process], resource.RLIMIT_FSIZE, (64_000, 64_000))  # the record is smaller
    since_s = time.monotonic()
    code, _, stderr = run.ends()
    assert code == 1, stderr
    assert time.monotonic() - since_s < 120  # and not the 1200 s that Orbax waits
    assert stderr.count("could not be written") == 1, stderr
    assert "File too large (EFBIG)" in stderr, stderr
    assert f"the last good checkpoint is {run.out}/checkpoints/" in stderr, stderr
    assert "--resume" in stderr and "Traceback" not in stderr, stderr
