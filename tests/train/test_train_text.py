"""Text files become data; what is no text is reported, all of it at once."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from jshard.data import DataError
from jshard.data.text import TokenWindows, load_text


def text_of(windows):
    """The bytes of a source of windows, without those that fill no window."""
    return b"".join(windows[i]["inputs"].astype(np.uint8).tobytes() for i in range(len(windows)))


def refused(paths, **options):
    with pytest.raises(DataError) as caught:
        load_text(paths, **{"sequence_length": 4, **options})
    return caught.value


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a" * 999)
    return path


def test_windows_follow_one_another():
    windows = TokenWindows(np.arange(100, dtype=np.uint16), 8)
    assert len(windows) == 12
    assert windows[1]["inputs"].tolist() == list(range(8, 16))
    assert windows[1]["targets"].tolist() == list(range(9, 17))
    assert windows[0]["inputs"].dtype == np.int32
    assert [len(TokenWindows(np.arange(n), 8)) for n in (0, 1, 8, 9)] == [0, 0, 0, 1]


def test_folder_is_split_by_file(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(f"text {number} ")
    data = load_text([folder], sequence_length=1)
    train, held_out = text_of(data.train).decode(), text_of(data.held_out).decode()
    for number in range(200):
        assert (f"text {number} " in train.split("\0")) != (f"text {number} " in held_out.split("\0"))
    assert 3 <= held_out.count("text") <= 20
    assert "200 files" in data.description
    assert "by file" in data.description
    # One more file moves no other file across.
    (folder / "more.txt").write_text("more")
    more = load_text([folder], sequence_length=1)
    assert text_of(more.held_out).decode().replace("more\0", "") == held_out


def test_one_file_is_split_at_its_end(book):
    data = load_text([book], sequence_length=1)
    assert (len(data.train), len(data.held_out)) == (949, 49)  # of 950 and 50 bytes
    assert "the end of each file" in data.description
    assert data.tokens_per_sample == 1
    assert data.tokenizer.decode(data.train[0]["inputs"]) == "a"


def test_files_are_read_in_the_order_of_their_names_and_end_in_a_zero_byte(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name in ("z.txt", "a.txt", "sub/m.txt"):
        (folder / name).write_text(name[-5] * 99)
    data = load_text([folder], sequence_length=1)
    assert text_of(data.train) == b"a" * 95 + b"m" * 95 + b"z" * 94  # the last one has no target


def test_names_do_not_depend_on_how_a_folder_is_given(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text {number} " * 20)
    whole = load_text([folder], sequence_length=4).fingerprint
    monkeypatch.chdir(folder)
    assert load_text(["."], sequence_length=4).fingerprint == whole
    assert load_text(["../texts"], sequence_length=4).fingerprint == whole


@pytest.mark.parametrize("change", ["text", "sequence_length", "name"])
def test_fingerprint_is_of_text_tokenizer_and_sequence_length(book, change):
    def fingerprint(**options):
        return load_text([book], **{"sequence_length": 4, **options}).fingerprint

    class Renamed(type(load_text([book], sequence_length=4).tokenizer)):
        name = "other bytes"

    first = fingerprint()
    assert fingerprint() == first
    if change == "text":
        book.write_text("a" * 998 + "b")
        assert fingerprint() != first
    elif change == "sequence_length":
        assert fingerprint(sequence_length=5) != first
    else:
        assert fingerprint(tokenizer=Renamed()) != first


def test_all_bad_paths_are_named_at_once(tmp_path, book):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "hidden" / ".git").mkdir(parents=True)
    (tmp_path / "hidden" / ".git" / "config").write_text("text")
    (tmp_path / "zero.dat").write_bytes(b"abc\0def")
    (tmp_path / "latin1.txt").write_bytes("abcdé".encode("latin1") + b" fgh")
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "nowhere": "no such file or directory",
        "empty.txt": "empty",
        "hidden": "a folder without text (hidden files are left out)",
        "zero.dat": "not text: a zero byte in position 3",
        "latin1.txt": "not text: 'utf-8' codec can't decode byte 0xe9 in position 4: invalid continuation byte",
        "pipe": "not text: neither a file nor a folder",
    }
    error = refused([book, *(tmp_path / name for name in reasons)])
    assert error.where == tuple(f"{tmp_path / name}: {reason}" for name, reason in reasons.items())
    assert error.what.startswith("6 of the given files and folders")


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A file and a folder that may not be read; tests may run as root, who may read all."""
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "locked.txt").write_text("secret")
    original = Path.read_bytes

    def read_bytes(self):
        if self.name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return folder


def test_what_is_no_text_in_a_folder_is_left_out_with_one_warning(locked):
    (locked / "text.txt").write_text("a" * 999)
    (locked / "image.png").write_bytes(b"\x89PNG\0")
    (locked / "elsewhere").symlink_to(locked.parent)
    (locked / ".git").mkdir()
    (locked / ".git" / "blob").write_bytes(b"\0")
    with pytest.warns(UserWarning, match="are skipped:") as caught:
        data = load_text([locked], sequence_length=4)
    (warning,) = caught
    lines = str(warning.message).splitlines()
    assert lines[0] == "3 file(s) are skipped:"
    assert sorted(lines[1:]) == [
        f"  {locked}/elsewhere: a link to a folder, not followed; give the folder itself",
        f"  {locked}/image.png: not text: 'utf-8' codec can't decode byte 0x89 in position 0: invalid start byte",
        f"  {locked}/locked.txt: permission denied",
    ]
    assert Path(warning.filename).name == Path(__file__).name
    assert data.description.startswith("1 file ")
    assert set(text_of(data.train)) == {ord("a")}


def test_held_out_files_may_be_too_few(tmp_path):
    names = (f"{number}.txt" for number in range(1000))
    trained = [name for name in names if zlib.crc32(f"texts/{name}".encode()) % 1000 >= 50][:25]
    (tmp_path / "texts").mkdir()
    for name in trained:
        (tmp_path / "texts" / name).write_text("text")
    error = refused([tmp_path / "texts"])
    assert "0 are held out" in error.why
    assert error.do == "give --data more text."


def test_standard_library_is_code():
    data = load_text(sequence_length=256)
    assert len(data.train) * 256 > 3e6
    assert 0.01 < len(data.held_out) / len(data.train) < 0.2
    for part in (data.train, data.held_out):
        assert b"def __init__(self" in text_of(part)
