"""What the figures were measured on: what must be the same for a run to be continued."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jshard.occupancy import CommFootprint, RcclFootprint

_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "jax-rocm10-plugin", *_NCCL,
    "nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cuda-nvcc-cu12", "cupy-cuda12x", "cupy-cuda13x", "jshard",
)  # fmt: skip
_VARIABLES = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_CTA_POLICY", "NCCL_NVLS_ENABLE", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
)  # fmt: skip
_ASKED = "driver_version,clocks.max.sm,power.limit"


def conditions(
    device: Any, comm: CommFootprint | RcclFootprint, *, load: str, link_gb_s: float, rounds: int, quick: bool
) -> dict[str, Any]:
    """Device, versions and settings of now."""
    units = getattr(device, "core_count", None)
    if isinstance(comm, RcclFootprint):
        card = {"compute units": units}
    else:
        card = {"SMs": units, "driver, highest SM clock, power limit": driver()}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        **card,
        "load": load,
        "footprint": dataclasses.asdict(comm),
        "link GB/s": link_gb_s,
        "rounds": rounds,
        "quick": quick,
        "environment": environment(os.environ),
        "versions": {"python": platform.python_version(), **_versions(_PACKAGES)},
    }


def driver() -> str:
    """What NVIDIA's driver says of itself and of the first GPU: version, highest SM clock, power limit."""
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "not known: nvidia-smi did not answer"
    return next(iter(said.splitlines()), "not known")


def environment(environ: Mapping[str, str]) -> str:
    """The variables that change collectives or the compiler, of `environ`; nothing that names folders or hosts."""
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_gpu") and "/" not in flag]
    found = [f"{name}={environ[name]}" for name in _VARIABLES if name in environ]
    return " ".join([*found, *flags]) or "default"


def nccl_version() -> str | None:
    """Of the NCCL that is installed for JAX, as 2.30.7; None if none is."""
    return next(iter(_versions(_NCCL).values()), None)


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
