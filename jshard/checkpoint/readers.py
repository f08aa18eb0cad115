"""Opens checkpoints of any supported format: the older layout, plain Orbax, safetensors, PyTorch, DeepSpeed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._files import check_regular_files
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.converting import Leaf, Target
from jshard.checkpoint.errors import CheckpointError, DamagedError, reason, unreadable
from jshard.checkpoint.formats import FormatSource, NamedSource, Names, check_settings, foreign_source
from jshard.checkpoint.formats.source import ArraySource, Box, ReadableValue, bounds, leaves_of, whole
from jshard.checkpoint.lookup import no_checkpoint
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.packed_reader import PackedCheckpoint, is_packed, packed_source
from jshard.checkpoint.state import leaves as _leaves
from jshard.errors import FourPartError, RunError, printable

_UNREAD = StoredLeaf(shape=(), dtype="value")  # what has no type here, and values that were not requested
# As the manifest has them: a bool is an int there.
_KINDS = {int: "int", bool: "int", float: "float", str: "str"}


class OrbaxCheckpoint(Opened):
    """A checkpoint by plain Orbax, or by jshard in that layout; Orbax reads whole leaves, or device shards."""

    path: Path  # its folder

    def __init__(self, path: Path, manifest: Manifest | None, *, verify: bool = True) -> None:
        self.path = path
        self.manifest = manifest
        self._verify = verify
        self._names: dict[str, str] = {}  # Orbax's paths of leaves, where they differ from jshard's
        self._check_files()
        self.leaves = self._described_leaves() if manifest is None else manifest.leaves
        # Orbax reads whole leaves: without this, each box of a leaf would read all of it.
        self._whole = functools.lru_cache(maxsize=2)(self._load_whole)

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; also finds leaves whose keys contain slashes, and a single item by its name."""
        if self.manifest is None:
            item = storage.only_item(self.path, paths)
            if item:
                return self._leaves_below(item)
        return self._leaves_of_slashed_keys(paths)

    def _leaves_below(self, item: str) -> Mapping[str, StoredLeaf]:
        """Returns the leaves of the only tree, below its name, and records where they are stored."""
        leaves = {}
        for path, leaf in self.leaves.items():
            below_item = f"{item}/{path}"
            leaves[below_item] = leaf
            self._names[below_item] = self._stored_name(path)
        return leaves

    def _leaves_of_slashed_keys(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """Returns the leaves, those with a slash in a key at the requested paths, and records where they are stored.

        In Orbax's paths, a slash in a key reads like one between keys. Only a request distinguishes them.
        """
        path_of = {name: path for path, name in self._names.items()}
        unescaped = {}
        for path in paths:
            if "%2F" in path:
                stored_path = path_of.get(_leaves.unescape(path))
                if stored_path is not None:
                    unescaped[path] = stored_path
        leaves = dict(self.leaves)
        for path, stored_path in unescaped.items():
            self._names[path] = self._names[stored_path]
            # Under the requested path alone: under both, the other would count as surplus.
            leaves.pop(stored_path, None)
            leaves[path] = self.leaves[stored_path]
        return leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """See `Opened.load`."""
        result = {}
        stored = {}
        for path, target in targets.items():
            if 0 in getattr(target, "shape", ()):  # arrays without elements are only in the manifest
                result[path] = _zeros(target)
            else:
                stored[self._stored_name(path)] = target
        if not stored:
            return result
        try:
            loaded = storage.load(self.path, stored, plain=self.manifest is None)
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error
        for path in targets:
            name = self._stored_name(path)
            if name in loaded:
                result[path] = loaded[name]
        return result

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`."""
        targets: dict[str, Target] = {}
        for path, leaf in self.leaves.items():
            if not leaf.is_array:
                targets[path] = leaf.on_host()
        return self.load(targets)

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; the most recently read leaves are cached whole."""
        # A copy: the caller may change it, and the leaf stays in the cache.
        return np.array(self._whole(name)[box])

    def _load_whole(self, path: str) -> Leaf:
        return self.load({path: self.leaves[path].on_host()})[path]

    def _check_files(self) -> None:
        try:
            check_regular_files(self.path)
        except OSError as error:
            raise unreadable(self.path, reason(error)) from error

    def _stored_name(self, path: str) -> str:
        """Returns the Orbax path of a leaf; other programs do not escape dots and slashes in keys."""
        return self._names.get(path, path)

    def _described_leaves(self) -> dict[str, StoredLeaf]:
        """Returns the leaves that Orbax's own metadata describe."""
        try:
            metadata, mark = storage.metadata(self.path)
        except FileNotFoundError as error:
            # Inside of a complete checkpoint it is a part of that, which `no_checkpoint` says.
            if storage.is_committed(self.path) and not storage.is_committed(self.path.parent):
                raise unreadable(self.path, "a file that describes it is missing.") from error
            raise _not_own(self.path) from error
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error
        is_by_jshard = "jshard" in mark
        # Its manifest has the checksums; without it nothing could be verified.
        if self._verify and is_by_jshard:
            do = "copy it again, or restore another one, or this one without checks: verify=False."
            raise _unsealed(self.path, do)
        leaves = {name: _described(leaf) for name, leaf in metadata.items()}
        if is_by_jshard:
            return leaves  # its paths are escaped already
        self._names = {_escaped(name.split("/")): name for name in leaves}
        return {path: leaves[name] for path, name in self._names.items()}


@dataclasses.dataclass(frozen=True)
class _SourceArray:
    """An array of a source."""

    source: ArraySource
    name: str

    @property
    def leaf(self) -> StoredLeaf:
        return self.source.leaves[self.name]

    def read(self, box: Box) -> np.ndarray:
        return self.source.read(self.name, box)


class ForeignCheckpoint(Opened):
    """A checkpoint by another library: leaves under jshard's paths, read box by box."""

    path: Path  # its file or folder

    def __init__(self, path: Path, source: FormatSource, names: Names | None = None) -> None:
        self.path = path
        self.notes = source.notes
        self._arrays: dict[str, _SourceArray] = {}
        self._values: dict[str, ReadableValue] = {}
        self._read_value = functools.cache(self._uncached_value)  # a value may be a pickle
        if names is None:
            self._add_by_path(source)
        else:
            self._add_named(source, names)
        self.leaves = leaves_of(self._arrays) | dict.fromkeys(self._values, _UNREAD)

    def _add_by_path(self, source: FormatSource) -> None:
        """Adds all arrays and values, under the paths that their names read as."""
        places = _by_path(self.path, [*source.leaves, *source.values])
        for place, name in places.items():
            if name in source.leaves:
                self._arrays[place] = _SourceArray(source, name)
            else:
                self._values[place] = source.values[name]

    def _add_named(self, source: FormatSource, names: Names) -> None:
        """Adds the arrays under the paths of a table of names, and those that it leaves out under their own names."""
        named = NamedSource(source, names)
        self.absent = named.absent
        for path in named.leaves:
            self._arrays[path] = _SourceArray(named, path)
        # They cannot be restored, only shown, or reported as surplus.
        for name in named.unused:
            self._arrays[_unused_place(name, named.leaves)] = _SourceArray(source, name)

    def _uncached_value(self, place: str) -> object:
        return self._values[place].value()

    def leaves_for(self, paths: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; requested values other than numbers and strings are not leaves."""
        # Without numbers, as a stack may be stored layer by layer, and layers as a stack.
        requested = {_without_layers(path) for path in paths}
        leaves = dict(self.leaves)
        for place in self._values:
            if _without_layers(place) not in requested:
                continue  # reading it may take time, and fail
            kind = _KINDS.get(type(self._read_value(place)))
            if kind is None:
                del leaves[place]
            else:
                leaves[place] = StoredLeaf(shape=(), dtype=kind)
        return leaves

    def described(self) -> Mapping[str, StoredLeaf]:
        """See `Opened.described`."""
        leaves = dict(self.leaves)
        for place in self._values:
            # A value that cannot be read, or may run code, is still listed.
            with contextlib.suppress(CheckpointError):
                kind = _KINDS.get(type(self._read_value(place)), _UNREAD.dtype)
                leaves[place] = StoredLeaf(shape=(), dtype=kind)
        return leaves

    def load(self, targets: Mapping[str, Target]) -> dict[str, Leaf]:
        """See `Opened.load`; host memory holds the boxes of one leaf at a time."""
        result: dict[str, Leaf] = {}
        for path, target in targets.items():
            if path in self._values:
                result[path] = self._read_value(path)
            elif isinstance(target, jax.ShapeDtypeStruct):
                assert target.sharding is not None
                read = functools.partial(_read_padded, self, path, target.shape)
                leaf = jax.make_array_from_callback(target.shape, target.sharding, read)
                # Before the next one is read, as its boxes are on the host until they are copied.
                result[path] = jax.block_until_ready(leaf)
            else:
                result[path] = self.read(path, whole(self.leaves[path]))
        return result

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        return self._arrays[name].read(box)

    def values(self) -> dict[str, int | float | str]:
        """See `Opened.values`; lists that PyTorch keeps beside the arrays are not included."""
        values: dict[str, int | float | str] = {}
        for place in self._values:
            value = self._read_value(place)
            if isinstance(value, int | float | str):
                values[place] = value
        return values


def open_checkpoint(path: Place, *, names: Names | None = None, verify: bool = True) -> Opened:
    """Opens a checkpoint of any format; for the arguments, see the two classes above."""
    if isinstance(path, BucketPath):
        return own_checkpoint(path, verify=verify)
    if path.name == FOLDER and is_packed(path.parent):
        raise no_checkpoint(path)  # the files of a packed checkpoint are safetensors: they would be opened as such
    try:
        source = foreign_source(path)
    except FourPartError:  # may be an `OSError`, too
        raise
    except OSError as error:  # of a file that is named or there, and cannot be opened: a link that leads nowhere
        raise unreadable(error.filename or path, reason(error)) from error
    if source is None:
        return own_checkpoint(path, verify=verify)
    check_settings(path, names)
    return ForeignCheckpoint(path, source, names)


def _not_own(path: Path) -> CheckpointError:
    """Makes the error for a path where neither jshard nor Orbax wrote a checkpoint; another library may have."""
    if foreign_source(path) is None:
        return no_checkpoint(path)
    return CheckpointError(
        "The checkpoint is not one of jshard.",
        where=str(path),
        why="it can be restored, inspected and imported. This needs what jshard writes with a checkpoint.",
        do=f"jshard ckpt import {path} OUT",
    )


def own_checkpoint(path: Place, *, verify: bool = True) -> PackedCheckpoint | OrbaxCheckpoint:
    """Opens a checkpoint by jshard or plain Orbax; for arguments and errors, see the classes."""
    try:
        manifest = _manifest.read(path, check=verify)
    except RunError:
        # Without checks, Orbax's own metadata are enough. Packed files cannot be read without a manifest.
        if verify or isinstance(path, BucketPath) or is_packed(path):
            raise
        manifest = None
    # A manifest without packed files is one of a checkpoint whose arrays Orbax wrote.
    if manifest is not None and manifest.packed:
        return PackedCheckpoint(path, manifest, packed_source(path), verify=verify)
    if isinstance(path, BucketPath):
        raise no_checkpoint(path)
    if manifest is None and is_packed(path):
        raise _unsealed(path, "copy it again, or restore another one.")
    return OrbaxCheckpoint(path, manifest, verify=verify)


def _unsealed(path: Path, do: str) -> DamagedError:
    """Makes the error for a jshard checkpoint that has lost its manifest."""
    return DamagedError(
        "The checkpoint cannot be read.",
        where=str(path),
        why=f"its manifest, {_manifest.NAME}, is missing: the copy is incomplete, or the file was removed.",
        do=do,
    )


def _by_path(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns stored names by the jshard paths that they read as; raises if two of them read the same.

    Other libraries separate keys by dots; an escaped, exported key stays one key.
    """
    places: dict[str, str] = {}
    name_of: dict[str, str] = {}
    for name in names:
        keys = name.replace("/", ".").split(".")
        place = _escaped(_leaves.unescape(key) for key in keys)
        if _manifest.is_too_deep(place):
            raise unreadable(path, f"a name has thousands of keys: {printable(name[:100])}")
        places[name] = place
        name_of[place] = name  # of several names with one place the last
    clashes = []
    for name, place in places.items():
        if name_of[place] != name:
            clashes.append(f"{name}  and {name_of[place]}: {place}")
    if clashes:
        raise CheckpointError(
            "Some names in the checkpoint stand for the same path.",
            where=[str(path), *clashes],
            why="both dots and slashes separate the keys of a path.",
            do='restore(path, like, names={"layer/kernel": "layer.kernel"})  # names the one to read\n'
            "To import it, map the names with hf_names(config) in a model file: --model MODEL.py",
        )
    return name_of


def _escaped(keys: Iterable[str]) -> str:
    return "/".join(_leaves.escape(key) for key in keys)


def _unused_place(name: str, places: Collection[str]) -> str:
    """Returns a stored name, with a remark if a path reads the same."""
    return f"{name} (not in names)" if name in places else name


def _without_layers(path: str) -> str:
    return "/".join(key for key in path.split("/") if not key.isdecimal())


def _described(leaf: Any) -> StoredLeaf:
    """Returns Orbax's metadata of a leaf as a `StoredLeaf`."""
    if not hasattr(leaf, "shape"):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return StoredLeaf(shape=(), dtype="int" if kind is bool else kind.__name__)
    chunk = getattr(getattr(leaf, "storage_metadata", None), "chunk_shape", None)
    if chunk is not None:
        chunk = tuple(chunk)
    return StoredLeaf(shape=tuple(leaf.shape), dtype=jnp.dtype(leaf.dtype).name, chunk=chunk)


def _zeros(target: Target) -> Leaf:
    if isinstance(target, jax.ShapeDtypeStruct):
        return jax.device_put(jnp.zeros(target.shape, target.dtype), target.sharding)
    return target


def _read_padded(source: Opened, name: str, shape: tuple[int, ...], box: Box | None) -> np.ndarray:
    """Reads a box of a stored array, with zeros beyond its end."""
    stored_shape = source.leaves[name].shape
    if shape == stored_shape:
        return source.read(name, box or ())
    stored_box = []
    padding = []
    for (start, stop), size in zip(bounds(box or (), shape), stored_shape, strict=True):
        # Beyond the end the box is empty, and all of it is padding.
        stored_start = min(start, size)
        stored_stop = min(stop, size)
        stored_box.append(slice(stored_start, stored_stop))
        padding.append((0, (stop - start) - (stored_stop - stored_start)))
    return np.pad(source.read(name, tuple(stored_box)), padding)
