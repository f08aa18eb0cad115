"""The GPUs of each of several processes on a machine.

JAX is not used here: a supervisor that did would hold the devices itself, and its workers would find them busy.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from jshard.errors import ShardingError
from jshard.launch.cluster import Cluster

_GPUS = Path("/proc/driver/nvidia/gpus")


def device_ids_of(place: Cluster, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns JAX_LOCAL_DEVICE_IDS of a process: its share of the machine's GPUs.

    Empty if it is set, if the process is alone on its machine, or if its launcher shows it a single GPU. If a launcher
    does not give the number of processes that share the GPUs, JAX's own rule: the GPU with the process's number. Two
    processes on one GPU cannot use NCCL.

    Args:
        place: that of the process.
        environ: the environment variables of its supervisor, which the process inherits.

    Raises:
        ShardingError: the GPUs cannot be divided among processes that are all started here.
    """
    num_gpus = _num_gpus(environ)
    size = place.local_size
    if place.kind == "local":
        if size and num_gpus % size:
            raise ShardingError(
                "The GPUs cannot be divided among the processes.",
                where=f"--processes {size}",
                why=f"{num_gpus} GPUs are visible; every process takes the same number, and no GPU is shared.",
                do=f"a number of processes that divides {num_gpus}, or on the CPU: "
                f"JAX_PLATFORMS=cpu jshard train ... --processes {size}",
            )
        # JAX_LOCAL_DEVICE_IDS does not decide here: all processes would inherit the same GPUs.
        is_decided = num_gpus == 0
    else:
        # Of a single one the launcher has decided: it shows each process its own.
        is_decided = num_gpus == 1 or bool(environ.get("JAX_LOCAL_DEVICE_IDS"))
    if place.local_id is None or size == 1 or is_decided:
        return {}
    ids = _share(num_gpus, place.local_id, size)
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(str(gpu) for gpu in ids)}


def _share(num_gpus: int, local_id: int, size: int | None) -> range:
    """Returns the GPUs of a process: an equal share, or the one with its number.

    Args:
        num_gpus: the GPUs of the machine.
        local_id: the number of the process on it.
        size: the number of processes on it; None if the launcher does not say it.
    """
    # Without a number of processes this is one GPU each; 1 avoids a division by no GPUs.
    per_process, rest = divmod(num_gpus, size or num_gpus or 1)
    if rest or per_process == 0:  # they cannot be divided evenly: JAX's own rule
        return range(local_id, local_id + 1)
    return range(per_process * local_id, per_process * (local_id + 1))


def _num_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that a process with these variables sees."""
    platforms = environ.get("JAX_PLATFORMS", "")
    # There may be GPUs that JAX was asked to leave alone, or cannot use.
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return 0
    if not _has_cuda_plugin():
        return 0
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = environ["CUDA_VISIBLE_DEVICES"].split(",")
        return len([name for name in names if name.strip() not in ("", "-1")])
    if not _GPUS.is_dir():
        return 0
    return len(list(_GPUS.iterdir()))


def _has_cuda_plugin() -> bool:
    try:
        plugins = import_module("jax_plugins")
    except ImportError:
        return False
    return any(name.startswith("xla_cuda") for _, name, _ in pkgutil.iter_modules(plugins.__path__))
