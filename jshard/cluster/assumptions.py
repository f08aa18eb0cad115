"""What an estimate assumes of a device and its links, and the time that an operation or a collective then takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from jshard.inspect.hlo.collectives import ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.work import EqualProducts, OpWork

# Every device of a host has its own link to other hosts; these kinds use all of them together.
_SHARED_LINKS = ("all-gather", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A device and its links, for `estimate`."""

    name: str
    flops_per_s: float  # peak of dense matrix products of 16-bit numbers
    memory_bytes_per_s: float  # peak of the device memory
    fast_bytes_per_s: float  # rate of a collective within a host, each way (NVLink, ICI)
    fast_group: int  # number of devices joined by those links, consecutive in mesh order
    slow_bytes_per_s: float  # rate of a device's link to other hosts (NIC)
    fast_links: int = 0  # links of a device that the rate is the sum of, where a program says how many it uses (TPU)
    latency_s: float = 15e-6  # of one collective
    fast_hop_s: float = 0.0  # added by each ring step to a neighbour
    slow_hop_s: float = 0.0  # added by each step to another host
    matmul_efficiency: float = 0.7  # share of the peak that large products reach, before tiles and waves
    attention_efficiency: float = 0.45  # share of the peak that attention in one kernel reaches
    memory_efficiency: float = 0.8  # share of the memory's peak that other operations reach
    multiprocessors: int = 0  # over which tiles are distributed; 0 to ignore tiles and waves
    launch_s: float = 0.0  # gap between the end of a kernel and the start of the next
    contention: float = 0.0  # slowdown of computation beside a collective
    straggling: float = 0.0  # slowdown of the slowest device, for which all wait
    host_bytes_per_s: float | None = None  # rate of copies from or to the host, each way; None if unknown
    # Peaks of other dtypes, by HLO name; the others follow from their width (TF32 half, FP8 twice).
    flops_per_s_of: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops_per_s / 1e12:g} TFLOP/s x {self.matmul_efficiency:.0%}"
            f" (attention {self.attention_efficiency:.0%}),"
            f" memory {self.memory_bytes_per_s / 1e12:g} TB/s x {self.memory_efficiency:.0%},"
            f" {self.fast_bytes_per_s / 1e9:g} GB/s among {self.fast_group},"
            f" {self.slow_bytes_per_s / 1e9:g} GB/s beyond, {self.latency_s * 1e6:g} us per collective,"
            f" computation {self.contention:.0%} longer beside one and {self.straggling:.0%} on the slowest device"
        )

    def compute_s(self, work: OpWork) -> float:
        """Returns the time of an operation, bound by its products or by its memory traffic."""
        products_s = sum(product.flops / self._reached_flops_per_s(product) for product in work.products)
        traffic_s = work.memory_bytes / (self.memory_bytes_per_s * self.memory_efficiency)
        return self.launch_s + max(products_s, traffic_s) * (1 + self.straggling)

    def _reached_flops_per_s(self, product: EqualProducts) -> float:
        """Returns the operations per second that a product reaches."""
        peaks = dict(self.flops_per_s_of)
        # No type counts as narrower than 4 bits.
        by_width = self.flops_per_s * 2 / max(item_bytes(product.dtype), 0.5)
        peak = peaks.get(product.dtype, by_width)
        if product.is_attention:
            return peak * self.attention_efficiency
        return peak * self.matmul_efficiency * _tile_efficiency(product.sizes, self.multiprocessors)

    def transfer_s(self, kind: str, full_bytes: float, group: Sequence[int], links: int = 0) -> float:
        """Returns the time of a collective of a group, alone on the links.

        Between hosts, the slower of two rings determines it: the ring over all devices on the fast links, and the
        ring over hosts, in which each device of the group carries its share over its own link.

        Args:
            kind: of the collective, e.g. "all-gather".
            full_bytes: size of the whole array.
            group: positions in the mesh of the devices that take part.
            links: the fast links of a device that carry it at once; 0 for all.
        """
        sent_bytes = ring_bytes(kind, full_bytes, len(group))
        num_hosts = len({position // self.fast_group for position in group})
        # An all-reduce goes around the ring twice: it is a reduce-scatter and an all-gather.
        rounds = 2 if kind == "all-reduce" else 1
        hops_s = rounds * ((len(group) - num_hosts) * self.fast_hop_s + (num_hosts - 1) * self.slow_hop_s)
        fast_s = sent_bytes / (self.fast_bytes_per_s * self._share_of_links(links))
        if num_hosts == 1:
            return fast_s + self.latency_s + hops_s
        adapters = len(group) / num_hosts if kind in _SHARED_LINKS else 1
        slow_s = sent_bytes / (self.slow_bytes_per_s * adapters)
        return max(fast_s, slow_s) + self.latency_s + hops_s

    def _share_of_links(self, links: int) -> float:
        """Returns the part of the rate within a slice that so many links have; all of it if one number is unknown."""
        if not links or not self.fast_links:
            return 1.0
        return min(1.0, links / self.fast_links)


# ---- tiles and waves

# Output tiles of one multiprocessor, as in cuBLAS and CUTLASS; a product takes whole waves of them.
_TILES = ((128, 256), (256, 128), (128, 128))
_SPLITS = (1, 2, 4, 8)  # of the contracted dim
# Overhead of a tile for filling its pipeline and writing its result, in contracted elements: two of its steps.
_FILL = 128


@functools.cache
def _tile_efficiency(sizes: tuple[float, ...], multiprocessors: int) -> float:
    """Returns the efficiency of a product relative to a large one, with the best tile and split along K.

    Args:
        sizes: batch, rows, columns and contracted elements; empty if unknown.
        multiprocessors: of the device; 0 to ignore tiles and waves.
    """
    if not sizes or not multiprocessors:
        return 1.0
    batch, rows, columns, contracted = sizes
    best = 0.0
    for (tile_rows, tile_columns), split in itertools.product(_TILES, _SPLITS):
        tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        if split > 1 and tiles > multiprocessors:
            continue  # the multiprocessors are busy without a split
        waves = math.ceil(tiles * split / multiprocessors)
        computed = waves * multiprocessors * tile_rows * tile_columns / split
        useful = batch * rows * columns / computed
        best = max(best, useful * contracted / (contracted + _FILL * split))
    return best
