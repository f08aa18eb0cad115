"""How a command ends: exit codes, four parts or a traceback, `--debug`, pipes, Ctrl-C; and `--print-config`."""

import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard import cli
from jshard.cli._arguments import TrainArgs, parse
from jshard.cli._config import NOT_IN_FILES
from jshard.errors import MeshError, RunError
from jshard.recipes.recipe import tree, versions

WRONG = MeshError("The mesh is wrong.", where="--mesh fsdp=3", why="8 / 3.", do="--mesh fsdp=8")
FAILED = RunError("The disk is full.", where="runs/a", why="0 bytes are free.", do="rm -r runs/old")


@pytest.fixture
def ends_with(monkeypatch, capsys):
    """Runs the command line around a command that raises this, or returns it; exit code, stdout and stderr."""
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)

    def end(outcome, *options):
        seen = []

        def command(argv):
            seen.append((list(argv), os.environ.get("JSHARD_DEBUG")))
            if callable(outcome):
                return outcome()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(cli, "_command", lambda name, rest: command)
        code = cli.main(["train", "model.py", *options])
        end.seen = seen[0]
        return code, *capsys.readouterr()

    return end


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (WRONG, 2, f"MeshError: {WRONG}\n"),
        (FAILED, 1, f"RunError: {FAILED}\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
    ids=["request", "run", "ctrl-c"],
)
def test_plain_words_and_the_traceback_on_request(ends_with, monkeypatch, error, code, text):
    assert ends_with(error) == (code, "", text)
    for_debug = ends_with(error, "--debug")
    assert for_debug[0] == code
    assert for_debug[2].startswith("Traceback (most recent call last):")
    assert for_debug[2].endswith(text)
    monkeypatch.setenv("JSHARD_DEBUG", "1")
    assert "Traceback" in ends_with(error)[2]
    monkeypatch.setenv("JSHARD_DEBUG", "0")
    assert ends_with(error) == (code, "", text)


def test_debug_is_for_the_shell_around_the_command_and_its_processes(ends_with):
    assert ends_with(75, "--debug", "--steps", "3") == (75, "", "")
    assert ends_with.seen == (["model.py", "--steps", "3"], "1")
    assert not os.environ.get("JSHARD_DEBUG")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (jax.errors.JaxRuntimeError("INTERNAL: no"), "INTERNAL: no"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),  # one that is not stdout
    ],
)
def test_an_error_that_is_not_of_the_model_file_keeps_its_traceback(ends_with, error, text):
    code, _, printed = ends_with(error)
    assert code == 1 and printed.startswith("Traceback") and printed.endswith(f"{text}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_answer_that_does_not_fit_on_the_disk_is_an_error_in_four_parts():
    command = [sys.executable, "-P", "-m", "jshard", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("RunError: A file could not be read or written.\n  where: standard output")
    assert "ENOSPC" in done.stderr and "Traceback" not in done.stderr


def test_an_error_of_a_file_is_in_four_parts(ends_with):
    code, _, printed = ends_with(FileNotFoundError(2, "No such file or directory", "weights.bin"))
    assert code == 1 and "\n  where: weights.bin\n  why:   No such file or directory (ENOENT).\n" in printed


def test_out_of_memory_says_what_to_do(ends_with):
    code, _, error = ends_with(lambda: jnp.zeros((2**46,)).block_until_ready(), "--mesh", "fsdp=2")
    assert code == 1
    what, where, why, *do = error.splitlines()
    assert what == "RunError: The devices are out of memory."
    assert where == "  where: jshard train model.py --mesh fsdp=2"
    assert "RESOURCE_EXHAUSTED" in why
    for way in ("--mesh fsdp=N", "--set accumulate=2", "--set batch_size=N", 'remat="full"'):
        assert way in "\n".join(do)
    assert "Traceback" not in error
    midway = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    midway.add_note("last good checkpoint: runs/a/checkpoints/100")
    assert ends_with(midway)[2].endswith("last good checkpoint: runs/a/checkpoints/100\n")


@pytest.mark.parametrize(("lines", "unbuffered"), [(1, ""), (100_000, "1")], ids=["at the end", "in the middle"])
def test_a_reader_that_leaves(lines, unbuffered):
    program = (
        "import sys; from jshard import cli\n"
        f"def command(argv):\n    for _ in range({lines}): print('a line')\n    return 0\n"
        "cli._command = lambda name, rest: command\n"
        "sys.stdin.read()\n"  # until the reader has gone
        "sys.exit(cli.main(['train']))"
    )
    reading, writing = os.pipe()
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=writing,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writing)
    os.close(reading)
    _, error = started.communicate(timeout=800)
    assert error == b""
    assert started.returncode in (0, 1)


def test_the_commands_packages_are_not_imported_for_help():
    program = (
        "import sys; from jshard.cli import main; main(['--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'tyro', 'grain', 'matplotlib', 'jshard.train')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr


def test_a_process_that_only_starts_others_does_without_jax():
    program = (
        "import sys; from jshard.cli import main, train; from jshard import launch\n"
        "train.launch.supervise = lambda command, **_: launch.detect({})\n"
        "main(['train', 'model.py', '--processes', '2'])\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'grain', 'matplotlib')))"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "JSHARD_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=800, env=environ)
    assert done.returncode == 0, done.stderr


def config(capsys, line):
    assert cli.main(["train", "gpt", "--print-config", *line.split()]) == 0
    return json.loads(capsys.readouterr().out)


def test_config_is_the_resolved_tree(capsys):
    read = config(
        capsys,
        "--recipe tiny --steps 7 --set model.n_layer=3 --mesh replica=1,fsdp=8 --data text.txt --tokenizer tok.json"
        " --out runs/a --workers 2 --track tensorboard",
    )
    fields = [field.name for field in dataclasses.fields(TrainArgs) if field.name not in NOT_IN_FILES]
    assert list(read) == ["model_file", "recipe_name", "recipe", *fields, "versions"]
    assert read["recipe"]["class"] == "Recipe"
    assert read["recipe"]["num_steps"] == 7
    assert read["recipe"]["model"]["class"] == "GPTConfig"
    assert read["recipe"]["model"]["n_layer"] == 3
    assert read["mesh"] == "replica=1,fsdp=8"  # as asked: other machines have other devices
    assert (read["data"], read["tokenizer"], read["out"]) == (["text.txt"], "tok.json", "runs/a")
    assert (read["workers"], read["init_from"], read["track"]) == (2, None, ["tensorboard"])


OPTIONS = (
    "--recipe tiny --steps 7 --set model.n_layer=3 --mesh fsdp=4 --data a.bin=1/3 b.txt=2/3 --dtype uint16 --track"
)
OPTIONS += " --unit remat=full --unit prefetch=2 --expect-within 0.1 --workers 2"


def test_what_is_printed_says_the_run_again(capsys, tmp_path):
    said = config(capsys, OPTIONS)
    (tmp_path / "run.json").write_text(json.dumps(said))
    given = f"--config {tmp_path / 'run.json'}"
    assert cli.main(["train", *given.split(), "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out) == said
    # The command line counts instead, and so does what is edited; the line of a restart says both.
    said["recipe"]["learning_rate"] = 0.25
    (tmp_path / "run.json").write_text(json.dumps(said))
    words = f"gpt {given} --steps 9 --workers 0 --set model.n_layer=2 --mesh fsdp=2 --print-config"
    args = parse(TrainArgs, words.split(), command="jshard train")
    for line in (words.split(), args.words()):
        assert cli.main(["train", *line]) == 0
        read = json.loads(capsys.readouterr().out)
        assert (read["recipe"]["learning_rate"], read["recipe"]["num_steps"]) == (0.25, 9)
        assert (read["recipe"]["model"]["n_layer"], read["workers"], read["mesh"]) == (2, 0, "fsdp=2")
        assert read["data"] == said["data"] and read["unit"] == said["unit"]


def test_a_config_may_be_a_part_in_toml(capsys, tmp_path):
    (tmp_path / "run.toml").write_text("mesh = {fsdp = 4}\nworkers = 3\n[recipe.model]\nn_layer = 5\n")
    read = config(capsys, f"--config {tmp_path / 'run.toml'}")
    assert (read["recipe"]["model"]["n_layer"], read["workers"], read["mesh"]) == (5, 3, "fsdp=4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker = 3", ": worker\n*do:    workers instead of worker; "),
        ("[recipe]\nlearn_rate = 3", ", recipe: learn_rate\n*do:    learning_rate instead of learn_rate; "),
        ("[recipe]\nlearning_rate = 'many'", "learning_rate takes float, not 'many'"),
        ("mesh", "it is not TOML: "),
        ("recipe = 3", "it must be a table of options"),
        (None, "no such file"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(capsys, tmp_path, text, says):
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    assert cli.main(["train", "gpt", "--config", str(tmp_path / "run.toml"), "--print-config"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in says.split("*")), said


def test_versions():
    assert list(versions()) == "python jshard jax jaxlib flax optax orbax-checkpoint grain".split()


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (float("inf"), "inf"),
        (np.float32(0.5), 0.5),
        (Color.RED, "RED"),
        (Path("a/b"), "a/b"),
        ({1: {2}}, {"1": [2]}),
        (np.dtype("float32"), "float32"),
        (json.dumps, "json.dumps"),
        (object(), "builtins.object"),
    ],
    ids=lambda value: type(value).__name__,  # not the text: it may hold an address, and each test worker its own
)
def test_values_that_json_does_not_have(value, json_value):
    assert tree(value) == json_value
    json.dumps(tree(value), allow_nan=False)
