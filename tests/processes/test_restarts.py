"""A run that loses a process goes on by itself, as often as it may, and not where that would be in vain."""

import re

import pytest

import jshard as js
from jshard import launch
from jshard.cli._arguments import TrainArgs
from jshard.cli._restarts import restarts_of, shrunk
from tests.processes.launching import fake, plain

QUICK = launch.Deadlines(grace_s=0.5)


def restarts(most, *extra, **actions):
    return launch.Restarts(most=most, command=lambda folder, mesh: fake(*extra, **actions))


def supervised(most, *, processes=2, **actions):
    command = fake(**actions)
    return launch.supervise(command, processes=processes, deadlines=QUICK, restarts=restarts(most, **actions))


def test_a_run_goes_on_after_each_loss(capfd):
    assert supervised(3, p0="wait then wait then done", p1="killed then killed then done") == 0
    out, err = capfd.readouterr()
    lines = plain(err).splitlines()
    assert out.count("process 0 is up") == 3
    assert lines[0] == (
        "lost process 1 (pid N, host H): it was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer. "
        "It goes on from runs/a/checkpoints/10 with 2 processes; restarts left: 2."
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
    assert "The last 3 attempts came nowhere" in err and "did a step after 12" in err


@pytest.mark.parametrize(("action", "code"), [("fails and tells", 1), ("fails", 1), ("refuses", 2)])
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
        ({"max_restarts": -1}, None, "The restarts make no sense."),
        ({"min_processes": 2}, PLACE, "The restarts make no sense."),
        ({"max_restarts": 1, "min_processes": 2}, None, "There is no cluster."),
        ({"max_restarts": 1, "min_processes": 2, "mesh": "fsdp=4"}, PLACE, "--min-processes 3"),
        ({"max_restarts": 1, "min_processes": 5, "mesh": "fsdp=4"}, PLACE, "Too few processes would go on"),
        ({"max_restarts": 1, "min_processes": 3}, PLACE, "name all degrees"),
        ({"max_restarts": 1, "min_processes": 3, "mesh": "fsdp=4", "auto": True}, PLACE, "--auto"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, cluster, reported):
    with pytest.raises(js.ShardingError) as info:
        restarts_of(TrainArgs(model="gpt", **options), [], cluster)
    assert reported in str(info.value)


def test_the_counts_that_work_are_named_and_the_others_too(capfd, monkeypatch):
    monkeypatch.setattr("jshard.cli._restarts._batch", lambda argv: (12, 1))
    place = launch.Cluster(kind="slurm", coordinator="a:1000", num_processes=8, process_id=0, variables={})
    found = restarts_of(TrainArgs(model="gpt", max_restarts=1, min_processes=5, mesh="fsdp=8"), [], place)
    assert found is not None and found.meshes == {6: "fsdp=6"}
    assert [found.usable(came, 8) for came in (8, 7, 6, 5)] == [8, 6, 6, 0]
    err = capfd.readouterr().err
    assert "7 processes cannot go on: 12 sequences over 7 data shards" in err
    assert "6 processes can go on: --mesh fsdp=6" in err
    words = found.command("runs/a", "fsdp=6")
    assert re.search(r"--mesh fsdp=6 .*--out runs/a .*--resume$", " ".join(words))
    assert "--resume" not in found.command(None, None)
