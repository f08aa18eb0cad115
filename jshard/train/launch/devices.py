"""Which of a machine's GPUs each of several local processes takes."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from jshard._errors import ShardingError

_GPUS = Path("/proc/driver/nvidia/gpus")


def local_device_ids(num_processes: int, environ: Mapping[str, str] = os.environ) -> list[str | None]:
    """The value of JAX_LOCAL_DEVICE_IDS for each process: equal shares of the GPUs; None on a CPU.

    Two processes on one GPU cannot talk through NCCL, and each process takes all that it sees. JAX is not asked:
    a supervisor that did would hold the devices itself.

    Raises:
        ShardingError: the GPUs cannot be shared out.
    """
    number = _num_gpus(environ)
    if number == 0:
        return [None] * num_processes
    if number % num_processes:
        raise ShardingError(
            "The GPUs cannot be shared out.",
            where=f"--processes {num_processes}",
            why=f"{number} GPUs are visible; each process takes as many as the others, and one GPU is not shared.",
            do=f"a number of processes that divides {number}, or on the CPU: "
            f"JAX_PLATFORMS=cpu jshard train ... --processes {num_processes}",
        )
    share = number // num_processes
    return [",".join(str(share * process + i) for i in range(share)) for process in range(num_processes)]


def _num_gpus(environ: Mapping[str, str]) -> int:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return 0
    if not _has_cuda_plugin():
        return 0
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")])
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def _has_cuda_plugin() -> bool:
    try:
        plugins = import_module("jax_plugins")
    except ImportError:
        return False
    return any(name.startswith("xla_cuda") for _, name, _ in pkgutil.iter_modules(plugins.__path__))
