"""The folder of a run from elsewhere: nothing is written through a link in it, and no file in it makes a run wait."""

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from jshard import checkpoint
from jshard._files import check_regular_files, open_in_place, read_bytes, replacing, write_text
from jshard.checkpoint import history
from jshard.checkpoint.errors import CheckpointWarning
from jshard.checkpoint.ownership import Owner, draft_of, remove_draft
from jshard.errors import FourPartError, ShardingError, UnsafeFileError
from jshard.train.records import Jsonl, read_metrics
from jshard.train.run_folder import RunFolder
from jshard.train.run_lock import RunLock
from jshard.train.trackers import _run_id
from tests.train.test_run_folder import RECORD, begin, read


@pytest.fixture
def precious(tmp_path):
    """A file of the user, elsewhere; it is the same after the test."""
    path = tmp_path / "precious"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.fixture
def run(tmp_path):
    begin(tmp_path / "run")
    return tmp_path / "run"


LINKS = {"symbolic link": Path.symlink_to, "hard link": Path.hardlink_to}


@pytest.mark.parametrize("link", LINKS)
def test_a_lock_that_is_another_file_is_refused_in_four_parts(run, precious, link):
    (run / ".lock").unlink()
    LINKS[link](run / ".lock", precious)
    with pytest.raises(ShardingError, match=r"(?s)is not (opened|written), because.*where: .*\.lock.*do:"):
        RunFolder.open(run, RECORD, resume=True)


@pytest.mark.parametrize("link", LINKS)
def test_what_a_run_writes_replaces_a_link_and_not_its_target(run, precious, link):
    names = [".run.json.tmp", "run.json.tmp", "metrics.jsonl.cut", "sample.txt", "loss.png"]
    for name in names:
        LINKS[link](run / name, precious)
    content = (run / "run.json").read_text()
    (run / "run.json").unlink()
    (run.parent / "record.json").write_text(content)
    LINKS[link](run / "run.json", run.parent / "record.json")
    with RunFolder.open(run, RECORD, resume=True) as folder:
        folder.started(step=0, mesh={"fsdp": 8})
    write_text(run / "sample.txt", "sample")
    assert not (run / "run.json").is_symlink() and len(read(run)["starts"]) == 2
    assert (run.parent / "record.json").read_text() == content


def test_metrics_are_not_written_through_a_link(tmp_path, precious):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnsafeFileError):
        Jsonl(tmp_path / "metrics.jsonl", resume_after=3)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ShardingError, match="would overwrite another"):
        Jsonl(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").hardlink_to(precious)
    log = Jsonl(tmp_path / "metrics.jsonl", resume_after=3)  # cut back: a file of its own
    log.log(4, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [4]


def test_a_series_does_not_write_through_a_link(tmp_path, precious):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("series.json.tmp", "series.json", "history.jsonl", "3.owner"):
        (folder / name).symlink_to(precious)
    with pytest.raises(UnsafeFileError):
        Owner(folder / "3")
    (folder / "3.owner").unlink()
    series = checkpoint.Checkpointer(folder)
    with pytest.warns(CheckpointWarning, match="the history has no line"):
        series.save(3, {"w": np.arange(4.0)})
    assert json.loads((folder / "series.json").read_text()) == {"begun": [3]}
    assert not (folder / "series.json").is_symlink()


def test_the_draft_of_a_save_that_is_a_link_is_removed_and_not_its_target(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a").write_text("precious")
    draft_of(tmp_path / "3").symlink_to(tmp_path / "photos")
    assert remove_draft(tmp_path / "3")
    assert not draft_of(tmp_path / "3").is_symlink() and (tmp_path / "photos" / "a").exists()


def test_a_folder_that_the_user_linked_works_as_before(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "data")
    begin(tmp_path / "runs" / "gpt")
    with RunFolder.open(tmp_path / "runs" / "gpt", RECORD, resume=True):
        pass
    checkpoint.save(tmp_path / "runs" / "c", {"w": np.arange(4.0)})
    (tmp_path / "linked").symlink_to(tmp_path / "data" / "c")
    assert list(checkpoint.restore(tmp_path / "linked", like={"w": np.zeros(4)})["w"]) == [0, 1, 2, 3]


def test_a_checkpoint_of_linked_files_is_read(tmp_path):
    """As huggingface_hub and `cp -rs` store them."""
    checkpoint.save(tmp_path / "c", {"w": np.arange(4.0)})
    for number, path in enumerate(sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file())):
        path.rename(tmp_path / f"blob-{number}")
        path.symlink_to(tmp_path / f"blob-{number}")
    assert list(checkpoint.restore(tmp_path / "c", like={"w": np.zeros(4)})["w"]) == [0, 1, 2, 3]


def test_a_tracker_does_not_send_what_a_link_points_to(tmp_path, precious):
    (tmp_path / "run_id").symlink_to(precious)
    with pytest.raises(UnsafeFileError):
        _run_id(tmp_path / "run_id", True)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as here:
        os.chdir(path.parent)  # a path of a socket is short
        here.bind(path.name)


NO_FILES = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_not_a_file_is_refused_at_once(run, kind, monkeypatch):
    monkeypatch.chdir(run)
    checkpoint.save(run / "c", {"w": np.arange(4.0)})
    for name in (
        "run.json",
        ".lock",
        "metrics.jsonl",
        "history.jsonl",
        "c/jshard.json",
        "c/arrays/00000-000.safetensors",
    ):
        (run / name).unlink(missing_ok=True)
        NO_FILES[kind](run / name)
    with pytest.raises(FourPartError):
        RunFolder.record(run)
    with pytest.raises(FourPartError):
        read_metrics(run / "metrics.jsonl")
    with pytest.raises(FourPartError):
        history.read(run)
    with pytest.raises(FourPartError):
        checkpoint.restore(run / "c", like={"w": np.zeros(4)})
    with pytest.raises(FourPartError):
        checkpoint.restore(run / "c", like={"w": np.zeros(4)}, verify=False)
    assert RunLock.token(run / ".lock") is None
    RunLock.check_free(run / ".lock")
    if kind != "terabyte":
        with pytest.raises(FourPartError):
            RunLock(run / ".lock")
        with pytest.raises(UnsafeFileError):
            check_regular_files(run) if kind != "folder" else read_bytes(run / ".lock")


def test_a_draft_that_is_interrupted_leaves_no_file(tmp_path):
    def interrupted():
        with replacing(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_a_file_of_proc_has_a_bound_though_it_has_no_size():
    with pytest.raises(UnsafeFileError, match="too large"):
        read_bytes("/proc/self/maps", 100)
    with pytest.raises(UnsafeFileError):
        open_in_place("/dev/null", os.O_RDWR)
