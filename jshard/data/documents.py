"""Reads files of documents, which have one text each: JSON lines, Parquet, and datasets of Hugging Face."""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar

from jshard import _files
from jshard._parsing import FormError, checked, parse_json, shown
from jshard._types import Json
from jshard.data.loader import DataError
from jshard.errors import MissingExtraError

ArrowTable = Any
"""A table of pyarrow, or a batch of its rows; pyarrow is optional."""

JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
"""The ends of the names of files with a JSON object on each line."""

_STRINGS = ("str", "string", "large_string")  # type names in Python and Arrow
_MOST_LINE_BYTES = 256 << 20  # more is one line by mistake, or made to take all memory


def is_dataset(path: Path) -> bool:
    """Returns whether it is a folder written by Hugging Face's `save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def documents_of(path: Path, text_key: str) -> Iterator[bytes] | None:
    """Returns the texts of a file or a dataset of documents; None for another file."""
    if path.name.lower().endswith(JSON_LINES):
        return _json_lines(path, text_key)
    if path.suffix.lower() == ".parquet":
        return _column(path, _parquet(path, text_key), text_key)
    if is_dataset(path):
        return _column(path, _dataset(path), text_key)
    return None


@dataclasses.dataclass(frozen=True)
class TableRow:
    """An entry of a file, or a row of a table.

    Attributes:
        where: its place, for an error: the file, and the line or row, from 1.
        values: by key or column.
    """

    where: str
    values: Mapping[str, Json]


def has_rows(path: Path) -> bool:
    """Returns whether a path is a file or a dataset of documents, by its name."""
    return path.name.lower().endswith((*JSON_LINES, ".parquet")) or is_dataset(path)


def rows_of(path: Path) -> Iterator[TableRow] | None:
    """Returns the rows of a file or a dataset of documents, with all their keys; None for another file."""
    if path.name.lower().endswith(JSON_LINES):
        return (TableRow(f"{path}, line {number}", entry) for number, entry in _json_objects(path))
    if path.suffix.lower() == ".parquet":
        return _table_rows(path, _parquet(path, None))
    if is_dataset(path):
        return _table_rows(path, _dataset(path))
    return None


def _table_rows(path: Path, tables: Iterable[ArrowTable]) -> Iterator[TableRow]:
    """Yields the rows of tables. Each table is checked first: pyarrow would read beyond the memory of a damaged one."""
    arrow_error = _pyarrow(path).ArrowException
    number = 0
    try:
        for table in tables:
            table.validate(full=True)
            for values in table.to_pylist():
                number += 1
                yield TableRow(f"{path}, row {number}", values)
    except (arrow_error, MemoryError) as error:
        first = next(iter(str(error).splitlines()), "no reason given")
        raise ValueError(f"{type(error).__name__}: {first}") from error


# ---- JSON lines


def _json_lines(path: Path, text_key: str) -> Iterator[bytes]:
    """Yields the texts of a file with a JSON object on each line."""
    for number, entry in _json_objects(path):
        text = entry.get(text_key)
        if not isinstance(text, str):
            kinds = {key: type(value).__name__ for key, value in entry.items()}
            raise no_text(f"{path}, line {number}", text_key, kinds)
        # JSON may escape half of a surrogate pair, which has no bytes in UTF-8.
        yield text.encode(errors="replace")


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Yields the objects of a file with one on each line, with the number of the line."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if line.strip():
                yield number, _json_object(path, number, line)


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Json]:
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
        # One more than allowed shows that the line is longer.
        line = file.readline(_MOST_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > _MOST_LINE_BYTES:
            raise ValueError(f"a line has more than {_MOST_LINE_BYTES >> 20} MiB")
        yield line


# ---- tables, of Parquet and of datasets


class _DatasetFile(TypedDict):
    filename: str


class _SavedState(TypedDict):
    """state.json of a folder written by `save_to_disk`."""

    _data_files: list[_DatasetFile]


class _SavedSplits(TypedDict):
    """dataset_dict.json of such a folder with several splits."""

    splits: list[str]


_Saved = TypeVar("_Saved", _SavedState, _SavedSplits)


def _parquet(path: Path, text_key: str | None) -> Iterator[ArrowTable]:
    """Yields tables of at most 65,536 rows, the default of pyarrow; the first has all columns but no rows.

    Without a key the others have all columns, too.
    """
    file = _pyarrow(path).parquet.ParquetFile(path)
    # The batches below have the requested column alone: an error on it names all columns.
    yield file.schema_arrow.empty_table()
    yield from file.iter_batches(columns=None if text_key is None else [text_key])


def _dataset(path: Path) -> Iterator[ArrowTable]:
    """Yields the same for a folder written by `save_to_disk`; of several splits, the one to train on."""
    if (path / "dataset_dict.json").is_file():
        path = _split_to_train_on(path)
    names = [file["filename"] for file in _saved(path / "state.json", _SavedState)["_data_files"]]
    # A name such as `../tokens.arrow` would be read beside the folder that the user gave.
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


def _column(path: Path, tables: Iterable[ArrowTable], text_key: str) -> Iterator[bytes]:
    """Yields the texts of tables.

    Each is checked first: pyarrow would read beyond the memory of a damaged one.
    """
    arrow_error = _pyarrow(path).ArrowException
    try:
        for table in tables:
            names = table.schema.names
            kinds = {field.name: str(field.type) for field in table.schema}
            if kinds.get(text_key) not in _STRINGS:
                raise no_text(str(path), text_key, kinds)
            if names.count(text_key) > 1:
                raise ValueError(f"it has {names.count(text_key)} columns {text_key!r}")
            table.validate(full=True)
            for text in table.column(text_key).to_pylist():
                # A null is an empty text, which is left out later.
                yield (text or "").encode(errors="replace")
    except (arrow_error, MemoryError) as error:
        first = next(iter(str(error).splitlines()), "no reason given")
        raise ValueError(f"{type(error).__name__}: {first}") from error


def no_text(where: str, text_key: str, kinds: Mapping[str, str]) -> DataError:
    """Returns the error for a document without a text; `kinds` are the types of what it has, by key."""
    strings = [key for key, kind in kinds.items() if kind in _STRINGS]
    # cutoff=0: the nearest of those with texts, however far it is.
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
