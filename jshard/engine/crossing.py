"""How arrays enter a region of data shards and leave it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax
from jax.core import ShapedArray
from jax.sharding import Mesh, PartitionSpec

from jshard.engine import stored
from jshard.engine.rules import Shard, Staged, State, Value
from jshard.engine.schedule.program_schedule import ParameterKey
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.plans.mesh import PIPE, batch_axes, inner_axes, region_degree
from jshard.plans.model_axes import axes_of, spec_over
from jshard.plans.plan import resharded
from jshard.plans.stages import StageLayout
from jshard.plans.units import Unit


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """How a value enters or leaves a region; `index_dims` and `parameter` are those of `Value`.

    Attributes:
        state: its state.
        is_own: each device has its own value, not a part of an array: it crosses with a dim for the devices.
        inner: the dims along which it is split over inner axes.
    """

    state: State
    is_own: bool = False
    index_dims: dict[int, int] = dataclasses.field(default_factory=dict)
    parameter: str = ""
    inner: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy that each device gathered for itself, or the gradient of one."""
        return self.is_own and not isinstance(self.state, Shard)

    @property
    def shard(self) -> Shard | None:
        """How a parameter, or its gradient, is stored; None for other values."""
        return self.state if isinstance(self.state, Shard) else None

    @property
    def staged(self) -> Staged | None:
        """How a stack is dealt to the stages of a pipeline; None for other values."""
        return self.state if isinstance(self.state, Staged) else None

    def of_whole_stack(self, degree: int, shape: Sequence[int]) -> "Crossing":
        """Returns how a stack crosses that is dealt to no stages, where this is the crossing of one that is.

        Args:
            degree: the number of data shards.
            shape: of the stack in global view.
        """
        if self.staged is None:
            return self
        dim = None if self.staged.row_dim is None else self.staged.row_dim + 1
        # Any crossing of an array of global view is right. Split like its rows it is smallest.
        is_split = dim is not None and shape[dim] % degree == 0
        return Crossing(dim if is_split else None)

    @classmethod
    def of(cls, value: Value, *, is_own: bool = False) -> "Crossing":
        """Returns how a value leaves; each device has its own piece of a parameter."""
        # Neighbours have different pieces, and each group of them the same ones: no spec says that.
        is_own = is_own or (value.is_stored and value.shard.pieces > 0)
        return cls(value.state, is_own, value.index_dims, value.parameter)

    def leave(self, value: Value) -> jax.Array:
        """Returns the array as which a value leaves."""
        if self.staged is not None:
            return _with_dim_of_places(value.x, self.staged.layout)
        # A value of each device's own has a dim of size 1 here, and of all devices outside: there it is an array.
        return value.x[None] if self.is_own else value.x

    def enter(self, x: jax.Array) -> Value:
        """Returns the value of an array that has entered."""
        if self.staged is not None:
            x = _without_dim_of_places(x)
        elif self.is_own:
            x = x[0]
        return Value(x, self.state, index_dims=self.index_dims, parameter=self.parameter)

    def behind_a_mapped_dim(self) -> "Crossing":
        """Returns the crossing of the same value with one more dim, the first."""
        state = self.state
        if isinstance(state, Staged):
            state = None  # mapped, it is an array of global view
        elif isinstance(state, int):
            state += 1
        return dataclasses.replace(self, state=state, inner={axis: dim + 1 for axis, dim in self.inner.items()})


def _with_dim_of_places(x: jax.Array, layout: StageLayout) -> jax.Array:
    """Returns the rows of one place as they leave: (rounds, 1, layers of a chunk, ...).

    Outside, the second dim has all places. Then the layers are in order, and the array is that of the program in global
    view but for its shape: any later call can read it, on stages or not.
    """
    return x.reshape(layout.num_rounds, 1, layout.layers_per_chunk, *x.shape[1:])


def _without_dim_of_places(x: jax.Array) -> jax.Array:
    """Returns the rows of one place: the reverse."""
    return x.reshape(-1, *x.shape[3:])


@dataclasses.dataclass(frozen=True, eq=False)
class ResultOf:
    """The crossing of a result of an earlier call, which is known when that is partitioned.

    Attributes:
        leaving: returns how the results of the call leave.
        position: of the result.
    """

    leaving: Callable[[], Sequence[Crossing]]
    position: int


AnyCrossing = Crossing | ResultOf


def results_of(leaving: Callable[[], Sequence[Crossing]], positions: Iterable[int]) -> list[ResultOf]:
    """Returns the crossings of some results of an earlier call."""
    return [ResultOf(leaving, position) for position in positions]


def of_tangents(crossings: Iterable[AnyCrossing]) -> list[AnyCrossing]:
    """Returns how tangents enter: each like its operand. It is not the parameter of that name."""
    tangents: list[AnyCrossing] = []
    for crossing in crossings:
        if isinstance(crossing, Crossing):
            # Under the name of the parameter, a tangent would be taken for it where that is kept or found by its path.
            crossing = dataclasses.replace(crossing, parameter="")
        tangents.append(crossing)
    return tangents


def resolved(crossing: AnyCrossing) -> Crossing:
    """Returns a crossing that is known."""
    if isinstance(crossing, ResultOf):
        return crossing.leaving()[crossing.position]
    return crossing


def all_resolved(crossings: Iterable[AnyCrossing]) -> list[Crossing]:
    """Returns crossings that are known."""
    return [resolved(crossing) for crossing in crossings]


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """The parameters that a call gathered outside of units and kept: the last results of forward."""

    avals: tuple[ShapedArray, ...]
    crossings: Mapping[ParameterKey, Crossing]
    """By the parameter's path, dtype and shape."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Where the programs of one call of an annotated model run.

    Attributes:
        unit: the root.
        name: class and method, for messages.
        arguments: the types of the arguments.
        batch: the size of the batch; 0 without one.
        gathered: what the calls of the region have gathered and kept. A later call finds there which parameters the
            copies among its operands are.
    """

    unit: Unit
    name: str
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    batch: int
    gathered: list[Gathered] = dataclasses.field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return cast(Mesh, self.unit.mesh)  # abstract in a trace for shapes only

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return batch_axes(self.mesh)

    @property
    def degree(self) -> int:
        """The number of devices that share the work."""
        return region_degree(self.mesh)

    @property
    def inner(self) -> tuple[str, ...]:
        """The inner axes of the mesh."""
        return inner_axes(self.mesh)

    def spec(self, crossing: Crossing, ndim: int) -> PartitionSpec:
        """Returns the spec of an array that crosses, over the region's axes; inner axes are innermost in their dims."""
        if crossing.is_own:
            spec = PartitionSpec(self.axes)
        elif crossing.shard is not None:
            # A loop has stacked it, or taken a row of it.
            spec = spec_over(self.axes, stored.entries_of(crossing.shard.placement, ndim))
        elif crossing.staged is not None:
            spec = self._spec_on_stages(crossing.staged)
        elif isinstance(crossing.state, int):
            spec = PartitionSpec(*[None] * crossing.state, self.axes)
        else:
            spec = PartitionSpec()
        # Innermost: the program of a data shard is made first, for a contiguous part of a dim, and then split further.
        dims = [*spec, *[None] * (ndim - len(spec))]
        for axis in self.inner:
            dim = 0 if crossing.is_copy else crossing.inner.get(axis)
            if dim is not None:
                dims[dim] = (*axes_of(dims[dim]), axis)
        return PartitionSpec(*dims)

    def _spec_on_stages(self, staged: Staged) -> PartitionSpec:
        """Returns the spec of a stack that leaves with dims for the rounds, the places and the layers of a chunk."""
        dims: list[str | tuple[str, ...] | None] = [None, PIPE, None]
        if staged.row_dim is not None:
            dims += [None] * staged.row_dim
            dims.append(tuple(axis for axis in self.axes if axis != PIPE))
        return PartitionSpec(*dims)

    def specs(self, crossings: Sequence[Crossing], arrays: Sequence[jax.Array | Value]) -> list[PartitionSpec]:
        """Returns the specs of arrays that cross, each in its way."""
        return [self.spec(crossing, x.ndim) for crossing, x in zip(crossings, arrays, strict=True)]

    def keeps(self, p: ShardedPartitioner, operands: Sequence[Crossing]) -> dict[ParameterKey, Value]:
        """Returns the parameters gathered outside units that forward keeps for backward, whole or in pieces."""
        # Parameters alone: what else was gathered outside of units is a value of this program, and no operand of
        # backward.
        root_setting = resharded(self.unit, is_root=not self.unit.nested)
        tied = self._resharded_as_tied()
        placements = {}
        for crossing in operands:
            if crossing.shard is not None:
                placements[crossing.parameter] = crossing.shard.placement
        kept_values = {}
        for key, value in p.kept_whole.items():
            if not isinstance(key, tuple):
                continue
            path = key[0]
            # Parameters tied between modules of a list are gathered here, once in each pass, with the list's setting.
            pieces = tied.get(path, root_setting)
            if pieces is False:
                kept_values[key] = value
            elif pieces is not True:
                shard = Shard(placements[path], pieces)
                kept_values[key] = Value(stored.cut(value.x, shard.placement, pieces), shard)
        return kept_values

    def _resharded_as_tied(self) -> dict[str, bool | int]:
        """Returns parameters that are tied between the modules of one list, by path, with the setting of their list."""
        plan = self.unit.plan
        if plan is None:
            return {}
        settings = {unit.name: unit.reshard_after_forward for unit in plan.units}
        return {leaf.path: settings[leaf.unit] for leaf in plan.leaves if leaf.sharers}

    def copies(self, avals: Sequence[ShapedArray]) -> dict[ParameterKey, Crossing] | None:
        """Returns which parameters the copies of these types are; None where that is not certain."""
        # An equation has arrays alone, so copies are known by their types. Where two calls of the region have kept
        # different parameters of the same types, the copies are left, and the parameters gathered again.
        candidates = [gathered for gathered in self.gathered if gathered.avals == tuple(avals)]
        # With their order, by which they are paired with the arrays behind the operands of a call.
        keys = {tuple(gathered.crossings) for gathered in candidates}
        if len(keys) != 1:
            return None
        return dict(candidates[0].crossings)

    def over(self, size: int, *, is_batch: bool) -> "Region":
        """Returns the region of a call with one more dim; the dim is the batch, or the batch is the one it was."""
        arguments = tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in self.arguments)
        return dataclasses.replace(self, arguments=arguments, batch=size if is_batch else self.batch)
