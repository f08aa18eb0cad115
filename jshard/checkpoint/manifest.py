"""The manifest of a checkpoint, `jshard.json`: what it holds, and how to see that nothing of it is lost.

It is written last, when everything else is on the disk. It lists every leaf with its logical shape and its sums
(`sums.py`), and every file with its size, small ones with a checksum: those that say how the large ones are to be read.
The mesh, the layout and the processes it was saved from are for people, and nothing depends on them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard.checkpoint.buckets import BucketError, BucketPath, Place
from jshard.checkpoint.draft import write_text
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.sums import Sums
from jshard.errors import RunError

NAME = "jshard.json"
FORMAT = 2  # 1 has arrays of zarr, and their sums
MARK = {"jshard": FORMAT}  # in what Orbax keeps: a checkpoint with the mark and without a manifest has lost it

_SMALL_BYTES = 1 << 16
CHANGED = "its bytes have changed"
PACKAGES = ("jshard", "jax", "flax", "optax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf as a checkpoint holds it.

    Attributes:
        shape: its logical shape; of a random key that of its numbers.
        dtype: of its elements; "int", "float" and "str" for values of Python.
        key: the kind of a random key, such as "fry"; None for what is none.
        spec: how it was sharded when it was saved, for people.
        sums: see `sums.py`; None for values of Python, and where nobody computed them.
        chunk: the shape of the boxes in which it is stored; None if that is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    spec: str | None = None
    sums: Sums | None = None
    chunk: tuple[int, ...] | None = None

    @property
    def is_array(self) -> bool:
        """Whether it is an array, and not a value of Python."""
        return self.dtype not in ("int", "float", "str")

    @property
    def kind(self) -> str:
        """Its dtype, or the kind of a random key."""
        return self.dtype if self.key is None else f"key<{self.key}>"

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.is_array else 0

    def on_host(self) -> Any:
        """What a read is asked for that is to give it on the host."""
        return np.empty(self.shape, self.dtype) if self.is_array else {"int": 0, "float": 0.0}.get(self.dtype, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        leaves: by path.
        files: size of every file, by its path in the folder, and a checksum of those that are small.
        step: number of steps that were done; None where nobody said.
        saved_at: seconds since 1970.
        mesh: axes and their degrees when it was saved.
        processes: how many saved it.
        metrics: what the state was worth.
        versions: of the packages that wrote it.
        packed: size of every packed file, by its name, and the sum of its index, which stands for all in it.
        values: of the leaves that are values of Python, where the files are packed.
    """

    leaves: Mapping[str, StoredLeaf]
    files: Mapping[str, tuple[int, int | None]]
    step: int | None = None
    saved_at: float = 0.0
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    processes: int = 1
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packed: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    values: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)


def describe(leaf: Any, shape: tuple[int, ...] | None = None) -> StoredLeaf:
    """A leaf as it will be stored, without its sums; of an array with padding the shape without it."""
    if not hasattr(leaf, "shape"):
        return StoredLeaf(shape=(), dtype=type(leaf).__name__)
    key, logical = None, leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = str(leaf.dtype).removeprefix("key<").removesuffix(">")
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    shape = tuple(leaf.shape) if shape is None else shape
    return StoredLeaf(shape=shape, dtype=jnp.dtype(leaf.dtype).name, key=key, spec=_spec(logical))


def files_of(folder: Path) -> dict[str, tuple[int, int | None]]:
    """Every file of a checkpoint but its manifest, with its size, and a checksum if no sums of a leaf show a change."""
    found, left = {}, [(os.fspath(folder), "")]
    while left:
        inner, name = left.pop()
        for entry in os.scandir(inner):
            path = name + entry.name
            if entry.is_dir():
                left.append((entry.path, f"{path}/"))
            elif path not in (NAME, f"{NAME}.tmp"):
                size = entry.stat().st_size
                # Those have sums; texts and descriptions have none.
                holds_values = "/c/" in path or "/d/" in path or path.endswith(".safetensors")
                has_checksum = size <= _SMALL_BYTES or not holds_values
                found[path] = (size, zlib.crc32(Path(entry.path).read_bytes()) if has_checksum else None)
    return dict(sorted(found.items()))


def chunks_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the boxes in which leaves are stored, by path, as Orbax notes them beside the arrays."""
    chunks = {}
    for path in sorted(folder.glob("*/array_metadatas/process_*")):
        for entry in json.loads(path.read_text())["array_metadatas"]:
            array = entry["array_metadata"]
            chunks[array["param_name"].replace(".", "/")] = tuple(array["chunk_shape"])
    return chunks


def write(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest, and returns when it is on the disk."""
    write_text(folder / NAME, to_text(manifest))


def to_text(manifest: Manifest) -> str:
    """A manifest as its file holds it."""
    body = json.dumps(to_json(manifest))
    return json.dumps({"crc32": zlib.crc32(body.encode()), "seal": body})


def read(folder: Place, *, check: bool = True) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none, as in folders that others wrote.

    Without a `check`, one whose checksum does not fit is taken as it is, if it can be read at all.

    Raises:
        CheckpointError: a newer jshard wrote it.
        RunError: it is damaged.
    """
    path = folder / NAME
    try:
        held = json.loads(path.read_bytes())
        body = held["seal"]
        if check and zlib.crc32(body.encode()) != held["crc32"]:
            raise ValueError("its checksum does not fit")
        fields = json.loads(body)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except BucketError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            "The checkpoint's manifest cannot be read.",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            do="restore another checkpoint; or this one without any check: verify=False.",
        ) from error
    if fields["format"] > FORMAT:
        raise CheckpointError(
            "The checkpoint is of a newer jshard.",
            where=str(path),
            why=f"its format is {fields['format']}, written by jshard {fields.get('versions', {}).get('jshard', '?')}; "
            f"this jshard reads formats up to {FORMAT}.",
            do="pip install --upgrade jshard",
        )
    return from_json(fields)


def damage(folder: Place, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint, a line each: missing, cut off, or with other bytes.

    Large files of arrays are looked at for their size only: their values are summed when they are read.
    """
    if isinstance(folder, BucketPath):
        here = folder.objects()
        sizes = {name: (size, here.get(name)) for name, (size, _) in manifest.files.items()}
        wrong = {name: (size, there) for name, (size, there) in sizes.items() if size != there}
        text = lambda size, there: "is missing" if there is None else f"{there} bytes of {size}"
        return [f"{name}  {text(*both)}" for name, both in wrong.items()]
    found = []
    for name, (size, crc32) in manifest.files.items():
        try:
            here = (folder / name).stat().st_size
            if here != size:
                found.append(f"{name}  {here} bytes of {size}")
            elif crc32 is not None and zlib.crc32((folder / name).read_bytes()) != crc32:
                found.append(f"{name}  {CHANGED}")
        except FileNotFoundError:
            found.append(f"{name}  is missing")
        except OSError as error:
            found.append(f"{name}  {error.strerror}")
    return found


def _spec(leaf: Any) -> str | None:
    sharding = getattr(leaf, "sharding", None)
    return spec_text(sharding.spec) if isinstance(sharding, NamedSharding) else None


def spec_text(spec: PartitionSpec) -> str:
    """How an array is sharded, for people: the mesh axes of each dim."""
    return ", ".join("*".join(axis) if isinstance(axis, tuple) else str(axis or "-") for axis in spec)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest in values of JSON."""
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    given = {path: vars(leaf) for path, leaf in manifest.leaves.items()}
    leaves = {path: {name: x for name, x in leaf.items() if x is not None} for path, leaf in given.items()}
    return {"format": FORMAT if manifest.packed else 1, **fields, "leaves": leaves}


def from_json(fields: Mapping[str, Any]) -> Manifest:
    """The inverse of `to_json`."""
    given = _known(Manifest, fields)
    given["leaves"] = {path: StoredLeaf(**_known(StoredLeaf, leaf)) for path, leaf in fields["leaves"].items()}
    for name in ("files", "packed"):
        given[name] = {file: (size, checksum) for file, (size, checksum) in fields.get(name, {}).items()}
    return Manifest(**given)


def _known(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a dataclass has, with tuples for lists: a later version may write others too."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items() if name in _names(kind)}


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))
