"""Processes that find each other, wait for each other, and end."""

import atexit
import concurrent.futures.thread  # noqa: F401  it closes the pools: what is noted after it is called before it
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def launcher_cluster(environ: Mapping[str, str]) -> tuple[str, str, int, int] | None:
    """What JAX's own detection of cluster launchers finds: name, coordinator, number of processes, id of this one.

    None where there is no launcher, or only one process, or where the private module has changed.
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
        name = kind.name or kind.__name__.removesuffix("Cluster").lower()  # that of Kubernetes has none
        return name, coordinator, kind.get_process_count(), kind.get_process_id()


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Inside, these are the environment variables: JAX's detection reads no others."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def coordinator() -> Any:
    """The client of the service that the processes of a run share: keys, values and waits with a time limit.

    None in a single process, or where the private module has changed. `jax.distributed` has no public name for it.
    """
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError):
        return None


def set_orbax_deadline(timeout_s: float) -> None:
    """How long processes wait for each other at Orbax's barriers: 300 s for most, and there is no option for it.

    Where the private name is gone, this does nothing.
    """
    with contextlib.suppress(ImportError):
        from orbax.checkpoint.experimental.v1._src.synchronization import multihost

        multihost._DEFAULT_BARRIER_TIMEOUT = max(1, int(timeout_s))


def orbax_operations(least: int = 0) -> int:
    """How many operations Orbax has counted in this process, once it has counted at least some number of them.

    Its barriers are called by that number, which every process counts for itself: after one that failed in some
    process alone, no two would meet again. Where the private name is gone, this does nothing.
    """
    try:
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator as generator

        while generator._operation_id < least:
            generator.next_operation_id()
        return int(generator._operation_id)
    except (ImportError, AttributeError):
        return 0


def before_threads_end(work: Callable[[], object]) -> None:
    """Calls something when the program ends, while thread pools still take work.

    `atexit` comes after they have closed. Where the private name is gone, it has to do.
    """
    getattr(threading, "_register_atexit", atexit.register)(work)
