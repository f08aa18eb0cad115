"""Of each test at least one parameter set is left to `make test`, and what is not recorded runs."""

import pathlib
import types

import pytest

from tests import durations


def items_of(*names: str) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(nodeid=name) for name in names]


SECONDS = {"f[a]": 5.0, "f[b]": 2.0, "f[c]": 0.1}


def left_out(*names: str) -> list[str]:
    return [item.nodeid for item in durations.long_sets(items_of(*names), SECONDS)]


def test_the_shortest_set_runs_however_long_it_takes():
    assert left_out("f[a]", "f[b]") == ["f[a]"]
    assert left_out("f[a]") == []


def test_short_and_new_sets_run():
    assert left_out("f[a]", "f[b]", "f[c]") == ["f[a]", "f[b]"]
    assert left_out("f[a]", "f[new]", "f[newer]") == ["f[a]"]


def test_the_recorder_adds_up_the_phases_of_a_test(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durations, "RECORD", tmp_path / "durations.txt")
    recorder = durations.Recorder()
    for name, seconds in [("a::f[x 1]", 0.2), ("a::g", 2.0), ("a::f[x 1]", 0.5), ("a::h", 0.1)]:
        recorder.pytest_runtest_logreport(types.SimpleNamespace(nodeid=name, duration=seconds))
    recorder.pytest_sessionfinish()
    assert durations.recorded() == {"a::g": 2.0, "a::f[x 1]": 0.7}
