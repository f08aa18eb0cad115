"""Optimizer state that follows the plan: created sharded, and kept so."""

import dataclasses
from typing import Any, cast

import jax
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import AnnotationError
from jshard._mesh import REPLICA, degree
from jshard._nnx import Member, Path, Unit, unit_of
from jshard._placement import place
from jshard._plan import root_forgotten


def shard_optimizer(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    *,
    wrt: Any = nnx.Param,
    shard_replicated: bool = False,
) -> nnx.Optimizer:
    """An `nnx.Optimizer` whose state is created sharded.

    State with the shape of a parameter lies as the parameter does; other large state is sharded along a dim that
    divides; the rest is replicated. `nnx.Optimizer(model, tx, wrt=nnx.Param)` trains the same, but its first step
    compiles twice, as its counters do not lie on the mesh yet.

    Args:
        model: the annotated model, its arrays on the mesh.
        tx: any Optax transformation, unchanged: it sees whole parameters in global view.
        wrt: which variables it updates.
        shard_replicated: ZeRO-1: also shard the state of replicated parameters, over `replica`. Each device
            then updates its part, and the parameters are gathered again.

    Returns:
        The optimizer.

    Raises:
        AnnotationError: the root of the model is not annotated.

    Example:
        >>> optimizer = js.shard_optimizer(model, optax.adamw(3e-4))
    """
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    if not isinstance(unit.mesh, Mesh):
        raise AnnotationError(
            "Optimizer state needs devices.",
            where=f"shard_optimizer({type(model).__name__})",
            why="the model was annotated with an abstract mesh, for a plan only.",
            do="mesh = js.mesh(fsdp=-1)",
        )
    places = _StatePlaces(unit, shard_replicated)
    placed = _placed(tx, places)
    build = lambda model: nnx.Optimizer(model, placed, wrt=wrt)
    abstract = nnx.eval_shape(build, model)
    graphdef, state = nnx.split(abstract)
    shardings = nnx.from_flat_state([(p, places.shardings(p, v)) for p, v in nnx.to_flat_state(state)])
    model_def, model_state = nnx.split(model)

    def init(model_state: Any) -> Any:
        return nnx.state(build(nnx.merge(model_def, model_state)))

    return nnx.merge(graphdef, jax.jit(init, out_shardings=shardings)(model_state))


def _placed(tx: optax.GradientTransformation, places: "_StatePlaces") -> optax.GradientTransformationExtraArgs:
    """The transformation with its state held to the plan, and its updates to the parameters' placements.

    Without this the compiler picks the state's shardings anew, and may change them from step to step.
    """
    tx = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(places.hold(grads), places.hold(state), params, **extra)
        return places.hold(updates, as_params=True), places.hold(state)

    return optax.GradientTransformationExtraArgs(tx.init, cast(Any, update))


class _StatePlaces:
    """Where each leaf of an optimizer's state lies."""

    def __init__(self, unit: Unit, over_replica: bool) -> None:
        assert isinstance(unit.mesh, Mesh)
        self._unit, self._mesh, self._over_replica = unit, unit.mesh, over_replica
        self._by_path = {tuple(map(str, m.path)): m for m in unit.members}

    def shardings(self, path: Path, variable: nnx.Variable) -> nnx.Variable:
        """The variable with a sharding for each array in it; Optax masks some out."""
        sharding = lambda x: NamedSharding(self._mesh, self.spec(path, x.shape))
        return variable.replace(jax.tree.map(sharding, variable.get_raw_value()))

    def hold(self, tree: Any, *, as_params: bool = False) -> Any:
        """Constrains every array of a tree whose paths end in those of parameters."""

        def one(path: Any, leaf: Any) -> Any:
            names = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
            member = self._member(names)
            spec = self.spec(names, leaf.shape) if not as_params or member is None else member.placement.partition_spec
            return lax.with_sharding_constraint(leaf, NamedSharding(self._mesh, spec))

        return jax.tree_util.tree_map_with_path(one, tree)

    def spec(self, path: Path, shape: tuple[int, ...]) -> PartitionSpec:
        """A leaf's spec: its path ends in the path of the parameter it belongs to."""
        member = self._member(tuple(map(str, path)))
        if member is None:
            return PartitionSpec()
        if member.placement.dim is None and self._over_replica and shape == member.placement.shape:
            return self._replica_spec(shape, member)
        if shape == member.placement.shape:
            return member.placement.partition_spec
        rule = dataclasses.replace(self._unit.rule, shard_dim=None)
        return place("", shape, "float32", (), rule).partition_spec

    def _member(self, path: tuple[str, ...]) -> Member | None:
        found = (self._by_path.get(path[start:]) for start in range(len(path)))
        return next((m for m in found if m is not None), None)

    def _replica_spec(self, shape: tuple[int, ...], member: Member) -> PartitionSpec:
        size = degree(self._unit.mesh, REPLICA)
        taken = member.placement.spec
        fits = [d for d, n in enumerate(shape) if n % size == 0 and n >= size and taken[d] is None]
        if size == 1 or not fits:
            return member.placement.partition_spec
        dim = max(fits, key=lambda d: shape[d])
        return PartitionSpec(*[REPLICA if d == dim else e for d, e in enumerate(taken)])
