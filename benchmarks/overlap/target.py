"""The GPU that is measured, by its driver's name: which products run on it, beside which load. None need be present."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

from benchmarks.overlap.machine import nccl_version
from jshard.errors import RunError
from jshard.facts.amd_gpus import is_amd_gpu
from jshard.kernels.backend import why_generation_unsupported
from jshard.kernels.generation import generation_of
from jshard.occupancy import (
    AmdGpuFacts,
    CommFootprint,
    GpuFacts,
    OccupancyError,
    RcclFootprint,
    Workgroup,
    amd_gpu,
    footprint,
    gpu,
    rccl_footprint,
)

Gpu: TypeAlias = GpuFacts | AmdGpuFacts
Comm: TypeAlias = CommFootprint | RcclFootprint

NO_CUPY = "CuPy is not installed"
_CUPY = "pip install cupy-cuda12x, or cupy-cuda13x for a jax with cuda13."


def gpu_of(kind: str) -> Gpu:
    """Returns the limits of a GPU, by a name of the occupancy model or of its driver.

    Raises:
        OccupancyError: the model does not know it.
    """
    return amd_gpu(kind) if is_amd_gpu(kind) else gpu(kind)


def has_kernels(facts: Gpu) -> TypeGuard[GpuFacts]:
    """Returns whether jshard's own kernels are in the grid of a GPU."""
    return not why_no_kernels(facts)


def why_no_kernels(facts: Gpu) -> str:
    """Returns why jshard's own kernels are not in the grid of a GPU; empty if they are."""
    generation = None
    if isinstance(facts, GpuFacts):
        generation = generation_of(facts.major)
    if generation is None:
        return f"they are written for the tensor cores of Hopper and Ampere GPUs, not for {facts.title}"
    return why_generation_unsupported(generation)


def collective(facts: Gpu, *, nccl: str | None, ctas: int) -> Comm:
    """Returns the blocks of the collective that the load is, or is like.

    Args:
        facts: of the GPU.
        nccl: version of NCCL; by default the one that is installed, or else the newest known.
        ctas: number of blocks.

    Raises:
        OccupancyError: there is no such collective, or RCCL runs on the GPU and a version of NCCL is given.
    """
    if isinstance(facts, AmdGpuFacts):
        if nccl is not None:
            raise OccupancyError(
                "The load has no version of NCCL.",
                where=f"--nccl {nccl}",
                why=f"RCCL runs the collectives of {facts.title}, and the load is RCCL itself.",
                do=f"python -m benchmarks.overlap --list --gpu {facts.name}",
            )
        return rccl_footprint("ring", gpu=facts, workgroups=ctas)
    return footprint("ring", gpu=facts, version=nccl or nccl_version(), ctas=ctas)


def collective_of(conditions: Mapping[str, Any]) -> Comm:
    """Returns the collective from the conditions of a record, as JSON has them."""
    fields = conditions["footprint"]
    if is_amd_gpu(conditions["device"]):
        return RcclFootprint(**{**fields, "workgroup": Workgroup(**fields["workgroup"])})
    return CommFootprint(**fields)


class LoadForm(enum.Enum):
    """How a load runs beside a product; the value says it in words."""

    NCCL = "NCCL; priority by XLA's option"
    RCCL = "RCCL; priority by XLA's option"
    CUPY = "a kernel like NCCL's, launched by CuPy"
    PALLAS = f"a Pallas kernel on another stream, at the same priority and not paced: {NO_CUPY}"
    NONE = "none: a load on one GPU of this kind cannot be had"


def load_form(facts: Gpu, *, num_devices: int, has_cupy: bool) -> LoadForm:
    """Returns how a load runs beside a product.

    Args:
        facts: of the GPU.
        num_devices: GPUs that are present.
        has_cupy: whether CuPy is installed, for CUDA.
    """
    if isinstance(facts, AmdGpuFacts):
        return LoadForm.RCCL if num_devices > 1 else LoadForm.NONE
    if num_devices > 1:
        return LoadForm.NCCL
    if has_cupy:
        return LoadForm.CUPY
    if facts.arch == "sm_90":  # for which the Pallas kernel is written
        return LoadForm.PALLAS
    return LoadForm.NONE


def no_load(facts: Gpu) -> RunError:
    """Returns the error for one GPU on which no load can run."""
    if isinstance(facts, AmdGpuFacts):
        return RunError(
            "There is no load for one AMD GPU.",
            where=f"a load on {facts.title}",
            why="what stands for a collective on one GPU is a kernel for NVIDIA's; on several AMD GPUs it is RCCL.",
            do="run it where JAX sees two GPUs or more, such as both dies of an MI250X.",
        )
    return RunError(
        f"{NO_CUPY}.",
        where=f"a load on {facts.title}",
        why="without it the load is a kernel for Hopper GPUs.",
        do=_CUPY,
    )


def no_placement() -> RunError:
    """Returns the error for a machine on which the placement of blocks cannot be seen."""
    return RunError(
        f"{NO_CUPY}.",
        where="placement",
        why="it launches kernels of its own, and records where their blocks run.",
        do=_CUPY,
    )
