"""What a command writes: its answer on stdout, remarks on stderr, and files in addition."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Protocol

from jshard._files import check_may_write
from jshard._live import fitted
from jshard.errors import RunError, ShardingError, printable


class Report(Protocol):
    """The result of a command; as a text it is what `jshard.inspect.tables.show` prints."""

    def to_json(self) -> str:
        """Returns everything as JSON text."""
        ...


def answer(report: Report, *, json: bool) -> None:
    """Prints the result of a command, as readable text or as JSON only."""
    from jshard.inspect.tables import show  # here: it imports rich, which a launcher does not need

    if json:
        print(report.to_json())
    else:
        show(report)


def remark(line: str) -> None:
    """Prints a line on stderr, separate from the answer."""
    # A remark may contain names from files that anyone may have written.
    print(fitted(printable(line, keep="\n\t"), sys.stderr), file=sys.stderr)


def check_writable(path: Path | None, *, option: str) -> None:
    """Refuses a file that could not be written, before the work for it: its folder is missing, or not the user's."""
    if path is None:
        return
    folder = path.absolute().parent
    if not os.path.lexists(folder):
        why = f"there is no folder {folder}."
        raise _not_writable(path, option, why=why, do=f"mkdir -p {shlex.quote(str(path.parent))}")
    if path.is_dir():
        do = f"{option} {shlex.quote(str(path / 'report'))}  # a file in it"
        raise _not_writable(path, option, why="it is a folder.", do=do)
    try:
        check_may_write(path)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}."
        do = f"{option} FILE, in a folder that you may write."
        raise _not_writable(path, option, why=why, do=do) from None


def _not_writable(path: Path, option: str, *, why: str, do: str) -> ShardingError:
    return ShardingError("The file cannot be written.", where=f"{option} {path}", why=why, do=do)


def write(path: Path, text: str) -> None:
    """Writes a file in addition to the answer, and reports it."""
    try:
        path.write_text(text)
    except OSError as error:
        raise RunError(
            "The file could not be written.",
            where=str(path),
            why=f"{error.strerror}.",
            do="make room, or name a file on another disk.",
        ) from error
    remark(f"written: {path}")
