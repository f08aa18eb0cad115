"""`Occupancy`: how much of a GPU a kernel may hold, and so how much it leaves to communication."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jshard import _compat
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, device_of

WARPGROUP_ROWS = 64  # rows of the smallest product that a warpgroup's tensor cores take
LEAST_TILE = 64


class KernelError(ShardingError):
    """A kernel that cannot run on these arrays, with these knobs, or on this device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How much of the GPU a kernel holds. Frozen and hashable, so that it can be a static argument.

    A *persistent* kernel starts one block on each multiprocessor that it may have, which walks over the tiles until
    all are done: it leaves room by `reserved_sms`. Any other starts a block for each tile, and several of them share
    a multiprocessor: it leaves room by `smem_pad_bytes`, of which every block takes so much shared memory that fewer
    fit (arXiv 2606.09200).

    Args:
        tile_m: rows of the output that a block makes at a time; a multiple of 64, of 128 if persistent.
        tile_n: columns of them; a multiple of 64.
        tile_k: how far each step goes along the dim that is summed; a multiple of 64.
        stages: steps whose operands are in shared memory at once, 2 or more.
        persistent: one block for each multiprocessor, of two computing warpgroups and one that loads.
        reserved_sms: multiprocessors that a persistent kernel leaves alone.
        smem_pad_bytes: shared memory that each block takes and does not use; rounded up to 1,024.
        latency_ns: how long one product takes, as stated to the compiler's scheduler; by default an estimate.
            Without a statement it takes a kernel for free, and hides no communication
            behind it.

    Raises:
        KernelError: a knob is outside what any GPU has.

    Example:
        >>> js.kernels.Occupancy(reserved_sms=16)
        >>> js.kernels.Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320)
    """

    tile_m: int = 256
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    persistent: bool = True
    reserved_sms: int = 0
    smem_pad_bytes: int = 0
    latency_ns: int | None = None

    def __post_init__(self) -> None:
        units = {"tile_m": self._row_unit, "tile_n": LEAST_TILE, "tile_k": LEAST_TILE}
        least = {"stages": 2, "reserved_sms": 0, "smem_pad_bytes": 0}
        least |= {} if self.latency_ns is None else {"latency_ns": 1}
        of = lambda name: getattr(self, name)
        wrong = [(name, f"{name} is a multiple of {n}.") for name, n in units.items() if of(name) <= 0 or of(name) % n]
        wrong += [(name, f"{name} is {n} or more.") for name, n in least.items() if of(name) < n]
        if self.reserved_sms and not self.persistent:
            why = "reserved_sms is of a persistent kernel: where the blocks of another run is the GPU's to say."
            wrong.append(("reserved_sms", why))
        if wrong:
            names, why = zip(*wrong, strict=True)
            raise KernelError(
                "The knobs of a kernel do not fit together.",
                where=[f"Occupancy({name}={getattr(self, name)!r})" for name in names],
                why="\n".join(why),
                do="Occupancy(tile_m=256, tile_n=128, tile_k=64, stages=4, reserved_sms=16)",
            )

    @property
    def _row_unit(self) -> int:
        return 2 * WARPGROUP_ROWS if self.persistent else WARPGROUP_ROWS

    @property
    def padded_bytes(self) -> int:
        """`smem_pad_bytes` as the kernel takes it: buffers begin at multiples of 1,024."""
        return -(-self.smem_pad_bytes // 1024) * 1024


def with_half_the_rows(knobs: Occupancy) -> Occupancy:
    """The same with tiles of half the rows, as far as there can be."""
    half = knobs.tile_m // 2
    return knobs if half % knobs._row_unit else dataclasses.replace(knobs, tile_m=half)


def fitted(knobs: Occupancy, m: int, n: int, k: int) -> Occupancy:
    """Knobs whose tiles are no larger than the arrays, each dim of which is then padded to whole tiles."""
    tile_k = _tile(k, knobs.tile_k, LEAST_TILE)
    return dataclasses.replace(
        knobs,
        tile_m=_tile(m, knobs.tile_m, knobs._row_unit),
        tile_n=_tile(n, knobs.tile_n, LEAST_TILE),
        tile_k=tile_k,
        stages=max(2, min(knobs.stages, -(-k // tile_k))),
    )


def _tile(size: int, most: int, least: int) -> int:
    """The tile that pads a dim least, of those that halving gives; the largest of equals."""
    tiles = [most]
    while tiles[-1] % 2 == 0 and (tiles[-1] // 2) % least == 0:
        tiles.append(tiles[-1] // 2)
    return min(tiles, key=lambda tile: (-(-size // tile) * tile, -tile))


# Arrays of any rank as the matrices that kernels take.


def as_matrix(x: jax.Array) -> jax.Array:
    """All dims but the last as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector in the rank and dtype of what it is combined with, row by row."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`, counts arrays as different wherever one of them is.

    Outside of a kernel's own gradient: so JAX sums over the axes what each of the devices has of it.
    """
    axes = varying_over(*arrays)
    return tuple(vary(x, axes) for x in arrays)


def varying_over(*arrays: jax.Array) -> frozenset[str]:
    """Axes over which at least one of some arrays is different."""
    return frozenset[str]().union(*map(_compat.varying_axes, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Counts an array as different over some axes."""
    missing = tuple(sorted(axes - _compat.varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# How long a kernel takes, as stated to XLA's scheduler.

_REACHED = 0.6  # of the peak, of flops and of bandwidth alike: an assumption where nothing was measured
_LAUNCH_NS = 2000


def product_ns(m: int, n: int, k: int, *, kind: str, products: int = 1) -> int:
    """An estimate for matrix products of (m, k) and (k, n) in 16 bits on a kind of device."""
    return _LAUNCH_NS + int(1e9 * products * 2 * m * n * k / (_REACHED * _facts(kind).flops_per_s["bf16"]))


def traffic_ns(num_bytes: int, *, kind: str) -> int:
    """An estimate for a kernel that reads and writes so many bytes of device memory, and computes little."""
    return _LAUNCH_NS + int(1e9 * num_bytes / (_REACHED * _facts(kind).hbm_bytes_per_s))


def stated(latency_ns: int) -> Any:
    """A context in which every operation that is traced carries this latency."""
    return set_xla_metadata(latency_metadata=str(max(1, latency_ns)))


def _facts(kind: str) -> DeviceFacts:
    """Facts of the device that the driver names so; of an H100 where it is none of the table."""
    return device_of(kind) or DEVICES["h100"]
