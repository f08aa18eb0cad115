"""The table of devices: one record each, every number with its source.

`DeviceFacts.sources` has the source of each number of a device as text. It is made from the record's `sheet` and
`spec`, and from the sources that stand beside the numbers here.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping

from jshard.facts.device_facts import GIB, GIGA, Bounds, DeviceLink, Reached
from jshard.facts.device_facts import DeviceFacts as DeviceFacts
from jshard.facts.gpu_target import AmdTarget, GpuTarget, NvidiaTarget, rates

# ---- shares of the peak

# Matrix products: the highest is that of any shape, "MAMF" of github.com/stas00/ml-engineering; the stated one is
# sustained at the power limit, "MSMF" there; the lowest is as far below that.
_MAMF = "ml-engineering, compute/accelerator: at most {} TFLOP/s of {}, sustained {}"

_MATMUL_HOPPER = Reached(
    least=66,
    stated=73,
    most=80,
    source=_MAMF.format(794.5, 989, "as an H200, 755 of its 834"),
)
_MATMUL_H200 = Reached(
    least=69,
    stated=76,
    most=84,
    source=_MAMF.format(834, 989, 755),
)
_MATMUL_BLACKWELL = Reached(
    least=50,
    stated=64,
    most=78,
    source=_MAMF.format(1745, 2250, 1429),
)
_MATMUL_AMPERE = Reached(
    least=74,
    stated=80,
    most=87,
    source=_MAMF.format(271.2, 312, "at 1305 of 1410 MHz, NVIDIA's clock for HPL"),
)
# AMD's own figure is the highest, that of ml-engineering is the stated one; the lowest is as far below that.
_MATMUL_MI300X = Reached(
    least=48,
    stated=51,
    most=54,
    source="rocm.blogs.amd.com, Measuring Max-Achievable FLOPs, part 2: 708 of 1307 TFLOP/s;"
    " ml-engineering, compute/accelerator: at most 668.4",
)
# What products sustain is not published. A run does not compute faster than its products, and no product faster than
# the fastest one that was measured.
_MATMUL_MI250X = Bounds(
    least=38,
    stated=57,
    most=77,
    source="bounds: arXiv 2312.12705, abstract, has 38.38 % of the peak for whole steps on Frontier;"
    " ml-engineering @359ee1c, compute/accelerator: at most 147.0 of 191.5 TFLOP/s on one die",
)
_MATMUL_TPU = Reached(
    least=89,
    stated=94,
    most=99,
    source="jax-ml/scaling-book, profiling: a product of a TPU v2 takes 96 ms, 95.6 at the peak; and whole steps of"
    " MaxText execute 89 % of it (configs/v5e, 32B: 66.86 % MFU, and forward again in backward)",
)

# Attention in one kernel, causal, heads of 128.
_ATTENTION_HOPPER = Reached(
    least=30,
    stated=42,
    most=54,
    source="FlashAttention-3 paper, figure 5: FlashAttention-2 298, cuDNN 539 TFLOP/s",
)
_ATTENTION_AMPERE = Reached(
    least=45,
    stated=55,
    most=65,
    source="FlashAttention-2 paper: 50 to 73 % of an A100; backward less",
)
_ATTENTION_AMD = Reached(
    least=30,
    stated=42,
    most=54,
    source="assumption: as on an H100; jshard itself compiles no such kernel for AMD",
)
_ATTENTION_TPU = Reached(
    least=30,
    stated=45,
    most=60,
    source="assumption: as on an H100",
)

# ---- peaks of matrix products, from the data sheets that the records name

_HOPPER_FLOPS_PER_S = {"bf16": 989.5e12, "tf32": 494.7e12, "fp8": 1979e12, "f32": 67e12}
_AMPERE_FLOPS_PER_S = {"bf16": 312e12, "tf32": 156e12, "f32": 19.5e12}  # no fp8 units
_MI250X_FLOPS_PER_S = {"bf16": 191.5e12, "f32": 47.85e12}  # of one die; no tf32 and no fp8 units
_MI300X_FLOPS_PER_S = {"bf16": 1307.4e12, "tf32": 653.7e12, "fp8": 2614.9e12, "f32": 163.4e12}
_B200_FLOPS_PER_S = {"bf16": 2.25e15, "tf32": 1.125e15, "fp8": 4.5e15, "f32": 75e12}
_GB200_FLOPS_PER_S = {"bf16": 2.5e15, "tf32": 1.25e15, "fp8": 5e15, "f32": 80e12}

# ---- links, one way

_NVLINK_3 = DeviceLink(gb_per_s=300, name="NVLink 3", reached_percent=82)
_NVLINK_4 = DeviceLink(gb_per_s=450, name="NVLink 4", reached_percent=82)
_NVLINK_5 = DeviceLink(gb_per_s=900, name="NVLink 5", reached_percent=82)

# A device has a link of its own to each of the seven others: only all eight together reach this rate.
_INFINITY_FABRIC_3 = DeviceLink(
    gb_per_s=448,
    name="Infinity Fabric, 7 links of 64 GB/s; ml-engineering, network: an all-reduce of 8 MI300X at 312.9",
    reached_percent=70,
    least_percent=60,
)
_INFINITY_FABRIC_2 = DeviceLink(
    gb_per_s=200,
    name="Infinity Fabric; docs.olcf.ornl.gov, Frontier: 200 between the dies of a card, 50 to 100 between cards",
    reached_percent=50,
    least_percent=25,
)
_SLINGSHOT = DeviceLink(
    gb_per_s=12.5,
    name="Slingshot, one 200 Gb/s adapter for the two dies of a card",
    reached_percent=84,
    least_percent=30,
)
_INFINIBAND_200 = DeviceLink(
    gb_per_s=25,
    name="one 200 Gb/s adapter per GPU",
    reached_percent=84,
    least_percent=30,
)
_INFINIBAND_400 = DeviceLink(
    gb_per_s=50,
    name="one 400 Gb/s adapter per GPU",
    reached_percent=84,
    least_percent=30,
)

# To the host. Data sheets give the sum of both ways. Google does not publish such a rate for its TPUs.
_PCIE_4 = DeviceLink(gb_per_s=32, name="PCIe 4 x16, half of the data sheet's 64 GB/s")
_PCIE_5 = DeviceLink(gb_per_s=64, name="PCIe 5 x16, half of the data sheet's 128 GB/s")
_INFINITY_FABRIC_CPU = DeviceLink(gb_per_s=36, name="Infinity Fabric to the CPU; docs.olcf.ornl.gov, Frontier")
_NVLINK_C2C = DeviceLink(gb_per_s=225, name="NVLink-C2C, 900 GB/s both ways for the two GPUs of a superchip")

# ---- descriptions for the GPU compiler, from the files that `spec` of the records names

_H100_TARGET = NvidiaTarget(
    description="NVIDIA H100 80GB HBM3",
    major=9,
    core_count=132,
    clock_rate_ghz=1.98,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_size=52_428_800,
    device_memory_size=84_942_979_072,
    rates=rates(clock=1.98, matrix_clock=1.8295201, f32_ops=2, f16=512, f64=32),
    links=18,
)
_H200_TARGET = dataclasses.replace(  # the chip of an H100 with another memory
    _H100_TARGET,
    description="NVIDIA H200 141GB HBM3e",
    memory_bandwidth=4_800_000_000_000,
    device_memory_size=151_397_597_184,
)
_A100_40_TARGET = NvidiaTarget(
    description="NVIDIA A100-SXM4-40GB",
    major=8,
    core_count=108,
    clock_rate_ghz=1.41,
    memory_bandwidth=1_555_200_000_000,
    l2_cache_size=41_943_040,
    device_memory_size=42_331_013_120,
    fpus_per_core=64,
    shared_memory_per_core=164 * 1024,
    shared_memory_per_block_optin=163 * 1024,
    links=12,
)
_A100_80_TARGET = dataclasses.replace(
    _A100_40_TARGET,
    description="NVIDIA A100-SXM4-80GB",
    memory_bandwidth=2_039_040_000_000,
    device_memory_size=85_100_068_864,
)
_B200_TARGET = NvidiaTarget(
    description="NVIDIA B200",
    major=10,
    core_count=148,
    clock_rate_ghz=1.965,
    memory_bandwidth=7_672_320_000_000,
    l2_cache_size=132_644_864,
    device_memory_size=191_514_411_008,
    pcie_bandwidth=68_719_476_736,
    rates=rates(clock=1.965, matrix_clock=1.8353101, f32_ops=1, f16=1024, f64=16),
    links=18,
)
_GB200_TARGET = NvidiaTarget(
    description="NVIDIA GB200",
    major=10,
    core_count=152,
    clock_rate_ghz=2.062,
    memory_bandwidth=7_928_064_000_000,
    l2_cache_size=135_528_448,
    device_memory_size=197_897_748_480,
    pcie_bandwidth=2_147_483_648,
    rates=rates(clock=2.062, matrix_clock=1.9259081, f32_ops=1, f16=1024, f64=16),
    links=18,
)

_MI250X_TARGET = AmdTarget(
    description="AMD Instinct MI250X",
    gfx="gfx90a",
    core_count=110,
    clock_rate_ghz=1.7,
    memory_bandwidth=1_638_400_000_000,
    l2_cache_size=8_388_608,
    device_memory_size=67_628_957_696,
)
# The file's memory, 252 GiB at 6.81 TB/s, is not that of an MI300X. `stated_in` of the record has the sources of this.
_MI300X_TARGET = AmdTarget(
    description="AMD Instinct MI300X",
    gfx="gfx942",
    core_count=304,
    clock_rate_ghz=2.1,
    memory_bandwidth=5_300_000_000_000,
    l2_cache_size=4_194_304,
    device_memory_size=201_310_208 * 1024,
)

# ---- the records


def _gpu(
    *,
    name: str,
    title: str,
    kind: str,
    flops_per_s: Mapping[str, float],
    sheet: str,
    target: GpuTarget,
    spec: str,
    matmul: Reached,
    fast: DeviceLink,
    attention: Reached = _ATTENTION_HOPPER,
    fast_group: int = 8,
    slow: DeviceLink = _INFINIBAND_400,
    host: DeviceLink = _PCIE_5,
    stated_in: Mapping[str, str] = types.MappingProxyType({}),
) -> DeviceFacts:
    """Returns the record of a GPU, whose memory is that of its description for the compiler.

    The arguments are fields of `DeviceFacts`, except that `spec` is the name of XLA's file with the description. What
    is not given is as for an H100.
    """
    return DeviceFacts(
        name=name,
        title=title,
        kind=kind,
        flops_per_s=flops_per_s,
        hbm_bytes=target.device_memory_size,
        hbm_bytes_per_s=target.memory_bandwidth,
        fast=fast,
        fast_group=fast_group,
        slow=slow,
        matmul=matmul,
        attention=attention,
        sheet=sheet,
        host=host,
        target=target,
        spec=f"openxla/xla: xla/backends/gpu/target_config/specs/{spec}.txtpb",
        stated_in=stated_in,
    )


def _tpu(
    *,
    name: str,
    kind: str,
    bf16_flops_per_s: float,
    hbm_gib: float,
    hbm_gb_per_s: float,
    chips_of_pod: int,
    slice_dims: int,
    ici_gb_per_s: float,
    ici_links: str,
    network_gb_per_s: float,
    network: str,
    title: str = "",
    fp8_flops_per_s: float = 0.0,
    devices_per_chip: int = 1,
    chip_config: str = "",
) -> DeviceFacts:
    """Returns the record of a TPU chip, or of the part of one that JAX counts as a device.

    Args:
        name: as in a topology, and in the address of Google's page.
        kind: pattern of the end of the runtime's name.
        bf16_flops_per_s: peak of matrix products.
        hbm_gib: memory for programs, by libtpu's count.
        hbm_gb_per_s: its bandwidth.
        chips_of_pod: the most chips joined by ICI.
        slice_dims: 2 for a torus in a plane, 3 in space.
        ici_gb_per_s: of all ICI links of a device together, one way.
        ici_links: their number, as a word.
        network_gb_per_s: a device's share of the data-center network.
        network: what that is a share of.
        title: the full name, if it is not that of a chip.
        fp8_flops_per_s: peak of products in fp8; 0 without units for it.
        devices_per_chip: as in `DeviceFacts`.
        chip_config: as in `DeviceFacts`.
    """
    flops_per_s = {"bf16": bf16_flops_per_s, "f32": bf16_flops_per_s}
    if fp8_flops_per_s:
        flops_per_s["fp8"] = fp8_flops_per_s
    return DeviceFacts(
        name=name,
        title=title or f"Cloud TPU {name}",
        kind=rf"\b{kind}$",
        flops_per_s=flops_per_s,
        hbm_bytes=int(hbm_gib * GIB),
        hbm_bytes_per_s=hbm_gb_per_s * GIGA,
        fast=DeviceLink(ici_gb_per_s, f"{ici_links} links of a chip", reached_percent=89, least_percent=44),
        fast_group=chips_of_pod * devices_per_chip,
        slow=DeviceLink(network_gb_per_s, network, reached_percent=84, least_percent=30),
        matmul=_MATMUL_TPU,
        attention=_ATTENTION_TPU,
        sheet=f"cloud.google.com/tpu/docs/{name}",
        dims=slice_dims,
        devices_per_chip=devices_per_chip,
        chip_config=chip_config,
    )


_ALL = (
    _gpu(
        name="h100",
        title="NVIDIA H100 SXM, 80 GB",
        kind=r"\bH100\b",
        flops_per_s=_HOPPER_FLOPS_PER_S,
        sheet="NVIDIA H100 data sheet (SXM)",
        target=_H100_TARGET,
        spec="h100_sxm",
        matmul=_MATMUL_HOPPER,
        fast=_NVLINK_4,
    ),
    _gpu(
        name="h200",
        title="NVIDIA H200 SXM, 141 GB",
        kind=r"\bG?H200\b",
        flops_per_s=_HOPPER_FLOPS_PER_S,
        sheet="NVIDIA H200 data sheet (SXM)",
        target=_H200_TARGET,
        spec="h200",
        matmul=_MATMUL_H200,
        fast=_NVLINK_4,
    ),
    # Before the one of 80 GB: the first pattern that matches counts, and that one matches every A100.
    _gpu(
        name="a100-40",
        title="NVIDIA A100 SXM, 40 GB",
        kind=r"\bA100\b.*\b40",
        flops_per_s=_AMPERE_FLOPS_PER_S,
        sheet="NVIDIA A100 data sheet (SXM)",
        target=_A100_40_TARGET,
        spec="a100_sxm_40",
        matmul=_MATMUL_AMPERE,
        attention=_ATTENTION_AMPERE,
        fast=_NVLINK_3,
        slow=_INFINIBAND_200,
        host=_PCIE_4,
    ),
    _gpu(
        name="a100-80",
        title="NVIDIA A100 SXM, 80 GB",
        kind=r"\bA100\b",
        flops_per_s=_AMPERE_FLOPS_PER_S,
        sheet="NVIDIA A100 data sheet (SXM)",
        target=_A100_80_TARGET,
        spec="a100_sxm_80",
        matmul=_MATMUL_AMPERE,
        attention=_ATTENTION_AMPERE,
        fast=_NVLINK_3,
        slow=_INFINIBAND_200,
        host=_PCIE_4,
    ),
    _gpu(
        name="b200",
        title="NVIDIA B200 (HGX)",
        kind=r"\bB200\b",
        flops_per_s=_B200_FLOPS_PER_S,
        sheet="NVIDIA HGX B200 data sheet",
        target=_B200_TARGET,
        spec="b200",
        matmul=_MATMUL_BLACKWELL,
        fast=_NVLINK_5,
    ),
    _gpu(
        name="gb200",
        title="NVIDIA GB200 (NVL72)",
        kind=r"\bGB200\b",
        flops_per_s=_GB200_FLOPS_PER_S,
        sheet="NVIDIA GB200 NVL72 data sheet",
        target=_GB200_TARGET,
        spec="gb200",
        matmul=_MATMUL_BLACKWELL,
        fast=_NVLINK_5,
        fast_group=72,
        host=_NVLINK_C2C,
    ),
    # A card has two dies, and JAX counts each of them as a device.
    _gpu(
        name="mi250x",
        title="AMD MI250X, one of two dies, 64 GB",
        kind=r"\bMI250X\b",
        flops_per_s=_MI250X_FLOPS_PER_S,
        sheet="AMD Instinct MI250X data sheet, half of it",
        target=_MI250X_TARGET,
        spec="mi200",
        matmul=_MATMUL_MI250X,
        attention=_ATTENTION_AMD,
        fast=_INFINITY_FABRIC_2,
        slow=_SLINGSHOT,
        host=_INFINITY_FABRIC_CPU,
    ),
    _gpu(
        name="mi300x",
        title="AMD MI300X, 192 GB",
        kind=r"\bMI300X\b",
        flops_per_s=_MI300X_FLOPS_PER_S,
        sheet="AMD Instinct MI300X data sheet",
        target=_MI300X_TARGET,
        spec="mi300",
        matmul=_MATMUL_MI300X,
        attention=_ATTENTION_AMD,
        fast=_INFINITY_FABRIC_3,
        stated_in=types.MappingProxyType(
            {
                "hbm_bytes": "AMD's driver: rocminfo of an MI300X has a pool of 201310208 KB",
                "hbm_bytes_per_s": "AMD Instinct MI300X data sheet",
            }
        ),
    ),
    # The sources of a TPU's numbers are on Google's page about it, except for `hbm_gib`.
    _tpu(
        name="v4",
        kind="v4",
        bf16_flops_per_s=275e12,
        hbm_gib=30.75,
        hbm_gb_per_s=1200,
        chips_of_pod=4096,
        slice_dims=3,
        ici_gb_per_s=270,
        ici_links="jax-ml/scaling-book, TPUs: 45 on each of six",
        network_gb_per_s=6.25,
        network="jax-ml/scaling-book, TPUs: 25 GB/s for a host of four chips",
        chip_config="megacore",
    ),
    _tpu(
        name="v5e",
        kind="v5 ?(lite|e)",
        bf16_flops_per_s=197e12,
        hbm_gib=15.75,
        hbm_gb_per_s=819,
        chips_of_pod=256,
        slice_dims=2,
        ici_gb_per_s=180,
        ici_links="four",
        network_gb_per_s=3.125,
        network="6.4 Tb/s for a pod of 256 chips",
    ),
    _tpu(
        name="v5p",
        kind="v5p?",
        bf16_flops_per_s=459e12,
        hbm_gib=95.74,
        hbm_gb_per_s=2765,
        chips_of_pod=8960,
        slice_dims=3,
        ici_gb_per_s=540,
        ici_links="six",
        network_gb_per_s=6.25,
        network="200 Gb/s for a host of four chips",
    ),
    _tpu(
        name="v6e",
        kind="v6 ?(lite|e)",
        bf16_flops_per_s=918e12,
        hbm_gib=31.25,
        hbm_gb_per_s=1640,
        chips_of_pod=256,
        slice_dims=2,
        ici_gb_per_s=360,
        ici_links="four",
        network_gb_per_s=12.5,
        network="25.6 Tb/s for a pod of 256 chips",
    ),
    # A chip has two chiplets, and JAX counts each of them as a device: with half of the chip's memory and links.
    _tpu(
        name="tpu7x",
        title="Cloud TPU7x, one of two chiplets",
        kind="TPU ?7x",
        bf16_flops_per_s=2307e12 / 2,
        fp8_flops_per_s=4614e12 / 2,
        hbm_gib=94.74,
        hbm_gb_per_s=7380 / 2,
        chips_of_pod=9216,
        slice_dims=3,
        ici_gb_per_s=300,
        ici_links="half of a chip's 1200 GB/s both ways, for two devices; six",
        network_gb_per_s=6.25,
        network="100 Gb/s for a chip of two devices",
        devices_per_chip=2,
    ),
)
DEVICES: Mapping[str, DeviceFacts] = types.MappingProxyType({facts.name: facts for facts in _ALL})


# ---- cloud machines, by their own names: a device above, with the adapters of one of its 8-GPU hosts


def _rented(*, device: str, machine: str, host_gbit_per_s: int, fabric: str) -> DeviceFacts:
    """Returns a device as in a machine of a cloud, in which it has an eighth of a host's network."""
    facts = DEVICES[device]
    network = DeviceLink(
        gb_per_s=host_gbit_per_s / 64,  # bits to bytes, and over 8 GPUs
        name=f"{host_gbit_per_s} Gb/s of {fabric} for a host of 8 GPUs",
        least_percent=40,
    )
    return dataclasses.replace(facts, title=f"{facts.title} ({machine})", slow=network)


CLOUDS: Mapping[str, DeviceFacts] = types.MappingProxyType(
    {
        # cloud.google.com/compute/docs/gpus/gpudirect: 4 x 200
        "a3-high": _rented(machine="a3-high", device="h100", host_gbit_per_s=800, fabric="GPUDirect-TCPX"),
        # the same: 8 x 200
        "a3-mega": _rented(machine="a3-mega", device="h100", host_gbit_per_s=1600, fabric="GPUDirect-TCPXO"),
        # aws.amazon.com/ec2/instance-types/p4
        "p4d": _rented(machine="p4d", device="a100-40", host_gbit_per_s=400, fabric="EFA"),
        "p4de": _rented(machine="p4de", device="a100-80", host_gbit_per_s=400, fabric="EFA"),
        # aws.amazon.com/ec2/instance-types/p5
        "p5": _rented(machine="p5", device="h100", host_gbit_per_s=3200, fabric="EFA"),
        # NVIDIA DGX A100 data sheet: 8 x 200
        "dgx-a100": _rented(machine="dgx-a100", device="a100-80", host_gbit_per_s=1600, fabric="InfiniBand"),
        # NVIDIA DGX H100 data sheet: 8 x 400
        "dgx-h100": _rented(machine="dgx-h100", device="h100", host_gbit_per_s=3200, fabric="InfiniBand"),
    }
)


# ---- devices that clusters are not planned for


@dataclasses.dataclass(frozen=True)
class _PeakOnly:
    """A device of which only the peak is known."""

    kind: str  # pattern of the driver's name
    flops_per_s: float  # dense bf16 (fp16 for a V100), of a device as JAX counts them
    source: str


# If a data sheet gives the figure with sparsity, half of it is used. These are tried before `DEVICES`, because a card
# has the name of a device there: "NVIDIA H100 PCIe" is no "h100".
_PEAKS_ONLY = (
    _PeakOnly(r"\bGH200\b", _HOPPER_FLOPS_PER_S["bf16"], "GH200 data sheet"),
    _PeakOnly(r"\bH[12]00 NVL\b", 835.5e12, "H100 NVL and H200 NVL data sheets"),
    _PeakOnly(r"\bH100 PCIe\b", 756.5e12, "H100 PCIe data sheet"),
    _PeakOnly(r"\bA40\b", 149.7e12, "A40 data sheet"),
    _PeakOnly(r"\bL40S\b", 362.05e12, "L40S data sheet"),
    _PeakOnly(r"\bV100-SXM2\b", 125e12, "V100 data sheet"),
    _PeakOnly(r"\bV100-PCIE\b", 112e12, "V100 data sheet"),
)


def device_of(kind: str) -> DeviceFacts | None:
    """Looks up a device by its driver's name for it, or by a name of this table, or the start of one.

    A card or a part of a device has the record of the device.

    Returns:
        Its record; None if the device is unknown.

    Examples:
        >>> device_of("NVIDIA A100-SXM4-40GB").name
        'a100-40'
    """
    for facts in _ALL:
        if re.search(facts.kind, kind, re.IGNORECASE):
            return facts
    return None


def peak_of(kind: str) -> tuple[float, str] | None:
    """Looks up the dense peak of products of 16-bit numbers.

    Args:
        kind: the driver's name of a device.

    Returns:
        Operations per second, and the source. None if unknown, as for a slice of a GPU, whose name gives its size only
        in part.
    """
    if re.search(r"\bMIG\b", kind):
        return None
    for device in _PEAKS_ONLY:
        if re.search(device.kind, kind):
            return device.flops_per_s, device.source
    facts = device_of(kind)
    if facts is None:
        return None
    return facts.flops_per_s["bf16"], facts.sources["flops_per_s"].removesuffix(", dense")
