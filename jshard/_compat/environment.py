"""The process and its dependencies: installed versions, JAX's plugins for GPUs, and meetings and ends of processes.

Nothing here imports jax at its top, because a useless plugin must be hidden before.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  it closes the pools: callbacks registered after it run before it
import contextlib
import dataclasses
import functools
import glob
import importlib.metadata
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from jshard._compat import private_names


@dataclasses.dataclass(frozen=True)
class GpuPlugins:
    """JAX's plugins for the GPUs of one vendor.

    Attributes:
        platform: JAX's name of it.
        versions: of the vendor's software, each with a plugin of its own; the first installed one is used.
        device_files: patterns of the files that a machine with such a GPU has.
    """

    platform: str
    versions: tuple[str, ...]
    device_files: tuple[str, ...]

    def are_useless(self, environ: Mapping[str, str], *, devices: str = "/dev") -> bool:
        """Returns whether no such GPU is visible, and the user has not asked for one by name."""
        platforms = {name.strip() for name in environ.get("JAX_PLATFORMS", "").split(",")}
        if platforms & {self.platform, "gpu"}:
            return False
        return not any(glob.glob(f"{devices}/{pattern}") for pattern in self.device_files)

    def hide(self) -> None:
        """Keeps jax from loading them; call it before jax looks for plugins."""
        for version in self.versions:
            # Python's form of: no such module
            sys.modules[f"jax_{version}_plugin"] = None  # type: ignore[assignment]
            # JAX finds the plugin's folder on disk, and imports it by this name: it gets the empty module.
            empty = types.ModuleType(f"jax_plugins.xla_{version}")
            empty.initialize = lambda: None  # type: ignore[attr-defined]  # called by jax for every plugin
            sys.modules[empty.__name__] = empty


# The device files that JAX looks for, in any number; that of a Jetson; and that of WSL.
CUDA = GpuPlugins("cuda", versions=("cuda12", "cuda13"), device_files=("nvidia*", "nvhost*", "dxg"))
ROCM = GpuPlugins("rocm", versions=("rocm7", "rocm10"), device_files=("kfd", "dxg"))


def hide_useless_plugins() -> None:
    """Keeps jax from loading plugins for GPUs that are not here; call it before jax is imported.

    Without a GPU they only print. The libraries of CUDA's report at `import jax` that there is no driver, and its
    version check ends in a traceback; so does ROCm's start. JAX_PLATFORMS=cpu avoids neither the report nor the second
    traceback, and also switches off TPUs. A process that compiles for absent GPUs (`jshard.cluster.compile_process`)
    does not call this.
    """
    if "jax" in sys.modules:
        return
    for plugins in (CUDA, ROCM):
        if plugins.are_useless(os.environ):
            plugins.hide()


def rocm_library(version: str) -> Path | None:
    """Returns the file of JAX's ROCm plugin for a version of ROCm, such as "rocm7"; None if it is not installed."""
    try:
        distribution = importlib.metadata.distribution(f"jax-{version}-pjrt")
    except importlib.metadata.PackageNotFoundError:
        return None
    # Not by an import: where the plugin is hidden, the module is empty.
    return Path(str(distribution.locate_file(f"jax_plugins/xla_{version}/xla_rocm_plugin.so")))


def register_rocm(library: Path) -> None:
    """Registers JAX's ROCm plugin as a compiler: its own start refuses a machine without an AMD GPU.

    Raises:
        UnsupportedVersionError: a private name is not where it was.
    """
    if private_names.PLUGIN_IS_LOADED.get()(ROCM.platform):  # its own start succeeded, on a machine with such a GPU
        return
    private_names.REGISTER_PLUGIN.get()(ROCM.platform, library_path=str(library))


def plugin_versions(package: str) -> tuple[str, str] | None:
    """Returns the versions of jaxlib and of a plugin's package, which must be equal; None without both."""
    jaxlib = _version("jaxlib")
    plugin = _version(package)
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


_LIBTPU_OF_TENSOR = (0, 0, 50)


def libtpu_without_tensor() -> str | None:
    """Returns the version of the installed libtpu if it aborts on axes left to the compiler; None if it does not.

    Before 0.0.50 its partitioner aborts the process where some axes of a region are manual and others are not:
    "Check failed: target.IsManualSubgroup() == sharding().IsManualSubgroup()".
    """
    version = _version("libtpu")
    if version is None:  # none, or a nightly build, which is a package of another name
        return None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return version if numbers < _LIBTPU_OF_TENSOR else None


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
