"""What is installed: the versions of packages, and JAX's CUDA plugin, which is also the compiler of `jshard plan`.

Nothing here imports jax: a useless plugin has to be hidden before.
"""

import contextlib
import functools
import glob
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

CUDA_VERSIONS = ("cuda12", "cuda13")  # for which JAX has a plugin

# Those that JAX looks for, in any number; a Jetson's; and WSL's.
_NVIDIA = ("nvidia*", "nvhost*", "dxg")


def hide_useless_cuda() -> None:
    """Keeps jax from loading its CUDA plugin where it can be of no use; to be called before jax is imported.

    There the plugin only prints: libraries of it say at `import jax` that there is no driver, and its check of the
    versions ends in a traceback. JAX_PLATFORMS=cpu leaves the first, and switches off TPUs, too. A process that
    compiles for GPUs that are not there (`jshard.cluster.compile_process`) does not call this.
    """
    if "jax" in sys.modules or not is_cuda_useless(os.environ):
        return
    for version in CUDA_VERSIONS:
        sys.modules[f"jax_{version}_plugin"] = None  # type: ignore[assignment]  # as Python has it: no such module
        empty = types.ModuleType(f"jax_plugins.xla_{version}")
        empty.initialize = lambda: None  # type: ignore[attr-defined]  # what jax calls of every plugin
        sys.modules[empty.__name__] = empty


def is_cuda_useless(environ: Mapping[str, str], *, devices: str = "/dev") -> bool:
    """Whether no NVIDIA GPU is visible, and the user has not asked for one by name.

    Args:
        environ: the environment variables.
        devices: the folder of devices.
    """
    asked = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")}
    return not asked & {"cuda", "gpu"} and not any(glob.glob(f"{devices}/{name}") for name in _NVIDIA)


def plugin_versions(cuda: str) -> tuple[str, str] | None:
    """The versions of jaxlib and of its plugin for a CUDA version, such as "cuda12": a compiler needs them equal.

    None where that plugin is not installed.
    """
    found = versions(("jaxlib", f"jax-{cuda}-plugin"))
    jaxlib, plugin = found.values()
    return None if jaxlib is None or plugin is None else (jaxlib, plugin)


def versions(packages: Iterable[str]) -> dict[str, Any]:
    """The versions of some packages, for what they write; None for one that is not installed."""
    return {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def jax_version() -> str:
    """The version of jax, for what was measured under it."""
    return importlib.metadata.version("jax")
