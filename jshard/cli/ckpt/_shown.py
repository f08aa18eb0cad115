"""What the commands of `jshard ckpt` share: the bar of progress, and how sizes and times are written."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block works, if that is a terminal.

    Args:
        what: is done.
        total_bytes: how many there are.

    Yields:
        A function to be told of bytes that are done, by any thread.
    """
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def size(num_bytes: float) -> str:
    """Bytes in a unit that suits them."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} B" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def moment(seconds: float | None) -> str:
    """Seconds since 1970 in local time."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh that split something."""
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "1 device" * bool(mesh)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape without the comma of Python's short tuples."""
    return f"({', '.join(map(str, shape))})"


def as_json(value: Any) -> str:
    """A value as JSON; numbers that are none, which JSON lacks, are null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
