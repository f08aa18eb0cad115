"""Opens the files of a run, a checkpoint or a model that may come from elsewhere.

Such a folder is whatever somebody packed into an archive: a FIFO in place of a file, on which a reader waits for ever;
a file of a terabyte; a symbolic link in place of a file, through which a writer overwrites what it points to.

Reading follows links, to regular files only, and has a bound on memory. Hugging Face's cache is made of links
(`snapshots/*` point to `blobs/*`), and users link single files of a checkpoint to other disks.

Writing never follows a link at the name that is written, and never writes into a file that has another name. Folders
on the way to it may be links: `runs -> ../disk/runs` is the user's own.

Files that a user names to be read once, such as a config, may be pipes (`<(command)`) and are not opened here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, TypeGuard

from jshard._parsing import is_text, parse_json
from jshard._text import human_bytes
from jshard.errors import FourPartError, UnsafeFileError

METADATA_BYTES = 64 << 20
"""Bound for a file that describes others. JSON takes up to 20 times its size in memory once it is parsed."""

_PART_BYTES = 1 << 20

# O_NOCTTY: a terminal in place of a file must not become the controlling one, whose hang-up would end the process.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
_WRITTEN = os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
# With it, the open of a FIFO returns at once, and reads of what looks like a file and is none (/proc/kmsg) do not wait.
_NO_WAIT = os.O_NONBLOCK

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Opens a file for reading, without a buffer; a link is followed, and must lead to a regular file.

    Raises:
        UnsafeFileError: it is a FIFO, a folder, a device or a socket.
        OSError: it does not exist, or may not be read.
    """
    return io.FileIO(open_number(path), "rb")


def open_number(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """Opens a file as `open_regular`, and returns its number, which the caller closes; `follow=False` refuses links."""
    flags = _READ | _NO_WAIT
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        number = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _not_regular(path, os.stat(path).st_mode) from error
        if error.errno == errno.ELOOP and not follow:
            raise _not_regular(path, os.lstat(path).st_mode) from error
        raise
    try:
        # Of the open file, not of the path: between two looks at a path it may become another file.
        _check_regular(path, os.fstat(number))
    except UnsafeFileError:
        os.close(number)
        raise
    return number


def read_bytes(path: str | os.PathLike[str], most_bytes: int = METADATA_BYTES, *, follow: bool = True) -> bytes:
    """Returns the contents of a small file.

    Args:
        path: the file.
        most_bytes: a larger file is refused, whatever size it claims to have.
        follow: whether to follow a link. Not for what is sent elsewhere, such as a sample to a tracker: the link may
            point to any file of the user.

    Raises:
        UnsafeFileError: it is not a regular file, or has more bytes than that.
        OSError: it does not exist, or cannot be read.
    """
    with io.FileIO(open_number(path, follow=follow), "rb") as file:
        # The size that the file claims refuses a terabyte at once.
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise _too_large(path, size, most_bytes)
        content = _read_up_to(file, most_bytes + 1)
    if len(content) > most_bytes:  # it grows, or has no size, as the files of /proc
        raise _too_large(path, len(content), most_bytes)
    return content


def read_text(path: str | os.PathLike[str], most_bytes: int = METADATA_BYTES) -> str:
    """Returns the text of a small file; raises as `read_bytes`, and `ValueError` if it is not UTF-8."""
    return read_bytes(path, most_bytes).decode()


def read_json(path: str | os.PathLike[str], most_bytes: int = METADATA_BYTES) -> Any:
    """Returns the JSON value in a small file; raises as `read_text`, and `ValueError` if it is not JSON."""
    return parse_json(read_bytes(path, most_bytes))


def read_named(path: str | os.PathLike[str], most_bytes: int = METADATA_BYTES) -> bytes:
    """Returns the contents of a small file that the user named: it may be a pipe, `<(command)`, but not endless.

    Raises:
        UnsafeFileError: it has more bytes than that.
        OSError: it does not exist, or cannot be read.
    """
    # Unlike `open_regular` this waits for the writer of a pipe.
    with open(path, "rb", buffering=0) as file:
        content = _read_up_to(file, most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, len(content), most_bytes)
    return content


def open_in_place(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Opens a file that keeps its contents while it is written, such as a lock; returns its number.

    Args:
        path: the file.
        flags: of `os.open`, such as `os.O_RDWR | os.O_CREAT`; not `os.O_TRUNC`, which would come before the checks.
        mode: the permissions of a new file.

    Raises:
        UnsafeFileError: it is a link, or not a regular file, or has a second name: what is written there would change
            another file.
        OSError: it cannot be opened.
    """
    try:
        number = os.open(path, flags | _WRITTEN | _NO_WAIT, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path, os.lstat(path).st_mode) from error
        raise
    try:
        # Of the open file, as in `open_number`.
        status = os.fstat(number)
        _check_regular(path, status)
        _check_single_name(path, status)
    except UnsafeFileError:
        os.close(number)
        raise
    return number


def open_new(path: str | os.PathLike[str]) -> BinaryIO:
    """Creates a file for writing; raises `FileExistsError` if anything, even a broken link, has that name."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _WRITTEN, 0o666)
    return os.fdopen(number, "wb")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Writes a file that gets its name when it is complete and on disk; what had the name before is replaced.

    A link of that name is replaced, and not followed. The draft has a random name, so that neither another process nor
    something that is there already is in the way.
    """
    path = Path(path)
    # Beside the file, as a rename does not leave a file system; `is_draft` knows the form of the name.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    file = open_new(draft)
    try:
        with file:
            yield file
            # On disk before it gets its name: a power cut could otherwise leave an empty file under it.
            flush(file)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def flush(file: IO[Any]) -> None:
    """Waits until everything written to a file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text with `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def check_may_write(path: Path) -> None:
    """Raises the error with which creating a file or folder would fail. The disk stays as it is.

    A full disk, or a quota, shows only while writing.

    Args:
        path: of the file or folder; missing parents count as made on the way.

    Raises:
        OSError: a parent is a file, or may not be written; also on a file system that is mounted read-only.
    """
    # The nearest parent that exists decides: all below it are made on the way.
    existing = path.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing != path.absolute() and not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    needed = os.W_OK
    if existing.is_dir():
        needed |= os.X_OK  # without it nothing can be created in a folder
    if not os.access(existing, needed):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(existing))


def check_regular_files(folder: Path) -> None:
    """Checks that a folder holds only files and folders, for a library that opens them by itself.

    Raises:
        UnsafeFileError: one is a FIFO, a socket or a device, or a link to one: the library would wait for ever.
        OSError: a folder in it cannot be read.
    """
    folders = [folder] if folder.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                # Links to folders are not entered: they may lead back. A broken link is an error of the library that
                # opens it.
                elif not entry.is_file() and os.path.exists(entry) and not entry.is_dir():
                    raise _not_regular(entry.path, entry.stat().st_mode)


def is_inside(relative: object) -> TypeGuard[str]:
    """Returns whether a path that a file names stays below the folder of that file: relative, and without `..`."""
    if not isinstance(relative, str) or not is_text(relative):
        return False
    parts = PurePosixPath(relative).parts
    return bool(parts) and not relative.startswith("/") and ".." not in parts


def is_draft(name: str, of: str) -> bool:
    """Returns whether a file is what an interrupted `replacing` left of the file `of`."""
    return re.fullmatch(rf"\.{re.escape(of)}\.[0-9a-f]{{8}}\.tmp", name) is not None


def _read_up_to(file: io.FileIO, most_bytes: int) -> bytes:
    """Returns the contents of a file, or its first bytes; memory is taken for what is there, whatever its size is."""
    parts: list[bytes] = []
    remaining = most_bytes
    while remaining:
        part = file.read(min(remaining, _PART_BYTES))
        if not part:  # None if a read would wait
            break
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts)


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path, status.st_mode)


def _check_single_name(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if status.st_nlink > 1:
        raise UnsafeFileError(
            "A file is not written, because it is another file, too.",
            where=str(path),
            why=f"it has {status.st_nlink} names (hard links), and the others would change with it.",
            do=f"see that it may go, then remove this name of it: rm {shlex.quote(os.fspath(path))}",
        )


def _not_regular(path: str | os.PathLike[str], mode: int) -> FourPartError:
    kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
    return UnsafeFileError(
        "A file is not opened, because it is not a regular file.",
        where=str(path),
        why=f"it is {kind}.",
        do=f"see what it is, then put the right file there: ls -l {shlex.quote(os.fspath(path))}",
    )


def _too_large(path: str | os.PathLike[str], size: int, most_bytes: int) -> FourPartError:
    return UnsafeFileError(
        "A file is not read, because it is too large.",
        where=str(path),
        why=f"it has {human_bytes(size)} or more; what has its place has at most {human_bytes(most_bytes)}.",
        do="copy it again from an intact copy; it cannot be what a program wrote there.",
    )
