"""The limits of one GPU multiprocessor: threads, registers, shared memory, and their allocation units."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping

from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES
from jshard.facts.gpu_target import NvidiaTarget


class OccupancyError(ShardingError):
    """A GPU, a thread block or a communication footprint that is unknown to the model or impossible."""


class OccupancyWarning(UserWarning):
    """An answer for something close to the request, not for the request itself."""


KIB = 1024

_XLA = "openxla/xla: xla/backends/gpu/target_config/specs/{}.txtpb"
_CUDA = "cuda_occupancy.h of CUDA 13.0, {}"
_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The limits of one kind of GPU that decide which thread blocks run side by side.

    Examples:
        >>> gpu("h200").smem_per_block_bytes // 1024
        227
    """

    name: str  # as in `jshard occupancy --gpu`, e.g. "h200"
    title: str  # the full name of the GPU
    arch: str  # the target architecture, e.g. "sm_90"
    num_sms: int  # multiprocessors
    smem_per_sm_bytes: int  # shared memory of a multiprocessor
    smem_per_block_bytes: int  # the maximum per block
    threads_per_sm: int = 2048  # resident at once
    blocks_per_sm: int = 32  # resident at once
    # The same for all GPUs:
    smem_reserved_bytes: int = KIB  # shared memory reserved by the driver per block
    smem_unit_bytes: int = 128  # a block's shared memory is rounded up to this
    threads_per_block: int = 1024  # the maximum per block
    warp_size: int = 32
    partitions: int = 4  # of a multiprocessor; each has a share of the registers and warps
    registers_per_sm: int = 65536  # of 32 bits
    registers_per_thread: int = 255  # the maximum per thread
    register_unit: int = 256  # a warp's registers are rounded up to this
    sources: Mapping[str, str] = dataclasses.field(compare=False)  # the sources of these numbers

    @property
    def warps_per_sm(self) -> int:
        """The number of warps resident at once."""
        return self.threads_per_sm // self.warp_size

    @property
    def major(self) -> int:
        """The major number of the compute capability."""
        return int(self.arch.removeprefix("sm_")) // 10


def _sources(spec: str, *, num_sms: str = "") -> Mapping[str, str]:
    """Returns the sources of a GPU's numbers.

    Args:
        spec: XLA's description of the GPU.
        num_sms: source of the number of multiprocessors, if that description is of a GPU with another number.
    """
    sources = {
        "num_sms": num_sms or f"{spec}, core_count",
        "smem_per_sm_bytes": f"{spec}, shared_memory_per_core",
        "smem_per_block_bytes": f"{spec}, shared_memory_per_block_optin",
        "smem_reserved_bytes": f"{_GUIDE}: 1 KiB of shared memory is reserved by block since 8.0",
        "smem_unit_bytes": _CUDA.format("cudaOccSMemAllocationGranularity"),
        "threads_per_sm": f"{spec}, threads_per_core_limit",
        "threads_per_block": f"{spec}, threads_per_block_limit",
        "blocks_per_sm": _CUDA.format("cudaOccMaxBlocksPerMultiprocessor"),
        "warp_size": f"{spec}, threads_per_warp",
        "partitions": _CUDA.format("cudaOccSubPartitionsPerMultiprocessor"),
        "registers_per_sm": f"{spec}, registers_per_core_limit",
        "registers_per_thread": _GUIDE,
        "register_unit": _CUDA.format("cudaOccRegAllocationGranularity"),
    }
    return types.MappingProxyType(sources)


def _from_device(name: str, title: str, *, device: str = "") -> GpuFacts:
    """Returns a GPU that `jshard plan` knows, as `device` if that is not its name, from its compiler description."""
    facts = DEVICES[device or name]
    target = facts.target
    assert isinstance(target, NvidiaTarget)
    # What the driver reserves is the difference of the two. The model adds it to the request of each block.
    assert target.shared_memory_per_core - target.shared_memory_per_block_optin == KIB
    return GpuFacts(
        name=name,
        title=title,
        arch=f"sm_{target.major}0",
        num_sms=target.core_count,
        smem_per_sm_bytes=target.shared_memory_per_core,
        smem_per_block_bytes=target.shared_memory_per_block_optin,
        sources=_sources(facts.spec),
    )


_ALL = (
    GpuFacts(
        name="a40",
        title="NVIDIA A40",
        arch="sm_86",
        num_sms=84,
        smem_per_sm_bytes=100 * KIB,
        smem_per_block_bytes=99 * KIB,
        threads_per_sm=1536,
        blocks_per_sm=16,
        sources=_sources(
            _XLA.format("a6000") + " (RTX A6000: the same chip)",
            num_sms="NVIDIA A40 data sheet: 10,752 CUDA cores, 128 in a multiprocessor",
        ),
    ),
    # Those of 40 and 80 GB differ in their memory only, which does not count here.
    _from_device("a100", "NVIDIA A100", device="a100-80"),
    _from_device("h100", "NVIDIA H100 SXM"),
    _from_device("h200", "NVIDIA H200"),
    _from_device("b200", "NVIDIA B200"),
    _from_device("gb200", "NVIDIA GB200"),
)
GPUS: Mapping[str, GpuFacts] = types.MappingProxyType({facts.name: facts for facts in _ALL})
"""The GPUs that the model knows, by name."""

# The same name, with fewer multiprocessors.
_SMALLER = {
    "pcie": "a PCIe card",
    "mig": "a part of a GPU (MIG)",
}


def gpu(name: str) -> GpuFacts:
    """Returns the limits of a GPU, by its name here, in a topology, or from the driver ("NVIDIA A100-SXM4-80GB").

    Raises:
        OccupancyError: the GPU is unknown; the error lists the known ones.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    known = [GPUS[word] for word in words if word in GPUS]
    smaller = [word for word in words if word in _SMALLER]
    if known and known[0].name == "a100":
        # An A100 on a PCIe card has all multiprocessors.
        smaller = [word for word in smaller if word != "pcie"]
    if not known or smaller:
        raise _unknown(name, words, smaller)
    return known[0]


def _unknown(name: str, words: list[str], smaller: list[str]) -> OccupancyError:
    """Returns the error for a name that is unknown, or whose words in `smaller` mean fewer multiprocessors."""
    near = [known for word in words for known in difflib.get_close_matches(word, GPUS, n=1)]
    base = near[0] if near else "h200"
    amd_names = [device.name for device in DEVICES.values() if device.compiler == "rocm"]
    why = f"the GPUs are {', '.join(GPUS)}; with --gpu also AMD's {', '.join(amd_names)}."
    do = f'dataclasses.replace(gpu("{base}"), num_sms=...), with the numbers of the GPU.'
    if smaller:
        why = f"{_SMALLER[smaller[0]]} has fewer multiprocessors than the GPU of that name.\n{why}"
    elif near:
        do = f'gpu("{near[0]}"), or --gpu {near[0]}'
    return OccupancyError(f"There is no GPU {name!r}.", where=f'gpu("{name}")', why=why, do=do)
