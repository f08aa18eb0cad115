"""Gathers of a program in which the compiler has joined those for forward with those for backward.

XLA:CPU does so: a parameter that the plan gathers twice is then gathered once or twice, as the compiler likes. Fewer
gathered elements than planned are no fault if each parameter is gathered at least once; but an activation that is
gathered must not make up for a parameter that is not. So gathers are counted by the shapes of layers.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

from jshard.inspect.communication.attribution import CollectivePart, Dims, comparable, shapes_on_device
from jshard.inspect.communication.planned import CollectiveKind, in_mesh_order
from jshard.inspect.communication.staged import gathered_on_stages, paths_gathered_on_stages
from jshard.inspect.hlo import Window
from jshard.plans.mesh import FSDP
from jshard.plans.placement import Placement
from jshard.plans.plan import ShardPlan
from jshard.plans.staged_loops import FORWARD
from jshard.plans.wires import wire_named

_NO_LAYER: Dims = ()
"""Stands for the layer of arrays that are no part of a parameter, and of scales, which have few elements."""


@dataclasses.dataclass(frozen=True)
class _ExpectedGather:
    """How often a program gathers a parameter.

    Attributes:
        placement: of what is gathered.
        forward: how often forward gathers it. On stages a place gathers its own layers alone, and less than all.
        backward: how often backward does.
        chunk: the number of layers that a place gathers at once, as the first dims of an array.
    """

    placement: Placement
    forward: float
    backward: float
    chunk: Dims = ()


def _expected_gathers(plan: ShardPlan) -> Iterator[_ExpectedGather]:
    gathers_again = {unit.name: unit.reshard_after_forward is True for unit in plan.units}
    on_stages = paths_gathered_on_stages(plan)
    for leaf in plan.gathered_part.leaves:
        if leaf.path not in on_stages:
            backward = leaf.by_layer or gathers_again[leaf.unit]
            yield _ExpectedGather(leaf.placement, forward=1, backward=int(backward))
    for parameter, stages in gathered_on_stages(plan):
        is_forward = stages.loop.phase == FORWARD
        times = stages.times_gathered(parameter)
        chunk = (stages.loop.schedule.layout.layers_per_chunk,)
        yield _ExpectedGather(stages.placement, times * is_forward, times * (not is_forward), chunk)


class JoinedGathers:
    """How often each layer of the plan may be gathered by one kind of collective, if gathers are joined.

    Layers of equal shape are counted together, since a program does not name the parameter that it gathers.
    """

    def __init__(self, plan: ShardPlan, kind: CollectiveKind, num_gathers: int) -> None:
        """Counts the elements of the gathered parameters by the shape of a layer.

        Args:
            plan: the plan.
            kind: the kind of all-gather that is counted.
            num_gathers: how often forward gathers each parameter: once per microbatch.
        """
        self._kind = kind
        self._fewest: collections.Counter[Dims] = collections.Counter()  # of elements
        self._most: collections.Counter[Dims] = collections.Counter()
        # The layer by the shape of an array of the program.
        whole_shapes: dict[Dims, Dims] = {}
        shard_shapes: dict[Dims, Dims] = {}  # of an all-to-all in the place of a gather
        packed_shapes: dict[Dims, Dims] = {}  # of what wires send beside the largest of their arrays, such as scales

        for expected in _expected_gathers(plan):
            placement = expected.placement
            if in_mesh_order(placement.axes, dict(plan.mesh)) != kind.axes:
                continue
            whole, shard = shapes_on_device(placement, dict(plan.mesh))
            num_layer_dims = _num_layer_dims(whole, placement.layers)
            elements = math.prod(whole)
            layer = comparable(whole[num_layer_dims:])
            if placement.gather_wire:
                num_layers = math.prod(whole[:num_layer_dims])
                largest, *others = _packed_layers(placement, dict(plan.mesh))
                elements = num_layers * math.prod(largest)
                layer = comparable(largest)
                for other in others:
                    for i in range(num_layer_dims + 1):
                        packed_shapes[comparable((*whole[i:num_layer_dims], *other))] = _NO_LAYER
                whole = (*whole[:num_layer_dims], *largest)
            # A program gathers all layers of a stack at once, or one, or, of a nested stack, some. A place gathers the
            # layers of a chunk at once.
            for i in range(num_layer_dims + 1):
                for chunk in ((), expected.chunk):
                    whole_shapes[comparable((*chunk, *whole[i:]))] = layer
                    shard_shapes[comparable((*chunk, *shard[i:]))] = layer
            forward = round(elements * expected.forward) * num_gathers
            self._fewest[layer] += forward
            self._most[layer] += forward + round(elements * expected.backward) * num_gathers
        # A shape that is more than one of them most likely is a whole parameter's.
        self._layer_of_shape = packed_shapes | shard_shapes | whole_shapes

    def unexplained_elements(self, windows: Iterable[Window]) -> float:
        """Returns by how many elements the gathers of a program are too few or too many for some layers."""
        gathered: collections.Counter[Dims] = collections.Counter()
        for window in self._gathers(windows):
            for array in window.arrays:
                layer = self._layer_of_shape.get(comparable(array.dims), _NO_LAYER)
                gathered[layer] += array.num_elements * window.executions
        too_few = self._fewest - gathered
        too_many = gathered - self._most
        del too_many[_NO_LAYER]  # a difference of its own: see `of_no_parameter`
        return too_few.total() + too_many.total()

    def of_no_parameter(self, windows: Iterable[Window]) -> list[CollectivePart]:
        """Returns the gathers of arrays whose shape is not that of a parameter."""
        parts = []
        for window in self._gathers(windows):
            arrays = [array for array in window.arrays if comparable(array.dims) not in self._layer_of_shape]
            if arrays:
                parts.append(CollectivePart(window, arrays))
        return parts

    def _gathers(self, windows: Iterable[Window]) -> list[Window]:
        return [window for window in windows if CollectiveKind.of(window) == self._kind]


def _packed_layers(placement: Placement, degrees: Mapping[str, int]) -> list[Dims]:
    """Returns the shapes of the gathered arrays that a wire packs of one layer, the largest first."""
    dim = placement.dim_of_layer
    shard = placement.shard_of_layer(degrees)
    shapes = []
    for packed in wire_named(placement.gather_wire).packed_types(shard, placement.gathered_dtype, dim):
        shape = list(packed.shape)
        shape[dim] *= degrees[FSDP]
        shapes.append(tuple(shape))
    return sorted(shapes, key=math.prod, reverse=True)


def _num_layer_dims(dims: Dims, num_layers: int) -> int:
    """Returns how many leading dims index layers."""
    return next(i for i in range(len(dims)) if math.prod(dims[:i]) >= num_layers)
