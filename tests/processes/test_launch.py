"""A run in several processes on one machine ends in plain words, whichever way it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import jshard as js
from jshard import launch
from jshard.launch import gpu_share, worker
from jshard.launch.peers import Ending, cause
from tests.processes.launching import HERE, children, fake, gone, killed, plain, until

AGAIN = "jshard train gpt.py --out runs/a --resume"
QUICK = launch.Deadlines(grace_s=0.5)
# For workers that all end: there is nothing to wait for, however slow one of them is to start.
PATIENT = launch.Deadlines(grace_s=0.5, settle_s=20.0)

KILLED = killed(2)


def test_a_killed_worker_is_named_and_takes_the_run_along(capfd, tmp_path):
    assert launch.supervise(fake(tmp_path, p1="killed"), processes=2, deadlines=QUICK) == 75
    assert plain(capfd.readouterr().err) == KILLED
    until(lambda: gone(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("echo", ["aborts after", "blames a peer"])
def test_the_echo_of_a_loss_is_neither_named_nor_shown(capfd, monkeypatch, echo):
    assert launch.supervise(fake(p0=echo, p1="killed"), processes=2, deadlines=PATIENT) == 75
    assert plain(capfd.readouterr().err) == KILLED
    monkeypatch.setenv("JSHARD_DEBUG", "1")
    assert launch.supervise(fake(p0=echo, p1="killed"), processes=2, deadlines=PATIENT) == 75
    shown = plain(capfd.readouterr().err)
    assert shown.endswith(KILLED) and len(shown) > len(KILLED)


def test_a_worker_that_only_waits_for_the_lost_one_has_no_grace(capfd):
    since_s = time.monotonic()
    command = fake(p0="waits for a peer", p1="fails and says why")
    assert launch.supervise(command, processes=2, deadlines=launch.Deadlines(grace_s=300.0)) == 1
    assert time.monotonic() - since_s < 200
    assert capfd.readouterr().err == "[process 1] RunError: The disk is full.\n"


def test_a_frozen_worker_is_lost_after_the_peer_timeout(capfd):
    deadlines = launch.Deadlines(peer_s=5.0, grace_s=0.5)
    assert launch.supervise(fake(p1="frozen"), processes=2, deadlines=deadlines) == 75
    reported = re.sub(r"for \d+ s", "for N s", plain(capfd.readouterr().err))
    assert reported == KILLED.replace(
        "it was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer",
        "it gave no sign of life for N s: T (stopped), starting",
    )


def test_a_worker_that_never_comes_up_is_lost_after_the_init_timeout(capfd):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert launch.supervise(command, processes=2, deadlines=launch.Deadlines(init_s=0.5, grace_s=0.1)) == 75
    reported = capfd.readouterr().err
    assert "Process 0 of 2 was lost" in reported and "no step was reported yet" in reported
    assert "no checkpoint was written yet" in reported and "the same command with --resume" in reported


@pytest.mark.parametrize(
    ("actions", "code", "reported"),
    [
        # All say the same: it is said once.
        ({"p0": "refuses", "p1": "refuses"}, 2, "ShardingError: There is no recipe.\n  do:    --recipe tiny\n"),
        ({"p1": "refuses"}, 2, "[process 1] ShardingError: There is no recipe.\n[process 1]   do:    --recipe tiny\n"),
        ({"p0": "fails and says why", "p1": "fails and says why"}, 1, "RunError: The disk is full.\n"),
        ({"p0": "blames a peer", "p1": "fails and says why"}, 1, "[process 1] RunError: The disk is full.\n"),
    ],
)  # fmt: skip
def test_a_worker_that_has_reported_the_reason_itself_needs_no_report(capfd, actions, code, reported):
    deadlines = PATIENT if len(actions) == 2 else QUICK
    assert launch.supervise(fake(**actions), processes=2, deadlines=deadlines) == code
    assert capfd.readouterr().err == reported


def test_a_good_end_has_the_output_of_the_first_process(capfd):
    assert launch.supervise(fake(p0="done", p1="done"), processes=2) == 0
    assert capfd.readouterr() == ("process 0 is up\n", "a warning of process 0\n")


@pytest.fixture
def harmless():
    """Signals that come when no one listens end no test run; afterwards the handlers are those of before."""
    note = lambda *_: None
    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {signal.signal(signum, handler) for signum, handler in before.items()} == {note}


def supervise_and_signal(folder, actions, signals, deadlines=QUICK):
    """The exit code of a run that gets `signals`, pairs of a pause and a number, once its workers are up."""

    def send():
        until(lambda: all((folder / f"up-{process}").exists() for process in (0, 1)))
        for pause_s, signum in signals:
            time.sleep(pause_s)
            os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    sender.start()
    code = launch.supervise(fake(folder, **actions), processes=2, deadlines=deadlines)
    sender.join()
    return code


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_workers_once(capfd, harmless, tmp_path, signum, code):
    # Launchers send it twice: it is one.
    assert supervise_and_signal(tmp_path, {}, [(0, signum), (0.05, signum)]) == code
    out, err = capfd.readouterr()
    assert out.count(f"signal {signum.value}") == out.count("saved") == 1 and err == ""


def test_a_second_signal_kills(capfd, harmless, tmp_path):
    actions = {"p0": "deaf", "p1": "deaf"}
    assert supervise_and_signal(tmp_path, actions, [(0, signal.SIGTERM), (1.2, signal.SIGTERM)]) == 75
    out, err = capfd.readouterr()
    assert "signal 15" in out
    assert err == (
        "SIGTERM again: the run ends now, unsaved. Continue it with: jshard train gpt.py --out runs/a --resume\n"
    )


@pytest.mark.parametrize(
    "actions",
    [
        {"p0": "unprepared", "p1": "deaf"},  # killed by the signal before it had begun to listen for it
        {"p0": "wait", "p1": "aborts when stopped"},  # as JAX does when the process of its service has stopped
    ],
)
def test_what_a_stop_brings_about_is_no_loss(capfd, harmless, tmp_path, actions):
    assert supervise_and_signal(tmp_path, actions, [(0, signal.SIGTERM)]) == 75
    assert capfd.readouterr().err == ""


# One test for all that needs jax, which takes seconds to start.
def test_real_processes_meet_work_and_leave(capfd):
    real = [sys.executable, str(HERE / "jax_worker.py")]
    assert launch.supervise([*real, "2"], processes=2) == 0
    out, err = capfd.readouterr()
    assert out == "total 3, 2 of 4 devices\n"
    assert "native chatter" in err and "Gloo" not in err

    assert launch.supervise([*real, "20", "1"], processes=2, again=AGAIN) == 75
    reported = plain(capfd.readouterr().err)
    assert reported.endswith(
        KILLED.replace("reported: 12", "reported: 10").replace("runs/a/checkpoints/10", "checkpoints/10")
    )
    assert "failed" not in reported and "Terminating process" not in reported

    # What a worker has reported itself, even before it met the others, needs no report.
    assert launch.supervise([*real, "0"], processes=2, deadlines=PATIENT) == 1
    assert capfd.readouterr().err.replace("native chatter\n", "") == (
        "RunError: The disk is full.\n  where: /data\n  why:   0 bytes are free.\n  do:    df -h\n"
    )

    # Without their supervisor the workers end.
    options = json.dumps({"processes": 2})
    orphan = subprocess.Popen(
        [sys.executable, str(HERE / "supervise.py"), options, *real, "100000"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert orphan.stdout is not None
        assert any("total 3" in line for line in iter(orphan.stdout.readline, ""))
        workers = children(orphan.pid)
        assert len(workers) == 2
        orphan.kill()
        until(lambda: all(gone(pid) for pid in workers))
    finally:
        orphan.kill()
        orphan.communicate()


def test_the_cause_among_several_endings():
    killed = Ending(process=3, host="d", code=-9)
    silent = Ending(process=2, host="c", silent_s=60.0)
    failed = Ending(process=1, host="b", code=1)
    aborted = Ending(process=0, host="a", code=-signal.SIGABRT)
    blames = Ending(process=0, host="a", code=1, blames_peer=True)
    refused = Ending(process=4, host="e", code=2)
    order = [refused, killed, silent, failed, aborted, blames]
    for i in range(len(order)):
        assert cause(order[i:]) is cause(order[i:][::-1]) is order[i]
    # Among equals the first that was seen, but of those that have reported the same reason the lowest process.
    assert cause([failed, Ending(process=0, host="a", code=1)]) is failed
    reported = [Ending(process=process, host="x", code=1, explained=True) for process in (1, 0)]
    assert cause(reported).process == 0
    # What is worth the same command once more: a process that is gone, and not one that has failed.
    assert [ending.run_code for ending in order] == [2, 75, 75, 1, 75, 75]


@pytest.mark.parametrize(("value", "bad"), [(0.0, True), (-1.0, True), (float("nan"), True), (5.0, False)])
def test_timeouts_are_positive(value, bad):
    if bad:
        with pytest.raises(js.ShardingError, match="not a positive number") as info:
            launch.Deadlines(peer_s=value)
        assert info.value.do == "--peer-timeout 60"
    else:
        assert launch.Deadlines(peer_s=value).beat_s < value / 3


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(gpu_share, "has_plugin", lambda name: name == "xla_cuda")

    def ids(environ):
        start = {"kind": "local", "coordinator": "a:1", "num_processes": 2, "process_id": 1, "variables": {}}
        place = launch.Cluster(**start, local_id=1, local_size=2)
        return gpu_share.device_ids_of(place, environ).get("JAX_LOCAL_DEVICE_IDS")

    assert ids({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == "2,3"
    assert ids({"CUDA_VISIBLE_DEVICES": "7", "JAX_PLATFORMS": "cpu"}) is None
    assert ids({"CUDA_VISIBLE_DEVICES": ""}) is None
    with pytest.raises(js.ShardingError, match="cannot be divided") as info:
        ids({"CUDA_VISIBLE_DEVICES": "0"})
    assert "JAX_PLATFORMS=cpu" in info.value.do


def test_a_program_without_supervisor_is_no_worker():
    assert not launch.is_worker({}) and launch.is_worker({"JSHARD_WORKER": "1"})
    launch.note(step=3)
    with pytest.raises(SystemExit) as info:
        launch.leave(75)
    assert info.value.code == 75


def test_a_worker_that_fails_is_named_and_its_output_shown(capfd):
    assert launch.supervise(fake(p1="fails"), processes=2, deadlines=QUICK) == 1
    reported = plain(capfd.readouterr().err)
    assert reported.startswith(
        "[process 1] Traceback (most recent call last):\n[process 1] KeyError: 3\nRunError: Process 1"
    )
    assert "why:   it ended with exit code 1.\n" in reported


def test_a_clock_that_is_set_forward_ends_no_run(monkeypatch):
    """JAX compares the times of heartbeats by the clock of the wall, and aborts: here the supervisors look."""
    asked = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda address, **how: asked.update(how))
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    environ = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    worker._connect(environ, launch.Deadlines())
    assert asked["heartbeat_timeout_seconds"] > 10 * 365 * 24 * 3600
