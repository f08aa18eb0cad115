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

from jshard._compat import private_names

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
        # JAX finds the plugin's folder on disk, and imports it by this name: it gets the empty module.
        empty = types.ModuleType(f"jax_plugins.xla_{version}")
        empty.initialize = lambda: None  # type: ignore[attr-defined]  # called by jax for every plugin
        sys.modules[empty.__name__] = empty


def is_cuda_useless(environ: Mapping[str, str], *, devices: str = "/dev") -> bool:
    """Returns whether no NVIDIA GPU is visible, and the user has not asked for one by name."""
    platforms = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")}
    if platforms & {"cuda", "gpu"}:
        return False
    return not any(glob.glob(f"{devices}/{name}") for name in _NVIDIA)


def plugin_versions(cuda: str) -> tuple[str, str] | None:
    """Returns the versions of jaxlib and of its plugin for a CUDA version, which must be equal; None without both."""
    jaxlib = _version("jaxlib")
    plugin = _version(f"jax-{cuda}-plugin")
    if jaxlib is None or plugin is None:
        return None
    return jaxlib, plugin


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Returns the versions of packages, for records; None for one that is not installed."""
    return {package: _version(package) for package in packages}


@functools.cache  # it cannot change after the import, and a look-up takes as long as writing a small checkpoint
def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def jax_version() -> str:
    """Returns the version of jax, for measurements made with it."""
    return importlib.metadata.version("jax")


def launcher_cluster(environ: Mapping[str, str]) -> tuple[str, str, int, int] | None:
    """Returns what JAX itself detects of a cluster's launcher: name, coordinator, number of processes, id of this one.

    None without a launcher, with only one process, or if the private name is gone.
    """
    cluster_types = private_names.CLUSTER_TYPES.find()
    if cluster_types is None:
        return None
    with _environment(environ):
        for cluster in cluster_types:
            # As `jax.distributed.initialize` chooses: the first that is present, without those that a user has to name.
            if not cluster.opt_in_only_method and cluster.is_env_present():
                return _described_cluster(cluster, environ.get("JAX_COORDINATOR_PORT"))
    return None


def _described_cluster(cluster: private_names.Private, port: str | None) -> tuple[str, str, int, int] | None:
    num_processes = cluster.get_process_count()
    if num_processes < 2:
        return None
    address = cluster.get_coordinator_address(timeout_secs=60, override_coordinator_port=port)
    name = cluster.name or cluster.__name__.removesuffix("Cluster").lower()  # Kubernetes has no name
    return name, address, num_processes, cluster.get_process_id()


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Replaces the environment, which JAX's detection reads, by these variables inside the context."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def coordinator() -> private_names.Private:
    """Returns the client of the service that the processes of a run share; None if it was not started.

    Raises:
        UnsupportedVersionError: it is not where it was. Processes that cannot meet would wait, or differ, unnoticed.
    """
    return private_names.DISTRIBUTED_CLIENT.get()


def set_orbax_deadline(timeout_s: float) -> None:
    """Sets how long processes wait at Orbax's barriers: 300 s for most by default, without an option for it."""
    private_names.ORBAX_DEADLINE.replace(max(1, int(timeout_s)))


def orbax_operations(least: int = 0) -> int:
    """Returns the number of operations that Orbax has counted in this process, raised to a minimum.

    Its barriers are named by that number, which every process counts itself: after a failure in only some of the
    processes their numbers differ, and they would never meet again. If the private names are gone, it is 0, and
    nothing is raised.
    """
    counter = private_names.ORBAX_COUNTER
    count = private_names.ORBAX_COUNT.find()
    if count is None or not counter.exists():
        return 0
    # By Orbax's own function: the attribute only shows its counter, and setting it would have no effect.
    while counter.find() < least:
        count()
    return int(counter.find())


def before_threads_end(work: Callable[[], object]) -> None:
    """Calls a function when the program ends, while thread pools still accept work: `atexit` runs after they close."""
    # A private name of Python, which the pools themselves use; without it the work runs after they close.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(work)
