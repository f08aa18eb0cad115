"""Compiled programs on disk, beside the runs: a run that is started again does not compile them again.

JAX writes into its cache as it goes: a process that is killed leaves half a program, which is never replaced. Here a
file appears whole or not at all, and has a sum; one that is damaged is taken away and compiled again. The folder is
private, since whoever writes there says what the run executes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
import threading
import time
from pathlib import Path

import jax

from jshard import _compat
from jshard._text import human_bytes

_SUFFIX, _MOST_BYTES, _SUM_BYTES = ".program", 4 << 30, 32
_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_DIR, _LEAST_S = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_AFTER_FIRST_S = 3.0
_ABANDONED_S = 3600.0
_WORTH_S = 0.1  # programs that take longer are kept; JAX keeps those of a second


def keep_programs(beside: Path, given: str | None) -> str:
    """Keeps compiled programs from now on, in all processes of a run.

    Args:
        beside: the folder of the runs.
        given: a folder; or "none". By default JAX_COMPILATION_CACHE_DIR, which JAX looks after itself, or `.compiled`
            beside the runs.

    Returns:
        Where they are, in a line; or why they are not kept.
    """
    if given is None and (folder := jax.config.values[_DIR]):
        return f"compiled programs: {folder} ({_VARIABLE})"
    if given == "none":
        jax.config.update(_DIR, None)
        return "compiled programs are not kept (--compile-cache none)"
    folder = (beside / ".compiled" if given is None else Path(given)) / _machine()
    try:
        _make_private(folder)
    except OSError as error:
        jax.config.update(_DIR, None)
        return f"compiled programs are not kept: {folder}: {error.strerror or error}"
    if os.environ.get(_LEAST_S.upper()) is None:
        jax.config.update(_LEAST_S, _WORTH_S)
    cache = ProgramCache(folder)
    _compat.use_program_cache(cache, str(folder))
    return f"compiled programs: {folder} ({cache.describe()})"


class ProgramCache:
    """What JAX's persistent cache asks for, on files that are whole.

    Args:
        folder: of the files.
        most_bytes: when they are more, those that were not used for longest go.
    """

    def __init__(self, folder: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        self._path = folder  # under this name JAX looks for it
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """The program of a key; None if it is not there, or damaged."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data[_SUM_BYTES:]).digest() != data[:_SUM_BYTES]:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used now
        return data[_SUM_BYTES:]

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program, in a thread of its own."""
        # On GPUs all processes have the same: the first one writes it, and the others find it there.
        first_s = 0.0 if jax.process_index() == 0 else _AFTER_FIRST_S
        writer = threading.Thread(target=self.write, args=(key, value, first_s), daemon=True, name="jshard-programs")
        writer.start()
        if first_s == 0.0:
            writer.join()

    def write(self, key: str, value: bytes, after_s: float = 0.0) -> None:
        """Writes a program; several processes may do so at once. A disk that fails is no reason to end a run.

        Args:
            key: of the program.
            value: the program.
            after_s: how long to wait first; what another process has written by then stays.
        """
        time.sleep(after_s)
        if (self._path / f"{key}{_SUFFIX}").exists():
            return
        draft = self._path / f".{key}.{os.getpid()}.{platform.node()}.tmp"
        with contextlib.suppress(OSError):
            try:
                with draft.open("wb") as file:
                    file.write(hashlib.sha256(value).digest() + value)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self._path / f"{key}{_SUFFIX}")
            finally:
                draft.unlink(missing_ok=True)
            self._make_room()

    def describe(self) -> str:
        """How much is there."""
        sizes = [size for _, size, _ in self._files()]
        return f"{len(sizes)} there, {human_bytes(sum(sizes))}" if sizes else "none there yet"

    def _make_room(self) -> None:
        for draft in self._path.glob(".*.tmp"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - draft.stat().st_mtime > _ABANDONED_S:
                    draft.unlink()
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        for _, size, path in files[:-1]:
            if left <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            left -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process made room
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found


def _make_private(folder: Path) -> None:
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = part.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise OSError("others may write there, and could have the run execute what they like; chmod go-w it")
    if not os.access(folder, os.W_OK):
        raise OSError("it cannot be written")


def _machine() -> str:
    """Programs for a CPU hold instructions that another one may not have: a folder for each kind."""
    if jax.default_backend() != "cpu":
        return jax.default_backend()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    kind = "|".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))))
    return f"cpu-{hashlib.sha256(f'{platform.machine()}|{kind}'.encode()).hexdigest()[:8]}"
