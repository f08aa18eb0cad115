"""Where a kernel runs, which of its forms it is then, and what every kernel's call has in common."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jshard import _compat
from jshard._text import scope
from jshard.engine.context import region_mesh
from jshard.facts.devices import device_of
from jshard.kernels.knobs import KernelError, Occupancy
from jshard.plans.mesh import manual_axes

Backend = Literal["auto", "mosaic", "interpret", "xla"]
BACKENDS = ("auto", "mosaic", "interpret", "xla")
"""Forms of a kernel: Mosaic GPU, the same step by step on a CPU, and its plain twin; "auto" is the first that can."""

_HOPPER = re.compile(r"\bG?H(?:20|100|200|800)\b")
_HOPPER_SMS, _HOPPER_SMEM_BYTES = 132, 227 * 1024  # where the device does not say


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """A device to trace for."""

    platform: str  # "gpu", "tpu" or "cpu"
    kind: str  # the driver's name for it
    sms: int = _HOPPER_SMS  # its multiprocessors
    smem_limit_bytes: int = _HOPPER_SMEM_BYTES  # the most shared memory of a block
    is_hopper: bool = False  # whether the kernels run on it
    capability: int = 0  # major compute capability of a GPU of NVIDIA's; 0 where it is none, or not known


_planned: contextvars.ContextVar[TracedDevice | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(here: TracedDevice) -> Iterator[None]:
    """Inside, what is traced without devices of its own is for this one, as for a cluster that is not there."""
    token = _planned.set(here)
    try:
        yield
    finally:
        _planned.reset(token)


def place() -> TracedDevice:
    """The device of the mesh that is in use, or of this process.

    Of a mesh that was made from a description, as for a compile without hardware, the devices are not there: their
    kind and number of multiprocessors are.
    """
    mesh = region_mesh()
    device: Any = _compat.abstract_device() if mesh is None else mesh.abstract_mesh.abstract_device
    if device is None and isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
    if device is None and (planned := _planned.get()) is not None:
        return planned
    if device is None and mesh is not None and not _compat.has_devices():
        return TracedDevice(platform="cpu", kind="a device that is not known")  # a dry run asks for none
    if device is None:
        default = getattr(jax.config, "jax_default_device", None)
        device = jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return TracedDevice(
        platform=platform,
        kind=device.device_kind,
        sms=getattr(device, "num_cores", None) or getattr(device, "core_count", None) or _HOPPER_SMS,
        smem_limit_bytes=getattr(device, "shared_memory_per_block_optin", None) or _HOPPER_SMEM_BYTES,
        is_hopper=platform == "gpu" and _is_hopper(device),
        capability=_capability(device) if platform == "gpu" else 0,
    )


def choose(
    name: str, backend: Backend, arrays: Collection[Any], here: TracedDevice, reasons: Collection[str] = ()
) -> str:
    """Which form of a kernel runs.

    Returns:
        "mosaic", "interpret" or "xla".
    """
    if backend not in BACKENDS:
        raise KernelError(
            f"{name} does not have this backend.",
            where=f"backend={backend!r}",
            why=f"it is one of {', '.join(map(repr, BACKENDS))}.",
            do='backend="auto"',
        )
    if backend == "xla":
        return "xla"
    reasons = [*_device_reasons(here, backend), *_array_reasons(arrays), *reasons]
    if backend == "auto" and (reasons or _may_be_split()):
        return "xla"
    if not reasons:
        return "interpret" if backend == "interpret" else "mosaic"
    raise KernelError(
        f"{name} cannot run {'step by step' if backend == 'interpret' else 'on Mosaic GPU'} here.",
        where=[f"backend={backend!r}", f"device: {here.kind}"],
        why="\n".join(f"{reason}." for reason in reasons),
        do='backend="auto" takes the plain form where the kernel cannot run.',
    )


def _device_reasons(here: TracedDevice, backend: str) -> list[str]:
    axes = _automatic_axes()
    if backend == "interpret":
        whole = region_mesh() is None and math.prod(jax.sharding.get_abstract_mesh().axis_sizes) > 1
        several = axes or whole
        return ["the interpreter of kernels runs on one device, and the mesh in use has several"] if several else []
    found = [] if here.is_hopper else [f"{here.kind} is no Hopper GPU, whose tensor cores the kernel is written for"]
    if axes:
        named = ", ".join(f"{axis}={degree}" for axis, degree in axes.items())
        found.append(f"arrays may be split over {named}, and a kernel takes whole arrays: XLA would gather them")
    return found


def _automatic_axes() -> dict[str, int]:
    """Axes over which the compiler splits arrays where the kernel will run, with their degrees, if above 1."""
    mesh = region_mesh()
    if mesh is None:
        return _compat.automatic_axes()
    return {axis: n for axis, n in mesh.shape.items() if axis not in manual_axes(mesh) and n > 1}


def _may_be_split() -> bool:
    """Whether nothing says that arrays are whole: no mesh is in use, and there are several devices."""
    several = jax.device_count() > 1 or _planned.get() is not None
    return region_mesh() is None and _compat.abstract_device() is None and several


def _array_reasons(arrays: Collection[Any]) -> list[str]:
    dtypes = {np.dtype(x.dtype).name for x in arrays}
    if len(dtypes) == 1 and dtypes <= {"bfloat16", "float16"}:
        return []
    return [f"it takes bfloat16 or float16, one of them for all arrays, and these are {', '.join(sorted(dtypes))}"]


def _is_hopper(device: Any) -> bool:
    capability = getattr(device, "compute_capability", None)
    return capability == "9.0" if capability else bool(_HOPPER.search(device.device_kind))


def _capability(device: Any) -> int:
    """The major number; of a device that is not there that of its row in the table."""
    found = str(getattr(device, "compute_capability", "") or "").partition(".")[0]
    if found.isdecimal():
        return int(found)
    facts = device_of(device.device_kind)
    return facts.target.major if facts is not None and facts.target is not None else 0


# What every kernel's call has in common: which form runs, on what device, and under what name.

DEFAULT = Occupancy()


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One call of a kernel, as decided while the program is traced; hashable, a static argument of its gradient."""

    name: str  # of the kernel
    form: str  # "mosaic", "interpret" or "xla"
    knobs: Occupancy  # how much of the device it may hold
    here: TracedDevice  # the device

    @property
    def is_plain(self) -> bool:
        """Whether XLA compiles the twin."""
        return self.form == "xla"

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs step by step on a CPU."""
        return self.form == "interpret"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Inside, operations carry the name of the kernel and its form: the audit reads them from the program."""
        with jax.named_scope(scope(self.name, self.form)):
            yield


def decide(
    name: str,
    backend: Backend,
    occupancy: Occupancy | None,
    arrays: Collection[jax.Array],
    *,
    default: Occupancy = DEFAULT,
    reasons: Collection[str] = (),
) -> KernelRun:
    """Decides how a kernel runs."""
    here = place()
    empty = ["one of the arrays is empty"] if any(0 in x.shape for x in arrays) else []
    form = choose(name, backend, arrays, here, [*reasons, *empty])
    return KernelRun(name, form, occupancy or default, here)


def check_sizes(name: str, arrays: Mapping[str, jax.Array], wrong: Sequence[str], do: str) -> None:
    """Refuses arrays whose sizes do not go together."""
    if wrong:
        raise KernelError(
            f"{name} cannot take these arrays.",
            where=[f"{argument}: {array.shape}" for argument, array in arrays.items()],
            why="\n".join(wrong),
            do=do,
        )
