"""A checkpoint that is opened: its leaves by path, and a way to read them, whoever wrote it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _seal
from jshard.checkpoint import storage
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.formats import NamedSource, Source, StoredArray, foreign_source
from jshard.checkpoint.formats.names import Names
from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.lookup import no_checkpoint
from jshard.checkpoint.manifest import Seal, StoredLeaf
from jshard.errors import RunError

_UNREAD = StoredLeaf(shape=(), dtype="str")  # what has no name here, and values that nobody has asked for
_KINDS = {int: "int", bool: "int", float: "float", str: "str"}


class Opened(Protocol):
    """A checkpoint that is opened.

    Attributes:
        path: where it lies.
        seal: what it says of itself; None if jshard did not write it.
        leaves: what it holds, by path.
        items: the names that all paths begin with, where it holds several trees that were saved side by side.
    """

    path: Path
    seal: Seal | None
    leaves: Mapping[str, StoredLeaf]
    items: tuple[str, ...]

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """The leaves, with the kinds of the values of Python that some paths ask for: each of the others may be unread.

        Args:
            asked: stored paths, in any form of layers.
        """
        ...

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """The most that a read of some leaves has in host memory beside them."""
        ...

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads some leaves.

        Args:
            wanted: by stored path: arrays without values (`jax.ShapeDtypeStruct` with shardings), numpy arrays, or
                values of Python, in the shapes and dtypes that are stored.

        Returns:
            The leaves by path.

        Raises:
            RunError: something of it is damaged or cannot be read.
        """
        ...


class OrbaxCheckpoint:
    """What jshard or plain Orbax wrote.

    Args:
        path: its folder.
        verify: whether a seal that is lost or damaged is an error; else it is read as if plain Orbax had written it.

    Raises:
        CheckpointError: there is no checkpoint there, or a newer jshard wrote it.
        RunError: what describes it is damaged.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path, self._verify = path, verify
        self._names: dict[str, str] = {}  # of leaves that are called otherwise there
        try:
            self.seal = _seal.read(path)
        except RunError:
            if verify:
                raise
            self.seal = None
        self.leaves: Mapping[str, StoredLeaf] = self._from_orbax() if self.seal is None else self.seal.leaves
        names = storage.items(path) if self.seal is None else ()
        self.items = tuple(map(_leaves.escape, names))

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; a leaf of others whose keys have slashes is found by the path that asks for it."""
        places = {name: path for path, name in self._names.items()}
        slashed = {path: places.get(_leaves.unescape(path)) for path in asked if "%2F" in path}
        found = {path: place for path, place in slashed.items() if place is not None}
        self._names |= {path: self._names[place] for path, place in found.items()}
        rest = {path: leaf for path, leaf in self.leaves.items() if path not in found.values()}
        return rest | {path: self.leaves[place] for path, place in found.items()}

    def stored_name(self, path: str) -> str:
        """The path of a leaf as Orbax has it: others write keys with dots and slashes as they are."""
        return self._names.get(path, path)

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`."""
        return storage.in_flight_bytes(reads)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.read`."""
        # Arrays without elements are in the seal alone.
        empty = {path: like for path, like in wanted.items() if 0 in getattr(like, "shape", ())}
        found = {path: _zeros(like) for path, like in empty.items()}
        full = {self.stored_name(path): like for path, like in wanted.items() if path not in empty}
        try:
            loaded = storage.load(self.path, full, plain=self.seal is None) if full else {}
            return found | {path: loaded[name] for path in wanted if (name := self.stored_name(path)) in loaded}
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error

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
            why = f"its seal, {_seal.NAME}, is missing: it was copied by half, or somebody removed it."
            raise RunError(
                "The checkpoint cannot be read.",
                where=str(self.path),
                why=why,
                do="copy it again, or restore another one; or this one without any check: verify=False.",
            )
        leaves = {name: _described(leaf) for name, leaf in found.items()}
        if "jshard" in mark:
            return leaves
        self._names = {"/".join(map(_leaves.escape, name.split("/"))): name for name in leaves}
        return {path: leaves[name] for path, name in self._names.items()}


class ForeignCheckpoint:
    """What another library wrote: leaves under our paths, read box by box.

    Args:
        path: where it lies.
        source: its arrays.
        names: stored name of every array, by path.
        values: stored name of everything else, by path; it is read when it is asked for.
        unnamed: stored names that have no counterpart here.
    """

    seal: Seal | None = None
    items: tuple[str, ...] = ()

    def __init__(
        self, path: Path, source: Source, names: Mapping[str, str], values: Mapping[str, str], unnamed: Sequence[str]
    ) -> None:
        self.path, self._source, self._names, self._values = path, source, names, values
        self._value = functools.cache(lambda name: getattr(source, "values", {})[values[name]])
        arrays = {name: _any_box_of(source.leaves[stored]) for name, stored in names.items()}
        self.leaves: Mapping[str, StoredLeaf] = arrays | dict.fromkeys([*values, *unnamed], _UNREAD)

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; of the values that are asked for, those that are no numbers or texts are no leaves.

        Raises:
            CheckpointError: a value's pickle names something that is not allowed.
            RunError: it is damaged.
        """
        wanted = {_without_layers(path) for path in asked}
        found = {name: type(self._value(name)) for name in self._values if _without_layers(name) in wanted}
        leaves = {name: leaf for name, leaf in self.leaves.items() if found.get(name, str) in _KINDS}
        kinds = {name: _KINDS[kind] for name, kind in found.items() if kind in _KINDS}
        return leaves | {name: StoredLeaf(shape=(), dtype=kind) for name, kind in kinds.items()}

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`: the boxes of one leaf for all devices here."""
        return max(map(_boxes_bytes, reads.values()), default=0)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.read`; host memory holds the boxes of one leaf."""
        return {name: self._read(name, like) for name, like in wanted.items()}

    def _read(self, name: str, like: Any) -> Any:
        if name in self._values:
            return self._value(name)
        stored = self._names[name]
        if not isinstance(like, jax.ShapeDtypeStruct):
            return self._source.read(stored, tuple(slice(None) for _ in self.leaves[name].shape))
        assert like.sharding is not None
        read, shape = functools.partial(self._source.read, stored), self.leaves[name].shape
        leaf = jax.make_array_from_callback(
            like.shape, like.sharding, lambda box: _padded(read, box or (), like, shape)
        )
        return jax.block_until_ready(leaf)  # before the next one is read


def open_checkpoint(path: Path, *, names: Names | None = None, verify: bool = True) -> Opened:
    """Opens a checkpoint, whoever wrote it.

    Args:
        path: its folder, or a file.
        names: what the other library calls our leaves; by default as we do, with dots for slashes.
        verify: see `OrbaxCheckpoint`.

    Raises:
        CheckpointError: there is no checkpoint there.
        RunError: what describes it is damaged.
    """
    source = foreign_source(path)
    if source is None:
        return OrbaxCheckpoint(path, verify=verify)
    if names is not None:
        named = NamedSource(source, names)
        return ForeignCheckpoint(path, named, {name: name for name in named.leaves}, {}, named.unused)
    values = getattr(source, "values", {})
    do = 'say what is meant: restore(path, like, names={"layer/kernel": "layer.kernel"}).'
    places = by_path(path, [*source.leaves, *values], do=do)
    arrays = {place: name for place, name in places.items() if name in source.leaves}
    others = {place: name for place, name in places.items() if name not in source.leaves}
    return ForeignCheckpoint(path, source, arrays, others, ())


def by_path(path: Path, names: Sequence[str], *, do: str) -> dict[str, str]:
    """Stored names by our paths: others put dots between the keys; a key that jshard escaped and exported stays one.

    Args:
        path: the checkpoint.
        names: of its leaves.
        do: what to do where two are one path, for the error.

    Raises:
        CheckpointError: two names are one path.
    """
    keys = {name: name.replace("/", ".").split(".") for name in names}
    places = {name: "/".join(_leaves.escape(_leaves.unescape(key)) for key in parts) for name, parts in keys.items()}
    found = {place: name for name, place in places.items()}
    if len(found) < len(places):
        twice = [name for name, place in places.items() if found[place] != name]
        raise CheckpointError(
            "Some names in the checkpoint are one and the same path.",
            where=[str(path), *(f"{name}  and {found[places[name]]}: {places[name]}" for name in twice)],
            why="dots and slashes both stand between the keys of a path.",
            do=do,
        )
    return found


def _without_layers(path: str) -> str:
    return "/".join(key for key in path.split("/") if not key.isdecimal())


def _any_box_of(leaf: StoredArray) -> StoredLeaf:
    """An array of which any box can be read, and nothing more is."""
    return StoredLeaf(shape=leaf.shape, dtype=leaf.dtype.name, chunk=(1,) * len(leaf.shape))


def _boxes_bytes(like: Any) -> int:
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None:
        return getattr(like, "nbytes", 0)
    shard = math.prod(like.sharding.shard_shape(like.shape)) * jnp.dtype(like.dtype).itemsize
    return shard * len(like.sharding.addressable_devices)


def unreadable(path: Path, why: str) -> RunError:
    """The error for a checkpoint that is damaged."""
    return RunError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another one.")


def _padded(
    read: Callable[[Box], np.ndarray], box: Box, like: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> np.ndarray:
    """A box of a stored array, with zeros where it reaches beyond its shape."""
    if like.shape == shape:
        return read(box)
    limits = [part.indices(size)[:2] for part, size in zip(box, like.shape, strict=True)]
    inside = tuple(slice(min(start, n), min(stop, n)) for (start, stop), n in zip(limits, shape, strict=True))
    beyond = [(0, stop - start - (i.stop - i.start)) for (start, stop), i in zip(limits, inside, strict=True)]
    return np.pad(read(inside), beyond)


def _described(leaf: Any) -> StoredLeaf:
    """What Orbax says of a leaf, in our words."""
    if not hasattr(leaf, "shape"):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return StoredLeaf(shape=(), dtype="int" if kind is bool else kind.__name__)
    storage_metadata = getattr(leaf, "storage_metadata", None)
    chunk = getattr(storage_metadata, "chunk_shape", None)
    return StoredLeaf(
        shape=tuple(leaf.shape), dtype=jnp.dtype(leaf.dtype).name, chunk=None if chunk is None else tuple(chunk)
    )


def _zeros(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)
    return like
