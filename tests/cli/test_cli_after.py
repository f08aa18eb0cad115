"""What is done with a run after it: `jshard sample`, `jshard eval`, `jshard ckpt export`, by its folder alone."""

import json
import math
import subprocess
import sys

import pytest

from jshard import cli
from jshard.train.records import read_metrics
from tests.compiling import environment
from tests.micro_gpt import USERS_FILE
from tests.wide import wide

MESHES = [[], ["--mesh", "replica=2,fsdp=2,tensor=2"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a run in it, whose settings only the command line had."""
    folder = tmp_path_factory.mktemp("after")
    (folder / "text.txt").write_text("abcdefgh" * 2000)
    (folder / "my_model.py").write_text(USERS_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path[:])
        said = ["--data", "text.txt", "--set", "model.n_layer=1", "--set", "learning_rate=2e-2", "--steps", "20"]
        assert cli.main(["train", "my_model.py", *said, "--out", "mine", "--track", "--sample-tokens", "4"]) == 0
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs a command; its exit code, and what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    capsys.readouterr()

    def call(*arguments):
        code = cli.main([*map(str, arguments)])
        said = capsys.readouterr()
        return code, said.err if code else said.out

    return call


@pytest.mark.wide
def test_sample(run):
    asked = ["sample", "mine", "--prompt", "abcdefg", "--tokens", "40"]
    for mesh in MESHES:
        code, text = run(*asked, "--temperature", "0", *mesh)
        assert code == 0, text
        assert text == ("abcdefgh" * 6)[:47] + "\n"
    texts = {run(*asked, "--temperature", "3", "--seed", seed)[1] for seed in (0, 1)}
    assert len(texts) == 2 and run(*asked, "--temperature", "3", "--seed", "1")[1] in texts
    assert run(*asked, "--temperature", "3", "--top-k", "1")[1] == ("abcdefgh" * 6)[:47] + "\n"


def test_eval_is_what_the_run_has_printed(run, folder):
    *_, printed = [x["val_loss"] for x in read_metrics(folder / "mine" / "metrics.jsonl") if "val_loss" in x]
    code, text = run("eval", "mine")
    assert code == 0
    bits = printed / math.log(2)
    assert f"\nvalidation loss {printed:.4f} nats per byte, {bits:.4f} bits per byte after 20 steps" in text
    found = json.loads(run("eval", "mine", "--json")[1])
    assert (found["val_loss"], found["step"]) == (printed, 20)
    for mesh in MESHES:
        assert abs(json.loads(run("eval", "mine", "--json", *mesh)[1])["val_loss"] - printed) < 1e-5
    (folder / "other.txt").write_text("hgfedcba" * 2000)
    assert json.loads(run("eval", "mine", "--json", "--data", "other.txt")[1])["val_loss"] > printed + 1


@pytest.mark.wide
@pytest.mark.parametrize("how", [["--mesh", "fsdp=1"], wide(["--processes", "2"])])
def test_sample_in_processes_of_its_own(folder, how):
    asked = ["sample", "mine", "--prompt", "abcdefg", "--tokens", "9", "--temperature", "0", *how]
    command = [sys.executable, "-m", "jshard", *asked]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "abcdefghabcdefgh\n"), done.stderr


def test_what_the_run_had_counts_and_not_what_its_file_says_now(run, tmp_path):
    now = """
import dataclasses
made = RECIPES["micro"]()
RECIPES = {"micro": lambda: dataclasses.replace(made, model=dataclasses.replace(made.model, n_head=4))}
"""
    (tmp_path / "other.py").write_text(USERS_FILE + now)
    asked = ["eval", "mine", "--json"]
    assert run(*asked, "--model", tmp_path / "other.py") == run(*asked)


def test_export_knows_the_run(run, folder):
    code, text = run("ckpt", "export", "mine", "own")  # rotary positions: GPT-2 has none
    assert code == 0 and text.endswith(": model.safetensors\n")
    assert not (folder / "own" / "config.json").exists()
