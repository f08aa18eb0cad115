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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jshard import _compat
from jshard._parsing import shown, whole_number
from jshard._paths import expanded
from jshard.cluster.elf import ElfError
from jshard.cluster.rocm_stubs import load_stubs
from jshard.cluster.target_config import CUDNN, target_config_text
from jshard.errors import MissingExtraError, RunError, ShardingError
from jshard.facts.device_files import SUFFIX, read_device
from jshard.facts.devices import CLOUDS, DEVICES, DeviceFacts
from jshard.facts.gpu_target import HOPPER, NvidiaTarget
from jshard.kernels.device import TracedDevice, planned_for

_CHIPS_PER_HOST = 4  # of TPUs
_GPUS_OF_SHARED = 4  # of a host whose links extend beyond it
_MOST_DEVICES = 1_000_000  # all lists of devices are in memory

_CUDNN_ASSUMED = f"attention by cuDNN: version {'.'.join(map(str, CUDNN))} is assumed, as JAX's own check needs a GPU."


class TopologyError(ShardingError):
    """A topology that cannot be parsed or built."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster of one kind of device."""

    text: str  # as requested, e.g. "h100:64x8"
    device: DeviceFacts
    # Slices first. For GPUs: hosts per slice and GPUs per host. For TPUs: the chips of a slice along its dimensions.
    extents: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Returns the total number of devices."""
        return math.prod(self.extents) * self.device.devices_per_chip

    @property
    def num_slices(self) -> int:
        """Returns the number of slices."""
        return self.extents[0]

    @property
    def fast_group(self) -> int:
        """Returns the number of neighbouring devices joined by the fast links."""
        if self.device.platform == "tpu":  # between slices is only the network
            return min(self.num_devices // self.num_slices, self.device.fast_group)
        if self.device.hosts_share_links:
            return min(self.num_devices, self.device.fast_group)
        gpus_per_host = self.extents[-1]
        return min(self.num_devices, gpus_per_host)

    @property
    def num_hosts(self) -> int:
        """Returns the number of hosts; a TPU host has four chips."""
        if self.device.platform == "tpu":
            return max(1, math.prod(self.extents) // _CHIPS_PER_HOST)
        return math.prod(self.extents[:-1])

    def with_extents(self, extents: tuple[int, ...]) -> Topology:
        """Returns a cluster of the same device with other extents, as `extents` has them."""
        name, _, _ = self.text.rpartition(":")
        shown = extents if extents[0] > 1 else extents[1:]  # of a single slice, the number of slices is left out
        return Topology(f"{name}:{'x'.join(map(str, shown))}", self.device, extents)

    @property
    def torus(self) -> str:
        """Returns the chips of a TPU slice along its dimensions, as text."""
        return "x".join(map(str, self.extents[1:]))

    def describe(self) -> str:
        """Returns one line: the number and kind of devices, and their arrangement."""
        count = f"{self.num_devices} x {self.device.title}"
        if self.device.platform == "tpu":
            noun = "a slice" if self.num_slices == 1 else f"{self.num_slices} slices"
            chips = " chips" if self.device.devices_per_chip > 1 else ""
            return f"{count}, {noun} of {self.torus}{chips}"
        slices, hosts, gpus = self.extents
        if slices > 1:
            arrangement = f"{slices} slices of {hosts} hosts"
        elif hosts == 1:
            arrangement = "1 host"
        else:
            arrangement = f"{hosts} hosts"
        return f"{count}, {arrangement} with {gpus} each"


# ---- topologies as text


def parse_topology(text: str) -> Topology:
    """Reads `DEVICE:HOSTSxGPUS` or `DEVICE:SLICESxHOSTSxGPUS` for GPUs, `DEVICE:XxY` or `DEVICE:XxYxZ` for TPUs.

    Several slices of TPUs are `DEVICE:SLICESxXxY` or `DEVICE:SLICESxXxYxZ`.

    Devices are those of `jshard.facts.devices.DEVICES`, machines of its `CLOUDS`, and those described by a file:
    `h20.toml:64x8`, see `jshard.facts.device_files`.

    Raises:
        TopologyError: it is not a topology, its device is unknown, or its extents do not fit the device.
        ShardingError: the file does not describe a device.

    Examples:
        >>> parse_topology("h100:64x8").num_devices
        512
    """
    text_of_topology = text.strip()
    if f"{SUFFIX}:" in text:  # the path of a file may have colons
        name, _, shape = text_of_topology.rpartition(":")
    else:
        name, _, shape = text_of_topology.partition(":")
    device = _device(name)
    if device is None:
        raise _unknown(text, name)
    topology = Topology(text_of_topology, device, _parsed_extents(text, device, shape))
    if topology.num_devices > _MOST_DEVICES:
        raise TopologyError(
            "The topology has too many devices.",
            where=f"--topology {text}",
            why=f"it has {topology.num_devices:,}; the most that can be planned for are {_MOST_DEVICES:,}.",
            do=f"--topology {_example(device)}",
        )
    if device.platform == "gpu":
        gpus_per_host = topology.extents[-1]
        if gpus_per_host > device.fast_group:
            raise _unreadable(text, device, shape)
    return topology


def whole_hosts(count: int, name: str) -> Topology:
    """Returns a cluster of so many GPUs, in hosts of the usual size.

    Args:
        count: of GPUs.
        name: of the device, as in a topology.

    Raises:
        TopologyError: the device is unknown, or a TPU, or they are not whole hosts.
    """
    text = f"{count}x{name}"
    device = _device(name)
    if device is None:
        raise _unknown(text, name)
    if device.platform == "tpu":
        why = "TPU chips may be slices of several shapes."
        raise _no_hosts(text, why, f"--topology {_example(device)}")
    per_host = _GPUS_OF_SHARED if device.hosts_share_links else device.fast_group
    per_host = min(per_host, max(count, 1))
    if not count or count % per_host:
        hosts, rest = divmod(count, per_host)
        why = f"{device.name} has hosts of {per_host}, and {count} = {hosts} x {per_host} + {rest}."
        raise _no_hosts(text, why, f"--topology {name}:{hosts + 1}x{per_host}")
    return parse_topology(f"{name}:{count // per_host}x{per_host}")


def _no_hosts(text: str, why: str, do: str) -> TopologyError:
    return TopologyError("The devices are not whole hosts.", where=text, why=why, do=do)


def _device(name: str) -> DeviceFacts | None:
    """Returns a device of the table or of a file; None for an unknown name."""
    if name.endswith(SUFFIX):
        return read_device(expanded(name))
    return DEVICES.get(name) or CLOUDS.get(name)


def _parsed_extents(text: str, device: DeviceFacts, shape: str) -> tuple[int, ...]:
    """Returns the extents of a shape such as "64x8", as many as the device has, after the number of slices."""
    num_in_slice = 2 if device.platform == "gpu" else device.dims
    try:
        extents = tuple(whole_number(part) for part in shape.split("x"))
    except ValueError as error:
        raise _unreadable(text, device, shape) from error
    if len(extents) == num_in_slice:
        extents = (1, *extents)  # a single slice
    if len(extents) != num_in_slice + 1 or min(extents) < 1:
        raise _unreadable(text, device, shape)
    return extents


def _unknown(text: str, name: str) -> TopologyError:
    near = []
    if name:
        near = [known for known in DEVICES if known.startswith(name) or name.startswith(known)]
    near = near or difflib.get_close_matches(name, DEVICES, n=1) or ["h100"]
    return TopologyError(
        f"There is no device {name!r}.",
        where=f"--topology {text}",
        why=f"the devices are {', '.join(DEVICES)}; with their own adapters {', '.join(CLOUDS)}; and files, *{SUFFIX}.",
        do="  # or ".join(f"--topology {_example(DEVICES[known])}" for known in near),
    )


def _unreadable(text: str, device: DeviceFacts, shape: str) -> TopologyError:
    if device.platform == "gpu":
        form = f"HOSTSxGPUS or SLICESxHOSTSxGPUS, with at most {device.fast_group} GPUs in a host"
    else:
        torus = "XxY" if device.dims == 2 else "XxYxZ"
        form = f"{torus}, the extents of a slice, or SLICESx{torus}"
    written = shown(shape) if shape else "nothing"
    return TopologyError(
        "The topology cannot be read.",
        where=f"--topology {text}",
        why=f"{device.name}: must be followed by {form}, integers from 1, not {written}.",
        do=f"--topology {_example(device)}",
    )


def _example(device: DeviceFacts) -> str:
    """Returns a topology of a device, to paste."""
    if device.name == "gb200":
        return f"{device.name}:128x4"
    shapes = {0: "64x8", 2: "16x16", 3: "8x8x8"}
    return f"{device.name}:{shapes[device.dims]}"


# ---- devices to compile for


def topology_devices(topology: Topology) -> Sequence[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the devices of a cluster you do not have, as a mesh to compile for.

    Only in a separate process: JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1 must be set before jax is imported, or the
    look-up of devices contacts real ones.

    Raises:
        MissingExtraError: its compiler is not installed.
        TopologyError: its compiler refuses the shape.
    """
    compiler = topology.device.compiler
    require_compiler(compiler)
    target = topology.device.target
    if target is None:  # a TPU
        # Another jshard process may hold libtpu's lock; this one does not use a TPU.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return _tpu_devices(topology)
    slices, hosts, gpus = topology.extents
    if not topology.device.hosts_share_links:  # since 0.12, XLA assumes NVLink between the hosts of a slice
        slices *= hosts
        hosts = 1
    if compiler == "rocm":
        _load_rocm_compiler()
    shape = f"{slices}x{hosts}x{gpus}"
    return _described_devices(compiler, topology, target_config=target_config_text(target), topology=shape)


def _tpu_devices(topology: Topology) -> Sequence[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the chips, or halves of chips, of the slices of a topology."""
    description: dict[str, Any] = {"topology_name": f"{topology.device.name}:{topology.torus}"}
    if topology.num_slices > 1:
        description["num_slices"] = topology.num_slices
    if topology.device.chip_config:
        description["chip_config_name"] = topology.device.chip_config
    return _described_devices("tpu", topology, **description)


def _load_rocm_compiler() -> None:
    """Loads JAX's ROCm plugin, with stand-ins for what it needs of ROCm where that is not installed.

    Raises:
        RunError: the loader refuses it.
    """
    libraries = [_compat.rocm_library(version) for version in _compat.ROCM.versions]
    library = next(path for path in libraries if path is not None)
    try:
        load_stubs(library)
        _compat.register_rocm(library)
    except (OSError, ElfError, jax.errors.JaxRuntimeError) as error:
        raise RunError(
            "The ROCm compiler cannot be loaded.",
            where=str(library),
            why=f"{type(error).__name__}: {error}",
            do=f"pip install --force-reinstall {_ROCM_PACKAGE.format(_compat.ROCM.versions[0])}",
        ) from error


def _described_devices(platform: str, requested: Topology, **description: Any) -> Sequence[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the devices that a compiler makes of a description."""
    try:
        devices = topologies.get_topology_desc(platform=platform, **description).devices
    except Exception as error:
        raise TopologyError(
            "The compiler refuses the topology.",
            where=requested.text,
            why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            do=f"use an available shape, such as {_example(requested.device)}.",
        ) from error
    if len(devices) != requested.num_devices:
        raise RunError(
            "The compiler has another number of devices.",
            where=requested.text,
            why=f"{requested.num_devices} were requested, it has {len(devices)}.",
            do="report this with your versions of jax and jaxlib.",
        )
    return devices


@contextlib.contextmanager
def traced_for_device(device: DeviceFacts | None) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Makes tracing target an absent device inside the context; yields the assumptions of that, as text.

    cuDNN attention is such an assumption: JAX checks for the library and a GPU while tracing. Without a device, tracing
    targets the present devices, and only the check for cuDNN is answered.
    """
    if device is not None and device.target is None:
        with planned_for(TracedDevice("tpu", device.title)):
            yield tuple  # makes no assumption
        return
    if device is None and jax.default_backend() == "gpu":  # which answers the check itself
        yield tuple
        return
    if device is not None and device.compiler == "rocm":
        assert device.target is not None
        # No cuDNN there, and no capability by NVIDIA's count: attention and kernels take their plain forms.
        with planned_for(TracedDevice("gpu", device.target.description, device.target.core_count)):
            yield tuple
        return
    target = None if device is None else device.target
    # Without a device, the check for cuDNN is answered as on a Hopper GPU.
    capability = target.major if isinstance(target, NvidiaTarget) else HOPPER
    with contextlib.ExitStack() as stack:
        is_cudnn_used = stack.enter_context(_compat.cudnn_assumed(CUDNN, (capability, 0)))
        if isinstance(target, NvidiaTarget):
            stack.enter_context(planned_for(_traced_gpu(target)))
            stack.enter_context(_compat.gpu_assumed((capability, 0)))

        def assumptions() -> tuple[str, ...]:
            return (_CUDNN_ASSUMED,) if is_cudnn_used() else ()

        yield assumptions


def _traced_gpu(target: NvidiaTarget) -> TracedDevice:
    """Returns what kernels need to know of an absent GPU."""
    return TracedDevice(
        "gpu",
        target.description,
        target.core_count,
        smem_limit_bytes=target.shared_memory_per_block_optin,
        capability=target.major,
    )


# ---- installed compilers


class _Missing(NamedTuple):
    """A compiler that is not installed."""

    why: str
    do: str


_ROCM_PACKAGE = "jax-{}-pjrt"  # with a version of ROCm
_COMPILERS = {"cuda": "GPU", "rocm": "ROCm", "tpu": "TPU"}  # as messages name them


def require_compiler(compiler: str, *, where: str = "jshard plan --topology") -> None:
    """Checks that a compiler is installed, without loading it.

    Args:
        compiler: "cuda", "rocm" or "tpu", as `DeviceFacts.compiler`.
        where: what needs it, for the error.

    Raises:
        MissingExtraError: it is not installed, or not in jaxlib's version.
    """
    missing = None
    if compiler == "cuda":
        missing = _missing_cuda_compiler()
    elif compiler == "rocm":
        missing = _missing_rocm_compiler()
    elif importlib.util.find_spec("libtpu") is None:
        missing = _Missing("it needs libtpu, but no TPU.", "pip install 'jshard[plan-tpu]'")
    if missing is not None:
        what = f"The {_COMPILERS[compiler]} compiler is not installed."
        raise MissingExtraError(what, where=where, why=missing.why, do=missing.do)


def _missing_rocm_compiler() -> _Missing | None:
    """Returns why there is no compiler for AMD GPUs, and what to install; None if there is one."""
    for rocm in _compat.ROCM.versions:
        package = _ROCM_PACKAGE.format(rocm)
        versions = _compat.plugin_versions(package)
        if versions is None:
            continue
        jaxlib, plugin = versions
        # A fourth number is a build of jaxlib alone, as 0.12.0.1: the plugin of 0.12.0 is for it, too.
        if plugin.split(".")[:3] != jaxlib.split(".")[:3]:
            exact = ".".join(jaxlib.split(".")[:3])
            return _Missing(f"{package} has version {plugin}, jaxlib {jaxlib}.", f"pip install {package}=={exact}")
        return None
    return _Missing("it needs jax-rocm7-pjrt, but no AMD GPU and no ROCm.", "pip install 'jshard[plan-rocm]'")


def _missing_cuda_compiler() -> _Missing | None:
    """Returns why there is no compiler for NVIDIA GPUs, and what to install; None if there is one."""
    for cuda in _compat.CUDA.versions:
        versions = _compat.plugin_versions(f"jax-{cuda}-plugin")
        if versions is None:
            continue
        # JAX uses the first installed one: whether another one would do does not matter.
        jaxlib, plugin = versions
        if plugin != jaxlib:
            exact = f"jax-{cuda}-plugin=={jaxlib} jax-{cuda}-pjrt=={jaxlib}"
            return _Missing(f"jax-{cuda}-plugin has version {plugin}, jaxlib {jaxlib}.", f"pip install {exact}")
        if not _has_ptxas():
            return _Missing("ptxas, CUDA's assembler, is missing.", "pip install nvidia-cuda-nvcc-cu12")
        return None
    return _Missing(
        "it needs jax[cuda12-local] and nvidia-cuda-nvcc-cu12, but no GPU, driver or CUDA.",
        "pip install 'jshard[plan-gpu]'",
    )


def _has_ptxas() -> bool:
    """Returns whether XLA finds an assembler: in the wheel, on the path, or in CUDA's usual folder."""
    if shutil.which("ptxas") or Path("/usr/local/cuda/bin/ptxas").exists():
        return True
    for folder in sys.path:
        for wheel in ("cuda_nvcc", "cu13"):
            if folder and (Path(folder) / "nvidia" / wheel / "bin" / "ptxas").exists():
                return True
    return False
