"""Hugging Face's safetensors, read box by box, and written with one array in memory at a time."""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.draft import flush, mend
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.formats.source import (
    Box,
    FileRegion,
    WholeLeaf,
    damaged,
    local_path,
    read_region,
    row_major,
    stored_array,
)
from jshard.checkpoint.manifest import StoredLeaf
from jshard.errors import RunError, printable

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

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
    """The arrays of a safetensors file, or of a folder of them.

    Args:
        path: a file; or a folder with an index as Hugging Face writes it, or with safetensors files alone.

    Raises:
        CheckpointError: there are no such files, or some hold what cannot be read as whole arrays.
        RunError: a file is damaged, or one that the index names is missing.

    Example:
        >>> source = SafetensorsSource("gpt2/model.safetensors")
        >>> source.read("wte.weight", (slice(0, 8), slice(None)))
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path, "safetensors")
        files, self._index = _files(self.path)
        self._regions = _all_regions(files)
        if self._index is not None:
            _check_index(self.path / INDEX, self._index, self._regions)
        self.leaves: Mapping[str, StoredLeaf] = {
            name: stored_array(region.shape, region.dtype) for name, region in self._regions.items()
        }
        self.values: Mapping[str, Any] = {}  # the format has arrays alone

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of an array, as a new array; threads may call it at the same time."""
        return read_region(self._regions[name], box)


def _files(path: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files to read, and the index if there is one: file by name of the array."""
    if path.is_file():
        return [path], None
    if (path / INDEX).is_file():
        index = _read_index(path / INDEX)
        return [path / file for file in sorted(set(index.values()))], index
    files = sorted(path.glob("*" + SUFFIX))
    if not files:
        raise CheckpointError(
            "There is no safetensors checkpoint to read.",
            where=str(path),
            why=f"the folder holds neither {INDEX} nor a file that ends in {SUFFIX}.",
            do="give the path of such a file, or of the folder it is in.",
        )
    return files, None


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is no index with a weight_map: {type(error).__name__}: {error}") from error
    names = index.values() if isinstance(index, dict) else [None]
    odd = [str(file) for file in names if not isinstance(file, str) or Path(file).name != file or file in ("", "..")]
    if odd:
        raise damaged(path, f"its weight_map names what is no file beside it: {odd[0]}")
    gone = sorted({file for file in index.values() if not (path.parent / file).is_file()})
    if gone:
        raise damaged(path, f"files that it names are missing: {', '.join(gone)}")
    return index


def _check_index(path: Path, index: Mapping[str, str], regions: Mapping[str, FileRegion]) -> None:
    wrong = [name for name, file in index.items() if name not in regions or regions[name].path.name != file]
    if wrong:
        raise damaged(path, f"{len(wrong)} arrays are not where it says, the first is {wrong[0]} in {index[wrong[0]]}.")


def _all_regions(files: Iterable[Path]) -> dict[str, FileRegion]:
    regions: dict[str, FileRegion] = {}
    for file in files:
        header, start = _header(file)
        if _may_hold_parts(file, header.pop("__metadata__", None) or {}):
            raise _in_parts(file, "it says that its arrays are what one process held.")
        for name, region in _regions(file, header, start).items():
            if name in regions:
                raise _in_parts(file, f"{printable(name)} is in {regions[name].path.name} too.")
            regions[name] = region
    return regions


def _may_hold_parts(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether arrays of a file by PyTorch may be parts: its name says so, or one of them begins at another place."""
    if _PARTS_KEY not in metadata:
        return False
    try:
        parts = json.loads(metadata[_PARTS_KEY]).values()
        moved = any(any(part["saved_offsets"]) for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its {_PARTS_KEY} cannot be read: {type(error).__name__}: {error}") from error
    return moved or path.name.startswith("shard-")


def _in_parts(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint holds parts of arrays, or two of a name.",
        where=str(path),
        why=f"{why}\nPyTorch's HuggingFaceStorageWriter leaves such files with save_distributed=True.",
        do="save with enable_consolidation=True, or join the files with\n"
        "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files;\n"
        "if two checkpoints are in the folder, give the path of one file.",
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where its data begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise damaged(path, f"its header would have {length} bytes; the file has {size}.")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise damaged(path, "its header is no table of arrays.")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _regions(path: Path, header: Mapping[str, Any], start: int) -> dict[str, FileRegion]:
    unknown = [f"{name}  {entry.get('dtype')}" for name, entry in header.items() if _dtype(entry) is None]
    if unknown:
        raise CheckpointError(
            f"The checkpoint holds {len(unknown)} arrays of a dtype that cannot be read.",
            where=[str(path), *unknown],
            why=f"known are {', '.join(DTYPES)}.",
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
    """The value if it is a list of (so many) sizes; else one of -1, which fits nothing."""
    good = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return value if good and count in (None, len(value)) else [-1] * (count or 1)


def _fits(shape: list[int], dtype: np.dtype, begin: int, end: int, size: int) -> bool:
    return 0 <= begin <= end <= size and end - begin == math.prod(shape) * dtype.itemsize


def _check_cover(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """Arrays are end to end, as the format demands: nothing overlaps, nothing is left over."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise damaged(path, f"{name} begins at byte {begin} of the data; the array before it ends at {at}.")
        at = end
    if at != size:
        raise damaged(path, f"the data has {size} bytes; the arrays in the header have {at}.")


# Writes safetensors as Hugging Face's libraries expect them, with one array in memory at a time.

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
    names = [f"model-{number + 1:05}-of-{len(shards):05}" for number in range(len(shards))]
    files = [folder / (name + SUFFIX) for name in (names if len(shards) > 1 else ["model"])]
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
            table = {"metadata": {"total_size": sum(map(_bytes, leaves))}, "weight_map": index}
            unfinished[files[-1]].write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
            flush(unfinished[files[-1]])
        for file in files:
            os.rename(unfinished[file], file)
        flush(folder)
    except OSError as error:
        raise RunError(
            "The safetensors checkpoint could not be written.",
            where=str(folder),
            why=reason(error),
            do=mend(reason(error)),
        ) from error
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
