"""Writes safetensors as Hugging Face's libraries expect them, with one array in memory at a time."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jshard._files import open_new
from jshard._paths import expanded
from jshard.checkpoint.formats.safetensors import DTYPES, INDEX, SUFFIX
from jshard.checkpoint.formats.source import ArraySource, check_export, finished_together, whole
from jshard.checkpoint.manifest import StoredLeaf

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    folder: str | Path,
    source: ArraySource,
    *,
    max_shard_bytes: float = 5e9,
    beside: Mapping[str, str] = types.MappingProxyType({}),
    stem: str = "model",
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> list[Path]:
    """Writes arrays as `model.safetensors` or, if they do not fit in one file, as several files with an index.

    One array is in memory at a time; one larger than the file size gets its own file. Existing files are never
    replaced. `beside` has the texts of further files, by name. `stem` is another name for "model", as adapters have.
    """
    folder = expanded(folder).absolute()
    files = _files_in_the_way(folder, stem, beside)
    check_export("safetensors", files, source, list(source.leaves), _DTYPE_NAMES)
    shards = _shards(source.leaves, max_shard_bytes)
    shard_names = _shard_names(stem, len(shards))
    texts = dict(beside)
    if len(shards) > 1:
        # A reader takes the index as the checkpoint: it comes after the files that it names.
        texts = {INDEX: _index_text(source.leaves, shards, shard_names), **beside}
    names = [*shard_names, *texts]
    with finished_together("safetensors", folder, names) as drafts:
        draft_of = dict(zip(names, drafts, strict=True))
        for name, shard in zip(shard_names, shards, strict=True):
            with open_new(draft_of[name]) as stream:
                _write_file(stream, source, shard, on_written)
        for name, text in texts.items():
            with open_new(draft_of[name]) as stream:
                stream.write(text.encode())
    return [folder / name for name in names]


def _files_in_the_way(folder: Path, stem: str, beside: Iterable[str]) -> list[Path]:
    """Returns the files that may not exist: those of a safetensors checkpoint, and these further ones."""
    # Also of other names: older shards beside new ones would make another checkpoint of both.
    files = [*folder.glob(f"{stem}*{SUFFIX}"), *folder.glob(INDEX)]
    for name in beside:
        files.append(folder / name)
    return sorted(files)


def _shards(leaves: Mapping[str, StoredLeaf], max_shard_bytes: float) -> list[list[str]]:
    """Returns the arrays of each file, in order, divided as huggingface_hub does."""
    shards: list[list[str]] = [[]]
    num_bytes = 0  # of the last shard
    for name, leaf in leaves.items():
        if shards[-1] and num_bytes + leaf.nbytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += leaf.nbytes

    def widest_first(name: str) -> tuple[int, str]:
        dtype = np.dtype(leaves[name].dtype)
        return -dtype.itemsize, name

    for shard in shards:
        # Within a file the widest elements come first, as in the package, so that every array is aligned.
        shard.sort(key=widest_first)
    return shards


def _shard_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [stem + SUFFIX]
    names = []
    for number in range(1, count + 1):
        names.append(f"{stem}-{number:05}-of-{count:05}{SUFFIX}")
    return names


def _index_text(leaves: Mapping[str, StoredLeaf], shards: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """Returns the index of arrays in several files, as JSON."""
    file_of: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        file_of |= dict.fromkeys(shard, name)
    metadata = {"total_size": sum(leaf.nbytes for leaf in leaves.values())}
    index = {"metadata": metadata, "weight_map": file_of}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _write_file(stream: BinaryIO, source: ArraySource, names: list[str], on_written: Callable[[int], object]) -> None:
    leaves = {name: source.leaves[name] for name in names}
    header = _header(leaves)
    length = len(header).to_bytes(8, "little")
    stream.write(length + header)
    for name, leaf in leaves.items():
        array = source.read(name, whole(leaf))
        # The header is written: an array of another size would shift all that follow it.
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{name} was declared as {leaf.shape} {leaf.dtype} but is {array.shape} {array.dtype}")
        elements = np.ascontiguousarray(array).reshape(-1)
        stream.write(elements.view(np.uint8).data)
        on_written(array.nbytes)


def _header(leaves: Mapping[str, StoredLeaf]) -> bytes:
    """Returns the description of the arrays of a file, which follow it in this order."""
    # transformers refuses files that do not name the framework of their arrays
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, leaf in leaves.items():
        start = end
        end += leaf.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[np.dtype(leaf.dtype)],
            "shape": list(leaf.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    num_spaces = -len(header) % 8  # aligns the data
    return header + b" " * num_spaces
