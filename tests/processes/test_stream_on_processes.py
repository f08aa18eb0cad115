"""Two processes train on a stream as one does, each on its own files, and continue what the other number has begun."""

import shutil

import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.data_position.state_text import from_text
from tests.chat_folders import write_rows
from tests.micro_gpt import USERS_FILE
from tests.processes.test_two_processes import MESH, TIMEOUT_S, TWO, Command, record

pytest.importorskip("datasets", reason="needs the extra datasets")
SETTINGS = ("checkpoint_every=4", "eval_every=4", "eval_sequences=8", "model.n_layer=1")


def ended(folder, name, *options):
    stream = ("--data", f"hf:{folder}/texts", "--sample-tokens", "0")
    options = (*options, *(() if "--resume" in options else stream))
    command = Command(folder, name, *options, model=folder / "mine.py", settings=SETTINGS, steps=8, HF_HUB_OFFLINE="1")
    code, stdout, stderr = command.ends()
    assert code == 0 and "are read again" not in stdout, stdout + stderr
    return command.out


def same(ours, theirs):
    for line, other in zip(record(ours), record(theirs), strict=True):
        assert [x is None for x in line] == [x is None for x in other]
        np.testing.assert_allclose(*([x for x in values if x is not None] for values in (line, other)), rtol=1e-5)


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_stream_on_two_processes_is_that_of_one(tmp_path):
    (tmp_path / "mine.py").write_text(USERS_FILE)
    (tmp_path / "texts").mkdir()
    for file in range(4):
        rows = [{"text": f"file {file} row {row:03d} {'abcd'[file] * (20 + row % 9)}"} for row in range(60)]
        write_rows(tmp_path / "texts" / f"part-{file}.jsonl", *rows)
    one = ended(tmp_path, "one", *MESH)
    two = ended(tmp_path, "two", *TWO)
    same(two, one)
    states = []
    for out in (one, two):
        stored = js.checkpoint.restore(out / "checkpoints" / "8", {"data": ""})["data"]
        states.append(from_text(stored)["state"])
    assert states[0] == states[1] and len(states[0]["places"]) == 4
    # As if they had been stopped after step 4, and each is continued by the other number of processes.
    for begun, options in ((two, MESH), (one, TWO)):
        shutil.copytree(begun, tmp_path / f"{begun.name}-continued")
        shutil.rmtree(tmp_path / f"{begun.name}-continued" / "checkpoints" / "8")
        same(ended(tmp_path, f"{begun.name}-continued", *options, "--resume"), one)
