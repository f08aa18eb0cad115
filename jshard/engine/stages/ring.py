"""The ring of places: in each tick every place runs a chunk of its layers on one microbatch, and passes it on."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jshard.engine.schedule.program_schedule import GatheredParams
from jshard.engine.stages import exchanges
from jshard.engine.stages.layer_program import LayerProgram
from jshard.engine.stages.stacked_results import ChunkRun

Number = jax.Array | int
"""A number that is known where the program has a copy of a round for itself, and traced in a loop over rounds."""

Carry = list[jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingState:
    """What a tick passes to the next one, on each place.

    Attributes:
        arriving: the carry that is computed next: the place before has sent it.
        computed: the carry that the last tick has computed and not sent yet; empty if results are sent at once.
        waiting: carries that wait before the first place until all microbatches have gone around; an array with a slot
            for each.
        collected: the carries after the last layer; see `FinalCarry`.
        buffers: of the stacked results.
    """

    arriving: Carry
    computed: Carry
    waiting: Carry
    collected: Carry
    buffers: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class RoundParams:
    """The parameters that a tick may need: of the round that is beginning, and of the one before it.

    Attributes:
        number: of the round that is beginning.
        current: its parameters; None if no round is left to begin.
        previous: those of the round before; None if there is none.
    """

    number: Number
    current: list[GatheredParams] | None
    previous: list[GatheredParams] | None


class Ring:
    """The places of a loop, and what they do in a tick.

    Args:
        layer: the program of a layer.
        is_reverse: whether the last layer runs first: then microbatches enter at the last place.
        name: of the loop, for the names of what is sent.
    """

    def __init__(self, layer: LayerProgram, *, is_reverse: bool, name: str) -> None:
        self._layer = layer
        self._schedule = layer.schedule
        self._layout = layer.schedule.layout
        self._is_reverse = is_reverse
        self._name = name

    @property
    def _position(self) -> jax.Array:
        """The position of this place in the ring: microbatches enter at 0."""
        place = exchanges.this_place()
        return self._layout.num_places - 1 - place if self._is_reverse else place

    @property
    def last_place(self) -> int:
        """The place that runs the last layers."""
        return 0 if self._is_reverse else self._layout.num_places - 1

    def chunk_of_round(self, number: Number) -> Number:
        """Returns which of its chunks a place runs in a round."""
        return self._layout.num_rounds - 1 - number if self._is_reverse else number

    # ---- the state

    def begin(self) -> RingState:
        """Returns the state before the first tick."""
        carry = [exchanges.zeros(x.shape, x.dtype) for x in self._layer.carry_types]
        num_waiting = self._schedule.num_waiting
        waiting = []
        if self._layout.num_rounds > 1 and num_waiting > 0:
            waiting = [exchanges.zeros((num_waiting, *x.shape), x.dtype) for x in self._layer.carry_types]
        return RingState(
            arriving=carry,
            computed=carry if self._sends_late else [],
            waiting=waiting,
            collected=[final.empty() for final in self._layer.final_carries],
            buffers=[result.empty() for result in self._layer.results],
        )

    @property
    def _sends_late(self) -> bool:
        return self._schedule.ticks_per_hop == 2

    # ---- a tick

    def tick(self, state: RingState, number: jax.Array, params: RoundParams) -> RingState:
        """Runs one tick.

        Args:
            state: what the tick before has left.
            number: of the tick, from the first one of the loop.
            params: the parameters of the places' rounds.
        """
        schedule = self._schedule
        position = self._position
        run_number = schedule.run_number(number, position)
        is_busy = (run_number >= 0) & (run_number < schedule.num_runs)
        # An idle place computes as if: on real examples, as zeros could become NaN. The result is not used.
        run_number = jnp.clip(run_number, 0, schedule.num_runs - 1)
        round_number = run_number // schedule.num_microbatches
        microbatch = run_number % schedule.num_microbatches

        # With late sending, what the last tick has computed is under way while this one computes.
        sent = self._pass_on(state.computed) if self._sends_late else []
        arrived, waiting = self._through_queue(state, number, position)
        enters = ((position == 0) & (round_number == 0)) | ~is_busy
        starts = self._layer.starts(microbatch)
        carry = [jnp.where(enters, start, x) for start, x in zip(starts, arrived, strict=True)]

        run = self._chunk_run(round_number, microbatch, is_busy)
        carry, rows = self._run_chunk(carry, run, params)
        buffers = []
        for result, buffer, of_chunk in zip(self._layer.results, state.buffers, rows, strict=True):
            buffers.append(result.written(buffer, of_chunk, run))
        is_last = position == self._layout.num_places - 1
        is_through = is_busy & is_last & (round_number == self._layout.num_rounds - 1)
        collected = []
        for final, so_far, x in zip(self._layer.final_carries, state.collected, carry, strict=True):
            collected.append(final.written(so_far, x, microbatch, is_through))
        if self._sends_late:
            return RingState(sent, carry, waiting, collected, buffers)
        return RingState(self._pass_on(carry), [], waiting, collected, buffers)

    def _through_queue(self, state: RingState, number: jax.Array, position: jax.Array) -> tuple[Carry, Carry]:
        """Returns the carry to compute, and the queue: the first place takes what has waited longest."""
        if not state.waiting:
            return state.arriving, []
        slot = number % self._schedule.num_waiting
        arrived = []
        waiting = []
        for queue, x in zip(state.waiting, state.arriving, strict=True):
            longest = lax.dynamic_index_in_dim(queue, slot, 0, keepdims=False)
            arrived.append(jnp.where(position == 0, longest, x))
            waiting.append(lax.dynamic_update_index_in_dim(queue, x, slot, 0))
        return arrived, waiting

    def _pass_on(self, carry: Carry) -> Carry:
        step = -1 if self._is_reverse else 1
        with jax.named_scope(f"jshard[{self._name}]/pipe"):
            return [exchanges.pass_on(x, self._layout.num_places, step) for x in carry]

    def _chunk_run(self, round_number: jax.Array, microbatch: jax.Array, is_busy: jax.Array) -> ChunkRun:
        layout = self._layout
        chunk = layout.num_rounds - 1 - round_number if self._is_reverse else round_number
        first_layer = (chunk * layout.num_places + exchanges.this_place()) * layout.layers_per_chunk
        layers = first_layer + jnp.arange(layout.layers_per_chunk)
        is_layer = layers < layout.num_layers
        return ChunkRun(round_number, chunk, microbatch, is_layer, is_busy)

    # ---- a chunk of layers

    def _run_chunk(self, carry: Carry, run: ChunkRun, params: RoundParams) -> tuple[Carry, list[jax.Array]]:
        """Runs a chunk with the parameters of its round."""

        # One function for both rounds: the program has it once.
        @jax.jit
        def run_with(gathered: list[GatheredParams], carry: Carry) -> tuple[Carry, list[jax.Array]]:
            return self._run_layers(gathered, carry, run)

        current = params.current
        previous = params.previous
        if current is None or previous is None:
            return run_with(current or previous or [], carry)
        # A conditional takes the parameters of either round as they are; a select would copy them in each tick.
        return lax.cond(run.round == params.number, lambda: run_with(current, carry), lambda: run_with(previous, carry))

    def _run_layers(self, gathered: list[GatheredParams], carry: Carry, run: ChunkRun) -> tuple[Carry, list[jax.Array]]:
        """Runs the layers of a chunk, one after the other."""
        num_layers = self._layout.layers_per_chunk
        if num_layers == 1:
            carry, rows = self._run_layer(gathered, carry, run, 0)
            return carry, [row[None] for row in rows]

        def step(carry: Carry, layer: jax.Array) -> tuple[Carry, list[jax.Array]]:
            return self._run_layer(gathered, carry, run, layer)

        return lax.scan(step, carry, jnp.arange(num_layers), reverse=self._is_reverse)

    def _run_layer(
        self, gathered: list[GatheredParams], carry: Carry, run: ChunkRun, layer: Number
    ) -> tuple[Carry, list[jax.Array]]:
        row = run.chunk * self._layout.layers_per_chunk + layer
        params = self._layer.inputs.gathers.of_layer(gathered, layer)
        results, rows = self._layer.run(carry, row, run.microbatch, params)
        if self._layout.is_full:
            return results, rows
        # The last numbers have no layer: what arrives there is passed on.
        is_layer = run.is_layer[layer]
        passed = [jnp.where(is_layer, new, old) for new, old in zip(results, carry, strict=True)]
        return passed, rows
