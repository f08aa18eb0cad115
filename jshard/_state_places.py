"""Where each array of an optimizer's state lies: from the plan of the parameters, its path and its shape."""

from collections.abc import Container

from jax.sharding import PartitionSpec

from jshard._mesh import REPLICA
from jshard._padded import Padding
from jshard._placement import Placement, PlacementRule, place
from jshard._policies import MixedPrecision
from jshard._shard_plan import ShardPlan

Keys = tuple[str, ...]
"""The keys of a path as text."""


class StatePlaces:
    """Where each array of an optimizer's state lies; from shapes and paths alone.

    Args:
        plan: where the parameters lie.
        over_replica: whether the state of replicated parameters is sharded over `replica`.
    """

    def __init__(self, plan: ShardPlan, *, over_replica: bool = False) -> None:
        self._parameters = {tuple(map(str, leaf.keys[0])): leaf.placement for leaf in plan.leaves}
        self._over_replica, self._replicas = over_replica, dict(plan.mesh).get(REPLICA, 1)
        self._rule = PlacementRule(plan.mesh, MixedPrecision(), pads=False)

    def tail(self, path: Keys) -> Keys | None:
        """The path of the parameter that a path in the state ends in; None if it ends in none."""
        return tail_in(self._parameters, path)

    def parameter(self, path: Keys) -> Placement | None:
        """The placement of that parameter."""
        return self._parameters.get(self.tail(path) or ())

    def spec(self, path: Keys, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the state."""
        parameter = self.parameter(path)
        if parameter is None:
            return PartitionSpec()
        if shape not in (parameter.shape, parameter.stored_shape):
            return place("", shape, "float32", (), self._rule).partition_spec
        if parameter.dim is None and self._over_replica:
            return self._over_replicas(parameter)
        return parameter.partition_spec

    @property
    def offloaded(self) -> dict[Keys, Placement]:
        """The parameters whose state lies in host memory."""
        return {path: placement for path, placement in self._parameters.items() if placement.offload is not None}

    def on_host(self, path: Keys, shape: tuple[int, ...]) -> bool:
        """Whether an array of the state lies in host memory: one of the shape of a parameter that is offloaded."""
        parameter = self.parameter(path)
        shapes = () if parameter is None or parameter.offload is None else (parameter.shape, parameter.stored_shape)
        return shape in shapes

    def on_host_itself(self, path: Keys) -> bool:
        """Whether the parameter at a path lies in host memory, and not its state alone."""
        parameter = self.parameter(path)
        return parameter is not None and parameter.on_host

    def padding(self, path: Keys, shape: tuple[int, ...]) -> Padding | None:
        """The padding of an array of the state: that of its parameter, if it has its shape."""
        parameter = self.parameter(path)
        if parameter is None or shape not in (parameter.shape, parameter.stored_shape):
            return None
        return Padding.of(parameter)

    def _over_replicas(self, parameter: Placement) -> PartitionSpec:
        size = self._replicas
        fits = [d for d, n in enumerate(parameter.shape) if n and n % size == 0 and parameter.spec[d] is None]
        if size == 1 or not fits:
            return parameter.partition_spec
        dim = max(fits, key=lambda d: parameter.shape[d])
        return PartitionSpec(*[REPLICA if d == dim else e for d, e in enumerate(parameter.spec)])


def tail_in(paths: Container[Keys], path: Keys) -> Keys | None:
    """The longest of some paths that a path ends in; None if there is none."""
    return next((path[start:] for start in range(len(path)) if path[start:] in paths), None)


def key_texts(path: tuple) -> Keys:
    """The keys of a path of `jax.tree_util` as text, without those that lead into a variable or a box of Flax."""
    while path and getattr(path[-1], "name", None) == "value":  # a parameter of that name has a `key`
        path = path[:-1]
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
