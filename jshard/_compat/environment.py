"""The process and its dependencies: installed versions, JAX's CUDA plugin, and meetings and ends of processes.

Nothing here imports jax at its top, because a useless plugin must be hidden before.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  it closes the pools: callbacks registered after it run before it
import contextlib
import functools
import glob
import importlib.metadata
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

CUDA_VERSIONS = ("cuda12", "cuda13")  # with a plugin of JAX

# The device files that JAX looks for, in any number; that of a Jetson; and that of WSL.
_NVIDIA = ("nvidia*", "nvhost*", "dxg")


def hide_useless_cuda() -> None:
    """Keeps jax from loading its CUDA plugin if it is useless; call it before jax is imported.

    Without a GPU the plugin only prints: its libraries report at `import jax` that there is no driver, and its version
    check ends in a traceback. JAX_PLATFORMS=cpu does not avoid the first, and also switches off TPUs. A process that
    compiles for absent GPUs (`jshard.cluster.compile_process`) does not call this.
    """
    if "jax" in sys.modules or not is_cuda_useless(os.environ):
        return
    for version in CUDA_VERSIONS:
        sys.modules[f"jax_{version}_plugin"] = None  # type: ignore[assignment]  # Python's form of: no such module
        empty = types.ModuleType(f"jax_plugins.xla_{version}")
        empty.initialize = lambda: None  # type: ignore[attr-defined]  # called by jax for every plugin
        sys.modules[empty.__name__] = empty


def is_cuda_useless(environ: Mapping[str, str], *, devices: str = "/dev") -> bool:
    """Whether no NVIDIA GPU is visible, and the user has not asked for one by name."""
    asked = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")}
    return not asked & {"cuda", "gpu"} and not any(glob.glob(f"{devices}/{name}") for name in _NVIDIA)


def plugin_versions(cuda: str) -> tuple[str, str] | None:
    """The versions of jaxlib and of its plugin for a CUDA version, which must be equal; None without the plugin."""
    found = versions(("jaxlib", f"jax-{cuda}-plugin"))
    jaxlib, plugin = found.values()
    return None if jaxlib is None or plugin is None else (jaxlib, plugin)


def versions(packages: Iterable[str]) -> dict[str, Any]:
    """The versions of some packages, for records; None for one that is not installed."""
    return {package: _version(package) for package in packages}


@functools.cache  # it cannot change after the import, and a look-up takes as long as writing a small checkpoint
def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def jax_version() -> str:
    """The version of jax, for measurements made with it."""
    return importlib.metadata.version("jax")


def launcher_cluster(environ: Mapping[str, str]) -> tuple[str, str, int, int] | None:
    """The result of JAX's own detection of cluster launchers: name, coordinator, number of processes, id of this one.

    None without a launcher, with only one process, or if the private module has changed.
    """
    try:
        from jax._src.clusters import ClusterEnv

        kinds = ClusterEnv._cluster_types
    except (ImportError, AttributeError):
        return None
    with _environment(environ):
        kind = next((kind for kind in kinds if not kind.opt_in_only_method and kind.is_env_present()), None)
        if kind is None or kind.get_process_count() < 2:
            return None
        port = environ.get("JAX_COORDINATOR_PORT")
        coordinator = kind.get_coordinator_address(timeout_secs=60, override_coordinator_port=port)
        name = kind.name or kind.__name__.removesuffix("Cluster").lower()  # Kubernetes has no name
        return name, coordinator, kind.get_process_count(), kind.get_process_id()


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Inside this context, the environment has only these variables, which JAX's detection then reads."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def coordinator() -> Any:
    """The client of the service shared by the processes of a run; None in a single one. It has no public name."""
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError):
        return None


def set_orbax_deadline(timeout_s: float) -> None:
    """Sets how long processes wait at Orbax's barriers: 300 s for most by default, without an option for it."""
    with contextlib.suppress(ImportError):
        from orbax.checkpoint.experimental.v1._src.synchronization import multihost

        multihost._DEFAULT_BARRIER_TIMEOUT = max(1, int(timeout_s))


def orbax_operations(least: int = 0) -> int:
    """The number of operations that Orbax has counted in this process, raised to a minimum.

    Its barriers are named by that number, which every process counts itself: after a failure in only some of the
    processes, they would never meet again. If the private name is gone, this does nothing.
    """
    try:
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator as generator

        while generator._operation_id < least:
            generator.next_operation_id()
        return int(generator._operation_id)
    except (ImportError, AttributeError):
        return 0


def before_threads_end(work: Callable[[], object]) -> None:
    """Calls a function when the program ends, while thread pools still accept work: `atexit` runs after they close."""
    getattr(threading, "_register_atexit", atexit.register)(work)
