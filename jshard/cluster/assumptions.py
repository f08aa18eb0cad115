"""What an estimate takes for granted about a machine: a few numbers, by value, to be stated beside every result."""

import dataclasses
from collections.abc import Sequence

from jshard.inspect.hlo import ring_bytes
from jshard.inspect.module import item_bytes
from jshard.inspect.steps import Window
from jshard.inspect.work import Work

# Every device of a host brings its own link to other hosts, and these kinds use all of them together.
_SHARED_LINKS = ("all-gather", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A device and its links, for `estimate`.

    Args:
        name: of the device, to be shown.
        flops_per_s: peak of dense matrix products of 16-bit numbers.
        memory_bytes_per_s: peak of the device memory.
        fast_bytes_per_s: what a collective reaches within a host, each way (NVLink, ICI).
        fast_group: devices that those links join: consecutive ones in the order of the mesh.
        slow_bytes_per_s: what a device's link to other hosts reaches (NIC).
        latency_s: of one collective.
        matmul_efficiency: part of `flops_per_s` that matrix products reach.
        memory_efficiency: part of `memory_bytes_per_s` that other operations reach.
        host_bytes_per_s: what copies from the host's memory or to it reach, each way; None if it is not known.
        flops_per_s_of: peaks of other dtypes, by HLO name; those not named go by their width (TF32 half, FP8 twice).

    Example:
        >>> h100 = Assumptions(
        ...     name="H100", flops_per_s=989e12, memory_bytes_per_s=3.35e12,
        ...     fast_bytes_per_s=370e9, fast_group=8, slow_bytes_per_s=42e9,
        ... )
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    fast_bytes_per_s: float
    fast_group: int
    slow_bytes_per_s: float
    latency_s: float = 15e-6
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    host_bytes_per_s: float | None = None
    flops_per_s_of: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops_per_s / 1e12:g} TFLOP/s x {self.matmul_efficiency:.0%},"
            f" memory {self.memory_bytes_per_s / 1e12:g} TB/s x {self.memory_efficiency:.0%},"
            f" {self.fast_bytes_per_s / 1e9:g} GB/s among {self.fast_group},"
            f" {self.slow_bytes_per_s / 1e9:g} GB/s beyond, {self.latency_s * 1e6:g} us a collective"
        )

    def compute_s(self, work: Work) -> float:
        """Time of an operation: bound by its products or by its memory traffic, whichever takes longer."""
        products = sum(flops / self._peak(dtype) for dtype, flops in work.flops) / self.matmul_efficiency
        return max(products, work.memory_bytes / (self.memory_bytes_per_s * self.memory_efficiency))

    def _peak(self, dtype: str) -> float:
        named = dict(self.flops_per_s_of)
        return named[dtype] if dtype in named else self.flops_per_s * 2 / max(item_bytes(dtype), 0.5)

    def collective_s(self, window: Window) -> float:
        """Time of one execution of a compiled collective, alone on the links."""
        return self.transfer_s(window.kind, window.full_bytes, window.group)

    def transfer_s(self, kind: str, full_bytes: float, group: Sequence[int]) -> float:
        """Time of a collective, alone on the links.

        Between hosts the slower of two rings counts: the one over all devices by the fast links, and the one over
        hosts, in which each device of the group carries its share by its own link.

        Args:
            kind: such as `all-gather`.
            full_bytes: of the whole array.
            group: positions of its devices in the mesh.
        """
        sent = ring_bytes(kind, full_bytes, len(group))
        hosts = len({position // self.fast_group for position in group})
        fast = sent / self.fast_bytes_per_s
        if hosts == 1:
            return fast + self.latency_s
        links = len(group) / hosts if kind in _SHARED_LINKS else 1
        return max(fast, sent / (self.slow_bytes_per_s * links)) + self.latency_s
