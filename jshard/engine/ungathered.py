"""A unit that is never gathered: its call runs as written, in global view, on parameters that stay where they are."""

from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jshard._errors import CallError
from jshard._nnx import Unit
from jshard._placement import Placement
from jshard.engine.stored import without_padding
from jshard.engine.trace import Call
from jshard.engine.units import computes_in


def run_ungathered(call: Call, unit: Unit) -> Any:
    """Calls a method of a unit that is never gathered. The compiler places what its operations communicate."""
    params = [
        x if p is None else without_padding(_held(x, p, unit), p).astype(p.gathered_dtype)
        for x, p in zip(call.guarded(call.params), call.placements, strict=True)
    ]
    with jax.named_scope(f"jshard[{unit.name or '(root)'}]"):
        outs = computes_in(call, unit.policy.mixed_precision)(params, call.inputs)
    return call.finish(outs, call.result)


def _held(stored: jax.Array, placement: Placement, unit: Unit) -> jax.Array:
    """The parameter, held to its place; so is its gradient, which the compiler would else put anywhere."""
    if not isinstance(unit.mesh, Mesh) or stored.ndim != len(placement.spec):  # shapes only, or a layer in a scan
        return stored
    return lax.with_sharding_constraint(stored, NamedSharding(unit.mesh, placement.partition_spec))


def called_inside(where: str) -> CallError:
    """The error for a call from inside the region."""
    return CallError(
        "A unit that is never gathered was called inside the sharded region.",
        where=where,
        why="inside, a device has its shards of the parameters, and gathering them is what the annotation rules out.",
        do="call it before the model, and pass what it returns: rows = model.tables(ids); model(rows, x)",
    )


def read_inside(name: str, placement: Placement, place: str) -> CallError:
    """The error for a parameter that an operation inside the region reads."""
    return CallError(
        "A parameter that is never gathered was read inside the sharded region.",
        where=f"{name}  {placement.dtype}{list(placement.shape)}, read at {place or 'a line that is not known'}",
        why=f"inside, a device has {placement.bytes_per_device} of its {placement.logical_bytes} bytes, and gathering"
        " the rest is what the annotation rules out.",
        do="read it before the model, and pass what comes of it: rows = model.tables(ids); model(rows, x)",
    )
