"""How much memory of the host is free for this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN_BYTES = 1 << 40


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that could be taken: what the system has, or less where a container or a job has a limit.

    Args:
        root: of the file system that tells it.

    Returns:
        Bytes; a large number where nobody tells.
    """
    return max(0, min((_available(root), *_left_in_groups(root))))


def _available(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return _UNKNOWN_BYTES


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left of the limits of the control groups that this process is in."""
    with contextlib.suppress(OSError):
        top = root / "sys/fs/cgroup"
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                own = (top / kinds / path.lstrip("/")).resolve()
                groups = [group for group in (own, *own.parents) if group.is_relative_to((top / kinds).resolve())]
                for group in groups:
                    yield from _left(group, *(_V1 if kinds else _V2))


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # a group may have no limit: "max"
        left = int((group / limit).read_text()) - int((group / used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            left += int(size) if name == cache else 0  # given back when somebody wants it
        yield left
