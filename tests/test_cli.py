"""The `jshard` command: a run, a plan without devices, and errors without a traceback."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jshard import cli
from jshard.cli._mesh_option import num_devices, parse_mesh
from jshard.train.metrics import read_metrics
from tests.micro_gpt import MODELS

MICRO = str(Path(__file__).with_name("micro_gpt.py"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with some text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abcdefgh" * 2000)
    return tmp_path


def jshard(*arguments, cwd, **env):
    """The command in a process of its own, as a user starts it: no device count is set for it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    program = "import sys; from jshard.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_train_in_a_fresh_process_simulates_eight_devices(folder):
    done = jshard("train", MICRO, "--steps", "5", "--data", "text.txt", "--out", "mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 x cpu (simulated")
    assert "1 files of text.txt" in done.stdout
    assert "step 5/5   loss" in done.stdout
    assert "\nvalidation loss " in done.stdout
    out = folder / "mine"
    assert {path.name for path in out.iterdir()} == {"metrics.jsonl", "loss.png", "recipe.json", "checkpoint"}
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5]
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_options_reach_the_run_and_a_run_that_is_there_stays(folder, capsys):
    (folder / "runs" / "micro_gpt-micro").mkdir(parents=True)
    arguments = ["train", MICRO, "--steps", "1", "--data", "text.txt", "--mesh", "replica=2,fsdp=4", "--seed", "5"]
    assert cli.main(arguments) == 0
    assert "8 devices (replica=2, fsdp=4, tensor=1)" in capsys.readouterr().out
    assert json.loads((folder / "runs" / "micro_gpt-micro-2" / "recipe.json").read_text())["seed"] == 5
    assert cli.main([*arguments, "--out", "runs/micro_gpt-micro"]) == 2
    assert "The run would overwrite another." in capsys.readouterr().err
    assert not list((folder / "runs" / "micro_gpt-micro").iterdir())


def test_dry_run_of_175b_needs_no_devices_and_little_memory(folder):
    arguments = ["--recipe", "gpt3_175b", "--mesh", "replica=4,fsdp=128", "--dry-run"]
    # With a platform that does not exist, asking jax for any device or array ends the process.
    done = jshard("train", str(MODELS / "gpt.py"), *arguments, cwd=folder, JAX_PLATFORMS="none_such")
    assert done.returncode == 0, done.stderr
    assert "175,215,501,312 parameters" in done.stdout
    assert "512 devices (replica=4, fsdp=128, tensor=1)" in done.stdout
    assert not (folder / "runs").exists()
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest child so far
    assert peak_kib < 2 * 1024 * 1024


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fly"], "There is no command 'fly'."),
        (["train", "gone.py"], "no such file"),
        (["train", MICRO, "--recipe", "huge"], "RECIPES of that file has: micro."),
        (["train", MICRO, "--mesh", "fsdp:8"], "'fsdp:8' is not axis=degree"),
        (["train", MICRO, "--mesh", "fsdp=4,fsdp=2"], "its axis was named before"),
        (["train", MICRO, "--mesh", "data=8", "--dry-run"], "data"),
        (["train", MICRO, "--mesh", "fsdp=3,replica=5"], "15"),
        (["train", MICRO, "--steps", "0"], "--steps 0"),
        (["train", MICRO, "--data", "nowhere"], "no such file or folder"),
    ],
    ids=lambda value: " ".join(value).replace(MICRO, "MODEL") if isinstance(value, list) else "",
)
def test_a_wrong_request_exits_2_with_four_parts(folder, capsys, arguments, part):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error
    for head in ("where:", "why:", "do:"):
        assert head in error
    assert not (folder / "runs").exists()


def test_missing_extra_says_what_to_install(folder, capsys, monkeypatch):
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "grain" else found(name))
    assert cli.main(["train", MICRO]) == 2
    error = capsys.readouterr().err
    assert error.startswith("MissingExtraError: grain is not installed.")
    assert "pip install 'jshard[train]'" in error


def test_usage(capsys):
    assert cli.main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main([]) == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--no-such-option"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("text", "devices"),
    [("", 8), ("fsdp=4", 4), ("replica=4,fsdp=128", 512), ("replica=2", 8), ("replica=3", 9), ("fsdp=-1,tensor=2", 8)],
)
def test_number_of_simulated_devices(text, devices):
    assert num_devices(parse_mesh(text)) == devices
