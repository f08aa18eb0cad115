"""Opens checkpoints of any supported format: the older layout, plain Orbax, safetensors, PyTorch, DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard._files import check_regular_files
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.errors import CheckpointError, DamagedError, reason, unreadable
from jshard.checkpoint.formats import Foreign, NamedSource, SafetensorsSource, check_settings, foreign_source
from jshard.checkpoint.formats.source import ArraySource, Box, Names, bounds, whole
from jshard.checkpoint.lookup import no_checkpoint
from jshard.checkpoint.manifest import FOLDER, Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened, PackedCheckpoint, is_packed, packed_source
from jshard.errors import FourPartError, RunError, printable

_UNREAD = StoredLeaf(shape=(), dtype="value")  # what has no type here, and values that were not requested
_KINDS = {int: "int", bool: "int", float: "float", str: "str"}


class OrbaxCheckpoint(Opened):
    """A checkpoint by plain Orbax, or by jshard in that layout; Orbax reads whole leaves, or device shards."""

    path: Path  # its folder

    def __init__(self, path: Path, manifest: Manifest | None, *, verify: bool = True) -> None:
        self.path, self.manifest, self._verify = path, manifest, verify
        self._names: dict[str, str] = {}  # stored names that differ from the paths
        self._check_files()
        self.leaves = self._from_orbax() if self.manifest is None else self.manifest.leaves
        self._whole = functools.lru_cache(maxsize=2)(lambda name: self.load({name: self.leaves[name].on_host()})[name])

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; also finds leaves whose keys contain slashes, and a single item by its name."""
        if self.manifest is None and (item := storage.only_item(self.path, asked)):
            named = {f"{item}/{path}": path for path in self.leaves}
            self._names |= {ours: self._stored_name(path) for ours, path in named.items()}
            return {ours: self.leaves[path] for ours, path in named.items()}
        places = {name: path for path, name in self._names.items()}
        slashed = {path: places.get(_leaves.unescape(path)) for path in asked if "%2F" in path}
        found = {path: place for path, place in slashed.items() if place is not None}
        self._names |= {path: self._names[place] for path, place in found.items()}
        rest = {path: leaf for path, leaf in self.leaves.items() if path not in found.values()}
        return rest | {path: self.leaves[place] for path, place in found.items()}

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`."""
        # Arrays without elements are only in the manifest.
        empty = {path: like for path, like in wanted.items() if 0 in getattr(like, "shape", ())}
        found = {path: _zeros(like) for path, like in empty.items()}
        full = {self._stored_name(path): like for path, like in wanted.items() if path not in empty}
        try:
            loaded = storage.load(self.path, full, plain=self.manifest is None) if full else {}
            return found | {path: loaded[name] for path in wanted if (name := self._stored_name(path)) in loaded}
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error

    def values(self) -> dict[str, Any]:
        """See `Opened.values`."""
        return self.load({name: leaf.on_host() for name, leaf in self.leaves.items() if not leaf.is_array})

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`; the most recently read leaves are cached whole."""
        return np.array(self._whole(name)[box])

    def _check_files(self) -> None:
        try:
            check_regular_files(self.path)
        except OSError as error:
            raise unreadable(self.path, reason(error)) from error

    def _stored_name(self, path: str) -> str:
        """The Orbax path of a leaf; other programs do not escape dots and slashes in keys."""
        return self._names.get(path, path)

    def _from_orbax(self) -> dict[str, StoredLeaf]:
        try:
            found, mark = storage.metadata(self.path)
        except FileNotFoundError as error:
            if storage.is_committed(self.path) and not storage.is_committed(self.path.parent):
                raise unreadable(self.path, "a file that describes it is missing.") from error
            raise no_checkpoint(self.path) from error
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error
        if self._verify and "jshard" in mark:
            do = "copy it again, or restore another one, or this one without checks: verify=False."
            raise _unsealed(self.path, do)
        leaves = {name: _described(leaf) for name, leaf in found.items()}
        if "jshard" in mark:
            return leaves
        self._names = {"/".join(map(_leaves.escape, name.split("/"))): name for name in leaves}
        return {path: leaves[name] for path, name in self._names.items()}


class ForeignCheckpoint(Opened):
    """A checkpoint by another library: leaves under jshard's paths, read box by box."""

    path: Path  # its file or folder

    def __init__(self, path: Path, source: Foreign, names: Names | None = None) -> None:
        self.path = path
        self.notes = source.notes if isinstance(source, SafetensorsSource) else ()
        self._unnamed: dict[str, str] = {}  # arrays that `names` leaves out: they cannot be restored, only shown
        if names is None:
            values: Mapping[str, Any] = source.values
            self._source: ArraySource = source
            places = _by_path(path, [*source.leaves, *values])
            self.absent: Mapping[str, Sequence[str]] = {}
        else:
            values = {}
            named = NamedSource(source, names)
            self._source = named
            places = {name: name for name in named.leaves}
            self.absent = named.absent
            self._unnamed = {_free_place(name, places): name for name in named.unused}
        self._stored = source
        arrays = self._source.leaves
        self._names = {place: name for place, name in places.items() if name in arrays}
        self._values = {place: name for place, name in places.items() if name not in arrays}
        self._value = functools.cache(lambda name: values[self._values[name]].value())
        leaves = {place: arrays[name] for place, name in self._names.items()}
        leaves |= {place: source.leaves[name] for place, name in self._unnamed.items()}
        self.leaves = leaves | dict.fromkeys(self._values, _UNREAD)

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; requested values other than numbers and strings are not leaves."""
        wanted = {_without_layers(path) for path in asked}
        found = {name: type(self._value(name)) for name in self._values if _without_layers(name) in wanted}
        leaves = {name: leaf for name, leaf in self.leaves.items() if found.get(name, str) in _KINDS}
        kinds = {name: _KINDS[kind] for name, kind in found.items() if kind in _KINDS}
        return leaves | {name: StoredLeaf(shape=(), dtype=kind) for name, kind in kinds.items()}

    def described(self) -> Mapping[str, StoredLeaf]:
        """See `Opened.described`."""
        leaves = dict(self.leaves)
        for name in self._values:
            # A value that cannot be read, or may run code, is still listed.
            with contextlib.suppress(CheckpointError):
                kind = _KINDS.get(type(self._value(name)), _UNREAD.dtype)
                leaves[name] = StoredLeaf(shape=(), dtype=kind)
        return leaves

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`; host memory holds the boxes of one leaf at a time."""
        found: dict[str, Any] = {}
        for name, like in wanted.items():
            if name in self._values:
                found[name] = self._value(name)
            elif isinstance(like, jax.ShapeDtypeStruct):
                assert like.sharding is not None
                read = functools.partial(_padded, self, name, like.shape)
                leaf = jax.make_array_from_callback(like.shape, like.sharding, read)
                found[name] = jax.block_until_ready(leaf)  # before the next one is read
            else:
                found[name] = self.read(name, whole(self.leaves[name]))
        return found

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        if name in self._unnamed:
            return self._stored.read(self._unnamed[name], box)
        return self._source.read(self._names[name], box)

    def values(self) -> dict[str, Any]:
        """See `Opened.values`; lists that PyTorch keeps beside the arrays are not included."""
        found = {name: self._value(name) for name in self._values}
        return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


def open_checkpoint(path: Place, *, names: Names | None = None, verify: bool = True) -> Opened:
    """Opens a checkpoint of any format; for the arguments, see the two classes above."""
    if isinstance(path, BucketPath):
        return own_checkpoint(path, verify=verify)
    if path.name == FOLDER and is_packed(path.parent):
        raise no_checkpoint(path)
    try:
        source = foreign_source(path)
    except OSError as error:  # of a file that is named or there, and cannot be opened: a link that leads nowhere
        if isinstance(error, FourPartError):
            raise
        raise unreadable(error.filename or path, reason(error)) from error
    if source is None:
        return own_checkpoint(path, verify=verify)
    check_settings(path, names)
    return ForeignCheckpoint(path, source, names)


def own_checkpoint(path: Place, *, verify: bool = True) -> PackedCheckpoint | OrbaxCheckpoint:
    """Opens a checkpoint by jshard or plain Orbax; for arguments and errors, see the classes."""
    try:
        manifest = _manifest.read(path, check=verify)
    except RunError:
        if verify or isinstance(path, BucketPath) or is_packed(path):
            raise
        manifest = None
    if manifest is not None and manifest.packed:
        return PackedCheckpoint(path, manifest, packed_source(path), verify=verify)
    if isinstance(path, BucketPath):
        raise no_checkpoint(path)
    if manifest is None and is_packed(path):
        raise _unsealed(path, "copy it again, or restore another one.")
    return OrbaxCheckpoint(path, manifest, verify=verify)


def _unsealed(path: Path, do: str) -> DamagedError:
    """The error for a jshard checkpoint that has lost its manifest."""
    return DamagedError(
        "The checkpoint cannot be read.",
        where=str(path),
        why=f"its manifest, {_manifest.NAME}, is missing: the copy is incomplete, or the file was removed.",
        do=do,
    )


def _by_path(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Stored names by jshard paths: other libraries separate keys by dots; an escaped, exported key stays one key."""
    keys = {name: name.replace("/", ".").split(".") for name in names}
    places = {name: "/".join(_leaves.escape(_leaves.unescape(key)) for key in parts) for name, parts in keys.items()}
    deep = [name for name, place in places.items() if _manifest.is_too_deep(place)]
    if deep:
        raise unreadable(path, f"a name has thousands of keys: {printable(deep[0][:100])}")
    found = {place: name for name, place in places.items()}
    if len(found) < len(places):
        twice = [name for name, place in places.items() if found[place] != name]
        raise CheckpointError(
            "Some names in the checkpoint stand for the same path.",
            where=[str(path), *(f"{name}  and {found[places[name]]}: {places[name]}" for name in twice)],
            why="both dots and slashes separate the keys of a path.",
            do='restore(path, like, names={"layer/kernel": "layer.kernel"})  # names the one to read\n'
            "To import it, map the names with hf_names(config) in a model file: --model MODEL.py",
        )
    return found


def _free_place(name: str, places: Collection[str]) -> str:
    """A stored name, with a remark if a path reads the same."""
    return f"{name} (not in names)" if name in places else name


def _without_layers(path: str) -> str:
    return "/".join(key for key in path.split("/") if not key.isdecimal())


def _described(leaf: Any) -> StoredLeaf:
    """Orbax's metadata of a leaf as a `StoredLeaf`."""
    if not hasattr(leaf, "shape"):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return StoredLeaf(shape=(), dtype="int" if kind is bool else kind.__name__)
    chunk = getattr(getattr(leaf, "storage_metadata", None), "chunk_shape", None)
    return StoredLeaf(
        shape=tuple(leaf.shape), dtype=jnp.dtype(leaf.dtype).name, chunk=None if chunk is None else tuple(chunk)
    )


def _zeros(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)
    return like


def _padded(source: Opened, name: str, shape: tuple[int, ...], box: Box | None) -> np.ndarray:
    """A box of a stored array, with zeros beyond its end."""
    stored = source.leaves[name].shape
    if shape == stored:
        return source.read(name, box or ())
    limits = bounds(box or (), shape)
    inside = tuple(slice(min(start, n), min(stop, n)) for (start, stop), n in zip(limits, stored, strict=True))
    beyond = [(0, stop - start - (i.stop - i.start)) for (start, stop), i in zip(limits, inside, strict=True)]
    return np.pad(source.read(name, inside), beyond)
