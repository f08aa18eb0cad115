"""Resources that a collective uses on a multiprocessor: by NCCL per version and GPU, and by copy engines."""

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
_MOST_CTAS = 64


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

    Examples:
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
        """Returns one of its blocks; None if it has none."""
        if self.ctas == 0:
            return None
        return Block(self.threads, self.registers, self.smem_bytes)

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

# ---- what was read of NCCL

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Release:
    """Numbers of a release, read from its kernels with cuobjdump."""

    sm_80_static_bytes: int  # static shared memory of the kernels for sm_80
    later_static_bytes: int  # and of those for later GPUs
    symmetric_registers: int  # the highest register count of a kernel over symmetric memory


_RELEASES: Mapping[Version, _Release] = types.MappingProxyType(
    {
        (2, 28, 9): _Release(sm_80_static_bytes=7_104, later_static_bytes=22_592, symmetric_registers=128),
        (2, 30, 7): _Release(sm_80_static_bytes=14_144, later_static_bytes=37_824, symmetric_registers=128),
        (2, 32, 3): _Release(sm_80_static_bytes=14_144, later_static_bytes=37_824, symmetric_registers=128),
    }
)


@dataclasses.dataclass(frozen=True)
class _Threads:
    """The threads of a block."""

    count: int
    source: str


SYNC_THREADS = 32  # a warp of a ring's block that only synchronises, and that NCCL_NTHREADS does not count
RING_THREADS = 512 + SYNC_THREADS  # by default
_SYMMETRIC = "symmetric"
_THREADS: Mapping[str, _Threads] = types.MappingProxyType(
    {
        "ring": _Threads(
            RING_THREADS, "src/enqueue.cc of 2.30.7, the simple protocol: 512 and a warp that synchronises"
        ),
        "tree": _Threads(640, "src/enqueue.cc of 2.30.7"),
        "nvls": _Threads(640, "src/graph/tuning.cc of 2.30.7, maxThreads of NVLS"),
        "pat": _Threads(640, "src/enqueue.cc of 2.30.7"),
        "p2p": _Threads(640, "src/enqueue.cc of 2.30.7, scheduleP2pTasksToPlan"),
        _SYMMETRIC: _Threads(512, "ncclSymkMaxThreads; kernels that load by TMA also take all of the shared memory"),
    }
)
_DYNAMIC_BYTES = 20 * 4112  # ncclShmemDynamicSize: 4112 for each of 640 / 32 warps
_REGISTERS = 96  # of every ncclDevKernel_*
_SOURCE = (
    "registers and static shared memory: cuobjdump of the released NCCL {}; dynamic: src/include/device.h of 2.30.7,"
    " and assumed for others; threads: "
)

FOOTPRINTS = (*_THREADS, COPY_ENGINE.name)
"""The kinds of footprints: algorithms of NCCL, its kernels over symmetric memory, and copy engines."""

# ---- the footprint of a collective


def footprint(
    kind: str = "ring",
    *,
    gpu: GpuFacts,
    version: str | None = None,
    ctas: int | None = None,
    nccl_nthreads: int | None = None,
) -> CommFootprint:
    """Returns the resources of a collective on a GPU.

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
    check_kind(kind)
    if kind == "nvls":
        _check_nvls(gpu)
    _check_sizes(kind, ctas, nccl_nthreads)
    if kind == COPY_ENGINE.name:
        return COPY_ENGINE
    release_version = _nearest_release(version)
    version_text = _version_text(release_version)
    release = _RELEASES[release_version]
    threads = _THREADS[kind]
    if nccl_nthreads is not None:
        threads = _Threads(nccl_nthreads + SYNC_THREADS, f"{threads.source}; NCCL_NTHREADS={nccl_nthreads}")
    source = _SOURCE.format(version_text) + threads.source
    if ctas is None:
        source += "; ctas: an assumption"
    return CommFootprint(
        name=kind,
        ctas=ASSUMED_CTAS if ctas is None else ctas,
        threads=threads.count,
        registers=release.symmetric_registers if kind == _SYMMETRIC else _REGISTERS,
        smem_bytes=_smem_bytes(kind, gpu, release),
        source=source,
        version=version_text,
    )


def _smem_bytes(kind: str, gpu: GpuFacts, release: _Release) -> int:
    """Returns the shared memory of a block, static and dynamic."""
    if kind == _SYMMETRIC:
        return 0
    static_bytes = release.sm_80_static_bytes if gpu.major == 8 else release.later_static_bytes
    return static_bytes + _DYNAMIC_BYTES


def check_kind(kind: str) -> None:
    """Refuses a kind that is unknown.

    Raises:
        OccupancyError: it is not in `FOOTPRINTS`.
    """
    if kind not in FOOTPRINTS:
        raise OccupancyError(
            f"The footprint {kind!r} is unknown.",
            where="footprint",
            why=f"the footprints are {', '.join(FOOTPRINTS)}.",
            do='footprint("ring", gpu=gpu)  # the default for collectives of FSDP',
        )


def _check_nvls(gpu: GpuFacts) -> None:
    """Refuses a GPU without NVLink SHARP."""
    if gpu.major < 9:
        raise OccupancyError(
            f"{gpu.title} has no NVLS.",
            where="footprint='nvls'",
            why=f"NVLink SHARP needs sm_90 or newer, and this GPU is {gpu.arch}.",
            do='footprint("ring", gpu=gpu)  # on the command line: --footprint ring',
        )


def _check_sizes(kind: str, ctas: int | None, nccl_nthreads: int | None) -> None:
    """Refuses numbers of blocks and threads that NCCL does not have."""
    places = []
    reasons = []
    if ctas is not None and not 1 <= ctas <= _MOST_CTAS:
        places.append(f"ctas={ctas}")
        reasons.append("NCCL has 1 to 64 channels.")
    if nccl_nthreads is not None and (kind != "ring" or nccl_nthreads not in range(64, 513, 32)):
        places.append(f"nccl_nthreads={nccl_nthreads}")
        reasons.append("it must be a multiple of 32 from 64 to 512; only for rings.")
    if places:
        raise OccupancyError(
            "The collective is not valid.",
            where=places,
            why="\n".join(reasons),
            do=f'footprint("ring", gpu=gpu, ctas={ASSUMED_CTAS}, nccl_nthreads=256)',
        )


# ---- versions of NCCL


def parsed_version(version: str) -> Version:
    """Returns a version of NCCL as numbers.

    Raises:
        OccupancyError: the text is not a version.
    """
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise _bad_version(version, "it is not a version such as 2.30.7.")
    return tuple(map(int, version.split(".")))


def _nearest_release(version: str | None) -> Version:
    """Returns the newest release with known numbers that is not newer than the requested one."""
    if version is None:
        return max(_RELEASES)
    requested = parsed_version(version)
    older = [known for known in _RELEASES if known <= requested]
    if not older:
        raise _bad_version(version, "it is older than all releases whose kernels were read.")
    nearest = max(older)
    if nearest != requested:
        warnings.warn(
            f"The kernels of NCCL {version} were not read: its footprint is assumed to be that of"
            f" {_version_text(nearest)}, the nearest older release that was read.",
            OccupancyWarning,
            stacklevel=3,  # the caller of `footprint`
        )
    return nearest


def _version_text(version: Version) -> str:
    return ".".join(map(str, version))


def _bad_version(version: str, why: str) -> OccupancyError:
    known = [_version_text(release) for release in _RELEASES]
    return OccupancyError(
        f"The footprint of NCCL {version} is unknown.",
        where=f"version={version!r}",
        why=f"{why}\nknown versions: {', '.join(known)}.",
        do=f'footprint("ring", gpu=gpu, version="{known[-1]}")',
    )
