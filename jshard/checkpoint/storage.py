"""The only module that calls Orbax: what is asked of it, and why."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import json
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jshard._compat import set_orbax_deadline
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.buckets import BucketFolder, BucketPath, Place
from jshard.checkpoint.errors import quiet
from jshard.checkpoint.files.layout import FileLayout
from jshard.checkpoint.files.places import LocalFolder, Sink
from jshard.checkpoint.files.writing import write_file
from jshard.checkpoint.manifest import MARK, Manifest, StoredLeaf
from jshard.checkpoint.manifest import NAME as MANIFEST
from jshard.errors import RunError

_UNKNOWN_BYTES = 1 << 40


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that could be taken: what the system has, or less where a container or a job has a limit.

    A large number where it is not known; `root` is that of the file system that says it.
    """
    return max(0, min((_available(root), *_left_in_groups(root))))


def _available(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return _UNKNOWN_BYTES


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left of the limits of the control groups that this process is in."""
    with contextlib.suppress(OSError):
        top = root / "sys/fs/cgroup"
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                own = (top / kinds / path.lstrip("/")).resolve()
                groups = [group for group in (own, *own.parents) if group.is_relative_to((top / kinds).resolve())]
                for group in groups:
                    yield from _left(group, *(_V1 if kinds else _V2))


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # a group may have no limit: "max"
        left = int((group / limit).read_text()) - int((group / used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            left += int(size) if name == cache else 0  # given back when somebody wants it
        yield left


# Saves and reads through Orbax.

COMMIT_MARK = "commit_success.txt"  # Orbax adds it at the end, and renames the folder
ITEM = "state"
FOLDER = "arrays"  # of packed files

_MIB = 1 << 20
_IN_FLIGHT_BYTES = 128 * _MIB  # of reads: memory beside the state itself
_SHARE_OF_FREE = 8  # several processes may share a host
_ARRAY = "zarr.json"  # describes an array, in its folder
_AUTO = "AUTO"  # Orbax finds the tree: there is one
DESCRIPTION = "_METADATA"  # of the arrays of one tree, in its folder
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"  # Orbax's, in the folder of a checkpoint


def save_zarr(
    path: Path, leaves: Mapping[str, Any], *, on_written: Callable[[], object], timeout_s: float
) -> Callable[[], None]:
    """The same for leaves by path that plain Orbax is to read; `on_written` is called when some were written."""
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

    set_orbax_deadline(timeout_s)
    with quiet(), saving_options(ocp, on_written, timeout_s):
        response = ocp.save_async(str(path), _leaves.nested(leaves), custom_metadata=dict(MARK))

    return functools.partial(_wait, response, timeout_s)


def _wait(response: Any, timeout_s: float) -> None:
    with quiet():
        try:
            response.result(timeout_s)
        except TimeoutError as error:  # Orbax's own deadlines do not cover all that it waits for
            raise TimeoutError(f"not all processes have written their part after {timeout_s:.0f} s.") from error


class Held(Protocol):
    """The layouts of files, and the values of their pieces."""

    @property
    def files(self) -> Sequence[FileLayout]:
        """The layouts."""
        ...

    def values(self, file: int, number: int) -> np.ndarray:
        """The values of a piece, by the number of the file and its own there; each is asked for once, in order."""
        ...


class PackedPart:
    """What this process writes of a packed checkpoint, as Orbax is given it.

    Args:
        held: what is written.
        on_written: called in other threads whenever some of it was.
        together: writes, and returns when all processes have.

    Attributes:
        files: size and sum of the index of each file that was written, by name.
    """

    def __init__(
        self,
        held: Held,
        on_written: Callable[[], object] = lambda: None,
        *,
        together: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> None:
        self._held, self._on_written, self._together = held, on_written, together
        self.begin = ""  # of the names
        self.files: dict[str, tuple[int, int]] = {}

    def write_all(self, sink: Sink) -> None:
        """Writes all files; those of all processes are on the disk when this returns.

        Orbax gives the folder its name when its own process has written.
        """
        self._together(lambda: self.write(sink))

    def write(self, sink: Sink) -> None:
        """Writes all files of this process."""
        held = self._held
        for number, layout in enumerate(held.files):
            name = f"{self.begin}{jax.process_index():05d}-{number:03d}.safetensors"
            values = functools.partial(held.values, number)
            self.files[name] = layout.num_bytes, write_file(sink, name, layout, values, self._on_written)


class PackedHandler:
    """Writes the part of each process into a folder that Orbax makes, and gives its final name when all are done."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it can save something."""
        return isinstance(checkpointable, PackedPart)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it can load something: that is jshard's own work."""
        return False

    async def save(self, directory: Any, checkpointable: PackedPart) -> Any:
        """Begins to write, see Orbax."""

        async def work() -> None:
            folder = await directory.await_creation()
            await asyncio.to_thread(checkpointable.write_all, LocalFolder(Path(folder)))

        return work()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Nothing: see `is_abstract_handleable`."""
        raise NotImplementedError("jshard.checkpoint.restore reads these files")

    async def metadata(self, directory: Any) -> None:
        """Nothing: the manifest has it."""


def save_async(path: Path, part: PackedPart, *, timeout_s: float) -> Callable[[], None]:
    """Begins to write a packed checkpoint; every process calls it.

    Args:
        path: a folder that does not exist yet.
        part: what this process writes of it.
        timeout_s: how long it may take.

    Returns:
        A function that waits until all processes have written and the checkpoint is committed.
    """
    from orbax.checkpoint import v1 as ocp

    set_orbax_deadline(timeout_s)
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    context.checkpointables.registry = ocp.handlers.local_registry(include_global_registry=False)
    context.checkpointables.registry.add(PackedHandler, checkpointable_name=FOLDER)
    with quiet(), context:
        response = ocp.save_checkpointables_async(str(path), {FOLDER: part}, custom_metadata=dict(MARK))
    return functools.partial(_wait, response, timeout_s)


def upload_packed(path: BucketPath, part: PackedPart, *, timeout_s: float) -> Callable[[], None]:
    """`save_async` into a bucket, where there is nothing to rename: the manifest makes it a checkpoint.

    No two saves write the same names: one that was taken for dead, and wakes up, changes nothing that counts.
    """
    part.begin = f"{secrets.token_hex(4)}-"
    pool = concurrent.futures.ThreadPoolExecutor(1, "jshard-upload")
    done = pool.submit(part.write, BucketFolder(path / FOLDER))
    pool.shutdown(wait=False)

    def wait() -> None:
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"its part of {path} is not written after {timeout_s:.0f} s.") from error

    return wait


def load(path: Path, wanted: Mapping[str, Any], *, plain: bool = False) -> dict[str, Any]:
    """Reads some leaves, by path.

    Args:
        path: the folder of a committed checkpoint.
        plain: whether somebody else wrote it, who may have stored lists.
        wanted: what to read, by path: arrays with shardings, numpy arrays, numbers and texts, in the shapes that are
            stored, or larger ones, which are filled up with zeros.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Each process reads for itself, and they meet afterwards: Orbax's own meetings end after 300 s, whatever is asked.
    context.multiprocessing.active_processes = {jax.process_index()}
    context.multiprocessing.primary_host = jax.process_index()
    context.pytree.loading.partial_load = True  # some leaves of those that are there
    context.memory.read_concurrent_bytes = in_flight_bytes(wanted)
    context.array.loading.enable_padding_and_truncation = True  # shapes were compared: only padding can differ
    found: dict[str, Any] = {}
    with quiet(), context:
        for name, (folder, item) in _trees(path).items():
            begin = f"{name}/" if name else ""
            here = {
                f"{key}/".removeprefix(begin)[:-1]: like for key, like in wanted.items() if f"{key}/".startswith(begin)
            }
            if not here:
                continue
            stored = ocp.metadata(folder, checkpointable_name=item).metadata if plain else None
            asked = _as_stored(stored, here) if plain else _leaves.nested(here)
            found |= _leaves.flat(ocp.load(folder, asked, checkpointable_name=item), name)
    return {key: leaf for key, leaf in found.items() if key in wanted}


def only_item(path: Path, asked: Collection[str]) -> str | None:
    """The name of the one tree that others saved, if all paths ask for it by that name, and its own do not have it."""
    names = [] if (path / DESCRIPTION).is_file() else [file.parent.name for file in path.glob(f"*/{DESCRIPTION}")]
    if len(names) != 1 or not asked or not all(name.startswith(f"{names[0]}/") for name in asked):
        return None
    described, _ = metadata(path)
    return None if any(name.split("/")[0] == names[0] for name in described) else names[0]


def items(path: Path) -> tuple[str, ...]:
    """The names of the trees in a checkpoint, where it holds several.

    Orbax saves such ones for `Composite(params=..., ema_params=...)` and `save_checkpointables`, and one of them may be
    a composite again. Left to itself, it reads one of them.
    """
    folders = [] if (path / DESCRIPTION).is_file() else [path]
    names = []
    for folder in folders:  # grows
        for below in folder.iterdir() if folder.is_dir() else ():
            if (below / DESCRIPTION).is_file():
                names.append(below.relative_to(path).as_posix())
            elif below.is_dir() and (folder == path or any(below.glob(f"*/{DESCRIPTION}"))):
                folders.append(below)
    return tuple(sorted(names)) if len(names) > 1 else ()


def is_item(path: Place) -> bool:
    """Whether a folder is one tree of a checkpoint by others."""
    if isinstance(path, BucketPath):
        return False
    is_tree = (path / DESCRIPTION).is_file() and not (path / CHECKPOINT_METADATA).is_file()
    return is_tree and (path.parent / CHECKPOINT_METADATA).is_file() and not (path.parent / MANIFEST).is_file()


def _trees(path: Path) -> dict[str, tuple[str, str | None]]:
    """What Orbax is to read, a checkpoint and an item of it (or itself), by the beginning of the paths."""
    if names := items(path):
        # Of a composite in a composite Orbax takes the items for themselves.
        return {name: (str(path / name), None) if "/" in name else (str(path), name) for name in names}
    if is_item(path):
        return {"": (str(path.parent), path.name)}
    return {"": (str(path), _AUTO)}


def _as_stored(stored: Any, wanted: Mapping[str, Any], path: str = "") -> Any:
    """What is wanted, as a tree of the kinds of nodes that are stored; Orbax reads lists whole or not at all."""
    below = lambda key: f"{path}/{key}" if path else str(key)
    if isinstance(stored, Mapping):
        found = {key: _as_stored(node, wanted, below(key)) for key, node in stored.items() if _asks(wanted, below(key))}
        return {key: node for key, node in found.items() if not isinstance(node, dict) or node}
    if isinstance(stored, list | tuple):
        return [_as_stored(node, wanted, below(number)) for number, node in enumerate(stored)]
    if path in wanted or stored is None:
        return wanted.get(path)
    return np.empty(stored.shape, stored.dtype) if hasattr(stored, "shape") else stored


def _asks(wanted: Mapping[str, Any], path: str) -> bool:
    return any(key == path or key.startswith(f"{path}/") for key in wanted)


def in_flight_bytes(wanted: Mapping[str, Any]) -> int:
    """The most that a read of some leaves has in memory beside them: some shards, and enough to do at once.

    Where little memory is free it is a part of that, and one shard in any case.
    """
    shard = max(map(_shard_bytes, wanted.values()), default=0)
    return max(1, shard, min(max(_IN_FLIGHT_BYTES, 4 * shard), free_bytes() // _SHARE_OF_FREE))


def metadata(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """What Orbax says that a checkpoint holds, by path, and what was noted with it; no array is read.

    Raises a `FileNotFoundError` if there is no checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    found: dict[str, Any] = {}
    noted: Any = None
    for name, (folder, item) in _trees(path).items():
        try:
            with quiet():
                described = ocp.metadata(folder, checkpointable_name=item)
        except ocp.errors.InvalidLayoutError as error:
            raise FileNotFoundError(str(error)) from error
        if described.metadata is None:
            raise ValueError("a file that describes its arrays is missing or damaged")
        found |= _leaves.flat(described.metadata, name)
        noted = described.custom_metadata
    return found, noted if isinstance(noted, Mapping) else {}


def is_committed(path: Place) -> bool:
    """Whether a save was completed there: half-written folders and those of others have no mark."""
    return (path / (MANIFEST if isinstance(path, BucketPath) else COMMIT_MARK)).is_file()


def cut_padding(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gives arrays that were written with padding at their ends their logical shapes; nothing is copied."""
    import tensorstore  # slow to import; Orbax brings it

    for path, shape in shapes.items():
        place = {"driver": "file", "path": f"{_array_folder(folder, path)}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
        array.resize(exclusive_max=shape).result()


def check_whole(folder: Path, leaves: Mapping[str, StoredLeaf], files: Mapping[str, tuple[int, int | None]]) -> None:
    """Raises a `RunError` if some of the arrays, or of the files that they are stored in, are not there."""
    found: collections.Counter[str] = collections.Counter()
    depth = 1 if "" in leaves else 2  # a state that is one array has no folder for it
    for name in files:
        parts = name.split("/")
        found["/".join(parts[:depth])] += parts[depth : depth + 1] == ["c"]
    bad = []
    for path, leaf in leaves.items():
        array = _array_folder(Path(), path).as_posix()
        if not leaf.is_array or not leaf.nbytes:
            continue
        if f"{array}/{_ARRAY}" not in files:
            bad.append(f"{path or 'the array'}  is missing")
        elif found[array] < (wanted := _num_files(folder / array / _ARRAY)):
            bad.append(f"{path or 'the array'}  {found[array]} files of {wanted}")
    if bad:
        raise RunError(
            "The checkpoint could not be written.",
            where=[str(folder), *bad],
            why=f"{len(bad)} of {len(leaves)} leaves are not there, or not whole, when all has been written.",
            do="look for what else writes or deletes in that folder, and save again.",
        )


def check_packed(folder: Path, manifest: Manifest) -> None:
    """Raises a `RunError` if some of the packed files are not there, or not whole."""
    bad = []
    for name, (size, _) in manifest.packed.items():
        place = f"{FOLDER}/{name}"
        here = manifest.files[place][0] if place in manifest.files else None
        if here != size:
            bad.append(f"{place}  is missing" if here is None else f"{place}  {here} bytes of {size}")
    if bad:
        raise RunError(
            "The checkpoint could not be written.",
            where=[str(folder), *bad],
            why=f"{len(bad)} of {len(manifest.packed)} files are not there, or not whole, when all has been written.",
            do="look for what else writes or deletes in that folder, and save again.",
        )


def _array_folder(folder: Path, path: str) -> Path:
    return folder / ITEM / path.replace("/", ".")


def _num_files(described: Path) -> int:
    """In how many files an array is stored."""
    array = json.loads(described.read_bytes())
    cut = array["chunk_grid"]["configuration"]["chunk_shape"]
    return math.prod(-(-size // part) for size, part in zip(array["shape"], cut, strict=True))


class _Progress:
    """What Orbax reports while it saves."""

    def __init__(self, on_written: Callable[[], object]) -> None:
        self._on_written = on_written

    def on_transfer_start(self, keypath: Any) -> None:
        pass

    def on_transfer_end(self, keypath: Any) -> None:
        pass

    def on_write_start(self, keypath: Any) -> None:
        pass

    def on_write_end(self, keypath: Any) -> None:
        self._on_written()


def saving_options(ocp: Any, on_written: Callable[[], object], timeout_s: float) -> Any:
    """The context of Orbax in which some leaves are written."""
    context = ocp.Context()
    context.asynchronous.timeout_secs = max(1, int(timeout_s))
    context.memory.serialization_status_callback = _Progress(on_written)
    saving = context.array.saving
    saving.use_ocdbt = False
    saving.use_zarr3 = True
    saving.use_compression = False
    saving.enable_write_sharding_file = False  # what is on disk knows nothing of the mesh
    # By default this follows the text of JAX_PLATFORMS. A leaf that all processes hold is written once, in parts.
    saving.use_replica_parallel = jax.process_count() > 1
    return context


def local_bytes(leaf: Any) -> int:
    """Bytes of a leaf that this process writes."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return 0
        return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
    return getattr(leaf, "nbytes", 0)


def _shard_bytes(leaf: Any) -> int:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.sharding is None:
            return 0
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    return getattr(leaf, "nbytes", 0)
