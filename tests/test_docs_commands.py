"""Commands of the pages run as they are, after a short run; new runs are made small. The others are only parsed."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.compiling import environment
from tests.test_docs import ROOT, commands

pytestmark = pytest.mark.wide

PAGES = "checkpoint_tools", "data", "fine_tuning", "learning_rate", "resume", "sampling", "training"
# These need weights, or a dataset of a Hub; tests/cli/test_chat_transcript.py runs those about chats, and
# tests/train/test_streams.py those about streams.
LEFT_OUT = re.compile("gpt2|qwen3|runs/chat|hf:")
SMALL = shlex.split(
    "--set model.n_layer=1 --set model.d_model=64 --set model.n_head=4 --set batch_size=8 --set sequence_length=32"
    " --set eval_sequences=8 --sample-tokens 4"
)


def run(words, folder):
    """The exit code of `jshard`, and what it has shown."""
    env = environment(programs=folder.parent / "programs")
    done = subprocess.run(
        [sys.executable, "-m", "jshard", *words], cwd=folder, env=env, capture_output=True, text=True, errors="replace"
    )
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the files and runs that the pages name."""
    folder = tmp_path_factory.mktemp("commands") / "made"
    text = "the quick brown fox jumps over the lazy dog. " * 100
    for name in ("book.txt", "code.txt", "corpus/a.txt", "another/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, key in (("notes.jsonl", "body"), ("web.jsonl", "text")):
        (folder / name).write_text("\n".join(json.dumps({key: text}) for _ in range(40)))
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, 50304, 5000, np.uint16).tofile(folder / name)
    for options in ([], ["--out", "runs/two", "--processes", "2"]):
        code, shown = run(["train", "gpt", *SMALL, "--steps", "6", "--set", "checkpoint_every=2", *options], folder)
        assert code == 0, shown
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page, made, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    found = [re.split(" [>#] ", command)[0] for command in commands(ROOT / "docs" / f"{page}.md")]
    ran = [shlex.split(command) for command in dict.fromkeys(found) if not LEFT_OUT.search(command)]
    assert ran
    for words in ran:
        is_new = words[0] == "train" and not {"--resume", "--dry-run"} & set(words)
        code, shown = run([*words, *(["--steps", "2", *SMALL] if is_new else [])], folder)
        assert code == (1 if words[:2] == ["ckpt", "diff"] else 0), (words, shown)  # 1: they differ
