"""A state as packed parts, one of each process: a checkpoint in a place that is no folder, such as another's memory.

A part is the length of a manifest, the manifest, and a packed file. The pieces of all parts make up every array once,
so that a part is about the bytes of the state over the number of processes, and any mesh can read them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.errors import reason
from jshard.checkpoint.files.dealing import HeldState
from jshard.checkpoint.files.places import Parts
from jshard.checkpoint.files.writing import write_file
from jshard.checkpoint.manifest import Manifest
from jshard.checkpoint.opened import unreadable
from jshard.checkpoint.packed import PackedCheckpoint

Read = Callable[[int, int], bytes | bytearray]
"""Some bytes of a part: from where, and how many."""

_HEAD_BYTES = 8
_ONE_FILE = 1 << 62  # bytes of a part, at most


class Packing:
    """What this process packs of a state. The values are copied, or held, when it is made: the step may go on.

    Args:
        state: what `save` takes; every process packs it.
        step: of the state.
    """

    def __init__(self, state: Any, *, step: int) -> None:
        leaves = _leaves.storable(_leaves.flatten(state))
        shapes = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(state).items()}
        stored = {key: _manifest.describe(leaf, shapes.get(key)) for key, leaf in leaves.items()}
        values = {key: leaves[key] for key, leaf in stored.items() if not leaf.is_array}
        self._manifest = Manifest(leaves=stored, step=step, values=values)
        self._held = HeldState(leaves, stored, most_bytes=_ONE_FILE)

    def finish(self) -> list[memoryview]:
        """The part, in pieces that are to be written one after another."""
        views = _Views()
        (layout,) = self._held.files
        checksum = write_file(views, "", layout, lambda number: self._held.values(0, number))
        described = dataclasses.replace(self._manifest, packed={"": (layout.num_bytes, checksum)})
        index = json.dumps(_manifest.to_json(described)).encode()
        return [memoryview(len(index).to_bytes(_HEAD_BYTES, "little") + index), *views.found]


class _Views:
    """A `Sink` that keeps what it is given, without a copy."""

    part_bytes = 4 << 20

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        self.found = [view for part in parts for view in part()]


class _Parts:
    """A `FileSource` of parts: the packed file of each begins somewhere in it."""

    gap_bytes = 1 << 20
    read_bytes = 4 << 20
    threads = 2

    def __init__(self, parts: dict[str, tuple[Read, int]]) -> None:
        self._parts = parts

    def size(self, name: str) -> int:
        raise NotImplementedError  # the manifests say it

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        read, begin = self._parts[name]
        found = memoryview(read(begin + offset, sum(view.nbytes for view in views)))
        for view in views:
            view[:] = found[: view.nbytes]
            found = found[view.nbytes :]

    def mapped(self, name: str) -> None:
        return None


def opened_parts(name: Path, parts: Sequence[Read]) -> PackedCheckpoint:
    """Packed parts as a checkpoint; their manifests are read.

    Args:
        name: what messages call it.
        parts: the readers of all parts.

    Raises:
        RunError: something of them is damaged.
    """
    manifests, places = [], {}
    for number, read in enumerate(parts):
        try:
            size = int.from_bytes(read(0, _HEAD_BYTES), "little")
            manifest = _manifest.from_json(json.loads(bytes(read(_HEAD_BYTES, size))))
        except (OSError, ValueError) as error:
            raise unreadable(name, reason(error)) from error
        manifests.append(dataclasses.replace(manifest, packed={f"part {number}": manifest.packed[""]}))
        places[f"part {number}"] = read, _HEAD_BYTES + size
    packed = {file: facts for manifest in manifests for file, facts in manifest.packed.items()}
    return PackedCheckpoint(name, dataclasses.replace(manifests[0], packed=packed), _Parts(places))
