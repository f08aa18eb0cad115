"""The manifest of a checkpoint, `jshard.json`: its contents, and how to detect any loss.

It is written last, when everything else is on disk. It lists every leaf with its logical shape, and every packed file
with its size and a checksum of its index. Where Orbax writes the arrays, leaves have checksums (`leaf_sums`) in place
of files; earlier versions also listed the files of Orbax. The mesh, layout and processes it was saved from are for
information only; nothing depends on them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard._files import METADATA_BYTES, is_inside, write_text
from jshard._parsing import checked, is_int, parse_json
from jshard._types import Json
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, contents
from jshard.checkpoint.errors import CheckpointError, DamagedError
from jshard.checkpoint.state.leaf_sums import Sums
from jshard.errors import UnsafeFileError

NAME = "jshard.json"
FOLDER = "arrays"  # of packed files
MOST_BYTES = 256 << 20  # of the file: it also holds the Python values, such as the position in the data
FORMAT = 2  # 1 has zarr arrays and their checksums
MARK = {"jshard": FORMAT}  # in Orbax's metadata: a checkpoint with the mark but no manifest has lost it

PACKAGES = ("jshard", "jax", "flax", "optax", "orbax-checkpoint")

Value = int | float | str
"""A leaf that is a Python value, as the manifest has it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf as stored in a checkpoint."""

    shape: tuple[int, ...]  # its logical shape; for a random key, that of its key data
    dtype: str  # of its elements; "int", "float" and "str" for Python values, "value" for one of another or unread type
    key: str | None = None  # the kind of a random key, such as "fry"; None for other leaves
    spec: str | None = None  # its sharding when saved, for information
    sums: Sums | None = None  # see `leaf_sums`; None for Python values, and if not computed
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
        if not self.is_array:
            return 0
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def on_host(self) -> np.ndarray | Value:
        """Returns the target of a read of this leaf to the host."""
        if self.is_array:
            return np.empty(self.shape, self.dtype)
        if self.dtype == "int":
            return 0
        if self.dtype == "float":
            return 0.0
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a manifest."""

    leaves: Mapping[str, StoredLeaf]  # by path
    # size of every packed file, by its path in the folder; in zarr checkpoints of earlier versions those of Orbax, the
    # small ones with a checksum; none with format="orbax" now
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
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)


def describe(leaf: Any, shape: tuple[int, ...] | None = None) -> StoredLeaf:
    """Returns a leaf as it will be stored, without its checksums.

    Args:
        leaf: an array, an array's shape and dtype, or a Python value.
        shape: its logical shape, without padding; by default its own.
    """
    if not hasattr(leaf, "shape"):
        return StoredLeaf(shape=(), dtype=type(leaf).__name__)
    key = None
    numbers = leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = str(leaf.dtype).removeprefix("key<").removesuffix(">")
        numbers = jax.eval_shape(jax.random.key_data, leaf)
    if shape is None:
        shape = tuple(numbers.shape)
    return StoredLeaf(shape=shape, dtype=_name_of(numbers.dtype), key=key, spec=_spec(leaf))


@functools.cache  # NumPy composes the name at every request, and a state has thousands of leaves of few dtypes
def _name_of(dtype: np.dtype) -> str:
    return jnp.dtype(dtype).name


def describe_all(leaves: Mapping[str, Any], logical_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredLeaf]:
    """Returns leaves as they will be stored; those without a logical shape have no padding."""
    return {path: describe(leaf, logical_shapes.get(path)) for path, leaf in leaves.items()}


def python_values(leaves: Mapping[str, object]) -> dict[str, Value]:
    """Returns the leaves that are Python values: the manifest has them, and no file of arrays."""
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Value)}


def _spec(leaf: object) -> str | None:
    sharding = getattr(leaf, "sharding", None)
    return spec_text(sharding.spec) if isinstance(sharding, NamedSharding) else None


def spec_text(spec: PartitionSpec) -> str:
    """Returns a readable form of an array's sharding: the mesh axes of each dim."""
    dims = []
    for axes in spec:
        if isinstance(axes, tuple):
            dims.append("*".join(axes))
        else:
            dims.append(str(axes or "-"))
    return ", ".join(dims)


# ---- the file


def write(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest, and returns when it is on disk."""
    write_text(folder / NAME, to_text(manifest))


def to_text(manifest: Manifest) -> str:
    """Returns a manifest as the text of its file."""
    # The checksum is over the text as it stands in the file: parsing and writing it again could change it.
    body = json.dumps(to_json(manifest))
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "seal": body})
    if len(text) > MOST_BYTES:  # it could not be read again
        sizes: dict[str, int] = {}
        for path, value in manifest.values.items():
            if isinstance(value, str):
                sizes[path] = len(value)
        raise CheckpointError(
            "The checkpoint cannot be written: its texts are too large.",
            where=sorted(sizes, key=lambda path: -sizes[path]),
            why=f"the manifest, which holds them, would have {len(text)} bytes of at most {MOST_BYTES}.",
            do="save large texts as arrays: np.frombuffer(text.encode(), np.uint8)",
        )
    return text


def read(folder: Place, *, check: bool = True) -> Manifest | None:
    """Reads the manifest of a checkpoint; None if it has none, as in folders that other programs wrote.

    Without `check`, a manifest with a wrong checksum is accepted if it can be parsed.
    """
    path = folder / NAME
    try:
        fields = _fields_of(contents(path, MOST_BYTES), check=check)
        number = fields["format"]
        # Of a newer format only the number and the version are read: other fields may have another form.
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


def _fields_of(content: bytes, *, check: bool) -> Json:
    """Parses the file. Raises as `from_json`; the fields are not checked here."""
    sealed = parse_json(content)
    body = sealed["seal"]
    if check and zlib.crc32(body.encode()) != sealed["crc32"]:
        raise ValueError("its checksum is wrong")
    return parse_json(body)


def damage(folder: Place, manifest: Manifest) -> list[str]:
    """Returns the damaged files of a checkpoint, one line each: missing, truncated or changed.

    Large array files are only checked for size; their values are checked when read.
    """
    # One request lists a bucket; a request for each of thousands of files would take long.
    sizes_in_bucket = folder.objects() if isinstance(folder, BucketPath) else {}
    lines = []
    for name, (size, crc32) in manifest.files.items():
        fault = _fault_of_file(folder, name, size, crc32, sizes_in_bucket)
        if fault is not None:
            lines.append(f"{name}  {fault}")
    return lines


def _fault_of_file(
    folder: Place, name: str, size: int, crc32: int | None, sizes_in_bucket: Mapping[str, int]
) -> str | None:
    """Returns what is wrong with a file; None if nothing is."""
    try:
        actual_size = _size_of_file(folder, name, sizes_in_bucket)
        if actual_size is None:
            return "is missing"
        if actual_size != size:
            return f"{actual_size} bytes of {size}"
        if crc32 is not None and zlib.crc32(contents(folder / name, METADATA_BYTES)) != crc32:
            return "its contents have changed"
    except FileNotFoundError:
        return "is missing"
    except BucketError:
        raise
    except OSError as error:
        return str(error.strerror)
    return None


def _size_of_file(folder: Place, name: str, sizes_in_bucket: Mapping[str, int]) -> int | None:
    if isinstance(folder, Path):
        return (folder / name).stat().st_size
    return sizes_in_bucket.get(name)


# ---- JSON


def to_json(manifest: Manifest) -> dict[str, Json]:
    """Returns a manifest as JSON values."""
    leaves = {}
    for path, leaf in manifest.leaves.items():
        # What is None is left out: a reader has the same default.
        leaves[path] = {name: value for name, value in vars(leaf).items() if value is not None}
    # Without packed files, Orbax writes the arrays, as in format 1.
    return {"format": FORMAT if manifest.packed else 1, **vars(manifest), "leaves": leaves}


def from_json(fields: Mapping[str, Json]) -> Manifest:
    """Inverts `to_json`.

    The checksum of a manifest is not a signature: anyone may have written it. So no field is trusted that a program
    would compute with, open or allocate by.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: these are not the fields of a manifest.
    """
    checked(fields, _ShownFields)
    known = _known_fields(Manifest, fields)
    leaves: dict[str, StoredLeaf] = {}
    for path, leaf in fields["leaves"].items():
        leaves[path] = _checked_leaf(path, leaf)
    known["leaves"] = leaves
    known["files"] = _checked_files(fields.get("files", {}))
    known["packed"] = _checked_files(fields.get("packed", {}))
    _check_values(known)
    if not 0 <= known.get("saved_at", 0.0) < _MOST_S:
        raise ValueError("it was saved at a moment that has no date")
    _check_metrics(known.get("metrics", {}))
    return Manifest(**known)


class _ShownFields(TypedDict, total=False):
    """The fields that nothing depends on, and that commands show."""

    step: int | None
    saved_at: float
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]


_MOST_S = 1e11  # since 1970: later moments have no date
_PYTHON_TYPES = {"int": int, "float": float, "str": str}
_MOST_DIMS = 32  # numpy's arrays have at most 64, and jax's programs fewer
_MOST_ELEMENTS = 1 << 58  # so that no size in bytes is beyond 64 bits
_MOST_KEYS = 1000  # in a path; as many levels as Python has frames
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")


def _known_fields(kind: type, fields: Mapping[str, Json]) -> dict[str, Any]:
    """Returns the fields that a dataclass knows, with lists as tuples; a later version may write further ones."""
    names = _field_names(kind)
    known = {}
    for name, value in fields.items():
        if name in names:
            known[name] = tuple(value) if isinstance(value, list) else value
    return known


@functools.cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def _checked_leaf(path: str, fields: Mapping[str, Json]) -> StoredLeaf:
    """Returns a leaf whose size and dtype can be computed with."""
    leaf = StoredLeaf(**_known_fields(StoredLeaf, fields))
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
    """Returns whether numpy, with JAX's further dtypes, has a dtype of numbers by this name.

    `np.dtype` also takes lists of fields, pointers to Python objects and texts of any length.
    """
    if not _DTYPE_NAME.fullmatch(name):
        return False
    try:
        dtype = np.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and dtype.kind not in "OSUMm" and dtype.itemsize > 0


def is_too_deep(path: str) -> bool:
    """Returns whether a path has more keys than a state can be deep; time grows with the square of the number."""
    return path.count("/") > _MOST_KEYS


def is_shape(shape: object) -> TypeGuard[tuple[int, ...]]:
    """Returns whether this is the shape of an array, as a tuple, whose size in bytes can be computed with."""
    if not isinstance(shape, tuple) or len(shape) > _MOST_DIMS:
        return False
    if not all(type(size) is int and size >= 0 for size in shape):
        return False
    return math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS


def _checked_files(files: Mapping[str, Json]) -> dict[str, tuple[int, int | None]]:
    """Returns the sizes and checksums of files, by name."""
    pairs: dict[str, tuple[int, int | None]] = {}
    for name, (size, checksum) in files.items():
        if name and not is_inside(name):  # "" stands for a part in memory
            raise ValueError(f"it names a file outside of the checkpoint: {name[:200]}")
        if type(size) is not int or size < 0 or type(checksum) not in (int, type(None)):
            raise ValueError(f"{name[:200]} has the size {str(size)[:100]} and the checksum {str(checksum)[:100]}")
        pairs[name] = (size, checksum)
    return pairs


def _check_values(fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless there is a value for every leaf that is a Python value, and of its type."""
    leaves: Mapping[str, StoredLeaf] = fields["leaves"]
    values = fields.get("values", {})
    for name, value in values.items():
        leaf = leaves.get(name)
        if leaf is None or type(value) is not _PYTHON_TYPES.get(leaf.dtype):
            raise ValueError(f"its value of {name[:200]} is not that of a leaf")
    if not fields.get("packed"):
        return  # Orbax has them, too
    for name, leaf in leaves.items():
        if not leaf.is_array and name not in values:
            raise ValueError(f"it has no value of {name[:200]}")


def _check_metrics(metrics: Mapping[str, Json]) -> None:
    for name, value in metrics.items():
        # Not `checked`, as a loss may be NaN.
        if not is_int(value) and type(value) is not float:
            raise ValueError(f"its metric {name[:200]} is not a number of at most 64 bits")
