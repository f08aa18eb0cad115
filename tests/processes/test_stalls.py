"""A run that makes no progress ends with the code for "resume me", and names the process that is behind, and where."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import jshard as js
from jshard.launch import StallWatch, phases
from jshard.launch.peers import Ending, cause
from jshard.launch.process_status import ProcessStatus
from tests.processes.test_two_processes import TWO, Command, last_step

MODEL = Path(__file__).parents[2] / "benchmarks" / "faults_model.py"


@pytest.fixture
def stalling(tmp_path, monkeypatch):
    """Starts a run; after ten steps something stops it, and it ends: its exit code, what it wrote, and its folder."""
    monkeypatch.setenv("SLEEP", str(tmp_path / "sleep"))

    def run(*options, at, timeout="--stall-timeout=5"):
        started = Command(tmp_path, "run", timeout, *options, steps=100_000, model=MODEL)
        started.reaches(10)
        at(started)
        code, stdout, stderr = started.ends()
        return code, stdout + stderr, started.out

    run.sleep = lambda where: (tmp_path / "sleep").write_text(where)
    return run


def test_data_that_do_not_come_are_named(stalling):
    code, said, out = stalling(*TWO, at=lambda run: stalling.sleep("1 data"))
    assert code == 75, said
    assert "RunError: Process 1 of 2 is stalled: waiting for data." in said
    assert "faults_model.py:" in said and "in fall_asleep" in said
    assert "5 s (--stall-timeout)" in said and f"last good checkpoint: {out}/checkpoints/" in said
    assert re.search(r"no step for \d s: process 1 of 2 is waiting for data", said), said
    assert "--resume" in said and "Traceback" not in said
    kept = sorted(path.name.rpartition("-")[2] for path in (out / "stalls").iterdir())
    assert kept == ["0.txt", "1.txt"]  # of each process, with the main thread of the one that waits
    assert all("in _train" in path.read_text() for path in (out / "stalls").iterdir())


@pytest.mark.wide
@pytest.mark.parametrize("process", [0, 1])
def test_a_main_thread_that_sleeps_is_named(stalling, process):
    code, said, _ = stalling(*TWO, at=lambda run: stalling.sleep(f"{process} main"))
    assert code == 75 and f"RunError: Process {process} of 2 is stalled: in a step." in said, said
    assert "in fall_asleep" in said


@pytest.mark.wide
def test_a_process_that_is_stopped_is_named(stalling):
    code, said, _ = stalling(*TWO, at=lambda run: os.kill(run.workers()[0], signal.SIGSTOP))
    assert code == 75 and "RunError: Process 0 of 2 is stalled: " in said and "T (stopped)" in said, said


@pytest.mark.wide
def test_a_run_of_one_process_names_its_data_worker(stalling):
    code, said, out = stalling("--workers=2", "--mesh=fsdp=2", at=lambda run: stalling.sleep("0 data"))
    assert code == 75 and "RunError: The run is stalled: waiting for data." in said, said
    assert "data worker " in said and "in fall_asleep" in said and f"{out}/checkpoints/" in said, said


@pytest.mark.wide
def test_the_deadline_of_a_stop_holds_for_the_step_as_well(stalling):
    """Process 0 waits in native code, where Python hands no signal to its main thread."""

    def at(run):
        stalling.sleep("1 data")
        step = None
        while step != (step := last_step(run.out)):  # what was read before is used up
            time.sleep(3)
        run.process.send_signal(signal.SIGTERM)

    code, said, _ = stalling(*TWO, "--stop-deadline=3", at=at, timeout="--stall-timeout=600")
    assert code == 75 and "RunError: Process 1 of 2 did not stop in time: waiting for data." in said, said
    assert "asked to stop, and did not within 3 s (--stop-deadline)" in said, said


@pytest.mark.wide
def test_a_run_whose_data_hang_when_it_is_asked_to_stop_ends(stalling):
    """It may have batches for that step still; then the thread that reads hangs when all is saved."""

    def at(run):
        stalling.sleep("1 data")
        run.process.send_signal(signal.SIGTERM)

    code, said, _ = stalling(*TWO, at=at)
    assert code == 75, said
    assert "is saved" in said or "Process 1 of 2 is stalled" in said, said


def test_the_deadline_of_a_step_hangs_on_the_steps_before():
    watch = StallWatch()
    assert watch.deadline().limit_s is None  # while the run starts
    brief = StallWatch(timeout_s=5)
    for each in (watch, brief):
        each.set_phase(phases.STEP)
        assert each.deadline().limit_s == 1800  # for the first step, while others may still compile
        each.step_done(1)
    assert (watch.deadline().limit_s, brief.deadline().limit_s) == (1800, 5)
    for span_s, deadline_s in ((0.1, 60), (10.0, 200), (1000.0, 1800)):
        watch._step_times_s.clear()
        watch._step_times_s.extend([span_s] * 9 + [9999.0])
        watch._measure()
        assert watch.deadline().limit_s == deadline_s
    watch.set_phase(phases.SAVE)
    assert watch.deadline().limit_s == 1800
    with pytest.raises(js.ShardingError, match="--stall-timeout nan"):
        StallWatch(timeout_s=float("nan"))


def test_the_one_that_is_behind_among_several():
    def ending(process, **status):
        return Ending(process=process, host="a", status=ProcessStatus(**status))

    stopped = ending(3, marks=9, state="T (stopped)")
    behind = ending(2, marks=5, waits=True)
    busy, waiting = ending(1, marks=6), ending(0, marks=6, waits=True)
    order = [stopped, behind, busy, waiting]
    for i in range(len(order)):
        assert cause(order[i:]) is cause(order[i:][::-1]) is order[i]
    assert cause([waiting, killed := Ending(process=3, host="d", code=-9)]) is killed
