"""`js.reshard`: a state moves to another mesh, strategy or layout in memory; `js.reshard_plan` forecasts it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._processes import ProcessGroup, all_processes
from jshard._text import counted, human_bytes
from jshard._types import PyTree
from jshard.api.init import abstract_copy
from jshard.api.optimizer import optimizer_like
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import Names
from jshard.checkpoint.groups import processes_of_arrays
from jshard.checkpoint.restore_operation import Extra, Missing, RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S
from jshard.checkpoint.state import leaves as _leaves
from jshard.in_memory.arrays import transfers_for
from jshard.in_memory.live_state import LiveState
from jshard.in_memory.named import NamedLiveState
from jshard.in_memory.transfers import least_elements, moved_elements, shards_of
from jshard.plans.mesh import check_has_devices
from jshard.plans.plan import record_of
from jshard.plans.units import plain_class

Target: TypeAlias = Any
"""A function that annotates a model; or a state, live or abstract, whose arrays say where they are to be."""


def reshard(
    state: PyTree,
    target: Target,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Missing = "error",
    extra: Extra = "error",
    names: Names | None = None,
    timeout_s: float = TIMEOUT_S,
) -> PyTree:
    """Moves a state to another mesh, in memory: other degrees, another strategy, more or fewer devices.

    Each device sends only what another one lacks, a leaf at a time, from shard to shard: nothing is whole on a device,
    and nothing passes through a file or, on devices of one kind, a host. The two meshes may share their devices, some
    of them, or none. Every process that has a device of either mesh calls it; one that has none of the state's devices
    passes an abstract state, whose shardings name them.

    Where the target has a smaller float dtype, such as bfloat16 for generation, values are cast before they are sent.

    Args:
        state: an annotated model; or a dict with one, its optimizer and other arrays; or any tree of sharded arrays.
        target: a function that annotates the model for the other mesh, as for `js.shard_init`; arrays beside the model
            are then replicated on that mesh. Or a state of the same structure, live or abstract, such as a Linen
            model's from `js.abstract_init`: every array goes where its counterpart is. It is not changed.
        only: as in `js.checkpoint.restore`.
        rename: as in `js.checkpoint.restore`.
        missing: as in `js.checkpoint.restore`.
        extra: as in `js.checkpoint.restore`.
        names: another library's names for the leaves of the model, as from `hf_names(config)` in a model file: the
            target is then a flat dict of arrays by those names, in that library's layout, as a server of the model
            may hold them.
        timeout_s: how long to wait for other processes.

    Returns:
        New objects of the kinds in the target; for a function, of those in `state`.

    Raises:
        CheckpointError: the leaves do not match, an array is deleted, or this process has no device of either mesh.
        AnnotationError: as `target`, which annotates the model, raises.

    Examples:
        >>> served = js.reshard(model, annotate)
    """
    operation, live = _operation(state, target, names=names, only=only, rename=rename, missing=missing, extra=extra)
    live.check_has_values(may_be_elsewhere=True)
    live.casts.update(_narrower(operation))
    return operation.run(verify=False, timeout_s=timeout_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """What `js.reshard` will do, computed from shardings alone.

    Attributes:
        moved_bytes: that leave their device, over all devices.
        least_bytes: that devices of the target need and do not hold: no way to move the state sends fewer.
        between_processes_bytes: the part of `moved_bytes` that goes from one process to another.
        total_bytes: of the target, over all devices.
        extra_bytes: that one device holds at most beside its shards of both states: while a leaf is moved, a shard
            of it in the place of one that the device lacks, and what has arrived of it.
    """

    moved_bytes: int = 0
    least_bytes: int = 0
    between_processes_bytes: int = 0
    total_bytes: int = 0
    extra_bytes: int = 0

    def with_leaf(self, leaf: ReshardPlan) -> ReshardPlan:
        """Returns the plan of what this one moves and then another leaf: the memory of one is free for the next."""
        return ReshardPlan(
            moved_bytes=self.moved_bytes + leaf.moved_bytes,
            least_bytes=self.least_bytes + leaf.least_bytes,
            between_processes_bytes=self.between_processes_bytes + leaf.between_processes_bytes,
            total_bytes=self.total_bytes + leaf.total_bytes,
            extra_bytes=max(self.extra_bytes, leaf.extra_bytes),
        )

    def __str__(self) -> str:
        moved = human_bytes(self.moved_bytes, 1)
        total = human_bytes(self.total_bytes, 1)
        between = human_bytes(self.between_processes_bytes, 1)
        extra = human_bytes(self.extra_bytes, 1)
        return (
            f"{moved} to move (at least {human_bytes(self.least_bytes, 1)}) of {total}, {between} of them between"
            f" processes; up to {extra} on a device beside its shards"
        )


def reshard_plan(state: PyTree, target: Target, *, names: Names | None = None, **options: Any) -> ReshardPlan:
    """Forecasts what `js.reshard` will move, and the memory that it needs; nothing is moved.

    Args:
        state: see `js.reshard`; it may be abstract.
        target: see `js.reshard`.
        names: see `js.reshard`.
        **options: `only`, `rename`, `missing` and `extra` of `js.reshard`.

    Returns:
        The forecast, printed as one line.

    Raises:
        CheckpointError: as by `js.reshard`.

    Examples:
        >>> print(js.reshard_plan(model, annotate))
    """
    operation, live = _operation(state, target, names=names, **options)
    live.casts.update(_narrower(operation))
    plan = ReshardPlan()
    for path, leaf_target in operation.reads.items():
        array = live.placed_as(path)
        # A leaf on hosts, such as a number, is on none of the devices.
        if array is not None and isinstance(leaf_target, jax.ShapeDtypeStruct):
            plan = plan.with_leaf(_plan_of_leaf(array, live.leaves[path].shape, leaf_target))
    return plan


def _plan_of_leaf(array: jax.ShapeDtypeStruct, shape: tuple[int, ...], target: jax.ShapeDtypeStruct) -> ReshardPlan:
    """Forecasts the move of one array of this shape, without padding, to a target."""
    assert array.sharding is not None and target.sharding is not None
    itemsize = jnp.dtype(array.dtype).itemsize
    transfers = transfers_for(array.sharding, array.shape, shape, target)
    between_processes = []
    for transfer in transfers:
        if transfer.source.device.process_index != transfer.target.device.process_index:
            between_processes.append(transfer)
    sources = shards_of(array.sharding, array.shape, shape)
    targets = shards_of(target.sharding, target.shape, shape)
    source_block = math.prod(array.sharding.shard_shape(array.shape))
    target_block = math.prod(target.sharding.shard_shape(target.shape))
    return ReshardPlan(
        moved_bytes=itemsize * moved_elements(transfers),
        least_bytes=itemsize * least_elements(sources, targets),
        between_processes_bytes=itemsize * moved_elements(between_processes),
        total_bytes=itemsize * target_block * len(target.sharding.device_set),
        # A device that has no shard of the one or the other holds zeros in its place, and beside them what arrives.
        extra_bytes=itemsize * (source_block + 2 * target_block),
    )


def _operation(
    state: PyTree, target: Target, *, names: Names | None, **options: Any
) -> tuple[RestoreOperation, LiveState]:
    """Returns the matched move, and the state that it reads."""
    like = _like(state, target)
    group = _group_of(state, like)
    live = LiveState(state, group) if names is None else NamedLiveState(state, group, names)
    live.call = "js.reshard(state, {like}{options})"
    return RestoreOperation(live, like, casts_are_shown=False, group=group, **options), live


def _group_of(state: PyTree, like: PyTree) -> ProcessGroup:
    """Returns the processes that move a state together: all that have a device of a mesh of either state."""
    members: set[int] = set()
    for tree in (state, like):
        leaves = _leaves.flatten(tree)
        # An array on no mesh is one of each process, and says nothing.
        on_meshes = {path: leaf for path, leaf in leaves.items() if _is_on_mesh(leaf)}
        members = members.union(*processes_of_arrays(on_meshes).values())
    if members and jax.process_index() not in members:
        raise CheckpointError(
            "This process has no part in the move.",
            where=f"process {jax.process_index()}",
            why=f"the devices of both meshes are those of {counted(len(members), 'other process', 'other processes')}.",
            do="if jax.process_index() in (0, 1): js.reshard(state, target)  # the processes of the two meshes",
        )
    return ProcessGroup(tuple(sorted(members))) if members else all_processes()


def _is_on_mesh(leaf: object) -> bool:
    sharding = getattr(leaf, "sharding", None)
    # The mesh of an abstract array may be abstract, and names no devices.
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)


def _like(state: PyTree, target: Target) -> PyTree:
    """Returns the state whose arrays are where those of `state` are to be."""
    if not callable(target) or isinstance(target, nnx.Module | nn.Module):
        return target
    if isinstance(state, nnx.Module):
        model = abstract_copy(state, target)
        check_has_devices(record_of(model).mesh, f"reshard({plain_class(model).__name__})")
        return model
    models = _models_in(state)
    if len(models) != 1:
        raise CheckpointError(
            "The annotation does not say which model it is for.",
            where=f"reshard({type(state).__name__}, {getattr(target, '__name__', 'annotate')})",
            why=f"the state has {len(models)} annotated nnx models; a function annotates one.",
            do='js.reshard({"model": model, "optimizer": optimizer}, annotate)  # or, of Linen parameters:\n'
            "js.reshard(params, js.abstract_init(lambda: model.init(key, x), model_on_the_other_mesh))",
        )
    (name,) = models
    model = abstract_copy(state[name], target)
    mesh = check_has_devices(record_of(model).mesh, f"reshard({name})")
    like = {}
    for key, value in state.items():
        if key == name:
            like[key] = model
        elif isinstance(value, nnx.Optimizer):
            like[key] = optimizer_like(value, model)
        else:
            like[key] = jax.tree.map(lambda x: _replicated(x, mesh), value)
    return like


def _models_in(state: PyTree) -> list[str]:
    """Returns the names of the models in a state."""
    if not isinstance(state, Mapping):
        return []
    return [name for name, value in state.items() if isinstance(value, nnx.Module) and not _is_optimizer(value)]


def _is_optimizer(value: object) -> bool:
    return isinstance(value, nnx.Optimizer)


def _replicated(leaf: Any, mesh: Any) -> Any:
    """Returns an array without its values, whole on every device of a mesh; other leaves as they are."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _narrower(operation: RestoreOperation) -> dict[str, np.dtype]:
    """Returns the dtypes of leaves that become smaller floats, by stored path."""
    casts = {}
    for path, dtype in operation.dtypes.items():
        stored_dtype = jnp.dtype(operation.opened.leaves[path].dtype)
        # Widened after the move, as a restore does: before it, more bytes would be sent.
        both_floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(stored_dtype, jnp.floating)
        if both_floats and dtype.itemsize < stored_dtype.itemsize:
            casts[path] = dtype
    return casts
