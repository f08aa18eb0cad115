"""A layer as a function of arrays: one row of the stage, on one microbatch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from jshard import _compat
from jshard.engine import rules
from jshard.engine.rules import PARTIAL, Shard, Value, loops
from jshard.engine.rules.loops import Scan
from jshard.engine.rules.values import arrays_of, in_states
from jshard.engine.schedule.program_schedule import GatheredParams
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages.layer_inputs import LayerInputs, ScannedParameter
from jshard.engine.stages.stacked_results import (
    FinalCarry,
    StackedGradients,
    StackedResult,
    StackedRows,
    StackedSums,
)
from jshard.engine.stages.tick_partitioner import TickPartitioner
from jshard.errors import CallError
from jshard.plans.mesh import PIPE, degree
from jshard.plans.stages import Stages, StageSchedule


class LayerProgram:
    """The body of a loop over units, as it runs on a stage.

    Attributes:
        schedule: when a place runs its layers.
        inputs: the operands of the loop, on the stages.
        tick: the partitioner of a tick.
        carry_types: the types of the carry of one microbatch.
        final_carries: how the carry is collected after the last layer.
        results: the results that the loop stacks, but for those that are rows of scanned values, unread.
        products: the products that a place computes in the whole loop.
    """

    def __init__(self, outer: ShardedPartitioner, eqn: JaxprEqn, operands: list[Value], settings: Stages) -> None:
        self._eqn = eqn
        self._outer = outer
        self._settings = settings
        num_places = degree(outer.mesh, PIPE)
        self.schedule = StageSchedule.of(eqn.params["length"], num_places, settings)
        self.tick = TickPartitioner(outer, self.schedule.num_microbatches)
        num_consts, self._num_carry = _compat.scan_arguments(eqn)
        self._first_scanned = num_consts + self._num_carry
        self._scanned_operands = operands[self._first_scanned :]
        jaxpr, _ = rules.opened(eqn.params["jaxpr"])
        self.tick.set_layer(jaxpr, self._num_carry)
        self.inputs = LayerInputs(
            outer,
            self.tick,
            self.schedule,
            jaxpr,
            shared=operands[:num_consts],
            starts=operands[num_consts : self._first_scanned],
            scanned=self._scanned_operands,
        )
        self._scan = self._traced_once()
        # It was recorded for all layers and one microbatch: a place runs its part of the layers on all microbatches.
        self.products = [
            product.repeated(self.schedule.num_microbatches / num_places) for product in self.tick.products
        ]
        # Of the traced layer: which of its results are gradients.
        self._gradients = self.tick.gradients[self._num_carry :]
        types = self._scan.traced.out_avals
        self.carry_types: list[ShapedArray] = types[: self._num_carry]
        self.final_carries = []
        for part, state in zip(self.carry_types, self._scan.states, strict=True):
            self.final_carries.append(FinalCarry(part, state, self.schedule.num_microbatches))
        self._stacked = [k for k, scanned in enumerate(self._scan.passed_through) if scanned is None]
        self.results: list[StackedResult] = []
        for k, row in zip(self._stacked, types[self._num_carry :], strict=True):
            self.results.append(self._stacked_result(k, row))

    def _traced_once(self) -> Scan:
        """Returns the loop with the states of its carry, from a trace on the first microbatch."""
        inputs = self.inputs
        operands = [*inputs.shared_of(0), *inputs.starts_of(0), *inputs.stacks_of(0)]
        with self.tick.on(jnp.int32(0), refuses_mixing=False):
            return Scan(self.tick, self._eqn, operands)

    def _stacked_result(self, k: int, row: ShapedArray) -> StackedResult:
        """Returns how a stacked result is collected, from its state in a layer."""
        layout = self.schedule.layout
        state = self._scan.row_states[k]
        if isinstance(state, Shard):
            raise self._refused_pieces(state)
        if _compat.on_host(row):
            raise self._refused_on_host()
        if state != PARTIAL:
            assert state is None or isinstance(state, int), f"the row of a stack is {state}"
            return StackedRows(row, layout, state, self.schedule.num_microbatches)
        parameter, dtype = self._parameter_of_gradient(k)
        if parameter is None:
            return StackedSums(row, layout)
        return StackedGradients(row, layout, parameter, self._sum_dtype(dtype), dtype)

    def _refused_pieces(self, shard: Shard) -> CallError:
        return CallError(
            "Layers on pipeline stages keep pieces of their parameters for backward.",
            where=self._outer.place(self._eqn) or "in a loop over layers",
            why=f"reshard_after_forward={shard.pieces}: a stage gathers a layer once for all microbatches, and then"
            " keeps it whole or not at all.",
            do="js.fully_shard(block, mesh=mesh, reshard_after_forward=True)  # or False, which keeps its own layers",
        )

    def _refused_on_host(self) -> CallError:
        return CallError(
            "Layers on pipeline stages keep activations in host memory.",
            where=self._outer.place(self._eqn) or "in a loop over layers",
            why="a stage writes those of each microbatch when it computes it, or leaves them as they are when it is"
            " idle, and in host memory nothing can be computed.",
            do='js.fully_shard(block, mesh=mesh, remat="full")  # keeps the input of each layer, on the device',
        )

    def _parameter_of_gradient(self, k: int) -> tuple[ScannedParameter | None, np.dtype]:
        """Returns the parameter that a stacked sum is the gradient of, if it is one; and the dtype of the result."""
        stack = self._eqn.outvars[self._num_carry + k]
        dtype = rules.type_of(stack).dtype
        gradient = self._gradients[k]
        if gradient is not None:
            return self.inputs.parameters.get(gradient.argument - self._first_scanned), gradient.dtype
        # Not of one unit: the program around knows that it becomes a gradient, and of which parameter.
        shard = self._outer.row_shards.get(stack)
        if shard is None:
            return None, dtype
        return ScannedParameter.of(shard.placement, self.schedule.layout.num_places), dtype

    def _sum_dtype(self, dtype: np.dtype) -> np.dtype:
        return dtype if self._settings.sum_dtype is None else np.dtype(self._settings.sum_dtype)

    # ---- running it

    def starts(self, microbatch: jax.Array) -> list[jax.Array]:
        """Returns the carry of the first layer."""
        with self.tick.on(microbatch):
            return self._scan.carried(self.inputs.starts_of(microbatch), self._scan.states)

    def run(
        self,
        carry: list[jax.Array],
        row: jax.Array,
        microbatch: jax.Array,
        gathered: dict[int, GatheredParams],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs one layer on one microbatch.

        Args:
            carry: what the layer before has returned.
            row: the number of the layer among those of this place.
            microbatch: its number.
            gathered: the parameters that were gathered for it, by the position of their unit.

        Returns:
            The carry, and a row of each stacked result.
        """
        scan = self._scan
        tick = self.tick
        with tick.own_trace(), tick.on(microbatch):
            rows = [self._row(k, row, microbatch) for k in range(len(self.inputs.scanned))]
            shared = arrays_of(self.inputs.shared_of(microbatch))
            carried = in_states(carry, scan.states)
            arguments = scan.body_arguments(carried, rows, shared)
            results = scan.body_results(tick.run_layer(scan.consts, arguments, gathered))
            new_carry = scan.carried(results[: self._num_carry], scan.states)
            stacked = []
            for k in self._stacked:
                stacked.append(tick.in_state(results[self._num_carry + k], scan.row_states[k]).x)
        return new_carry, stacked

    def _row(self, k: int, row: jax.Array, microbatch: jax.Array) -> Value:
        value = self.inputs.scanned[k]
        if k in self.inputs.gathers.unread:
            return loops.row_of(value, loops.row_type(value.x))  # its unit receives what was gathered
        return self.inputs.row_of(k, row, microbatch)

    def loop_results(self, carry: list[Value], stacked: list[Value]) -> list[Value]:
        """Returns the results of the loop in their order, with those that are rows of scanned values, unread."""
        remaining = iter(stacked)
        results = list(carry)
        for scanned in self._scan.passed_through:
            results.append(next(remaining) if scanned is None else self._scanned_operands[scanned])
        return results
