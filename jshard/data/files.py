"""Finds and checks files of text and documents, and reads them all at once."""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
import warnings
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from jshard._paths import expanded
from jshard.data.documents import JSON_LINES, documents_of, is_dataset
from jshard.data.loader import DataError
from jshard.errors import FourPartError

_SHOWN = 10
# How to convert unreadable files into readable ones; {} is the file.
_INSTEAD = {
    ".zst": "zstd -d {}",
    ".xz": "xz -dk {}",
    ".bz2": "bzip2 -dk {}",
    ".gz": "gunzip -k {}",
    ".zip": "unzip {}",
    ".tar": "tar -xf {}",
    ".tgz": "tar -xf {}",
    ".arrow": "give the folder written by `save_to_disk`, not a file in it: {}",
    ".npz": "python -c 'import numpy as np, sys; f = np.load(sys.argv[1]); np.save(\"tokens.npy\", f[f.files[0]])' {}",
}
# Parts of the standard library that are not installed everywhere (packagers split them off), or that
# are tables and tests rather than readable code.
_STDLIB_SKIPPED = frozenset(
    "__pycache__ distutils encodings ensurepip idlelib lib2to3 pydoc_data site-packages "
    "dist-packages test tests tkinter turtledemo turtle.py".split()
)


def weighted(paths: Sequence[str | Path]) -> tuple[list[Path], list[Fraction]]:
    """Returns the files in `PATH` or `PATH=WEIGHT`, and their weights; no weights if no file has one."""
    files: list[Path] = []
    weights: list[Fraction] = []
    for argument in map(str, paths):
        # The last "=": the name of a file may contain others.
        path, _, text = argument.rpartition("=")
        # Not `Path.exists`, which raises for names that are too long.
        if not path or os.path.exists(expanded(argument)):
            files.append(expanded(argument))
            continue
        weight = _weight(text)
        if weight <= 0:
            raise DataError(
                "A weight cannot be read.",
                where=f"--data {argument}",
                why=f"{text!r} is not a number above 0.",
                do=f"--data {shlex.quote(f'{path}=0.5')}  # or =1/3",
            )
        weights.append(weight)
        files.append(expanded(path))
    if weights and len(weights) < len(files):
        corrected = [shlex.quote(f"{file}=1") for file in files]
        raise DataError(
            "Only some of the data have a weight.",
            where=f"--data {shlex.join(map(str, paths))}",
            why=f"{len(weights)} of {len(files)} have one: the share of the others is unknown.",
            do=f"--data {' '.join(corrected)}",
        )
    return files, weights


# 1e999999999 is a number, too, but takes all memory as a fraction.
_WEIGHT = re.compile(r"[0-9]{0,20}(\.[0-9]{0,20})?(/[0-9]{1,20}|[eE][-+]?[0-9]{1,2})?", re.ASCII)


def _weight(text: str) -> Fraction:
    """Returns the number in a weight; 0 if it is none."""
    if not _WEIGHT.fullmatch(text.strip()):
        return Fraction(0)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)


# ---- texts


def read_texts(paths: Sequence[Path], text_key: str, *, end: bytes = b"") -> tuple[dict[str, bytes], str]:
    """Returns texts by name, and the word for one of them; one `DataError` lists all unusable paths.

    A file of documents gives one text per document, named by the path and a number; any other file is one text. Both
    are in the order of their relative paths.

    Args:
        paths: files and folders.
        text_key: key or column of a document's text.
        end: what the tokenizer takes for the end of a text; a document that contains it is an error.
    """
    texts: dict[str, list[bytes]] = {}
    places: set[Path] = set()
    unusable: dict[Path, str] = {}
    skipped: dict[Path, str] = {}
    for root in paths:
        reader = _TextReader(root, text_key)
        reader.read()
        for path, documents in reader.texts.items():
            _check_end(path, documents, end)
        if not reader.has_text:
            unusable |= reader.problems or {root: _why_empty(root)}
            continue
        skipped |= reader.problems
        for path, documents in reader.texts.items():
            place = path.resolve()
            if place not in places:  # a file given twice is read once
                texts[_name(path, root, texts)] = documents
                places.add(place)
    # All at once, so that a user corrects a list of paths once.
    if unusable:
        raise _unusable_error(unusable)
    if skipped:
        _warn_of(skipped)
    flat = _flat(texts)
    noun = "file" if len(flat) == len(texts) else "document"
    return flat, noun


def _why_empty(root: Path) -> str:
    """Returns the reason why a path without problems has no text."""
    if root.is_dir():
        return "a folder without text (hidden files are left out)"
    return "empty"


def _unusable_error(unusable: Mapping[Path, str]) -> DataError:
    """Returns the error for paths without any text, by the reasons."""
    commands = []
    for path in unusable:
        if path.suffix in _INSTEAD and path.is_file():
            commands.append(_INSTEAD[path.suffix].format(shlex.quote(str(path))))
    iconv = "iconv -f latin1 -t utf-8 OLD > NEW turns other text into UTF-8."
    return DataError(
        f"{len(unusable)} of the given files and folders cannot be trained on.",
        where=_with_reasons(unusable),
        why=f"--data takes text in UTF-8, {', '.join(JSON_LINES)}, .parquet, .bin, .npy, folders of them, and of "
        f"Hugging Face datasets; seen from {Path.cwd()}.",
        do="\n".join(commands) or f"correct or remove those paths; {iconv}",
    )


def _warn_of(skipped: Mapping[Path, str]) -> None:
    """Warns of files without text, beside others that have some."""
    lines = [f"{len(skipped)} file(s) are skipped:", *_with_reasons(skipped)[:_SHOWN]]
    num_more = len(skipped) - _SHOWN
    if num_more > 0:
        lines.append(f"... and {num_more} more")
    # The line to blame is the one that calls `load_text`, four functions up.
    warnings.warn("\n  ".join(lines), stacklevel=5)


def _with_reasons(reasons: Mapping[Path, str]) -> list[str]:
    return [f"{path}: {why}" for path, why in reasons.items()]


def _flat(texts: Mapping[str, list[bytes]]) -> dict[str, bytes]:
    """Returns each document under a name of its own, in the order of the files' names."""
    flat = {}
    for name, documents in sorted(texts.items()):
        for number, text in enumerate(documents):
            # A number only where there are several: a file of one text keeps its name.
            key = name if len(documents) == 1 else f"{name}:{number}"
            flat[key] = text
    return flat


class _TextReader:
    """Reads the texts at or below a path.

    Attributes:
        texts: the texts of each readable file, in the order of their paths.
        problems: the reasons why other files and folders have none.
    """

    def __init__(self, root: Path, text_key: str) -> None:
        self.texts: dict[Path, list[bytes]] = {}
        self.problems: dict[Path, str] = {}
        self._root = root
        self._text_key = text_key
        self._is_dataset = is_dataset(root)

    @property
    def has_text(self) -> bool:
        """Whether any text was read that is not empty."""
        return any(any(texts) for texts in self.texts.values())

    def read(self) -> None:
        """Reads all files. What cannot be read is a problem, not an error: the others may be enough."""
        # A dataset is a folder that is read as one file.
        paths = [self._root]
        if self._root.is_dir() and not self._is_dataset:
            paths = self._visible_files()
        for path in paths:
            self._read_file(path)

    def _visible_files(self) -> list[Path]:
        """Returns the files below the root that are not hidden, in an order that is the same on all machines."""
        files = []
        for folder, subfolders, names in os.walk(self._root, onerror=self._note_unreadable):
            # In place: `os.walk` continues with what is left in this list, in its order.
            subfolders[:] = self._folders_to_read(folder, subfolders)
            files += [Path(folder, name) for name in _visible(names)]
        return files

    def _folders_to_read(self, folder: str, names: Sequence[str]) -> list[str]:
        """Returns the visible folders in a folder, sorted; links to folders are problems."""
        folders = []
        for name in _visible(names):
            if os.path.islink(os.path.join(folder, name)):
                self.problems[Path(folder, name)] = "a link to a folder, not followed; give the folder itself"
            else:
                folders.append(name)
        return folders

    def _read_file(self, path: Path) -> None:
        try:
            # A FIFO would wait for ever, and a device never end.
            if path.exists() and not path.is_file() and not self._is_dataset:
                raise ValueError("neither a file nor a folder")
            self.texts[path] = _texts_of(path, self._text_key)
        except OSError as error:
            self._note_unreadable(error)
        except FourPartError:  # some are a ValueError, too, and they say more
            raise
        except (ValueError, EOFError, zlib.error) as error:
            self.problems[path] = f"not text: {error}"

    def _note_unreadable(self, error: OSError) -> None:
        path = Path(error.filename or self._root)
        self.problems[path] = (error.strerror or repr(error)).lower()


def _visible(names: Sequence[str]) -> list[str]:
    """Returns the names that are not hidden, sorted: the order of a folder's entries differs between machines."""
    return sorted(name for name in names if not name.startswith("."))


def _texts_of(path: Path, text_key: str) -> list[bytes]:
    """Returns the documents of a file that are not empty; of a file of another kind, its text."""
    documents = documents_of(path, text_key)
    if documents is None:
        return [_text_of(path)]
    return [document for document in documents if document]


def _check_end(path: Path, texts: Sequence[bytes], end: bytes) -> None:
    """Raises a `DataError` for a text that contains its own end: the model would learn two texts in its place."""
    if not end:
        return
    places = []
    for number, text in enumerate(texts, 1):
        if end in text:
            places.append(f"{path}: document {number}")
    if not places:
        return
    do = "--tokenizer tokenizer.json  # its end of text is not a byte; or remove the zero bytes from the texts."
    if path.name.lower().endswith(JSON_LINES) and path.suffix.lower() != ".gz":
        clean = shlex.quote(str(path.with_stem(f"{path.stem}-clean")))
        do = f"sed 's/\\\\u0000//g' {shlex.quote(str(path))} > {clean}\nor {do}"
    raise DataError(
        "A document has zero bytes.",
        where=places,
        why="as tokens are bytes, a zero byte is the end of a text.",
        do=do,
    )


def _text_of(path: Path) -> bytes:
    """Returns the contents of a file; raises `ValueError` if they are no text."""
    text = path.read_bytes()
    text.decode()
    if b"\0" in text:
        raise ValueError(f"a zero byte in position {text.index(0)}")
    return text


def _name(path: Path, root: Path, taken: Mapping[str, object]) -> str:
    """Returns the name of a file's text: its path below the root, or its whole path if that name is taken."""
    # The last part of the given path stays in the name, so that two folders may contain equal names.
    root_name = Path(os.path.abspath(root)).name
    name = Path(root_name, path.relative_to(root)).as_posix()
    return path.as_posix() if name in taken else name


def stdlib_texts() -> dict[str, bytes]:
    """Returns the sources of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # site-packages may be very large
        for name in files:
            path = Path(folder, name)
            is_generated = name.startswith("_sysconfigdata")  # different on each machine
            if path.suffix == ".py" and name not in _STDLIB_SKIPPED and not is_generated:
                texts[path.relative_to(root).as_posix()] = path.read_bytes()
    return dict(sorted(texts.items()))
