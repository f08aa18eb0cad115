"""The manifest of a checkpoint, `jshard.json`: its contents, and how to detect any loss.

It is written last, when everything else is on disk. It lists every leaf with its logical shape and checksums (see
below), and every file with its size; small files, which describe how to read the large ones, also have a checksum. The
mesh, layout and processes it was saved from are for information only; nothing depends on them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._files import METADATA_BYTES, is_inside, write_text
from jshard._parsing import checked, is_int, parse_json
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, contents
from jshard.checkpoint.errors import CheckpointError, DamagedError
from jshard.errors import UnsafeFileError

NAME = "jshard.json"
FOLDER = "arrays"  # of packed files
MOST_BYTES = 256 << 20  # of the file: it also holds the Python values, such as the position in the data
FORMAT = 2  # 1 has zarr arrays and their checksums
MARK = {"jshard": FORMAT}  # in Orbax's metadata: a checkpoint with the mark but no manifest has lost it

PACKAGES = ("jshard", "jax", "flax", "optax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf as stored in a checkpoint."""

    shape: tuple[int, ...]  # its logical shape; for a random key, that of its key data
    dtype: str  # of its elements; "int", "float" and "str" for Python values, "value" for one of another or unread type
    key: str | None = None  # the kind of a random key, such as "fry"; None for other leaves
    spec: str | None = None  # its sharding when saved, for information
    sums: Sums | None = None  # see below; None for Python values, and if not computed
    chunk: tuple[int, ...] | None = None  # the shape of its stored boxes; None if unknown

    @property
    def is_array(self) -> bool:
        """Whether it is an array rather than a Python value."""
        return self.dtype not in ("int", "float", "str", "value")

    @property
    def kind(self) -> str:
        """Its dtype, or the kind of a random key."""
        return self.dtype if self.key is None else f"key<{self.key}>"

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.is_array else 0

    def on_host(self) -> Any:
        """The target of a read of this leaf to the host."""
        return np.empty(self.shape, self.dtype) if self.is_array else {"int": 0, "float": 0.0}.get(self.dtype, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a manifest."""

    leaves: Mapping[str, StoredLeaf]  # by path
    # size of every jshard file, by its path in the folder; in zarr checkpoints also a checksum of small ones
    files: Mapping[str, tuple[int, int | None]] = dataclasses.field(default_factory=dict)
    step: int | None = None  # number of completed steps; None if not given
    saved_at: float = 0.0  # seconds since 1970
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # axes and their degrees when saved
    processes: int = 1  # number of processes that saved it
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # metrics of the state
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # versions of the packages that wrote it
    # size of every packed file, by name, and the checksum of its index, which covers everything in it
    packed: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # of leaves that are Python values, if the files are packed
    values: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)


def describe(leaf: Any, shape: tuple[int, ...] | None = None) -> StoredLeaf:
    """A leaf as it will be stored, without its checksums; shapes are without padding."""
    if not hasattr(leaf, "shape"):
        return StoredLeaf(shape=(), dtype=type(leaf).__name__)
    key, logical = None, leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = str(leaf.dtype).removeprefix("key<").removesuffix(">")
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    shape = tuple(leaf.shape) if shape is None else shape
    return StoredLeaf(shape=shape, dtype=jnp.dtype(leaf.dtype).name, key=key, spec=_spec(logical))


def write(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest, and returns when it is on disk."""
    write_text(folder / NAME, to_text(manifest))


def to_text(manifest: Manifest) -> str:
    """A manifest as the bytes of its file."""
    body = json.dumps(to_json(manifest))
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "seal": body})
    if len(text) > MOST_BYTES:  # it could not be read again
        sizes = {path: len(value) for path, value in manifest.values.items() if isinstance(value, str)}
        raise CheckpointError(
            "The checkpoint cannot be written: its texts are too large.",
            where=sorted(sizes, key=lambda path: -sizes[path]),
            why=f"the manifest, which holds them, would have {len(text)} bytes of at most {MOST_BYTES}.",
            do="save large texts as arrays: np.frombuffer(text.encode(), np.uint8)",
        )
    return text


def read(folder: Place, *, check: bool = True) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none, as in folders that other programs wrote.

    Without `check`, a manifest with a wrong checksum is accepted if it can be parsed.
    """
    path = folder / NAME
    try:
        held = parse_json(contents(path, MOST_BYTES))
        body = held["seal"]
        if check and zlib.crc32(body.encode()) != held["crc32"]:
            raise ValueError("its checksum is wrong")
        fields = parse_json(body)
        number = fields["format"]
        if number <= FORMAT:
            return from_json(fields)
        writer = fields.get("versions", {}).get("jshard", "?")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except BucketError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.why if isinstance(error, UnsafeFileError) else f"{type(error).__name__}: {error}"
        raise DamagedError(
            "The checkpoint's manifest cannot be read.",
            where=str(path),
            why=why,
            do="restore another checkpoint, or this one without checks: verify=False.",
        ) from error
    raise CheckpointError(
        "The checkpoint is from a newer jshard.",
        where=str(path),
        why=f"its format is {number}, written by jshard {writer}; this jshard reads formats up to {FORMAT}.",
        do="pip install --upgrade jshard",
    )


def damage(folder: Place, manifest: Manifest) -> list[str]:
    """Damaged files of a checkpoint, one line each: missing, truncated or changed.

    Large array files are only checked for size; their values are checked when read.
    """
    listed = folder.objects() if isinstance(folder, BucketPath) else None
    found = []
    for name, (size, crc32) in manifest.files.items():
        try:
            here = (folder / name).stat().st_size if isinstance(folder, Path) else (listed or {}).get(name)
            if here is None:
                raise FileNotFoundError
            if here != size:
                found.append(f"{name}  {here} bytes of {size}")
            elif crc32 is not None and zlib.crc32(contents(folder / name, METADATA_BYTES)) != crc32:
                found.append(f"{name}  its contents have changed")
        except FileNotFoundError:
            found.append(f"{name}  is missing")
        except BucketError:
            raise
        except OSError as error:
            found.append(f"{name}  {error.strerror}")
    return found


def _spec(leaf: Any) -> str | None:
    sharding = getattr(leaf, "sharding", None)
    return spec_text(sharding.spec) if isinstance(sharding, NamedSharding) else None


def spec_text(spec: PartitionSpec) -> str:
    """A readable form of an array's sharding: the mesh axes of each dim."""
    return ", ".join("*".join(axis) if isinstance(axis, tuple) else str(axis or "-") for axis in spec)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON values."""
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    given = {path: vars(leaf) for path, leaf in manifest.leaves.items()}
    leaves = {path: {name: x for name, x in leaf.items() if x is not None} for path, leaf in given.items()}
    return {"format": FORMAT if manifest.packed else 1, **fields, "leaves": leaves}


def from_json(fields: Mapping[str, Any]) -> Manifest:
    """The inverse of `to_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: these are not the fields of a manifest.
    """
    checked(fields, _ShownFields)
    given = _known(Manifest, fields)
    given["leaves"] = {path: _leaf(path, leaf) for path, leaf in fields["leaves"].items()}
    for name in ("files", "packed"):
        given[name] = {file: (size, checksum) for file, (size, checksum) in fields.get(name, {}).items()}
        _check_files(given[name])
    _check_values(given)
    return Manifest(**given)


class _ShownFields(TypedDict, total=False):
    """The fields that nothing depends on, and that commands show."""

    step: int | None
    saved_at: float
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]


_MOST_S = 1e11  # since 1970: later moments have no date
_PYTHON = {"int": int, "float": float, "str": str}
_MOST_DIMS = 32  # numpy's arrays have at most 64, and jax's programs fewer
_MOST_ELEMENTS = 1 << 58  # so that no size in bytes is beyond 64 bits


def _leaf(path: str, fields: Mapping[str, Any]) -> StoredLeaf:
    """A leaf whose size and dtype can be computed with: the checksum of a manifest is not a signature."""
    leaf = StoredLeaf(**_known(StoredLeaf, fields))
    if is_too_deep(path):
        raise ValueError(f"a path has thousands of keys: {path[:100]}")
    if not is_shape(leaf.shape) or not isinstance(leaf.dtype, str):
        raise ValueError(f"{path} has the shape {str(leaf.shape)[:100]} and the dtype {str(leaf.dtype)[:100]}")
    if leaf.is_array and not _is_of_numbers(leaf.dtype):
        raise ValueError(f"{path} has the unknown dtype {leaf.dtype[:100]}")
    if not isinstance(leaf.key, str | None) or not isinstance(leaf.spec, str | None):
        raise ValueError(f"{path} has a kind of key or a sharding that is not a text")
    if leaf.chunk is not None and not (is_shape(leaf.chunk) and len(leaf.chunk) == len(leaf.shape)):
        raise ValueError(f"{path} has the shape {leaf.shape} in chunks of {str(leaf.chunk)[:100]}")
    return leaf


def _is_of_numbers(name: str) -> bool:
    """Whether numpy, with JAX's further dtypes, has a dtype of numbers by this name.

    `np.dtype` also takes lists of fields, pointers to Python objects and texts of any length.
    """
    if not _DTYPE_NAME.fullmatch(name):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and dtype.kind not in "OSUMm" and dtype.itemsize > 0


_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


def is_too_deep(path: str) -> bool:
    """Whether a path has more keys than a state can be deep; time grows with the square of the number."""
    return path.count("/") > _MOST_KEYS


_MOST_KEYS = 1000  # as many levels as Python has frames


def is_shape(shape: Any) -> bool:
    """Whether this is the shape of an array, as a tuple, whose size in bytes can be computed with."""
    if not isinstance(shape, tuple) or len(shape) > _MOST_DIMS:
        return False
    if not all(type(size) is int and size >= 0 for size in shape):
        return False
    return math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS


def _check_files(files: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (size, checksum) in files.items():
        if name and not is_inside(name):  # "" stands for a part in memory
            raise ValueError(f"it names a file outside of the checkpoint: {name[:200]}")
        if type(size) is not int or size < 0 or type(checksum) not in (int, type(None)):
            raise ValueError(f"{name[:200]} has the size {str(size)[:100]} and the checksum {str(checksum)[:100]}")


def _check_values(fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless there is a value for every leaf that is a Python value, and of its type."""
    values = fields.get("values", {})
    for name, value in values.items():
        leaf = fields["leaves"].get(name)
        if leaf is None or type(value) is not _PYTHON.get(leaf.dtype):
            raise ValueError(f"its value of {name[:200]} is not that of a leaf")
    if fields.get("packed"):
        lost = [name for name, leaf in fields["leaves"].items() if not leaf.is_array and name not in values]
        if lost:
            raise ValueError(f"it has no value of {lost[0][:200]}")
    if not 0 <= fields.get("saved_at", 0.0) < _MOST_S:
        raise ValueError("it was saved at a moment that has no date")
    for name, value in fields.get("metrics", {}).items():
        # Not `checked`, as a loss may be NaN.
        if not is_int(value) and type(value) is not float:
            raise ValueError(f"its metric {name[:200]} is not a number of at most 64 bits")


def _known(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the dataclass knows, with lists as tuples; a later version may write further ones."""
    names = _names(kind)
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items() if name in names}


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


# Checksums of a leaf that are independent of the mesh it was saved from or is restored onto. They are for data written
# by Orbax; packed files have their own checksums.
#
# A leaf is seen as a matrix of unsigned words of 8, 16 or 32 bits; wider dtypes are several words. Its last dim is the
# columns, all others the rows. Each row is cut into segments of 512 words, or of one in small leaves, and the segments
# are numbered consecutively. Two sums are kept, modulo 2**64: of all words, and of all words weighted by 2 segment + 1.
# A change of a single word is always detected, and the second sum detects swapped segments, rows and boxes. Changes
# that cancel within a segment are not detected. Sums over disjoint boxes add up, so totals do not depend on the mesh.

Sums = tuple[int, int]
Box = tuple[slice, ...]

_MODULUS = 1 << 64
_SEGMENT_WORDS = 512  # as fast as whole rows
_SMALL_WORDS = 1 << 16  # leaves up to this size have one-word segments


def add(parts: Iterable[Sequence[int]]) -> Sums:
    """The sums over a leaf from those over its disjoint boxes."""
    total = weighted = 0
    for part in parts:
        total, weighted = total + part[0], weighted + part[1]
    return total % _MODULUS, weighted % _MODULUS


def held_parts(leaf: jax.Array | np.ndarray) -> list[tuple[np.ndarray, Box]]:
    """This process's parts of a leaf, with their boxes: one of several copies; of local arrays, the first process's."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jax.process_index() != 0 and (not isinstance(leaf, jax.Array) or leaf.is_fully_addressable):
        return []
    if isinstance(leaf, jax.Array):
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        return [(np.asarray(shard.data), tuple(shard.index)) for shard in shards]
    return [(leaf, (slice(None),) * leaf.ndim)]


def sums_of(parts: Iterable[tuple[np.ndarray, Box]], shape: Sequence[int]) -> Sums:
    """The sums over some boxes of a leaf; elements beyond its shape are padding."""
    inside = lambda box: tuple(slice(max(0, n - (part.start or 0))) for part, n in zip(box, shape, strict=True))
    return add(box_sums(values[inside(box)], box, shape) for values, box in parts)


def box_sums(values: np.ndarray, box: Box, shape: Sequence[int]) -> Sums:
    """The sums of one box of a leaf."""
    words = _words(values)
    box_shape = values.shape or (1,)
    starts = [part.start or 0 for part in box] or [0]
    per_element = words.shape[-1] // max(box_shape[-1], 1)
    width, per_row = _segments(tuple(shape), per_element)
    first, num_columns = starts[-1] * per_element, words.shape[-1]
    words = words.reshape(-1, num_columns) if words.size else words.reshape(0, num_columns)
    rows = _rows(len(words), box_shape, starts, shape or (1,))
    total = weighted = 0
    for start, stop in _cuts(first, first + num_columns, width):
        by_segment = _by_segment(words[:, start - first : stop - first], width)
        numbers = np.arange(start // width, start // width + by_segment.shape[1], dtype=np.uint64)
        numbers = rows[:, None] * np.uint64(per_row) + numbers
        total += int(np.sum(by_segment))
        weighted += int(np.sum(by_segment * (2 * numbers + 1)))
    return total % _MODULUS, weighted % _MODULUS


def _segments(shape: tuple[int, ...], per_element: int) -> tuple[int, int]:
    """The width of a leaf's segments in words, and their number per row."""
    num_columns = (shape[-1] if shape else 1) * per_element
    width = _SEGMENT_WORDS if math.prod(shape) * per_element > _SMALL_WORDS else 1
    return width, -(-num_columns // width)


def _words(values: np.ndarray) -> np.ndarray:
    if values.dtype.name == "float4_e2m1fn":
        values = values.view(np.uint8) & np.uint8(15)  # the upper bits are not part of the value
    elif values.dtype.name in ("int2", "uint2", "int4", "uint4"):
        values = values.astype(np.int8)
    values = np.ascontiguousarray(values.reshape(1) if values.ndim == 0 else values)
    return values.view(f"uint{8 * min(values.dtype.itemsize, 4)}")


def _cuts(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """Splits columns into up to three parts: a partial segment, whole segments, and the rest."""
    whole = min(-(-first // width) * width, last), max(last // width * width, min(-(-first // width) * width, last))
    return [(start, stop) for start, stop in ((first, whole[0]), whole, (whole[1], last)) if start < stop]


def _by_segment(columns: np.ndarray, width: int) -> np.ndarray:
    """The sums of each segment of each row, for columns that start at a segment."""
    rows, count = columns.shape
    pieces = columns.reshape(rows, count // width, width) if count % width == 0 else columns.reshape(rows, 1, count)
    exact = np.uint32 if columns.itemsize <= 2 else np.uint64  # the narrower one is faster and wide enough
    return pieces.sum(axis=2, dtype=exact).astype(np.uint64, copy=False)


def _rows(count: int, box_shape: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The numbers of the rows of a box among the rows of the leaf."""
    left = np.arange(count, dtype=np.uint64)
    numbers, scale = np.zeros(count, np.uint64), 1
    for size, start, whole in reversed(list(zip(box_shape[:-1], starts, shape, strict=False))):
        numbers += (left % np.uint64(size) + np.uint64(start)) * np.uint64(scale)
        left //= np.uint64(size)
        scale *= whole
    return numbers
