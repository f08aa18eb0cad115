"""The limits of one compute unit of an AMD GPU: waves, registers, local memory, and their allocation units."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping

from jshard.facts.devices import DEVICES
from jshard.facts.gpu_target import AmdTarget
from jshard.facts.gpus import OccupancyError

_LLVM = "LLVM: llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp, {}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmdGpuFacts:
    """The limits of one kind of AMD GPU that decide which workgroups run side by side.

    Examples:
        >>> amd_gpu("mi250x").num_cus
        110
    """

    name: str  # as in `jshard occupancy --gpu`, e.g. "mi250x"
    title: str  # the full name of the GPU, or of the die that JAX counts as a device
    gfx: str  # the target architecture, e.g. "gfx90a"
    num_cus: int  # compute units
    lds_per_cu_bytes: int  # local memory (LDS) of a compute unit; a workgroup may have all of it
    # The same for all CDNA GPUs since MI200:
    lds_unit_bytes: int = 512  # a workgroup's local memory is rounded up to this
    wave_size: int = 64  # work items of a wave
    simds: int = 4  # of a compute unit; each has registers and waves of its own
    waves_per_simd: int = 8  # resident at once
    vgprs_per_simd: int = 512  # vector registers of 32 bits for each lane, accumulation registers among them
    vgpr_unit: int = 8  # a wave's vector registers are rounded up to this
    sgprs_per_simd: int = 800  # scalar registers
    workgroups_per_cu: int = 16  # resident at once, of more than one wave: each needs a barrier
    work_items_per_workgroup: int = 1024  # the maximum
    sources: Mapping[str, str] = dataclasses.field(compare=False)  # the sources of these numbers

    @property
    def waves_per_cu(self) -> int:
        """The number of waves resident at once."""
        return self.waves_per_simd * self.simds


def _from_device(name: str) -> AmdGpuFacts:
    """Returns a GPU that `jshard plan` knows, from the description of it for the compiler."""
    facts = DEVICES[name]
    target = facts.target
    assert isinstance(target, AmdTarget)
    sources = {
        "num_cus": f"{facts.spec}, core_count",
        "lds_per_cu_bytes": f"{facts.spec}, shared_memory_per_core",
        "lds_unit_bytes": _LLVM.format("getLdsDwGranularity: 128 words"),
        "wave_size": _LLVM.format("getWavefrontSize"),
        "simds": _LLVM.format("getEUsPerCU"),
        "waves_per_simd": _LLVM.format("getMaxWavesPerEU, GFX90A"),
        "vgprs_per_simd": _LLVM.format("getTotalNumVGPRs, GFX90A"),
        "vgpr_unit": _LLVM.format("getVGPRAllocGranule, GFX90A"),
        "sgprs_per_simd": _LLVM.format("getTotalNumSGPRs; and getOccupancyWithNumSGPRs"),
        "workgroups_per_cu": _LLVM.format("getMaxWorkGroupsPerCU: 16 barriers"),
        "work_items_per_workgroup": _LLVM.format("getMaxFlatWorkGroupSize"),
    }
    return AmdGpuFacts(
        name=name,
        title=facts.title,
        gfx=target.gfx,
        num_cus=target.core_count,
        lds_per_cu_bytes=target.shared_memory_per_core,
        sources=types.MappingProxyType(sources),
    )


_ALL = (_from_device("mi250x"), _from_device("mi300x"))
AMD_GPUS: Mapping[str, AmdGpuFacts] = types.MappingProxyType({facts.name: facts for facts in _ALL})
"""The AMD GPUs that the occupancy model knows, by name."""


def is_amd_gpu(name: str) -> bool:
    """Returns whether `amd_gpu` knows a GPU: by its name here, or from the driver ("AMD Instinct MI250X").

    Examples:
        >>> is_amd_gpu("AMD Instinct MI300X"), is_amd_gpu("h200")
        (True, False)
    """
    return _known(name) is not None


def amd_gpu(name: str) -> AmdGpuFacts:
    """Returns the limits of an AMD GPU, by its name here or from the driver ("AMD Instinct MI250X").

    Raises:
        OccupancyError: the GPU is unknown; the error lists the known ones.
    """
    known = _known(name)
    if known is None:
        raise OccupancyError(
            f"There is no AMD GPU {name!r}.",
            where=f'amd_gpu("{name}")',
            why=f"the AMD GPUs are {', '.join(AMD_GPUS)}.",
            do=f'amd_gpu("{_ALL[0].name}"), or --gpu {_ALL[0].name}',
        )
    return known


def _known(name: str) -> AmdGpuFacts | None:
    for word in re.findall(r"[a-z0-9]+", name.lower()):
        if word in AMD_GPUS:
            return AMD_GPUS[word]
    return None
