"""Compiled programs on disk, beside the runs, so that a restarted run does not compile again.

JAX's own cache writes its files in place: a process that is killed leaves half a program, which is never replaced.
Here a file is written atomically and has a checksum; a damaged one is deleted and compiled again. The folder is
private, because anyone who can write there decides what the run executes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
import time
from pathlib import Path

import jax

from jshard import _compat
from jshard._paths import expanded

_SUFFIX, _MOST_BYTES, _SUM_BYTES = ".program", 4 << 30, 32
_FOLDER, _LEAST_S = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_ABANDONED_S = 3600.0
_WORTH_S = 0.1  # programs that take longer are stored; JAX's own limit is one second


def keep_programs(beside: Path, given: str) -> str:
    """Stores compiled programs from now on, in all processes of a run; returns a line that says where, or why not.

    Args:
        beside: the folder of the runs.
        given: a folder; "none"; or "beside": JAX_COMPILATION_CACHE_DIR, which JAX manages itself, or else
            `.compiled` beside the runs.
    """
    if given == "beside" and (folder := jax.config.values[_FOLDER]):
        return f"compiled programs: {folder} ({_FOLDER.upper()})"
    if given == "none":
        jax.config.update(_FOLDER, None)
        return "compiled programs are not stored (--compile-cache none)"
    folder = (beside / ".compiled" if given == "beside" else expanded(given)) / _machine()
    try:
        _make_private(folder)
    except OSError as error:
        jax.config.update(_FOLDER, None)
        return f"compiled programs are not stored: {folder}: {error.strerror or error}"
    if os.environ.get(_LEAST_S.upper()) is None:
        jax.config.update(_LEAST_S, _WORTH_S)
    _compat.use_program_cache(ProgramCache(folder), str(folder))
    return f"compiled programs: {folder}"


class ProgramCache:
    """The interface of JAX's persistent cache, with atomic files that several processes may use at once.

    Args:
        folder: the folder of the files.
        most_bytes: above this size the least recently used files are deleted.
    """

    def __init__(self, folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        self._path = folder  # the name under which JAX looks for it
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """The program of a key; None if it is missing or damaged."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        is_whole = hashlib.sha256(data[_SUM_BYTES:]).digest() == data[:_SUM_BYTES]
        with contextlib.suppress(OSError):
            if is_whole:
                os.utime(path)  # last used now
            else:
                path.unlink()
        return data[_SUM_BYTES:] if is_whole else None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program. A failing disk does not end the run."""
        path, draft = self._path / f"{key}{_SUFFIX}", self._path / f".{key}.{os.getpid()}.{platform.node()}.tmp"
        with contextlib.suppress(OSError):
            try:
                with draft.open("wb") as file:
                    file.write(hashlib.sha256(value).digest() + value)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            self._make_room()

    def _make_room(self) -> None:
        files = []
        for path in self._path.iterdir():
            with contextlib.suppress(OSError):  # another process deleted it
                status = path.stat()
                if path.suffix == _SUFFIX:
                    files.append((status.st_mtime, status.st_size, path))
                elif path.suffix == ".tmp" and time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink()  # of a process that was killed
        left = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if left <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            left -= size


def _make_private(folder: Path) -> None:
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = part.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise OSError("others may write there, and could have the run execute any code; chmod go-w it")
    if not os.access(folder, os.W_OK):
        raise OSError("it cannot be written")


def _machine() -> str:
    """Programs for a CPU have instructions that another may lack, so each kind has its own folder."""
    if jax.default_backend() != "cpu":
        return jax.default_backend()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    kind = "|".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))))
    return f"cpu-{hashlib.sha256(f'{platform.machine()}|{kind}'.encode()).hexdigest()[:8]}"
