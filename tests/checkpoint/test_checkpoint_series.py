"""A series of checkpoints: what is interrupted, full, damaged or somebody else's never costs a good one."""

import os
import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.checkpoint import Checkpointer, CheckpointError, CheckpointWarning
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.ownership import DRAFT_SUFFIX
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import raw
from tests.compiling import python


def state(number, size=64):
    sharding = NamedSharding(js.mesh(), P("fsdp"))
    w = np.random.default_rng(number).standard_normal((8, size)).astype(np.float32)
    return {"w": jax.device_put(w, sharding), "key": jax.random.key(number), "ids": np.arange(number), "step": number}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_python(code, *args, **kwargs):
    """Runs code in a process of its own, with `state` and the series `ckpt` of the folder `args[0]`."""
    head = """
        import os, sys, signal
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        from tests.checkpoint.test_checkpoint_series import *
        ckpt = Checkpointer(sys.argv[1], keep=3)
    """
    program = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run(
        python(program, *args),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
        **kwargs,
    )


# What counts, and what stays.


def test_steps_latest_and_equal_bytes(tmp_path):
    ckpt = Checkpointer(tmp_path / "c", keep=2)
    assert ckpt.steps() == [] and ckpt.latest() is None
    assert ckpt.save(9, state(9)) == tmp_path / "c" / "9"
    ckpt.save(10, state(10))
    assert ckpt.steps() == [9, 10] and ckpt.latest() == 10
    restored = ckpt.restore(like=state(9) | {"ids": np.arange(10)})
    assert raw(restored) == raw(state(10))
    assert restored["w"].sharding == state(0)["w"].sharding
    assert raw(ckpt.restore(like=state(9), step=9)) == raw(state(9))


def test_a_run_and_a_series_stand_for_their_newest_checkpoint(tmp_path):
    ckpt = Checkpointer(tmp_path / "run" / "checkpoints")
    for step in (9, 10):
        ckpt.save(step, state(step))
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", str(tmp_path / "run")):
        assert raw(js.checkpoint.restore(path, like=state(10))) == raw(state(10))
    assert js.checkpoint.forecast(tmp_path / "run", like=state(10)).wanted_bytes > 0


def test_the_newest_stay(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        ckpt.save(step, {"step": step})
    assert ckpt.steps() == [2, 3]
    Checkpointer(tmp_path, keep=1).save(4, {"step": 4})  # a resumed run with another keep
    assert ckpt.steps() == [4]
    assert names(tmp_path) == ["4", "history.jsonl", "series.json"]


def test_what_is_not_of_this_series_never_counts_and_stays(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=1)
    others = ["7", "007", "notes", "best.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp", "-3", "²"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    (tmp_path / "6").write_text("a file")
    for step in (1, 2):
        ckpt.save(step, {"step": step})
    assert ckpt.steps() == [2]
    assert set(names(tmp_path)) == {*others, "6", "2", "history.jsonl", "series.json"}
    with pytest.raises(CheckpointError, match=r"that path already exists, without commit_success\.txt"):
        ckpt.save(7, {"step": 7})
    assert (tmp_path / "7" / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="that path already exists"):
        ckpt.save(6, {"step": 6})


def test_a_checkpoint_copied_in_by_hand_counts_and_stays(tmp_path):
    other = Checkpointer(tmp_path / "other")
    other.save(5, {"step": 5})
    ckpt = Checkpointer(tmp_path / "c", keep=1)
    ckpt.save(1, {"step": 1})
    shutil.copytree(other.path(5), ckpt.path(5))
    assert ckpt.latest() == 5 and ckpt.restore(like={"step": 0}) == {"step": 5}
    for step in (6, 7):
        ckpt.save(step, {"step": step})
    assert ckpt.steps() == [5, 7]


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(CheckpointError, match="the last good checkpoint always stays"):
        Checkpointer(tmp_path, keep=0)


def test_looking_and_reading_writes_nothing_and_meets_no_one(tmp_path, monkeypatch):
    """One of several processes may look, as for --init-from; and a folder that is mounted to be read can be."""
    Checkpointer(tmp_path / "run" / "checkpoints").save(1, {"step": 1})
    (tmp_path / "theirs.safetensors").touch()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}

    def meeting(*args, **kwargs):
        raise AssertionError("no one comes to it")

    with monkeypatch.context() as many:
        many.setattr(jax, "process_count", lambda: 2)
        many.setattr("jshard._processes.exchange", meeting)
        many.setattr("jshard.checkpoint.series.shared_folder.exchange", meeting)
        assert checkpoint_at(tmp_path / "theirs.safetensors") == tmp_path / "theirs.safetensors"
        assert checkpoint_at(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "1"
        assert Checkpointer(tmp_path / "none").latest() is None
        ckpt = Checkpointer(tmp_path / "run" / "checkpoints")
    assert ckpt.latest() == 1 and ckpt.restore(like={"step": 0}) == {"step": 1}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before


# Interrupted saves.

DIE_BEFORE_COMMIT = """
    rename = os.rename
    def die(source, target, **kwargs):
        if re.search(sys.argv[2], f"{source} {target}"):
            assert os.path.isdir(source)
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(source, target, **kwargs)
    os.rename = os.replace = die
    ckpt.save(1, state(1)); ckpt.save(2, state(2)); ckpt.save(3, state(3)); ckpt.save(4, state(4))
"""


@pytest.mark.parametrize(
    ("dies_at", "left"),
    [("/2$", [1]), (r"/1 \S*/1\.orbax", [1, 2, 3, 4])],
    ids=["before the commit", "before the old one is deleted"],
)
def test_killed_in_the_middle_of_a_save(tmp_path, dies_at, left):
    ended = run_python(DIE_BEFORE_COMMIT, tmp_path, dies_at)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    ckpt = Checkpointer(tmp_path, keep=3)
    assert ckpt.steps() == left
    assert raw(ckpt.restore(like=state(left[-1]))) == raw(state(left[-1]))
    assert (f"2{DRAFT_SUFFIX}" in names(tmp_path)) == (left == [1])
    ckpt.save(left[-1] + 1, state(left[-1] + 1))  # the same step again, or the next one
    assert ckpt.steps() == [*left, left[-1] + 1][-3:]
    assert not [name for name in names(tmp_path) if name.endswith(DRAFT_SUFFIX)]


def test_a_deletion_that_was_interrupted_is_ended(tmp_path):
    ckpt = Checkpointer(tmp_path, keep=1)
    ckpt.save(1, {"step": 1})
    ckpt.path(1).rename(ckpt.path(1).with_name(f"1{DRAFT_SUFFIX}"))
    (tmp_path / f"1{DRAFT_SUFFIX}" / "_CHECKPOINT_METADATA").unlink()
    assert ckpt.steps() == []
    ckpt.save(2, {"step": 2})
    assert names(tmp_path) == ["2", "history.jsonl", "series.json"]


# Disks that refuse.

TOO_LARGE = """
    import resource
    from jshard.errors import RunError
    ckpt.save(1, state(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        ckpt.save(2, state(2, size=65536))
    except RunError as error:
        print(error)
    print(ckpt.steps())
    ckpt.save(3, state(3))
    print(ckpt.steps())
"""


def test_a_write_that_fails_names_the_path_the_reason_and_the_last_good_one(tmp_path):
    ended = run_python(TOO_LARGE, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == textwrap.dedent(
        f"""\
        The checkpoint of step 2 could not be written.
          where: {tmp_path}/2
          why:   File too large (EFBIG).
                 the last good checkpoint is {tmp_path}/1.
          do:    allow larger files, then continue the run with --resume.
        [1]
        [1, 3]
        """
    )
    assert ended.stderr == ""  # not one traceback per thread
    assert names(tmp_path) == ["1", "3", "history.jsonl", "series.json"]


def test_what_is_not_flushed_does_not_count(tmp_path, monkeypatch):
    ckpt = Checkpointer(tmp_path, keep=1)
    ckpt.save(1, {"step": 1})

    def full(number):
        if "/.jshard.json." in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device \(ENOSPC\)"):
        ckpt.save(2, {"step": 2})
    assert names(tmp_path) == ["1", "history.jsonl", "series.json"]


def test_a_save_that_fails_may_be_a_warning_but_for_who_waits_for_it(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    ckpt = Checkpointer(tmp_path, on_failure="warn")
    text = r"(?s)continues without a checkpoint\..*of step 1 could not be written.*No space left"
    with monkeypatch.context() as broken:
        broken.setattr("jshard.checkpoint.saving._manifest.write", full)
        with pytest.warns(CheckpointWarning, match=text), ckpt:
            ckpt.save_async(1, {"step": 1})
        with pytest.raises(RunError, match=r"(?s)of step 2 could not be written.*No space left"):
            ckpt.save(2, {"step": 2})
    ckpt.save(3, {"step": 3})
    assert ckpt.steps() == [3]


def test_all_processes_continue_from_what_the_first_one_sees(tmp_path, monkeypatch):
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.agreed_latest() is None
    checkpoints.save(1, {"step": 1})
    reported = []

    def exchange(topic, value, timeout_s):
        reported.append(value)
        checkpoints.save(2, {"step": 2})  # it is there all the time, and this process sees it only now
        return [2, value]

    monkeypatch.setattr("jshard.checkpoint.series.checkpointer.exchange", exchange)
    assert (checkpoints.agreed_latest(), reported) == (2, [1])


# Damage.


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ckpt = Checkpointer(tmp_path_factory.mktemp("two"))
    for step in (1, 2):
        ckpt.save(step, state(step, size=4096))
    return ckpt


def test_the_line_to_paste_leads_to_the_older_one(two, tmp_path):
    ckpt = Checkpointer(shutil.copytree(two.folder, tmp_path / "c"))
    max(ckpt.path(2).rglob("*"), key=lambda file: file.stat().st_size).unlink()
    with pytest.raises(RunError) as caught:
        ckpt.restore(like=state(2, size=4096))
    subprocess.run(re.search("mv .*", caught.value.do)[0], shell=True, check=True)
    assert raw(ckpt.restore(like=state(1, size=4096))) == raw(state(1, size=4096))
    max(ckpt.path(1).rglob("*"), key=lambda file: file.stat().st_size).unlink()
    with pytest.raises(RunError, match=r"other complete checkpoints: none.\n.*start the run again"):
        ckpt.restore(like=state(1, size=4096))


def test_a_run_that_went_back_saves_the_damaged_steps_again(tmp_path):
    """Whether the damage is seen by the sizes of the files, or only by who reads the values."""
    large = lambda step: {"w": state(step, size=32768)["w"], "step": step}  # the values of small files have checksums
    for step in (1, 2):
        Checkpointer(tmp_path / "whole").save(step, large(step))
    like = large(2)
    for number, damage in enumerate((lambda raw: raw[:-1], lambda raw: bytes([raw[0] ^ 1]) + raw[1:])):
        ckpt = Checkpointer(shutil.copytree(tmp_path / "whole", tmp_path / str(number)), every=1)
        values = ckpt.path(2) / "arrays" / "00000-000.safetensors"
        values.write_bytes(damage(values.read_bytes()))
        assert not ckpt.should_save(1) and ckpt.should_save(2) == (number == 0)
        with pytest.warns(CheckpointWarning, match=r"(?s)going back to step 1\..*at once by set_aside_newer\(1\)"):
            assert ckpt.restore(like=like, fall_back=True)["step"] == 1
        assert ckpt.should_save(2)
        with pytest.warns(CheckpointWarning, match=r"/2 is now named 2\.damaged"):
            ckpt.save(2, like)
        assert not ckpt.should_save(2) and names(ckpt.folder)[:3] == ["1", "2", "2.damaged"]
        assert raw(ckpt.restore(like=like)) == raw(like)
        ckpt.path(3).mkdir()  # copied by half
        with pytest.warns(CheckpointWarning, match=r"/3 is now named 3\.damaged"):
            ckpt.set_aside_newer(2)
        ckpt.save(3, like)


def test_a_draft_of_a_killed_process_is_removed(tmp_path):
    series = Checkpointer(tmp_path, keep=2)
    series.save(1, {"step": 1})
    (tmp_path / ".series.json.0a1b2c3d.tmp").write_text("{")
    (tmp_path / ".series.json.mine.tmp").write_text("{")  # no name that jshard gives
    series.save(2, {"step": 2})
    assert {path.name for path in tmp_path.glob(".series*")} == {".series.json.mine.tmp"}
