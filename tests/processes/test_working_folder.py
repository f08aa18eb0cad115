"""No file of the working folder takes the place of a module: not in a command, and not in the processes it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jshard._children import forget_safe_path, module_command, safe_path
from jshard.data.worker_pool import _Worker
from tests.compiling import environment

# Modules that Python has not imported when a command begins, of the standard library and of others.
TAKEN = ("random", "json", "socket", "logging", "jax", "numpy", "flax", "models", "tests", "optax")


@pytest.fixture
def folder(tmp_path):
    """A folder whose files would end any program that imports them."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder ran')\n")
    return tmp_path


def run(command, folder, **variables):
    env = environment() | {"PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=800, check=False)


def test_a_command_imports_nothing_from_the_working_folder(folder):
    done = run([sys.executable, "-m", "jshard", "train", "gpt", "--print-config"], folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]


def test_a_process_of_a_command_imports_nothing_from_the_working_folder(folder):
    done = run(module_command("jshard", "train", "gpt", "--print-config"), folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]


def test_a_process_of_a_command_finds_a_library_that_is_not_installed(tmp_path, monkeypatch):
    """As where Python has it only from the working folder of `python -m`."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = module_command("jshard", "--version")
    isolated = [command[0], "-S", *command[1:]]  # without the installed packages
    assert run(isolated, tmp_path, PYTHONPATH="").stdout.startswith("jshard ")


def test_a_data_worker_imports_nothing_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    worker = _Worker(0, 1)
    worker.send(b"not a pickle")
    kind, _, _ = worker.receive("nothing")
    assert kind == "unpickled"
    worker._pipe.close()
    assert worker.joined() == 0


def test_the_children_of_a_data_worker_are_the_users_own(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_path():
        assert os.environ["PYTHONSAFEPATH"]
        forget_safe_path()
        assert "PYTHONSAFEPATH" not in os.environ
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with safe_path():
        forget_safe_path()
        assert os.environ["PYTHONSAFEPATH"] == "1"
