"""Shared by all kernels: how much of a GPU one may use, in which form it runs, and the checks of its arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jshard import _compat
from jshard._text import scope
from jshard.engine.context import region_mesh
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, device_of, peak_of
from jshard.kernels.device import TracedDevice, automatic_axes, device_in_use, may_be_split
from jshard.kernels.generation import AMPERE, HOPPER, WARPGROUP_ROWS, Generation, Tiles, generation_of

LEAST_TILE = 64


class KernelError(ShardingError):
    """A kernel cannot run on these arrays, with these knobs, or on this device."""


# ---- how much of the GPU a kernel occupies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How much of the GPU a kernel occupies. Frozen and hashable, so it can be a static argument.

    A *persistent* kernel starts one block on each multiprocessor it may use, and each block processes tiles until all
    are done; `reserved_sms` leaves multiprocessors free. Any other kernel starts one block per tile, and several
    blocks share a multiprocessor; `smem_pad_bytes` makes each block take more shared memory, so that fewer fit
    (arXiv 2606.09200).

    The default tiles are Hopper's. On Ampere GPUs, which have too little shared memory for them, 128 x 64 x 64 with 3
    stages take their place.

    Args:
        tile_m: rows of the output that a block computes at a time; a multiple of 64, on Hopper of 128 if persistent.
        tile_n: columns of the output per tile; a multiple of 64.
        tile_k: size of each step along the contracted dim; a multiple of 64.
        stages: steps whose operands are in shared memory at once, 2 or more.
        persistent: one block per multiprocessor. On Hopper two of its warpgroups compute and one loads; on Ampere it is
            a single warpgroup.
        reserved_sms: multiprocessors that a persistent kernel leaves free.
        smem_pad_bytes: shared memory that each block takes without using it; rounded up to 1,024.
        latency_ns: duration of one product, passed to the compiler's scheduler; an estimate by default. Without it the
            scheduler would assume that the kernel takes no time, and hide no communication behind it.

    Raises:
        KernelError: a knob is out of range for any GPU.

    Examples:
        >>> js.kernels.Occupancy(reserved_sms=16)
        >>> js.kernels.Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=56_320)
    """

    tile_m: int = HOPPER.tiles.tile_m
    tile_n: int = HOPPER.tiles.tile_n
    tile_k: int = HOPPER.tiles.tile_k
    stages: int = HOPPER.tiles.stages
    persistent: bool = True
    reserved_sms: int = 0
    smem_pad_bytes: int = 0
    latency_ns: int | None = None

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise KernelError(
                "The knobs of a kernel are not valid.",
                where=[f"Occupancy({fault.knob}={getattr(self, fault.knob)!r})" for fault in faults],
                why="\n".join(fault.why for fault in faults),
                do="Occupancy(tile_m=256, tile_n=128, tile_k=64, stages=4, reserved_sms=16)",
            )

    def _faults(self) -> Iterator[_KnobFault]:
        units = {"tile_m": WARPGROUP_ROWS, "tile_n": LEAST_TILE, "tile_k": LEAST_TILE}
        for knob, unit in units.items():
            size = getattr(self, knob)
            if size <= 0 or size % unit:
                yield _KnobFault(knob, f"{knob}: a multiple of {unit}.")
        least = {"stages": 2, "reserved_sms": 0, "smem_pad_bytes": 0}
        if self.latency_ns is not None:
            least["latency_ns"] = 1
        for knob, least_value in least.items():
            if getattr(self, knob) < least_value:
                yield _KnobFault(knob, f"{knob}: {least_value} or more.")
        if self.reserved_sms and not self.persistent:
            why = "reserved_sms needs a persistent kernel: the GPU decides where the blocks of any other run."
            yield _KnobFault("reserved_sms", why)

    @property
    def tiles(self) -> Tiles:
        """Returns the tiles and stages alone."""
        return Tiles(tile_m=self.tile_m, tile_n=self.tile_n, tile_k=self.tile_k, stages=self.stages)

    def on(self, generation: Generation) -> Occupancy:
        """Returns the knobs with the tiles of a generation, if these are the default."""
        if self.tiles != HOPPER.tiles:
            return self
        return dataclasses.replace(self, **dataclasses.asdict(generation.tiles))

    @property
    def padded_bytes(self) -> int:
        """Returns `smem_pad_bytes`, rounded up: buffers begin at multiples of 1,024."""
        return -(-self.smem_pad_bytes // 1024) * 1024


class _KnobFault(NamedTuple):
    """A knob that is out of range, and why."""

    knob: str
    why: str


def with_half_the_rows(knobs: Occupancy, generation: Generation) -> Occupancy:
    """Returns the same knobs with half the rows per tile, where that is possible."""
    half = knobs.tile_m // 2
    if half % generation.row_unit(persistent=knobs.persistent):
        return knobs
    return dataclasses.replace(knobs, tile_m=half)


def fitted(knobs: Occupancy, m: int, n: int, k: int, generation: Generation) -> Occupancy:
    """Returns knobs whose tiles are no larger than the arrays; each dim is then padded to whole tiles."""
    tile_k = _tile(k, knobs.tile_k, LEAST_TILE)
    num_steps = -(-k // tile_k)
    return dataclasses.replace(
        knobs,
        tile_m=_tile(m, knobs.tile_m, generation.row_unit(persistent=knobs.persistent)),
        tile_n=_tile(n, knobs.tile_n, LEAST_TILE),
        tile_k=tile_k,
        # More stages than steps would take shared memory for nothing; fewer than 2 are refused.
        stages=max(2, min(knobs.stages, num_steps)),
    )


def _tile(size: int, most: int, least: int) -> int:
    """Returns the tile, from repeated halving, that pads a dim least; the largest in a tie."""
    # Only multiples of `least`: the tensor cores take no other sizes.
    tiles = [most]
    while tiles[-1] % 2 == 0 and (tiles[-1] // 2) % least == 0:
        tiles.append(tiles[-1] // 2)

    def padded_size(tile: int) -> int:
        return -(-size // tile) * tile

    return min(tiles, key=lambda tile: (padded_size(tile), -tile))


# ---- how long a kernel takes, for XLA's scheduler

_REACHED = 0.6  # of the peak, for both flops and bandwidth: an assumption, not measured
_LAUNCH_NS = 2000  # to start any kernel: an assumption, too


def product_ns(m: int, n: int, k: int, *, kind: str, products: int = 1) -> int:
    """Estimates the duration of matrix products of (m, k) and (k, n) in 16 bits on a kind of device."""
    flops = products * 2 * m * n * k
    return _LAUNCH_NS + int(1e9 * flops / (_REACHED * _peak_flops_per_s(kind)))


def traffic_ns(num_bytes: int, *, kind: str) -> int:
    """Estimates the duration of a kernel that reads and writes `num_bytes` of device memory and computes little."""
    return _LAUNCH_NS + int(1e9 * num_bytes / (_REACHED * _facts(kind).hbm_bytes_per_s))


def stated(latency_ns: int) -> AbstractContextManager[object]:
    """Returns a context in which every traced operation carries this latency."""
    return set_xla_metadata(latency_metadata=str(max(1, latency_ns)))


def _peak_flops_per_s(kind: str) -> float:
    """Returns the peak of the device with this driver name in 16 bits; of an H100 if the table does not list it."""
    peak = peak_of(kind)
    if peak is None:
        return DEVICES["h100"].flops_per_s["bf16"]
    flops_per_s, _ = peak
    return flops_per_s


def _facts(kind: str) -> DeviceFacts:
    """Returns the facts of the device with this driver name; of an H100 if the table does not list it."""
    return device_of(kind) or DEVICES["h100"]


# ---- arrays of any rank as matrices for kernels


def as_matrix(x: jax.Array) -> jax.Array:
    """Returns an array with all dims but the last as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector in the rank and dtype of the array that it is combined with, row by row."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`, marks all arrays as varying over the axes that any of them varies over.

    Called outside a kernel's own gradient, so that JAX sums the devices' contributions over the axes.
    """
    axes = varying_over(*arrays)
    return tuple(vary(x, axes) for x in arrays)


def varying_over(*arrays: jax.Array) -> frozenset[str]:
    """Returns the axes over which at least one of the arrays varies."""
    return frozenset[str]().union(*map(_compat.varying_axes, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks an array as varying over some axes."""
    missing = tuple(sorted(axes - _compat.varying_axes(x)))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


# ---- which form runs, on what device, and under what name

Backend = Literal["auto", "mosaic", "interpret", "xla"]
BACKENDS = ("auto", "mosaic", "interpret", "xla")
"""Forms of a kernel: Mosaic GPU, the same step by step on a CPU, its plain twin; "auto" is the first or the last."""


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """One call of a kernel, as decided at trace time; hashable, as a static argument of its gradient."""

    name: str  # of the kernel
    form: str  # "mosaic", "interpret" or "xla"
    knobs: Occupancy  # how much of the device it may occupy
    device: TracedDevice

    @property
    def generation(self) -> Generation:
        """Returns the generation whose form of the kernel runs; step by step on a CPU it is Hopper's."""
        return generation_of(self.device.capability) or HOPPER

    @property
    def is_plain(self) -> bool:
        """Returns whether XLA compiles the twin."""
        return self.form == "xla"

    @property
    def interpret(self) -> bool:
        """Returns whether the kernel runs step by step on a CPU."""
        return self.form == "interpret"

    def named(self) -> AbstractContextManager[object]:
        """Returns a context whose operations carry the kernel's name and form, which the audit reads from a program."""
        return jax.named_scope(scope(self.name, self.form))


def decide(
    name: str,
    backend: Backend,
    occupancy: Occupancy | None,
    arrays: Collection[jax.Array],
    *,
    default: Occupancy = Occupancy(),  # frozen
    reasons: Collection[str] = (),
) -> KernelRun:
    """Decides how a kernel runs.

    Args:
        name: of the kernel.
        backend: the form that is requested.
        occupancy: the knobs that are requested; None for the default.
        arrays: all arrays of the call.
        default: the kernel's own knobs.
        reasons: the kernel's own reasons against these arrays.

    Raises:
        KernelError: it cannot run in the requested form.
    """
    check_known(name, "backend", backend, BACKENDS)
    device = device_in_use()
    # A request for the plain form needs no reasons: it can always run.
    form = "xla"
    if backend != "xla":
        all_reasons = [*_device_reasons(device, backend), *_array_reasons(arrays), *reasons]
        form = _form(name, backend, device, all_reasons)
    run = KernelRun(name, form, occupancy or default, device)
    return dataclasses.replace(run, knobs=run.knobs.on(run.generation))


def _form(name: str, backend: Backend, device: TracedDevice, reasons: Sequence[str]) -> str:
    """Returns the form for a request other than "xla"; raises if one is requested that cannot run."""
    # It may be unknown whether arrays are whole. A form that is named runs all the same; "auto" takes no risk.
    if backend == "auto" and (reasons or may_be_split()):
        return "xla"
    if not reasons:
        return "interpret" if backend == "interpret" else "mosaic"
    title = "step by step" if backend == "interpret" else "on Mosaic GPU"
    raise KernelError(
        f"{name} cannot run {title} here.",
        where=[f"backend={backend!r}", f"device: {device.kind}"],
        why="\n".join(f"{reason}." for reason in reasons),
        do='backend="auto"  # runs in plain form where the kernel cannot run',
    )


def _device_reasons(device: TracedDevice, backend: Backend) -> list[str]:
    """Returns why a kernel cannot run on a device, and over the mesh in use."""
    if backend == "interpret":
        return _interpreter_reasons(device)
    reasons = _generation_reasons(device)
    axes = automatic_axes()
    if axes:
        named = ", ".join(f"{axis}={degree}" for axis, degree in axes.items())
        reasons.append(f"arrays may be split over {named}, and a kernel needs whole arrays: XLA would gather them")
    return reasons


def _interpreter_reasons(device: TracedDevice) -> list[str]:
    """Returns why a kernel cannot run step by step, in its form for a device."""
    reasons = []
    # `automatic_axes` leaves out those of a `shard_map`, over which there are several devices, too.
    has_several_devices = region_mesh() is None and math.prod(jax.sharding.get_abstract_mesh().axis_sizes) > 1
    if automatic_axes() or has_several_devices:
        reasons.append("the kernel interpreter runs on one device, and the mesh in use has several")
    generation = generation_of(device.capability)
    if generation is not None and why_generation_unsupported(generation):
        reasons.append(why_generation_unsupported(generation))
    return reasons


def _generation_reasons(device: TracedDevice) -> list[str]:
    """Returns why no form of a kernel runs on a device."""
    generation = generation_of(device.capability)
    if generation is None:
        return [f"the kernels are written for the tensor cores of Hopper and Ampere GPUs, not for {device.kind}"]
    why_unsupported = why_generation_unsupported(generation)
    if why_unsupported:
        return [why_unsupported]
    # Of an absent GPU JAX assumes that it is a Hopper GPU, unless `jshard plan` says what it is.
    if generation is AMPERE and _compat.kernel_capability() != AMPERE.capability:
        return [f"{device.kind} is not present, and JAX compiles kernels for a GPU of another generation here"]
    return []


def why_generation_unsupported(generation: Generation) -> str:
    """Returns why the installed JAX does not compile kernels for a generation; empty if it does."""
    if generation is AMPERE and not _compat.COMPILES_FOR_AMPERE:
        return f"on {generation.title} GPUs the kernels need jax 0.12 or newer, and this is {_compat.jax_version()}"
    return ""


def _array_reasons(arrays: Collection[jax.Array]) -> list[str]:
    """Returns why a kernel cannot take arrays."""
    if any(0 in x.shape for x in arrays):
        return ["one of the arrays is empty"]
    dtypes = {np.dtype(x.dtype).name for x in arrays}
    if dtypes in ({"bfloat16"}, {"float16"}):
        return []
    return [f"all arrays must be bfloat16, or all float16, and these are {', '.join(sorted(dtypes))}"]


# ---- checks of arguments


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
    name: str,
    arrays: Mapping[str, jax.Array],
    required: Mapping[str, tuple[int, ...]],
    other_faults: Sequence[str] = (),
) -> None:
    """Raises for arrays with incompatible shapes, listing all of them after other faults.

    Args:
        name: of the kernel.
        arrays: its arrays, by argument.
        required: the shapes that they must have; an argument without one may have any.
        other_faults: sentences.
    """
    faults = list(other_faults)
    for argument, x in arrays.items():
        if argument in required and x.shape != required[argument]:
            faults.append(f"{argument} must be {required[argument]}.")
    if faults:
        raise KernelError(
            f"{name} cannot take these arrays.",
            where=[f"{argument}: {array.shape}" for argument, array in arrays.items()],
            why="\n".join(faults),
            do=f"help(js.kernels.{name})  # lists the shapes",
        )


def refuse_knobs(name: str, knobs: Occupancy, device: TracedDevice, faults: Sequence[str]) -> None:
    """Raises for knobs that need more than the GPU has."""
    if faults:
        raise KernelError(
            f"The GPU cannot run {name} with these knobs.",
            where=f"{device.kind}: {knobs}",
            why="\n".join(faults),
            do="Occupancy()  # or smaller tiles, fewer stages, less padding, fewer reserved_sms",
        )
