"""The matrix products of a model's units on one device, found in its traced forward."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import cast

import jax
from flax import nnx
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.extend.core import Jaxpr, JaxprEqn

from jshard._text import kernels_of
from jshard._types import PyTree
from jshard.engine.context import shapes_only
from jshard.inspect.hlo.collectives import unit_and_phase
from jshard.plans.mesh import data_shards
from jshard.plans.plan import UnitPlan
from jshard.plans.plan import plan as plan_of


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
        """Returns the floating-point operations of all of them, in forward."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def is_16_bits(self) -> bool:
        """Returns whether the kernels support it."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def shape(self) -> str:
        """Returns its sizes as text, m x n x k."""
        return f"{self.m}x{self.n}x{self.k}"


def products_of(model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree) -> tuple[MatrixProduct, ...]:
    """Returns the products of forward with one matrix on each side.

    Attention, which has a dim for heads, is excluded.

    Args:
        model: an annotated model.
        loss: function of the model and the batch.
        batch: a tuple is passed as several arguments.
    """
    plan = plan_of(model)
    unit_names = _unit_names(plan.units)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params: PyTree, rest: PyTree, arguments: tuple) -> PyTree:
        return loss(nnx.merge(graphdef, params, rest, copy=True), *arguments)

    with shapes_only():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    # On a single data shard a region runs unchanged: there is no shard_map to look for.
    is_one_shard = data_shards(dict(plan.mesh)) == 1
    counts: collections.Counter[MatrixProduct] = collections.Counter()
    for product in products_in(jaxpr, in_region=is_one_shard):
        unit = unit_names.get(product.unit, product.unit)
        counts[dataclasses.replace(product, unit=unit, count=1)] += product.count
    return tuple(dataclasses.replace(product, count=count) for product, count in counts.items())


def _unit_names(units: tuple[UnitPlan, ...]) -> dict[str, str]:
    """Returns the names of units in the plan, by their names in the program."""
    names = {}
    # A loop over stacked layers creates its own modules, which are named after their class.
    for unit in units:
        names[unit.kind] = unit.name
    for unit in units:
        names[unit.name] = unit.name
    names[""] = units[0].name  # outside units a region belongs to the root
    return names


def by_shape(products: tuple[MatrixProduct, ...]) -> dict[MatrixProduct, tuple[MatrixProduct, ...]]:
    """Groups products of equal size, whatever their unit; the largest amount of work first."""
    groups: dict[MatrixProduct, list[MatrixProduct]] = {}
    for product in products:
        size = dataclasses.replace(product, unit="", count=1)
        groups.setdefault(size, []).append(product)

    def total_flops(size: MatrixProduct) -> float:
        return sum(product.flops for product in groups[size])

    return {size: tuple(groups[size]) for size in sorted(groups, key=total_flops, reverse=True)}


# ---- the program


def products_in(jaxpr: Jaxpr, *, in_region: bool, scope: str = "", executions: int = 1) -> Iterator[MatrixProduct]:
    """Yields the products in sharded regions, where shapes are those of one device.

    Args:
        jaxpr: the program, or a part of it.
        in_region: whether the part is in a region.
        scope: the names of the modules and units around it.
        executions: how often the part runs in forward.
    """
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        # Operations traced inside a loop do not show where the loop is.
        eqn_scope = f"{scope}/{eqn.source_info.name_stack}"
        if primitive == "unit":  # its operations are named after it when it is lowered
            eqn_scope = f"{eqn_scope}/jshard[{eqn.params['call'].settings.name}]"
        if primitive == "dot_general" and in_region:
            yield from _plain_product(eqn, eqn_scope, executions)
        if primitive.startswith("custom_vjp_call") and _is_kernel(eqn_scope):
            if in_region:
                yield from _kernel_products(eqn, eqn_scope, executions)
            continue  # its tiles are not products of the model
        repeats = eqn.params["length"] if primitive == "scan" else 1
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from products_in(
                inner,
                in_region=in_region or primitive == "shard_map",
                scope=eqn_scope,
                executions=executions * repeats,
            )


def _plain_product(eqn: JaxprEqn, scope: str, count: int) -> Iterator[MatrixProduct]:
    """Yields the product of an equation, unless it is one of many small ones, as in attention, or sums nothing."""
    (left_summed, right_summed), (batch_dims, _) = eqn.params["dimension_numbers"]
    if batch_dims or not left_summed:
        return
    left, right = _array_types(eqn)
    kernel, _ = _innermost_kernel(scope)
    yield MatrixProduct(
        kernel="mlp" if kernel == "mlp" else "matmul",
        m=_size_without(left.shape, left_summed),
        n=_size_without(right.shape, right_summed),
        k=math.prod(left.shape[dim] for dim in left_summed),
        dtype=str(left.dtype),
        unit=_innermost_unit(scope),
        count=count,
    )


def _size_without(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    """Returns the elements along all dims except some."""
    return math.prod(size for dim, size in enumerate(shape) if dim not in dims)


def _kernel_products(eqn: JaxprEqn, scope: str, count: int) -> Iterator[MatrixProduct]:
    """Yields the products of a call of `js.kernels.matmul` or `mlp` where it is a kernel: of x with each weight."""
    kernel, _ = _innermost_kernel(scope)
    matrices = [operand for operand in _array_types(eqn) if len(operand.shape) == 2]
    if kernel not in ("matmul", "mlp") or not matrices:
        return
    x, *weights = matrices
    for weight in weights:
        k, n = weight.shape
        yield MatrixProduct(
            kernel=kernel,
            m=x.shape[0],
            n=n,
            k=k,
            dtype=str(x.dtype),
            unit=_innermost_unit(scope),
            count=count,
        )


def _array_types(eqn: JaxprEqn) -> list[ShapedArray]:
    """Returns the types of an equation's operands."""
    return [cast(ShapedArray, variable.aval) for variable in eqn.invars]


def _is_kernel(scope: str) -> bool:
    """Returns whether a call is of a kernel of jshard, and not of its plain form."""
    _, form = _innermost_kernel(scope)
    return form in ("mosaic", "interpret")


def _innermost_kernel(scope: str) -> tuple[str, str]:
    """Returns the name and form of the kernel that an operation is part of; empty if there is none."""
    kernels = kernels_of(scope)
    return kernels[-1] if kernels else ("", "")


def _innermost_unit(scope: str) -> str:
    """Returns the name of the unit that an operation is part of; empty if there is none."""
    units, _ = unit_and_phase(scope)
    return units[-1] if units else ""
