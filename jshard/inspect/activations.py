"""What backward needs of forward, read off the traced program: an estimate, as the compiler has the last word."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex

from jshard import _compat
from jshard._mesh import data_degree
from jshard._nnx import unit_of
from jshard._plan import root_forgotten
from jshard._revise import repeated_layers, revise
from jshard.engine.context import shapes_only, without_update

Saved = collections.Counter
"""How often an array of (shape and dtype, bytes on one device, first dim) is saved."""

_ON_HOST = " on the host"


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes on one device.

    Args:
        saved_bytes: what autodiff saves between forward and backward, besides the stored parameters. Gathered
            parameters that are kept for backward are among them.
        outside_bytes: the part of it that no layer saves: what the head and the loss need.
        recomputed_bytes: what backward computes again of one layer, under its remat policy.
        offloaded_bytes: what is saved in host memory; it is not in the others, but `recomputed_bytes` counts what
            is fetched of a layer.
    """

    saved_bytes: int
    outside_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int = 0


def activations(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Activations:
    """Traces the loss of a model, and looks at what is saved. Nothing is compiled or run.

    Args:
        model: the annotated model; its arrays and its mesh may be abstract.
        loss: called with the model and the batch, as in training.
        batch: the global batch, abstract or real; a tuple stands for several arguments.
        wrt: the parameters that are trained, as in `js.plan`.
    """
    saved = saved_arrays(model, loss, batch, wrt=wrt)
    layers = repeated_layers(model)
    if all(unit_of(module).policy.remat == "none" for module in layers):  # type: ignore[union-attr]
        return summed(saved, saved, layers.values())
    whole = nnx.merge(*nnx.split(model))
    revise(whole, {"remat": "none"})
    return summed(saved, saved_arrays(whole, loss, batch, wrt=wrt), layers.values())


def summed(saved: Saved, whole: Saved, depths: Collection[int]) -> Activations:
    """The sums.

    Args:
        saved: what is saved.
        whole: what would be saved if nothing were computed again.
        depths: of the units that repeat, how many layers each holds.
    """
    here = Saved({kind: n for kind, n in saved.items() if not kind[0].endswith(_ON_HOST)})
    outside = sum(n * size for (_, size, rows), n in here.items() if not _of_layers(n, rows, depths))
    again = max(0, _total(whole) - _total(here)) // max(1, sum(depths))
    return Activations(_total(here), outside, again, _total(saved) - _total(here))


def saved_arrays(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Saved:
    """What is saved, from one trace; the arguments are those of `activations`."""
    if unit_of(model) is None:
        raise root_forgotten(model)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def forward(params: Any, rest: Any, arguments: tuple) -> Any:
        # Copied: what the model changes as it runs, as dropout's counts, belongs to the inner trace.
        return jax.vjp(lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), *arguments), params)

    with shapes_only(), without_update():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    found, known = Saved(), set(map(id, jaxpr.invars))
    for eqn in jaxpr.eqns:
        regions = list(_regions(eqn))
        for region in regions:
            found.update(_kind(v.aval, 1) for v in _new(region.outvars, set(map(id, region.invars))))
        if regions or (eqn.primitive.name == "sharding_constraint" and id(eqn.invars[0]) in known):
            known.update(map(id, eqn.outvars))  # counted; or a parameter that is never gathered, held where it lies
    shards = data_degree(unit_of(model).mesh)  # type: ignore[union-attr]
    found.update(_kind(v.aval, shards) for v in _new(jaxpr.outvars, known))
    return found


def _total(saved: Saved) -> int:
    return sum(n * size for (_, size, _), n in saved.items())


def _of_layers(count: int, rows: int, depths: Collection[int]) -> bool:
    """Whether an array is saved by each of the layers: one for each, or one for all of a stack with a row for each."""
    layers = sum(depths)
    is_stack = any(rows in (depth, depth - 1) for depth in depths if depth > 1)
    return layers > 1 and (is_stack or count >= max(2, layers - 1))


def _regions(eqn: Any) -> Iterator[Any]:
    """The bodies of the sharded regions in an equation: their shapes are those of one device."""
    for inner in jex.jaxprs_in_params(eqn.params):
        if eqn.primitive.name == "shard_map":
            yield inner
        else:
            for nested in inner.eqns:
                yield from _regions(nested)


def _new(variables: Any, given: set[int]) -> list[Any]:
    """What a program hands out and was not given, each array once."""
    return list({id(v): v for v in variables if not isinstance(v, jex.Literal) and id(v) not in given}.values())


def _kind(aval: Any, shards: int) -> tuple[str, int, int]:
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return "key", 0, 0  # random keys
    rows = aval.shape[0] if len(aval.shape) > 1 else 0
    place = _ON_HOST if _compat.on_host(aval) else ""
    return f"{aval.dtype}{aval.shape}{place}", math.prod(aval.shape) * aval.dtype.itemsize // shards, rows
