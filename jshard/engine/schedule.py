"""FSDP on a data shard: units gather their parameters, reduce-scatter gradients, and are gathered ahead of their use.

The schedule is a property of the program. At the start of unit i its gathered parameters, its inputs, and the shards
of the units to be gathered while it computes pass through one optimization barrier: those gathers run beside unit i,
and no earlier. Every output of the barrier is used, so nothing is pruned. This holds for forward and backward; in
backward the reduction of unit i waits for that of the unit before.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.engine import stored
from jshard.engine.ahead import Handover, Level, Planned, gathered_operands, planned, stored_rows, tied
from jshard.engine.mixing import LocalProduct, Mixing
from jshard.engine.partitioner import Partitioner
from jshard.engine.rotation import Rotation
from jshard.engine.rules import PARTIAL, Eqn, Shard, Value
from jshard.engine.rules.loops import Scan
from jshard.engine.units import BACKWARD, FORWARD
from jshard.errors import CallError
from jshard.plans.memories import fetched
from jshard.plans.mesh import batch_axes, degree, inner_axes
from jshard.plans.placement import Placement
from jshard.plans.units import OUTER, OWN


class ShardedPartitioner(Partitioner):
    """The partitioner of the region of unit `name`, which handles stored shards and units."""

    def __init__(self, mesh: Mesh, batch_sizes: Sequence[int], whole: Mapping[Any, Value], name: str) -> None:
        axes = batch_axes(mesh)
        super().__init__(axes, math.prod(degree(mesh, a) for a in axes), batch_sizes=batch_sizes)
        self.mesh, self.name, self.is_last = mesh, name, not inner_axes(mesh)
        self.level = Level([])
        self.kept_whole = dict(whole)  # parameters gathered earlier, or pieces of them; see `Level.whole`
        self._bodies: dict[Any, tuple[Any, list[Value], list[Mixing | LocalProduct], Any]] = {}
        self._read: list[Value] = []
        self.layers_read: dict[str, Placement] = {}  # of stacks, in loops, outside of units
        self._stored_rows: dict[Any, Shard] = {}  # of the results of loops
        self.handover: Handover | None = None  # for the next trip

    # ---- stored shards
    def read(self, value: Value) -> Value:
        """A stored value that no unit gathers, gathered once in this program."""
        if not value.is_stored:
            return value
        placement = value.shard.placement
        if not placement.gathered and placement.dim is not None:
            place = self.place(self.eqn) or "an unknown line"
            raise CallError(
                "A parameter that is never gathered was read inside the sharded region.",
                where=f"{value.parameter}  {placement.dtype}{list(placement.shape)}, read at {place}",
                why=f"inside, a device has {placement.bytes_per_device} of its {placement.logical_bytes} bytes, and"
                " the annotation forbids gathering the rest.",
                do="rows = model.tables(ids); model(rows, x)  # read it before the model, and pass the result",
            )
        if value.parameter and self.trips > 1 and value.ndim < len(placement.shape):
            self.layers_read[value.parameter] = placement
        key = (value.parameter, value.x.dtype, value.x.shape) if value.parameter else id(value)
        found = self.level.whole.get(key, value)
        if found.is_stored:
            with jax.named_scope(f"jshard[{self.name}]"):
                found = self.level.whole[key] = Value(stored.gather(found))
            self._read.append(value)  # its id stays taken
        return found

    def store(self, value: Value, state: Shard) -> Value:
        """A value as stored shards; a partial one by its reduce-scatter."""
        if value.state == state:
            return value
        if value.is_partial:
            return Value(stored.reduce_gradient(value.x, state.placement, self.mesh), state)
        return Value(stored.cut(self.whole(value).x, state.placement), state)

    def store_row(self, value: Value, stack: Any) -> Value:
        """One row of a loop's stacked result; the shard for a gradient that is reduced."""
        state = self._stored_rows.get(stack)
        from_end = None if state is None else state.placement.dim_from_end
        if state is None or not value.is_partial or from_end is None or value.ndim + from_end < 0:
            return value
        with jax.named_scope(f"jshard[{self.name}]/{BACKWARD}"):
            return self.store(value, state)

    # ---- programs
    def run_root(self, jaxpr: Any, consts: Any, args: list[Value], gradients: Mapping[int, Shard]) -> list[Value]:
        """Runs the program of a region, given which of its results are gradients, and how these are stored.

        The values gathered outside units are in `kept_whole` afterwards.
        """
        self._stored_rows = stored_rows(jaxpr, {jaxpr.outvars[i]: s for i, s in gradients.items()})
        level = Level(list(planned(jaxpr, args, with_loops=True)))
        level.whole = self.kept_whole
        return self._scheduled(level, jaxpr, consts, args, gradients)

    def run_body(self, jaxpr: Any, consts: Any, args: list[Value], *, gradients: Collection[int] = ()) -> list[Value]:
        """Runs a program with its own schedule."""
        return self._scheduled(Level(list(planned(jaxpr, args))), jaxpr, consts, args, gradients)

    def _scheduled(self, level: Level, jaxpr: Any, consts: Any, args: list[Value], gradients: Collection[int]) -> list:
        outer, self.level = self.level, level
        handover, self.handover = self.handover, None
        try:
            if handover is None:
                outs = self.run(jaxpr, consts, args, gradients=gradients)
            else:
                outs = self._run_trip(handover, outer, jaxpr, consts, args)
            self._finish(list(self.level.unfinished))
            return outs
        finally:
            self.level = outer

    def _run_trip(self, handover: Handover, outer: Level, jaxpr: Any, consts: Any, args: list[Value]) -> list[Value]:
        """Runs one trip of a loop, given its first gathered parameters, and gathers those for later trips.

        The units after the loop follow its last trips: those that it gathers are passed to the schedule around it.
        """
        level, end = self.level, len(self.level.plan)
        level.trip, level.reduced, level.gathered = handover, handover.before, dict(enumerate(handover.gathered))
        after = dict(enumerate(handover.beyond, end + len(handover.later)))
        level.plan += [*handover.later, *handover.beyond.values()]
        level.gathered |= {i: outer.gathered[at] for i, at in after.items() if at in outer.gathered}
        outs = self.run(jaxpr, consts, args)
        self._reduce_handed_over(())
        for i, one in enumerate(handover.later, end):
            full = level.gathered.get(i)
            handover.passed_on.append(self.gather_planned(one) if full is None else full)
        outer.gathered |= {at: level.gathered[i] for i, at in after.items() if i in level.gathered}
        return outs

    def run_scan(self, scan: Scan) -> list[Value]:
        """Runs a loop; units are gathered a trip ahead where possible."""
        rotation = Rotation.of(scan)
        if rotation is None:
            return scan.run()
        del self.noted[scan.mark :]  # the loop is traced again
        return rotation.run(self)

    def gather_planned(self, one: Planned, xs: Sequence[Any] | None = None) -> list[Any]:
        """Gathers a unit's parameters, from other arrays if given."""
        if not one.gathers:
            return []
        xs = [v.x for v in one.gathers] if xs is None else list(xs)
        dtypes = tuple(one.eqn.params["jaxpr"].in_avals[i].dtype for i in gathered_operands(one.eqn))
        with jax.named_scope(f"jshard[{one.eqn.params['settings'].name}]"):
            return stored.gather_unit(xs, tuple(v.shard for v in one.gathers), self.mesh, dtypes)

    def equation(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """Runs one equation: a unit's, or one that leaves a stored shard a stored shard, or any other."""
        self._finish(values)
        if eqn.primitive.name == "unit":
            return self._unit(eqn, values)
        if any(v.is_stored for v in values) and (found := self._of_stored(eqn, values)) is not None:
            return found
        return super().equation(eqn, values)

    def _of_stored(self, eqn: Eqn, values: list[Value]) -> list[Value] | None:
        """Elementwise equations on shards that are stored alike; those of gradients are linear, or of one shard."""
        name, one = eqn.primitive.name, values[0]
        if name == "stack" and eqn.params["axis"] == 0 and all(v.state == one.state for v in values):
            return [one.with_array(self.bind(eqn, [v.x for v in values])[0])]
        if name == "unstack" and eqn.params["axis"] == 0 and one.ndim > len(one.shard.placement.shape):
            rows = [one.with_array(x) for x in self.bind(eqn, [one.x])]  # of several parameters that are stored alike
            level, ends = self.level, [rows[0], rows[-1]]  # of a loop in reverse, which stores the first row last
            with_ends = lambda values: [v for other in values for v in (ends if other is one else [other])]
            level.reduced, level.stacked = with_ends(level.reduced), with_ends(level.stacked)
            return rows
        if name in ("convert_element_type", "neg", "copy", "copy_p", "stop_gradient"):
            dtype = eqn.outvars[0].aval.dtype
            if one.parameter and (name == "neg" or dtype.itemsize > one.x.dtype.itemsize):
                return None  # gathered in the smaller dtype, then cast
            return [one.with_array(self.bind(eqn, [fetched(one.x)])[0])]
        if name in ("add", "add_any", "sub"):
            state = next(v.shard for v in values if v.is_stored)
            is_gradient = not any(v.parameter for v in values)  # the shard of a whole sum, as of zeros, is cut
            fits = (state, PARTIAL, None) if is_gradient else (state, PARTIAL)
            if not state.pieces and all(v.state in fits for v in values):
                xs = [self.store(v, state).x for v in values]
                return [Value(self.bind(eqn, xs)[0], state)]
        return None

    # ---- units
    def _unit(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        owners = eqn.params["owners"]
        outer = {i for i, owner in enumerate(owners) if owner == OUTER}
        values = [(self.read(v) if i in outer else v) if v.is_stored else self.land(v) for i, v in enumerate(values)]
        finish = self._keep if eqn.params["phase"] == FORWARD else self._reduced
        with _scope_of(eqn):
            return finish(eqn, values[: len(owners)], self._compute(eqn, self._gathered(eqn, values)))

    def _gathered(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """The operands of a unit's program, its parameters gathered at its place in the schedule."""
        at, avals, values = gathered_operands(eqn), eqn.params["jaxpr"].in_avals, list(values)
        which, recent = [i for i in at if values[i].is_stored], self.level.recent
        shards = [values[i] for i in which]
        if eqn.params["phase"] == BACKWARD and recent and any(id(v) in recent for v in shards):
            given = [(id(v), v, avals[i].dtype) for i, v in zip(which, shards, strict=True)]
            full = [recent[key][1] if key in recent else stored.gather(v, dtype) for key, v, dtype in given]
            self.level.recent = None
        else:
            full = self._gathered_in_time(eqn, values, which, [avals[i].dtype for i in which])
        for i, x in zip(which, full, strict=True):
            values[i] = Value(x)
        for i, owner in enumerate(eqn.params["owners"]):
            if i not in at and owner == OWN and values[i].is_stored:  # its type alone
                values[i] = Value(jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype))
        return values

    def _gathered_in_time(self, eqn: Eqn, values: list[Value], which: list[int], dtypes: list[Any]) -> list[Any]:
        """Gathers a unit's parameters, or takes those gathered ahead, and gathers the next ones."""
        level, prefetch, is_backward = self.level, eqn.params["settings"].prefetch, eqn.params["phase"] == BACKWARD
        shards = [values[i] for i in which]
        at = level.find(eqn, shards)
        rows = {id(v) for v in (level.trip.rows if level.trip else ())}
        inputs = [i for i, v in enumerate(values) if not v.is_stored and i not in which and id(v) not in rows]
        full = None if at is None else level.gathered.pop(at, None)
        if full is None and shards:
            xs = [v.x for v in shards]
            is_bounded = prefetch is not None and (prefetch.units == 0 or at != 0)
            if is_bounded or (is_backward and not at):
                xs, moved = tied(xs, [values[i].x for i in inputs])
                self._replace(values, inputs, moved)
            full = stored.gather_unit(xs, tuple(v.shard for v in shards), self.mesh, tuple(dtypes))
        full = full or []
        ahead = level.ahead(at) if at is not None and prefetch is not None else []
        if prefetch is not None and prefetch.units != 0 and (full or ahead):  # 0: it begins with its available values
            soon = [level.plan[i] for i in ahead]
            shards_ahead = [[v.x for v in one.gathers] for one in soon]
            full, moved, shards_ahead = tied(full, [values[i].x for i in inputs], shards_ahead)
            self._replace(values, inputs, moved)
            for i, one, xs in zip(ahead, soon, shards_ahead, strict=True):
                level.gathered[i] = self.gather_planned(one, xs)
        self._reduce_handed_over(ahead)
        if not is_backward:
            level.recent = {id(v): (v, x) for v, x in zip(shards, full, strict=True)}
        return full

    @staticmethod
    def _replace(values: list[Value], at: list[int], xs: Sequence[Any]) -> None:
        for i, x in zip(at, xs, strict=True):
            values[i] = values[i].with_array(x)

    def _compute(self, eqn: Eqn, args: list[Value]) -> list[Value]:
        """The unit's program. Equal units in equal states share one jit: one trace, one function in the lowering."""
        # Gradients are cast when they are reduced: until then those of two units exist, in the smaller dtype.
        jaxpr, num_gradients = eqn.params["jaxpr"], sum(eqn.params["wrt"])
        dtypes = [*(v.dtype for v in jaxpr.out_avals[:num_gradients]), *eqn.params["out_dtypes"][num_gradients:]]
        gradients = range(num_gradients)
        if any(v.is_stored for v in args):  # of units inside, which are in the same schedule
            outs = self.run(jaxpr.jaxpr, jaxpr.consts, args, gradients=gradients)
            self._finish(outs)
            return self._cast(outs, dtypes)
        at = [i for i, v in enumerate(args) if not isinstance(v.x, jax.ShapeDtypeStruct)]  # others are never read
        xs = [args[i].x for i in at]
        key, mark = (id(jaxpr), tuple((v.state, *v.counted.items()) for v in args), tuple(at)), len(self.noted)
        if key not in self._bodies:
            forms: list[Value] = []

            def body(xs: list[Any]) -> list[Any]:
                inside = dict(zip(at, xs, strict=True))
                given = [v.with_array(inside.get(i, v.x)) for i, v in enumerate(args)]
                outs = self.run_body(jaxpr.jaxpr, jaxpr.consts, given, gradients=gradients)
                outs = [self.land(v) for v in self._cast(outs, dtypes)]
                forms[:] = [v.with_array(None) for v in outs]
                return [v.x for v in outs]

            body.__name__ = body.__qualname__ = eqn.params["phase"]
            run = jax.jit(body)
            xs = run(xs)
            self._bodies[key] = run, forms, [one.repeated(1 / self.trips) for one in self.noted[mark:]], jaxpr
        else:
            run, forms, noted, _ = self._bodies[key]
            xs = run(xs)
            self.noted[mark:] = [one.repeated(self.trips) for one in noted]
        return [form.with_array(x) for x, form in zip(xs, forms, strict=True)]

    @staticmethod
    def _cast(outs: list[Value], dtypes: Sequence[Any]) -> list[Value]:
        return [v if v.x.dtype == d else v.with_array(v.x.astype(d)) for v, d in zip(outs, dtypes, strict=True)]

    def _keep(self, eqn: Eqn, own: list[Value], outs: list[Value]) -> list[Value]:
        """The gathered parameters that forward keeps: whole, or in pieces."""
        num_kept, pieces = eqn.params["num_kept"], eqn.params["settings"].reshard
        if not num_kept or isinstance(pieces, bool):
            return outs
        mine = [v for v, owner in zip(own, eqn.params["owners"], strict=True) if owner == OWN]
        kept = outs[len(outs) - num_kept :]
        for i, (v, full) in enumerate(zip(mine, kept, strict=True)):
            if v.is_stored and v.shard.placement.dim is not None:
                x = stored.cut(full.x, v.shard.placement, pieces)
                kept[i] = Value(x, dataclasses.replace(v.shard, pieces=pieces))
                self.level.recent = {**(self.level.recent or {}), id(kept[i]): (kept[i], full.x)}
        return [*outs[: len(outs) - num_kept], *kept]

    def _reduced(self, eqn: Eqn, own: list[Value], outs: list[Value]) -> list[Value]:
        """Gradients of stored parameters become shards; each unit's reduction waits for the one before."""
        wrt = [v for v, is_wanted in zip(own, eqn.params["wrt"], strict=True) if is_wanted]
        ndims = [a.aval.ndim for a in eqn.outvars]  # those of a user's vmap have one more dim, which is summed after it
        at = [i for i, v in enumerate(wrt) if v.is_stored and not outs[i].is_stored and ndims[i] == v.ndim]
        if not at:
            return self._cast(outs, eqn.params["out_dtypes"])
        rest = [i for i, v in enumerate(outs) if i not in at and not v.is_stored]
        level, outs = self.level, [self.land(v) for v in outs]
        arrays = lambda which: [outs[i].x for i in which]
        gradients, others, before = tied(arrays(at), arrays(rest), [v.x for v in level.reduced])
        self._replace(outs, at, gradients)
        self._replace(outs, rest, others)
        is_late = level.trip is not None and eqn is level.trip.late
        late = {i for i in at if is_late and outs[i].is_partial}
        dtypes = enumerate(eqn.params["out_dtypes"])
        outs = self._cast(outs, [outs[i].x.dtype if i in late else dtype for i, dtype in dtypes])
        for v, x in zip(level.reduced, before, strict=True):
            v.x = x  # readers of the previous reduction read after this
            v.done.clear()
        self._finish(level.reduced)
        at = [i for i in at if i not in late]
        found = self.store_unit([outs[i] for i in at], [wrt[i].shard for i in at], unfinished=level.unfinished)
        for i, v in zip(at, found, strict=True):
            outs[i] = v
        level.reduced = [outs[i] for i in at]
        prefetch = eqn.params["settings"].prefetch
        if prefetch is not None and prefetch.units == 0 and self.trips > 1:
            # One unit at a time: the compiler runs two trips of a loop as one, with the gradients of both.
            self._finish(level.reduced)
            self._replace(outs, list(range(len(outs))), tied([v.x for v in outs])[0])
            level.reduced = [outs[i] for i in at]
        return outs

    def _reduce_handed_over(self, ahead: Sequence[int]) -> None:
        """Reduces the gradients that the trip before has left, once the small parameters gathered ahead have arrived.

        After a large reduction a small gather would be late, and the program would wait for it.
        """
        level, trip = self.level, self.level.trip
        if trip is None or not trip.left:
            return
        is_small = lambda x: x.size * x.dtype.itemsize < stored.SMALL_BYTES
        small = [(i, k) for i in ahead for k, x in enumerate(level.gathered[i]) if is_small(x)]
        first, last = tied([level.gathered[i][k] for i, k in small], [x for x, *_ in trip.left])
        for (i, k), x in zip(small, first, strict=True):
            level.gathered[i][k] = x
        left = [(x, *form) for x, (_, *form) in zip(last, trip.left, strict=True)]
        trip.left = []
        level.reduced = trip.reduced = self.reduce_left(left, trip.late)

    def reduce_left(self, left: Sequence[tuple[Any, ...]], unit: Eqn | None) -> list[Value]:
        """Reduces the gradients of a unit that a trip has left: arrays, their dtypes, and how they are stored."""
        if unit is None:
            return []
        with _scope_of(unit):
            values = [Value(x.astype(dtype), PARTIAL) for x, dtype, _ in left]
            return self.store_unit(values, [state for *_, state in left])

    def _finish(self, values: Iterable[Value]) -> None:
        """Sums values reduced over shards also over the replicas, where that is left to do."""
        for v in values:
            if (dtype := self.level.unfinished.pop(v, None)) is not None:
                v.x = stored.sum_replicas(v.x, self.mesh).astype(dtype)

    def store_unit(self, values: list[Value], states: list[Shard], unfinished: dict | None = None) -> list[Value]:
        """Values as stored shards; `unfinished` takes those left to be summed over the replicas, with their dtypes."""
        at = [i for i, v in enumerate(values) if v.is_partial]
        found, xs, placements = list(values), [values[i].x for i in at], tuple(states[i].placement for i in at)
        summed = stored.reduce_unit(xs, placements, self.mesh, unfinished is not None) if at else []
        for i, x, before, placement in zip(at, summed, xs, placements, strict=True):
            found[i] = Value(x, states[i])
            if unfinished is not None and stored.has_two_steps(before, placement, self.mesh):
                unfinished[found[i]] = before.dtype
        return [self.store(v, state) for v, state in zip(found, states, strict=True)]


def _scope_of(unit: Eqn) -> AbstractContextManager[Any]:
    """A context in which operations are named after a unit and its phase."""
    backward = "/backward" if unit.params["phase"] == BACKWARD else ""
    return jax.named_scope(f"jshard[{unit.params['settings'].name}]{backward}")
