"""A test during which a worker of xdist died is run once more, by itself, when the others are done.

Very rarely, a program of eight devices on two cores hangs in XLA's CPU runtime: some threads wait in a collective, and
the others never come. XLA then ends the process; see the time limits in conftest.py. A test whose own program never
ends dies the second time as well, and fails.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

_IS_SECOND_RUN = "JSHARD_TESTS_SECOND_RUN"


class Crashes:
    """A plugin for the process that hands out the tests: collects those that took a worker along, and repeats them."""

    def __init__(self) -> None:
        self._node_ids: list[str] = []

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Takes a test out of the failed ones: the second run decides."""
        if os.environ.get(_IS_SECOND_RUN):
            return
        self._node_ids.append(crashitem)
        reason = f"{report.longrepr}: it is run once more at the end"
        report.outcome = "skipped"
        report.longrepr = (crashitem.partition("::")[0], 0, reason)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Runs the collected tests; the session fails if one of them fails."""
        if not self._node_ids:
            return
        if _second_run(self._node_ids) != pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _second_run(node_ids: Sequence[str]) -> int:
    """Runs tests in a process of their own, whatever their marks, and returns its exit code."""
    print(f"\n\n{len(node_ids)} test(s) took a worker along; once more:", flush=True)
    # The last -m counts: it takes the place of the one in pyproject.toml. A worker dies in place of the whole run.
    command = [sys.executable, "-m", "pytest", "-n", "1", "-m", "", *node_ids]
    return subprocess.run(command, env=os.environ | {_IS_SECOND_RUN: "1"}).returncode
