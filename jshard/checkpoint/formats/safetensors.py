"""Hugging Face's safetensors, read box by box.

The package of that name reads slices too, but not of float8 into numpy (0.8.0), and takes two to four times as long
for them as a mapped file. What it checks of a header is checked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jshard._errors import printable
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, Region, StoredArray, damaged, local_path, read_region, row_major

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
        self.leaves: Mapping[str, StoredArray] = {
            name: StoredArray(region.shape, region.dtype) for name, region in self._regions.items()
        }

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
            do="give the path of such a file, or of the folder it lies in.",
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


def _check_index(path: Path, index: Mapping[str, str], regions: Mapping[str, Region]) -> None:
    wrong = [name for name, file in index.items() if name not in regions or regions[name].path.name != file]
    if wrong:
        raise damaged(path, f"{len(wrong)} arrays are not where it says, the first is {wrong[0]} in {index[wrong[0]]}.")


def _all_regions(files: Iterable[Path]) -> dict[str, Region]:
    regions: dict[str, Region] = {}
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
        "if two checkpoints lie in the folder, give the path of one file.",
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


def _regions(path: Path, header: Mapping[str, Any], start: int) -> dict[str, Region]:
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
        regions[name] = Region(path, start + begin, tuple(shape), dtype, row_major(shape, dtype.itemsize))
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
    """Arrays lie end to end, as the format demands: nothing overlaps, nothing is left over."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise damaged(path, f"{name} begins at byte {begin} of the data; the array before it ends at {at}.")
        at = end
    if at != size:
        raise damaged(path, f"the data has {size} bytes; the arrays in the header have {at}.")
