"""Resources that a collective of RCCL uses on a compute unit of an AMD GPU."""

from __future__ import annotations

import dataclasses

from jshard.facts.amd_gpus import AmdGpuFacts
from jshard.facts.gpus import OccupancyError
from jshard.occupancy.footprints import ASSUMED_CTAS
from jshard.occupancy.workgroups import Workgroup

RCCL_VERSION = "2.13.4"
"""The version whose kernels were read."""

RCCL_FOOTPRINTS = ("ring", "tree", "p2p")
"""The kinds of collectives. One kernel runs all of them, and calls the function of the one it was launched for."""

_MOST_WORKGROUPS = 32  # MAXCHANNELS in src/include/devcomm.h of 2.13
_READ_GFX = "gfx90a"
# The kernel and its three variants (LL128, debugging) have the same numbers. Of the registers 11 are for accumulation.
_WORKGROUP = Workgroup(work_items=256, vgprs=259, sgprs=106, lds_bytes=1_728)
_SOURCE = (
    f"registers, LDS and work items: notes of the code object for {_READ_GFX} in RCCL {RCCL_VERSION} as Debian builds"
    " it (librccl1 5.4.3-3+b1); local memory requested at the launch: none, an assumption; later versions were not read"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RcclFootprint:
    """The resources of one collective of RCCL while it runs.

    Attributes:
        name: its kind, e.g. "ring".
        workgroups: their number, i.e. RCCL's channels.
        workgroup: one of them.
        source: the origin of the numbers, and which of them are assumptions.
        version: version of RCCL.
    """

    name: str
    workgroups: int
    workgroup: Workgroup
    source: str
    version: str = RCCL_VERSION

    def __str__(self) -> str:
        return f"RCCL {self.version} {self.name}"


def rccl_footprint(kind: str = "ring", *, gpu: AmdGpuFacts, workgroups: int | None = None) -> RcclFootprint:
    """Returns the resources of a collective on an AMD GPU.

    Args:
        kind: one of `RCCL_FOOTPRINTS`.
        gpu: the GPU.
        workgroups: their number; an assumption by default.

    Raises:
        OccupancyError: the kind is unknown, or RCCL has no such number of channels.
    """
    if kind not in RCCL_FOOTPRINTS:
        raise OccupancyError(
            f"The footprint {kind!r} is unknown for {gpu.title}.",
            where=f"--footprint {kind}",
            why=f"RCCL runs its collectives there; of these the footprints are {', '.join(RCCL_FOOTPRINTS)}.",
            do=f'rccl_footprint("ring", gpu=gpu)  # on the command line: --gpu {gpu.name} --footprint ring',
        )
    if workgroups is not None and not 1 <= workgroups <= _MOST_WORKGROUPS:
        raise OccupancyError(
            "The collective is not valid.",
            where=f"workgroups={workgroups}",
            why=f"RCCL {RCCL_VERSION} has 1 to {_MOST_WORKGROUPS} channels.",
            do=f'rccl_footprint("ring", gpu=gpu, workgroups={ASSUMED_CTAS})  # on the command line:'
            f" --ctas {ASSUMED_CTAS}",
        )
    source = _SOURCE
    if gpu.gfx != _READ_GFX:
        source += f"; assumed to be the same on {gpu.gfx}, for which that version has no code"
    if workgroups is None:
        source += "; their number: an assumption"
        workgroups = ASSUMED_CTAS
    return RcclFootprint(name=kind, workgroups=workgroups, workgroup=_WORKGROUP, source=source)
