"""A parameter read outside its own unit, inside the region: gathered on the read, or refused; never the shard."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex
from jax.sharding import Mesh

from jshard import _compat
from jshard._errors import CallError
from jshard._padded import unpadded
from jshard._placement import Placement
from jshard.engine import gloo
from jshard.engine.collectives import gather
from jshard.engine.context import current_region

_KEY = "jshard"
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Stored:
    """Variable metadata inside the region: how the shard in this variable becomes the parameter."""

    placement: Placement
    mesh: Mesh


class _GatheredReads:
    """Mixed into the variable's own class while it holds a shard: every read is of the whole parameter."""

    __slots__ = ()

    def get_value(self: Any, *, index: Any = _MISSING) -> jax.Array:
        full = gathered_read(self.get_raw_value(), self.get_metadata(_KEY))
        return full[index] if index is not _MISSING and index is not Ellipsis else full

    @property
    def shape(self: Any) -> tuple[int, ...]:
        shape = self.get_raw_value().shape
        return self.get_metadata(_KEY).placement.shape[-len(shape) :] if shape else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def gathered_read(shard: Any, stored: Stored) -> jax.Array:
    """The whole parameter, where a shard of it is read.

    Raises:
        CallError: it is never gathered.
    """
    region = current_region()
    unit = region.unit if region else ""
    if not stored.placement.gathered:
        raise _read_inside(stored.placement, unit)
    return gather(shard, stored.placement, stored.mesh, unit)


def _read_inside(placement: Placement, unit: str) -> CallError:
    return CallError(
        "A parameter that is never gathered was read inside the sharded region.",
        where=f"{unit}: a parameter {placement.dtype}{list(placement.shape)}",
        why="only this device's shard of it is there, and gathering it is what the annotation rules out.",
        do="read it before the model, and pass what comes of it: rows = model.tables(ids); model(rows, x)",
    )


@functools.cache
def _gathered_class(base: type[nnx.Variable]) -> type[nnx.Variable]:
    body = {"__slots__": (), "__module__": base.__module__, "_jshard_base": base}
    metaclass: Any = type(base)
    return metaclass(base.__name__, (_GatheredReads, base), body)


def hold_shard(variable: nnx.Variable, placement: Placement, mesh: Mesh) -> None:
    """From now on the variable holds a shard, and a read of it gathers."""
    variable.set_metadata(_KEY, Stored(placement, mesh))
    object.__setattr__(variable, "__class__", _gathered_class(type(variable)))


def stored_in(variable: nnx.Variable) -> Stored | None:
    """How the shard in a variable becomes the parameter; None if it holds no shard."""
    return variable.get_metadata(_KEY, None)


def hold_full(variable: nnx.Variable) -> None:
    """From now on the variable holds the whole parameter; a read is a plain read."""
    base = getattr(type(variable), "_jshard_base", None)
    if base is not None:
        object.__setattr__(variable, "__class__", unpadded(base))
        variable.del_metadata(_KEY)


# What may happen to a shard before its all-gather: it is passed on, recast, stacked or picked by layer.
_PASSING = frozenset(
    "broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice expand_dims name"
    " optimization_barrier pcast pvary reshape slice split squeeze stack transpose".split()
)


def guard(function: Callable, shards: dict[int, str], where: str, args: Sequence) -> Any:
    """Runs a traced function and refuses it if a shard reaches anything but an all-gather.

    `nnx.state(...)` of an inner unit hands out raw arrays, which no read hook sees; inside the region they are
    shards. The traced program shows their every use.

    Args:
        function: function of arrays, to be traced once.
        shards: path of the parameter, by flat position of its shard among the arguments.
        where: the call, for the message.
        args: its arguments.
    """
    if not shards:
        return function(*args)
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    marked = [shards.get(i) for i in range(len(closed.jaxpr.invars))]
    misuse: dict[str, str] = {}
    escaped = _follow(closed.jaxpr, marked, misuse)
    misuse |= {path: "returned" for path in escaped if path is not None}
    if misuse:
        raise CallError(
            "A parameter's local shard was used as if it were the parameter.",
            where=[f"{where}: {path}  ({how})" for path, how in misuse.items()],
            why="nnx.state, nnx.split and jax.tree.leaves hand out raw arrays; inside the sharded region they are"
            " this device's shards.",
            do="read the variable, model.block.kernel[...], which gathers; or do it outside the model.",
        )
    flat = jex.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), flat)


def _follow(jaxpr: Any, marked: Sequence[str | None], misuse: dict[str, str]) -> list[str | None]:
    """Marks of a jaxpr's outputs, given those of its inputs; notes each use that is not allowed."""
    marks = {v: m for v, m in zip(jaxpr.invars, marked, strict=True) if m is not None}
    look = lambda a: None if isinstance(a, jex.Literal) else marks.get(a)
    for eqn in jaxpr.eqns:
        ins = [look(a) for a in eqn.invars]
        first = next((m for m in ins if m is not None), None)
        if first is None:
            continue
        name = eqn.primitive.name
        inner = list(jex.jaxprs_in_params(eqn.params))
        if name == "all_gather" or gloo.stands_for(_compat.scope_of(eqn)):
            continue
        if inner:
            found = _through(inner, ins, len(eqn.outvars), misuse)
        elif name in _PASSING:
            found = ins if len(ins) == len(eqn.outvars) else [first] * len(eqn.outvars)
        else:
            misuse.setdefault(first, f"by {name}")
            continue
        marks |= {v: m for v, m in zip(eqn.outvars, found, strict=True) if m is not None}
    return [look(v) for v in jaxpr.outvars]


def _through(inner: Sequence, ins: list[str | None], num_outs: int, misuse: dict[str, str]) -> list[str | None]:
    """Follows the marks into a loop, a branch or a call: the inner jaxpr takes the last of the operands."""
    found: list[str | None] = [None] * num_outs
    for jaxpr in inner:
        if len(jaxpr.outvars) != num_outs or len(jaxpr.invars) > len(ins):
            continue  # the condition of a while loop
        outs = _follow(jaxpr, ins[len(ins) - len(jaxpr.invars) :], misuse)
        found = [old or new for old, new in zip(found, outs, strict=True)]
    return found
