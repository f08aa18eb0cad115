"""A checkpoint that is opened: its leaves by path, and a way to read them, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jshard._errors import RunError
from jshard.checkpoint import seal as _seal
from jshard.checkpoint import storage
from jshard.checkpoint.failures import reason
from jshard.checkpoint.formats import NamedSource, Source, foreign_source
from jshard.checkpoint.formats.names import Names
from jshard.checkpoint.seal import Seal, StoredLeaf
from jshard.checkpoint.whereabouts import no_checkpoint

_UNNAMED = StoredLeaf(shape=(), dtype="str")


class Opened(Protocol):
    """A checkpoint that is opened.

    Attributes:
        path: where it lies.
        seal: what it says of itself; None if jshard did not write it.
        leaves: what it holds, by path.
    """

    path: Path
    seal: Seal | None
    leaves: Mapping[str, StoredLeaf]

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
        try:
            self.seal = _seal.read(path)
        except RunError:
            if verify:
                raise
            self.seal = None
        self.leaves: Mapping[str, StoredLeaf] = self._from_orbax() if self.seal is None else self.seal.leaves

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.read`."""
        # Arrays without elements are in the seal alone.
        empty = {path: like for path, like in wanted.items() if 0 in getattr(like, "shape", ())}
        found = {path: _zeros(like) for path, like in empty.items()}
        full = {path: like for path, like in wanted.items() if path not in empty}
        try:
            return found | (storage.load(self.path, full, plain=self.seal is None) if full else {})
        except Exception as error:
            raise unreadable(self.path, reason(error)) from error

    def _from_orbax(self) -> dict[str, StoredLeaf]:
        try:
            found, mark = storage.metadata(self.path)
        except FileNotFoundError as error:
            if storage.is_committed(self.path):
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
        return {path: _described(leaf) for path, leaf in found.items()}


class ForeignCheckpoint:
    """What another library wrote: leaves under our paths, read box by box.

    Args:
        path: where it lies.
        source: its arrays.
        names: stored name of every leaf, by path.
        values: its numbers and texts, by path.
        unnamed: stored names that have no counterpart here.
    """

    seal: Seal | None = None

    def __init__(
        self, path: Path, source: Source, names: Mapping[str, str], values: Mapping[str, Any], unnamed: Sequence[str]
    ) -> None:
        self.path, self._source, self._names, self._values = path, source, names, values
        arrays = {
            name: StoredLeaf(shape=source.leaves[stored].shape, dtype=source.leaves[stored].dtype.name)
            for name, stored in names.items()
        }
        others = {name: StoredLeaf(shape=(), dtype=type(value).__name__) for name, value in values.items()}
        self.leaves: Mapping[str, StoredLeaf] = arrays | others | dict.fromkeys(unnamed, _UNNAMED)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.read`; host memory holds the boxes of one leaf."""
        return {name: self._read(name, like) for name, like in wanted.items()}

    def _read(self, name: str, like: Any) -> Any:
        if name in self._values:
            return self._values[name]
        stored = self._names[name]
        if not isinstance(like, jax.ShapeDtypeStruct):
            return self._source.read(stored, tuple(slice(None) for _ in self.leaves[name].shape))
        assert like.sharding is not None
        leaf = jax.make_array_from_callback(like.shape, like.sharding, lambda box: self._source.read(stored, box or ()))
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
    # Others put dots between the keys.
    values = {_as_path(name): value for name, value in getattr(source, "values", {}).items()}
    known = {name: value for name, value in values.items() if type(value) in (int, float, str)}
    return ForeignCheckpoint(path, source, {_as_path(name): name for name in source.leaves}, known, ())


def _as_path(name: str) -> str:
    return name.replace(".", "/")


def unreadable(path: Path, why: str) -> RunError:
    """The error for a checkpoint that is damaged."""
    return RunError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another one.")


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
