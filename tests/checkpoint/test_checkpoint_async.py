"""Saves in the background: of the values at the call, one at a time, and never lost silently."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, saving, storage
from jshard.checkpoint.ownership import DRAFT_SUFFIX, draft_of
from jshard.checkpoint.pending import Pending
from jshard.checkpoint.series.checkpointer import Keep
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import raw


def state(number):
    w = np.full((8, 512), number, np.float32)
    return {"w": jax.device_put(w, NamedSharding(js.mesh(), P("fsdp"))), "ids": np.arange(4) + number, "step": number}


def is_state(found, number):
    return raw(found) == raw(state(number))


@pytest.fixture
def gate(monkeypatch):
    """Holds every write back until it is opened; `gate.fails` are errors that the next writes end with."""

    class Gate:
        open, fails = threading.Event(), []

    write = saving.seal

    def seal(*args):
        assert Gate.open.wait(250)
        if Gate.fails:
            raise Gate.fails.pop(0)
        write(*args)

    monkeypatch.setattr(saving, "seal", seal)
    yield Gate
    Gate.open.set()


def full():
    return OSError(28, "No space left on device")


@pytest.mark.parametrize("form", ["packed", "orbax"])
def test_what_is_saved_are_the_values_at_the_call(tmp_path, gate, form):
    """Arrays that are donated and overwritten the moment it returns, and arrays of numpy that are changed in place."""
    live = state(1)
    pending = checkpoint.save_async(tmp_path / "c", live, format=form)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for _ in range(3):
        live["w"] = overwrite(live["w"])
    live["ids"][:] = -1
    live["w"].block_until_ready()
    assert not pending.is_done() and not (tmp_path / "c").exists()
    gate.open.set()
    pending.wait()
    assert is_state(checkpoint.restore(tmp_path / "c", like=state(0)), 1)


def test_one_is_at_work_at_a_time(tmp_path, gate):
    """The second waits for the first: memory holds one copy of the state."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save_async(1, state(1))
    second = threading.Thread(target=lambda: ckpt.save_async(2, state(2)))
    second.start()
    second.join(0.3)
    assert second.is_alive() and not (tmp_path / f"2{DRAFT_SUFFIX}").exists()
    gate.open.set()
    second.join()
    ckpt.wait()
    assert ckpt.steps() == [1, 2]


@pytest.mark.parametrize("call", ["check", "save", "restore", "leaving the block"])
def test_an_error_surfaces_at_the_next_call_and_blocks_no_one(tmp_path, gate, call):
    gate.open.set()
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state(1))
    gate.fails.append(full())
    ckpt.save_async(2, state(2))
    while not ckpt._pending.is_done():
        time.sleep(0.01)
    calls = {
        "save": lambda: ckpt.save(3, state(3)),
        "restore": lambda: ckpt.restore(state(0)),
        "leaving the block": lambda: ckpt.__exit__(None),
    }
    text = r"(?s)step 2 could not be written.*No space left.*last good checkpoint is .*/1\."
    with pytest.raises(RunError, match=text):
        calls.get(call, lambda: getattr(ckpt, call)())()
    assert ckpt.steps() == [1]
    assert not list(tmp_path.glob(f"*{DRAFT_SUFFIX}*"))
    ckpt.check()  # it was reported once
    ckpt.save(2, state(2))
    assert ckpt.steps() == [1, 2] and is_state(ckpt.restore(state(0)), 2)


def test_leaving_the_block_with_an_error_keeps_the_save_and_the_error(tmp_path, gate):
    gate.open.set()

    def interrupted(step):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save_async(step, state(step))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        interrupted(1)
    assert Checkpointer(tmp_path).steps() == [1]
    gate.fails.append(full())
    with pytest.warns(CheckpointWarning, match="No space left"), pytest.raises(KeyError, match="mine"):
        interrupted(2)


def test_an_error_that_no_one_foresaw_is_reported_in_four_parts(tmp_path, gate):
    gate.open.set()
    ckpt = Checkpointer(tmp_path)
    gate.fails.append(ValueError("in the background"))
    ckpt.save_async(1, state(1))
    with pytest.raises(RunError, match="ValueError: in the background"):
        ckpt.wait()
    with pytest.raises(RunError, match="KeyError: 'outside'") as caught:
        Pending("c", lambda: {}["outside"]).wait()
    assert isinstance(caught.value.__cause__, KeyError)
    ckpt.save(1, state(1))
    assert ckpt.steps() == [1]


def test_two_saves_do_not_write_into_one_folder(tmp_path, gate):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save_async(1, state(1))
    with pytest.raises(CheckpointError, match=rf"another save is writing it: process {os.getpid()} on"):
        second.save(1, state(2))
    gate.open.set()
    first.wait()
    second.save(2, state(2))
    assert second.steps() == [1, 2] and is_state(second.restore(state(0), step=1), 1)
    assert not list(tmp_path.glob(f"*{DRAFT_SUFFIX}*"))


@pytest.mark.parametrize("save", [checkpoint.save, lambda path, state: checkpoint.save_async(path, state).wait()])
def test_removed_remains_are_told_at_the_line_that_saves(tmp_path, save):
    draft_of(tmp_path / "c").mkdir()
    with pytest.warns(CheckpointWarning, match="the remains of an interrupted save") as warned:
        save(tmp_path / "c", state(1))
    assert warned[0].filename == __file__


def test_what_a_restore_warns_of_is_told_at_the_line_that_restores(tmp_path):
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"w": np.ones(4, np.float32)})
    like = {"w": jnp.zeros(4, jnp.float16)}
    for restore in (lambda: ckpt.restore(like), lambda: checkpoint.restore(tmp_path / "1", like)):
        with pytest.warns(CheckpointWarning, match="changes dtype") as warned:
            restore()
        assert warned[0].filename == __file__


FORKED = """
import os, pathlib, signal, sys
from jshard.checkpoint.ownership import Owner
from jshard.checkpoint.ownership import is_owned
from jshard.checkpoint.ownership import _locked_files
draft = pathlib.Path(sys.argv[1])
owner = Owner(draft)
assert is_owned(draft)
here, there = os.pipe()
child = os.fork()
if not child:
    os.write(there, b"!")
    signal.pause()
os.read(here, 1)  # it is there
for number in _locked_files:  # as if this process were killed
    os.close(number)
try:
    assert not is_owned(draft)
finally:
    os.kill(child, signal.SIGKILL)
"""


def test_a_child_does_not_hold_the_lock_of_a_save(tmp_path):
    """Workers of `multiprocessing` are forks on Linux, and outlive a process that is killed."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "1")]
    assert subprocess.run(command, timeout=800).returncode == 0


def test_a_save_whose_folder_was_taken_is_not_sealed(tmp_path, gate):
    """As where the file system has no locks."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save_async(1, state(1))
    (tmp_path / "1.owner").write_text('{"host": "other", "process_id": 5}')
    gate.open.set()
    with pytest.raises(RunError, match="another save took the folder during this one: process 5 on other"):
        ckpt.wait()
    assert ckpt.steps() == []


ENDING = """
import sys, threading, time
import jax
from jshard import checkpoint
from jshard.checkpoint import saving
keep, written = saving.keep_on_disk, threading.Semaphore(0)

def slowly(path):
    written.release()
    time.sleep(1)
    if path.name == "full":
        raise OSError(28, "")
    keep(path)

saving.keep_on_disk = slowly
state = {"w": jax.numpy.ones(4), "step": 7}
for name in ("whole", "full"):
    checkpoint.save_async(sys.argv[1] + "/" + name, state)
    written.acquire()  # from Python 3.12 on Orbax could not go on: it starts threads
raise KeyError("mine")
"""


def test_a_program_that_ends_completes_its_saves_or_says_that_they_are_lost(tmp_path):
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 1 and "KeyError: 'mine'" in ended.stderr
    assert checkpoint.restore(tmp_path / "whole", {"w": jnp.zeros(4), "step": 0})["step"] == 7
    reported = (
        f"save of a checkpoint.\nThe checkpoint could not be written.\n  where: {tmp_path}/full\n  why:   No space left"
    )
    assert ended.stderr.count("ends with an") == 1 and reported in ended.stderr


def test_what_others_log_meanwhile_is_shown(caplog):
    """absl is the user's to log with as well."""
    log = logging.getLogger("absl")
    theirs = log.makeRecord("absl", logging.WARNING, "/x/orbax/checkpoint/a.py", 1, "a wall of text", (), None)

    def work():
        log.warning("mine")
        log.handle(theirs)
        raise KeyError

    with pytest.raises(KeyError), storage.quiet():
        work()
    assert [record.message for record in caplog.records] == ["mine"]


LOSSES = {1: 5.0, 2: 1.0, 3: 3.0, 4: float("nan"), 5: 2.0, 6: 4.0, 7: None}


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Keep(last=1, best=2), [2, 5, 7]),
        (Keep(last=1, best=1, higher_is_better=True), [1, 7]),
        (Keep(last=2, every=3), [3, 6, 7]),
        (Keep(last=2, best=1, metric="accuracy"), [6, 7]),
    ],
    ids=str,
)
def test_the_best_the_regular_and_the_newest_stay(tmp_path, keep, stay):
    ckpt = Checkpointer(tmp_path, keep=keep)
    for step, loss in LOSSES.items():
        ckpt.save(step, {"step": step}, metrics=None if loss is None else {"val_loss": loss})
    assert ckpt.steps() == stay
    assert [ckpt.restore({"step": 0}, step=step)["step"] for step in stay] == stay


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    ckpt = Checkpointer(tmp_path_factory.mktemp("three"))
    for step in (1, 2, 3):
        ckpt.save(step, state(step))
    return ckpt


@pytest.fixture
def damaged(three, tmp_path):
    """Step 3 with a bit that was flipped, step 2 without one of its files."""
    ckpt = Checkpointer(shutil.copytree(three.folder, tmp_path / "c"))
    data = ckpt.path(3) / "arrays" / "00000-000.safetensors"
    content = bytearray(data.read_bytes())
    content[5000] ^= 4
    data.write_bytes(content)
    (ckpt.path(2) / "arrays" / data.name).unlink()
    return ckpt


def test_falling_back_goes_to_the_newest_good_one_and_says_so(damaged):
    with pytest.warns(CheckpointWarning) as reported:
        assert is_state(damaged.restore(state(0), fall_back=True), 1)
    texts = [str(warning.message) for warning in reported]
    for step, text in zip((3, 2), texts, strict=True):
        assert text.startswith(f"checkpoint {damaged.path(step)} is damaged; going back to step {step - 1}.\n")
    assert "differ from the saved ones" in texts[0] and "safetensors  is missing" in texts[1]


def test_without_it_the_damage_is_an_error_that_names_the_others(damaged):
    with pytest.raises(RunError, match=r"(?s)step 3 cannot be read.*other complete checkpoints: 2, 1\.\n"):
        damaged.restore(state(0))
    assert is_state(damaged.restore(state(0), step=1), 1)


def test_the_newest_is_one_whose_files_are_all_there(damaged):
    assert damaged.latest() == 3  # a file that has its length
    (damaged.path(3) / "arrays" / "00000-000.safetensors").unlink()
    with pytest.warns(CheckpointWarning) as reported:
        assert damaged.latest() == 1
    assert len(reported) == 1
    assert f"{damaged.path(2)}: arrays/00000-000.safetensors  is missing" in str(reported[0].message)


@pytest.mark.parametrize("step", [7.0, -1, True])
def test_a_step_that_no_folder_can_be_called_by_is_refused(tmp_path, step):
    with pytest.raises(js.checkpoint.CheckpointError, match="cannot have this step"):
        js.checkpoint.Checkpointer(tmp_path).save(step, {"x": 1})
