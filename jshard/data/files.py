"""Finds, checks and reads files of text, and of documents with one text each."""

from __future__ import annotations

import difflib
import gzip
import os
import re
import shlex
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar

from jshard import _files
from jshard._parsing import FormError, checked, parse_json, shown
from jshard._paths import expanded
from jshard.data.loader import DataError
from jshard.errors import FourPartError, MissingExtraError

_SHOWN = 10
_STRINGS = ("str", "string", "large_string")  # type names in Python and Arrow
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
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


# ---- texts, and documents

_MOST_LINE_BYTES = 256 << 20  # of a file of documents; more is one line by mistake, or made to take all memory


class _DatasetFile(TypedDict):
    filename: str


class _SavedState(TypedDict):
    """state.json of a folder written by `save_to_disk`."""

    _data_files: list[_DatasetFile]


class _SavedSplits(TypedDict):
    """dataset_dict.json of such a folder with several splits."""

    splits: list[str]


_Saved = TypeVar("_Saved", _SavedState, _SavedSplits)


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
        where=[f"{path}: {why}" for path, why in unusable.items()],
        why=f"--data takes text in UTF-8, {', '.join(_JSON_LINES)}, .parquet, .bin, .npy, folders of them, and of "
        f"Hugging Face datasets; seen from {Path.cwd()}.",
        do="\n".join(commands) or f"correct or remove those paths; {iconv}",
    )


def _warn_of(skipped: Mapping[Path, str]) -> None:
    """Warns of files without text, beside others that have some."""
    lines = [f"\n  {path}: {why}" for path, why in skipped.items()]
    num_more = len(lines) - _SHOWN
    more = f"\n  ... and {num_more} more" if num_more > 0 else ""
    # The line to blame is the one that calls `load_text`, four functions up.
    warnings.warn(f"{len(skipped)} file(s) are skipped:{''.join(lines[:_SHOWN])}{more}", stacklevel=5)


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
        for folder, folders, names in os.walk(self._root, onerror=self._note_unreadable):
            visible = sorted(name for name in folders if not name.startswith("."))
            links = [name for name in visible if os.path.islink(os.path.join(folder, name))]
            for name in links:
                self.problems[Path(folder, name)] = "a link to a folder, not followed; give the folder itself"
            folders[:] = [name for name in visible if name not in links]  # `os.walk` continues with these
            files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        return files

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


def _texts_of(path: Path, text_key: str) -> list[bytes]:
    """Returns the documents of a file that are not empty; of a file of another kind, its text."""
    documents = _documents(path, text_key)
    if documents is None:
        return [_text_of(path)]
    return [document for document in documents if document]


def _check_end(path: Path, texts: Sequence[bytes], end: bytes) -> None:
    """Raises a `DataError` for a text that contains its own end: the model would learn two texts in its place."""
    if not end:
        return
    numbers = [number for number, text in enumerate(texts, 1) if end in text]
    if not numbers:
        return
    do = "--tokenizer tokenizer.json  # its end of text is not a byte; or remove the zero bytes from the texts."
    if path.name.lower().endswith(_JSON_LINES) and path.suffix.lower() != ".gz":
        clean = shlex.quote(str(path.with_stem(f"{path.stem}-clean")))
        do = f"sed 's/\\\\u0000//g' {shlex.quote(str(path))} > {clean}\nor {do}"
    raise DataError(
        "A document has zero bytes.",
        where=[f"{path}: document {number}" for number in numbers],
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


def _name(path: Path, root: Path, taken: Mapping[str, Any]) -> str:
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


def is_dataset(path: Path) -> bool:
    """Returns whether it is a folder written by Hugging Face's `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _documents(path: Path, text_key: str) -> Iterator[bytes] | None:
    """Returns the texts of a file or a dataset of documents; None for another file."""
    if path.name.lower().endswith(_JSON_LINES):
        return _json_lines(path, text_key)
    if path.suffix.lower() == ".parquet":
        return _column(path, _parquet(path, text_key), text_key)
    if is_dataset(path):
        return _column(path, _dataset(path), text_key)
    return None


def _json_lines(path: Path, text_key: str) -> Iterator[bytes]:
    """Yields the texts of a file with a JSON object on each line."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            entry = _json_object(path, number, line)
            text = entry.get(text_key)
            if not isinstance(text, str):
                kinds = {key: type(value).__name__ for key, value in entry.items()}
                raise _no_text(f"{path}, line {number}", text_key, kinds)
            yield text.encode(errors="replace")


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Returns the object on a line."""
    try:
        entry = parse_json(line)
    except FormError as error:
        raise _no_document(path, number, f"{error}.") from None
    if not isinstance(entry, dict):
        raise _no_document(path, number, f"it is not a JSON object, but a {type(entry).__name__}.")
    return entry


def _no_document(path: Path, number: int, why: str) -> DataError:
    return DataError(
        "A line cannot be read as a document.",
        where=f"{path}, line {number}",
        why=why,
        do=f"sed -n {number}p {shlex.quote(str(path))}  # shows the line",
    )


def _lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Yields the lines of a file; raises for one that is too long, before it takes more memory."""
    while True:
        line = file.readline(_MOST_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > _MOST_LINE_BYTES:
            raise ValueError(f"a line has more than {_MOST_LINE_BYTES >> 20} MiB")
        yield line


def _parquet(path: Path, text_key: str) -> Iterator[Any]:
    """Yields tables of at most some thousand rows; the first has all columns but no rows."""
    file = _pyarrow(path).parquet.ParquetFile(path)
    yield file.schema_arrow.empty_table()
    yield from file.iter_batches(columns=[text_key])


def _dataset(path: Path) -> Iterator[Any]:
    """Yields the same for a folder written by `save_to_disk`; of several splits, the one to train on."""
    if (path / "dataset_dict.json").is_file():
        path = _split_to_train_on(path)
    names = [file["filename"] for file in _saved(path / "state.json", _SavedState)["_data_files"]]
    outside = [name for name in names if not _files.is_inside(name)]
    if outside:
        raise _damaged(path / "state.json", f"its file {shown(outside[0])} is not in the folder.")
    pyarrow = _pyarrow(path)
    for name in names:
        # Read, and not mapped: the texts are copied anyway, and a mapped file that is cut off ends the process.
        with pyarrow.OSFile(str(path / name)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield stream.schema.empty_table()
            yield from stream


def _split_to_train_on(path: Path) -> Path:
    """Returns the folder of the split `train`."""
    splits = _saved(path / "dataset_dict.json", _SavedSplits)["splits"]
    if "train" in splits:
        return path / "train"
    do = "datasets.load_from_disk(path)  # shows what it has; save the split to train on by itself"
    if splits:
        do = f"--data {shlex.quote(str(path / splits[0]))}"
    raise DataError(
        "The dataset has no split to train on.",
        where=str(path),
        why=f"its splits are {', '.join(splits) or 'none'}; only 'train' is chosen automatically.",
        do=do,
    )


def _saved(path: Path, kind: type[_Saved]) -> _Saved:
    """Returns the contents of a JSON file of a saved dataset."""
    try:
        return checked(_files.read_json(path), kind)
    except OSError as error:
        raise _damaged(path, f"{(error.strerror or repr(error)).lower()}.") from error
    except ValueError as error:
        raise _damaged(path, f"{error}.") from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        "The dataset cannot be read.",
        where=str(path),
        why=why,
        do="write the dataset again: dataset.save_to_disk(path)",
    )


def _column(path: Path, tables: Iterable[Any], text_key: str) -> Iterator[bytes]:
    """Yields the texts of tables.

    Each is checked first: pyarrow would read beyond the memory of a damaged one.
    """
    arrow_error = _pyarrow(path).ArrowException
    try:
        for table in tables:
            names = [field.name for field in table.schema]
            kinds = {field.name: str(field.type) for field in table.schema}
            if kinds.get(text_key) not in _STRINGS:
                raise _no_text(str(path), text_key, kinds)
            if names.count(text_key) > 1:
                raise ValueError(f"it has {names.count(text_key)} columns {text_key!r}")
            table.validate(full=True)
            for text in table.column(text_key).to_pylist():
                yield (text or "").encode(errors="replace")
    except (arrow_error, MemoryError) as error:
        first = next(iter(str(error).splitlines()), "no reason given")
        raise ValueError(f"{type(error).__name__}: {first}") from error


def _no_text(where: str, text_key: str, kinds: Mapping[str, str]) -> DataError:
    """Returns the error for a document without a text; `kinds` are the types of what it has, by key."""
    strings = [key for key, kind in kinds.items() if kind in _STRINGS]
    closest = difflib.get_close_matches(text_key, strings, n=1, cutoff=0.0)
    why = f"it has {', '.join(map(repr, kinds)) or 'nothing'}, but no {text_key!r}."
    if text_key in kinds:
        why = f"its {text_key!r} is of type {kinds[text_key]}."
    do = "write the texts as strings; token ids as .npy or .bin."
    if closest:
        do = f"--text-key {shlex.quote(closest[0])}"
    return DataError("A document has no text of that name.", where=where, why=why, do=do)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "Parquet and Hugging Face datasets need a package that is not installed.",
            where=str(path),
            why=f"{error}.",
            do="pip install 'jshard[arrow]'",
        ) from error
    return pyarrow
