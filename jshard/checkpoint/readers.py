"""A checkpoint that is opened, whoever wrote it: its leaves by path, read whole onto devices, or box by box."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import storage
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.formats import DcpSource, NamedSource, SafetensorsSource, foreign_source
from jshard.checkpoint.formats.source import ArraySource, Box, Names, bounds, whole
from jshard.checkpoint.lookup import no_checkpoint
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.opened import BOX_BYTES, Opened, boxes_bytes, cut, padded, unreadable
from jshard.checkpoint.packed import PackedCheckpoint, is_packed, packed_source
from jshard.checkpoint.storage import FOLDER
from jshard.errors import RunError, printable

_UNREAD = StoredLeaf(shape=(), dtype="str")  # what has no name here, and values that nobody has asked for
_KINDS = {int: "int", bool: "int", float: "float", str: "str"}


class OrbaxCheckpoint(Opened):
    """What jshard or plain Orbax wrote.

    Orbax reads whole leaves, or the shards of devices; boxes are read by the library below it, TensorStore.

    Args:
        path: its folder.
        manifest: its manifest, if it has one.
        verify: whether a manifest that is lost is an error; else the folder is read as one of plain Orbax.

    Raises:
        CheckpointError: there is no checkpoint there.
        RunError: what describes it is damaged.
    """

    path: Path

    def __init__(self, path: Path, manifest: Manifest | None, *, verify: bool = True) -> None:
        self.path, self.manifest, self._verify = path, manifest, verify
        self._names: dict[str, str] = {}  # of leaves that are called otherwise there
        self.leaves = self._from_orbax() if self.manifest is None else self.manifest.leaves
        names = storage.items(path) if self.manifest is None else ()
        self.items = tuple("/".join(map(_leaves.escape, name.split("/"))) for name in names)
        self._arrays = functools.lru_cache(maxsize=64)(_open)

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; finds leaves of others whose keys have slashes, and their only item by its name."""
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

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`."""
        return storage.in_flight_bytes(reads)

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`."""
        # Arrays without elements are in the manifest alone.
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
        """See `Opened.read`."""
        leaf = self.leaves[name]
        if 0 in leaf.shape:
            return np.zeros(tuple(stop - start for start, stop in bounds(box, leaf.shape)), leaf.dtype)
        array = self._array(name)
        if array is None:
            return self.load({name: leaf.on_host()})[name][box]
        try:
            return array[box].read().result() if box else array.read().result()
        except Exception as error:
            raise unreadable(self.path, f"{printable(name)}: {reason(error)}") from error

    def boxes(self, name: str, budget_bytes: int = BOX_BYTES) -> Iterator[Box]:
        """Boxes that make up an array, each of whole chunks and of at most so many bytes, unless a chunk has more."""
        leaf, array = self.leaves[name], self._array(name)
        chunk = leaf.shape if array is None or not leaf.shape else array.chunk_layout.read_chunk.shape
        return cut(leaf.shape, np.dtype(leaf.dtype).itemsize, tuple(max(1, size) for size in chunk), budget_bytes)

    def folder(self, name: str) -> str | None:
        """Where in the checkpoint the files of an array are; None if they hold others too."""
        if self._layout is None or self._layout[2]:
            return None
        return (self._layout[0] / self._folder_name(name)).relative_to(self.path).as_posix()

    def _array(self, name: str) -> Any:
        """An array that is opened; None where only Orbax knows how it is stored, or nothing is."""
        if self._layout is None or 0 in self.leaves[name].shape:
            return None
        try:
            array = self._arrays(*self._layout, self._folder_name(name))
        except Exception as error:
            if self.manifest is None:  # keys with slashes are elsewhere: let Orbax look, or raise
                return None
            raise unreadable(self.path, f"{printable(name)}: {reason(error)}") from error
        if tuple(array.shape) != self.leaves[name].shape:
            why = f"{printable(name)}: its shape is {tuple(array.shape)}; the checkpoint says {self.leaves[name].shape}"
            raise unreadable(self.path, why)
        return array

    @functools.cached_property
    def _layout(self) -> tuple[Path, str, bool] | None:
        """Folder and form of the arrays, and whether they share files; None if there are several folders of them."""
        files = (self.path / storage.DESCRIPTION, *sorted(self.path.glob(f"*/{storage.DESCRIPTION}")))
        found = [file for file in files if file.is_file()]
        if len(found) != 1 or found[0].parent.name not in ("state", "default", self.path.name):
            return None
        try:
            described = json.loads(found[0].read_bytes())
        except (OSError, ValueError):
            described = None
        if not isinstance(described, dict):  # Orbax raises when it is read
            return None
        return found[0].parent, "zarr3" if described.get("use_zarr3") else "zarr", bool(described.get("use_ocdbt"))

    def _stored_name(self, path: str) -> str:
        """The path of a leaf as Orbax has it: others write keys with dots and slashes as they are."""
        return self._names.get(path, path)

    def _folder_name(self, path: str) -> str:
        return self._stored_name(path).replace("/", ".")

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
            do = "copy it again, or restore another one; or this one without any check: verify=False."
            raise _unsealed(self.path, do)
        leaves = {name: _described(leaf) for name, leaf in found.items()}
        if "jshard" in mark:
            return leaves
        self._names = {"/".join(map(_leaves.escape, name.split("/"))): name for name in leaves}
        return {path: leaves[name] for path, name in self._names.items()}


class ForeignCheckpoint(Opened):
    """What another library wrote: leaves under our paths, read box by box.

    Args:
        path: where it is.
        source: its arrays, and values that are read when they are asked for.
        names: what it calls our leaves; by default as we do, with dots for slashes.

    Raises:
        CheckpointError: two of its names are one path.
    """

    def __init__(self, path: Path, source: DcpSource | SafetensorsSource, names: Names | None = None) -> None:
        self.path = path
        if names is None:
            values: Mapping[str, Any] = source.values
            self._source: ArraySource = source
            places, unnamed = _by_path(path, [*source.leaves, *values]), []
        else:
            named = NamedSource(source, names)
            values, self._source, places, unnamed = {}, named, {name: name for name in named.leaves}, named.unused
        arrays = self._source.leaves
        self._names = {place: name for place, name in places.items() if name in arrays}
        self._values = {place: name for place, name in places.items() if name not in arrays}
        self._value = functools.cache(lambda name: values[self._values[name]])
        leaves = {place: arrays[name] for place, name in self._names.items()}
        self.leaves = leaves | dict.fromkeys([*self._values, *unnamed], _UNREAD)

    def leaves_for(self, asked: Collection[str]) -> Mapping[str, StoredLeaf]:
        """See `Opened.leaves_for`; of those that are asked for, what is no number and no text is no leaf."""
        wanted = {_without_layers(path) for path in asked}
        found = {name: type(self._value(name)) for name in self._values if _without_layers(name) in wanted}
        leaves = {name: leaf for name, leaf in self.leaves.items() if found.get(name, str) in _KINDS}
        kinds = {name: _KINDS[kind] for name, kind in found.items() if kind in _KINDS}
        return leaves | {name: StoredLeaf(shape=(), dtype=kind) for name, kind in kinds.items()}

    def in_flight_bytes(self, reads: Mapping[str, Any]) -> int:
        """See `Opened.in_flight_bytes`: the boxes of one leaf for all devices here."""
        return max(map(boxes_bytes, reads.values()), default=0)

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Opened.load`; host memory holds the boxes of one leaf."""
        return {name: self._load(name, like) for name, like in wanted.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """See `Opened.read`."""
        return self._source.read(self._names[name], box)

    def values(self) -> dict[str, Any]:
        """See `Opened.values`; what lists PyTorch keeps beside the arrays is not among them."""
        found = {name: self._value(name) for name in self._values}
        return {name: value for name, value in found.items() if isinstance(value, int | float | str)}

    def _load(self, name: str, like: Any) -> Any:
        if name in self._values:
            return self._value(name)
        stored = self.leaves[name]
        if not isinstance(like, jax.ShapeDtypeStruct):
            return self.read(name, whole(stored))
        assert like.sharding is not None
        read = functools.partial(self.read, name)
        leaf = jax.make_array_from_callback(
            like.shape, like.sharding, lambda box: padded(read, box or (), like, stored.shape)
        )
        return jax.block_until_ready(leaf)  # before the next one is read


def open_checkpoint(path: Place, *, names: Names | None = None, verify: bool = True) -> Opened:
    """Opens a checkpoint, whoever wrote it; for the arguments see the two classes above.

    Raises:
        CheckpointError: there is no checkpoint there.
        RunError: what describes it is damaged.
    """
    if isinstance(path, BucketPath):
        return own_checkpoint(path, verify=verify)
    if path.name == FOLDER and is_packed(path.parent):
        raise no_checkpoint(path)
    source = foreign_source(path)
    return own_checkpoint(path, verify=verify) if source is None else ForeignCheckpoint(path, source, names)


def own_checkpoint(path: Place, *, verify: bool = True) -> PackedCheckpoint | OrbaxCheckpoint:
    """Opens what jshard or plain Orbax wrote; for the arguments and errors see the classes."""
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


def _unsealed(path: Path, do: str) -> RunError:
    """The error for a checkpoint of ours that has lost its manifest."""
    return RunError(
        "The checkpoint cannot be read.",
        where=str(path),
        why=f"its manifest, {_manifest.NAME}, is missing: it was copied by half, or somebody removed it.",
        do=do,
    )


def _open(folder: Path, driver: str, is_shared: bool, name: str) -> Any:
    import tensorstore  # slow to import; Orbax brings it

    place: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if is_shared:
        place = {"driver": "ocdbt", "base": place, "path": f"{name}/"}
    else:
        place["path"] += f"{name}/"
    # A chunk that is missing is an error, and not zeros.
    spec = {"driver": driver, "kvstore": place, "fill_missing_data_reads": False}
    return tensorstore.open(spec, open=True, read=True).result()


def _by_path(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Stored names by our paths: others put dots between the keys; a key that jshard escaped and exported stays one."""
    keys = {name: name.replace("/", ".").split(".") for name in names}
    places = {name: "/".join(_leaves.escape(_leaves.unescape(key)) for key in parts) for name, parts in keys.items()}
    found = {place: name for name, place in places.items()}
    if len(found) < len(places):
        twice = [name for name, place in places.items() if found[place] != name]
        raise CheckpointError(
            "Some names in the checkpoint are one and the same path.",
            where=[str(path), *(f"{name}  and {found[places[name]]}: {places[name]}" for name in twice)],
            why="dots and slashes both stand between the keys of a path.",
            do='restore(path, like, names={"layer/kernel": "layer.kernel"})  # says what is meant\n'
            "To import it, say so by hf_names(config) in a model file: --model MODEL.py",
        )
    return found


def _without_layers(path: str) -> str:
    return "/".join(key for key in path.split("/") if not key.isdecimal())


def _described(leaf: Any) -> StoredLeaf:
    """What Orbax says of a leaf, in our words."""
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
