"""Runs the program of a region's call on data shards, inside a `jax.shard_map`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine import mixing
from jshard.engine.crossing import Crossing, Gathered, resolved
from jshard.engine.inner import over_axis
from jshard.engine.layer_stacks import note_layers
from jshard.engine.program import evaluate_jaxpr
from jshard.engine.rules import PARTIAL, Shard, State, Value
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.prefetch import shards_gathered_by
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.unit_call import BACKWARD, FORWARD
from jshard.engine.unsplit import LocalProduct, TracedCall, products_that_depend, warn_of_whole
from jshard.plans.memories import fetched, to_host
from jshard.plans.mesh import data_degree, degree, manual_axes

if TYPE_CHECKING:
    from jshard.engine.region_call import RegionCall


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A call's program on data shards, how its results leave, and the copies behind them."""

    jaxpr: ClosedJaxpr
    results: tuple[Crossing, ...]


def partition(call: "RegionCall", avals: Sequence[ShapedArray]) -> Partition:
    """Returns a call's program on data shards; the types are those of all its operands, and of copies after them."""
    region = call.region
    num_operands = len(call.operands)
    copies = region.copies(avals[num_operands:]) or {}
    num_taken = num_operands + len(copies)
    execution = _Execution(call, [resolved(one) for one in call.operands], copies)

    def run(*arrays: Any) -> list[Any]:
        return execution.run(*arrays[:num_taken])

    jaxpr = jax.make_jaxpr(run)(*avals)
    num_results = len(call.program.jaxpr.out_avals)
    if call.returns_copies and execution.kept:
        region.kept.append(Gathered(tuple(jaxpr.out_avals[num_results:]), execution.kept))
    return Partition(jaxpr, tuple(execution.leaving))


class _Execution:
    """One run of a call's program, while it is traced.

    Attributes:
        leaving: how its results leave.
        kept: how the copies leave that it returns behind them.
    """

    def __init__(self, call: "RegionCall", operands: list[Crossing], copies: Mapping[Any, Crossing]) -> None:
        self._call = call
        self._region = call.region
        self._operands = operands
        self._copies = copies
        self._targets = [resolved(target) for target in call.targets]
        self._out_specs: list[PartitionSpec] = []
        self.leaving: list[Crossing] = [Crossing(None)] * len(call.program.jaxpr.out_avals)
        self.kept: dict[Any, Crossing] = {}

    def run(self, *arrays: Any) -> list[Any]:
        """Runs it. If one device has the whole batch, nothing is gathered or summed: it runs unchanged."""
        region = self._region
        if region.degree == 1:
            return evaluate_jaxpr(self._call.program.jaxpr, [fetched(x) for x in arrays])
        entering = [*self._operands, *self._copies.values()]
        sharded = jax.shard_map(
            functools.partial(self._on_part, region.inner),
            mesh=region.mesh,
            in_specs=tuple(region.spec(one, x.ndim) for one, x in zip(entering, arrays, strict=True)),
            out_specs=self._out_specs,  # read after the body is traced, which fills the list
            axis_names=manual_axes(region.mesh),
            check_vma=False,
        )
        return sharded(*arrays)

    def _on_part(self, inner: tuple[str, ...], *xs: Any) -> list[Any]:
        """Runs the program on one place along inner axes of a data shard."""
        if not inner:
            return self._on_shard(*xs)
        *outer, axis = inner
        region = self._region
        entering = [*self._operands, *self._copies.values()]
        dims = [one.inner.get(axis) for one in entering]
        wanted: list[State] = []
        for target in self._targets:
            is_partial = target.is_copy and axis not in target.inner
            wanted.append(PARTIAL if is_partial else target.inner.get(axis))
        program = functools.partial(self._on_part, tuple(outer))
        is_last = inner == region.inner
        outs, out_dims, moved = over_axis(axis, degree(region.mesh, axis), program, xs, dims, wanted, is_last=is_last)
        mixing.note(region.unit, region.name, self._call.part, moved, over=axis)
        leaving = []
        for one, dim in zip((*self.leaving, *self.kept.values()), out_dims, strict=True):
            leaving.append(one if dim is None else dataclasses.replace(one, inner={**one.inner, axis: dim}))
        self._leave(leaving, [x.ndim for x in outs])
        return outs

    def _on_shard(self, *xs: Any) -> list[Any]:
        """Runs the program on one data shard: from its parts of the operands to its parts of the results."""
        region, call, num_operands = self._region, self._call, len(self._operands)
        values = [one.enter(x) for x, one in zip(xs[:num_operands], self._operands, strict=True)]
        copies = zip(xs[num_operands:], self._copies.items(), strict=True)
        whole = {key: one.enter(x) for x, (key, one) in copies}
        batch_sizes = [region.batch] if region.batch else []
        p = ShardedPartitioner(region.mesh, batch_sizes, whole, region.unit.name or "(root)")
        outs = self._results(p, values)

        mixing.note(region.unit, region.name, call.part, p.moved)
        if call.part == FORWARD:
            note_layers(region.unit, p.layers_read)
            self._warn_of_whole([record for record in p.records if isinstance(record, LocalProduct)])
        kept = region.keeps(p, self._operands) if call.returns_copies else {}

        is_own = [target.is_own for target in self._targets]
        is_own += [False] * (len(outs) - len(is_own))
        leaving = [Crossing.of(v, is_own=own) for v, own in zip(outs, is_own, strict=True)]
        leaving += [Crossing.of(v) for v in kept.values()]
        self.kept = dict.fromkeys(kept, Crossing(None))
        left = [*outs, *kept.values()]
        self._leave(leaving, [v.ndim for v in left])
        return [one.leave(v) for one, v in zip(leaving, left, strict=True)]

    def _warn_of_whole(self, products: list[LocalProduct]) -> None:
        region = self._region
        is_split = [isinstance(crossing.state, int) for crossing in self._operands]
        traced = TracedCall(
            name=region.name,
            arguments=region.arguments,
            batch=region.batch,
            degree=data_degree(region.mesh),
            products=products,
            products_of_examples=functools.partial(products_that_depend, self._call.program.jaxpr.jaxpr, is_split),
        )
        warn_of_whole(traced)

    def _results(self, p: ShardedPartitioner, values: list[Value]) -> list[Value]:
        """Returns the results; gradients are stored like their parameters, those of copies as each device's part."""
        jaxpr = self._call.program.jaxpr
        is_backward = self._call.phase == BACKWARD
        if is_backward:
            self._gather_after_cotangents(jaxpr, values)
        wanted = [PARTIAL if target.is_own else target.state for target in self._targets]
        shards = {i: state for i, state in enumerate(wanted) if isinstance(state, Shard)}
        outs = p.run_root(jaxpr.jaxpr, jaxpr.consts, values, shards)
        free = [p.materialize(p.reduce_partial(v)) for v in outs[len(wanted) :]]
        if not wanted:
            return free

        with jax.named_scope(f"jshard[{p.name}]/{BACKWARD}"):
            reduced = p.reduce_to_shards([outs[i] for i in shards], list(shards.values()))
            gradients = dict(zip(shards, reduced, strict=True))
            for i, value in gradients.items():
                if value.shard.placement.on_host:
                    gradients[i] = value.with_array(to_host(value.x))
            return [*(gradients[i] if i in gradients else p.in_state(outs[i], s) for i, s in enumerate(wanted)), *free]

    def _gather_after_cotangents(self, jaxpr: ClosedJaxpr, values: list[Value]) -> None:
        """Ties the shards to the other operands of backward: else they would be gathered while forward runs."""
        gathered = shards_gathered_by(jaxpr.jaxpr, values, {name for name, *_ in self._copies})
        shards = [v for v in gathered if not v.shard.pieces and not _compat.on_host(v.x)]
        inputs = [v for v in values if not v.is_stored]
        if not shards:
            return
        first, last = available_together([v.x for v in shards], [v.x for v in inputs])
        for v, x in zip([*shards, *inputs], [*first, *last], strict=True):
            v.x = x

    def _leave(self, leaving: list[Crossing], ndims: Sequence[int]) -> None:
        """Notes how results leave, and the copies after them."""
        num_results = len(leaving) - len(self.kept)
        self.leaving = leaving[:num_results]
        self.kept = dict(zip(self.kept, leaving[num_results:], strict=True))
        self._out_specs[:] = map(self._region.spec, leaving, ndims)
