"""What a program gathers, in order, and what of it is gathered ahead of its use."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jshard._nnx import OWN
from jshard.engine.rules import calls
from jshard.engine.units import BACKWARD, FORWARD
from jshard.engine.values import Eqn, Value


@dataclasses.dataclass(eq=False)
class Planned:
    """A unit's equation in a program, before it is run.

    Args:
        gathers: what it gathers; nothing, where forward kept it.
        eqn: the equation.
    """

    gathers: list[Value]
    eqn: Eqn

    @property
    def gathered_bytes(self) -> int:
        """Bytes on one device of what it gathers."""
        placements = [v.shard.placement for v in self.gathers]
        return sum(p.gathered_bytes // p.layers for p in placements if p.dim is not None)


class Level:
    """The units of one program in order, and how far the schedule has come.

    Args:
        plan: the units, in order.

    Attributes:
        at: position of the next unit.
        gathered: parameters gathered ahead, by position.
        reduced: results of the reduction before.
        unfinished: what is reduced over shards, and left to be summed over the replicas while the next unit computes;
            with its dtype. Whoever reads it first finishes it.
        late: the unit whose gradients are reduced after this program, in the next trip of a loop.
        handover: of this trip, until what the trip before has left is reduced.
        whole: values gathered by whoever read them, by parameter, dtype and shape, or by id; pieces of some, to begin.
        recent: what the forward unit before gathered: the user's `jax.checkpoint` runs it again right before backward.
    """

    def __init__(self, plan: list[Planned]) -> None:
        self.plan = plan
        self.at = 0
        self.gathered: dict[int, list[Any]] = {}
        self.reduced: list[Value] = []
        self.unfinished: dict[Value, Any] = {}
        self.late: Eqn | None = None
        self.handover: Any = None
        self.whole: dict[Any, Value] = {}
        self.recent: dict[int, tuple[Value, Any]] | None = None

    def ahead(self, at: int) -> list[int]:
        """Positions of the units to gather while unit `at` computes."""
        found: list[int] = []
        waiting = sum(self.plan[i].gathered_bytes for i in self.gathered if i != at)
        for i in range(at + 1, len(self.plan)):
            if i in self.gathered:
                continue
            one = self.plan[i]
            prefetch = one.eqn.params["settings"].prefetch
            if prefetch is None:
                break
            waiting += one.gathered_bytes
            if prefetch.budget_bytes is None and i - (prefetch.units or 0) > at:
                break
            if prefetch.budget_bytes is not None and waiting > prefetch.budget_bytes:
                break
            if one.gathers:
                found.append(i)
        return found


def gathered_operands(eqn: Eqn) -> list[int]:
    """Positions of the operands that a unit's equation gathers, if they are stored: those that its program reads."""
    q = eqn.params
    own = [i for i, owner in enumerate(q["owners"]) if owner == OWN]
    if q["phase"] == BACKWARD and q["num_kept"]:
        own = list(range(len(eqn.invars) - q["num_kept"], len(eqn.invars)))
    read = _read_by(q["jaxpr"].jaxpr)
    return [i for i in own if i in read]


@functools.lru_cache(maxsize=4096)
def _read_by(jaxpr: Any) -> frozenset[int]:
    """Positions of the operands that a program reads: backward needs no bias."""
    read = {id(a) for e in jaxpr.eqns for a in e.invars} | {id(a) for a in jaxpr.outvars}
    return frozenset(i for i, v in enumerate(jaxpr.invars) if id(v) in read)


def gathered_dtypes(eqn: Eqn) -> list[Any]:
    """The dtypes of what it gathers."""
    return [eqn.params["jaxpr"].in_avals[i].dtype for i in gathered_operands(eqn)]


def planned(jaxpr: Any, args: Sequence[Value]) -> Iterator[Planned]:
    """The units that a program calls, in order, and what each gathers."""
    env = {v: a for v, a in zip(jaxpr.invars, args, strict=True) if a.is_stored}
    before: list[Value] | None = None
    for e in jaxpr.eqns:
        operands = [None if isinstance(a, jex.Literal) else env.get(a) for a in e.invars]
        if e.primitive.name == "unit":
            mine = [v for i in gathered_operands(e) if (v := operands[i]) is not None]
            is_forward = e.params["phase"] == FORWARD
            again = not is_forward and not {*map(id, before or ())}.isdisjoint(map(id, mine))
            before = mine if is_forward else None if again else before
            if not again:
                yield Planned(mine, e)
        elif e.primitive.name in calls.CALLS:
            inner, _ = calls.program(e)
            given = [Value(None) if v is None else v for v in operands]
            yield from planned(inner, calls.operands(e, given))


def gathered_in(jaxpr: Any, args: Sequence[Value]) -> list[Value]:
    """The stored operands of a program that it may gather: those whose types alone a unit takes are none of them."""
    read = set()
    for e in jaxpr.eqns:
        operands = [e.invars[i] for i in gathered_operands(e)] if e.primitive.name == "unit" else e.invars
        read |= {id(a) for a in operands}
    return [v for a, v in zip(jaxpr.invars, args, strict=True) if v.is_stored and id(a) in read]


def tied(*groups: Any) -> Any:
    """Trees of arrays, each there only once all are."""
    flat, tree = jax.tree.flatten(groups)
    at = [i for i, x in enumerate(flat) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    if len(at) > 1:
        for i, x in zip(at, lax.optimization_barrier([flat[i] for i in at]), strict=True):
            flat[i] = x
    return jax.tree.unflatten(tree, flat)
