"""What backward needs of forward, read off the traced program: an estimate, as the compiler has the last word."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex

from jshard._mesh import data_degree
from jshard._nnx import unit_of
from jshard._plan import root_forgotten
from jshard.engine.context import shapes_only


def saved_bytes(model: nnx.Module, loss: Callable[..., Any], batch: Any) -> int:
    """Bytes on one device that autodiff saves between forward and backward, besides the stored parameters.

    Gathered parameters that are kept for backward are among them. Nothing is compiled or run.

    Args:
        model: the annotated model; its arrays and its mesh may be abstract.
        loss: called with the model and the batch, as in training.
        batch: the global batch, abstract or real; a tuple stands for several arguments.
    """
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params: Any, rest: Any, arguments: tuple) -> Any:
        # Copied: what the model changes as it runs, as dropout's counts, belongs to the inner trace.
        return jax.vjp(lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), *arguments), params)

    with shapes_only():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    inside, known = 0, set(map(id, jaxpr.invars))
    for eqn in jaxpr.eqns:
        regions = list(_regions(eqn))
        inside += sum(_new_bytes(region) for region in regions)
        if regions:
            known.update(map(id, eqn.outvars))
    outside = {id(v): v for v in jaxpr.outvars if not isinstance(v, jex.Literal) and id(v) not in known}
    return inside + sum(_bytes(v.aval) for v in outside.values()) // data_degree(unit.mesh)


def _regions(eqn: Any) -> Iterator[Any]:
    """The bodies of the sharded regions in an equation: their shapes are those of one device."""
    for inner in jex.jaxprs_in_params(eqn.params):
        if eqn.primitive.name == "shard_map":
            yield inner
        else:
            for nested in inner.eqns:
                yield from _regions(nested)


def _new_bytes(region: Any) -> int:
    """Bytes of what a region hands out and was not given, each array once."""
    given = set(map(id, region.invars))
    out = {id(v): v for v in region.outvars if not isinstance(v, jex.Literal) and id(v) not in given}
    return sum(_bytes(v.aval) for v in out.values())


def _bytes(aval: Any) -> int:
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0  # random keys
    return math.prod(aval.shape) * aval.dtype.itemsize
