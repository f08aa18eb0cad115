"""The history of a series: a line per save and restore, `history.jsonl`, written by the first process."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from jshard._files import open_in_place
from jshard._parsing import parse_json
from jshard._types import Json
from jshard.checkpoint.buckets import Place, contents
from jshard.checkpoint.errors import CheckpointWarning
from jshard.errors import UnsafeFileError

NAME = "history.jsonl"
_MOST_BYTES = 256 << 20
_MOST_LINES = 100_000  # of saves and restores; a file of that size may have a hundred million


def append(folder: Path, record: Mapping[str, Json]) -> None:
    """Adds a line to the history of a series; a save does not fail because its line cannot be written."""
    line = json.dumps(record) + "\n"
    try:
        descriptor = open_in_place(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except UnsafeFileError as error:
        warnings.warn(
            f"the history has no line for step {record.get('step')}: {error}", CheckpointWarning, stacklevel=2
        )
        return
    # A full disk: the line is lost, and the save is not.
    except OSError:
        return
    with contextlib.suppress(OSError), os.fdopen(descriptor, "a+b") as file:
        if file.tell():
            # Only reading moves: with O_APPEND each write goes to the end.
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash truncated the last line
                line = f"\n{line}"
        file.write(line.encode())


def warn(text: str) -> None:
    """Warns about a history; the default of those that read one."""
    warnings.warn(text, CheckpointWarning, stacklevel=4)


def read(folder: Place, say: Callable[[str], object] = warn) -> list[dict[str, Json]]:
    """Returns the history of a series, oldest first; damaged lines, as a crash leaves, are left out.

    Args:
        folder: of the series.
        say: called once if lines are left out.

    Raises:
        UnsafeFileError: it is not a regular file, or is too large.
    """
    try:
        content = contents(folder / NAME, _MOST_BYTES)
    except UnsafeFileError:
        raise
    except OSError:
        return []
    lines = content.split(b"\n")
    num_older = max(0, len(lines) - _MOST_LINES)
    if num_older:
        say(f"{folder / NAME}: the oldest {num_older} lines are left out")
    records = []
    damaged = []  # numbers of lines
    for number, line in enumerate(lines[num_older:], num_older + 1):
        if not line.strip():
            continue
        record = _record_of(line)
        if record is None:
            damaged.append(number)
        else:
            records.append(record)
    if damaged:
        shown = ", ".join(map(str, damaged[:3]))
        if len(damaged) > 3:
            shown += f" and {len(damaged) - 3} more"
        say(f"{folder / NAME}: damaged lines are left out: {shown}")
    return records


def _record_of(line: bytes) -> dict[str, Json] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
