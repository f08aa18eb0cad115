"""A state as Orbax stores it: arrays by path, with no class of Flax, Optax or the user in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

Path = tuple[str, ...]


def flatten(state: Mapping[str, Any]) -> dict[Path, Any]:
    """Every leaf of a state by its path.

    Args:
        state: names and what they stand for: nnx modules, nnx optimizers, pytrees of arrays, numbers.
    """
    return {(name, *path): leaf for name, value in state.items() for path, leaf in _leaves(value)}


def unflatten_like(like: Mapping[str, Any], leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: new objects of the kinds in `like`, holding other leaves."""
    return {name: _filled(value, (name,), leaves) for name, value in like.items()}


def nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Leaves by path as nested dicts, the form in which Orbax shows them to others."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flat(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """The inverse of `nested`."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {p: leaf for key, value in tree.items() for p, leaf in flat(value, (*path, str(key))).items()}


def abstract(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Shape, dtype and sharding of every array; numbers stay as they are.

    Arrays that were given no sharding, such as the random state of an abstract model, are replicated over the mesh
    of the others.
    """
    found = (getattr(leaf, "sharding", None) for leaf in leaves.values())
    meshes = [sharding.mesh for sharding in found if isinstance(sharding, NamedSharding)]
    rest = NamedSharding(meshes[0], PartitionSpec()) if meshes else SingleDeviceSharding(jax.devices()[0])

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else rest
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {path: one(leaf) for path, leaf in leaves.items()}


def _is_nnx(value: Any) -> bool:
    return isinstance(value, nnx.Pytree) and not isinstance(value, nnx.State)


def _leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    if _is_nnx(value):
        for path, variable in nnx.to_flat_state(nnx.state(value)):
            # Optax masks parameters out with nodes that hold nothing.
            if jax.tree.leaves(raw := variable.get_raw_value()):
                yield tuple(map(str, path)), raw
    else:
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            yield tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf


def _filled(value: Any, name: Path, leaves: Mapping[Path, Any]) -> Any:
    if not _is_nnx(value):
        paths = [path for path, _ in _leaves(value)]
        return jax.tree.unflatten(jax.tree.structure(value), [leaves[*name, *path] for path in paths])
    graphdef, state = nnx.split(value)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        leaf = leaves.get((*name, *map(str, path)))
        filled.append((path, variable if leaf is None else variable.replace(leaf)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
