"""Hugging Face's safetensors, read box by box, and written with one array in memory at a time."""

from __future__ import annotations

import collections
import io
import itertools
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from jshard._files import open_new, open_regular, read_json
from jshard._parsing import parse_json
from jshard._paths import expanded
from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError, DamagedError
from jshard.checkpoint.formats.source import (
    ArraySource,
    Box,
    FileRegion,
    check_export,
    damaged,
    existing,
    finished_together,
    read_region,
    row_major,
    stored_array,
    whole,
)
from jshard.checkpoint.manifest import StoredLeaf, is_shape
from jshard.errors import UnsafeFileError, printable

SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + ".index.json"
INDEX = "model" + INDEX_SUFFIX

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    **{
        f"{'I' if kind == 'int' else 'U'}{n}": np.dtype(f"{kind}{n}")
        for kind in ("int", "uint")
        for n in (8, 16, 32, 64)
    },
    **{f"F{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}

_MOST_HEADER_BYTES = 100_000_000  # as in the package
_PARTS_KEY = "DCP_SHARDING_INFO"


class SafetensorsSource:
    """The arrays of a safetensors file, of the files that an index names, or of a folder.

    In a folder with an index, the index decides which files are read.

    Attributes:
        path: as given.
        leaves: every array by its name.
        values: none: the format only has arrays.
        notes: what a reader should know, such as files beside an index that are not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "safetensors")
        index_file = _index_file(self.path)
        self.notes: tuple[str, ...] = ()
        if index_file is None:
            self._regions = _all_regions(_files_without_index(self.path))
            _check_numbers(self.path, {region.path.name for region in self._regions.values()})
        else:
            index = read_index(index_file)
            if index_file != self.path:
                self.notes = _notes_on_files_beside(index_file, index)
            self._regions = _all_regions(index_file.parent / file for file in sorted(set(index.values())))
            check_index(index_file, index, self._regions)
        self.leaves: Mapping[str, StoredLeaf] = {
            name: stored_array(region.shape, region.dtype) for name, region in self._regions.items()
        }
        self.values: Mapping[str, Any] = {}  # the format only has arrays

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, as a new array; thread-safe."""
        return read_region(self._regions[name], box)


def _index_file(path: Path) -> Path | None:
    """The index that decides what is read; None if there is none."""
    if path.is_file():
        return path if path.name.endswith(INDEX_SUFFIX) else None
    if (path / INDEX).is_file():
        return path / INDEX
    others = sorted(path.glob("*" + INDEX_SUFFIX))  # as of diffusers: diffusion_pytorch_model.safetensors.index.json
    if len(others) > 1:
        raise _several(others, "each index names a checkpoint of its own.")
    return others[0] if others else None


def _files_without_index(path: Path) -> list[Path]:
    """The files to read where no index names them."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*" + SUFFIX))
    if not files:
        raise CheckpointError(
            "There is no safetensors checkpoint to read.",
            where=str(path),
            why=f"the folder holds neither {INDEX} nor a file that ends in {SUFFIX}.",
            do="give the path of such a file, or of its folder.",
        )
    return files


def _several(paths: Iterable[Path], why: str) -> CheckpointError:
    places = [str(path) for path in paths]
    return CheckpointError(
        "The folder holds several checkpoints.",
        where=places,
        why=why,
        do="\n".join(["give the path of the one to read:", *places]),
    )


_NUMBERED = re.compile(r"(.*)-0*(\d{1,9})-of-0*(\d{1,9})" + re.escape(SUFFIX))


def _check_numbers(path: Path, files: Iterable[str]) -> None:
    """Raises `RunError` if files are missing by their numbers; without an index, only names can show that."""
    if path.is_file():
        return  # one file was asked for
    numbers: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for file in files:
        if match := _NUMBERED.fullmatch(file):
            numbers[match[1], int(match[3])].add(int(match[2]))
    for (stem, count), present in numbers.items():
        first = 0 if 0 in present else 1
        missing = (number for number in range(first, first + count) if number not in present)
        names = [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in itertools.islice(missing, 3)]
        if names:
            raise damaged(path, f"there: {len(present)} of {counted(count, 'file')}; missing: {', '.join(names)}")


def _notes_on_files_beside(index_file: Path, index: Mapping[str, str]) -> tuple[str, ...]:
    """Names the files beside an index that it does not name; raises `CheckpointError` if one has the index's name."""
    beside = sorted(path for path in index_file.parent.glob("*" + SUFFIX) if path.name not in index.values())
    same_name = index_file.with_name(index_file.name.removesuffix(INDEX_SUFFIX) + SUFFIX)
    if same_name in beside:
        # Transformers would read the single file. Which of the two is old cannot be known.
        why = f"{same_name.name} is not among the files that {index_file.name} names."
        raise _several([same_name, index_file], why)
    if not beside:
        return ()
    names = ", ".join(path.name for path in beside[:3]) + (f" and {len(beside) - 3} more" if len(beside) > 3 else "")
    return (printable(f"read are the files that {index_file.name} names, and not {names}."),)


def check_index(index_file: Path, index: Mapping[str, str], regions: Mapping[str, FileRegion]) -> None:
    """Raises `RunError` unless the files hold exactly the arrays that the index names, each in its file."""
    lost = [f"{name}  is not in {file}" for name, file in index.items() if name not in regions]
    moved = [
        f"{name}  is in {regions[name].path.name}, and not in {file}"
        for name, file in index.items()
        if name in regions and regions[name].path.name != file
    ]
    unnamed = [
        f"{name}  is in {region.path.name}, and not in the index"
        for name, region in regions.items()
        if name not in index
    ]
    if not lost and not moved and not unnamed:
        return
    do = "download or copy the whole folder again."
    if not lost:
        do += f"\nOr, if the files are right, read them without the index: rm {index_file}"
    differing = counted(len(lost) + len(moved) + len(unnamed), "array differs", "arrays differ")
    raise DamagedError(
        f"The files of the checkpoint do not fit its index: {differing}.",
        where=[str(index_file), *lost, *moved, *unnamed],
        why="the index and the files are of different checkpoints, or a file is damaged.",
        do=do,
    )


def read_index(path: Path) -> Mapping[str, str]:
    """The file of each array, by the index beside the files."""
    try:
        index = read_json(path, _MOST_HEADER_BYTES)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UnsafeFileError):
            raise
        raise damaged(path, f"it is not an index with a weight_map: {type(error).__name__}: {error}") from error
    names = index.values() if isinstance(index, dict) else [None]
    odd = [str(file) for file in names if not isinstance(file, str) or Path(file).name != file or file in ("", "..")]
    if odd:
        raise damaged(path, f"its weight_map names something that is not a file beside it: {odd[0]}")
    if not index:
        raise damaged(path, "its weight_map names no array.")
    gone = sorted({file for file in index.values() if not os.path.isfile(path.parent / file)})
    if gone:
        raise damaged(path, f"files that it names are missing: {', '.join(gone)}")
    return index


def _all_regions(files: Iterable[Path]) -> dict[str, FileRegion]:
    regions: dict[str, FileRegion] = {}
    for file in files:
        header, start = _header(file)
        if _may_hold_parts(file, header.pop("__metadata__", None) or {}):
            raise _in_parts(file, "its metadata marks its arrays as one process's parts.")
        for name, region in _regions(file, header, start).items():
            if name in regions:
                raise _in_parts(file, f"{printable(name)} is in {regions[name].path.name} too.")
            regions[name] = region
    return regions


def _may_hold_parts(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether a PyTorch file may hold parts of arrays: by its name, or because one starts at a nonzero offset."""
    if _PARTS_KEY not in metadata:
        return False
    try:
        parts = parse_json(metadata[_PARTS_KEY]).values()
        moved = any(any(part["saved_offsets"]) for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its {_PARTS_KEY} cannot be read: {type(error).__name__}: {error}") from error
    return moved or path.name.startswith("shard-")


def _in_parts(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint holds parts of arrays, or two arrays of one name.",
        where=str(path),
        why=f"{why}\nPyTorch's HuggingFaceStorageWriter writes such files with save_distributed=True.",
        do="save with enable_consolidation=True, or join the files with\n"
        "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files;\n"
        "if two checkpoints are in the folder, give the path of one file.",
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the offset of its data."""
    with io.BufferedReader(open_regular(path)) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise damaged(path, f"its header would have {length} bytes; the file has {size}.")
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise damaged(path, "its header is not a table of arrays.")
    return header, 8 + length


def _regions(path: Path, header: Mapping[str, Any], start: int) -> dict[str, FileRegion]:
    unknown = [f"{name}  {entry.get('dtype')}" for name, entry in header.items() if _dtype(entry) is None]
    if unknown:
        raise CheckpointError(
            f"The checkpoint holds {counted(len(unknown), 'array')} of a dtype that cannot be read.",
            where=[str(path), *unknown],
            why=f"known dtypes: {', '.join(DTYPES)}.",
            do="convert them with the library that wrote them.",
        )
    size = path.stat().st_size - start
    regions, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _dtype(entry), entry.get("shape"), *_numbers(entry.get("data_offsets"), 2)
        if dtype is None or _numbers(shape) != shape or not _fits(shape, dtype, begin, end, size):
            stated = f"{entry['dtype']} {shape} at {entry.get('data_offsets')}"
            raise damaged(path, f"{name} cannot be {stated}: the data has {size} bytes.")
        spans.append((begin, end, name))
        regions[name] = FileRegion(path, start + begin, tuple(shape), dtype, row_major(shape, dtype.itemsize))
    _check_cover(path, sorted(spans), size)
    return regions


def _dtype(entry: Mapping[str, Any]) -> np.dtype | None:
    name = entry.get("dtype")
    return DTYPES.get(name) if isinstance(name, str) else None


def _numbers(value: Any, count: int | None = None) -> list[int]:
    """The value if it is a list of sizes (of this length); else one of -1, which fits nothing."""
    good = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return value if good and count in (None, len(value)) else [-1] * (count or 1)


def _fits(shape: list[int], dtype: np.dtype, begin: int, end: int, size: int) -> bool:
    is_inside = 0 <= begin <= end <= size
    return is_inside and is_shape(tuple(shape)) and end - begin == math.prod(shape) * dtype.itemsize


def _check_cover(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """Checks that arrays are contiguous, as the format requires: no overlap, no gaps."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise damaged(path, f"{name} begins at byte {begin} of the data; the array before it ends at {at}.")
        at = end
    if at != size:
        raise damaged(path, f"the data has {size} bytes; the arrays in the header have {at}.")


# Writes safetensors as Hugging Face's libraries expect them, with one array in memory at a time.

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    folder: str | Path,
    source: ArraySource,
    *,
    max_shard_bytes: float = 5e9,
    beside: Mapping[str, str] = types.MappingProxyType({}),
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> list[Path]:
    """Writes arrays as `model.safetensors` or, if they do not fit in one file, as several files with an index.

    One array is in memory at a time; one larger than the file size gets its own file. Existing files are never
    replaced. `beside` has the texts of further files, by name.
    """
    folder, leaves = expanded(folder).absolute(), source.leaves
    there = [*folder.glob("model*" + SUFFIX), *folder.glob(INDEX), *filter(Path.exists, map(folder.joinpath, beside))]
    check_export("safetensors", sorted(there), source, list(leaves), _NAMES)
    shards = _shards(leaves, max_shard_bytes)
    parts = [f"model-{number + 1:05}-of-{len(shards):05}" for number in range(len(shards))]
    names = [part + SUFFIX for part in (parts if len(shards) > 1 else ["model"])]
    index = {leaf: name for shard, name in zip(shards, names, strict=True) for leaf in shard}
    table = {"metadata": {"total_size": sum(leaf.nbytes for leaf in leaves.values())}, "weight_map": index}
    texts = {INDEX: json.dumps(table, indent=2, sort_keys=True) + "\n"} if len(shards) > 1 else {}
    texts |= beside
    names += texts
    with finished_together("safetensors", folder, names) as drafts:
        for shard, draft in zip(shards, drafts, strict=False):
            with open_new(draft) as stream:
                _write_file(stream, source, shard, on_written)
        for text, draft in zip(texts.values(), drafts[len(shards) :], strict=True):
            with open_new(draft) as stream:
                stream.write(text.encode())
    return [folder / name for name in names]


def _shards(leaves: Mapping[str, StoredLeaf], max_shard_bytes: float) -> list[list[str]]:
    """The arrays of each file, in order, divided as huggingface_hub does."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, leaf in leaves.items():
        if shards[-1] and filled + leaf.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += leaf.nbytes
    # Within a file the widest elements come first, as in the package, so that every array is aligned.
    return [sorted(shard, key=lambda name: (-np.dtype(leaves[name].dtype).itemsize, name)) for shard in shards]


def _write_file(stream: BinaryIO, source: ArraySource, names: list[str], on_written: Callable[[int], object]) -> None:
    # transformers refuses files that do not name the framework of their arrays
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        leaf = source.leaves[name]
        begin, end = end, end + leaf.nbytes
        header[name] = {
            "dtype": _NAMES[np.dtype(leaf.dtype)],
            "shape": list(leaf.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        leaf = source.leaves[name]
        array = source.read(name, whole(leaf))
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{name} was declared as {leaf.shape} {leaf.dtype} but is {array.shape} {array.dtype}")
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        on_written(array.nbytes)
