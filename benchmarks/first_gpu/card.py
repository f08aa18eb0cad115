"""The card: what it is, and the versions of its driver and of the libraries."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

import jax

from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.overlap.machine import driver
from benchmarks.tables import markdown_table

_PACKAGES = ("jax", "jaxlib", "flax", "jshard", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "jax-rocm10-plugin")
_DRIVERS = ("nvidia", "amdgpu")  # modules of the kernel


def measure(work: Work) -> None:
    """Describes the first device, and runs something on it."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    work.keep(
        kind=device.device_kind,
        platform=device.platform,
        driver=_driver() if device.platform == "gpu" else "",
        runtime=" ".join(device.client.platform_version.split()),
        capability=getattr(device, "compute_capability", None),
        multiprocessors=getattr(device, "core_count", None),
        memory_bytes=stats.get("bytes_limit"),
        versions=_versions(),
    )
    total = float(jax.jit(lambda x: x @ x)(jax.numpy.ones((128, 128))).sum())
    work.keep(is_right=total == 128.0**3)


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    if "kind" not in figures:
        return []
    memory_bytes = figures["memory_bytes"]
    memory = f"{memory_bytes / 2**30:.1f} GiB that JAX may take" if memory_bytes else ""
    facts = {
        "card": figures["kind"],
        "driver": figures["driver"],
        "runtime": figures["runtime"],
        "compute capability": figures["capability"],
        "multiprocessors": figures["multiprocessors"],
        "memory": memory,
        "versions": ", ".join(f"{name} {version}" for name, version in figures["versions"].items()),
        "a first product": "right" if figures.get("is_right") else "**not right, or not computed**",
    }
    return markdown_table(["", ""], [[name, str(fact)] for name, fact in facts.items() if fact], num_words=2)


def _driver() -> str:
    """Returns what NVIDIA's tool says, or else the version of the kernel's module."""
    said = driver()
    if not said.startswith("not known"):
        return said
    for module in _DRIVERS:
        with contextlib.suppress(OSError):
            return f"{module} {Path(f'/sys/module/{module}/version').read_text().strip()}"
    return "not known"


def _versions() -> dict[str, str]:
    versions = {}
    for package in (*_PACKAGES, *_PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
