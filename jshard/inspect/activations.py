"""The arrays that autodiff saves between forward and backward, from a trace of the loss. Nothing is compiled or run."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import core as jex

from jshard import _compat
from jshard._types import PyTree
from jshard.api.revise import repeated_layers, revise_layers
from jshard.engine.context import shapes_only, without_update
from jshard.engine.layer_stacks import as_traced
from jshard.plans.mesh import region_degree
from jshard.plans.placement import Selection
from jshard.plans.plan import plan as make_plan
from jshard.plans.plan import root_forgotten
from jshard.plans.units import unit_of


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes on one device."""

    # Saved by autodiff between forward and backward, in addition to the stored parameters. It includes gathered
    # parameters that are kept for backward.
    saved_bytes: int
    outside_bytes: int  # the part that no layer saves: for the head and the loss
    recomputed_bytes: int  # what backward computes again of one layer, under its remat policy
    # Saved in host memory, and not included above, except that `recomputed_bytes` counts the part fetched for a layer.
    offloaded_bytes: int = 0


class SavedArray(NamedTuple):
    """A saved array; equal ones are counted together."""

    form: str  # dtype and shape
    bytes: int  # on one device
    rows: int  # size of the first dim of several, else 0
    on_host: bool = False


Saved = collections.Counter[SavedArray]
"""How often each array is saved."""


def activations(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, wrt: Selection = nnx.Param
) -> Activations:
    """Traces the loss of a model, and finds the saved arrays."""
    saved = saved_arrays(model, loss, batch, wrt=wrt)
    # Of the trace that is just done: on stages a place has some of the layers.
    stages = as_traced(make_plan(model, wrt=wrt)).stages
    without_remat = saved
    layers = repeated_layers(model)
    if any(unit_of(module).policy.remat != "none" for module in layers):  # type: ignore[union-attr]
        plain = nnx.merge(*nnx.split(model))
        revise_layers(plain, {"remat": "none"})
        without_remat = saved_arrays(plain, loss, batch, wrt=wrt)
    if stages:
        return summed(saved, without_remat, stages.depths, num_runs=stages.num_layer_runs)
    return summed(saved, without_remat, layers.values())


def summed(saved: Saved, without_remat: Saved, depths: Collection[int], *, num_runs: int | None = None) -> Activations:
    """Returns the sums of saved arrays.

    Args:
        saved: the arrays.
        without_remat: those that would be saved if no layer were recomputed.
        depths: the lengths of the model's lists of layers, as far as a device has them.
        num_runs: how often a device runs a layer in forward; by default once for each.
    """
    saved_bytes = 0
    outside_bytes = 0
    offloaded_bytes = 0
    for array, count in saved.items():
        if array.on_host:
            offloaded_bytes += count * array.bytes
            continue
        saved_bytes += count * array.bytes
        if not _is_of_layers(count, array.rows, depths):
            outside_bytes += count * array.bytes
    num_runs = num_runs or max(1, sum(depths))
    recomputed_bytes = max(0, _total_bytes(without_remat) - saved_bytes) // num_runs
    return Activations(saved_bytes, outside_bytes, recomputed_bytes, offloaded_bytes)


def _total_bytes(saved: Saved) -> int:
    return sum(count * array.bytes for array, count in saved.items())


def _is_of_layers(count: int, rows: int, depths: Collection[int]) -> bool:
    """Returns whether each layer saves an array: one array per layer, or one of a stack with a row per layer.

    The first or the last layer may save one less, or one of another shape, as its neighbour is not a layer.
    """
    num_layers = sum(depths)
    is_stack = any(rows in (depth, depth - 1) for depth in depths if depth > 1)
    return num_layers > 1 and (is_stack or count >= max(2, num_layers - 1))


# ---- the trace


def saved_arrays(model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, wrt: Selection = nnx.Param) -> Saved:
    """Returns the saved arrays, from one trace; the arguments are those of `activations`."""
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def forward(params: PyTree, rest: PyTree, arguments: tuple) -> tuple[PyTree, Callable]:
        # Copied: state that the model changes as it runs, such as dropout's counts, belongs to the inner trace.
        return jax.vjp(lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), *arguments), params)

    # The function that `jax.vjp` returns is a pytree of what it has saved, so these are results of the program.
    with shapes_only(), without_update():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    saved: Saved = collections.Counter()
    known = _ids(jaxpr.invars)
    for eqn in jaxpr.eqns:
        regions = list(_regions(eqn))
        for region in regions:
            saved.update(_saved_arrays(region.outvars, known=_ids(region.invars), num_shards=1))
        is_placed_input = eqn.primitive.name == "sharding_constraint" and id(eqn.invars[0]) in known
        if regions or is_placed_input:
            known |= _ids(eqn.outvars)  # already counted; or a parameter that is never gathered
    # Outside of regions, shapes are those of all devices.
    num_shards = region_degree(unit.mesh)
    saved.update(_saved_arrays(jaxpr.outvars, known=known, num_shards=num_shards))
    return saved


def _ids(variables: Iterable[jex.Var | jex.Literal]) -> set[int]:
    return {id(variable) for variable in variables}  # literals cannot be hashed


def _regions(eqn: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """Yields the bodies of the sharded regions in an equation: their shapes are those of one device."""
    for inner in jex.jaxprs_in_params(eqn.params):
        if eqn.primitive.name == "shard_map":
            yield inner
        else:
            for nested in inner.eqns:
                yield from _regions(nested)


def _saved_arrays(
    variables: Iterable[jex.Var | jex.Literal], *, known: set[int], num_shards: int
) -> Iterator[SavedArray]:
    """Yields the outputs of a program that are not known already, each once."""
    counted = set(known)
    for variable in variables:
        if not isinstance(variable, jex.Literal) and id(variable) not in counted:
            counted.add(id(variable))
            yield _saved_array(variable.aval, num_shards)


def _saved_array(aval: Any, num_shards: int) -> SavedArray:
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return SavedArray("key", 0, 0)  # random keys
    rows = aval.shape[0] if len(aval.shape) > 1 else 0
    num_bytes = math.prod(aval.shape) * aval.dtype.itemsize // num_shards
    return SavedArray(f"{aval.dtype}{aval.shape}", num_bytes, rows, _compat.on_host(aval))
