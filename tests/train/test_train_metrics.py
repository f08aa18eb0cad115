"""The record of a run: metrics.jsonl, several trackers as one, loss.png."""

import json
import math
import os
import pathlib
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from jshard.errors import RunError, ShardingError
from jshard.train import records as metrics
from jshard.train.records import Trackers, plot_loss


class Fake:
    """Notes what it is given; raises from the first call after `fails`."""

    def __init__(self, fails=math.inf):
        self.calls, self.fails = [], fails

    def log(self, step, scalars):
        self._note(step)

    def close(self):
        self._note("close")

    def _note(self, what):
        self.calls.append(what)
        if len(self.calls) > self.fails:
            raise ConnectionError("no route to host")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def file_size():
    """Sets how large files of this process may grow: a disk that is full, for one test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path: pathlib.Path, steps) -> None:
    log = metrics.Jsonl(path)
    for step in steps:
        log.log(step, {"loss": 1.0 / step})
    log.close()


def steps_of(path) -> list[int]:
    return [line["step"] for line in metrics.read_metrics(path)]


def test_each_call_is_a_line_on_disk_at_once(path):
    log = metrics.Jsonl(path)
    log.log(1, {"loss": np.float32(2.5), "grad_norm": jnp.float32(0.5), "peak_bytes": np.int64(3)})
    # A run that is killed here has its line.
    assert path.read_text() == '{"step": 1, "loss": 2.5, "grad_norm": 0.5, "peak_bytes": 3}\n'
    log.log(2, {"val_loss": 2.0})
    log.close()
    assert metrics.read_metrics(path)[1] == {"step": 2, "val_loss": 2.0}


def test_a_value_that_is_no_number_is_null(path):
    log = metrics.Jsonl(path)
    log.log(1, {"loss": math.nan, "grad_norm": np.float32("inf"), "val_loss": -math.inf})
    log.close()
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line == {"step": 1, "loss": None, "grad_norm": None, "val_loss": None}


def test_an_existing_file_is_refused_and_stays(path):
    write(path, [1, 2])
    before = path.read_bytes()
    with pytest.raises(ShardingError, match="overwrite another one") as error:
        metrics.Jsonl(path)
    assert str(path) in str(error.value) and "--resume" in error.value.do
    assert path.read_bytes() == before


def test_a_resumed_run_writes_on_from_its_step(path):
    write(path, range(1, 8))
    before = path.read_bytes().splitlines(keepends=True)
    log = metrics.Jsonl(path, resume_after=5)
    assert path.read_bytes() == b"".join(before[:5])
    log.log(6, {"loss": 0.5})
    log.close()
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    assert metrics.read_metrics(path)[-1]["loss"] == 0.5
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step"', b"{", b"\0\0\0", b'{"step": 4, "loss": "\xc3'])
def test_an_unfinished_last_line_is_passed_over_and_cut_off(path, torn):
    write(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps_of(path) == [1, 2, 3]
    metrics.Jsonl(path, resume_after=10).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["not JSON", "[1]", '{"loss": 1.0}', ""])
def test_a_damaged_line_before_the_last_is_reported_with_its_number(path, line):
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"metrics.jsonl:2\b"):
        metrics.read_metrics(path)
    with pytest.raises(RunError, match="damaged"):
        metrics.Jsonl(path, resume_after=3)
    assert path.read_bytes() == before


def test_a_resume_that_is_killed_while_it_cuts_back_loses_nothing(path, monkeypatch):
    write(path, range(1, 8))
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        metrics.Jsonl(path, resume_after=5)
    assert path.read_bytes() == before
    monkeypatch.undo()
    metrics.Jsonl(path, resume_after=5).close()
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(path, file_size):
    log = metrics.Jsonl(path)
    log.log(1, {"loss": 1.0})
    whole = path.read_bytes()
    file_size(len(whole) + 10)  # the next line begins and does not fit
    with pytest.raises(RunError, match="cannot be written") as error:
        log.log(2, {"loss": 0.5})
    assert error.value.where == (str(path),)
    assert "File too large (errno 27)" in error.value.why
    assert steps_of(path) == [1]
    file_size(None)
    metrics.Jsonl(path, resume_after=1).close()
    assert path.read_bytes() == whole


def test_an_optional_tracker_that_fails_is_left_out_with_one_warning():
    needed, remote = Fake(), Fake(fails=1)
    trackers = Trackers(needed, optional=[remote])
    trackers.log(1, {})
    with pytest.warns(UserWarning, match=r"Fake failed \(ConnectionError: no route to host\).*from step 2 on"):
        trackers.log(2, {})
    trackers.log(3, {})  # a warning would fail the test
    trackers.close()
    assert remote.calls == [1, 2]
    assert needed.calls == [1, 2, 3, "close"]


def test_every_tracker_is_closed_though_one_fails():
    first, last, remote, said = Fake(fails=0), Fake(), Fake(fails=0), []
    with pytest.raises(ConnectionError):
        Trackers(first, last, optional=[remote], warn=said.append).close()
    assert first.calls == last.calls == remote.calls == ["close"]
    assert "last steps may be missing" in said[0]


def test_plot_is_a_picture(path, tmp_path):
    log = metrics.Jsonl(path)
    for step, loss in enumerate([3.0, 2.0, math.nan, 1.0], start=1):
        log.log(step, {"loss": loss})
    log.log(4, {"val_loss": 0.4})
    log.close()
    plot_loss(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
