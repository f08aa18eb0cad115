"""run.json says of each attempt what it lost, and how much of the time counts."""

import json
import sys
import time

import pytest

from jshard.train import attempts as attempts_module


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose clock is set by hand: it begins at 1000 s."""

    class Run:
        metrics, now, lines = tmp_path / "metrics.jsonl", 1000.0, []

        def step(self, number, at):
            self.lines.append({"step": number, "loss": 1.0, "time": at})
            self.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

        def cut(self, number):
            self.lines[:] = [line for line in self.lines if line["step"] <= number]

    found = Run()
    monkeypatch.setattr(attempts_module, "_process_start_s", lambda: found.now)
    monkeypatch.setattr(attempts_module.time, "time", lambda: found.now)
    return found


def test_what_a_killed_attempt_has_lost(run):
    first = attempts_module.begin_attempt([], run.metrics, step=0, known={})
    run.now = 1010.0
    first = attempts_module.attempt_ready(first)
    for number in range(1, 8):
        run.step(number, 1010.0 + 5 * number)
    run.now = 1060.0
    second = attempts_module.begin_attempt(
        first, run.metrics, step=4, known={"cause": "process 1: killed", "ended_at": 1050.0}
    )
    run.cut(4)
    assert second[0] == {
        "begin": "1970-01-01T00:16:40.000+00:00",
        "ready": "1970-01-01T00:16:50.000+00:00",
        "end": "1970-01-01T00:17:30.000+00:00",
        "first_step": 0,
        "last_step": 4,
        "cause": "process 1: killed",
        "productive_s": 20.0,
        "steps_lost": 3,
        "seconds_lost": 15.0,
    }
    run.now = 1070.0
    second = attempts_module.attempt_ready(second)
    for number in range(5, 11):
        run.step(number, 1050.0 + 5 * number)
    run.now = 1100.0
    assert attempts_module.ettr(second) == 20 / 100
    done = attempts_module.end_attempt(second, run.metrics, cause="done")
    assert (done[1]["cause"], done[1]["last_step"], done[1]["productive_s"]) == ("done", 10, 30.0)
    assert attempts_module.ettr(done) == 0.5
    assert (
        attempts_module.describe_attempts(done)
        == "ETTR 50.0%: 50.0 s of steps that count in 100 s, 2 attempts; 3 steps (15.0 s) were lost"
    )


@pytest.mark.parametrize(("on_request", "value"), [(True, 0.5), (False, 40 / 1080)])
def test_a_pause_after_a_requested_stop_is_no_lost_time(run, on_request, value):
    attempts = attempts_module.attempt_ready(attempts_module.begin_attempt([], run.metrics, step=0, known={}))
    run.step(1, 1020.0)
    run.now = 1040.0
    attempts = attempts_module.end_attempt(attempts, run.metrics, cause="stopped by SIGINT", on_request=on_request)
    run.now = 2040.0
    attempts = attempts_module.begin_attempt(attempts, run.metrics, step=1, known={})
    run.now = 2060.0
    attempts = attempts_module.attempt_ready(attempts)
    run.step(2, 2080.0)
    run.now = 2080.0
    attempts = attempts_module.end_attempt(attempts, run.metrics, cause="done", on_request=True)
    run.now = 9999.0
    assert attempts_module.ettr(attempts) == pytest.approx(value)
    line = attempts_module.describe_attempts(attempts)
    assert ("; 16:40 between stops on request and the next start are not counted" in line) == on_request, line
    assert attempts_module.describe_losses(attempts) == (None if on_request else line)
    assert attempts_module.describe_losses(attempts[:1]) is None


def test_a_checkpoint_before_the_last_attempt_takes_back_from_the_one_before(run):
    found = attempts_module.begin_attempt([], run.metrics, step=0, known={})
    found = attempts_module.attempt_ready(found)
    for number in (1, 2, 3, 4):
        run.step(number, 1000.0 + number)
    run.now = 1010.0
    found = attempts_module.attempt_ready(attempts_module.begin_attempt(found, run.metrics, step=4, known={}))
    run.step(5, 1011.0)
    run.now = 1020.0
    found = attempts_module.begin_attempt(found, run.metrics, step=2, known={})
    assert [(one["last_step"], one["steps_lost"], one.get("productive_s")) for one in found[:2]] == [
        (2, 2, 2.0),
        (4, 1, 0.0),
    ]
    assert found[1]["cause"] == "not known"


def test_an_attempt_that_never_trained_counts_for_nothing(run):
    found = attempts_module.begin_attempt([], run.metrics, step=0, known={})
    run.now = 1030.0
    found = attempts_module.begin_attempt(found, run.metrics, step=0, known={"cause": "killed", "ended_at": 1020.0})
    assert found[0]["productive_s"] == 0.0 and found[0]["end"] == "1970-01-01T00:17:00.000+00:00"
    assert attempts_module.ettr(found) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a run begins with its first line")
def test_an_attempt_begins_with_its_process():
    assert attempts_module._process_start_s() < time.time() - time.process_time() / 2
