"""A unit's call in global view as a Flax user would write it: what jshard is compared with.

Parameters are cast to the dtype of computation, blocks run under `jax.checkpoint`, and what goes in and out is held to
be split along the batch, as models that leave sharding to the compiler do: without it, it may split anything along
anything.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._mesh import data_axes, data_degree
from jshard._nnx import NESTED, OWN, Unit
from jshard._offload import fetched
from jshard.engine.call import is_array, is_nnx
from jshard.engine.region import remat_of
from jshard.engine.stored import without_padding
from jshard.engine.trace import Call
from jshard.engine.units import computes_in


def run_as_flax(take_apart: Callable[[tuple, dict[str, Any]], Call], unit: Unit, args: tuple, kwargs: dict) -> Any:
    """Calls a method of a unit's module in global view, cast, and under `jax.checkpoint`.

    Args:
        take_apart: makes the call of its arguments.
        unit: the unit's record.
        args: positional arguments after self.
        kwargs: keyword arguments.
    """
    call = take_apart(*_split_along_batch((args, kwargs), unit))
    gathers = (OWN,) if unit.nested else {*call.owners} - {NESTED}
    params = [
        x if p is None else without_padding(fetched(x), p).astype(p.gathered_dtype if owner in gathers else x.dtype)
        for x, p, owner in zip(call.params, call.placements, call.owners, strict=True)
    ]
    compute, remat = computes_in(call, unit.policy.mixed_precision), remat_of(unit)
    if remat != "none":
        compute = jax.checkpoint(compute, policy=None if remat == "full" else remat)
    outs = compute(params, call.inputs)
    passed = 2 * len(call.written)  # parameters that a transformation wrote back
    return _split_along_batch(call.finish(outs[: len(outs) - passed], call.result), unit)


def _split_along_batch(tree: Any, unit: Unit) -> Any:
    axes, shards = data_axes(unit.mesh), data_degree(unit.mesh)

    def split(x: Any) -> Any:
        if not is_array(x) or x.ndim < 2 or x.shape[0] % shards or not isinstance(unit.mesh, Mesh):
            return x
        entries = [axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
        return lax.with_sharding_constraint(x, NamedSharding(unit.mesh, PartitionSpec(*entries)))

    return jax.tree.map(split, tree, is_leaf=is_nnx)
