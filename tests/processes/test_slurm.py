"""The shipped script on a real Slurm, whose nodes are namespaces of this machine: a job ends, or continues by itself.

Not in the default run: python -m pytest -m slurm. `-s` shows when what happened, for the table in benchmarks/README.md;
SLURM_TEST_NODES=4 has more than two nodes.
"""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from jshard.train.records import read_metrics
from tests.compiling import environment
from tests.processes.slurm_cluster import SlurmCluster, missing

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).with_name("slow_model.py")
NODES = int(os.environ.get("SLURM_TEST_NODES", "2"))
STEPS = 60
LIMIT_S = 200
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster():
    if reason := missing():
        pytest.skip(f"no Slurm cluster on this machine: {reason}")
    folder = Path("/tmp") / f"jsl{os.getpid()}"  # short: the path of a socket has at most 107 bytes
    try:
        with SlurmCluster(folder=folder, nodes=NODES) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def submit(cluster, programs, tmp_path):
    jobs = []

    def submit(*options, **others):
        jobs.append(Job(cluster, tmp_path, programs, *options, **others))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.call("scancel", str(job.number))
    cluster.wait_until(lambda: cluster.idle() == cluster.nodes, limit_s=LIMIT_S, what="all nodes idle")


class Job:
    """The shipped script, submitted: a task on each node."""

    def __init__(
        self, cluster, folder, programs, *options, script=ROOT / "launch" / "train.slurm", sbatch=(), **variables
    ):
        self.cluster, self.out, self.log = cluster, folder / "run", folder / "log"
        path = os.pathsep.join([variables.pop("bin", ""), str(ROOT / ".venv" / "bin"), os.environ["PATH"]])
        environ = environment(programs=programs) | {"PATH": path.lstrip(os.pathsep), "WAIT": "10"} | variables
        where = [f"--nodes={NODES}", "--ntasks-per-node=1", "--partition=low", "--output", str(self.log), *sbatch]
        run = [
            str(MODEL),
            "--mesh",
            f"fsdp={NODES}",
            "--out",
            str(self.out),
            "--track",
            "--sample-tokens",
            "0",
            *options,
        ]
        self.number = cluster.submit(*where, str(script), *run, **environ)
        self._began, self._last = time.monotonic(), None

    def state(self):
        """What it does, and how often it was queued again."""
        job = self.cluster.job(self.number)
        found = job["JobState"], int(job["Restarts"])
        if found != self._last:
            self.note(f"{found[0]}, {found[1]} restarts, exit code {job['ExitCode']}")
        self._last = found
        return found

    def note(self, event):
        print(f"  {time.monotonic() - self._began:6.1f} s  step {self.step():2}  {event}", flush=True)

    def step(self):
        with contextlib.suppress(FileNotFoundError, IndexError):
            return read_metrics(self.out / "metrics.jsonl")[-1]["step"]
        return 0

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def trains(self, beyond=11):
        self._until(lambda *_: self.step() > beyond, f"a step after {beyond}")

    def is_queued_again(self, *, begins=True):
        """Waits until it is; Slurm lets such a job wait for two minutes, and this until the old one is gone."""
        self._until(lambda state, restarts: restarts > 0 and state == "PENDING", "queued again")
        if begins:
            self.frees_its_nodes()
            time.sleep(2)  # a node refuses what was allowed within the second of the end ("credential revoked")
            self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def ends(self, state):
        self._until(lambda found, _: found in DONE, "the end")
        assert self.state()[0] == state, self.text()

    def frees_its_nodes(self, number=NODES):
        self.cluster.wait_until(lambda: self.cluster.idle() >= number, limit_s=LIMIT_S, what="idle nodes")
        self.note(f"{number} nodes are free")

    def goes_on(self):
        """The run ends as one that nothing had stopped, from a checkpoint."""
        self.ends("COMPLETED")
        steps = [line["step"] for line in read_metrics(self.out / "metrics.jsonl") if "loss" in line]
        assert steps == list(range(1, STEPS + 1))
        assert "resumed from" in self.text()

    def pids(self):
        """Of its workers."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_worker(path)]

    def _is_worker(self, path):
        with contextlib.suppress(OSError):
            environ = (path / "environ").read_bytes().split(b"\0")
            return b"JSHARD_WORKER=1" in environ and str(self.out).encode() in (path / "cmdline").read_bytes()
        return False

    def _until(self, condition, what):
        def holds():
            state = self.state()
            assert condition(*state) or state[0] not in DONE, f"{what}: {state}\n{self.text()}"
            return condition(*state)

        self.cluster.wait_until(holds, limit_s=LIMIT_S, what=f"{what}\n{self.text()}")


def test_a_preempted_job_saves_and_continues(cluster, submit):
    job = submit()
    job.trains()
    job.note("preempted, with a grace of 60 s")
    cluster.submit(
        *("--partition=high", f"--nodes={NODES}", "--exclusive", "--output=/dev/null"), "--wrap", "srun sleep 1"
    )
    job.is_queued_again()
    assert "stopped by SIGTERM after step" in job.text()
    job.goes_on()


def test_a_job_whose_time_is_up_saves_and_is_queued_again(submit):
    job = submit("--steps", "2000", sbatch=["--time=2", "--signal=TERM@58"])
    job.is_queued_again(begins=False)
    assert "stopped by SIGTERM after step" in job.text()
    job.frees_its_nodes()


def test_a_job_with_a_killed_worker_continues_and_a_cancelled_one_stays_away(cluster, submit):
    job = submit()
    job.trains()
    job.note("kill -9 of a worker")
    os.kill(job.pids()[0], signal.SIGKILL)
    job.is_queued_again()
    assert "it was killed by signal 9 (SIGKILL)" in job.text() and "stopped by SIGTERM" not in job.text()
    job.trains(job.step() + 5)
    job.note("scancel")
    cluster.call("scancel", str(job.number))
    job.ends("CANCELLED")
    assert job.state() == ("CANCELLED", 1) and "stopped by SIGTERM after step" in job.text()
    job.frees_its_nodes()


def test_a_job_with_a_dead_node_releases_the_others_and_continues(cluster, submit):
    """Slurm itself would wait for SlurmdTimeout, here 300 s, and srun with it."""
    job = submit("--peer-timeout", "8")
    job.trains()
    job.note("node 2 dies")
    cluster.power_off(2)
    job.frees_its_nodes(NODES - 1)
    assert f"Process 1 of {NODES} was lost." in job.text() and job.state()[1] == 1
    cluster.boot(2)
    job.note("node 2 is back")
    job.is_queued_again()
    job.goes_on()


def test_a_task_that_never_starts_does_not_keep_the_job(submit, tmp_path):
    stuck = tmp_path / "bin" / "jshard"
    stuck.parent.mkdir()
    stuck.write_text(f'#!/bin/sh\n[ "$(hostname)" = jsn2 ] && exec sleep 1000\nexec {ROOT}/.venv/bin/jshard "$@"\n')
    stuck.chmod(0o755)
    job = submit("--init-timeout", "8", bin=str(stuck.parent), MOST_RESTARTS="0")
    job.ends("FAILED")
    assert (
        f"1 of {NODES} processes did not come: 1." in job.text()
        and "after 0 restarts, and MOST_RESTARTS=0" in job.text()
    )
    job.frees_its_nodes()


@pytest.mark.parametrize(
    ("option", "code", "reason"), [("learning_rate=1e38", 1, "became NaN"), ("nonsense=1", 2, "nonsense")]
)
def test_a_run_that_fails_or_is_refused_ends_the_job(cluster, submit, option, code, reason):
    job = submit("--set", option)
    job.ends("FAILED")
    assert job.state() == ("FAILED", 0) and reason in job.text()
    assert cluster.job(job.number)["ExitCode"] == f"{code}:0"
