"""The gathers of a program, in order, and which of them happen ahead of their use."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard.engine import rules
from jshard.engine.rules import Eqn, Shard, Value, loops
from jshard.engine.units import BACKWARD, FORWARD
from jshard.plans.units import NESTED, OWN

MIN_TRIPS = 3


@dataclasses.dataclass(eq=False)
class Planned:
    """A unit's equation in a program, before it runs."""

    gathers: list[Value]  # empty if forward kept them
    eqn: Eqn
    loop: Eqn | None = None  # the loop in whose first trips it is

    @property
    def gathered_bytes(self) -> int:
        """Bytes on one device of its gathered parameters."""
        placements = [v.shard.placement for v in self.gathers]
        return sum(p.gathered_bytes // p.layers for p in placements if p.dim is not None)


@dataclasses.dataclass(eq=False)
class Handover:
    """The values that a trip of a loop receives from the trips before, and passes to those after it."""

    gathered: list[list[Any]]  # the parameters of its first units, and of later trips' if they are few
    later: list[Planned]  # the units of later trips that are gathered when it ends
    beyond: dict[int, Planned]  # the units after the loop that it may gather, by position in the schedule around
    late: Eqn | None  # its unit whose gradients leave it unreduced, to be reduced in the trip after it
    left: list[tuple[Any, Any, Shard]]
    """Gradients that the trip before has left, the dtype to reduce them in, and how they are stored."""
    before: list[Value]  # what the loop before left and has reduced since; for the first trip
    rows: list[Value]
    """Rows of scanned values, inside the loop, where they exist when the trip begins: behind a barrier they would be
    cut before everything else. Outside the loop, a trip that did not wait for its turn would compute ahead."""
    reduced: list[Value] = dataclasses.field(default_factory=list)  # what became of those left
    passed_on: list[list[Any]] = dataclasses.field(default_factory=list)  # the parameters of the units of later trips


class Level:
    """The units of one program in order, and the progress of the schedule."""

    def __init__(self, plan: list[Planned]) -> None:
        self.plan, self.at = plan, 0  # the position is that of the next unit
        self.gathered: dict[int, list[Any]] = {}  # parameters gathered ahead, by position
        self.reduced: list[Value] = []  # results of the reduction before
        self.stacked: list[Value] = []  # and of the loop before; the gradients it left are reduced beside the next loop
        # Gradients reduced over shards whose sum over the replicas is left to run while the next unit computes, with
        # their dtype. The first reader finishes it.
        self.unfinished: dict[Value, Any] = {}
        self.trip: Handover | None = None  # if the program is one of a loop
        # Values gathered by their readers, by parameter, dtype and shape, or by id; initially pieces of some.
        self.whole: dict[Any, Value] = {}
        # The gathers of the previous forward unit, and the pieces that it keeps: the user's `jax.checkpoint` runs it
        # again right before backward.
        self.recent: dict[int, tuple[Value, Any]] | None = None

    def find(self, eqn: Eqn, shards: Sequence[Value]) -> int | None:
        """Position of the current unit, if it gathers as planned; it and all earlier ones are then done."""
        for i, one in enumerate(self.plan[self.at :], self.at):
            if one.eqn is eqn and list(map(id, one.gathers)) == list(map(id, shards)):
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
            budget = prefetch.budget_bytes
            if i - (prefetch.units or 0) > at if budget is None else waiting > budget:
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


def planned(jaxpr: Any, args: list[Value], before: list | None = None, with_loops: bool = False) -> Iterator[Planned]:
    """The units that a program calls, in order, with the gathers of each; units inside a unit follow it.

    Only stored arguments matter. `before` has the gathers of the previous forward unit, and the pieces that it keeps;
    it is updated. `with_loops`: also the units of the first trips of loops, gathered before them.
    """
    env = {v: a for v, a in zip(jaxpr.invars, args, strict=True) if a.is_stored}
    if not env and before is None:
        return  # nothing is gathered
    before, pieces, stacks = [] if before is None else before, set(), {}
    for e in jaxpr.eqns:
        operands = [Value(None) if isinstance(a, jex.Literal) else env.get(a, Value(None)) for a in e.invars]
        if e.primitive.name in rules.CALLS:
            inner, given = rules.program(e)[0], rules.operands(e, operands)
            yield from planned(inner, given, before, with_loops=with_loops)
        if e.primitive.name == "stack" and e.params["axis"] == 0 and operands[0].is_stored:
            stacks[e.outvars[0]] = operands if all(v.state == operands[0].state for v in operands) else ()
        if e.primitive.name == "scan" and with_loops:
            yield from _first_in_loop(
                e, operands, [() if isinstance(a, jex.Literal) else stacks.get(a, ()) for a in e.invars]
            )
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
            yield from planned(e.params["jaxpr"].jaxpr, inside, before, with_loops=with_loops)
        number = e.params["settings"].reshard
        if is_forward and e.params["num_kept"] and not isinstance(number, bool):
            own = [v for v, owner in zip(operands, owners, strict=False) if owner == OWN]
            for a, v in zip(e.outvars[-e.params["num_kept"] :], own, strict=True):
                if v.is_stored and v.shard.placement.dim is not None:
                    env[a] = piece = Value(None, dataclasses.replace(v.shard, pieces=number))
                    pieces.add(piece)  # cannot be gathered ahead of the unit that keeps it
                    before.append(piece)


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """The units of one trip of a loop."""

    shared: list[Value]  # values that every trip reads
    units: list[Planned]
    sources: list[list[tuple[bool, int]]]
    """The source of the shards of each: whether they are rows, and the index of the scanned or shared value."""
    count: int  # how many units of later trips are gathered when a trip ends

    @classmethod
    def of(cls, jaxpr: Any, shared: list[Value], carried: list[Value], scanned: list[Value], length: int) -> "LoopPlan":
        """The units of a loop with this body; with few trips none is gathered ahead."""
        probe = [loops.rows(v, None) for v in scanned]
        units = list(planned(jaxpr, [*shared, *carried, *probe]))
        at = {id(v): (False, i) for i, v in enumerate(shared)} | {id(v): (True, i) for i, v in enumerate(probe)}
        sources = [[at.get(id(v)) for v in one.gathers] for one in units]
        known = [[source for source in found if source is not None] for found in sources]
        if not units or length < MIN_TRIPS or known != sources:
            return cls(shared, units, known, 0)
        return cls(shared, units, known, min(gathered_ahead(units, length), len(units) * (length - 1)))

    def unit(self, position: int, trip: Any, cut: Callable[[list[int], Any], list[Value]]) -> Planned:
        """A unit, by position from the first of a trip; `cut` returns rows of the scanned values, for a trip."""
        later, i = divmod(position, len(self.units))
        at = [k for is_row, k in self.sources[i] if is_row]
        found = dict(zip(at, cut(at, trip + later), strict=True))
        return Planned([found[k] if is_row else self.shared[k] for is_row, k in self.sources[i]], self.units[i].eqn)


def gathered_ahead(units: Sequence[Planned], trips: int) -> int:
    """The number of units of later trips that are gathered when a trip ends, once it is constant."""
    level, found = Level([*units] * (2 * trips)), -1
    for at in range(trips * len(units)):
        level.gathered.pop(at, None)
        level.gathered |= {i: [] for i in level.ahead(at)}
        if (at + 1) % len(units) == 0:
            before, found = found, max(level.gathered, default=at) - at
            if found == before:
                break
    return max(found, 0)


def cut_rows(values: Sequence[Value], at: Any) -> list[Value]:
    """One trip's rows of the scanned values."""
    found = _rows([v.x for v in values], jnp.int32(at)) if values else []
    return [loops.rows(v, x) for v, x in zip(values, found, strict=True)]


@jax.jit
def _rows(stacks: list[Any], at: Any) -> list[Any]:
    """A function, so that it is in the program once."""
    cut = lambda x: lax.dynamic_slice_p.bind(x, *row_start(x, at), slice_sizes=(1, *x.shape[1:]))
    return [lax.squeeze(cut(x), (0,)) for x in stacks]


def row_start(x: Any, at: Any) -> tuple[Any, ...]:
    """Where a row begins; never negative, which saves the equations that `lax.dynamic_slice` adds for negatives."""
    return (at, *[np.zeros((), np.int32)] * (x.ndim - 1))


def _first_in_loop(eqn: Eqn, operands: list[Value], rows: Sequence[Sequence[Value]]) -> Iterator[Planned]:
    """The units of a loop's first trips that are gathered before it.

    `rows` are what each operand was stacked from in this program; empty if it came as it is.
    """
    n_consts, n_carry = _compat.scan_arguments(eqn)
    end, length = n_consts + n_carry, eqn.params["length"]
    shared, stacks = operands[:n_consts], rows[end:]
    scanned = [Value(None) if loops.is_stored_along_trips(v) else v for v in operands[end:]]
    scanned = [stack[0] if stack else v for v, stack in zip(scanned, stacks, strict=True)]
    plan = LoopPlan.of(rules.opened(eqn.params["jaxpr"])[0], shared, operands[n_consts:end], scanned, length)
    if any(v.x is None or _compat.on_host(v.x) for v in (*shared, *scanned) if v.is_stored):
        return  # their rows are cut when the loop begins
    at = lambda trip: length - 1 - trip if eqn.params["reverse"] else trip

    def cut(ks: list[int], trip: int) -> list[Value]:
        whole = [k for k in ks if not stacks[k]]
        found = dict(zip(whole, cut_rows([scanned[k] for k in whole], at(trip)), strict=True))
        return [found[k] if k in found else stacks[k][at(trip)] for k in ks]

    for i in range(plan.count):
        yield dataclasses.replace(plan.unit(i, 0, cut), loop=eqn)


def gathered_in(jaxpr: Any, args: Sequence[Value], kept: Collection[str]) -> list[Value]:
    """The stored operands that a program may gather, without those of which a unit needs only the types.

    Forward kept some for the program's own reads; units and programs inside gather theirs.
    """
    inside, outside = set(), set()
    for e in jaxpr.eqns:
        if e.primitive.name == "unit":
            inside |= {id(e.invars[i]) for i in gathered_operands(e)}
        else:
            (inside if any(True for _ in jex.jaxprs_in_params(e.params)) else outside).update(map(id, e.invars))
    found = [(id(a), v) for a, v in zip(jaxpr.invars, args, strict=True) if v.is_stored]
    return [v for a, v in found if a in inside or (a in outside and v.parameter not in kept)]


def tied(*groups: Any) -> Any:
    """Trees of arrays, each available only once all are."""
    flat, tree = jax.tree.flatten(groups)
    at = [i for i, x in enumerate(flat) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    if len(at) > 1:
        for i, x in zip(at, lax.optimization_barrier([flat[i] for i in at]), strict=True):
            flat[i] = x
    return jax.tree.unflatten(tree, flat)


def stored_rows(jaxpr: Any, gradients: Mapping[Any, Shard]) -> dict[Any, Shard]:
    """The stacked results of loops that become gradients (some results) and nothing else, with how those are stored.

    Units reduce their own; for layers that form no unit, the root stores the gradient of each in its trip. If a program
    is called more than once, a row may be stored that is no gradient: its reader gathers it again.
    """
    uses = Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, jex.Var))
    uses.update(a for a in jaxpr.outvars if isinstance(a, jex.Var))
    wanted = {v: s for v, s in gradients.items() if uses[v] == 1}
    found: dict[Any, Shard] = {}
    for e in reversed(jaxpr.eqns):
        mine = {k: wanted[v] for k, v in enumerate(e.outvars) if v in wanted}
        if not mine:
            continue
        if e.primitive.name in ("convert_element_type", "copy", "copy_p") and uses[e.invars[0]] == 1:
            wanted[e.invars[0]] = mine[0]
        elif e.primitive.name in rules.CALLS:
            inner, _ = rules.program(e)
            found |= stored_rows(inner, {inner.outvars[k]: s for k, s in mine.items()})
        elif e.primitive.name == "scan":
            _, num_carried = _compat.scan_arguments(e)
            body, _ = rules.opened(e.params["jaxpr"])
            stacked = {k: s for k, s in mine.items() if k >= num_carried and not _is_of_unit(body, body.outvars[k])}
            found |= {e.outvars[k]: s for k, s in stacked.items()}
    return found


def _is_of_unit(jaxpr: Any, variable: Any) -> bool:
    """Whether a unit has computed a value, and so has reduced it or will."""
    for e in jaxpr.eqns:
        if variable in e.outvars:
            if e.primitive.name in rules.CALLS:
                inner, _ = rules.program(e)
                return _is_of_unit(inner, inner.outvars[e.outvars.index(variable)])
            return e.primitive.name == "unit"
    return False
