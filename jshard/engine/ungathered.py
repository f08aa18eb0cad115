"""A unit that is never gathered: its call runs as written, in global view, on parameters that stay where they are."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jshard._errors import CallError
from jshard._nnx import Unit, dotted, plain_class
from jshard._placement import Placement
from jshard.engine.body import Body
from jshard.engine.call import Call, raw
from jshard.engine.collectives import scope
from jshard.engine.context import Region
from jshard.engine.island import refuse_absent
from jshard.engine.padded_gradients import guarded
from jshard.engine.unit import gathered_here, refuse_late


def run_ungathered(module: nnx.Module, unit: Unit, method: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls a method of a unit that is never gathered. The compiler places what its operations communicate.

    Args:
        module: the unit's module.
        unit: its record.
        method: the plain method.
        args: positional arguments after self.
        kwargs: keyword arguments.
    """
    call = Call(module, method, args, kwargs)
    refuse_absent(unit, call.where)
    refuse_late(module, call.where)
    mine = gathered_here(call, unit, True)
    body = Body(call, tuple(mine), unit.policy.mixed_precision, None)
    stored = guarded(call, [raw(variable) for _, variable in call.params])
    values = [_held(stored[i], member.placement, unit) for i, member in mine.items()]
    with jax.named_scope(scope(unit.name or dotted(()))):
        return body.finish(body.compute(values, body.others, body.inputs, body.fixed, None))


def _held(stored: jax.Array, placement: Placement, unit: Unit) -> jax.Array:
    """The parameter, held to its place; so is its gradient, which the compiler would else put anywhere."""
    if not isinstance(unit.mesh, Mesh) or stored.ndim != len(placement.spec):  # shapes only, or a layer in a scan
        return stored
    return lax.with_sharding_constraint(stored, NamedSharding(unit.mesh, placement.partition_spec))


def called_inside(module: nnx.Module, method: Callable[..., Any], region: Region) -> CallError:
    """The error for a call from inside the region."""
    return CallError(
        "A unit that is never gathered was called inside the sharded region.",
        where=f"{region.unit}: {plain_class(module).__name__}.{method.__name__}",
        why="inside, a device sees its part of the batch and its shards of the parameters, and gathering them is what"
        " the annotation rules out.",
        do="call it before the model, and pass what it returns: rows = model.tables(ids); model(rows, x)",
    )
