"""The facts about one kind of device, and how the source of each is stated.

Peaks, memory and the compiler's target description are facts. The rate of a collective over a link depends on the
fabric, the library and the message, so those rates are assumptions, and are marked as such.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from jshard.facts.gpu_target import AmdTarget, GpuTarget

GIGA = 10**9
GIB = 2**30

_GPUS_PER_HOST = 8  # the most that share a host


@dataclasses.dataclass(frozen=True)
class DeviceLink:
    """A link of a device: its rate in GB/s one way, and the share that collectives are assumed to reach."""

    gb_per_s: float
    name: str
    reached_percent: int = 80
    least_percent: int = 60

    @property
    def bytes_per_s(self) -> float:
        """The assumed rate of collectives."""
        return self.gb_per_s * GIGA * self.reached_percent / 100

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest rate for an estimate; the highest is the link's own."""
        link_bytes_per_s = self.gb_per_s * GIGA
        return link_bytes_per_s * self.least_percent / 100, link_bytes_per_s

    def sources(self, name: str, *, ranged: bool = True) -> dict[str, str]:
        """Returns the sources of the rate and, if `ranged`, of its range, by field of `Assumptions`."""
        percent_of_link = f"% of {self.gb_per_s:g} GB/s one way ({self.name})"
        sources = {f"{name}_bytes_per_s": f"assumption: {self.reached_percent} {percent_of_link}"}
        if ranged:
            sources[f"{name}_range"] = f"assumption: {self.least_percent} to 100 {percent_of_link}"
        return sources


@dataclasses.dataclass(frozen=True)
class Reached:
    """The share of a device's peak that kernels reach, in percent: stated, lowest and highest measured."""

    least: float
    stated: float
    most: float
    source: str

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and highest, as fractions."""
        return self.least / 100, self.most / 100


@dataclasses.dataclass(frozen=True)
class Bounds(Reached):
    """A share of which it is not published what kernels sustain: only `least` and `most` count.

    `stated` is between them, so that configurations can be compared. Reports do not show it.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One kind of accelerator, as JAX counts devices: a GPU, or a TPU chip."""

    name: str  # as in a topology, e.g. "h100"
    title: str  # the full name of the device
    kind: str  # pattern of the driver's name, which also matches `name`
    # Dense peak of matrix products by dtype: "bf16" (and f16), "f32", and if supported "tf32" and "fp8".
    # For a TPU "f32" is the bf16 figure: JAX's default precision is one bf16 pass.
    flops_per_s: Mapping[str, float]
    hbm_bytes: int  # memory for programs, before the runtime takes its part
    hbm_bytes_per_s: float  # its peak bandwidth
    fast: DeviceLink  # between neighbours, by device: NVLink, or all ICI links of a chip
    fast_group: int  # most devices joined by such links
    slow: DeviceLink  # between groups, by device: network adapter, or data-center network
    matmul: Reached  # share of the peak that large matrix products reach
    attention: Reached  # share of the peak that attention in one kernel reaches
    sheet: str  # the data sheet, or the page about it
    host: DeviceLink | None = None  # between the device and the host's memory; None if no rate is published
    target: GpuTarget | None = None  # for the GPU compiler; None for a TPU, whose compiler knows its devices
    spec: str = ""  # XLA's source of it
    dims: int = 0  # extents of a TPU slice: 2 for a torus in a plane, 3 in space; 0 for a GPU
    devices_per_chip: int = 1  # JAX counts the two chiplets of a TPU7x as devices
    chip_config: str = ""  # libtpu's name of the way in which a chip's cores are one device; empty for its default
    # Sources of numbers that differ from the table's.
    stated_in: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))

    @property
    def platform(self) -> str:
        """Either "gpu" or "tpu"."""
        return "tpu" if self.dims else "gpu"

    @property
    def compiler(self) -> str:
        """The compiler of its programs, by JAX's name of the plugin that has it: "cuda", "rocm" or "tpu"."""
        if self.target is None:
            return "tpu"
        return "rocm" if isinstance(self.target, AmdTarget) else "cuda"

    @property
    def torus_links(self) -> int:
        """The ICI links of a device, two along each dimension of the torus for a chip; 0 for a GPU."""
        return 2 * self.dims // self.devices_per_chip

    @property
    def hosts_share_links(self) -> bool:
        """Whether the fast links of a GPU extend beyond a host, as in a GB200 rack."""
        return self.platform == "gpu" and self.fast_group > _GPUS_PER_HOST

    @property
    def sources(self) -> dict[str, str]:
        """The source of every number."""
        sources = self._tpu_sources() if self.platform == "tpu" else self._gpu_sources()
        sources |= self.fast.sources("fast")
        sources |= self.slow.sources("slow")
        sources["matmul_efficiency"] = self.matmul.source
        sources["attention_efficiency"] = self.attention.source
        if self.host is not None:
            sources |= self.host.sources("host", ranged=False)
        # Last, because a file that describes a device replaces numbers of the table's row, and their sources.
        return sources | dict(self.stated_in)

    def _tpu_sources(self) -> dict[str, str]:
        share = "" if self.devices_per_chip == 1 else f", 1/{self.devices_per_chip} of it"
        return {
            "flops_per_s": f"{self.sheet}: peak compute per chip (bf16){share}",
            "hbm_bytes": f"libtpu's own count, as in its message `Used ...G of {self.hbm_bytes / GIB:g}G hbm`",
            "hbm_bytes_per_s": f"{self.sheet}: HBM bandwidth per chip{share}",
            "fast_group": f"{self.sheet}: chips of a pod",
        }

    def _gpu_sources(self) -> dict[str, str]:
        domain = "GPUs joined by Infinity Fabric" if self.compiler == "rocm" else "GPUs in one NVLink domain"
        return {
            "flops_per_s": f"{self.sheet}, dense",
            "hbm_bytes": f"{self.spec}, device_memory_size",
            "hbm_bytes_per_s": f"{self.spec}, memory_bandwidth",
            "fast_group": f"{self.sheet}: {domain}",
            "target": self.spec,
        }

    def product_flops_per_s(self, dtype: str) -> float:
        """Returns the peak of matrix products over arrays of a dtype, at JAX's default precision.

        float32 runs in TF32 if the device has it, as XLA:GPU allows; fp8 runs in bf16 without fp8 units.

        Args:
            dtype: by its name in numpy or XLA.
        """
        peaks = self.flops_per_s
        if dtype.startswith(("float8", "f8")):
            return peaks.get("fp8", peaks["bf16"])
        if dtype in ("bfloat16", "bf16", "float16", "f16"):
            return peaks["bf16"]
        return peaks.get("tf32", peaks["f32"])
