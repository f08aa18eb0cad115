"""Text files on disk: which there are, and which of them are text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from jshard.train.data.source import DataError

_SHOWN = 10


def read_texts(paths: Sequence[str | Path]) -> dict[str, bytes]:
    """The texts of files and folders by relative path, in its order.

    Raises:
        DataError: a named file is missing, empty, unreadable or not text, or a folder holds no text; all at once.
    """
    texts: dict[str, bytes] = {}
    places: set[Path] = set()
    bad: dict[Path, str] = {}
    skipped: dict[Path, str] = {}
    for root in map(Path, paths):
        found, problems = _find(root)
        read: dict[Path, bytes] = {}
        for path in found:
            try:
                read[path] = _read_text(path)
            except _NotText as problem:
                problems[path] = str(problem)
        if not any(read.values()):
            bad |= problems or {root: _nothing(root, read)}
            continue
        skipped |= problems
        for path, text in read.items():
            if path.resolve() not in places:  # a file that is given twice is read once
                texts[_name(path, root, texts)] = text
                places.add(path.resolve())
    if bad:
        raise DataError(
            f"{len(bad)} of the files and folders given cannot be trained on.",
            where=[f"{path}: {why}" for path, why in bad.items()],
            why=f"--data takes text files in UTF-8, and folders that hold some; seen from {Path.cwd()}.",
            do="correct or leave out those paths; iconv -f latin1 -t utf-8 OLD > NEW turns other text into UTF-8.",
        )
    if skipped:
        listed = [f"\n  {path}: {why}" for path, why in skipped.items()]
        more = f"\n  ... and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        warnings.warn(f"{len(skipped)} file(s) are left out of the text:{''.join(listed[:_SHOWN])}{more}", stacklevel=3)
    return dict(sorted(texts.items()))


class _NotText(Exception):
    """Why a file cannot be used."""


def _read_text(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise _NotText("neither a file nor a folder" if path.exists() else "a link to nothing")
        text = path.read_bytes()
    except OSError as error:
        raise _NotText(f"unreadable: {(error.strerror or repr(error)).lower()}") from error
    zero = text.find(b"\0")
    if zero >= 0:
        raise _NotText(f"not text: a zero byte at offset {zero}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise _NotText(f"not text: byte {text[error.start]:#04x} at offset {error.start} is not UTF-8") from error
    return text


def _find(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """The files of `root`, and what below it was not looked at."""
    if not os.path.isdir(root):
        missing = not os.path.lexists(root)
        return ([], {root: "no such file or folder"}) if missing else ([root], {})
    files: list[Path] = []
    problems: dict[Path, str] = {}

    def unreadable(error: OSError) -> None:
        problems[Path(error.filename)] = f"unreadable: {(error.strerror or repr(error)).lower()}"

    for folder, folders, names in os.walk(root, onerror=unreadable):
        visible = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in visible if os.path.islink(os.path.join(folder, name))]
        problems |= {Path(folder, name): "a link to a folder, which is not followed; name it itself" for name in links}
        folders[:] = [name for name in visible if name not in links]
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return files, problems


def _nothing(root: Path, read: dict[Path, bytes]) -> str:
    if not os.path.isdir(root):
        return "an empty file"
    return f"a folder of {len(read)} empty file(s)" if read else "a folder without files (hidden ones are left out)"


def _name(path: Path, root: Path, taken: dict[str, bytes]) -> str:
    # The last part of what was given stays in the name, so that two folders may hold equal names.
    name = Path(Path(os.path.abspath(root)).name, path.relative_to(root)).as_posix()
    return path.as_posix() if name in taken else name
