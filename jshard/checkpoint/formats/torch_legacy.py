"""Reads files of `torch.save` before PyTorch 1.6, and of `_use_new_zipfile_serialization=False`.

Such a file is five pickles, and then the size and the bytes of each storage. Their order is in the last pickle, so
where a tensor begins is only known once all pickles are read.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jshard._files import open_regular
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import damaged, is_size
from jshard.checkpoint.formats.torch_archive import TENSOR, Storage
from jshard.checkpoint.formats.torch_pickle import DTYPES, Allowed, Unpickled, load_each, short
from jshard.errors import RunError

MARK = b"\x80"
"""The first byte of a pickle."""

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_NUM_PICKLES = 5
_SIZE_BYTES = 8  # before the bytes of a storage
_MOST_PICKLE_BYTES = 64 << 20  # of all five; those of tens of thousands of tensors have some megabytes


class LegacyFile(NamedTuple):
    """A file of the format before archives."""

    path: Path

    def regions(self, allowed: Allowed) -> Unpickled:
        """Returns the value, with an unread `FileRegion` for each tensor; these names are also allowed."""
        names = {**TENSOR, **allowed}
        with open_regular(self.path) as opened:
            file = io.BufferedReader(opened)
            content = file.read(_MOST_PICKLE_BYTES)
            layout = _layout(self.path, content, names)
            storages = _storages(self.path, file, layout)
        # Again, now that the storages have places. What was read first has none.
        placed = functools.partial(_placed, storages)
        values, _ = load_each(content, _NUM_PICKLES, names, self.path, storage=placed)
        return values[3]


class _Size(NamedTuple):
    """The size of a storage, as the tensors in it state it."""

    numel: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


class _Layout(NamedTuple):
    """What the pickles say about the bytes after them."""

    start: int  # of the first storage
    keys: list[Unpickled]  # of the storages, in their order
    sizes: Mapping[str, _Size]


def _layout(path: Path, content: bytes, names: Allowed) -> _Layout:
    """Reads the pickles for the storages alone."""
    sizes: dict[str, _Size] = {}
    unplaced = functools.partial(_unplaced, path, sizes)
    values, end = load_each(content, _NUM_PICKLES, names, path, storage=unplaced)
    magic, protocol, system, _, keys = values
    is_torch = magic == _MAGIC and protocol == _PROTOCOL
    if not is_torch or not isinstance(system, dict) or not isinstance(keys, list):
        raise damaged(path, "it is a pickle, and not one of torch.save.")
    if system.get("little_endian") is not True:
        raise damaged(path, "it is not little-endian.")
    return _Layout(end, keys, sizes)


def _unplaced(
    path: Path,
    sizes: dict[str, _Size],
    kind: object,
    dtype: Unpickled,
    key: object,
    location: object,
    numel: Unpickled,
    view: object = None,
) -> Storage:
    """Notes the size of a storage whose place in the file is not known yet."""
    if kind != "storage" or dtype not in DTYPES or not isinstance(key, str) or not is_size(numel):
        raise ValueError(f"a storage has the key {short(key)} and {short(numel)} elements")
    if view is not None:
        raise _storage_in_storage(path)
    size = _Size(numel, dtype)
    if sizes.setdefault(key, size) != size:
        raise ValueError(f"its storage {short(key)} has several sizes")
    return Storage(path, 0, size.num_bytes, dtype)


def _storages(path: Path, file: BinaryIO, layout: _Layout) -> dict[str, Storage]:
    """Returns the places of the storages, which follow each other."""
    num_bytes = file.seek(0, io.SEEK_END)
    storages: dict[str, Storage] = {}
    offset = layout.start
    for key in layout.keys:
        size = layout.sizes.get(key) if isinstance(key, str) else None
        if size is None or key in storages:
            # Its length is unknown, and so is where those after it begin.
            raise damaged(path, f"its list of storages has {short(key)}, which no tensor is in, or twice.")
        file.seek(offset)
        numel = int.from_bytes(file.read(_SIZE_BYTES), "little")
        offset += _SIZE_BYTES
        if numel != size.numel or offset + size.num_bytes > num_bytes:
            raise _misplaced(path, size, offset, num_bytes)
        storages[key] = Storage(path, offset, size.num_bytes, size.dtype)
        offset += size.num_bytes
    missing = sorted(layout.sizes.keys() - storages.keys())
    if missing:
        raise damaged(path, f"its list of storages does not have {short(missing[0])}.")
    return storages


def _placed(storages: Mapping[str, Storage], kind: object, dtype: object, key: str, *_: object) -> Storage:
    return storages[key]


def _misplaced(path: Path, size: _Size, offset: int, num_bytes: int) -> RunError:
    return damaged(path, f"it has {num_bytes} bytes; a storage of {size.numel} {size.dtype} should be at {offset}.")


def _storage_in_storage(path: Path) -> CheckpointError:
    return CheckpointError(
        "The file has a storage inside of another.",
        where=str(path),
        why="versions of PyTorch before 0.4 wrote it, and nothing says where it ends.",
        do="save it again with PyTorch, as an archive:\n"
        f"python -c \"import torch; p = {str(path)!r}; torch.save(torch.load(p, weights_only=True), p + '.pt')\"",
    )
