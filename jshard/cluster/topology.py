"""Clusters you do not have: `h100:64x8` as devices that a program can be compiled for."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jshard import _compat
from jshard._parsing import shown, whole_number
from jshard._paths import expanded
from jshard.errors import MissingExtraError, RunError, ShardingError
from jshard.facts.device_files import SUFFIX, read_device
from jshard.facts.devices import CLOUDS, DEVICES, DeviceFacts, GpuTarget, Rate
from jshard.kernels.device import TracedDevice, planned_for

CUDNN = 9, 10
"""The cuDNN version assumed for a GPU that is not present."""

_MOST_DEVICES = 1_000_000  # all lists of devices are in memory

_HOPPER = 9  # compute capability
_CUDNN_ASSUMED = f"attention by cuDNN: version {'.'.join(map(str, CUDNN))} is assumed, as JAX's own check needs a GPU."


class TopologyError(ShardingError):
    """A topology that cannot be parsed or built."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster of one kind of device."""

    text: str  # as requested, e.g. "h100:64x8"
    device: DeviceFacts
    extents: tuple[int, ...]  # for GPUs: slices, hosts per slice and GPUs per host; for TPUs: those of the slice

    @property
    def num_devices(self) -> int:
        """The total number of devices."""
        return math.prod(self.extents)

    @property
    def fast_group(self) -> int:
        """The number of neighbouring devices joined by the fast links."""
        spans = self.device.dims or self.device.hosts_share_links
        return min(self.num_devices, self.device.fast_group if spans else self.extents[-1])

    def describe(self) -> str:
        """One line: the number and kind of devices, and their arrangement."""
        count = f"{self.num_devices} x {self.device.title}"
        if self.device.dims:
            return f"{count}, a slice of {'x'.join(map(str, self.extents))}"
        slices, hosts, each = self.extents
        of = f", {slices} slices of {hosts} hosts" if slices > 1 else f", {hosts} host{'s'[: hosts != 1]}"
        return f"{count}{of} with {each} each"


def parse_topology(text: str) -> Topology:
    """Reads `DEVICE:HOSTSxGPUS` or `DEVICE:SLICESxHOSTSxGPUS` for GPUs, `DEVICE:XxY` or `DEVICE:XxYxZ` for TPUs.

    Devices are those of `jshard.facts.devices.DEVICES`, machines of its `CLOUDS`, and those described by a file:
    `h20.toml:64x8`, see `jshard.facts.device_files`.

    Raises:
        TopologyError: it is not a topology, its device is unknown, or its extents do not fit the device.
        ShardingError: the file does not describe a device.

    Example:
        >>> parse_topology("h100:64x8").num_devices
        512
    """
    name, _, shape = text.strip().rpartition(":") if f"{SUFFIX}:" in text else text.strip().partition(":")
    device = read_device(expanded(name)) if name.endswith(SUFFIX) else DEVICES.get(name) or CLOUDS.get(name)
    if device is None:
        raise _unknown(text, name)
    parts = shape.split("x")
    wanted = (2, 3) if device.platform == "gpu" else (device.dims,)
    try:
        extents = tuple(map(whole_number, parts))
    except ValueError as error:
        raise _unreadable(text, device, shape) from error
    if len(extents) not in wanted or min(extents) < 1:
        raise _unreadable(text, device, shape)
    if math.prod(extents) > _MOST_DEVICES:
        raise TopologyError(
            "The topology has too many devices.",
            where=f"--topology {text}",
            why=f"it has {math.prod(extents):,}; the most that can be planned for are {_MOST_DEVICES:,}.",
            do=f"--topology {_example(device)}",
        )
    if device.platform == "gpu":
        extents = (1,) * (3 - len(extents)) + extents
        if extents[-1] > device.fast_group:
            raise _unreadable(text, device, shape)
    return Topology(text.strip(), device, extents)


def topology_devices(topology: Topology) -> Sequence[Any]:
    """The devices of a cluster you do not have, as a mesh to compile for.

    Only in a separate process: JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1 must be set before jax is imported, or the
    look-up of devices contacts real ones.

    Raises:
        MissingExtraError: its compiler is not installed.
        TopologyError: its compiler refuses the shape.
    """
    require_compiler(topology.device.platform)
    target = topology.device.target
    if target is not None:  # a GPU
        slices, hosts, each = topology.extents
        if not topology.device.hosts_share_links:  # since 0.12, XLA assumes NVLink between the hosts of a slice
            slices, hosts = slices * hosts, 1
        shape = f"{slices}x{hosts}x{each}"
        return _described("cuda", topology, target_config=target_config_text(target), topology=shape)
    # Another jshard process may hold libtpu's lock; this one does not use a TPU.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return _described("tpu", topology, topology_name=topology.text)


@contextlib.contextmanager
def traced_for_device(device: DeviceFacts | None) -> Iterator[Callable[[], tuple[str, ...]]]:
    """A context in which tracing targets such an absent device; yields the assumptions of that as text.

    cuDNN attention is such an assumption: JAX checks for the library and a GPU while tracing. Without a device, tracing
    targets the present devices, and only the check for cuDNN is answered.
    """
    target = device and device.target
    if device is not None and target is None:
        with planned_for(TracedDevice("tpu", device.title)):
            yield tuple
        return
    if device is None and jax.default_backend() == "gpu":
        yield tuple
        return
    with contextlib.ExitStack() as stack:
        capability = _HOPPER if target is None else target.major
        is_asked = stack.enter_context(_compat.cudnn_assumed(CUDNN, (capability, 0)))
        if target is not None:
            here = TracedDevice("gpu", target.description, target.core_count, capability=capability)
            stack.enter_context(planned_for(here))
        yield lambda: (_CUDNN_ASSUMED,) if is_asked() else ()


def require_compiler(platform: str, *, where: str = "jshard plan --topology") -> None:
    """Checks that the compiler of a platform is installed, without loading it.

    Raises:
        MissingExtraError: it is not installed, or not in jaxlib's version.
    """
    problem = None
    if platform == "gpu":
        problem = _gpu_problem()
    elif importlib.util.find_spec("libtpu") is None:
        problem = "it needs libtpu, but no TPU.", "pip install 'jshard[plan-tpu]'"
    if problem:
        why, do = problem
        raise MissingExtraError(f"The {platform.upper()} compiler is not installed.", where=where, why=why, do=do)


def _gpu_problem() -> tuple[str, str] | None:
    """Why there is no GPU compiler, and what to install; None if there is one."""
    for cuda in _compat.CUDA_VERSIONS:  # the first installed one is used
        found = _compat.plugin_versions(cuda)
        if found is None:
            continue
        jaxlib, plugin = found
        if plugin != jaxlib:
            exact = f"jax-{cuda}-plugin=={jaxlib} jax-{cuda}-pjrt=={jaxlib}"
            return f"jax-{cuda}-plugin has version {plugin}, jaxlib {jaxlib}.", f"pip install {exact}"
        if not _ptxas():
            return "ptxas, CUDA's assembler, is missing.", "pip install nvidia-cuda-nvcc-cu12"
        return None
    return (
        "it needs jax[cuda12-local] and nvidia-cuda-nvcc-cu12, but no GPU, driver or CUDA.",
        "pip install 'jshard[plan-gpu]'",
    )


def _ptxas() -> bool:
    """Whether XLA finds an assembler: in the wheel, on the path, or in CUDA's usual folder."""
    wheels = (Path(folder) for folder in sys.path if folder)
    found = (wheel / "nvidia" / part / "bin" / "ptxas" for wheel in wheels for part in ("cuda_nvcc", "cu13"))
    return bool(shutil.which("ptxas")) or Path("/usr/local/cuda/bin/ptxas").exists() or any(p.exists() for p in found)


def _described(platform: str, asked: Topology, **description: str) -> Sequence[Any]:
    try:
        devices: Sequence[Any] = topologies.get_topology_desc(platform=platform, **description).devices
    except Exception as error:
        raise TopologyError(
            "The compiler refuses the topology.",
            where=asked.text,
            why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            do=f"use an available shape, such as {_example(asked.device)}.",
        ) from error
    if len(devices) != asked.num_devices:
        raise RunError(
            "The compiler has another number of devices.",
            where=asked.text,
            why=f"{asked.num_devices} were requested, it has {len(devices)}.",
            do="report this with your versions of jax and jaxlib.",
        )
    return devices


def _unknown(text: str, name: str) -> TopologyError:
    near = [known for known in DEVICES if name and (known.startswith(name) or name.startswith(known))]
    near = near or difflib.get_close_matches(name, DEVICES, n=1) or ["h100"]
    return TopologyError(
        f"There is no device {name!r}.",
        where=f"--topology {text}",
        why=f"the devices are {', '.join(DEVICES)}; with their own adapters {', '.join(CLOUDS)}; and files, *{SUFFIX}.",
        do="  # or ".join(f"--topology {_example(DEVICES[known])}" for known in near),
    )


def _unreadable(text: str, device: DeviceFacts, shape: str) -> TopologyError:
    form = f"HOSTSxGPUS or SLICESxHOSTSxGPUS, with at most {device.fast_group} GPUs in a host"
    if device.dims:
        form = f"{'XxYxZ'[: 2 * device.dims - 1]}, the extents of a slice"
    return TopologyError(
        "The topology cannot be read.",
        where=f"--topology {text}",
        why=f"{device.name}: must be followed by {form}, integers from 1, not {shown(shape) if shape else 'nothing'}.",
        do=f"--topology {_example(device)}",
    )


def _example(device: DeviceFacts) -> str:
    shape = {0: "64x8", 2: "16x16", 3: "8x8x8"}[device.dims]
    return f"{device.name}:{'128x4' if device.name == 'gb200' else shape}"


# The description of an absent GPU for XLA's GPU compiler (a `GpuTargetConfigProto`), made from facts.

# In a run, XLA schedules for the memory of JAX's allocator; here, without one, for 80 % of the described memory
# (GetSchedulerMemoryLimit). The described memory makes it schedule as with XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
_ALLOCATED, _UNSTATED = 0.95, 0.80

_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {described}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  cuda_compute_capability {{
    major: {major}
{feature}  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.0{extension}"
  device_address_bits: 64
  pcie_bandwidth: {pcie_bandwidth}
  ecc_enabled: true
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{dnn[0]}.{dnn[1]}.0"
{units}}}
platform_name: "CUDA"
dnn_version_info {{
  major: {dnn[0]}
  minor: {dnn[1]}
  patch: 0
}}
runtime_version {{
  major: 12
  minor: 9
  patch: 0
}}
device_description_str: "{description}"
"""


def target_config_text(target: GpuTarget) -> str:
    """The text proto of a GPU, for `topologies.get_topology_desc(target_config=...)`."""
    is_hopper = target.major >= 9
    units = ""
    if target.rates is not None:
        units += _units("scalar", target.rates.scalar) + _units("matrix", target.rates.matrix)
    if target.links:
        units += f"  device_interconnect_info {{\n    active_links: {target.links}\n  }}\n"
    return _TEXT.format(
        **vars(target),
        described=round(target.device_memory_size * _ALLOCATED / _UNSTATED),
        feature="    feature_extension: ACCELERATED_FEATURES\n" if is_hopper else "",
        extension="a" if is_hopper else "",
        units=units,
        dnn=CUDNN,
    )


def _units(kind: str, found: Mapping[int, Rate]) -> str:
    lines = [f"  {kind}_unit_description {{"]
    for dtype, rate in found.items():
        fields = [f"        {name}: {value}" for name, value in vars(rate).items()]
        lines += ["    rate_infos {", f"      key: {dtype}", "      value {", *fields, "      }", "    }"]
    return "\n".join([*lines, "  }", ""])
