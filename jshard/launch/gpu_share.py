"""The GPUs of each of several processes on a machine: how many a process would see, and which are its own.

JAX is not used here: a supervisor that did would hold the devices itself, and its workers would find them busy.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from jshard.errors import ShardingError
from jshard.launch.cluster import Cluster

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # a folder for each processor of the machine, CPUs among them


def device_ids_of(place: Cluster, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns JAX_LOCAL_DEVICE_IDS of a process: its share of the machine's GPUs.

    Empty if it is set, if the process is alone on its machine, or if its launcher shows it a single GPU. If a launcher
    does not give the number of processes that share the GPUs, JAX's own rule: the GPU with the process's number. Two
    processes on one GPU cannot use NCCL or RCCL.

    Args:
        place: that of the process.
        environ: the environment variables of its supervisor, which the process inherits.

    Raises:
        ShardingError: the GPUs cannot be divided among processes that are all started here.
    """
    num_gpus = num_visible_gpus(environ)
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


# ---- the GPUs that a process sees


@dataclasses.dataclass(frozen=True)
class Vendor:
    """GPUs of one vendor.

    Attributes:
        platform: JAX's name of them.
        plugin: the start of the name of JAX's module for them.
        count: returns the number of those that a process with these variables sees.
    """

    platform: str
    plugin: str
    count: Callable[[Mapping[str, str]], int]

    def num_visible(self, environ: Mapping[str, str]) -> int:
        """Returns how many JAX would use; 0 without JAX's plugin for them, or if JAX was asked to use others."""
        platforms = environ.get("JAX_PLATFORMS", "")
        if platforms and self.platform not in platforms and "gpu" not in platforms:
            return 0
        if not has_plugin(self.plugin):
            return 0
        return self.count(environ)


def num_visible_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that a process with these variables sees, all of one vendor."""
    vendors = (NVIDIA, AMD)
    if not _NVIDIA_GPUS.is_dir():
        # HIP reads CUDA_VISIBLE_DEVICES, too: the variable alone does not say that there is an NVIDIA GPU.
        vendors = (AMD, NVIDIA)
    for vendor in vendors:
        num_gpus = vendor.num_visible(environ)
        if num_gpus:
            return num_gpus
    return 0


def num_nvidia_gpus(environ: Mapping[str, str], *, gpus: Path = _NVIDIA_GPUS) -> int:
    """Returns the number of NVIDIA GPUs that a process sees.

    Args:
        environ: its environment variables.
        gpus: the driver's folder, with one for each GPU of the machine.
    """
    listed = _listed(environ, "CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return listed
    if not gpus.is_dir():
        return 0
    return len(list(gpus.iterdir()))


def num_amd_gpus(environ: Mapping[str, str], *, nodes: Path = _AMD_NODES) -> int:
    """Returns the number of AMD GPUs that a process sees; the two dies of an MI250X are two.

    ROCm's runtime chooses first, by ROCR_VISIBLE_DEVICES. HIP chooses from these, by HIP_VISIBLE_DEVICES or else
    CUDA_VISIBLE_DEVICES. (rocm.docs.amd.com, GPU isolation techniques.)

    Args:
        environ: its environment variables.
        nodes: the driver's folder, with one for each processor of the machine.
    """
    num_gpus = _num_amd_gpus_of_machine(nodes)
    of_runtime = _listed(environ, "ROCR_VISIBLE_DEVICES")
    of_hip = _listed(environ, "HIP_VISIBLE_DEVICES")
    if of_hip is None:
        of_hip = _listed(environ, "CUDA_VISIBLE_DEVICES")
    for listed in (of_runtime, of_hip):
        if listed is not None:
            num_gpus = min(num_gpus, listed)
    return num_gpus


def _num_amd_gpus_of_machine(nodes: Path) -> int:
    num_gpus = 0
    for gpu_id in nodes.glob("*/gpu_id"):
        try:
            text = gpu_id.read_text()
        except OSError:  # a GPU that the container of this process may not use
            continue
        if text.strip() not in ("", "0"):  # a CPU has 0
            num_gpus += 1
    return num_gpus


def _listed(environ: Mapping[str, str], variable: str) -> int | None:
    """Returns the number of devices that a variable lists; None if it is not set."""
    if variable not in environ:
        return None
    names = environ[variable].split(",")
    return len([name for name in names if name.strip() not in ("", "-1")])


def has_plugin(name: str) -> bool:
    """Returns whether JAX has a plugin whose module starts with this name."""
    try:
        plugins = import_module("jax_plugins")
    except ImportError:
        return False
    return any(module.startswith(name) for _, module, _ in pkgutil.iter_modules(plugins.__path__))


NVIDIA = Vendor("cuda", plugin="xla_cuda", count=num_nvidia_gpus)
AMD = Vendor("rocm", plugin="xla_rocm", count=num_amd_gpus)
