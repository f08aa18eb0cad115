"""What takes room on a multiprocessor: NCCL by version and GPU, copy engines, and the kernels of jshard as compiled."""

from __future__ import annotations

import dataclasses
import re
import types
import warnings
from collections.abc import Mapping

from jshard.facts.gpus import GpuFacts, OccupancyError, OccupancyWarning
from jshard.occupancy.blocks import Block

ASSUMED_CTAS = 16
"""Blocks of a collective where nothing is known: NCCL chooses by the links, and at most 64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommFootprint:
    """What one collective takes while it runs.

    Attributes:
        name: how it is asked for, e.g. "ring".
        ctas: thread blocks; NCCL's channels. 0: it takes no multiprocessor.
        threads: of a block.
        registers: of a thread.
        smem_bytes: of a block, static and dynamic.
        source: where the numbers are from, and what of them is not known.
        version: of NCCL; empty where it does not matter.

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
        version = f"NCCL {self.version} " if self.version else ""
        return f"{version}{self.name}"


COPY_ENGINE = CommFootprint(
    name="copy-engine",
    ctas=0,
    threads=0,
    registers=0,
    smem_bytes=0,
    source="NCCL_CTA_POLICY=ZERO since 2.28: all-gather and all-to-all over symmetric windows, no arithmetic",
)
"""Collectives by the copy engines: no multiprocessor is taken."""

_READ = "read with cuobjdump from the released NCCL {} for {}"
_DYNAMIC_BYTES = 20 * 4112  # ncclShmemDynamicSize: so much for each of 640 / 32 warps
_REGISTERS = 96  # of every ncclDevKernel_*


@dataclasses.dataclass(frozen=True)
class _Release:
    """Static shared memory of the kernels of a release, by the major number of the architecture."""

    static_bytes: Mapping[int, int]
    symmetric_registers: tuple[int, int]
    dynamic_known: bool = True


def _static(sm80: int, later: int) -> Mapping[int, int]:
    return types.MappingProxyType({8: sm80, 9: later, 10: later})


_RELEASES: Mapping[tuple[int, ...], _Release] = types.MappingProxyType(
    {
        (2, 28, 9): _Release(_static(7_104, 22_592), (56, 128)),
        (2, 30, 7): _Release(_static(14_144, 37_824), (64, 128)),
        (2, 32, 3): _Release(_static(14_144, 37_824), (64, 128), dynamic_known=False),
    }
)

_ENQUEUE = "NVIDIA/nccl 2.30.7: src/enqueue.cc"
_THREADS: Mapping[str, tuple[int, str]] = types.MappingProxyType(
    {
        "ring": (512 + 32, f"{_ENQUEUE}, ring with the simple protocol: 512 and a warp that synchronises"),
        "tree": (640, f"{_ENQUEUE}, tree"),
        "nvls": (640, "NVIDIA/nccl 2.30.7: src/graph/tuning.cc, maxThreads of NVLS"),
        "pat": (640, f"{_ENQUEUE}, PAT"),
        "p2p": (640, f"{_ENQUEUE}, scheduleP2pTasksToPlan"),
        "symmetric": (512, "NVIDIA/nccl 2.30.7: src/include/sym_kernels.h, ncclSymkMaxThreads"),
    }
)
FOOTPRINTS = (*_THREADS, COPY_ENGINE.name)
"""The kinds of footprints: algorithms of NCCL, its kernels over symmetric memory, and copy engines."""

_warned: set[str] = set()


def footprint(
    kind: str = "ring",
    *,
    gpu: GpuFacts,
    version: str | None = None,
    ctas: int | None = None,
    nccl_nthreads: int | None = None,
) -> CommFootprint:
    """What a collective takes on a GPU.

    Args:
        kind: one of `FOOTPRINTS`.
        gpu: the GPU.
        version: of the NCCL that is loaded, e.g. "2.30.7"; the newest known by default. Of one that is not known the
            numbers are those of the nearest older one, with a warning.
        ctas: blocks that it runs in, as `xla_gpu_nccl_collective_max_nchannels` bounds them; by default an assumption.
        nccl_nthreads: what NCCL_NTHREADS is, from 64 to 512 in whole warps; only rings heed it.

    Raises:
        OccupancyError: the kind, version or number of threads is not known, or the GPU has no NVLS.
    """
    if kind not in FOOTPRINTS:
        raise OccupancyError(
            f"There is no footprint {kind!r}.",
            where="footprint",
            why=f"there are {', '.join(FOOTPRINTS)}.",
            do='footprint("ring", gpu=gpu)',
        )
    if kind == COPY_ENGINE.name:
        return COPY_ENGINE
    if kind == "nvls" and gpu.major < 9:
        raise OccupancyError(
            f"{gpu.title} has no NVLS.",
            where="footprint='nvls'",
            why=f"NVLink SHARP begins with sm_90, and this GPU is {gpu.arch}.",
            do='footprint("ring", gpu=gpu)',
        )
    _check_numbers(kind, ctas, nccl_nthreads)
    found = _release(version)
    number = ".".join(map(str, found))
    release, (threads, threads_source) = _RELEASES[found], _THREADS[kind]
    registers, smem_bytes, source = _of_kernel(kind, release, gpu, number)
    if ctas is None:
        ctas, source = ASSUMED_CTAS, f"{source}; ctas: an assumption"
    if nccl_nthreads is not None:
        threads, threads_source = nccl_nthreads + 32, f"{threads_source}; NCCL_NTHREADS={nccl_nthreads}"
    return CommFootprint(
        name=kind,
        ctas=ctas,
        threads=threads,
        registers=registers,
        smem_bytes=smem_bytes,
        source=f"{source}; threads: {threads_source}",
        version=number,
    )


def _of_kernel(kind: str, release: _Release, gpu: GpuFacts, number: str) -> tuple[int, int, str]:
    """Registers by thread, shared memory, and the source of both."""
    if kind == "symmetric":
        least, most = release.symmetric_registers
        source = _READ.format(number, "sm_90") + f": {least} to {most} registers by kernel, of which the most is taken"
        return most, 0, f"{source}; kernels that load by TMA launch with all the shared memory a block can have besides"
    arch = "sm_80" if gpu.major == 8 else gpu.arch
    source = f"{_READ.format(number, arch)}; dynamic shared memory: 20 x 4,112 bytes, src/include/device.h of 2.30.7"
    if not release.dynamic_known:
        source += f", assumed to be the same in {number}"
    return _REGISTERS, release.static_bytes[gpu.major] + _DYNAMIC_BYTES, source


def parsed_version(version: str) -> tuple[int, ...]:
    """A version of NCCL as numbers."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise _bad_version(version, "it is no version of the form 2.30.7.")
    return tuple(map(int, version.split(".")))


def _release(version: str | None) -> tuple[int, ...]:
    """The newest release whose numbers are known and that is not newer than what is asked for."""
    if version is None:
        return max(_RELEASES)
    asked = parsed_version(version)
    older = [known for known in _RELEASES if known <= asked]
    if not older:
        raise _bad_version(version, "it is older than any whose kernels were read.")
    found = max(older)
    if found != asked and version not in _warned:
        _warned.add(version)
        warnings.warn(
            f"The kernels of NCCL {version} were not read: its footprint is taken to be that of"
            f" {'.'.join(map(str, found))}, the nearest older one that was.",
            OccupancyWarning,
            stacklevel=3,
        )
    return found


def _bad_version(version: str, why: str) -> OccupancyError:
    known = [".".join(map(str, numbers)) for numbers in _RELEASES]
    return OccupancyError(
        f"The footprint of NCCL {version} is not known.",
        where=f"version={version!r}",
        why=f"{why}\nknown are {', '.join(known)}.",
        do=f'footprint("ring", gpu=gpu, version="{known[-1]}")',
    )


def _check_numbers(kind: str, ctas: int | None, nccl_nthreads: int | None) -> None:
    wrong = []
    if ctas is not None and not 1 <= ctas <= 64:
        wrong.append((f"ctas={ctas}", "NCCL has from 1 to 64 channels.", f"ctas={ASSUMED_CTAS}"))
    if nccl_nthreads is not None and kind != "ring":
        wrong.append((f"nccl_nthreads={nccl_nthreads}", f"{kind} does not heed NCCL_NTHREADS.", "leave it away."))
    elif nccl_nthreads is not None and not (64 <= nccl_nthreads <= 512 and nccl_nthreads % 32 == 0):
        why = "NCCL_NTHREADS is a multiple of 32 from 64 to 512."
        wrong.append((f"nccl_nthreads={nccl_nthreads}", why, "nccl_nthreads=256"))
    if wrong:
        where, why, do = zip(*wrong, strict=True)
        raise OccupancyError(
            "The collective cannot be.", where=where, why="\n".join(why), do="\n".join(dict.fromkeys(do))
        )


# The kernels of jshard as they were compiled: what a block of each takes.

# By `python -m benchmarks.kernels.table`, as is the table below; a test compiles them again.
_SOURCE = "compiled for sm_90a by ptxas 12.9.86 with jax 0.10.2"


@dataclasses.dataclass(frozen=True)
class ShippedKernel:
    """A kernel in one form."""

    name: str  # of the kernel as profiles show it, less "jshard_", e.g. "matmul_nn_tiled".
    tiles: str  # its tiles and pipeline stages, e.g. "64x128x64/3"; of a norm the width of its rows.
    threads: int  # of a block
    registers: int  # of a thread, as the assembler reports them
    smem_bytes: int  # of a block, without padding
    persistent: bool  # whether its blocks stay until the kernel ends
    source: str = _SOURCE  # where the numbers are from

    @property
    def label(self) -> str:
        """Name and tiles: one form."""
        return f"{self.name}:{self.tiles}" if self.tiles else self.name

    @property
    def block(self) -> Block:
        """What a block of it takes."""
        return Block(self.threads, self.registers, self.smem_bytes)

    def is_called(self, name: str) -> bool:
        """Whether it goes by a name: its own, that of its form, or how they begin, as "matmul" does."""
        return name in (self.name, self.label) or self.name.startswith(f"{name}_")


_KERNELS = (
    ShippedKernel("matmul_nn_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_nt_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_tn_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_nn_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_nt_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_tn_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_nn_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_nt_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_tn_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_nn_tiled", "64x64x64/2", 128, 58, 40_977, False),
    ShippedKernel("matmul_nt_tiled", "64x64x64/2", 128, 58, 40_977, False),
    ShippedKernel("matmul_tn_tiled", "64x64x64/2", 128, 58, 40_977, False),
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
# The other products of an MLP are those of matmul.


def shipped_kernels(gpu: GpuFacts) -> tuple[ShippedKernel, ...]:
    """The kernels, as compiled for a GPU; for one that they were not compiled for, as for sm_90a."""
    if gpu.arch == "sm_90":
        return _KERNELS
    source = f"{_SOURCE}; not compiled for {gpu.arch}"
    return tuple(dataclasses.replace(kernel, source=source) for kernel in _KERNELS)
