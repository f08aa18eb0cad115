"""A loop over units on the stages of a pipeline, round by round.

While a round runs, its places gather the parameters of the next one over `fsdp`, and reduce the gradients that the
round before the last has left. Both have the ticks of all microbatches beside them:

    round      :      0      :      1      :      2      :      3      :    drain    :
    ticks      :     all     :     all     :     all     :     all     :  the last   :
    gather     : g0     g1   :      g2     :      g3     :             :             :
    reduce     :             :             :      r0     :      r1     :      r2     : r3
    program    : before loop :  before     :     loop    :  after loop : after loop  :

(g: the parameters of a round, r: its gradients.) When a round begins, later places are still in the one before it: so
the gradients of a round are complete when the round after it ends, and two rounds of parameters are in use. The first
rounds have nothing to reduce, and the last ones nothing to gather. They are *peeled*: copies of them stand before and
after the loop, so that nothing is gathered or reduced without use.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh

from jshard.engine import gradient_sums, stored
from jshard.engine.rules import Value
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.program_schedule import GatheredParams
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages.layer_program import LayerProgram
from jshard.engine.stages.records import records_of
from jshard.engine.stages.ring import Number, Ring, RingState, RoundParams
from jshard.engine.stages.round_gathers import for_each_layer
from jshard.engine.stages.stacked_results import StackedGradients
from jshard.engine.unit_call import BACKWARD
from jshard.plans.mesh import mesh_of_place
from jshard.plans.stages import Stages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundState:
    """What a round passes to the next one.

    Attributes:
        ring: what the last tick has left.
        previous: the parameters of the round that has ended, where later places still are.
        current: those of the round that begins.
        sums: the gradients of the round before the one that has ended: complete, and yet to be reduced.
        reduced: the reduced gradients, with a row for each layer of this place.
    """

    ring: RingState
    previous: list[GatheredParams]
    current: list[GatheredParams]
    sums: list[jax.Array]
    reduced: list[jax.Array]


class StagedLoop:
    """A loop over units on the stages of a pipeline. See the module's docstring.

    Args:
        outer: the partitioner of the program around.
        eqn: the loop.
        operands: its operands.
        settings: how it runs.
    """

    def __init__(self, outer: ShardedPartitioner, eqn: JaxprEqn, operands: list[Value], settings: Stages) -> None:
        self._outer = outer
        self._layer = LayerProgram(outer, eqn, operands, settings)
        self._schedule = self._layer.schedule
        self._layout = self._layer.schedule.layout
        self._ring = Ring(self._layer, is_reverse=eqn.params["reverse"], name=outer.name)
        self._gradients: dict[int, StackedGradients] = {}  # among the stacked results, by position
        for position, result in enumerate(self._layer.results):
            if isinstance(result, StackedGradients):
                self._gradients[position] = result

    def run(self) -> list[Value]:
        """Runs the loop; returns its results."""
        state = self._run_rounds()
        collected = state.ring.collected
        last_place = self._ring.last_place
        with jax.named_scope(f"jshard[{self._outer.name}]/pipe"):
            finals = zip(self._layer.final_carries, collected, strict=True)
            carry = [final.value(x, last_place) for final, x in finals]
        buffers = list(state.ring.buffers)
        for position, x in zip(self._gradients, state.reduced, strict=True):
            buffers[position] = x
        with jax.named_scope(f"jshard[{self._outer.name}]/from_stages"):
            results = zip(self._layer.results, buffers, strict=True)
            stacked = [result.value(buffer) for result, buffer in results]
        self._outer.records += [*self._layer.products, *records_of(self._layer, self._outer.trips)]
        return self._layer.loop_results(carry, stacked)

    # ---- rounds

    def _run_rounds(self) -> RoundState:
        num_rounds = self._layout.num_rounds
        # The rounds that are alike: they have a round before them, one after them, and gradients to reduce.
        first_looped = 2 if self._gradients else 1
        end_looped = num_rounds - 1
        state = self._begin()
        number = 0
        while number < num_rounds:
            if number == first_looped and end_looped - first_looped > 1:
                state = self._run_looped(state, first_looped, end_looped)
                number = end_looped
                continue
            # All of it is ready before the next round begins, as in a loop. Else the compiler would gather and reduce
            # elsewhere than beside the ticks: what is reduced is not read until the end.
            (state,) = available_together(self._run_round(state, number))
            number += 1
        return self._drain(state)

    def _run_looped(self, state: RoundState, first: int, end: int) -> RoundState:
        def step(state: RoundState, number: jax.Array) -> tuple[RoundState, None]:
            return self._run_round(state, number), None

        state, _ = lax.scan(step, state, jnp.arange(first, end, dtype=jnp.int32))
        return state

    def _begin(self) -> RoundState:
        """Returns the state before the first round, with its parameters."""
        ring = self._ring.begin()
        reduced = []
        for position, gradients in self._gradients.items():
            sums = gradients.sums(ring.buffers[position], 0)
            row = jax.eval_shape(functools.partial(self._reduced_rows, gradients), sums)
            reduced.append(jnp.zeros((self._layout.layers_per_place, *row.shape[1:]), row.dtype))
        current = self._gather(self._shards(0))
        return RoundState(ring, previous=[], current=current, sums=[], reduced=reduced)

    def _run_round(self, state: RoundState, number: Number) -> RoundState:
        """Runs a round: the ticks in which all microbatches begin it."""
        is_known = isinstance(number, int)
        is_first = is_known and number == 0
        is_last = is_known and number == self._layout.num_rounds - 1
        later: list[GatheredParams] = []
        if not is_last:
            state, later = self._gather_next(state, number + 1)
        reduced = self._with_reduced(state, number)
        params = RoundParams(number, state.current, None if is_first else state.previous)
        first_tick = number * self._schedule.num_microbatches
        ring = self._run_ticks(state.ring, first_tick, self._schedule.num_microbatches, params)
        # Collectives end before sums are taken out of their buffers: else the compiler hides them beside that.
        ring, later, reduced = available_together(ring, later, reduced)
        # The round before is complete now, which has its sums in the other buffers.
        sums = [] if is_first else self._sums(ring, number - 1)
        return RoundState(ring, previous=state.current, current=later, sums=sums, reduced=reduced)

    def _drain(self, state: RoundState) -> RoundState:
        """Runs the ticks after the last round, in which later places end it; reduces what is left."""
        num_rounds = self._layout.num_rounds
        reduced = self._with_reduced(state, num_rounds)
        params = RoundParams(num_rounds, None, state.previous)
        first_tick = num_rounds * self._schedule.num_microbatches
        ring = self._run_ticks(state.ring, first_tick, self._schedule.num_draining_ticks, params)
        ring, reduced = available_together(ring, reduced)
        sums = self._sums(ring, num_rounds - 1)
        last = dataclasses.replace(state, ring=ring, sums=sums, reduced=reduced)
        return dataclasses.replace(last, reduced=self._with_reduced(last, num_rounds + 1))

    def _run_ticks(self, ring: RingState, first: Number, count: int, params: RoundParams) -> RingState:
        def step(ring: RingState, number: jax.Array) -> tuple[RingState, None]:
            return self._ring.tick(ring, number, params), None

        ring, _ = lax.scan(step, ring, first + jnp.arange(count, dtype=jnp.int32))
        # The compiler's scheduler goes from the end of a round to its beginning, and first takes what the fewest steps
        # are behind. This one more step behind the ticks lets collectives end after them, and so run beside them.
        (ring,) = available_together(ring)
        return ring

    # ---- parameters

    def _shards(self, number: Number) -> list[list[jax.Array]]:
        """Returns the shards of a round's parameters."""
        inputs = self._layer.inputs
        chunk = self._ring.chunk_of_round(number)
        return inputs.gathers.shards_of(inputs.scanned, chunk, self._layout.layers_per_chunk)

    def _gather_next(self, state: RoundState, number: Number) -> tuple[RoundState, list[GatheredParams]]:
        """Returns the state when a round begins, and the parameters of the next one, which has this number."""
        # Not before this round: else all of them would be gathered when the loop begins.
        shards, arriving = available_together(self._shards(number), state.ring.arriving)
        ring = dataclasses.replace(state.ring, arriving=arriving)
        inputs = self._layer.inputs
        sums, gathered = inputs.gathers.followed_by(state.sums, self._gather(shards), inputs.scanned, self._mesh)
        return dataclasses.replace(state, ring=ring, sums=sums), gathered

    def _gather(self, shards: list[list[jax.Array]]) -> list[GatheredParams]:
        inputs = self._layer.inputs
        return inputs.gathers.gather(shards, inputs.scanned, self._mesh)

    @property
    def _mesh(self) -> Mesh:
        return cast(Mesh, mesh_of_place(self._outer.mesh))

    # ---- gradients

    def _sums(self, ring: RingState, number: Number) -> list[jax.Array]:
        """Returns the sums of a round that all places have ended."""
        return [gradients.sums(ring.buffers[position], number) for position, gradients in self._gradients.items()]

    def _with_reduced(self, state: RoundState, number: Number) -> list[jax.Array]:
        """Returns the reduced gradients with those of two rounds before, which are complete when a round begins."""
        if isinstance(number, int) and number < 2:
            return state.reduced
        first_row = self._ring.chunk_of_round(number - 2) * self._layout.layers_per_chunk
        result = []
        for gradients, sums, reduced in zip(self._gradients.values(), state.sums, state.reduced, strict=True):
            rows = self._reduced_rows(gradients, sums)
            result.append(lax.dynamic_update_slice_in_dim(reduced, rows, first_row, 0))
        return result

    def _reduced_rows(self, gradients: StackedGradients, sums: jax.Array) -> jax.Array:
        """Returns the gradients of a chunk of layers, reduced over the data axes of its place, as they are stored."""
        parameter = gradients.parameter

        def reduce_layer(rows: list[jax.Array]) -> list[jax.Array]:
            part_dtypes = tuple(row.dtype for row in rows)
            reduced = gradient_sums.reduce_unit(rows, (parameter.on_stage,), self._mesh, False, part_dtypes)
            if parameter.is_padded_beside_stage:
                return [stored.with_padding(x, parameter.stored) for x in reduced]
            return reduced

        with jax.named_scope(f"jshard[{self._outer.name}]/{BACKWARD}"):
            (rows,) = for_each_layer(reduce_layer, [sums])
        return rows
