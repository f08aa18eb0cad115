"""What forward and backward of a loss take on one device, from a trace: live values and kernels."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core as jex

from jshard._types import PyTree
from jshard.engine.context import shapes_only, without_update
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.inspect.live_values import LiveBytes, live_bytes
from jshard.inspect.traced_loss import loss_of_parameters
from jshard.inspect.traced_program import SizeOf, program_of
from jshard.inspect.traced_work import DataCollective, KernelWork, data_collectives, kernels
from jshard.plans.mesh import region_degree
from jshard.plans.placement import Selection
from jshard.plans.plan import root_forgotten
from jshard.plans.units import unit_of


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """Forward and backward of one microbatch, on one device."""

    live: LiveBytes
    kernels: tuple[KernelWork, ...]
    collectives: tuple[DataCollective, ...]  # that send neither parameters nor gradients


def traced_step(
    model: nnx.Module,
    loss: Callable[..., PyTree],
    batch: PyTree,
    *,
    wrt: Selection = nnx.Param,
    size_of: SizeOf | None = None,
) -> TracedStep:
    """Traces the loss of a model and its gradient.

    Args:
        model: annotated; it may be abstract.
        loss: function of the model and the batch.
        batch: the global batch; a tuple is passed as several arguments.
        wrt: the parameters that are trained.
        size_of: the bytes of a value on one device; those of its type in a region by default.
    """
    return traced_gradient(model, loss, batch, wrt=wrt).step(size_of)


@dataclasses.dataclass(frozen=True)
class TracedGradient:
    """A trace of a loss and its gradient, of which steps with values of several sizes can be made."""

    jaxpr: jex.Jaxpr
    num_parameters: int  # inputs that are parameters, or other state; they are the first
    num_shards: int  # of a value outside of sharded regions

    def step(self, size_of: SizeOf | None = None, tensor: int | None = None) -> TracedStep:
        """Returns what it takes on one device.

        Args:
            size_of: the bytes of a value on one device; those of its type in a region by default.
            tensor: the degree of that axis; the traced one by default.
        """
        program = program_of(
            self.jaxpr,
            parameters=[place < self.num_parameters for place in range(len(self.jaxpr.invars))],
            gradients=[place > 0 for place in range(len(self.jaxpr.outvars))],
            num_shards=self.num_shards,
            size_of=size_of,
            tensor=tensor,
        )
        return TracedStep(live_bytes(program), tuple(kernels(program)), tuple(data_collectives(program)))


def traced_gradient(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, wrt: Selection = nnx.Param
) -> TracedGradient:
    """Traces the loss of a model and its gradient; the arguments are those of `traced_step`."""
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    loss_of, arguments = loss_of_parameters(model, loss, batch, wrt)

    def gradient(params: PyTree, rest: PyTree, of_batch: tuple[PyTree, ...]) -> tuple[jax.Array, PyTree]:
        def without_metrics(params: PyTree) -> jax.Array:
            result = loss_of(params, rest, of_batch)
            return jax.tree.leaves(result)[0]

        value, backward = jax.vjp(without_metrics, params)
        (gradients,) = backward(jnp.ones_like(value))
        return value, gradients

    with shapes_only(), without_update():
        jaxpr = jax.make_jaxpr(gradient)(*arguments).jaxpr
    params, rest, _ = arguments
    # State that is not trained, such as running averages, is counted as held, too.
    num_parameters = len(jax.tree.leaves((params, rest)))
    return TracedGradient(jaxpr, num_parameters, region_degree(unit.mesh))


# ---- other batches


def step_for_rows(low: TracedStep, high: TracedStep, rows: tuple[int, int], wanted: float) -> TracedStep:
    """Returns the step for another number of rows: all that it takes grows linearly.

    Args:
        low: the step for a small batch.
        high: the step for a larger one.
        rows: their rows on one device.
        wanted: the rows of the result.
    """
    is_same_program = len(low.kernels) == len(high.kernels) and len(low.collectives) == len(high.collectives)
    rows_low, rows_high = rows
    if not is_same_program:
        # The size of the batch decides what is computed: then the larger one is nearer to real ones.
        low = _of_no_rows(high)
        rows_low = 0
    share = (wanted - rows_low) / (rows_high - rows_low)
    live = LiveBytes(
        _between(low.live.in_layers, high.live.in_layers, share),
        _between(low.live.outside, high.live.outside, share),
    )
    kernels_of_rows = []
    for at_low, at_high in zip(low.kernels, high.kernels, strict=True):
        work = _work_between(at_low.work, at_high.work, share)
        kernels_of_rows.append(dataclasses.replace(at_low, work=work))
    collectives = []
    for of_low, of_high in zip(low.collectives, high.collectives, strict=True):
        device_bytes = _between(of_low.device_bytes, of_high.device_bytes, share)
        collectives.append(dataclasses.replace(of_low, device_bytes=device_bytes))
    return TracedStep(live, tuple(kernels_of_rows), tuple(collectives))


def _of_no_rows(step: TracedStep) -> TracedStep:
    """Returns the program of a step for an empty batch."""
    collectives = []
    for collective in step.collectives:
        collectives.append(dataclasses.replace(collective, device_bytes=0.0))
    return TracedStep(LiveBytes(0.0, 0.0), _without_work(step.kernels), tuple(collectives))


def _without_work(kernels: tuple[KernelWork, ...]) -> tuple[KernelWork, ...]:
    """Returns kernels of an empty batch, whose products have the sizes of those of a full one."""
    empty = []
    for kernel in kernels:
        products = []
        for product in kernel.work.products:
            products.append(dataclasses.replace(product, flops=0.0))
        work = OpWork(tuple(products))
        empty.append(dataclasses.replace(kernel, work=work))
    return tuple(empty)


def _work_between(low: OpWork, high: OpWork, share: float) -> OpWork:
    products = []
    for at_low, at_high in zip(low.products, high.products, strict=True):
        products.append(_product_between(at_low, at_high, share))
    memory_bytes = _between(low.memory_bytes, high.memory_bytes, share)
    return OpWork(tuple(products), memory_bytes)


def _product_between(low: EqualProducts, high: EqualProducts, share: float) -> EqualProducts:
    flops = _between(low.flops, high.flops, share)
    sizes = []
    for at_low, at_high in zip(low.sizes, high.sizes, strict=True):
        sizes.append(_between(at_low, at_high, share))
    return dataclasses.replace(low, flops=flops, sizes=tuple(sizes))


def _between(low: float, high: float, share: float) -> float:
    return max(0.0, low + share * (high - low))
