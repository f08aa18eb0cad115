"""The record of a run: metrics.jsonl, the progress line, loss.png."""

import io
import json

import numpy as np
import pytest

from jshard.train import metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def test_metrics_are_lines_of_json(tmp_path):
    with metrics.MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(step=1, loss=np.float32(2.5))
        # A run that is killed here has its lines on disk.
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}
        writer.write(step=2, val_loss=2.0)
    assert metrics.read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "val_loss": 2.0}


def test_progress_shows_step_loss_speed_and_time_left(clock):
    stream = Terminal()
    progress = metrics.Progress(num_steps=100, tokens_per_step=1000, stream=stream)
    progress.update(1, 5.0)
    assert progress.tokens_per_s is None
    for step in (2, 3):
        clock[0] += 2.0
        progress.update(step, 4.0)
    assert progress.tokens_per_s == 500
    assert stream.getvalue().endswith("\rstep   3/100   loss 4.0000   500 tokens/s   ETA 3:14")


def test_progress_in_a_log_file_is_few_plain_lines(clock):
    stream = io.StringIO()
    progress = metrics.Progress(num_steps=100, tokens_per_step=10, stream=stream)
    for step in range(1, 101):
        clock[0] += 1.0
        progress.update(step, 1.0)
    lines = stream.getvalue().splitlines()
    assert 5 < len(lines) < 20
    assert lines[0].startswith("step   1/100")
    assert lines[-1].startswith("step 100/100")
    assert "\r" not in stream.getvalue()


def test_a_note_stays_and_does_not_slow_the_shown_speed(clock):
    stream = Terminal()
    progress = metrics.Progress(num_steps=10, tokens_per_step=100, stream=stream)
    for step in range(1, 5):
        clock[0] += 1.0
        progress.update(step, 1.0)
    clock[0] += 500.0  # an evaluation
    progress.note("step 4: validation loss 1.0000")
    for step in range(5, 7):
        clock[0] += 1.0
        progress.update(step, 1.0)
    assert "\nstep 4: validation" not in stream.getvalue()  # the line before is wiped, not left behind
    assert "step 4: validation loss 1.0000\n" in stream.getvalue()
    assert progress.tokens_per_s == 100


def test_plot_is_a_picture(tmp_path):
    with metrics.MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 4):
            writer.write(step=step, loss=1.0 / step)
        writer.write(step=3, val_loss=0.4)
    metrics.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
