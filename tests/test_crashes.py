"""A test during which a worker dies is run once more: it passes if that was chance, and fails if it was not."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import crashes

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(crashes.Crashes())
"""

BY_CHANCE = """
import os, pathlib

def test_others_run():
    pass

def test_dies_once():
    marker = pathlib.Path(__file__).with_name("was_here")
    if not marker.exists():
        marker.touch()
        os.abort()

def test_the_next_one():
    pass
"""

ALWAYS = """
import os

def test_dies():
    os.abort()
"""

FAILS_TOO = """
def test_fails():
    assert False
"""


def run_of(folder: Path, **sources: str) -> subprocess.CompletedProcess[str]:
    """Runs test files in a folder that has nothing else."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_test_that_dies_by_chance_passes(tmp_path):
    result = run_of(tmp_path, chance=BY_CHANCE)
    assert result.returncode == pytest.ExitCode.OK, result.stdout
    assert "1 skipped" in result.stdout and " failed" not in result.stdout
    assert "1 test(s) took a worker along" in result.stdout


@pytest.mark.parametrize("sources", [{"always": ALWAYS}, {"chance": BY_CHANCE, "fails": FAILS_TOO}], ids=list)
def test_what_dies_again_or_fails_otherwise_is_a_failure(tmp_path, sources):
    result = run_of(tmp_path, **sources)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
