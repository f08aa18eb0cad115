"""Resources used on a multiprocessor: by NCCL per version and GPU, copy engines, and jshard's compiled kernels."""

from __future__ import annotations

import dataclasses
import re
import types
import warnings
from collections.abc import Mapping

from jshard.facts.gpus import GpuFacts, OccupancyError, OccupancyWarning
from jshard.occupancy.blocks import Block

ASSUMED_CTAS = 16
"""The assumed number of blocks of a collective: NCCL chooses it by the links, and at most 64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommFootprint:
    """The resources of one collective while it runs.

    Attributes:
        name: its kind, e.g. "ring".
        ctas: thread blocks, i.e. NCCL's channels. 0: it uses no multiprocessor.
        threads: threads per block.
        registers: registers per thread.
        smem_bytes: shared memory per block, static and dynamic.
        source: the origin of the numbers, and which of them are assumptions.
        version: version of NCCL; empty if it does not matter.

    Example:
        >>> footprint("ring", gpu=gpu("h200"), version="2.30.7").smem_bytes
        120064
    """

    name: str
    ctas: int
    threads: int
    registers: int
    smem_bytes: int
    source: str
    version: str = ""

    @property
    def block(self) -> Block | None:
        """One of its blocks; None if it has none."""
        return Block(self.threads, self.registers, self.smem_bytes) if self.ctas else None

    def __str__(self) -> str:
        return f"NCCL {self.version} {self.name}" if self.version else self.name


COPY_ENGINE = CommFootprint(
    name="copy-engine",
    ctas=0,
    threads=0,
    registers=0,
    smem_bytes=0,
    source="NCCL_CTA_POLICY=ZERO since 2.28: all-gather and all-to-all over symmetric windows, no arithmetic",
)
"""Collectives by the copy engines, which use no multiprocessor."""

# Read with cuobjdump from the released NCCL: static shared memory of the kernels for sm_80, and for later GPUs; and the
# highest register count of a kernel over symmetric memory.
_RELEASES: Mapping[tuple[int, ...], tuple[int, int, int]] = types.MappingProxyType(
    {(2, 28, 9): (7_104, 22_592, 128), (2, 30, 7): (14_144, 37_824, 128), (2, 32, 3): (14_144, 37_824, 128)}
)
RING_THREADS = 512 + 32  # NCCL_NTHREADS by default, and a warp that synchronises
_DYNAMIC_BYTES = 20 * 4112  # ncclShmemDynamicSize: 4112 for each of 640 / 32 warps
_REGISTERS = 96  # of every ncclDevKernel_*
_SOURCE = (
    "registers and static shared memory: cuobjdump of the released NCCL {}; dynamic: src/include/device.h of 2.30.7,"
    " and assumed for others; threads: "
)
_THREADS: Mapping[str, tuple[int, str]] = types.MappingProxyType(
    {
        "ring": (RING_THREADS, "src/enqueue.cc of 2.30.7, the simple protocol: 512 and a warp that synchronises"),
        "tree": (640, "src/enqueue.cc of 2.30.7"),
        "nvls": (640, "src/graph/tuning.cc of 2.30.7, maxThreads of NVLS"),
        "pat": (640, "src/enqueue.cc of 2.30.7"),
        "p2p": (640, "src/enqueue.cc of 2.30.7, scheduleP2pTasksToPlan"),
        "symmetric": (512, "ncclSymkMaxThreads; kernels that load by TMA also take all of the shared memory"),
    }
)
FOOTPRINTS = (*_THREADS, COPY_ENGINE.name)
"""The kinds of footprints: algorithms of NCCL, its kernels over symmetric memory, and copy engines."""


def footprint(
    kind: str = "ring",
    *,
    gpu: GpuFacts,
    version: str | None = None,
    ctas: int | None = None,
    nccl_nthreads: int | None = None,
) -> CommFootprint:
    """The resources of a collective on a GPU.

    Args:
        kind: one of `FOOTPRINTS`.
        gpu: the GPU.
        version: version of the loaded NCCL, e.g. "2.30.7"; the newest known by default. For an unknown version the
            numbers are those of the nearest older one, with a warning.
        ctas: number of blocks, bounded by `xla_gpu_nccl_collective_max_nchannels`; an assumption by default.
        nccl_nthreads: the value of NCCL_NTHREADS, from 64 to 512 in whole warps, used only by rings; 512 by default.

    Raises:
        OccupancyError: the kind or version is unknown, NCCL has fewer blocks or threads, or the GPU has no NVLS.
    """
    if kind not in FOOTPRINTS:
        raise OccupancyError(
            f"The footprint {kind!r} is unknown.",
            where="footprint",
            why=f"the footprints are {', '.join(FOOTPRINTS)}.",
            do='footprint("ring", gpu=gpu)  # the default for collectives of FSDP',
        )
    if kind == "nvls" and gpu.major < 9:
        raise OccupancyError(
            f"{gpu.title} has no NVLS.",
            where="footprint='nvls'",
            why=f"NVLink SHARP needs sm_90 or newer, and this GPU is {gpu.arch}.",
            do='footprint("ring", gpu=gpu)  # on the command line: --footprint ring',
        )
    wrong = []
    if ctas is not None and not 1 <= ctas <= 64:
        wrong.append((f"ctas={ctas}", "NCCL has 1 to 64 channels."))
    if nccl_nthreads is not None and (kind != "ring" or nccl_nthreads not in range(64, 513, 32)):
        wrong.append((f"nccl_nthreads={nccl_nthreads}", "it must be a multiple of 32 from 64 to 512; only for rings."))
    if wrong:
        where, why = zip(*wrong, strict=True)
        do = f'footprint("ring", gpu=gpu, ctas={ASSUMED_CTAS}, nccl_nthreads=256)'
        raise OccupancyError("The collective is not valid.", where=where, why="\n".join(why), do=do)
    if kind == COPY_ENGINE.name:
        return COPY_ENGINE
    found = _release(version)
    sm_80_bytes, later_bytes, symmetric_registers = _RELEASES[found]
    number, (threads, threads_source) = ".".join(map(str, found)), _THREADS[kind]
    if nccl_nthreads is not None:
        threads, threads_source = nccl_nthreads + 32, f"{threads_source}; NCCL_NTHREADS={nccl_nthreads}"
    is_symmetric = kind == "symmetric"
    return CommFootprint(
        name=kind,
        ctas=ASSUMED_CTAS if ctas is None else ctas,
        threads=threads,
        registers=symmetric_registers if is_symmetric else _REGISTERS,
        smem_bytes=0 if is_symmetric else (sm_80_bytes if gpu.major == 8 else later_bytes) + _DYNAMIC_BYTES,
        source=_SOURCE.format(number) + threads_source + ("; ctas: an assumption" if ctas is None else ""),
        version=number,
    )


def parsed_version(version: str) -> tuple[int, ...]:
    """A version of NCCL as numbers."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise _bad_version(version, "it is not a version such as 2.30.7.")
    return tuple(map(int, version.split(".")))


def _release(version: str | None) -> tuple[int, ...]:
    """The newest release with known numbers that is not newer than the requested one."""
    asked = max(_RELEASES) if version is None else parsed_version(version)
    found = max((known for known in _RELEASES if known <= asked), default=None)
    if found is None:
        raise _bad_version(str(version), "it is older than all releases whose kernels were read.")
    if found != asked:
        warnings.warn(
            f"The kernels of NCCL {version} were not read: its footprint is assumed to be that of"
            f" {'.'.join(map(str, found))}, the nearest older release that was read.",
            OccupancyWarning,
            stacklevel=3,
        )
    return found


def _bad_version(version: str, why: str) -> OccupancyError:
    known = [".".join(map(str, numbers)) for numbers in _RELEASES]
    return OccupancyError(
        f"The footprint of NCCL {version} is unknown.",
        where=f"version={version!r}",
        why=f"{why}\nknown versions: {', '.join(known)}.",
        do=f'footprint("ring", gpu=gpu, version="{known[-1]}")',
    )


# The kernels of jshard as compiled: the resources of a block of each.


@dataclasses.dataclass(frozen=True)
class ShippedKernel:
    """A kernel in one form."""

    name: str  # of the kernel as in profiles, without "jshard_", e.g. "matmul_nn_tiled"
    tiles: str  # its tiles and pipeline stages, e.g. "64x128x64/3"; for a norm the width of its rows
    threads: int  # of a block
    registers: int  # of a thread, as the assembler reports them
    smem_bytes: int  # of a block, without padding
    persistent: bool  # whether its blocks stay until the kernel ends

    @property
    def label(self) -> str:
        """Name and tiles, which identify a form."""
        return f"{self.name}:{self.tiles}" if self.tiles else self.name

    @property
    def block(self) -> Block:
        """The resources of one of its blocks."""
        return Block(self.threads, self.registers, self.smem_bytes)

    def is_called(self, name: str) -> bool:
        """Whether a name matches it: its own, that of its form, or a prefix such as "matmul"."""
        return name in (self.name, self.label) or self.name.startswith(f"{name}_")


# From `python -m benchmarks.kernels.table`, like the table below; a test compiles them again. Products of transposed
# operands need the same resources, and the other products of an MLP are those of matmul.
SHIPPED_SOURCE = "compiled for sm_90a by ptxas 12.9.86 with jax 0.10.2"

SHIPPED = (
    ShippedKernel("matmul_nn_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_nn_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_nn_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_nn_tiled", "64x64x64/2", 128, 58, 40_977, False),
    ShippedKernel("mlp_gelu_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("mlp_gelu_tiled", "128x128x64/4", 128, 194, 163_873, False),
    ShippedKernel("mlp_silu_persistent", "128x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("mlp_silu_tiled", "64x128x64/4", 128, 255, 180_257, False),
    ShippedKernel("rms_norm", "1024", 128, 40, 2_049, False),
    ShippedKernel("rms_norm_backward", "1024", 128, 56, 2_049, False),
    ShippedKernel("layer_norm", "1024", 128, 55, 2_049, False),
    ShippedKernel("layer_norm_backward", "1024", 128, 72, 2_049, False),
    ShippedKernel("rms_norm", "4096", 128, 96, 2_049, False),
    ShippedKernel("rms_norm_backward", "4096", 128, 206, 2_049, False),
    ShippedKernel("layer_norm", "4096", 128, 167, 2_049, False),
    ShippedKernel("layer_norm_backward", "4096", 128, 254, 2_049, False),
)
