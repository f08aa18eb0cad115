"""Shared by all kernels: where one runs and in which form, how much of a GPU it may use, and its call."""

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
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh

from jshard import _compat
from jshard._text import scope
from jshard.engine.context import region_mesh
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.plans.mesh import manual_axes

WARPGROUP_ROWS = 64  # rows of the smallest product that a warpgroup's tensor cores take
LEAST_TILE = 64


class KernelError(ShardingError):
    """A kernel cannot run on these arrays, with these knobs, or on this device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How much of the GPU a kernel occupies. Frozen and hashable, so it can be a static argument.

    A *persistent* kernel starts one block on each multiprocessor it may use, and each block processes tiles until all
    are done; `reserved_sms` leaves multiprocessors free. Any other kernel starts one block per tile, and several
    blocks share a multiprocessor; `smem_pad_bytes` makes each block take more shared memory, so that fewer fit
    (arXiv 2606.09200).

    Args:
        tile_m: rows of the output that a block computes at a time; a multiple of 64, of 128 if persistent.
        tile_n: columns of the output per tile; a multiple of 64.
        tile_k: size of each step along the contracted dim; a multiple of 64.
        stages: steps whose operands are in shared memory at once, 2 or more.
        persistent: one block per multiprocessor, with two computing warpgroups and one that loads.
        reserved_sms: multiprocessors that a persistent kernel leaves free.
        smem_pad_bytes: shared memory that each block takes without using it; rounded up to 1,024.
        latency_ns: duration of one product, passed to the compiler's scheduler; an estimate by default. Without it the
            scheduler would assume that the kernel takes no time, and hide no communication behind it.

    Raises:
        KernelError: a knob is out of range for any GPU.

    Example:
        >>> js.kernels.Occupancy(reserved_sms=16)
        >>> js.kernels.Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320)
    """

    tile_m: int = 256
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    persistent: bool = True
    reserved_sms: int = 0
    smem_pad_bytes: int = 0
    latency_ns: int | None = None

    def __post_init__(self) -> None:
        units = {"tile_m": self._row_unit, "tile_n": LEAST_TILE, "tile_k": LEAST_TILE}
        least = {"stages": 2, "reserved_sms": 0, "smem_pad_bytes": 0}
        least |= {} if self.latency_ns is None else {"latency_ns": 1}
        of = lambda name: getattr(self, name)
        wrong = [(name, f"{name}: a multiple of {n}.") for name, n in units.items() if of(name) <= 0 or of(name) % n]
        wrong += [(name, f"{name}: {n} or more.") for name, n in least.items() if of(name) < n]
        if self.reserved_sms and not self.persistent:
            why = "reserved_sms needs a persistent kernel: the GPU decides where the blocks of any other run."
            wrong.append(("reserved_sms", why))
        if wrong:
            names, why = zip(*wrong, strict=True)
            raise KernelError(
                "The knobs of a kernel are not valid.",
                where=[f"Occupancy({name}={getattr(self, name)!r})" for name in names],
                why="\n".join(why),
                do="Occupancy(tile_m=256, tile_n=128, tile_k=64, stages=4, reserved_sms=16)",
            )

    @property
    def _row_unit(self) -> int:
        return 2 * WARPGROUP_ROWS if self.persistent else WARPGROUP_ROWS

    @property
    def padded_bytes(self) -> int:
        """`smem_pad_bytes`, rounded up: buffers begin at multiples of 1,024."""
        return -(-self.smem_pad_bytes // 1024) * 1024


def with_half_the_rows(knobs: Occupancy) -> Occupancy:
    """The same knobs with half the rows per tile, where that is possible."""
    half = knobs.tile_m // 2
    return knobs if half % knobs._row_unit else dataclasses.replace(knobs, tile_m=half)


def fitted(knobs: Occupancy, m: int, n: int, k: int) -> Occupancy:
    """Knobs whose tiles are no larger than the arrays; each dim is then padded to whole tiles."""
    tile_k = _tile(k, knobs.tile_k, LEAST_TILE)
    return dataclasses.replace(
        knobs,
        tile_m=_tile(m, knobs.tile_m, knobs._row_unit),
        tile_n=_tile(n, knobs.tile_n, LEAST_TILE),
        tile_k=tile_k,
        stages=max(2, min(knobs.stages, -(-k // tile_k))),
    )


def _tile(size: int, most: int, least: int) -> int:
    """The tile, from repeated halving, that pads a dim least; the largest in a tie."""
    tiles = [most]
    while tiles[-1] % 2 == 0 and (tiles[-1] // 2) % least == 0:
        tiles.append(tiles[-1] // 2)
    return min(tiles, key=lambda tile: (-(-size // tile) * tile, -tile))


# Arrays of any rank as matrices for kernels.


def as_matrix(x: jax.Array) -> jax.Array:
    """All dims but the last as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector in the rank and dtype of the array that it is combined with, row by row."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`, marks all arrays as varying over the axes that any of them varies over.

    Called outside a kernel's own gradient, so that JAX sums the devices' contributions over the axes.
    """
    axes = varying_over(*arrays)
    return tuple(vary(x, axes) for x in arrays)


def varying_over(*arrays: jax.Array) -> frozenset[str]:
    """Axes over which at least one of the arrays varies."""
    return frozenset[str]().union(*map(_compat.varying_axes, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks an array as varying over some axes."""
    missing = tuple(sorted(axes - _compat.varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# The duration of a kernel, as passed to XLA's scheduler.

_REACHED = 0.6  # of the peak, for both flops and bandwidth: an assumption, not measured
_LAUNCH_NS = 2000


def product_ns(m: int, n: int, k: int, *, kind: str, products: int = 1) -> int:
    """The estimated duration of matrix products of (m, k) and (k, n) in 16 bits on a kind of device."""
    return _LAUNCH_NS + int(1e9 * products * 2 * m * n * k / (_REACHED * _facts(kind).flops_per_s["bf16"]))


def traffic_ns(num_bytes: int, *, kind: str) -> int:
    """The estimated duration of a kernel that reads and writes `num_bytes` of device memory and computes little."""
    return _LAUNCH_NS + int(1e9 * num_bytes / (_REACHED * _facts(kind).hbm_bytes_per_s))


def stated(latency_ns: int) -> Any:
    """A context in which every traced operation carries this latency."""
    return set_xla_metadata(latency_metadata=str(max(1, latency_ns)))


def _facts(kind: str) -> DeviceFacts:
    """Facts of the device with this driver name; of an H100 if the table does not list it."""
    return device_of(kind) or DEVICES["h100"]


Backend = Literal["auto", "mosaic", "interpret", "xla"]
BACKENDS = ("auto", "mosaic", "interpret", "xla")
"""Forms of a kernel: Mosaic GPU, the same step by step on a CPU, and its plain twin; "auto" is the first usable one."""

_HOPPER = 9  # compute capability
_HOPPER_SMS, _HOPPER_SMEM_BYTES = 132, 227 * 1024  # if the device does not report them


@dataclasses.dataclass(frozen=True)
class TracedDevice:
    """A device to trace for."""

    platform: str  # "gpu", "tpu" or "cpu"
    kind: str  # the driver's name for it
    sms: int = _HOPPER_SMS  # its multiprocessors
    smem_limit_bytes: int = _HOPPER_SMEM_BYTES  # the most shared memory of a block
    capability: int = 0  # major compute capability of an NVIDIA GPU; 0 for others, or if not known


_planned: contextvars.ContextVar[TracedDevice | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(here: TracedDevice) -> Iterator[None]:
    """A context in which code without devices of its own is traced for this one, as for an absent cluster."""
    token = _planned.set(here)
    try:
        yield
    finally:
        _planned.reset(token)


def place() -> TracedDevice:
    """The device of the mesh that is in use, or of this process.

    A mesh made from a description, as for a compile without hardware, has no devices, but it has their kind and their
    number of multiprocessors.
    """
    mesh = region_mesh()
    device: Any = _compat.abstract_device() if mesh is None else mesh.abstract_mesh.abstract_device
    if device is None and isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
    if device is None and (planned := _planned.get()) is not None:
        return planned
    if device is None and mesh is not None and not _compat.has_devices():
        return TracedDevice(platform="cpu", kind="an unknown device")  # a dry run has none
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
    axes = automatic_axes()
    if backend == "interpret":
        whole = region_mesh() is None and math.prod(jax.sharding.get_abstract_mesh().axis_sizes) > 1
        several = axes or whole
        return ["the kernel interpreter runs on one device, and the mesh in use has several"] if several else []
    found = (
        []
        if here.capability == _HOPPER
        else [f"the kernel is written for the tensor cores of Hopper GPUs, not for {here.kind}"]
    )
    if axes:
        named = ", ".join(f"{axis}={degree}" for axis, degree in axes.items())
        found.append(f"arrays may be split over {named}, and a kernel needs whole arrays: XLA would gather them")
    return found


def automatic_axes() -> dict[str, int]:
    """Axes over which the compiler splits arrays where the kernel will run, with their degrees above 1."""
    mesh = region_mesh()
    if mesh is None:
        return _compat.automatic_axes()
    return {axis: n for axis, n in mesh.shape.items() if axis not in manual_axes(mesh) and n > 1}


def may_be_split() -> bool:
    """Whether arrays are not known to be whole: no mesh is in use, and there are several devices."""
    several = jax.device_count() > 1 or _planned.get() is not None
    return region_mesh() is None and _compat.abstract_device() is None and several


def _array_reasons(arrays: Collection[Any]) -> list[str]:
    if any(0 in x.shape for x in arrays):
        return ["one of the arrays is empty"]
    dtypes = {np.dtype(x.dtype).name for x in arrays}
    if len(dtypes) == 1 and dtypes <= {"bfloat16", "float16"}:
        return []
    return [f"all arrays must be bfloat16, or all float16, and these are {', '.join(sorted(dtypes))}"]


def _capability(device: Any) -> int:
    """The major compute capability; for an absent device, from its row in the table."""
    found = str(getattr(device, "compute_capability", "") or "").partition(".")[0]
    if found.isdecimal():
        return int(found)
    facts = device_of(device.device_kind)
    return facts.target.major if facts is not None and facts.target is not None else 0


# Common to every kernel's call: which form runs, on what device, and under what name.


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One call of a kernel, as decided at trace time; hashable, as a static argument of its gradient."""

    name: str  # of the kernel
    form: str  # "mosaic", "interpret" or "xla"
    knobs: Occupancy  # how much of the device it may occupy
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
        """A context whose operations carry the kernel's name and form, which the audit reads from the program."""
        return jax.named_scope(scope(self.name, self.form))


def decide(
    name: str,
    backend: Backend,
    occupancy: Occupancy | None,
    arrays: Collection[Any],
    *,
    default: Occupancy = Occupancy(),  # frozen
    reasons: Collection[str] = (),
) -> KernelRun:
    """Decides how a kernel runs; `reasons` are the kernel's own reasons against these arrays."""
    check_known(name, "backend", backend, BACKENDS)
    here = place()
    run = functools.partial(KernelRun, name, knobs=occupancy or default, here=here)
    if backend == "xla":
        return run(form="xla")
    reasons = [*_device_reasons(here, backend), *_array_reasons(arrays), *reasons]
    if backend == "auto" and (reasons or may_be_split()):
        return run(form="xla")
    if not reasons:
        return run(form="interpret" if backend == "interpret" else "mosaic")
    raise KernelError(
        f"{name} cannot run {'step by step' if backend == 'interpret' else 'on Mosaic GPU'} here.",
        where=[f"backend={backend!r}", f"device: {here.kind}"],
        why="\n".join(f"{reason}." for reason in reasons),
        do='backend="auto"  # runs in plain form where the kernel cannot run',
    )


def check_known(name: str, argument: str, value: str, known: Collection[str]) -> None:
    """Raises for an argument of a kernel that is not one of the known values."""
    if value not in known:
        raise KernelError(
            f"{name} does not have this {argument}.",
            where=f"{argument}={value!r}",
            why=f"it must be one of {', '.join(map(repr, known))}.",
            do=f'{argument}="{next(iter(known))}"',
        )


def check_shapes(
    name: str, arrays: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], wrong: Sequence[str] = ()
) -> None:
    """Raises for arrays with incompatible shapes, listing all of them; `wrong` are other faults."""
    wrong = [
        *wrong,
        *(f"{arg} must be {wanted[arg]}." for arg, x in arrays.items() if x.shape != wanted.get(arg, x.shape)),
    ]
    if wrong:
        raise KernelError(
            f"{name} cannot take these arrays.",
            where=[f"{argument}: {array.shape}" for argument, array in arrays.items()],
            why="\n".join(wrong),
            do=f"help(js.kernels.{name})  # lists the shapes",
        )


def refuse_knobs(name: str, knobs: Occupancy, here: TracedDevice, wrong: Sequence[str]) -> None:
    """Raises for knobs that need more than the GPU has."""
    if wrong:
        raise KernelError(
            f"The GPU cannot run {name} with these knobs.",
            where=f"{here.kind}: {knobs}",
            why="\n".join(wrong),
            do="Occupancy()  # or smaller tiles, fewer stages, less padding, fewer reserved_sms",
        )
