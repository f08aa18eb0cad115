"""How long tests take: which file begins first, and which of a test's parameter sets `make test` leaves to CI.

The times are in durations.txt, from the last recording on two cores, with nothing else at work there:

    python -m pytest -m "not slow and not gpu and not slurm" -n 3 --dist loadfile --record-durations

A test of which nothing is recorded always runs.
"""

import collections
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

RECORD = Path(__file__).parent / "durations.txt"
LONG_S = 0.6  # a parameter set that takes longer is for `-m wide`, if the test has a shorter one
_LEAST_S = 0.3  # what takes less is not recorded
_NOT_BY_DEFAULT = ("wide", "slow", "gpu", "slurm")
# What happens to several processes: .ci/run comes to the wide tests of these last, and only where there is time.
_ALL_SETS_RUN = Path(__file__).parent / "processes"


def recorded() -> dict[str, float]:
    """Returns the recorded seconds of each test, by its id."""
    seconds_by_id: dict[str, float] = {}
    for line in RECORD.read_text().splitlines():
        seconds, _, name = line.partition("\t")
        seconds_by_id[name] = float(seconds)
    return seconds_by_id


def order_and_mark(items: list[pytest.Item], *, long_files_first: bool = True) -> None:
    """Sorts the tests by what their files cost, and marks long parameter sets as `wide`.

    Long files come first, so that no worker of xdist is left alone with one at the end. Where the time is limited they
    come last: then most tests run before it ends.
    """
    seconds_by_id = recorded()
    seconds_by_file: collections.Counter[Path] = collections.Counter()
    for item in items:
        seconds_by_file[item.path] += seconds_by_id.get(item.nodeid, 0.0)
    # Stable: within a file the order stays.
    items.sort(key=lambda item: seconds_by_file[item.path], reverse=long_files_first)

    for parameter_sets in _by_function(items).values():
        for item in long_sets(parameter_sets, seconds_by_id):
            item.add_marker(pytest.mark.wide)


def long_sets(parameter_sets: Sequence[pytest.Item], seconds_by_id: Mapping[str, float]) -> list[pytest.Item]:
    """Returns the parameter sets of a test that take longer than `LONG_S`, but for the shortest one of all."""

    def seconds(item: pytest.Item) -> float:
        return seconds_by_id.get(item.nodeid, 0.0)

    shortest = min(parameter_sets, key=seconds)
    return [item for item in parameter_sets if item is not shortest and seconds(item) > LONG_S]


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Groups the tests that run by default by their function."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        runs_by_default = not any(item.get_closest_marker(mark) for mark in _NOT_BY_DEFAULT)
        is_exempt = item.get_closest_marker("every_set") is not None or item.path.is_relative_to(_ALL_SETS_RUN)
        if runs_by_default and not is_exempt:
            function = item.nodeid.partition("[")[0]
            groups.setdefault(function, []).append(item)
    return groups


class TimeLimit:
    """A plugin that skips the tests that have not begun when the time is over: CI has a limit for everything."""

    def __init__(self, began_s: float, limit_s: float) -> None:
        self._began_s = began_s
        self._limit_s = limit_s

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skips a test that comes too late."""
        if time.monotonic() - self._began_s > self._limit_s:
            pytest.skip(f"{self._limit_s:.0f} s are over: --stop-after-s")


class Recorder:
    """A plugin that adds up the phases of each test, and writes durations.txt at the end."""

    def __init__(self) -> None:
        self._seconds_by_id: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the time of a phase: setup, call or teardown."""
        self._seconds_by_id[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the record, the longest first."""
        lines = [
            f"{seconds:.1f}\t{name}\n" for name, seconds in self._seconds_by_id.most_common() if seconds >= _LEAST_S
        ]
        RECORD.write_text("".join(lines))
