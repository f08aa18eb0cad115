"""The arrays that autodiff saves between forward and backward, from a trace of the loss. Nothing is compiled or run."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import core as jex

from jshard import _compat
from jshard._types import PyTree
from jshard.api.revise import repeated_layers
from jshard.engine.context import shapes_only, without_update
from jshard.engine.layer_stacks import as_traced
from jshard.inspect.live_values import LiveBytes
from jshard.inspect.partitioned import ArrayForm, shares_over_tensor
from jshard.inspect.traced_loss import loss_of_parameters
from jshard.inspect.traced_program import bytes_of
from jshard.inspect.traced_step import traced_step
from jshard.plans.mesh import TENSOR, region_degree
from jshard.plans.placement import Selection
from jshard.plans.plan import plan as make_plan
from jshard.plans.plan import root_forgotten
from jshard.plans.units import unit_of

_NOTHING = LiveBytes(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes on one device."""

    # Saved by autodiff between forward and backward, in addition to the stored parameters. It includes gathered
    # parameters that are kept for backward.
    saved_bytes: int
    outside_bytes: int  # the part that no layer saves: for the head and the loss
    offloaded_bytes: int = 0  # saved in host memory, and not included above
    live: LiveBytes = _NOTHING  # the most at one time, with what is computed from what is saved


class SavedArray(NamedTuple):
    """A saved array; equal ones are counted together."""

    form: ArrayForm
    dtype: str
    bytes: int  # on one device
    rows: int  # size of the first dim of several, else 0
    on_host: bool = False
    over_tensor: float = 0.0  # the share of equal ones that the devices along `tensor` split


Saved = collections.Counter[SavedArray]
"""How often each array is saved."""


def activations(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, wrt: Selection = nnx.Param
) -> Activations:
    """Traces the loss of a model and its gradient, and finds the saved arrays and what is live at once."""
    live = traced_step(model, loss, batch, wrt=wrt).live
    saved = saved_arrays(model, loss, batch, wrt=wrt)
    # Of the trace that is just done: on stages a place has some of the layers.
    stages = as_traced(make_plan(model, wrt=wrt)).stages
    depths = stages.depths if stages else repeated_layers(model).values()
    return dataclasses.replace(summed(saved, depths), live=live)


def summed(saved: Saved, depths: Collection[int]) -> Activations:
    """Returns the sums of saved arrays.

    Args:
        saved: the arrays.
        depths: the lengths of the model's lists of layers, as far as a device has them.
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
    return Activations(saved_bytes, outside_bytes, offloaded_bytes)


def over_tensor(saved: Saved, *, traced_degree: int, degree: int) -> Saved:
    """Returns the arrays of a device for another degree of the axis `tensor`: it has other parts of some.

    Args:
        saved: the arrays, of one degree.
        traced_degree: that degree.
        degree: the other one.
    """
    result: Saved = collections.Counter()
    for array, count in saved.items():
        whole_bytes = array.bytes / _kept_part(array.over_tensor, traced_degree)
        result[array._replace(bytes=int(whole_bytes * _kept_part(array.over_tensor, degree)))] += count
    return result


def size_of_part(aval: Any, *, shares: Mapping[ArrayForm, float], degree: int) -> float:
    """Returns the bytes of a value on one device along `tensor`.

    Args:
        aval: its type.
        shares: which share of the values of each form is split.
        degree: of the axis.
    """
    num_bytes = bytes_of(aval)
    if not num_bytes:
        return 0.0
    form = ArrayForm(aval.dtype.itemsize, tuple(aval.shape))
    share = shares.get(form)
    if share is None:  # as a value of the same shape and another dtype
        alike = [other for known, other in shares.items() if known.shape == form.shape]
        share = max(alike, default=None)
    if share is None:
        alike = [other for known, other in shares.items() if _is_divided(known.shape, form.shape)]
        share = max(alike, default=0.0)
    return num_bytes * _kept_part(share, degree)


def _is_divided(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether another shape is that of the same array with one of its dims divided into several."""
    num_more = len(other) - len(shape)
    if num_more < 1:
        return False
    for dim, size in enumerate(shape):
        divided = other[dim : dim + num_more + 1]
        rest = (*other[:dim], *other[dim + num_more + 1 :])
        if math.prod(divided) == size and rest == (*shape[:dim], *shape[dim + 1 :]):
            return True
    return False


def _kept_part(share: float, degree: int) -> float:
    """Returns which part of some arrays a device of the axis `tensor` has, if the devices split a share of them."""
    return 1 - share + share / degree


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
    forward, arguments = _forward_pass(model, loss, batch, wrt)
    with shapes_only(), without_update():
        program = jax.make_jaxpr(forward)(*arguments)
    tensor = dict(unit.mesh.shape).get(TENSOR, 1)
    shares: Mapping[ArrayForm, float] = {}
    if tensor > 1:
        # Of another function: one that it knows JAX does not trace again, though for another device.
        forward, arguments = _forward_pass(model, loss, batch, wrt)
        shares = shares_over_tensor(forward, arguments, unit.mesh)
    saved: Saved = collections.Counter()
    for array in _saved_arrays(program.jaxpr, region_degree(unit.mesh)):
        share = _share_of(array.form, shares)
        num_bytes = int(array.bytes * _kept_part(share, tensor))
        saved[array._replace(bytes=num_bytes, over_tensor=share)] += 1
    return saved


def _share_of(form: ArrayForm, shares: Mapping[ArrayForm, float]) -> float:
    """Returns which share of the arrays of a form is split over `tensor`.

    The plain operations in the place of a kernel may take the sequence in parts. Then an array is like those that have
    its last two dims: heads, and the elements of a head.
    """
    if form in shares or len(form.shape) < 3:
        return shares.get(form, 0.0)
    alike = []
    for other, share in shares.items():
        if len(other.shape) == len(form.shape) and other.shape[-2:] == form.shape[-2:]:
            alike.append(share)
    return sum(alike) / len(alike) if alike else 0.0


def _forward_pass(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, wrt: Selection
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Returns a function whose results are what a forward pass saves, and its arguments."""
    loss_of, arguments = loss_of_parameters(model, loss, batch, wrt)

    def forward(params: PyTree, rest: PyTree, of_batch: tuple[PyTree, ...]) -> tuple[PyTree, Callable]:
        # The function that `jax.vjp` returns is a pytree of what it has saved, so these are results of the program.
        return jax.vjp(lambda params: loss_of(params, rest, of_batch), params)

    return forward, arguments


def _saved_arrays(jaxpr: jex.Jaxpr, num_shards: int) -> Iterator[SavedArray]:
    """Yields what a forward pass saves, each array once: results of its regions, and of what is between them.

    Args:
        jaxpr: the forward pass.
        num_shards: over which arrays outside of regions are split.
    """
    known = _ids(jaxpr.invars)
    for eqn in jaxpr.eqns:
        regions = list(_regions(eqn))
        for region in regions:
            yield from _new_arrays(region.outvars, known=_ids(region.invars), num_shards=1)
        is_placed_input = eqn.primitive.name == "sharding_constraint" and id(eqn.invars[0]) in known
        if regions or is_placed_input:
            known |= _ids(eqn.outvars)  # already counted; or a parameter that is never gathered
    # Outside of regions, shapes are those of all devices.
    yield from _new_arrays(jaxpr.outvars, known=known, num_shards=num_shards)


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


def _new_arrays(
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
        return SavedArray(ArrayForm(0, ()), "key", 0, 0)  # random keys
    rows = aval.shape[0] if len(aval.shape) > 1 else 0
    form = ArrayForm(aval.dtype.itemsize, tuple(aval.shape))
    return SavedArray(form, str(aval.dtype), form.bytes // num_shards, rows, _compat.on_host(aval))
