"""Checkpoints of two processes: equal to those of one, with deadlines, and good whenever one of them is killed.

`KILLS=30 pytest tests/processes/test_checkpoint_processes.py -k killed` kills at thirty moments; by default it is few.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jshard import checkpoint
from jshard.checkpoint.series import history
from jshard.checkpoint.series.timeline import timelines
from tests import compiling
from tests.checkpoint.checkpoint_states import LAYOUTS, abstract, differences, filled

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "1"))
TIMEOUT_S = 800


def environment():
    return compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def start_two(folder, *parts):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    worker = Path(__file__).with_name("checkpoint_worker.py")
    started = []
    for process in range(2):
        with (folder / f"stderr-{process}").open("w") as stderr:
            command = [sys.executable, str(worker), str(process), str(port), str(folder), *parts]
            started.append(subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=stderr))
    return started


def end(processes):
    try:
        return [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


def read(folder, part, process):
    return json.loads((folder / f"{part}-{process}.json").read_text())


# One test, not several over a fixture: parallel test workers would each start the processes again.
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_two_processes(tmp_path):
    for seed, layout in enumerate(LAYOUTS):
        checkpoint.save(tmp_path / f"one {layout}", filled(layout, seed))
    codes = end(start_two(tmp_path, "matrix", "balance", "once", "not_shared", "apart", "slow", "stall"))
    assert codes == [0, 0], [(tmp_path / f"stderr-{process}").read_text()[-3000:] for process in range(2)]

    # The matrix, by what each process holds; and what two have written, on layouts of one.
    for process in range(2):
        cells = read(tmp_path, "matrix", process)
        assert len(cells) == 16 and not any(cells.values()), cells
    shared = [layout for layout in LAYOUTS if layout != "one device"]
    for seed, (source, target) in enumerate(zip(shared, LAYOUTS, strict=False)):
        restored = checkpoint.restore(tmp_path / f"two {source}", like=abstract(target))
        assert differences(restored, target, seed) == []

    what_both_hold_is_written_by_both(tmp_path)
    what_both_hold_is_read_once(tmp_path)
    folders_that_are_not_shared(tmp_path)
    what_fails_in_one_process(tmp_path)
    a_process_that_is_slow(tmp_path)
    a_process_that_is_stopped(tmp_path)


def what_both_hold_is_written_by_both(folder):
    found = [read(folder, "balance", process) for process in range(2)]
    assert all(each["equal"] and each["sharding"] for each in found)
    few, many = sorted(each["bytes"] for each in found)
    assert few > 0.8 * many and few > 2 * 2**20, found


def what_both_hold_is_read_once(folder):
    found = [read(folder, "once", process) for process in range(2)]
    assert not any(each["differ"] for each in found)
    size = sum(path.stat().st_size for path in (folder / "once" / "arrays").iterdir())
    for each in found:
        assert 0.45 * size < each["bytes"] < 0.55 * size and 0.45 * size < each["forecast"] < 0.55 * size, (size, found)
        assert each["other leaves"]["type"] == "CheckpointError" and "do not request the same" in str(each)
        assert "arrays/00001-000.safetensors\n         large" in each["a bit"]["text"]
        assert "ValueError: not foreseen" in each["one fails"]["text"]


def folders_that_are_not_shared(folder):
    texts = {read(folder, "not_shared", process)["text"] for process in range(2)}
    host = socket.gethostname()
    assert texts == {
        "The folder for checkpoints is not shared between the processes.\n"
        f"  where: process 1 on {host}: {folder}/own-1\n"
        f"  why:   process 0 on {host} wrote a file into {folder}/own-0, and these did not see it within 0 s.\n"
        "  do:    choose a folder on a file system that all hosts share under the same path."
    }


def what_fails_in_one_process(folder):
    """Both are reported at once, and what was saved before or is saved afterwards is good."""
    for process in range(2):
        found = read(folder, "apart", process)
        assert found["local"] and found["alone"] and found["equal"] and not found["afterwards"]
        assert found["kept"] == []  # no save leaves anything in the service that the processes share
        assert "  where: key  on process 0 and process 1\n" in found["other values"]["text"]
        assert "1 leaf is not data.\n  where: f  a builtin_function" in found["no data"]["text"]
        assert {found[name]["type"] for name in ("other values", "no data")} == {"CheckpointError"}
        at_once = ("_prepare", "__init__", "write_files", "seal", "name_draft")
        for name in (*at_once, "save_async"):
            assert found[name]["type"] == "RunError"
            assert "ValueError: not foreseen" in found[name]["text"] or (process, name) == (0, "save_async")
        for name in ("other values", "no data", *at_once):
            assert "waited" not in found[name]["text"]
        # One process has reported a failure, and continues: the checkpoint must not appear afterwards.
        assert not found["named"]
    late, gave_up = (read(folder, "apart", process)["too late"]["text"] for process in range(2))
    assert "it came when they no longer waited" in late and "waited 2 s for them: complete" in gave_up
    # No process has written: nothing stays, of which the next save would say that it was interrupted.
    first = read(folder, "apart", 0)
    assert not first["draft after _prepare"] and not first["draft after __init__"]


def a_process_that_is_slow(folder):
    """The history names it, with the phase."""
    (save,) = timelines(folder / "slow")
    assert (save.slowest.process, save.slowest.phase) == (1, "write") and save.slowest.time_s >= 1.0
    assert save.devices == (0, 0, 0, 0, 1, 1, 1, 1)


def a_process_that_is_stopped(folder):
    """The other says in time who is missing, and where it stands itself; the next save is good."""
    found = read(folder, "stall", 0)
    for step, error in zip((2, 3), found["errors"], strict=True):
        assert error["type"] == "RunError"
        assert "  where: " + f"{folder}/stalled/{step}\n         process 1\n" in error["text"], error["text"]
        assert f"{folder}/stalled/1" in error["text"]  # the last good one
        assert f"of step {step} " in error["text"]
    assert "thread MainThread:" in (folder / "stderr-0").read_text()
    assert found["steps"] == [1, 4] and found["equal"] and read(folder, "stall", 1)["equal"]
    # The one that was stopped in the middle learns at once that the others no longer wait.
    assert "it came when they no longer waited" in read(folder, "stall", 1)["errors"][1]["text"]


def assert_good(folder):
    """Every checkpoint that counts can be restored, and none of the steps that were complete is lost."""
    ckpt = checkpoint.Checkpointer(folder)
    steps = ckpt.steps()
    assert steps and ckpt.latest() == steps[-1]
    assert steps == list(range(steps[0], steps[-1] + 1)) and len(steps) in (min(steps[-1], 3), 4)
    completed = [line["step"] for line in history.read(folder) if line["error"] is None]
    assert steps[-1] in (completed[-1], completed[-1] + 1)
    for step in steps:
        found = ckpt.restore(
            like={"w": np.zeros((64, 1024), np.float32), "ids": np.zeros(8, int), "step": 0}, step=step
        )
        assert found["step"] == step
        wanted = np.random.default_rng(step).standard_normal((64, 1024)).astype(np.float32)
        np.testing.assert_array_equal(found["w"], wanted)
    ckpt.save(steps[-1] + 1, {"step": 0})
    left = {path.name for path in folder.iterdir()}
    assert left == {*map(str, ckpt.steps()), "history.jsonl", "series.json"}


@pytest.mark.timeout((1 + KILLS) * TIMEOUT_S)
def test_one_of_two_processes_is_killed_while_they_save(tmp_path):
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "when").write_text(str(random.uniform(0.02, 1.0)))
        codes = end(start_two(folder, "die"))
        stderr = (folder / "stderr-0").read_text()
        assert codes[1] == -signal.SIGKILL, stderr
        assert_good(folder / "dying")


ALONE = """
import itertools, sys
from tests.processes.checkpoint_worker import state
from jshard.checkpoint import Checkpointer
ckpt = Checkpointer(sys.argv[2])
for step in itertools.count(1):
    ckpt.save(step, state(step))
    print(step, flush=True)
"""


@pytest.mark.timeout((1 + KILLS) * TIMEOUT_S)
def test_a_process_is_killed_while_it_saves(tmp_path):
    for number in range(KILLS):
        folder = tmp_path / str(number)
        process = subprocess.Popen(
            compiling.python(ALONE, 0, folder, folder),
            env=environment() | {"JAX_NUM_CPU_DEVICES": "4"},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            time.sleep(random.uniform(0, 0.5))
            process.kill()
        assert_good(folder)
