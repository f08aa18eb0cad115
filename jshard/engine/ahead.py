"""What a program gathers, in order, and what of it is gathered ahead of its use."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jshard._nnx import NESTED, OWN
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
        recent: what the forward unit before gathered, and the pieces that it keeps of that: the user's `jax.checkpoint`
            runs it again right before backward.
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

    def find(self, eqn: Eqn, shards: Sequence[Value]) -> int | None:
        """Position of a unit that comes now, if it gathers what was planned; it and all before are done with."""
        for i, one in enumerate(self.plan[self.at :], self.at):
            mine = one.gathers
            if one.eqn is eqn and len(mine) == len(shards) and all(a is b for a, b in zip(mine, shards, strict=True)):
                self.at = i + 1
                return i
        return None

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


def planned(jaxpr: Any, args: Sequence[Value], before: list[Value] | None = None) -> Iterator[Planned]:
    """The units that a program calls, in order, and what each gathers; those inside of a unit come after it.

    Args:
        jaxpr: the program.
        args: its arguments; only those that are stored matter.
        before: what the forward unit before gathers, and the pieces that it keeps; it is brought up to date.
    """
    env = {v: a for v, a in zip(jaxpr.invars, args, strict=True) if a.is_stored}
    before, pieces = [] if before is None else before, set()
    for e in jaxpr.eqns:
        operands = [Value(None) if isinstance(a, jex.Literal) else env.get(a, Value(None)) for a in e.invars]
        if e.primitive.name in calls.CALLS:
            yield from planned(calls.program(e)[0], calls.operands(e, operands), before)
        if e.primitive.name != "unit":
            continue
        gathers, owners = {i: operands[i] for i in gathered_operands(e) if operands[i].is_stored}, e.params["owners"]
        mine, is_forward = list(gathers.values()), e.params["phase"] == FORWARD
        again = not is_forward and not {*map(id, before)}.isdisjoint(map(id, mine))
        if is_forward or again:
            before[:] = mine if is_forward else []
        if not again and pieces.isdisjoint(mine) and (mine or NESTED not in owners):
            yield Planned(mine, e)
        inside = [
            v if i not in gathers and owners[i : i + 1] != (OWN,) else Value(None) for i, v in enumerate(operands)
        ]
        if NESTED in owners and any(v.is_stored for v in inside):
            yield from planned(e.params["jaxpr"].jaxpr, inside, before)
        if is_forward and (kept := _kept_in_pieces(e, operands)):
            env |= kept
            pieces |= {*kept.values()}  # none can be gathered ahead of the unit that keeps them
            before += kept.values()


def _kept_in_pieces(eqn: Eqn, operands: Sequence[Value]) -> dict[Any, Value]:
    """What stands for the pieces that a forward unit keeps, by the variables that will hold them."""
    num, pieces = eqn.params["num_kept"], eqn.params["settings"].reshard
    if not num or isinstance(pieces, bool):
        return {}
    own = [v for v, owner in zip(operands, eqn.params["owners"], strict=False) if owner == OWN]
    found = zip(eqn.outvars[-num:], own, strict=True)
    split = [(a, v.shard) for a, v in found if v.is_stored and v.shard.placement.dim is not None]
    return {a: Value(None, dataclasses.replace(shard, pieces=pieces)) for a, shard in split}


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
