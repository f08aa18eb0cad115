"""What the layers of a loop read: what all of them share, and the rows of their own, on the stages."""

import dataclasses

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from jshard.engine import stored
from jshard.engine.rules import Shard, Value, data_free, loops
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages import exchanges
from jshard.engine.stages.round_gathers import RoundGathers
from jshard.engine.stages.tick_partitioner import TickPartitioner
from jshard.errors import CallError
from jshard.plans.memories import fetched
from jshard.plans.mesh import PIPE
from jshard.plans.placement import Placement
from jshard.plans.stages import StageSchedule


@dataclasses.dataclass(frozen=True)
class ScannedParameter:
    """A parameter of which each layer has a row.

    Attributes:
        stored: how it is stored over the data axes.
        on_stage: how the rows of a place are stored, once places have exchanged their parts.
        paths: of the parameter of each layer, or of a stack of all layers; empty if unknown.
    """

    stored: Placement
    on_stage: Placement
    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, placement: Placement, num_places: int, paths: tuple[str, ...] = ()) -> "ScannedParameter":
        """Returns a parameter, given its placement and the degree of `pipe`."""
        return cls(placement, placement.on_stage(num_places), paths)

    def dim_over_pipe(self, x: jax.Array) -> int | None:
        """Returns the dim of a row that is split over `pipe`, given the array of all rows; None if there is none."""
        if PIPE not in self.stored.axes:
            return None
        dim = stored.shard_dim(x, self.stored)
        return None if dim is None else dim - 1

    @property
    def is_padded_beside_stage(self) -> bool:
        """Whether the row of a stage has rows of padding that its own placement does not know: it has no shards."""
        return self.stored.dim is not None and self.on_stage.dim is None


class LayerInputs:
    """The operands of a loop, on the stages.

    Attributes:
        shared: what all layers read.
        starts: the carry of the first layer. Both have the examples of all places along `pipe`.
        scanned: the rows of this place, by index of the scanned value.
        parameters: those that are parameters, by the same index.
        gathers: the parameters that are gathered for a round.
        dealt: indices of the scanned values, other than parameters, whose rows the places have exchanged.
    """

    def __init__(
        self,
        outer: ShardedPartitioner,
        tick: TickPartitioner,
        schedule: StageSchedule,
        jaxpr: Jaxpr,
        shared: list[Value],
        starts: list[Value],
        scanned: list[Value],
    ) -> None:
        self._outer = outer
        self._tick = tick
        self._schedule = schedule
        self.shared = [self._for_all_layers(value) for value in shared]
        self.starts = [self._for_all_layers(value) for value in starts]
        self.parameters = self._parameters_among(scanned)
        self.gathers = RoundGathers.of(jaxpr, self.shared, self.starts, self._states_on_stage(scanned))
        self.dealt: list[int] = []
        self.scanned = [self._rows_of_place(k, value) for k, value in enumerate(scanned)]

    # ---- a microbatch

    def shared_of(self, microbatch: jax.Array | int) -> list[Value]:
        """Returns what all layers read, for one microbatch."""
        return [self._part_of(value, microbatch) for value in self.shared]

    def starts_of(self, microbatch: jax.Array | int) -> list[Value]:
        """Returns the carry of the first layer, for one microbatch."""
        return [self._part_of(value, microbatch) for value in self.starts]

    def stacks_of(self, microbatch: jax.Array | int) -> list[Value]:
        """Returns the scanned values with the rows of this place, for one microbatch."""
        return [self._part_of(value, microbatch) for value in self.scanned]

    def row_of(self, k: int, row: jax.Array, microbatch: jax.Array) -> Value:
        """Returns one row of a scanned value, for one microbatch."""
        value = self.scanned[k]
        sizes = [1, *value.shape[1:]]
        start: list[jax.Array | np.integer] = [row, *[np.int32(0)] * (value.ndim - 1)]
        if value.is_split:
            sizes[value.dim] //= self._schedule.num_microbatches
            start[value.dim] = microbatch * np.int32(sizes[value.dim])
        # In one slice, so that no array has the row of all microbatches.
        x = lax.dynamic_slice(value.x, start, sizes).squeeze(0)
        return loops.row_of(value, x)

    def _part_of(self, value: Value, microbatch: jax.Array | int) -> Value:
        # A new value in each case. What one tick converts it to is kept with it, and is a tracer of that tick.
        if value.is_data_free:
            return data_free.copy_into_trace(value, {})
        if not value.is_split:
            return value.with_array(value.x)
        size = value.shape[value.dim] // self._schedule.num_microbatches
        return value.with_array(lax.dynamic_slice_in_dim(value.x, microbatch * size, size, value.dim))

    # ---- parameters

    def _parameters_among(self, scanned: list[Value]) -> dict[int, ScannedParameter]:
        """Returns the scanned values that are stored shards of each layer."""
        parameters = {}
        num_places = self._schedule.layout.num_places
        for k, value in enumerate(scanned):
            if value.is_stored and not value.shard.pieces and not loops.is_stored_along_trips(value):
                paths = value.row_parameters or (value.parameter,)
                parameters[k] = ScannedParameter.of(value.shard.placement, num_places, paths)
        return parameters

    def _states_on_stage(self, scanned: list[Value]) -> list[Value]:
        """Returns values without arrays that stand for the scanned ones on the stages."""
        values = []
        for k in range(len(scanned)):
            parameter = self.parameters.get(k)
            values.append(Value(None, None if parameter is None else Shard(parameter.on_stage)))
        return values

    # ---- all microbatches

    def _for_all_layers(self, value: Value) -> Value:
        """Returns a value as all layers read it: with the examples of all places."""
        # What is cheap to know without data enters a tick as its equations. Random bits are drawn once, out here.
        if value.is_data_free and not data_free.is_costly(value):
            return value
        value = self._on_data_axes(value)
        if not value.is_split:
            return value
        self._check_divides(value)
        return value.with_array(exchanges.gather_examples(value.x, value.dim))

    def _on_data_axes(self, value: Value) -> Value:
        """Returns a value as an array of this data shard: split or whole."""
        outer = self._outer
        value = outer.read(outer.off_stages(value))
        return outer.materialize(outer.reduce_partial(value))

    def _rows_of_place(self, k: int, value: Value) -> Value:
        """Returns a scanned value with the rows of this place."""
        layout = self._schedule.layout
        if value.is_staged and value.staged.layout == layout:  # forward has left it here
            row_dim = value.staged.row_dim
            return Value(value.x, None if row_dim is None else row_dim + 1)
        if k in self.parameters:
            return self._parameter_of_place(k, value)
        value = self._outer.off_stages(value)
        value = self._outer.reduce_partial(self._outer.read(value))
        value = self._outer.materialize(value, skip=(0,))
        if value.state == 0:
            value = self._outer.whole(value)
        if not value.is_split:
            return Value(exchanges.to_stages(value.x, layout, None), parameter=value.parameter)
        self._check_divides(value)
        self.dealt.append(k)
        return Value(exchanges.to_stages(value.x, layout, value.dim - 1), value.state)

    def _parameter_of_place(self, k: int, value: Value) -> Value:
        layout = self._schedule.layout
        parameter = self.parameters[k]
        x = fetched(value.x)
        dtype = self.gathers.dtype_of(k)
        if dtype is not None and dtype.itemsize < x.dtype.itemsize:
            x = x.astype(dtype)  # places exchange it in the dtype in which it is gathered
        with jax.named_scope(f"jshard[{self._outer.name}]/to_stages"):
            x = exchanges.to_stages(x, layout, parameter.dim_over_pipe(x), parameter.stored)
        if parameter.is_padded_beside_stage:
            x = jax.vmap(lambda row: stored.without_padding(row, parameter.stored))(x)
        return Value(x, Shard(parameter.on_stage), parameter=value.parameter)

    def _check_divides(self, value: Value) -> None:
        """Raises unless the examples of a data shard divide into microbatches."""
        layout = self._schedule.layout
        num_examples = value.shape[value.dim] * layout.num_places
        number = self._schedule.num_microbatches
        if num_examples % number:
            raise CallError(
                "The batch does not divide into the microbatches of the pipeline.",
                where=f"{num_examples} examples on each of {self._tick.num_data_shards} data shards",
                why=f"{number} microbatches of equal size are needed.",
                do=f"a batch that is a multiple of {number * self._tick.num_data_shards}, or"
                f" js.parallel.stages(model, microbatches={layout.num_places})",
            )
