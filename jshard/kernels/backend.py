"""Where a kernel runs, which of its forms it is then, and what every kernel's call has in common."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
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

_HOPPER = 9  # compute capability
_HOPPER_SMS, _HOPPER_SMEM_BYTES = 132, 227 * 1024  # where the device does not say


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """A device to trace for."""

    platform: str  # "gpu", "tpu" or "cpu"
    kind: str  # the driver's name for it
    sms: int = _HOPPER_SMS  # its multiprocessors
    smem_limit_bytes: int = _HOPPER_SMEM_BYTES  # the most shared memory of a block
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
        capability=_capability(device) if platform == "gpu" else 0,
    )


def _device_reasons(here: TracedDevice, backend: str) -> list[str]:
    axes = _automatic_axes()
    if backend == "interpret":
        whole = region_mesh() is None and math.prod(jax.sharding.get_abstract_mesh().axis_sizes) > 1
        several = axes or whole
        return ["the interpreter of kernels runs on one device, and the mesh in use has several"] if several else []
    found = (
        []
        if here.capability == _HOPPER
        else [f"{here.kind} is no Hopper GPU, whose tensor cores the kernel is written for"]
    )
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
    if any(0 in x.shape for x in arrays):
        return ["one of the arrays is empty"]
    dtypes = {np.dtype(x.dtype).name for x in arrays}
    if len(dtypes) == 1 and dtypes <= {"bfloat16", "float16"}:
        return []
    return [f"it takes bfloat16 or float16, one of them for all arrays, and these are {', '.join(sorted(dtypes))}"]


def _capability(device: Any) -> int:
    """The major number; of a device that is not there that of its row in the table."""
    found = str(getattr(device, "compute_capability", "") or "").partition(".")[0]
    if found.isdecimal():
        return int(found)
    facts = device_of(device.device_kind)
    return facts.target.major if facts is not None and facts.target is not None else 0


# What every kernel's call has in common: which form runs, on what device, and under what name.


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

    def named(self) -> Any:
        """A context whose operations carry the kernel's name and form: the audit reads them from the program."""
        return jax.named_scope(scope(self.name, self.form))


def decide(
    name: str,
    backend: Backend,
    occupancy: Occupancy | None,
    arrays: Collection[Any],
    *,
    default: Occupancy = Occupancy(),  # noqa: B008  # frozen
    reasons: Collection[str] = (),
) -> KernelRun:
    """Decides how a kernel runs; `reasons` say why its own kind of arrays cannot be taken."""
    check_known(name, "backend", backend, BACKENDS)
    here = place()
    run = functools.partial(KernelRun, name, knobs=occupancy or default, here=here)
    if backend == "xla":
        return run(form="xla")
    reasons = [*_device_reasons(here, backend), *_array_reasons(arrays), *reasons]
    if backend == "auto" and (reasons or _may_be_split()):
        return run(form="xla")
    if not reasons:
        return run(form="interpret" if backend == "interpret" else "mosaic")
    raise KernelError(
        f"{name} cannot run {'step by step' if backend == 'interpret' else 'on Mosaic GPU'} here.",
        where=[f"backend={backend!r}", f"device: {here.kind}"],
        why="\n".join(f"{reason}." for reason in reasons),
        do='backend="auto" takes the plain form where the kernel cannot run.',
    )


def check_known(name: str, argument: str, value: str, known: Collection[str]) -> None:
    """Refuses an argument of a kernel that is none of those it knows."""
    if value not in known:
        raise KernelError(
            f"{name} does not have this {argument}.",
            where=f"{argument}={value!r}",
            why=f"it is one of {', '.join(map(repr, known))}.",
            do=f'{argument}="{next(iter(known))}"',
        )


def check_shapes(
    name: str, arrays: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], wrong: Sequence[str] = ()
) -> None:
    """Refuses arrays whose shapes do not go together, all at once; `wrong` is what else is."""
    wrong = [
        *wrong,
        *(f"{arg} must be {wanted[arg]}." for arg, x in arrays.items() if x.shape != wanted.get(arg, x.shape)),
    ]
    if wrong:
        raise KernelError(
            f"{name} cannot take these arrays.",
            where=[f"{argument}: {array.shape}" for argument, array in arrays.items()],
            why="\n".join(wrong),
            do=f"help(js.kernels.{name}) has the shapes.",
        )


def refuse_knobs(name: str, knobs: Occupancy, here: TracedDevice, wrong: Sequence[str]) -> None:
    """Raises where knobs ask for what a GPU has not."""
    if wrong:
        raise KernelError(
            f"The GPU cannot run {name} like this.",
            where=f"{here.kind}: {knobs}",
            why="\n".join(wrong),
            do="smaller tiles, fewer stages, less padding, or fewer reserved_sms; Occupancy() fits.",
        )
