"""Compiled programs on disk, beside the runs, so that a restarted run does not compile again.

JAX's own cache writes its files in place: a process that is killed leaves half a program, which is never replaced.
Here a file is written atomically and has a checksum; a damaged one is deleted and compiled again.

Anyone who can write a program decides what the run executes. So the folder is private, and the checksum is made with a
key of the user: programs that came with a folder from elsewhere are not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import platform
import re
import stat
import time
from pathlib import Path
from typing import NamedTuple

import jax

from jshard import _compat
from jshard._paths import expanded
from jshard.train.user_key import user_key

_SUFFIX = ".program"
_MOST_BYTES = 4 << 30
_CHECKSUM_BYTES = 32  # of SHA-256
_FOLDER_OPTION = "jax_compilation_cache_dir"
_LEAST_S_OPTION = "jax_persistent_cache_min_compile_time_secs"
_ABANDONED_S = 3600.0  # age of a draft whose process is thought to be gone
_WORTH_S = 0.1  # programs that take longer are stored; JAX's own limit is one second


def keep_programs(beside: Path, place: str) -> str:
    """Stores compiled programs from now on, in all processes of a run; returns a line that says where, or why not.

    Args:
        beside: the folder of the runs.
        place: a folder; "none"; or "beside": JAX_COMPILATION_CACHE_DIR, which JAX manages itself, or else
            `.compiled` beside the runs.
    """
    folder_of_jax = jax.config.values[_FOLDER_OPTION]
    if place == "beside" and folder_of_jax:
        return f"compiled programs: {folder_of_jax} ({_FOLDER_OPTION.upper()})"
    if place == "none":
        return _store_nothing("compiled programs are not stored (--compile-cache none)")
    key = user_key()
    if key is None:
        return _store_nothing(
            "compiled programs are not stored: there is no home folder for the key that they are signed with"
        )
    parent = beside / ".compiled" if place == "beside" else expanded(place)
    # Users who share a folder do not delete the programs of each other as damaged.
    user = hmac.digest(key, b"folder of programs", "sha256").hex()[:8]
    folder = parent / f"{_machine()}-{user}"
    try:
        _make_private(folder)
    except OSError as error:
        return _store_nothing(f"compiled programs are not stored: {folder}: {error.strerror or error}")
    # A limit that the user has set stays.
    if os.environ.get(_LEAST_S_OPTION.upper()) is None:
        jax.config.update(_LEAST_S_OPTION, _WORTH_S)
    _compat.use_program_cache(ProgramCache(folder, key), str(folder))
    return f"compiled programs: {folder}"


def _store_nothing(line: str) -> str:
    jax.config.update(_FOLDER_OPTION, None)
    return line


class _ProgramFile(NamedTuple):
    """A stored program; sorted, the least recently used is first."""

    used_s: float
    size_bytes: int
    path: Path


class ProgramCache:
    """The interface of JAX's persistent cache, with atomic files that several processes may use at once.

    Args:
        folder: the folder of the files.
        user_key: the secret that programs are signed with.
        most_bytes: above this size the least recently used files are deleted.
    """

    def __init__(self, folder: Path, user_key: bytes, *, most_bytes: int = _MOST_BYTES) -> None:
        self._path = folder  # the name under which JAX looks for it
        self._user_key = user_key
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """Returns the program of a key; None if it is missing, damaged, or from somebody else."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        checksum = data[:_CHECKSUM_BYTES]
        program = data[_CHECKSUM_BYTES:]
        if not hmac.compare_digest(checksum, self._checksum(key, program)):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # last used now
        return program

    def put(self, key: str, value: bytes) -> None:
        """Stores a program. A failing disk does not end the run."""
        path = self._path / f"{key}{_SUFFIX}"
        # The name is that of this process, and of its host: several may store the same program at once.
        draft = self._path / f".{key}.{os.getpid()}.{platform.node()}.tmp"
        with contextlib.suppress(OSError):
            try:
                with draft.open("wb") as file:
                    file.write(self._checksum(key, value) + value)
                    file.flush()
                    os.fsync(file.fileno())
                # Only when all of it is on disk: readers see the whole program or none.
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            self._make_room()

    def _checksum(self, key: str, program: bytes) -> bytes:
        """Signs a program and its key: under another name it would run in place of another program."""
        return hmac.digest(self._user_key, key.encode() + b"\0" + program, "sha256")

    def _make_room(self) -> None:
        """Deletes the least recently used programs if there are too many; the newest stays in any case."""
        files = self._files()
        total_bytes = sum(file.size_bytes for file in files)
        for file in sorted(files)[:-1]:
            if total_bytes <= self._most_bytes:
                return
            file.path.unlink(missing_ok=True)
            total_bytes -= file.size_bytes

    def _files(self) -> list[_ProgramFile]:
        """Returns the stored programs; deletes the drafts of processes that were killed."""
        files = []
        for path in self._path.iterdir():
            with contextlib.suppress(OSError):  # another process deleted it
                status = path.stat()
                if path.suffix == _SUFFIX:
                    files.append(_ProgramFile(status.st_mtime, status.st_size, path))
                elif path.suffix == ".tmp" and time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink()
        return files


def _make_private(folder: Path) -> None:
    """Creates a folder into which only its user may write, in one of the same kind.

    Raises:
        OSError: others may write there, or this user may not.
    """
    # The parent, too: who may write there could put another folder in the place of this one.
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = part.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise OSError("others may write there, and could have the run execute any code; chmod go-w it")
    if not os.access(folder, os.W_OK):
        raise OSError("it cannot be written")


def _machine() -> str:
    """Names the kind of device; for a CPU with its features: a program may have instructions that another lacks."""
    backend = jax.default_backend()
    if backend != "cpu":
        return backend
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    # The names of these lines differ: "flags" on x86, "Features" on Arm.
    features = set(re.findall(r"^(?:model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))
    kind = "|".join(sorted(features))
    digest = hashlib.sha256(f"{platform.machine()}|{kind}".encode()).hexdigest()
    return f"cpu-{digest[:8]}"
