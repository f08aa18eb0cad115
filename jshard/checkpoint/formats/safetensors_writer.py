"""Writes safetensors as Hugging Face's libraries expect them, with one array in memory at a time."""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jshard._errors import RunError
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.failures import reason
from jshard.checkpoint.formats.safetensors import DTYPES, INDEX, SUFFIX
from jshard.checkpoint.formats.source import WholeLeaf

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = {"format": "pt"}  # transformers refuses files that do not say whose layout of arrays they hold


def write_safetensors(
    folder: str | Path,
    leaves: Iterable[WholeLeaf],
    *,
    max_shard_bytes: float = 5e9,
    metadata: Mapping[str, str] = _METADATA,
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> list[Path]:
    """Writes arrays as `model.safetensors`; or, if they do not fit one file, as several with an index.

    Each array is asked for when its turn comes and let go when it is written. The files get their names when all of
    them are on disk, the index last.

    Args:
        folder: where to; it is made if need be. Files that are there already are never replaced.
        leaves: of each array its name, shape, dtype and a function that gets it (`whole_leaves`).
        max_shard_bytes: bytes of arrays per file; an array that is larger has a file of its own.
        metadata: texts for the header of each file.
        on_written: called with the bytes of each array that was written.

    Returns:
        The files.

    Raises:
        CheckpointError: there are such files already, or the format lacks the dtype of some arrays.
        RunError: writing failed; what was written is removed.

    Example:
        >>> write_safetensors("out", whole_leaves(ForeignSource(source, names)))
    """
    folder = Path(folder).absolute()
    leaves = list(leaves)
    _check(folder, leaves)
    shards = _shards(leaves, max_shard_bytes)
    files = [folder / (_file_name(number, len(shards)) + SUFFIX) for number in range(len(shards))]
    index = {leaf[0]: file.name for shard, file in zip(shards, files, strict=True) for leaf in shard}
    unfinished = {file: file.with_name(f".{file.name}.unfinished") for file in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for shard, file in zip(shards, files, strict=True):
            with unfinished[file].open("wb") as stream:
                _write_file(stream, shard, metadata, on_written)
        if len(shards) > 1:
            files.append(folder / INDEX)
            unfinished[files[-1]] = folder / f".{INDEX}.unfinished"
            _write_index(unfinished[files[-1]], leaves, index)
        for file in files:
            os.rename(unfinished[file], file)
        _flush_folder(folder)
    except OSError as error:
        raise _not_written(folder, error) from error
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)
    return files


def _check(folder: Path, leaves: list[WholeLeaf]) -> None:
    there = sorted(folder.glob("model*" + SUFFIX)) + sorted(folder.glob(INDEX))
    if there:
        raise CheckpointError(
            "The safetensors checkpoint cannot be written.",
            where=[str(file) for file in there],
            why="there are such files already.",
            do="name a new folder.",
        )
    unknown = [f"{name}  {dtype}" for name, _, dtype, _ in leaves if np.dtype(dtype) not in _NAMES]
    if unknown:
        raise CheckpointError(
            f"safetensors has no such dtype for {len(unknown)} arrays.",
            where=unknown,
            why=f"it has {', '.join(map(str, _NAMES))}.",
            do="leave them out, or cast them to one of these.",
        )
    count = collections.Counter(leaf[0] for leaf in leaves)
    if twice := [name for name in count if count[name] > 1]:
        raise CheckpointError(
            "Two arrays would have one name.",
            where=twice,
            why="a name stands for one array.",
            do="mend the table of names.",
        )


def _shards(leaves: list[WholeLeaf], max_shard_bytes: float) -> list[list[WholeLeaf]]:
    """The arrays of each file, in their order, as huggingface_hub divides them."""
    shards: list[list[WholeLeaf]] = [[]]
    filled = 0
    for leaf in leaves:
        num_bytes = _bytes(leaf)
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(leaf)
        filled += num_bytes
    # Within a file the widest elements come first, as the package has it: every array is then aligned.
    return [sorted(shard, key=lambda leaf: (-np.dtype(leaf[2]).itemsize, leaf[0])) for shard in shards]


def _bytes(leaf: WholeLeaf) -> int:
    return math.prod(leaf[1]) * np.dtype(leaf[2]).itemsize


def _file_name(number: int, count: int) -> str:
    return "model" if count == 1 else f"model-{number + 1:05}-of-{count:05}"


def _write_file(
    stream: BinaryIO, leaves: list[WholeLeaf], metadata: Mapping[str, str], on_written: Callable[[int], object]
) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for leaf in leaves:
        name, shape, dtype, _ = leaf
        begin, end = end, end + _bytes(leaf)
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for leaf in leaves:
        name, shape, dtype, get = leaf
        array = get()
        if (array.shape, array.dtype) != (tuple(shape), dtype):
            raise ValueError(f"{name} was said to be {shape} {dtype} and is {array.shape} {array.dtype}")
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        on_written(array.nbytes)
    stream.flush()
    os.fsync(stream.fileno())


def _write_index(path: Path, leaves: list[WholeLeaf], index: Mapping[str, str]) -> None:
    table = {"metadata": {"total_size": sum(map(_bytes, leaves))}, "weight_map": index}
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(table, indent=2, sort_keys=True) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError:  # some file systems have nothing to flush for a folder
        pass
    finally:
        os.close(number)


def _not_written(folder: Path, error: OSError) -> RunError:
    return RunError(
        "The safetensors checkpoint could not be written.",
        where=str(folder),
        why=reason(error),
        do="make room, or name a folder on another disk.",
    )
