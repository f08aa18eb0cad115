"""The parameters of a round: gathered over `fsdp` once for all microbatches, beside the ticks of the round before."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from jshard.engine import gathers
from jshard.engine.rules import Value
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.loop_pipeline import variables_read
from jshard.engine.schedule.prefetch import LoopPlan
from jshard.engine.schedule.program_schedule import GatheredParams, ScheduledUnit

Arrays = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class RoundUnit:
    """A unit whose parameters are gathered for a round.

    Attributes:
        position: in the schedule of a layer's program.
        scheduled: the unit, with shards that stand for those of any layer.
        scanned: for each of its shards, the index of the scanned value that it is a row of.
        shard_dims: the dim of each shard along which it is gathered, counted from the end; None if it is whole.
    """

    position: int
    scheduled: ScheduledUnit
    scanned: list[int]
    shard_dims: list[int | None]


@dataclasses.dataclass(frozen=True)
class RoundGathers:
    """What is gathered for a round.

    Attributes:
        units: the units of a layer whose parameters are all rows of scanned values.
        unread: the scanned values of which a tick needs the types alone, as its units receive what was gathered.
    """

    units: list[RoundUnit]
    unread: frozenset[int]

    @classmethod
    def of(cls, jaxpr: Jaxpr, shared: list[Value], starts: list[Value], scanned: list[Value]) -> "RoundGathers":
        """Plans the gathers of a loop's body, from the states of its operands."""
        plan = LoopPlan.of(jaxpr, shared, starts, scanned, length=1)
        units = []
        for position, (scheduled, sources) in enumerate(zip(plan.units, plan.sources, strict=True)):
            # Any other unit gathers its parameters in each tick.
            are_all_known = len(sources) == len(scheduled.shards)
            if scheduled.shards and are_all_known and all(source.is_row for source in sources):
                indices = [source.index for source in sources]
                shard_dims = [scanned[k].shard.placement.dim_from_end for k in indices]
                units.append(RoundUnit(position, scheduled, indices, shard_dims))

        receive_gathered = {id(unit.scheduled.unit.eqn) for unit in units}
        read = variables_read(jaxpr, jaxpr.outvars[: len(starts)], receive_gathered)
        row_variables = jaxpr.invars[len(jaxpr.invars) - len(scanned) :]
        unread = set()
        for k, (variable, value) in enumerate(zip(row_variables, scanned, strict=True)):
            if value.is_stored and variable not in read:
                unread.add(k)
        return cls(units, frozenset(unread))

    def dtype_of(self, scanned: int) -> np.dtype | None:
        """Returns the dtype in which a scanned parameter is gathered; None if something reads it in another one."""
        if scanned not in self.unread:
            return None
        dtypes = set()
        for unit in self.units:
            for k, dtype in zip(unit.scanned, unit.scheduled.dtypes, strict=True):
                if k == scanned:
                    dtypes.add(dtype)
        return dtypes.pop() if len(dtypes) == 1 else None

    def shards_of(self, scanned: Sequence[Value], chunk: jax.Array | int, num_layers: int) -> list[Arrays]:
        """Returns the shards of a chunk of layers, for each unit: arrays with a row for each layer."""
        shards = []
        for unit in self.units:
            rows = [lax.dynamic_slice_in_dim(scanned[k].x, chunk * num_layers, num_layers) for k in unit.scanned]
            shards.append(rows)
        return shards

    def gather(self, shards: list[Arrays], scanned: Sequence[Value], mesh: Mesh) -> list[GatheredParams]:
        """Returns the parameters of a chunk of layers, for each unit: arrays with a row for each layer.

        In each row the gathered dim comes first. So a gather leaves it in memory, with one shard after the other; and
        so loops take it, whose arrays have their dims in order. With another order each round would copy its parameters
        to transpose them.

        Args:
            shards: those of the chunk.
            scanned: the scanned values, for their states.
            mesh: of a place.
        """
        gathered = []
        for unit, rows in zip(self.units, shards, strict=True):
            states = tuple(scanned[k].shard for k in unit.scanned)
            dtypes = tuple(unit.scheduled.dtypes)

            def gather_layer(rows: Arrays, states=states, dtypes=dtypes) -> Arrays:
                return gathers.gather_unit(rows, states, mesh, dtypes)

            with unit.scheduled.unit.gather_scope():
                arrays = for_each_layer(gather_layer, rows)
            gathered.append([_moved(x, dim, 1) for x, dim in zip(arrays, unit.shard_dims, strict=True)])
        return gathered

    def followed_by(
        self, arrays: Arrays, gathered: Sequence[GatheredParams], scanned: Sequence[Value], mesh: Mesh
    ) -> tuple[Arrays, list[GatheredParams]]:
        """Returns arrays that are available when the small parameters are gathered; and the parameters.

        A small gather is waited for at once, as the large ones are tied behind it. Behind the large collectives to
        which these arrays go, it would take as long as those.
        """
        small = {}
        for u, unit in enumerate(self.units):
            states = tuple(scanned[k].shard for k in unit.scanned)
            for i in gathers.small_beside_large(states, mesh):
                small[u, i] = gathered[u][i]
        if not small or not arrays:
            return arrays, list(gathered)
        small, arrays = available_together(small, arrays)
        params = []
        for u, of_unit in enumerate(gathered):
            params.append([small.get((u, i), x) for i, x in enumerate(of_unit)])
        return arrays, params

    def of_layer(self, gathered: Sequence[GatheredParams], layer: jax.Array | int) -> dict[int, GatheredParams]:
        """Returns the parameters of one layer of a chunk, by the position of their unit."""
        params = {}
        for unit, arrays in zip(self.units, gathered, strict=True):
            rows = [row_of_chunk(x, layer) for x in arrays]
            params[unit.position] = [_moved(row, 0, dim) for row, dim in zip(rows, unit.shard_dims, strict=True)]
        return params


def _moved(x: jax.Array, source: int | None, destination: int | None) -> jax.Array:
    """Returns an array with a dim elsewhere; as it is if there is no such dim."""
    if source is None or destination is None:
        return x
    return jnp.moveaxis(x, source, destination)


def row_of_chunk(x: jax.Array, layer: jax.Array | int) -> jax.Array:
    """Returns the row of one layer of a chunk."""
    if isinstance(layer, int):
        return x[layer]
    return lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)


def for_each_layer(run: Callable[[Arrays], Arrays], rows: Arrays) -> Arrays:
    """Runs a function of the arrays of one layer on those of a chunk: all layers in the same collectives."""
    num_layers = len(rows[0]) if rows else 0
    if num_layers == 1:  # the usual case: the program is that of a layer
        return [x[None] for x in run([row[0] for row in rows])]
    return jax.vmap(run)(rows)
