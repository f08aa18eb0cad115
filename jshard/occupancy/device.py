"""The device that a step is tuned for, and the matrix products of a model's units on one device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex

from jshard._text import kernels_of
from jshard.cluster.estimate import assumptions_of
from jshard.cluster.replay import Assumptions
from jshard.cluster.topology import parse_topology
from jshard.engine.context import shapes_only
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.inspect.hlo.collectives import unit_and_phase
from jshard.occupancy import GPUS, GpuFacts, OccupancyError, gpu
from jshard.plans.mesh import data_shards
from jshard.plans.plan import plan as plan_of


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as far as it is known."""

    title: str  # display name
    platform: str  # "gpu", "tpu" or "cpu"
    gpu: GpuFacts | None = None  # the limits of its multiprocessors; None if unknown, or if it has none
    facts: DeviceFacts | None = None  # its rates and links; None if unknown
    topology: str = ""  # the cluster that it was given with, e.g. "h200:64x8"; else empty
    kind: str = ""  # the present device's name by its driver; empty if it was only given by name

    def is_of(self, kind: str) -> bool:
        """Whether measurements on a kind of device, by its driver's name, are valid for this one."""
        if self.kind:
            return self.kind == kind
        try:
            return self.gpu is not None and gpu(kind).name == self.gpu.name
        except OccupancyError:
            return False

    @property
    def why_unshaped(self) -> str:
        """Why nothing is chosen for the kernels of jshard on it; empty if something is."""
        if self.gpu is not None and self.gpu.arch == "sm_90":
            return ""
        if self.gpu is None and self.platform == "gpu":
            return f"the multiprocessors of {self.title} are unknown, so nothing can be computed for it."
        return f"not a Hopper GPU ({self.title}): the plain forms run, which have no knobs."

    def assumptions(self, num_devices: int) -> Assumptions | None:
        """The assumptions of an estimate for a number of these devices; None if the device is unknown.

        Links have the lowest assumed rate: communication hidden at that rate is also hidden on faster links.
        """
        if self.facts is None:
            return None
        on_a_host = next(n for n in range(min(num_devices, 8), 0, -1) if num_devices % n == 0)
        topology = self.topology or f"{self.facts.name}:{num_devices // on_a_host}x{on_a_host}"
        slow = {"fast_bytes_per_s": self.facts.fast.range[0], "slow_bytes_per_s": self.facts.slow.range[0]}
        return dataclasses.replace(assumptions_of(parse_topology(topology)), **slow)


def device_named(name: str | None) -> Device:
    """A device by its name in a topology or in `jshard occupancy`, or with its topology, or the first one present.

    Raises:
        OccupancyError: the device is unknown; the error lists the known ones.

    Example:
        >>> device_named("h200").gpu.num_sms
        132
    """
    if name is None:
        return _running()
    name = name.strip().lower()
    short, _, shape = name.partition(":")
    facts = device_of(short)
    if short in DEVICES and DEVICES[short].platform != "gpu":
        return Device(DEVICES[short].title, DEVICES[short].platform, facts=DEVICES[short])
    if short not in DEVICES and short not in GPUS:
        known = ", ".join(dict.fromkeys([*DEVICES, *GPUS]))
        raise OccupancyError(
            f"The device {name!r} is unknown.",
            where=f"device={name!r}",
            why=f"the devices are {known}; also with a cluster, as in h200:64x8.",
            do='js.tune_overlap(model, device="h200")',
        )
    found = gpu(short)
    return Device(found.title, "gpu", found, facts, name if shape and facts else "")


def _running() -> Device:
    here = jax.devices()[0]
    kind = here.device_kind
    if here.platform not in ("gpu", "cuda", "rocm"):
        return Device(kind, here.platform)
    try:
        found = gpu(kind)
    except OccupancyError:  # of the model: the kernels may run there, but its limits are unknown
        return Device(kind, "gpu", kind=kind)
    return Device(found.title, "gpu", found, device_of(kind), kind=kind)


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class MatrixProduct:
    """A matrix product of forward; backward has two of the same size for each."""

    kernel: str  # "mlp" in a layer of `js.kernels.mlp`, else "matmul", also for products in plain form
    m: int  # rows of the output: tokens of one device
    n: int  # columns of the output
    k: int  # the dim that is summed
    dtype: str  # of the operands
    unit: str = ""  # the unit that it belongs to
    count: int = 1  # how often it is computed in forward

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them, in forward."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def is_16_bits(self) -> bool:
        """Whether the kernels support it."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def shape(self) -> str:
        """Its sizes as text, m x n x k."""
        return f"{self.m}x{self.n}x{self.k}"


def products_of(model: nnx.Module, loss: Callable[..., Any], batch: Any) -> tuple[MatrixProduct, ...]:
    """The products of forward with one matrix on each side; attention, which has a dim for heads, is excluded."""
    plan = plan_of(model)
    units, is_alone = plan.units, data_shards(dict(plan.mesh)) == 1  # then a region runs unchanged
    # A loop over stacked layers creates its own modules, which are named after their class.
    names = {unit.kind: unit.name for unit in units} | {unit.name: unit.name for unit in units}
    names[""] = units[0].name  # outside units a region belongs to the root
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params: Any, rest: Any, arguments: tuple) -> Any:
        return loss(nnx.merge(graphdef, params, rest, copy=True), *arguments)

    with shapes_only():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    counts: collections.Counter[MatrixProduct] = collections.Counter()
    for found in _walk(jaxpr, inside=is_alone, around=""):
        counts[dataclasses.replace(found, unit=names.get(found.unit, found.unit), count=1)] += found.count
    return tuple(dataclasses.replace(product, count=count) for product, count in counts.items())


def by_shape(products: tuple[MatrixProduct, ...]) -> dict[MatrixProduct, tuple[MatrixProduct, ...]]:
    """Products of equal size grouped, whatever their unit; the largest amount of work first."""
    groups: dict[MatrixProduct, list[MatrixProduct]] = {}
    for product in products:
        groups.setdefault(dataclasses.replace(product, unit="", count=1), []).append(product)
    order = sorted(groups, key=lambda key: -sum(product.flops for product in groups[key]))
    return {key: tuple(groups[key]) for key in order}


def _walk(jaxpr: Any, *, inside: bool, around: str, rounds: int = 1) -> Iterator[MatrixProduct]:
    """The products in sharded regions, where shapes are those of one device."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        # Operations traced inside a loop do not show where the loop is.
        place = f"{around}/{eqn.source_info.name_stack}"
        if name == "unit":  # its operations are named after it when it is lowered
            place = f"{place}/jshard[{eqn.params['call'].settings.name}]"
        if name == "dot_general" and inside:
            yield from _product(eqn, place, rounds)
        if name.startswith("custom_vjp_call") and _kernel(place)[1] in ("mosaic", "interpret"):
            yield from _of_kernel(eqn, place, rounds) if inside else ()
            continue  # its tiles are not products of the model
        more = rounds * (eqn.params["length"] if name == "scan" else 1)
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _walk(inner, inside=inside or name == "shard_map", around=place, rounds=more)


def _product(eqn: Any, place: str, count: int) -> Iterator[MatrixProduct]:
    (left_dims, right_dims), (batch_dims, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    if batch_dims or not left_dims:
        return
    yield MatrixProduct(
        kernel="mlp" if _kernel(place)[0] == "mlp" else "matmul",
        m=math.prod(size for dim, size in enumerate(left.shape) if dim not in left_dims),
        n=math.prod(size for dim, size in enumerate(right.shape) if dim not in right_dims),
        k=math.prod(left.shape[dim] for dim in left_dims),
        dtype=str(left.dtype),
        unit=_unit(place),
        count=count,
    )


def _of_kernel(eqn: Any, place: str, count: int) -> Iterator[MatrixProduct]:
    """The products of a call of `js.kernels.matmul` or `mlp` where it is a kernel: of x with each of the weights."""
    kernel, _ = _kernel(place)
    matrices = [v.aval for v in eqn.invars if len(v.aval.shape) == 2]
    if kernel not in ("matmul", "mlp") or not matrices:
        return
    x, *weights = matrices
    for w in weights:
        k, n = w.shape
        sizes = {"m": x.shape[0], "n": n, "k": k}
        yield MatrixProduct(kernel=kernel, **sizes, dtype=str(x.dtype), unit=_unit(place), count=count)


def _kernel(place: str) -> tuple[str, str]:
    """Name and form of the kernel that an operation is part of; empty if there is none."""
    found = kernels_of(place)
    return found[-1] if found else ("", "")


def _unit(place: str) -> str:
    units, _ = unit_and_phase(place)
    return units[-1] if units else ""
