"""Where each array of an optimizer's state is placed: like its parameter, wherever that is known from its path."""

import contextvars
import dataclasses

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jshard._types import PyTree
from jshard.plans.array_paths import Keys, key_texts, tail_in
from jshard.plans.mesh import REPLICA, AnyMesh, is_concrete
from jshard.plans.padding import Padding
from jshard.plans.placement import Placement, PlacementPolicy, place
from jshard.plans.plan import ShardPlan
from jshard.plans.policies import MixedPrecision


class StatePlaces:
    """Where each array of an optimizer's state is, derived from shapes and paths alone.

    With `over_replica` the state of replicated parameters is sharded over `replica`.
    """

    def __init__(self, plan: ShardPlan, *, over_replica: bool = False) -> None:
        # As text: an index of a list is a number in a model's path, and may be a text in that of a state.
        self._parameters = {tuple(map(str, leaf.keys[0])): leaf.placement for leaf in plan.leaves}
        self._over_replica = over_replica
        self._degrees = dict(plan.mesh)

    def tail(self, path: Keys) -> Keys | None:
        """Returns the path of the parameter that a path in the state ends in; None if there is no such parameter."""
        return tail_in(self._parameters, path)

    def parameter(self, path: Keys) -> Placement | None:
        """Returns the placement of that parameter."""
        return self._parameters.get(self.tail(path) or ())

    def spec(self, path: Keys, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec of an array of the state."""
        parameter = self.parameter(path)
        if parameter is None:
            return PartitionSpec()  # a counter, which all devices need
        if not _has_shape_of(parameter, shape):  # a statistic of its rows or columns, as in Adafactor
            policy = PlacementPolicy()  # the dtype is of no effect: nothing is padded, and only the spec is used
            placement = place("", shape, "float32", (), self._degrees, policy, MixedPrecision(), pads=False)
            return placement.partition_spec
        if parameter.dim is None and self._over_replica:
            return self._over_replicas(parameter)
        return parameter.partition_spec

    @property
    def offloaded(self) -> dict[Keys, Placement]:
        """The parameters whose state is in host memory."""
        return {path: placement for path, placement in self._parameters.items() if placement.offload is not None}

    def on_host(self, path: Keys, shape: tuple[int, ...]) -> bool:
        """Returns whether an array of the state is in host memory: if it has the shape of its offloaded parameter."""
        parameter = self.parameter(path)
        if parameter is None or parameter.offload is None:
            return False
        return _has_shape_of(parameter, shape)

    def on_host_itself(self, path: Keys) -> bool:
        """Returns whether the parameter at a path is in host memory itself, not only its state."""
        parameter = self.parameter(path)
        return parameter is not None and parameter.on_host

    def padding(self, path: Keys, shape: tuple[int, ...]) -> Padding | None:
        """Returns the padding of an array of the state: that of its parameter, if the shapes are equal."""
        parameter = self.parameter(path)
        if parameter is None or not _has_shape_of(parameter, shape):
            return None
        return Padding.of(parameter)

    def held(self, tree: PyTree, mesh: AnyMesh, *, as_given: bool = False) -> PyTree:
        """Returns a tree with arrays padded and constrained like their parameters, else the compiler chooses again.

        With `as_given`, arrays of other models, and logical arrays of parameters stored padded, stay as they are.
        """
        if not is_concrete(mesh):
            return tree

        def constrained(path: KeyPath, x: jax.Array) -> jax.Array:
            keys = key_texts(path)
            padding = self.padding(keys, x.shape)
            is_logical = padding is not None and padding.logical_shape(x.shape) == x.shape
            # Not a scalar: a counter belongs to no parameter, and is replicated.
            is_of_other_model = x.ndim > 0 and self.tail(keys) is None
            if as_given and (is_logical or is_of_other_model):
                return x
            # Padded first: the spec is that of the stored array.
            stored = x if padding is None else padding.pad(x)
            return lax.with_sharding_constraint(stored, NamedSharding(mesh, self.spec(keys, stored.shape)))

        return jax.tree.map_with_path(constrained, tree)

    def _over_replicas(self, parameter: Placement) -> PartitionSpec:
        """Returns the spec of a replicated parameter's state: its largest dim that divides is over `replica`."""
        replicas = self._degrees.get(REPLICA, 1)
        fitting_dims = []
        for dim, size in enumerate(parameter.shape):
            # A dim that the model splits has no room for another axis.
            if size > 0 and size % replicas == 0 and parameter.spec[dim] is None:
                fitting_dims.append(dim)
        if replicas == 1 or not fitting_dims:
            return parameter.partition_spec
        entries = list(parameter.spec)
        entries[max(fitting_dims, key=lambda dim: parameter.shape[dim])] = REPLICA
        return PartitionSpec(*entries)


def _has_shape_of(parameter: Placement, shape: tuple[int, ...]) -> bool:
    """Returns whether an array has the shape of a parameter, with its padding or without."""
    return shape in (parameter.shape, parameter.stored_shape)


@dataclasses.dataclass(frozen=True)
class UpdateLayout:
    """Where the arrays of an optimizer's update are, by their paths and shapes, on a mesh."""

    places: StatePlaces
    mesh: AnyMesh


update_layout: contextvars.ContextVar[UpdateLayout | None] = contextvars.ContextVar("update_layout", default=None)
"""The placements of the current update; None outside a transformation of `js.shard_optimizer`."""
