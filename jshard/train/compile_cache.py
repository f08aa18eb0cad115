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

import jax

from jshard import _compat
from jshard._paths import expanded
from jshard.train.user_key import user_key

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
    key = user_key()
    if key is None:
        jax.config.update(_FOLDER, None)
        return "compiled programs are not stored: there is no home folder for the key that they are signed with"
    # Users who share a folder do not delete the programs of each other as damaged.
    user = hmac.digest(key, b"folder of programs", "sha256").hex()[:8]
    folder = (beside / ".compiled" if given == "beside" else expanded(given)) / f"{_machine()}-{user}"
    try:
        _make_private(folder)
    except OSError as error:
        jax.config.update(_FOLDER, None)
        return f"compiled programs are not stored: {folder}: {error.strerror or error}"
    if os.environ.get(_LEAST_S.upper()) is None:
        jax.config.update(_LEAST_S, _WORTH_S)
    _compat.use_program_cache(ProgramCache(folder, key), str(folder))
    return f"compiled programs: {folder}"


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
        checksum, program = data[:_SUM_BYTES], data[_SUM_BYTES:]
        is_whole = hmac.compare_digest(checksum, self._checksum(key, program))
        with contextlib.suppress(OSError):
            if is_whole:
                os.utime(path)  # last used now
            else:
                path.unlink()
        return program if is_whole else None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program. A failing disk does not end the run."""
        path, draft = self._path / f"{key}{_SUFFIX}", self._path / f".{key}.{os.getpid()}.{platform.node()}.tmp"
        with contextlib.suppress(OSError):
            try:
                with draft.open("wb") as file:
                    file.write(self._checksum(key, value) + value)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            self._make_room()

    def _checksum(self, key: str, program: bytes) -> bytes:
        """Signs a program and its key: under another name it would run in place of another program."""
        return hmac.digest(self._user_key, key.encode() + b"\0" + program, "sha256")

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
