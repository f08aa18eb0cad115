"""Runs the program of a region's call on data shards, inside a `jax.shard_map`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine import gathers, mixing
from jshard.engine.crossing import Crossing, Gathered, Region, all_resolved
from jshard.engine.inner import over_axis
from jshard.engine.layer_stacks import note_layers
from jshard.engine.program import SummingProgram, evaluate_jaxpr
from jshard.engine.rules import PARTIAL, Shard, State, Value
from jshard.engine.rules.values import arrays_of
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.prefetch import shards_gathered_by
from jshard.engine.schedule.program_schedule import ParameterKey
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.selections import at_positions
from jshard.engine.stages.records import note_stages
from jshard.engine.stages.region_partitioner import StagesPartitioner
from jshard.engine.unit_call import BACKWARD, FORWARD
from jshard.engine.unsplit import LocalProduct, TracedCall, products_that_depend, warn_of_whole
from jshard.plans.memories import fetched, to_host
from jshard.plans.mesh import INNER_AXES, PIPE, TENSOR, data_degree, degree, manual_axes, splitting_axes

if TYPE_CHECKING:
    from jshard.engine.region_call import RegionCall


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A call's program on data shards, how its results leave, and the copies behind them."""

    jaxpr: ClosedJaxpr
    results: tuple[Crossing, ...]


def partition(call: "RegionCall", avals: Sequence[ShapedArray]) -> Partition:
    """Returns a call's program on data shards.

    Args:
        call: the call.
        avals: the types of all its operands, and of copies of parameters after them.
    """
    # Copies are of earlier calls of this region, and known by their types alone. Those that may be of two parameters
    # are left out, and gathered again.
    region = call.region
    num_operands = len(call.operands)
    copies = region.copies(avals[num_operands:]) or {}
    num_taken = num_operands + len(copies)
    inside = call.program.jaxpr.in_avals
    operands = _entering(region, all_resolved(call.operands), avals[:num_operands], inside)
    execution = _Execution(call, operands, copies)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return execution.run(*arrays[:num_taken])

    jaxpr = jax.make_jaxpr(run)(*avals)
    num_results = len(call.program.jaxpr.out_avals)
    if call.returns_copies and execution.kept:
        region.gathered.append(Gathered(tuple(jaxpr.out_avals[num_results:]), execution.kept))
    return Partition(jaxpr, tuple(execution.leaving))


def _entering(
    region: Region, crossings: Sequence[Crossing], avals: Sequence[ShapedArray], inside: Sequence[ShapedArray]
) -> list[Crossing]:
    """Returns how operands enter a region, given their types outside and in the program."""
    # Backward in a loop under a map is staged for one row, before it is mapped, while its forward is mapped already and
    # has kept no piece for each device: it returned what the program returns. Taken for pieces, its rows would be. In
    # the same way a forward that is differentiated once more returns stacks that are on no stages.
    entering = []
    for crossing, aval, inner_aval in zip(crossings, avals, inside, strict=True):
        is_plain = aval.ndim == inner_aval.ndim
        if is_plain and crossing.is_own:
            crossing = Crossing(None)
        elif is_plain:
            crossing = crossing.of_whole_stack(data_degree(region.mesh), aval.shape)
        entering.append(crossing)
    return entering


def _targets_of(call: "RegionCall") -> list[Crossing]:
    """Returns how the gradients of a call leave: like their operands, which `_entering` describes."""
    inside = call.program.jaxpr.out_avals[: len(call.targets)]
    targets = []
    for target, aval, inner_aval in zip(all_resolved(call.targets), call.target_avals, inside, strict=True):
        if aval.ndim == inner_aval.ndim:
            target = target.of_whole_stack(data_degree(call.region.mesh), aval.shape)
        targets.append(target)
    return targets


class _Execution:
    """One run of a call's program, while it is traced.

    How results leave is known only once the body of the `shard_map` has been traced: tracing sets it, and it is read
    after that.

    Attributes:
        leaving: how its results leave.
        kept: how the copies leave that it returns behind them.
    """

    def __init__(self, call: "RegionCall", operands: list[Crossing], copies: Mapping[ParameterKey, Crossing]) -> None:
        self._call = call
        self._region = call.region
        self._operands = operands
        self._copies = copies
        self._targets = _targets_of(call)
        self._out_specs: list[PartitionSpec] = []
        self.leaving: list[Crossing] = [Crossing(None)] * len(call.program.jaxpr.out_avals)
        self.kept: dict[ParameterKey, Crossing] = {}

    @property
    def _entering(self) -> list[Crossing]:
        """How all arrays enter: the operands, then the copies."""
        return [*self._operands, *self._copies.values()]

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        """Runs it. If one device has the whole batch, nothing is gathered or summed: it runs unchanged."""
        region = self._region
        if region.degree == 1:
            return evaluate_jaxpr(self._call.program.jaxpr, [fetched(x) for x in arrays])
        sharded = jax.shard_map(
            functools.partial(self._on_part, region.inner),
            mesh=region.mesh,
            in_specs=tuple(region.specs(self._entering, arrays)),
            # How results leave follows from the rules that computed them. `jax.shard_map` reads this list after it has
            # traced the body, which fills it.
            out_specs=self._out_specs,
            axis_names=manual_axes(region.mesh),
            check_vma=False,
        )
        return sharded(*arrays)

    # ---- inner axes

    def _on_part(self, inner: tuple[str, ...], *xs: jax.Array) -> list[jax.Array]:
        """Runs the program on one place along inner axes of a data shard."""
        # The innermost axis is the outermost call: its partitioner runs the program that those of the other axes, and
        # the data shard's, have made of it.
        if not inner:
            return self._on_shard(*xs)
        *outer, axis = inner
        region = self._region
        results, dims, moved = over_axis(
            axis,
            degree(region.mesh, axis),
            functools.partial(self._on_part, tuple(outer)),
            xs,
            [crossing.inner.get(axis) for crossing in self._entering],
            [_state_over(axis, target) for target in self._targets],
            is_last=inner == region.inner,
        )
        mixing.note(region.unit, region.name, self._call.part, moved, over=axis)

        leaving = []
        for crossing, dim in zip((*self.leaving, *self.kept.values()), dims, strict=True):
            if dim is not None:
                crossing = dataclasses.replace(crossing, inner={**crossing.inner, axis: dim})
            leaving.append(crossing)
        self._set_leaving(leaving, results)
        return results

    # ---- a data shard

    def _on_shard(self, *xs: jax.Array) -> list[jax.Array]:
        """Runs the program on one data shard: from its parts of the operands to its parts of the results."""
        region = self._region
        call = self._call
        num_operands = len(self._operands)
        operands = []
        for crossing, x in zip(self._operands, xs[:num_operands], strict=True):
            operands.append(crossing.enter(x))
        copies = {}
        for (key, crossing), x in zip(self._copies.items(), xs[num_operands:], strict=True):
            copies[key] = crossing.enter(x)
        # A partitioner for each trace: what it caches are tracers of this one.
        batch_sizes = [region.batch] if region.batch else []
        name = region.unit.name or "(root)"
        if degree(region.mesh, PIPE) > 1:
            stages = region.unit.policy.stages
            p = StagesPartitioner(region.mesh, batch_sizes, copies, name, stages)
        else:
            p = ShardedPartitioner(region.mesh, batch_sizes, copies, name)
        results = self._results(p, operands)

        mixing.note(region.unit, region.name, call.part, p.moved)
        if isinstance(p, StagesPartitioner):
            note_stages(region.unit, region.name, call.part, call.phase, p.on_stages)
            if call.part == FORWARD:
                p.check_uses_stages(region.unit, region.name)
        # Of forward alone: the limits of these warnings are for what it computes.
        if call.part == FORWARD:
            note_layers(region.unit, p.layers_read)
            self._warn_of_whole(p.products)

        # Behind the results, so that these keep their positions whatever was gathered.
        copies_kept = region.keeps(p, self._operands) if call.returns_copies else {}
        # Only the keys count here: `_set_leaving` says how each leaves, with inner axes once more for each axis.
        self.kept = dict.fromkeys(copies_kept, Crossing(None))
        leaving = self._crossings_of_results(results)
        leaving += [Crossing.of(v) for v in copies_kept.values()]
        values = [*results, *copies_kept.values()]
        self._set_leaving(leaving, values)
        return [crossing.leave(v) for crossing, v in zip(leaving, values, strict=True)]

    def _crossings_of_results(self, results: list[Value]) -> list[Crossing]:
        """Returns how results leave: gradients, which are first, as each device's own if that is their target."""
        crossings = []
        for position, result in enumerate(results):
            is_own = position < len(self._targets) and self._targets[position].is_own
            crossings.append(Crossing.of(result, is_own=is_own))
        return crossings

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

    # ---- results and gradients

    def _results(self, p: ShardedPartitioner, operands: list[Value]) -> list[Value]:
        """Returns the results; gradients are stored like their parameters, those of copies as each device's part."""
        jaxpr, operands, sums = self._without_sums(operands)
        saved: set[Value] = set()
        if self._call.phase == BACKWARD:
            saved = self._saved(operands)
            self._gather_after_cotangents(jaxpr, operands, saved)
        states: list[State] = []
        shards: dict[int, Shard] = {}
        for position, target in enumerate(self._targets):
            # The gradient of a copy is summed later, with those of the other microbatches: `GatheredOnce.reduce`.
            state = PARTIAL if target.is_own else target.state
            states.append(state)
            if isinstance(state, Shard):
                shards[position] = state
        results = p.run_root(jaxpr.jaxpr, jaxpr.consts, operands, shards, unordered=saved, sums=sums)
        # Before the gradients: the order in which the program is emitted is that in which collectives run.
        without_target = []
        for position, value in enumerate(results[len(states) :], len(states)):
            # Backward has the same stages. Whatever else reads a stack has it in the order of the layers.
            if value.is_staged and position in self._call.residuals:
                without_target.append(value)
                continue
            without_target.append(p.materialize(p.reduce_partial(value)))
        if not states:
            return without_target
        with jax.named_scope(f"jshard[{p.name}]/{BACKWARD}"):
            gradients = self._gradients(p, results, states, shards)
            for position, total in sums.items():
                if total not in p.sums_in_loops:
                    gradient = gradients[position]
                    gradients[position] = gradient.with_array(total.x + gradient.x.astype(total.x.dtype))
            return [*gradients, *without_target]

    def _without_sums(self, operands: list[Value]) -> tuple[ClosedJaxpr, list[Value], dict[int, Value]]:
        """Returns the program without what it adds to running sums, its operands, and the sums by their position.

        Gradients are reduced as without sums. What a loop does not add to a sum itself is added after that.
        """
        program = self._call.program
        if not isinstance(program, SummingProgram):
            return program.jaxpr, operands, {}
        num_operands = len(program.addends.in_avals)
        sums = dict(zip(program.positions, operands[num_operands:], strict=True))
        return program.addends, operands[:num_operands], sums

    def _gradients(
        self, p: ShardedPartitioner, results: list[Value], states: list[State], shards: Mapping[int, Shard]
    ) -> list[Value]:
        """Returns the results that have a target, in their states.

        Units have reduced their gradients. What is still partial, such as those of the root's own parameters, is
        reduced here, after all of them and behind no barrier.

        Args:
            p: the partitioner.
            results: of the program; those with a target are first.
            states: the states of the targets.
            shards: those that are stored, by position.
        """
        # A gradient without examples, as of a penalty on a layer's weights, is no sum, and has stayed on its stage.
        unreduced = [p.off_stages(value) for value in at_positions(results, shards)]
        stored = p.reduce_to_shards(unreduced, list(shards.values()))
        reduced_here = [gradient for value, gradient in zip(unreduced, stored, strict=True) if value.is_partial]
        p.reduce_final_gradients(after=reduced_here)
        stored_gradients: dict[int, Value] = {}
        for position, gradient in zip(shards, stored, strict=True):
            if gradient.shard.placement.on_host:
                gradient = gradient.with_array(to_host(gradient.x))
            stored_gradients[position] = gradient

        gradients = []
        for position, state in enumerate(states):
            gradient = stored_gradients.get(position)
            gradients.append(p.in_state(results[position], state) if gradient is None else gradient)
        return gradients

    def _saved(self, operands: list[Value]) -> set[Value]:
        """Returns the operands of backward that no barrier holds back: what forward has saved on the device."""
        # A barrier is opaque to the compiler. In front of one, forward would have to store every value that backward
        # reads; else backward computes cheap ones again, in the kernels that read them. What is on the host waits: it
        # would be fetched long before it is read.
        cotangents = self._call.cotangents
        if not cotangents:
            return set()
        # Where the program is split further, a saved part is gathered again. To the compiler that is the gather that
        # forward has run, unless a barrier stands between: it would run one of them, and keep the whole value from
        # forward to backward.
        mesh = self._region.mesh
        if splitting_axes((*INNER_AXES, TENSOR), dict(mesh.shape)):
            return set()
        saved = set()
        for position, value in enumerate(operands):
            if position not in cotangents and not value.is_stored and not _compat.on_host(value.x):
                saved.add(value)
        return saved

    def _gather_after_cotangents(self, jaxpr: ClosedJaxpr, operands: list[Value], saved: set[Value]) -> None:
        """Ties the shards to the cotangents: else they would be gathered while forward runs."""
        # Nothing else holds them back: parameters exist when the step begins. Only the shards that this program gathers
        # are tied, and nothing where it gathers none (ZeRO-2). Pieces exist once forward has run; what is on the host
        # is fetched when it is read.
        shards = []
        for v in shards_gathered_by(jaxpr.jaxpr, operands, {name for name, *_ in self._copies}):
            is_whole_shard = not v.shard.pieces
            passes = _compat.on_host(v.x) or gathers.passes_barriers(v.shard.placement)
            if is_whole_shard and not passes:
                shards.append(v)
        if not shards:
            return
        cotangents = [v for v in operands if not v.is_stored and v not in saved]
        tied_shards, tied_cotangents = available_together(arrays_of(shards), arrays_of(cotangents))
        for operand, x in zip([*shards, *cotangents], [*tied_shards, *tied_cotangents], strict=True):
            operand.x = x

    def _set_leaving(self, leaving: list[Crossing], results: Sequence[jax.Array | Value]) -> None:
        """Sets how results leave, and the copies after them."""
        num_results = len(leaving) - len(self.kept)
        self.leaving = leaving[:num_results]
        self.kept = dict(zip(self.kept, leaving[num_results:], strict=True))
        # In place: `jax.shard_map` was given this list. With inner axes it is called once for each, the last time with
        # what leaves the region.
        self._out_specs[:] = self._region.specs(leaving, results)


def _state_over(axis: str, target: Crossing) -> State:
    """Returns the state over an inner axis in which a gradient leaves; that of a copy is a part, summed later."""
    if target.is_copy and axis not in target.inner:
        return PARTIAL
    return target.inner.get(axis)
