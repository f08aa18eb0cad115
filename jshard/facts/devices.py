"""The table of devices: one row each, every number with its source.

Peaks, memory and the compiler's target description are facts. The rate of a collective over a link depends on the
fabric, the library and the message, so those rates are assumptions, and are marked as such.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any

GIGA, GIB = 10**9, 2**30


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
        return self.gb_per_s * GIGA * self.least_percent / 100, self.gb_per_s * GIGA

    def sources(self, name: str, *, ranged: bool = True) -> dict[str, str]:
        """The sources of the rate and its range."""
        of = f"% of {self.gb_per_s:g} GB/s one way ({self.name})"
        found = {f"{name}_bytes_per_s": f"assumption: {self.reached_percent} {of}"}
        return found | ({f"{name}_range": f"assumption: {self.least_percent} to 100 {of}"} if ranged else {})


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


# XLA's numbers of the dtypes (xla_data.proto, PrimitiveType).
_F16, _F32, _F64, _BF16 = 10, 11, 12, 16
_S32, _U32 = 4, 8
_EIGHT_BITS = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)  # s8, u8 and the fp8 types


@dataclasses.dataclass(frozen=True)
class Rate:
    """Operations of one kind of unit: GHz, units per core, operations per unit and clock."""

    clock_rate_ghz: float
    units_per_core: int
    ops_per_clock: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of the scalar and the matrix units, by XLA's number of the dtype."""

    scalar: Mapping[int, Rate]
    matrix: Mapping[int, Rate]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The description of a GPU for the compiler, in the proto's own names where they differ by device."""

    description: str  # the driver's name for it
    major: int  # of its compute capability; the minor is 0
    core_count: int
    clock_rate_ghz: float
    memory_bandwidth: int
    l2_cache_size: int
    device_memory_size: int
    fpus_per_core: int = 128
    shared_memory_per_core: int = 228 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    pcie_bandwidth: int = 32 * 2**30
    rates: Rates | None = None  # None if no published description has them
    links: int = 0  # NVLinks


def rates(*, clock: float, matrix_clock: float, f32_ops: int, f16: int, f64: int) -> Rates:
    """The units of a GPU since Hopper: scalar ones at `clock` GHz, and matrix ones.

    `f32_ops` are half-precision operations per float32 lane and clock, `f16` and `f64` multiply-adds per matrix unit
    and clock; 8-bit types have twice as many as 16-bit ones, TF32 half as many.
    """
    scalar = {kind: Rate(clock, 64, 1) for kind in (_S32, _U32, _F64)}
    scalar |= {_F16: Rate(clock, 128, f32_ops), _F32: Rate(clock, 128, 1), _BF16: Rate(clock, 128, f32_ops)}
    matrix = {kind: Rate(matrix_clock, 4, 2 * f16) for kind in _EIGHT_BITS}
    matrix |= {kind: Rate(matrix_clock, 4, f16) for kind in (_F16, _BF16)}
    matrix |= {_F32: Rate(matrix_clock, 4, f16 // 2), _F64: Rate(clock, 4, f64)}
    return Rates(dict(sorted(scalar.items())), dict(sorted(matrix.items())))


# Matrix products: the highest is that of any shape, "MAMF" of github.com/stas00/ml-engineering; the stated one is
# sustained at the power limit, "MSMF" there; the lowest is as far below that.
_MAMF = "ml-engineering, compute/accelerator: at most {} TFLOP/s of {}, sustained {}"
_BF16_HOPPER = Reached(66, 73, 80, _MAMF.format(794.5, 989, "as an H200, 755 of its 834"))
_BF16_H200 = Reached(69, 76, 84, _MAMF.format(834, 989, 755))
_BF16_BLACKWELL = Reached(50, 64, 78, _MAMF.format(1745, 2250, 1429))
_BF16_AMPERE = Reached(74, 80, 87, _MAMF.format(271.2, 312, "at 1305 of 1410 MHz, NVIDIA's clock for HPL"))
_BF16_TPU = Reached(
    89,
    94,
    99,
    "jax-ml/scaling-book, profiling: a product of a TPU v2 takes 96 ms, 95.6 at the peak; and whole steps of MaxText"
    " execute 89 % of it (configs/v5e, 32B: 66.86 % MFU, and forward again in backward)",
)
# Attention in one kernel, causal, heads of 128.
_FLASH_HOPPER = Reached(30, 42, 54, "FlashAttention-3 paper, figure 5: FlashAttention-2 298, cuDNN 539 TFLOP/s")
_FLASH_AMPERE = Reached(45, 55, 65, "FlashAttention-2 paper: 50 to 73 % of an A100; backward less")
_FLASH_TPU = Reached(30, 45, 60, "assumption: as on an H100")


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
    # Sources of numbers that differ from the table's.
    stated_in: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))

    @property
    def platform(self) -> str:
        """Either "gpu" or "tpu"."""
        return "tpu" if self.dims else "gpu"

    @property
    def hosts_share_links(self) -> bool:
        """Whether the fast links of a GPU extend beyond a host, as in a GB200 rack."""
        return not self.dims and self.fast_group > 8

    @property
    def sources(self) -> dict[str, str]:
        """The source of every number."""
        if self.dims:
            found = {
                "flops_per_s": f"{self.sheet}: peak compute per chip (bf16)",
                "hbm_bytes": f"libtpu's own count, as in its message `Used ...G of {self.hbm_bytes / GIB:g}G hbm`",
                "hbm_bytes_per_s": f"{self.sheet}: HBM bandwidth per chip",
                "fast_group": f"{self.sheet}: chips of a pod",
            }
        else:
            found = {
                "flops_per_s": f"{self.sheet}, dense",
                "hbm_bytes": f"{self.spec}, device_memory_size",
                "hbm_bytes_per_s": f"{self.spec}, memory_bandwidth",
                "fast_group": f"{self.sheet}: GPUs in one NVLink domain",
                "target": self.spec,
            }
        found |= self.fast.sources("fast") | self.slow.sources("slow")
        found |= {"matmul_efficiency": self.matmul.source, "attention_efficiency": self.attention.source}
        return found | (self.host.sources("host", ranged=False) if self.host else {}) | dict(self.stated_in)

    def product_flops_per_s(self, dtype: str) -> float:
        """Peak of matrix products over arrays of a dtype, by its name in numpy or XLA, at JAX's default precision.

        float32 runs in TF32 if the device has it, as XLA:GPU allows; fp8 runs in bf16 without fp8 units.
        """
        peaks = self.flops_per_s
        if dtype.startswith(("float8", "f8")):
            return peaks.get("fp8", peaks["bf16"])
        if dtype in ("bfloat16", "bf16", "float16", "f16"):
            return peaks["bf16"]
        return peaks.get("tf32", peaks["f32"])


def _gpu(
    name: str, title: str, kind: str, *, target: GpuTarget, spec: str, group: int = 8, **facts: Any
) -> DeviceFacts:
    """A GPU; its memory is that of its compiler description, and figures not given are those of an H100."""
    return DeviceFacts(
        name=name,
        title=title,
        kind=kind,
        target=target,
        spec=f"openxla/xla: xla/backends/gpu/target_config/specs/{spec}.txtpb",
        hbm_bytes=target.device_memory_size,
        hbm_bytes_per_s=target.memory_bandwidth,
        fast_group=group,
        **{"attention": _FLASH_HOPPER, "slow": _IB_400, "host": _PCIE_5, **facts},
    )


def _tpu(
    name: str,
    kind: str,
    peak: float,
    hbm_gib: float,
    gb_per_s: float,
    pod: int,
    dims: int,
    ici: float,
    links: str,
    slow: float,
    network: str,
) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        title=f"Cloud TPU {name}",
        kind=rf"\b{kind}$",
        flops_per_s={"bf16": peak, "f32": peak},
        hbm_bytes=int(hbm_gib * GIB),
        hbm_bytes_per_s=gb_per_s * GIGA,
        fast_group=pod,
        matmul=_BF16_TPU,
        attention=_FLASH_TPU,
        sheet=f"cloud.google.com/tpu/docs/{name}",
        fast=DeviceLink(ici, f"{links} links of a chip", reached_percent=89, least_percent=44),
        slow=DeviceLink(slow, network, reached_percent=84, least_percent=30),
        dims=dims,
    )


_HOPPER = {"bf16": 989.5e12, "tf32": 494.7e12, "fp8": 1979e12, "f32": 67e12}
_AMPERE = {"bf16": 312e12, "tf32": 156e12, "f32": 19.5e12}
_NVLINK3, _NVLINK4, _NVLINK5 = (DeviceLink(rate, f"NVLink {n}", 82) for n, rate in ((3, 300), (4, 450), (5, 900)))
_IB_200 = DeviceLink(25, "one 200 Gb/s adapter per GPU", reached_percent=84, least_percent=30)
_IB_400 = DeviceLink(50, "one 400 Gb/s adapter per GPU", reached_percent=84, least_percent=30)

# One way; data sheets give the sum of both. Google does not publish such a rate for its TPUs.
_PCIE_4 = DeviceLink(32, "PCIe 4 x16, half of the data sheet's 64 GB/s")
_PCIE_5 = DeviceLink(64, "PCIe 5 x16, half of the data sheet's 128 GB/s")
_C2C = DeviceLink(225, "NVLink-C2C, 900 GB/s both ways for the two GPUs of a superchip")

_HOPPER_RATES = rates(clock=1.98, matrix_clock=1.8295201, f32_ops=2, f16=512, f64=32)
_BLACKWELL_RATES = rates(clock=1.965, matrix_clock=1.8353101, f32_ops=1, f16=1024, f64=16)
_GB200_RATES = rates(clock=2.062, matrix_clock=1.9259081, f32_ops=1, f16=1024, f64=16)

_H100 = GpuTarget(
    description="NVIDIA H100 80GB HBM3",
    major=9,
    core_count=132,
    clock_rate_ghz=1.98,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_size=52_428_800,
    device_memory_size=84_942_979_072,
    rates=_HOPPER_RATES,
    links=18,
)

_ALL = (
    _gpu(
        "h100",
        "NVIDIA H100 SXM, 80 GB",
        r"\bH100\b",
        flops_per_s=_HOPPER,
        sheet="NVIDIA H100 data sheet (SXM)",
        target=_H100,
        spec="h100_sxm",
        matmul=_BF16_HOPPER,
        fast=_NVLINK4,
    ),
    _gpu(
        "h200",
        "NVIDIA H200 SXM, 141 GB",
        r"\bG?H200\b",
        flops_per_s=_HOPPER,
        sheet="NVIDIA H200 data sheet (SXM)",
        target=dataclasses.replace(
            _H100,
            description="NVIDIA H200 141GB HBM3e",
            memory_bandwidth=4_800_000_000_000,
            device_memory_size=151_397_597_184,
        ),
        spec="h200",
        matmul=_BF16_H200,
        fast=_NVLINK4,
    ),
    *(
        _gpu(
            f"a100-{gb}",
            f"NVIDIA A100 SXM, {gb} GB",
            kind,
            flops_per_s=_AMPERE,
            sheet="NVIDIA A100 data sheet (SXM)",
            target=GpuTarget(
                description=f"NVIDIA A100-SXM4-{gb}GB",
                major=8,
                core_count=108,
                clock_rate_ghz=1.41,
                memory_bandwidth=bandwidth,
                l2_cache_size=41_943_040,
                device_memory_size=memory,
                fpus_per_core=64,
                shared_memory_per_core=164 * 1024,
                shared_memory_per_block_optin=163 * 1024,
                links=12,
            ),
            spec=f"a100_sxm_{gb}",
            matmul=_BF16_AMPERE,
            attention=_FLASH_AMPERE,
            fast=_NVLINK3,
            slow=_IB_200,
            host=_PCIE_4,
        )
        for gb, bandwidth, memory, kind in (
            (40, 1_555_200_000_000, 42_331_013_120, r"\bA100\b.*\b40"),
            (80, 2_039_040_000_000, 85_100_068_864, r"\bA100\b"),
        )
    ),
    _gpu(
        "b200",
        "NVIDIA B200 (HGX)",
        r"\bB200\b",
        flops_per_s={"bf16": 2.25e15, "tf32": 1.125e15, "fp8": 4.5e15, "f32": 75e12},
        sheet="NVIDIA HGX B200 data sheet",
        target=GpuTarget(
            description="NVIDIA B200",
            major=10,
            core_count=148,
            clock_rate_ghz=1.965,
            memory_bandwidth=7_672_320_000_000,
            l2_cache_size=132_644_864,
            device_memory_size=191_514_411_008,
            pcie_bandwidth=68_719_476_736,
            rates=_BLACKWELL_RATES,
            links=18,
        ),
        spec="b200",
        matmul=_BF16_BLACKWELL,
        fast=_NVLINK5,
    ),
    _gpu(
        "gb200",
        "NVIDIA GB200 (NVL72)",
        r"\bGB200\b",
        flops_per_s={"bf16": 2.5e15, "tf32": 1.25e15, "fp8": 5e15, "f32": 80e12},
        sheet="NVIDIA GB200 NVL72 data sheet",
        target=GpuTarget(
            description="NVIDIA GB200",
            major=10,
            core_count=152,
            clock_rate_ghz=2.062,
            memory_bandwidth=7_928_064_000_000,
            l2_cache_size=135_528_448,
            device_memory_size=197_897_748_480,
            pcie_bandwidth=2_147_483_648,
            rates=_GB200_RATES,
            links=18,
        ),
        spec="gb200",
        matmul=_BF16_BLACKWELL,
        fast=_NVLINK5,
        group=72,
        host=_C2C,
    ),
    *(
        _tpu(*row)
        for row in (
            # Name, the driver's, peak, GiB, GB/s, pod, dims of a slice; GB/s and number of its links; network.
            ("v5e", "v5 ?(lite|e)", 197e12, 15.75, 819, 256, 2, 180, "four", 3.125, "6.4 Tb/s for a pod of 256 chips"),
            ("v5p", "v5p?", 459e12, 95.74, 2765, 8960, 3, 540, "six", 6.25, "200 Gb/s for a host of four chips"),
            ("v6e", "v6 ?(lite|e)", 918e12, 31.25, 1640, 256, 2, 360, "four", 12.5, "25.6 Tb/s for a pod of 256 chips"),
        )
    ),
)
DEVICES: Mapping[str, DeviceFacts] = types.MappingProxyType({facts.name: facts for facts in _ALL})

# Cloud machines, by their own names: a device above, with the adapters of one of its 8-GPU hosts.
_EFA = "EFA"


def _rented(name: str, device: str, gbit_per_s: int, fabric: str) -> DeviceFacts:
    link = DeviceLink(gbit_per_s / 64, f"{gbit_per_s} Gb/s of {fabric} for a host of 8 GPUs", least_percent=40)
    return dataclasses.replace(DEVICES[device], title=f"{DEVICES[device].title} ({name})", slow=link)


CLOUDS: Mapping[str, DeviceFacts] = types.MappingProxyType(
    {
        name: _rented(name, device, gbit_per_s, fabric)
        for name, device, gbit_per_s, fabric in (
            ("a3-high", "h100", 800, "GPUDirect-TCPX"),  # cloud.google.com/compute/docs/gpus/gpudirect: 4 x 200
            ("a3-mega", "h100", 1600, "GPUDirect-TCPXO"),  # the same: 8 x 200
            ("p4d", "a100-40", 400, _EFA),  # aws.amazon.com/ec2/instance-types/p4
            ("p4de", "a100-80", 400, _EFA),
            ("p5", "h100", 3200, _EFA),  # aws.amazon.com/ec2/instance-types/p5
            ("dgx-a100", "a100-80", 1600, "InfiniBand"),  # NVIDIA DGX A100 data sheet: 8 x 200
            ("dgx-h100", "h100", 3200, "InfiniBand"),  # NVIDIA DGX H100 data sheet: 8 x 400
        )
    }
)

# Devices that clusters are not planned for: the driver's name, dense bf16 (fp16 for a V100) per device as JAX counts
# them, and the source. If a data sheet gives the figure with sparsity, half of it is used.
_PEAKS_ALONE = (
    (r"\bGH200\b", _HOPPER["bf16"], "GH200 data sheet"),
    (r"\bH[12]00 NVL\b", 835.5e12, "H100 NVL and H200 NVL data sheets"),
    (r"\bH100 PCIe\b", 756.5e12, "H100 PCIe data sheet"),
    (r"\bA40\b", 149.7e12, "A40 data sheet"),
    (r"\bL40S\b", 362.05e12, "L40S data sheet"),
    (r"\bV100-SXM2\b", 125e12, "V100 data sheet"),
    (r"\bV100-PCIE\b", 112e12, "V100 data sheet"),
    (r"\bTPU v4$", 275e12, "Cloud TPU v4 page"),
    (r"\bMI250X\b", 191.5e12, "one of two dies, MI250X data sheet"),
    (r"\bMI300X\b", 1307.4e12, "MI300X data sheet"),
)


def device_of(kind: str) -> DeviceFacts | None:
    """The row of a device by its driver's name for it, or by a name of this table, or the start of one.

    A card or a part of a device has the row of the device. None if the device is unknown.

    Example:
        >>> device_of("NVIDIA A100-SXM4-40GB").name
        'a100-40'
    """
    return next((facts for facts in _ALL if re.search(facts.kind, kind, re.IGNORECASE)), None)


def peak_of(kind: str) -> tuple[float, str] | None:
    """Dense peak of products of 16-bit numbers, in operations a second, and its source; by the driver's name.

    None if unknown, as for a slice of a GPU, whose name gives its size only in part.
    """
    if re.search(r"\bMIG\b", kind):
        return None
    for pattern, flops_per_s, source in _PEAKS_ALONE:
        if re.search(pattern, kind):
            return flops_per_s, source
    facts = device_of(kind)
    return facts and (facts.flops_per_s["bf16"], facts.sources["flops_per_s"].removesuffix(", dense"))
