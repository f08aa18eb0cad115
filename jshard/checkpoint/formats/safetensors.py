"""Reads Hugging Face's safetensors box by box."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import jax.numpy as jnp
import numpy as np

from jshard._files import open_regular, read_json
from jshard._parsing import parse_json
from jshard._text import counted
from jshard._types import Json
from jshard.checkpoint.errors import CheckpointError, DamagedError
from jshard.checkpoint.formats.source import (
    Box,
    FileRegion,
    ReadableValue,
    are_sizes,
    damaged,
    existing,
    read_region,
    row_major,
    stored_arrays,
)
from jshard.checkpoint.manifest import StoredLeaf, is_shape
from jshard.errors import UnsafeFileError, printable

SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + ".index.json"
INDEX = "model" + INDEX_SUFFIX

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}

_MAX_HEADER_BYTES = 100_000_000  # as in the package
_PARTS_KEY = "DCP_SHARDING_INFO"  # in the metadata of files by PyTorch's HuggingFaceStorageWriter


def is_safetensors(path: Path) -> bool:
    """Returns whether a path is a safetensors file or index, or a folder with one."""
    if path.is_file():
        return path.name.endswith((SUFFIX, INDEX_SUFFIX))
    has_file = any(path.glob("*" + SUFFIX))
    return has_file or any(path.glob("*" + INDEX_SUFFIX))


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
        self.values: Mapping[str, ReadableValue] = {}
        self.notes: Sequence[str] = ()
        index_file = _index_file(self.path)
        if index_file is None:
            self._regions = _all_regions(_files_without_index(self.path))
            _check_numbers(self.path, self._regions.values())
        else:
            index = read_index(index_file)
            # A user who names the index has chosen: the files beside it need no remark.
            if index_file != self.path:
                self.notes = _notes_on_unindexed_files(index_file, index)
            files = sorted(set(index.values()))  # each once, though it holds many arrays
            self._regions = _all_regions(index_file.parent / file for file in files)
            check_index(index_file, index, self._regions)
        self.leaves: Mapping[str, StoredLeaf] = stored_arrays(self._regions)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of an array, as a new array; thread-safe."""
        return read_region(self._regions[name], box)


def _index_file(path: Path) -> Path | None:
    """Returns the index that decides what is read; None if there is none."""
    if path.is_file():
        return path if path.name.endswith(INDEX_SUFFIX) else None
    if (path / INDEX).is_file():
        return path / INDEX
    indexes = sorted(path.glob("*" + INDEX_SUFFIX))  # as of diffusers: diffusion_pytorch_model.safetensors.index.json
    if len(indexes) > 1:
        raise _several_checkpoints(indexes, "each index names a checkpoint of its own.")
    return indexes[0] if indexes else None


def _files_without_index(path: Path) -> list[Path]:
    """Returns the files to read where no index names them."""
    if path.is_file():
        return [path]
    # Sorted, as the order of names in a folder is up to the file system.
    files = sorted(path.glob("*" + SUFFIX))
    if not files:
        raise CheckpointError(
            "There is no safetensors checkpoint to read.",
            where=str(path),
            why=f"the folder holds neither {INDEX} nor a file that ends in {SUFFIX}.",
            do="give the path of such a file, or of its folder.",
        )
    return files


def _several_checkpoints(paths: Iterable[Path], why: str) -> CheckpointError:
    places = [str(path) for path in paths]
    return CheckpointError(
        "The folder holds several checkpoints.",
        where=places,
        why=why,
        do="\n".join(["give the path of the one to read:", *places]),
    )


# Such as model-00001-of-00003.safetensors. At most nine digits: Python refuses to read numbers of thousands.
_NUMBERED = re.compile(r"(?P<stem>.*)-0*(?P<number>\d{1,9})-of-0*(?P<count>\d{1,9})" + re.escape(SUFFIX))


def _check_numbers(path: Path, regions: Iterable[FileRegion]) -> None:
    """Raises `RunError` if files are missing by their numbers; without an index, only names can show that."""
    if path.is_file():
        return  # the user chose this one file of several
    numbers: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for region in regions:
        match = _NUMBERED.fullmatch(region.path.name)
        if match:
            numbers[match["stem"], int(match["count"])].add(int(match["number"]))
    for (stem, count), present in numbers.items():
        names = []
        for number in _first_missing(present, count, most=3):
            names.append(f"{stem}-{number:05}-of-{count:05}{SUFFIX}")
        if names:
            raise damaged(path, f"there: {len(present)} of {counted(count, 'file')}; missing: {', '.join(names)}")


def _first_missing(present: Collection[int], count: int, most: int) -> list[int]:
    """Returns the first of the numbers that are not there, of so many consecutive ones."""
    first = 0 if 0 in present else 1  # writers count from 0 or from 1
    missing = []
    # The count comes from a file name and may be a billion: the loop ends with the first few.
    for number in range(first, first + count):
        if number not in present:
            missing.append(number)
        if len(missing) == most:
            break
    return missing


def _notes_on_unindexed_files(index_file: Path, index: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a note on files beside an index that it does not name; raises if one has the index's name."""
    indexed = set(index.values())
    unindexed = []
    for path in sorted(index_file.parent.glob("*" + SUFFIX)):
        if path.name not in indexed:
            unindexed.append(path)
    same_name = index_file.with_name(index_file.name.removesuffix(INDEX_SUFFIX) + SUFFIX)
    if same_name in unindexed:
        # Transformers would read the single file. Which of the two is old cannot be known.
        why = f"{same_name.name} is not among the files that {index_file.name} names."
        raise _several_checkpoints([same_name, index_file], why)
    if not unindexed:
        return ()
    names = ", ".join(path.name for path in unindexed[:3])
    if len(unindexed) > 3:
        names += f" and {len(unindexed) - 3} more"
    return (printable(f"read are the files that {index_file.name} names, and not {names}."),)


def check_index(index_file: Path, index: Mapping[str, str], regions: Mapping[str, FileRegion]) -> None:
    """Raises `RunError` unless the files hold exactly the arrays that the index names, each in its file."""
    lost = []
    moved = []
    for name, file in index.items():
        if name not in regions:
            lost.append(f"{name}  is not in {file}")
        elif regions[name].path.name != file:
            moved.append(f"{name}  is in {regions[name].path.name}, and not in {file}")
    unnamed = []
    for name, region in regions.items():
        if name not in index:
            unnamed.append(f"{name}  is in {region.path.name}, and not in the index")
    lines = [*lost, *moved, *unnamed]
    if not lines:
        return
    do = "download or copy the whole folder again."
    if not lost:
        do += f"\nOr, if the files are right, read them without the index: rm {index_file}"
    raise DamagedError(
        f"The files of the checkpoint do not fit its index: {counted(len(lines), 'array differs', 'arrays differ')}.",
        where=[str(index_file), *lines],
        why="the index and the files are of different checkpoints, or a file is damaged.",
        do=do,
    )


def read_index(path: Path) -> Mapping[str, str]:
    """Reads the index beside the files; returns the file of each array."""
    try:
        index = read_json(path, _MAX_HEADER_BYTES)["weight_map"]
    except UnsafeFileError:  # a `ValueError`, too
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it is not an index with a weight_map: {type(error).__name__}: {error}") from error
    files = index.values() if isinstance(index, dict) else [None]  # None is no file name
    for file in files:
        if not _is_file_name(file):
            raise damaged(path, f"its weight_map names something that is not a file beside it: {file}")
    if not index:
        raise damaged(path, "its weight_map names no array.")
    missing = []
    for file in sorted(set(index.values())):  # each once: a look at a network file system takes long
        if not os.path.isfile(path.parent / file):
            missing.append(file)
    if missing:
        raise damaged(path, f"files that it names are missing: {', '.join(missing)}")
    return index


def _is_file_name(name: object) -> bool:
    """Returns whether this names a file in the same folder: an index of somebody else may lead anywhere."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")


def _all_regions(files: Iterable[Path]) -> dict[str, FileRegion]:
    regions: dict[str, FileRegion] = {}
    for file in files:
        header = _Header.read(file)
        if _may_hold_parts(file, header.metadata):
            raise _in_parts(file, "its metadata marks its arrays as one process's parts.")
        for name, region in _regions(file, header).items():
            # The last one must not win: of an array in parts it would be one part, taken for the whole.
            if name in regions:
                raise _in_parts(file, f"{printable(name)} is in {regions[name].path.name} too.")
            regions[name] = region
    return regions


def _may_hold_parts(path: Path, metadata: Mapping[str, Json]) -> bool:
    """Returns whether a PyTorch file may hold parts of arrays: by its name, or because one starts at an offset."""
    if _PARTS_KEY not in metadata:
        return False
    try:
        parts = parse_json(metadata[_PARTS_KEY]).values()
        is_offset = any(any(part["saved_offsets"]) for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its {_PARTS_KEY} cannot be read: {type(error).__name__}: {error}") from error
    # The first process's parts start at 0 like whole arrays; only the name of its file gives them away.
    return is_offset or path.name.startswith("shard-")


def _in_parts(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint holds parts of arrays, or two arrays of one name.",
        where=str(path),
        why=f"{why}\nPyTorch's HuggingFaceStorageWriter writes such files with save_distributed=True.",
        do="save with enable_consolidation=True, or join the files with\n"
        "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files;\n"
        "if two checkpoints are in the folder, give the path of one file.",
    )


@dataclasses.dataclass(frozen=True)
class _Header:
    """The header of a file, whose entries are not checked."""

    arrays: Mapping[str, Mapping[str, Json]]
    metadata: Mapping[str, Json]
    data_begin: int  # the offset of the data in the file

    @classmethod
    def read(cls, path: Path) -> _Header:
        """Reads the header of a file; raises `RunError` if it has none."""
        with io.BufferedReader(open_regular(path)) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            # The length may be anything in a damaged file: it is compared before memory is taken for the header.
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise damaged(path, f"its header would have {length} bytes; the file has {size}.")
            text = file.read(length)
        try:
            header = parse_json(text)
        except ValueError as error:
            raise damaged(path, f"its header is not JSON: {error}") from error
        if not _is_table(header):
            raise damaged(path, "its header is not a table of arrays.")
        metadata = header.pop("__metadata__", {})  # the one entry that is no array
        return cls(header, metadata, 8 + length)


def _is_table(header: object) -> TypeGuard[dict[str, dict[str, Json]]]:
    """Returns whether the JSON of a header has an entry for each name, whatever is in it."""
    return isinstance(header, dict) and all(isinstance(entry, dict) for entry in header.values())


@dataclasses.dataclass(frozen=True, order=True)
class _Span:
    """The bytes of an array in the data of a file."""

    start: int
    end: int
    name: str


def _regions(path: Path, header: _Header) -> dict[str, FileRegion]:
    """Returns the arrays of a file; raises an error unless each is known, and together they are all of its data."""
    # All of them in one error, before the first array is looked at.
    unknown = []
    for name, entry in header.arrays.items():
        if _dtype(entry) is None:
            unknown.append(f"{name}  {entry.get('dtype')}")
    if unknown:
        raise CheckpointError(
            f"The checkpoint holds {counted(len(unknown), 'array')} of a dtype that cannot be read.",
            where=[str(path), *unknown],
            why=f"known dtypes: {', '.join(DTYPES)}.",
            do="convert them with the library that wrote them.",
        )
    data_bytes = path.stat().st_size - header.data_begin
    regions = {}
    spans = []
    for name, entry in header.arrays.items():
        dtype = _dtype(entry)
        shape = entry.get("shape")
        offsets = entry.get("data_offsets")
        span = _span(name, offsets)
        if dtype is None or not are_sizes(shape) or not _fits(shape, dtype, span, data_bytes):
            stated = f"{entry['dtype']} {shape} at {offsets}"
            raise damaged(path, f"{name} cannot be {stated}: the data has {data_bytes} bytes.")
        spans.append(span)
        strides = row_major(shape, dtype.itemsize)
        regions[name] = FileRegion(path, header.data_begin + span.start, tuple(shape), dtype, strides)
    # Sorted by start and end: an array without elements comes before the one that begins there.
    _check_cover(path, sorted(spans), data_bytes)
    return regions


def _dtype(entry: Mapping[str, Json]) -> np.dtype | None:
    name = entry.get("dtype")
    return DTYPES.get(name) if isinstance(name, str) else None


def _span(name: str, offsets: object) -> _Span:
    """Returns the bytes at these offsets; for anything else than two sizes one that fits nothing."""
    if not are_sizes(offsets) or len(offsets) != 2:
        return _Span(-1, -1, name)
    start, end = offsets
    return _Span(start, end, name)


def _fits(shape: Sequence[int], dtype: np.dtype, span: _Span, data_bytes: int) -> bool:
    """Returns whether an array has as many bytes as its span, which is inside of the data."""
    is_inside = 0 <= span.start <= span.end <= data_bytes
    return is_inside and is_shape(tuple(shape)) and span.end - span.start == math.prod(shape) * dtype.itemsize


def _check_cover(path: Path, spans: Sequence[_Span], data_bytes: int) -> None:
    """Checks that arrays are contiguous, as the format requires: no overlap, no gaps."""
    end = 0
    for span in spans:
        if span.start != end:
            raise damaged(
                path, f"{span.name} begins at byte {span.start} of the data; the array before it ends at {end}."
            )
        end = span.end
    if end != data_bytes:
        raise damaged(path, f"the data has {data_bytes} bytes; the arrays in the header have {end}.")
