"""A run that loses a process continues by itself, as often as it may, and not where that would be for nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

import jshard as js
from jshard import launch
from jshard.cli._arguments import TrainArgs
from jshard.cli.train import restarts_of, shrunk
from tests.processes.launching import HERE, children, fake, gone, plain, until

QUICK = launch.Deadlines(grace_s=0.5)


def restarts(most, *extra, **actions):
    return launch.Restarts(most=most, command=lambda folder, mesh: fake(*extra, **actions))


def supervised(most, *, processes=2, **actions):
    command = fake(**actions)
    return launch.supervise(command, processes=processes, deadlines=QUICK, restarts=restarts(most, **actions))


def test_a_run_continues_after_each_loss(capfd):
    assert supervised(3, p0="wait then wait then done", p1="killed then killed then done") == 0
    out, err = capfd.readouterr()
    lines = plain(err).splitlines()
    assert out.count("process 0 is up") == 3
    assert lines[0] == (
        "lost process 1 (pid N, host H): it was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer. "
        "It continues from runs/a/checkpoints/10 with 2 processes; restarts left: 2."
    )
    assert lines[1].endswith("restarts left: 1.") and lines[2:] == ["a warning of process 0"]


def test_one_process_alone_is_started_again_too(capfd):
    assert supervised(1, processes=1, p0="killed then done") == 0
    assert "with 1 process; restarts left: 0." in capfd.readouterr().err


def test_the_last_loss_is_reported_as_without_restarts(capfd):
    assert supervised(1, p1="killed") == 75
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("restarts left: 0.") and lines[1] == "RunError: Process 1 of 2 was lost."


def test_attempts_that_come_nowhere_end_the_run(capfd):
    # Each reports step 12 and checkpoint 10: the first time they are new.
    assert supervised(20, p1="killed") == 1
    err = capfd.readouterr().err
    assert err.count("lost process 1") == 3
    assert "The last 3 attempts made no progress" in err and "completed a step after 12" in err


@pytest.mark.parametrize(("action", "code"), [("fails and says why", 1), ("fails", 1), ("refuses", 2)])
def test_a_failure_with_a_reason_would_come_again(capfd, action, code):
    assert supervised(3, p1=action) == code
    assert "restarts left" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "processes", "of", "expected"),
    [
        ({"fsdp": 8}, 3, 4, {"replica": 1, "fsdp": 6}),
        ({"replica": 4, "fsdp": 2}, 3, 4, {"replica": 3, "fsdp": 2}),
        ({"replica": 2, "fsdp": 4}, 3, 4, {"replica": 2, "fsdp": 3}),
        ({"fsdp": 4, "tensor": 2}, 3, 4, {"replica": 1, "fsdp": 3, "tensor": 2}),
        ({"fsdp": 1, "tensor": 8}, 3, 4, None),
        ({"fsdp": 6}, 3, 4, None),  # 6 devices of 4 processes
    ],
)
def test_data_axes_shrink_with_the_processes(mesh, processes, of, expected):
    assert shrunk(mesh, processes=processes, of=of) == expected


PLACE = launch.Cluster(kind="slurm", coordinator="a:1000", num_processes=4, process_id=1, variables={})


@pytest.mark.parametrize(
    ("options", "cluster", "reported"),
    [
        ({"max_restarts": -1}, None, "The restart options are not valid."),
        ({"min_processes": 2}, PLACE, "The restart options are not valid."),
        ({"max_restarts": 1, "min_processes": 2}, None, "only on a cluster"),
        ({"max_restarts": 1, "min_processes": 2, "mesh": "fsdp=4"}, PLACE, "--min-processes 3"),
        ({"max_restarts": 1, "min_processes": 5, "mesh": "fsdp=4"}, PLACE, "more than half of 4 must continue"),
        ({"max_restarts": 1, "min_processes": 3}, PLACE, "name all degrees"),
        ({"max_restarts": 1, "min_processes": 3, "mesh": "fsdp=4", "auto": True}, PLACE, "--auto"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, cluster, reported):
    with pytest.raises(js.ShardingError) as info:
        restarts_of(TrainArgs(model="gpt", **options), [], cluster)
    assert reported in str(info.value)


def test_the_counts_that_work_are_named_and_the_others_too(capfd, monkeypatch):
    monkeypatch.setattr("jshard.cli.train._batch", lambda argv: (12, 1))
    place = launch.Cluster(kind="slurm", coordinator="a:1000", num_processes=8, process_id=0, variables={})
    found = restarts_of(TrainArgs(model="gpt", max_restarts=1, min_processes=5, mesh="fsdp=8"), [], place)
    assert found is not None and found.meshes == {6: "fsdp=6"}
    assert [found.usable(came, 8) for came in (8, 7, 6, 5)] == [8, 6, 6, 0]
    err = capfd.readouterr().err
    assert "7 processes cannot continue: 12 sequences over 7 data shards" in err
    assert "6 processes can continue: --mesh fsdp=6" in err
    words = found.command("runs/a", "fsdp=6")
    assert re.search(r"--mesh fsdp=6 .*--out runs/a .*--resume$", " ".join(words))
    assert "--resume" not in found.command(None, None)


# A cluster: a supervisor per process, each in a process of its own, all on this machine.


class ClusterOf:
    """Supervisors of fake workers; all are gone in the end."""

    def __init__(self, number, actions, **options):
        self.number, self.options = number, {"grace_s": 0.5, "init_s": 300.0, "most": 3, **options}
        self.actions = {f"p{process}": action for process, action in actions.items()}
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.ports = one.getsockname()[1], other.getsockname()[1]
        self.processes = {}

    def start(self, process):
        self.processes[process] = subprocess.Popen(
            [sys.executable, str(HERE / "supervise.py"), json.dumps(self.options), *fake(**self.actions)],
            env={
                **os.environ,
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.ports[0]}",
                "JAX_NUM_PROCESSES": str(self.number),
                "JAX_PROCESS_ID": str(process),
                "JSHARD_ROLL_CALL_PORT": str(self.ports[1]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        for process in range(self.number):
            self.start(process)
        return self

    def __exit__(self, *error):
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def reads(self, process, text):
        stdout = self.processes[process].stdout
        while text not in (line := stdout.readline()):
            assert line, self.processes[process].stderr.read()
        return line

    def kill(self, process, *, worker=False):
        """Kills a supervisor, or its worker alone."""
        supervisor = self.processes[process]
        (pid,) = children(supervisor.pid)
        os.kill(pid if worker else supervisor.pid, signal.SIGKILL)
        if not worker:
            supervisor.communicate()
            until(lambda: gone(pid))

    def ends(self):
        """Exit codes and stderr by process."""
        ended = {process: each.communicate(timeout=300) for process, each in self.processes.items()}
        return {p: each.returncode for p, each in self.processes.items()}, {p: err for p, (_, err) in ended.items()}


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_worker_of_a_cluster_starts_all_again(lost):
    with ClusterOf(3, dict.fromkeys(range(3), "wait then done")) as cluster:
        for process in range(3):
            cluster.reads(process, f"process {process} is up")
        cluster.kill(lost, worker=True)
        for process in range(3):
            assert "attempt 2, of 3, folder=runs/a mesh=None" in cluster.reads(process, f"process {process} is up")
        codes, err = cluster.ends()
    assert set(codes.values()) == {0}
    assert "with 3 processes; restarts left: 2." in err[0] and err[1] == err[2] == ""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_restarted_supervisor_joins_again(lost):
    with ClusterOf(3, dict.fromkeys(range(3), "wait then done")) as cluster:
        for process in range(3):
            cluster.reads(process, f"process {process} is up")
        cluster.kill(lost)
        cluster.start(lost)  # as a kubelet does
        for process in range(3):
            assert "attempt 2, of 3, folder=runs/a" in cluster.reads(process, f"process {process} is up")
        codes, err = cluster.ends()
    assert set(codes.values()) == {0} and "restarts left: 2." in err[0]


def test_fewer_continue_without_process_0_and_all_again_when_it_is_back():
    actions = {0: "wait then wait then done", 1: "wait then wait then done", 2: "wait then wait then done"}
    with ClusterOf(3, actions, meshes={2: "fsdp=4"}, wait_s=10.0) as cluster:
        for process in range(3):
            cluster.reads(process, f"process {process} is up")
        cluster.kill(0)
        # The lowest that is left leads; ids go from 0 again.
        assert "attempt 2, of 2, folder=runs/a mesh=fsdp=4" in cluster.reads(1, "process 0 is up")
        assert "attempt 2, of 2, folder=runs/a mesh=fsdp=4" in cluster.reads(2, "process 1 is up")
        cluster.start(0)
        cluster.kill(2, worker=True)
        for process in range(3):
            assert "attempt 3, of 3, folder=runs/a mesh=None" in cluster.reads(process, f"process {process} is up")
        codes, _ = cluster.ends()
    assert set(codes.values()) == {0}


def test_a_part_that_is_too_small_does_not_continue():
    with ClusterOf(3, {}, meshes={2: "fsdp=4"}, wait_s=1.0, init_s=6.0) as cluster:
        for process in range(3):
            cluster.reads(process, f"process {process} is up")
        cluster.kill(0)
        cluster.kill(1)
        code = cluster.processes[2].wait(timeout=300)
        err = cluster.processes[2].stderr.read()
    assert code == 75 and "2 of 3 processes did not come: 0, 1." in err


def test_a_failure_with_a_reason_ends_the_whole_cluster():
    with ClusterOf(2, {1: "fails and says why"}) as cluster:
        codes, err = cluster.ends()
    assert codes == {0: 1, 1: 1} and "restarts left" not in err[0] + err[1]
