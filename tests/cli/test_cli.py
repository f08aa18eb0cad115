"""The `jshard train` command end to end: a run, a run that continues, a plan without devices."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from jshard import __version__, cli
from jshard.cli._arguments import TrainArgs, parse
from jshard.cli._devices import num_devices, open_mesh, parse_mesh
from jshard.cli._request import request_of
from jshard.train.records import read_metrics
from tests.compiling import environment
from tests.micro_gpt import MODELS, USERS_FILE

SMALL = ["--set", "model.n_layer=1"]  # compiles sooner


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model file and some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    (tmp_path / "text.txt").write_text("abcdefgh" * 2000)
    (tmp_path / "my_model.py").write_text(USERS_FILE)
    return tmp_path


def start(*arguments, cwd, env=None, **streams):
    """The command in a process of its own, as a user starts it: no device count is set for it."""
    command = [sys.executable, "-m", "jshard", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment() | (env or {}), **streams)


def read_terminal(terminal):
    """All that was written to a terminal, until the last writer has left."""
    written = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # how Linux says that no one writes any more
            read = b""
        if not read:
            return written.decode().replace("\r\n", "\n")
        written += read


def test_train_in_a_fresh_process_on_a_terminal(folder):
    mine, its = pty.openpty()
    arguments = ["train", *"my_model.py --steps 5 --data text.txt --out mine --sample-tokens 9".split(), *SMALL]
    with (folder / "errors.txt").open("w") as errors:
        process = start(*arguments, cwd=folder, env={"COLUMNS": "200"}, stdout=its, stderr=errors)
    os.close(its)
    said, code, errors = read_terminal(mine), process.wait(), (folder / "errors.txt").read_text()
    os.close(mine)
    assert code == 0, errors
    assert "Traceback" not in errors and "Warning" not in errors

    summary = said.replace("\r", "\n").partition("\nmodel ")[2].splitlines()[:6]
    beginnings = ["   my_model, recipe micro: ", "mesh     fsdp=8 on 8 x cpu, simulated on ", "memory   ", "traffic  "]
    beginnings += [
        "data     1 file of text.txt: 0.02 MB to train on",
        "folder   mine (all tables of the plan: --dry-run)",
    ]
    for line, beginning in zip(summary, beginnings, strict=True):
        assert line.startswith(beginning)
    assert "Memory of one device" not in said
    assert "\nno MFU: it is a share of the devices' peak, and no peak is known for CPUs" in said
    for work in ("initialising the parameters", "compiling the step", "compiling the evaluation"):
        assert f"\n{work}: " in said.replace("\r", "\n")
    live = [line for line in said.replace("\n", "\r").split("\r") if line.startswith("step 5/5  loss ")]
    assert live  # rewritten in place
    for part in (" tokens/s  ", "/step  ", "ETA 0:00  grad ", "  lr ", "  peak "):
        assert part in live[-1]
    assert "\nstep 3: validation loss " in said.replace("\r", "\n")
    assert "\na sample, after a prompt of held-out text:\n    " in said
    assert "\nvalidation loss " in said and " nats per byte after 5 steps\n" in said
    names = "checkpoints/ loss.png metrics.jsonl run.json sample.txt tensorboard/".split()
    assert said.endswith(f"\nmine/: {'  '.join(names)}\n")

    out = folder / "mine"
    assert {path.name for path in out.iterdir()} == {name.strip("/") for name in names} | {".lock"}
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5]
    assert [path.name for path in (out / "checkpoints").iterdir() if path.is_dir()] == ["5"]
    assert json.loads((out / "run.json").read_text())["options"]["data"] == [str(folder / "text.txt")]


@pytest.mark.wide
def test_options_reach_the_run_and_a_resumed_run_takes_them_over(folder, capsys):
    (folder / "runs" / "my_model-micro").mkdir(parents=True)
    what = ["--data", "text.txt", "--seed", "5", "--set", "eval_every=1", "--set", "num_steps=2", *SMALL]
    what += ["--unit", "remat=full", "--unit", "reshard_after_forward=false"]
    how = ["--mesh", "replica=2,fsdp=4", "--track", "--sample-tokens", "0"]
    assert cli.main(["train", "my_model.py", *what, *how]) == 0
    said = capsys.readouterr().out
    assert "\nmesh     replica=2,fsdp=4 on 8 x cpu, simulated on " in said
    assert "\nstep 1/2  loss " in said and "\nstep 2/2  loss " in said  # not a terminal: lines
    assert "\r" not in said
    assert "\ncompiling the step ...\ncompiling the step: " in said
    assert not list((folder / "runs" / "my_model-micro").iterdir())  # that name was taken
    out = folder / "runs" / "my_model-micro-2"
    assert {path.name for path in out.iterdir()} == {".lock", "run.json", "metrics.jsonl", "loss.png", "checkpoints"}
    recipe = json.loads((out / "run.json").read_text())["recipe"]
    assert (recipe["seed"], recipe["eval_every"], recipe["num_steps"]) == (5, 1, 2)

    # Found by itself: the newest run of the recipe. Only what is given again changes.
    assert cli.main(["train", "my_model.py", "--resume", "--steps", "3", *how]) == 0
    said = capsys.readouterr().out
    assert "\nnum_steps is 3, was 2\n" in said
    assert "\nresumed from runs/my_model-micro-2/checkpoints/2\n" in said
    assert "\nstep 3/3  loss " in said and "step 1/3" not in said
    stored = json.loads((out / "run.json").read_text())
    assert stored["recipe"] == recipe | {"num_steps": 3}
    assert [start["step"] for start in stored["starts"]] == [0, 2]
    assert stored["options"]["set"] == ["eval_every=1", SMALL[1]] and stored["options"]["steps"] == 3
    assert stored["options"]["unit"] == ["remat=full", "reshard_after_forward=false"]
    for units, found in ([], "full"), (["--unit", "remat=dots"], "dots"):
        asked = request_of(parse(TrainArgs, ["my_model.py", "--resume", *units], command="jshard train"))
        assert asked.model_file.units["remat"] == found
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "val_loss" in line] == [1, 2, 3]

    assert cli.main(["train", "my_model.py", "--resume", "--seed", "0", *how]) == 2
    assert "seed  stored 5  wanted 0\n" in capsys.readouterr().err

    # And once more, with the settings of the second time.
    assert cli.main(["train", "my_model.py", "--resume", *how]) == 0
    assert "nothing is left to train: 3 steps are done, and 3 were requested" in capsys.readouterr().out

    # It continues with its own parameters; a job script may say again what it began with, which may be gone.
    again = ["train", "my_model.py", "--resume", "--init-from", "theirs.safetensors", "--dry-run"]
    assert cli.main(again) == 2
    assert "runs/my_model-micro-2 started from new parameters, and continues with its own." in capsys.readouterr().err
    stored = json.loads((out / "run.json").read_text())
    stored["options"]["init_from"] = str(folder / "theirs.safetensors")
    (out / "run.json").write_text(json.dumps(stored))
    assert cli.main(again) == 0
    kept = request_of(TrainArgs(model=Path("my_model.py"), resume=True)).options["init_from"]
    assert Path(kept) == folder / "theirs.safetensors"
    capsys.readouterr()
    assert cli.main(["train", "my_model.py", "--init-from", "theirs.safetensors", "--dry-run"]) == 2
    assert "There is no checkpoint to restore.\n  where: theirs.safetensors\n" in capsys.readouterr().err


def test_resume_where_there_is_nothing_begins_a_run(folder, capsys):
    # As in a job script that is started again and again. A plan, so that nothing is trained.
    assert cli.main(["train", "my_model.py", "--resume", "--out", "new", "--data", "text.txt", "--dry-run"]) == 0
    assert "8 devices" in capsys.readouterr().out
    assert not (folder / "new").exists()


# A process counts as its own peak what its parent held when it was made: so from a small one.
PEAK = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "jshard", *sys.argv[1:]]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.wide
def test_dry_run_of_175b_needs_no_devices_and_little_memory(folder):
    arguments = ["--recipe", "gpt3_175b", "--mesh", "replica=4,fsdp=128", "--dry-run"]
    # With a platform that does not exist, asking jax for any device or array ends the process.
    env = environment() | {"JAX_PLATFORMS": "none_such"}
    command = [sys.executable, "-c", PEAK, "train", str(MODELS / "gpt.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    said, peak_kib = done.stdout.rsplit(maxsplit=1)
    assert "175,215,501,312 parameters" in said
    assert "512 devices (replica=4, fsdp=128, tensor=1)" in said
    assert not (folder / "runs").exists()
    assert int(peak_kib) < 2 * 1024 * 1024


def test_missing_extra_says_what_to_install(folder, capsys, monkeypatch):
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "grain" else found(name))
    assert cli.main(["train", "my_model.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("MissingExtraError: grain is not installed.")
    assert "pip install 'jshard[train]'" in error


def test_usage(capsys):
    for line, code in (["--help"], 0), (["help"], 0), ([], 2), (["ckpt"], 2), (["ckpt", "--help"], 0):
        assert cli.main(line) == code
        said = capsys.readouterr()
        assert (said.err if code else said.out).startswith("usage: jshard ")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "usage: jshard train" in said and "--print-config" in said
    for line in "--version", "version":
        assert cli.main([line]) == 0
        assert capsys.readouterr().out == f"jshard {__version__}\n"


@pytest.mark.parametrize(
    ("text", "devices"),
    [("", 8), ("fsdp=4", 4), ("replica=4,fsdp=128", 512), ("replica=2", 8), ("replica=3", 9), ("fsdp=-1,tensor=2", 8)],
)
def test_number_of_simulated_devices(text, devices):
    sizes = parse_mesh(text)
    assert num_devices(sizes) == devices
    assert open_mesh(sizes, devices=devices).size == devices


@pytest.mark.parametrize("command", ["train", "plan", "sample", "ckpt export", "ckpt diff"])
def test_help_fits_the_terminal_and_says_nothing_of_none(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert "None" not in text and "(default: )" not in text and "PATH PATH" not in text
    assert "ANNOTATED" not in text
    assert max(map(len, out.splitlines())) <= 80
