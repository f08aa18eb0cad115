"""A command works whichever of its standard streams are closed, and whatever they can encode."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import environment
from tests.processes.launching import HERE, fake
from tests.wide import wide

STREAMS = ("stdin", "stdout", "stderr")
COMBINATIONS = [closed for count in (1, 2, 3) for closed in itertools.combinations(range(3), count)]
NAMES = ["+".join(STREAMS[number] for number in closed) for closed in COMBINATIONS]
each_combination = pytest.mark.parametrize("closed", COMBINATIONS, ids=NAMES)

# Shows what the descriptors are in a child that inherits them, by a way that needs none of them.
SHOW = """\
import os, subprocess, sys
from jshard._streams import open_standard_streams
open_standard_streams()
print("to stdout")
print("to stderr", file=sys.stderr)
assert sys.stdin.read() == ""
pipe = os.pipe()
assert min(pipe) > 2, pipe
child = "import os, sys; print(1); sys.exit(0 if sys.stdin and sys.stdout and sys.stderr else 3)"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def without(closed, command, **how):
    """Runs a command with these file descriptors closed."""
    closing = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    shell = ["sh", "-c", f'exec "$@" {closing}', "sh", *command]
    env = environment() | how.pop("variables", {})
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(shell, env=env, timeout=800, text=True, check=False, **streams, **how)


@each_combination
def test_streams_that_are_closed_are_opened_before_anything_takes_their_numbers(closed):
    done = without(closed, [sys.executable, "-c", SHOW])
    assert done.returncode == 0, done.stderr
    assert "to stdout" in done.stdout or 1 in closed


@pytest.mark.parametrize("closed", [(0, 1), (0, 1, 2)], ids=["stdin+stdout", "all"])
def test_a_supervisor_hears_its_workers_whatever_is_closed(closed, tmp_path):
    """Its pipe to a worker had the number of the worker's stdout, and a healthy run was lost."""
    command = [
        sys.executable,
        str(HERE / "supervise.py"),
        '{"processes": 2, "peer_s": 5.0}',
        *fake(p0="done", p1="done"),
    ]
    done = without(closed, command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_command_without_stdout_ends_well():
    done = without((1,), [sys.executable, "-m", "jshard", "--version"])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stream_of_ascii_ends_no_command():
    code = "from jshard._streams import *; escape_what_cannot_be_written(); print('a\\u2026 \\ud800')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a\\u2026 \\ud800\n"


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_plan_is_printed_on_a_stream_of_ascii(variables):
    command = [sys.executable, "-m", "jshard", "train", "gpt", "--dry-run"]
    done = without((), command, variables=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@wide
@each_combination
def test_a_run_of_two_processes_is_trained_whatever_is_closed(closed, tmp_path):
    command = [sys.executable, "-m", "jshard", "train", "gpt", "--steps", "1", "--processes", "2", "--out", "run"]
    done = without(closed, command, cwd=tmp_path, variables={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "run" / "checkpoints")
