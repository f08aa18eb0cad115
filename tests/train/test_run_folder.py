"""The folder of a run: one live run in it, nothing of another's overwritten, and resumed only as what it was."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import jshard as js
from jshard._processes import ProcessGroup
from jshard.errors import RunError, ShardingError
from jshard.train import Recipe
from jshard.train.run_folder import RunFolder
from jshard.train.run_lock import RunLock
from jshard.train.run_record import RunRecord


@dataclasses.dataclass(frozen=True)
class Config:
    n_layer: int = 3
    dtype: type = float


def make_record(description="a book", fingerprint="abc", options=None, model=None, **changes):
    fields = {"sequence_length": 32, "batch_size": 16, "num_steps": 10, "learning_rate": 1e-3, "warmup_steps": 2}
    recipe = Recipe(model=model or Config(), **(fields | changes))
    data = types.SimpleNamespace(description=description, fingerprint=fingerprint)
    return RunRecord.of(recipe, name="tiny", model_file=Path("models/gpt.py"), data=data, options=options)


RECORD = make_record(options={"steps": 10, "data": [Path("a.txt")]})


def begin(path, record=RECORD):
    """A run that was begun, and has ended."""
    with RunFolder.open(path, record) as folder:
        folder.started(step=0, mesh={"fsdp": 8})


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def read(path):
    return json.loads((path / "run.json").read_text())


# A new run.


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_run(tmp_path, is_there):
    path = tmp_path / "a" / "b"
    if is_there:
        path.mkdir(parents=True)
    with RunFolder.open(path, RECORD) as folder:
        assert (folder.path, folder.is_primary, folder.is_resumed, folder.notices) == (path, True, False, [])
        assert (folder.metrics, folder.checkpoints) == (path / "metrics.jsonl", path / "checkpoints")
        assert folder.config["model"]["n_layer"] == 3
        folder.started(step=0, mesh=js.mesh(replica=2))
    stored = read(path)
    assert (stored["name"], stored["model_file"]) == ("tiny", "models/gpt.py")
    assert stored["data"] == {"description": "a book", "fingerprint": "abc"}
    assert stored["recipe"]["class"] == "Recipe" and stored["recipe"]["learning_rate"] == 1e-3
    assert stored["recipe"]["model"] == {"class": "Config", "n_layer": 3, "dtype": "builtins.float"}
    assert stored["options"] == {"steps": 10, "data": ["a.txt"]} == RunFolder.options(path)
    packages = {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "jshard"}
    assert stored["versions"].keys() == packages
    (start,) = stored["starts"]
    assert (start["step"], start["mesh"], start["processes"]) == (0, {"replica": 2, "fsdp": 4, "tensor": 1}, 1)
    assert start["versions"] == stored["versions"] and start["time"].endswith("+00:00")
    assert sorted(os.listdir(path)) == [".lock", "run.json"]


def refused(path, error=ShardingError, record=RECORD, **kwargs):
    """The text of the refusal, after which nothing has changed on the disk."""
    before = contents(path) if path.is_dir() else None
    with pytest.raises(error) as caught:
        RunFolder.open(path, record, **kwargs)
    assert (contents(path) if path.is_dir() else None) == before
    return str(caught.value)


def test_a_full_disk_is_a_failure_and_not_a_wrong_request(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"No space left on device \(ENOSPC\)"):
            RunFolder.open(tmp_path / "out", RECORD)
    begin(tmp_path / "out")  # what that left is no other run


def test_run_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    begin(tmp_path)
    before = read(tmp_path)
    folder = RunFolder.open(tmp_path, RECORD, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda draft, path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folder.started(step=5, mesh={"fsdp": 8})
    folder.close()
    assert read(tmp_path) == before
    assert not list(tmp_path.glob("*.tmp"))


# One live run.

HOLD = """
import sys, os
from tests.train.test_run_folder import *
folder = RunFolder.open(sys.argv[1], RECORD)
folder.started(step=0, mesh=dict(fsdp=8))
print(os.getpid(), flush=True)
sys.stdin.read()  # until the test ends
"""


def hold(path):
    """A live run in a process of its own."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=root,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_live_run_is_refused_and_a_killed_one_is_not_in_the_way(tmp_path):
    process, pid = hold(tmp_path)
    try:
        for resume in (False, True):
            text = refused(tmp_path, RunError, resume=resume)
            assert text.startswith("The folder is in use by a live run.\n")
            assert f"process {pid} on " in text
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with RunFolder.open(tmp_path, RECORD, resume=True) as folder:
        assert folder.is_resumed


def test_two_may_look_at_the_same_time(tmp_path):
    """As the processes of one run do, all at its start."""
    begin(tmp_path)
    with (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        RunLock.check_free(tmp_path / ".lock")


# Of one thread: a fork of more may wait for ever for a lock that another thread held.
FORKS = """
import os, sys
from pathlib import Path
from jshard.train.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
os.write(1, b"%d\\n" % (os.fork() or os.getpid()))  # the child does so when its hooks have run
sys.stdin.read()  # until the test ends
"""


def test_a_child_that_outlives_a_killed_run_does_not_hold_its_lock(tmp_path):
    begin(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / ".lock")],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        child = {int(process.stdout.readline()) for _ in range(2)}
        assert len(child) == 1  # reported by both
        refused(tmp_path, RunError, resume=True)
        process.kill()
        process.wait()
        os.kill(child.pop(), 0)  # it lives
        with RunFolder.open(tmp_path, RECORD, resume=True) as folder:
            assert folder.is_resumed


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def unsupported(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with RunFolder.open(tmp_path, RECORD) as folder:
        assert folder.notices == [f"{tmp_path}: the file system has no locks; see that no other run writes here"]


# A run that continues.


def test_all_that_would_make_it_another_run_is_reported_at_once(tmp_path):
    begin(tmp_path)
    (tmp_path / ".lock").unlink()  # as in a copy
    other = make_record("a film", "xyz", model=Config(n_layer=4), batch_size=8, sequence_length=64, seed=1, num_steps=9)
    text = refused(tmp_path, record=other, resume=True)
    assert text.startswith("The run cannot be resumed: 4 of its settings would change.\n")
    for line in (
        "model.n_layer  stored 3  wanted 4",
        "sequence_length  stored 32  wanted 64",
        "seed  stored 0  wanted 1",
        "data  stored a book (abc)",
        "wanted a film (xyz)",
    ):
        assert f" {line}\n" in text
    assert "num_steps" not in text and "batch_size" not in text and not (tmp_path / ".lock").exists()


def test_batches_of_another_size_continue_after_the_samples_that_were_given(tmp_path):
    begin(tmp_path)
    before = []
    for step, size in ((10, 8), (14, 4), (12, 32), (13, 16)):  # the third one went back
        with RunFolder.open(tmp_path, make_record(batch_size=size), resume=True) as folder:
            before.append([folder.samples_before(number) for number in (0, 5, step)])
            folder.started(step=step, mesh={"fsdp": 8})
    assert before == [[0, 80, 160], [0, 80, 160 + 4 * 8], [0, 80, 160 + 2 * 8], [0, 80, 160 + 2 * 8 + 32]]


def test_other_settings_may_change_and_are_noted_and_kept(tmp_path):
    begin(tmp_path)
    other = make_record(num_steps=20, learning_rate=3e-4, accumulate=2, options={"steps": 20})
    lines = ["num_steps is 20, was 10", "learning_rate is 0.0003, was 0.001", "accumulate is 2, was 1"]
    with RunFolder.open(tmp_path, other, resume=True) as folder:
        assert folder.notices == lines
        folder.started(step=10, mesh={"fsdp": 8})
    assert RunFolder.options(tmp_path) == {"steps": 20}  # the next resume asks for 20 steps, too
    assert read(tmp_path)["starts"][1]["changes"] == lines
    with RunFolder.open(tmp_path, other, resume=True) as folder:
        assert folder.notices == []


def test_other_versions_are_noted(tmp_path):
    begin(tmp_path)
    stored = read(tmp_path)
    stored["starts"][0]["versions"]["jax"] = "0.9.0"
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with RunFolder.open(tmp_path, RECORD, resume=True) as folder:
        (line,) = folder.notices
    assert line.startswith("other versions: jax ") and "(was 0.9.0)" in line


def test_nothing_to_resume(tmp_path):
    assert "no such folder" in refused(tmp_path / "gone", resume=True)
    assert "it has no run.json" in refused(tmp_path, resume=True)
    assert not (tmp_path / "gone").exists() and os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", '{"name": "ti', "[]", "3", '{"name": "tiny"}', "\0\0\0"])
def test_a_record_that_cannot_be_read_is_not_overwritten(tmp_path, text):
    begin(tmp_path)
    (tmp_path / "run.json").write_text(text)
    assert refused(tmp_path, resume=True).startswith("The record of the run cannot be read.\n")
    assert refused(tmp_path).startswith("The folder holds another run.\n")
    with pytest.raises(ShardingError, match="cannot be read"):
        RunFolder.options(tmp_path)


# Names.


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShardingError, match="cannot be written") as error:
        RunFolder.check_vacant(tmp_path / "file" / "runs" / "gpt")
    assert "Not a directory" in error.value.why


def test_names(tmp_path):
    assert RunFolder.free_name(tmp_path / "runs", "gpt") == tmp_path / "runs" / "gpt"
    assert RunFolder.newest(tmp_path / "runs", "gpt") is None
    for name in ("gpt", "gpt-2", "gpt-10", "gpt-tiny-11", "gptx-12"):
        begin(tmp_path / name)
    (tmp_path / "gpt-3").mkdir()  # taken, and not a run
    assert RunFolder.free_name(tmp_path, "gpt") == tmp_path / "gpt-4"
    assert RunFolder.newest(tmp_path, "gpt") == tmp_path / "gpt-10"


# Several processes, as threads that exchange values.


def open_together(monkeypatch, paths, record=RECORD, **kwargs):
    """What `open` returned or raised in each process; the first one writes."""
    barrier, given, results = threading.Barrier(len(paths), timeout=800), [None] * len(paths), [None] * len(paths)
    process = lambda: int(threading.current_thread().name)

    def exchange(topic, value, **how):
        given[process()] = json.dumps(value)
        barrier.wait()
        found = list(map(json.loads, given))
        barrier.wait()
        return found

    def one():
        mine = record[process()] if isinstance(record, list) else record
        try:
            results[process()] = RunFolder.open(paths[process()], mine, **kwargs)
        except (ShardingError, RunError) as error:
            results[process()] = error

    with monkeypatch.context() as patch:
        patch.setattr("jshard._processes.exchange", exchange)
        patch.setattr("jshard._processes.all_processes", lambda: ProcessGroup(tuple(range(len(paths)))))
        patch.setattr("jshard._processes.is_primary", lambda: process() == 0)
        patch.setattr("jshard.train.run_folder._VISIBLE_S", 0.3)
        threads = [threading.Thread(target=one, name=str(number)) for number in range(len(paths))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def test_one_process_writes_and_all_continue(tmp_path, monkeypatch):
    first, second = open_together(monkeypatch, [tmp_path, tmp_path])
    assert (first.is_primary, second.is_primary) == (True, False)
    second.started(step=0, mesh={"fsdp": 8})
    assert read(tmp_path)["starts"] == []
    first.started(step=0, mesh={"fsdp": 8})
    first.close()
    changed = make_record(num_steps=20)
    folders = open_together(monkeypatch, [tmp_path] * 3, changed, resume=True)
    assert [folder.notices for folder in folders] == [["num_steps is 20, was 10"]] * 3
    folders[0].close()


def test_a_folder_that_is_not_shared_stops_all(tmp_path, monkeypatch):
    """Each host has a folder of that name, even one with a run of its own in it."""
    begin(tmp_path / "b")
    results = open_together(monkeypatch, [tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    for error in results:
        assert str(error).startswith("The folder of the run is not shared between the hosts.\n")
        assert "process 1 on " in str(error) and "process 2" not in str(error) and "process 0 on " in error.why
    begin(tmp_path / "a")  # as free as before


def test_processes_that_would_train_different_things_are_stopped(tmp_path, monkeypatch):
    """A host with another file of data, or another model file."""
    records = [RECORD, RECORD, make_record(fingerprint="xyz", learning_rate=0.5)]
    for error in open_together(monkeypatch, [tmp_path] * 3, records):
        assert str(error).startswith("The processes of the run do not agree on what to train.\n")
        lines = str(error).splitlines()
        assert any("data  process 2 on " in line and "xyz" in line and "abc" in line for line in lines)
        assert any("recipe.learning_rate  process 2 on " in line and "0.5" in line for line in lines)
        assert "process 1 " not in str(error)
    begin(tmp_path)  # as free as before


def test_what_stops_the_first_process_stops_all(tmp_path, monkeypatch):
    begin(tmp_path)
    first, second = open_together(monkeypatch, [tmp_path, tmp_path])
    assert isinstance(second, ShardingError) and str(first) == str(second)
    with RunFolder.open(tmp_path, RECORD, resume=True):
        first, second = open_together(monkeypatch, [tmp_path, tmp_path], resume=True)
    assert isinstance(second, RunError) and str(first) == str(second)
