"""A live model under another library's names and in its layout, computed on the model's own devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._processes import ProcessGroup
from jshard._types import PyTree
from jshard.checkpoint.converting import Leaf, own_mesh
from jshard.checkpoint.formats import Names
from jshard.checkpoint.formats.names import ForeignSource, Origin
from jshard.checkpoint.formats.source import Box
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.state.leaves import escape
from jshard.checkpoint.state.parameter_paths import parameter_paths
from jshard.in_memory.live_state import LiveState
from jshard.plans.placement import PlacementPolicy, place
from jshard.plans.policies import MixedPrecision


class NamedLiveState(LiveState):
    """The parameters of a live model as another library's arrays."""

    def __init__(self, state: PyTree, group: ProcessGroup, names: Names) -> None:
        super().__init__(state, group)
        self._model_leaves = {}
        self._path_of: dict[str, str] = {}
        prefix = f"{next(iter(state))}/" if isinstance(state, Mapping) and len(state) == 1 else ""
        for path in parameter_paths(state, self.leaves):
            # The table of names has the paths in the model, without its name in the state.
            path_in_model = path.removeprefix(prefix)
            self._model_leaves[path_in_model] = self.leaves[path]
            self._path_of[path_in_model] = path
        foreign = ForeignSource(_Described(self._model_leaves), names)
        # The target is a dict by these names, whose paths have the separators in a key escaped.
        self._origins = {escape(name): origin for name, origin in foreign.origins.items()}
        self.leaves = {escape(name): leaf for name, leaf in foreign.leaves.items()}

    def source_of(self, path: str) -> Leaf:
        """See `LiveState.source_of`: the array in the other library's layout."""
        origin = self._origins[path]
        target = self.placed_as(path)
        array = self._leaves[self._path_of[origin.path]]
        if target is None:  # it is on the host, or on one device
            return _in_other_layout(array, origin, self._model_leaves[origin.path].shape, self.leaves[path].shape)
        if isinstance(array, jax.ShapeDtypeStruct) or not array.addressable_shards:
            return target
        convert = _converter(origin, self._model_leaves[origin.path].shape, target)
        # Another mesh of the caller may be active.
        with own_mesh(target):
            return convert(array)

    def placed_as(self, path: str) -> jax.ShapeDtypeStruct | None:
        """See `LiveState.placed_as`."""
        origin = self._origins[path]
        leaf = self.leaves[path]
        array = self._leaves[self._path_of[origin.path]]
        if not isinstance(getattr(array, "sharding", None), NamedSharding):
            return None
        shape = self._model_leaves[origin.path].shape
        spec = _permuted_spec(array, shape, origin)
        if spec is None:
            spec = _default_spec(leaf, array.sharding)
        mesh = array.sharding.mesh
        assert isinstance(mesh, Mesh), "the arrays are on devices"
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, self.casts.get(path, array.dtype), sharding=sharding)


class _Described:
    """Leaves without values, as a source of which nothing is read."""

    def __init__(self, leaves: Mapping[str, StoredLeaf]) -> None:
        self.leaves = leaves

    def read(self, name: str, box: Box) -> Leaf:
        raise NotImplementedError("only the leaves are described")


def _permuted_spec(array: Leaf, shape: tuple[int, ...], origin: Origin) -> PartitionSpec | None:
    """Returns the spec of an array whose dims are only permuted: every device keeps its part. None for others."""
    stored = origin.stored
    is_whole = stored.parts == 1 and stored.stack is None and len(stored.names) == 1
    if not is_whole or array.shape != shape:
        return None
    spec = array.sharding.spec
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    by_stored_dim = dict(zip(stored.order(len(shape)), entries, strict=True))
    return PartitionSpec(*(by_stored_dim[dim] for dim in range(len(shape))))


def _default_spec(leaf: StoredLeaf, sharding: NamedSharding) -> PartitionSpec:
    """Returns the spec that a parameter of this shape would have: along its largest dim that divides, if one does."""
    degrees = dict(sharding.mesh.shape)
    placement = place("", leaf.shape, leaf.dtype, (), degrees, PlacementPolicy(), MixedPrecision(), pads=False)
    return placement.partition_spec


@functools.lru_cache(maxsize=1024)
def _converter(
    origin: Origin, shape: tuple[int, ...], target: jax.ShapeDtypeStruct
) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that computes an array in the other layout, on the devices of its leaf."""

    def convert(array: jax.Array) -> jax.Array:
        return _in_other_layout(array, origin, shape, target.shape).astype(target.dtype)

    return jax.jit(convert, out_shardings=target.sharding)


def _in_other_layout(
    array: jax.Array, origin: Origin, shape: tuple[int, ...], stored_shape: tuple[int, ...]
) -> jax.Array:
    """Returns the other library's array for a leaf.

    Args:
        array: the leaf, which may be padded.
        origin: which part of it the array is, and in which layout.
        shape: of the leaf, without padding.
        stored_shape: of the result.
    """
    stored = origin.stored
    array = lax.slice(array, (0,) * len(shape), shape)
    if stored.parts > 1:
        return array.reshape(*shape[:-2], math.prod(shape[-2:]))
    order = stored.order(len(stored_shape))
    if stored.stack is not None:
        array = lax.index_in_dim(array, origin.start, stored.stack % len(shape), keepdims=False)
    elif len(stored.names) > 1:
        dim = stored.dim % len(shape)
        # `order` leads from the dims of the leaf to those of the stored array.
        size = stored_shape[order[dim]]
        array = lax.slice_in_dim(array, origin.start, origin.start + size, axis=dim)
    dims = {stored_dim: dim for dim, stored_dim in enumerate(order)}
    return array.transpose([dims[stored_dim] for stored_dim in range(len(order))])
