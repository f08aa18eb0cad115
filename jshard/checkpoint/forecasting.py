"""What a restore will read, known before a byte of an array is read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jshard._text import human_bytes
from jshard.checkpoint.manifest import StoredLeaf

Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What this process will read of a checkpoint.

    Attributes:
        wanted_bytes: of the boxes that its devices will hold, each counted once.
        touched_bytes: of the stored chunks that these boxes are in, as each box reads its chunks whole.
        host_bytes: memory of the host that the read takes beside the state: what is on its way at a time, and leaves
            that stay on the host.
        worst: the leaf that reads the most bytes in vain; None where none does.
    """

    wanted_bytes: int
    touched_bytes: int
    host_bytes: int
    worst: str | None = None

    @property
    def amplification(self) -> float:
        """Bytes read for each byte that is wanted."""
        return self.touched_bytes / self.wanted_bytes if self.wanted_bytes else 1.0

    def __str__(self) -> str:
        touched, wanted = human_bytes(self.touched_bytes, 1), human_bytes(self.wanted_bytes, 1)
        text = f"{touched} to read for {wanted} (x{self.amplification:.2f})"
        worst = f", most in vain for {self.worst}" if self.worst is not None else ""
        return f"{text}{worst}; up to {human_bytes(self.host_bytes, 1)} of host memory beside the state"


def forecast_reads(stored: Mapping[str, StoredLeaf], reads: Mapping[str, Any], *, in_flight_bytes: int) -> Forecast:
    """What reading some leaves comes to in this process.

    Args:
        stored: what the checkpoint holds.
        reads: what is asked for, by stored path: arrays with shardings, numpy arrays, values of Python.
        in_flight_bytes: the most that is read at a time.
    """
    wanted = touched = on_host = 0
    in_vain: dict[str, int] = {}
    for path, like in reads.items():
        leaf = stored[path]
        if not leaf.is_array or not hasattr(like, "shape"):
            continue
        boxes = _boxes(leaf, like)
        itemsize = jnp.dtype(leaf.dtype).itemsize
        here = sum(math.prod(stop - start for start, stop in box) for box in boxes) * itemsize
        there = sum(_touched(box, leaf.chunk or leaf.shape, leaf.shape) for box in boxes) * itemsize
        wanted, touched = wanted + here, touched + there
        in_vain[path] = there - here
        if not isinstance(like, jax.ShapeDtypeStruct):
            on_host += here
    worst = max(in_vain, key=lambda path: in_vain[path], default=None)
    return Forecast(
        wanted_bytes=wanted,
        touched_bytes=touched,
        host_bytes=on_host + min(in_flight_bytes, touched),
        worst=worst if worst is not None and in_vain[worst] else None,
    )


def _boxes(leaf: StoredLeaf, like: Any) -> set[Bounds]:
    """The boxes of a leaf that this process holds; a random key is read whole."""
    whole = tuple((0, size) for size in leaf.shape)
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None or len(like.shape) != len(leaf.shape):
        return {whole}
    found: Any = like.sharding.addressable_devices_indices_map(like.shape).values()
    return {tuple(part.indices(size)[:2] for part, size in zip(box, leaf.shape, strict=True)) for box in found}


def _touched(box: Bounds, chunk: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Elements of the chunks that a box is in."""
    count = int(all(start < stop for start, stop in box))
    for (start, stop), step, size in itertools.zip_longest(box, chunk, shape):
        step = max(step, 1)
        count *= min(-(-stop // step) * step, size) - start // step * step
    return count
