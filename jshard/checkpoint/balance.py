"""What several processes hold: each reads a part, and they exchange the parts.

And arrays that each process has for itself: they are stored as one, once they are found to be equal.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard._processes import exchange
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.files.dealing import limits
from jshard.checkpoint.files.layout import Limits
from jshard.checkpoint.files.memory import HOST_MEMORY
from jshard.checkpoint.files.reading import Read, take_bytes
from jshard.checkpoint.sums import box_sums

_PADDED_BYTES = 4 << 20  # parts are multiples of it: one program moves most of them


def sharers(wanted: Iterable[Any]) -> tuple[int, ...]:
    """The processes that want the same of every array as this one, itself among them."""
    found = frozenset(range(jax.process_count()))
    for like in wanted:
        if getattr(like, "sharding", None) is not None:
            found &= _alike(like.sharding, tuple(like.shape))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def _alike(sharding: Sharding, shape: tuple[int, ...]) -> frozenset[int]:
    held: dict[int, set[Limits]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        held[device.process_index].add(limits(index or (), shape))
    return frozenset(process for process, boxes in held.items() if boxes == held[jax.process_index()])


class OtherFailedError(Exception):
    """Another process could not read its part; it says why itself."""


class Together:
    """Processes that want the same bytes of files: each reads a part of every batch, and they exchange the parts.

    Other groups of processes read other bytes. All processes meet before each exchange, so that of one that fails, or
    does not come, all hear.

    Args:
        members: the processes that want what this one wants.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, members: Sequence[int], *, timeout_s: float) -> None:
        self._members, self._timeout_s = members, timeout_s
        self._here, self.count = members.index(jax.process_index()), len(members)
        self._left: int | None = None
        self._mesh = Mesh(np.array([_first_devices()[process] for process in members]), "member")

    def start(self, num_batches: int, wanted: str) -> None:
        """All say how many batches they will read, and what is in them."""
        heard = exchange("batches to read once", [num_batches, wanted], timeout_s=self._timeout_s)
        self._left = max(count for count, _ in heard)
        if any(count < 0 for count, _ in heard):
            self._left = 0
            raise OtherFailedError
        if others := [process for process in self._members if heard[process][1] != wanted]:
            raise CheckpointError(
                "The processes do not ask for the same leaves.",
                where=f"process {jax.process_index()}, and process {', '.join(map(str, others))}",
                why="what they hold is read once: with the same `like`, `only` and `rename` in all of them.",
                do="restore with the same arguments everywhere, or with read_once=False.",
            )

    def begin(self, work: Sequence[Read], pool: Executor) -> tuple[np.ndarray, list[Future[None]]]:
        """Reads the part of this process: a buffer, and when it is there."""
        share = self._share(work)
        part, found = HOST_MEMORY.take(min(_up(share, _PADDED_BYTES), 1 << share.bit_length())), []
        begin, place = self._here * share, 0
        for read in work:
            first, last = max(place, begin), min(place + read.num_bytes, begin + share)
            if first < last:
                view = part[first - begin : last - begin].data
                found.append(pool.submit(read.source.read, read.name, read.start + first - place, [view]))
            place += read.num_bytes
        return part, found

    def end(self, work: Sequence[Read], part: np.ndarray, reads: Iterable[Future[None]]) -> Iterator[list[memoryview]]:
        """What was read for each piece of work, by whomever."""
        for read in reads:
            read.result()
        self._meet(True)
        with jax.set_mesh(self._mesh):
            sharding = NamedSharding(self._mesh, PartitionSpec("member"))
            parts = jax.make_array_from_callback((part.size * self.count,), sharding, lambda _: part)
            whole = np.asarray(_gather(self._mesh)(parts).addressable_shards[0].data)
        views = collections.deque(each[: self._share(work)].data for each in np.split(whole, self.count))
        for read in work:
            yield take_bytes(views, read.num_bytes)

    def _share(self, work: Sequence[Read]) -> int:
        """Bytes of the part of a process."""
        return max(1, -(-sum(read.num_bytes for read in work) // self.count))

    def close(self) -> None:
        """No more batches of this process: the others may have more of them."""
        while self._left:
            self._meet(True)

    def fail(self) -> None:
        """This process cannot go on: lets the others know, where they wait for it."""
        if self._left is None:
            exchange("batches to read once", [-1, ""], timeout_s=self._timeout_s)
        elif self._left:
            self._meet(False)

    def _meet(self, is_good: bool) -> None:
        assert self._left
        self._left -= 1
        if not all(exchange("a batch to read once", is_good, timeout_s=self._timeout_s)):
            self._left = 0
            if is_good:
                raise OtherFailedError


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=8)
def _gather(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda parts: parts, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _first_devices() -> dict[int, Any]:
    return {device.process_index: device for device in reversed(jax.devices())}


# Arrays that each process has for itself.


def is_local(leaf: Any) -> bool:
    """Whether each of several processes has an array of its own here."""
    return isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable


def as_one(leaf: jax.Array) -> jax.Array:
    """The copies of all processes as the replicas of one array; nothing is sent."""
    first = _first_devices()
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
    own = jax.device_put(leaf, first[jax.process_index()])
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, PartitionSpec()), [own])


def local_copies(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The facts of the copies that this process has: shape, dtype and sums by path."""
    return {key: _copy_facts(leaf) for key, leaf in leaves.items() if is_local(leaf) and leaf.size}


def check_equal(heard: Sequence[Mapping[str, list[Any]]]) -> None:
    """Raises a `CheckpointError` if what `local_copies` gave each process is not the same."""
    bad = []
    for key in sorted({key for found in heard for key in found}):
        others = [number for number, found in enumerate(heard) if found.get(key) != heard[0].get(key)]
        if others:
            bad.append(f"{key}  of process 0 and of process {', '.join(map(str, others))}")
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: the processes have other values of {len(bad)} leaves.",
            where=bad,
            why="an array on a device of each process is stored once, for all of them.",
            do="compute it from the same seed everywhere; or lay it over the mesh, with a row for each process.",
        )


def _copy_facts(leaf: jax.Array) -> list[Any]:
    values = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    sums = box_sums(values, tuple(slice(None) for _ in values.shape), values.shape)
    return [list(leaf.shape), str(leaf.dtype), list(sums)]
