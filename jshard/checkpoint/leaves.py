"""A state as it is stored: leaves by path, with no class of Flax, Optax or the user in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jshard.checkpoint.data import is_data_position, position_text, set_position
from jshard.checkpoint.errors import CheckpointError

Path = tuple[str, ...]

_ESCAPED = {"%": "%25", "/": "%2F", ".": "%2E"}  # characters that separate keys on disk


def flatten(state: Any) -> dict[Path, Any]:
    """Every leaf of a state by its path.

    Args:
        state: a mapping of names to nnx modules, nnx optimizers, pytrees of arrays, numbers and texts, and objects
            with `get_state()` and `set_state()`; or one of these alone.
    """
    return {path: leaf for name, value in _parts(state) for path, leaf in _leaves(value, name)}


def unflatten_like(like: Any, leaves: Mapping[Path, Any]) -> Any:
    """The inverse of `flatten`: new objects of the kinds in `like`, holding other leaves."""
    filled = {name: _filled(value, name, leaves) for name, value in _parts(like)}
    if _is_named(like):
        return {key: filled[(str(key),)] for key in like}
    return filled[()]


def text(path: Path) -> str:
    """A path as it is shown and stored: `model/blocks/0/attention/qkv/kernel`."""
    return "/".join(escape(key) for key in path)


def escape(key: str) -> str:
    """A key without the characters that separate keys."""
    return "".join(_ESCAPED.get(letter, letter) for letter in key) or "%"


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by path as nested dicts, the form in which Orbax shows them to others."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        node = tree
        for key in folders:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The inverse of `nested`; lists, as others store them, count as dicts with numbers for keys."""
    if isinstance(tree, list | tuple):
        tree = {str(number): leaf for number, leaf in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {} if tree is None else {path: tree}
    below = ((f"{path}/{key}" if path else str(key), leaf) for key, leaf in tree.items())
    return {p: leaf for key, value in below for p, leaf in flat(value, key).items()}


def storable(leaves: Mapping[Path, Any], *, abstract: bool = False) -> dict[str, Any]:
    """Leaves in the kinds that are stored: arrays, ints, floats and texts.

    Args:
        leaves: of a state, by path.
        abstract: whether only the kinds matter: an array may be its shape and dtype, and no position is asked for.

    Raises:
        CheckpointError: some leaves are of other kinds.
    """
    stored: dict[str, Any] = {}
    bad = []
    for path, leaf in leaves.items():
        key = text(path)
        value = _without_values(leaf) if abstract else _stored(leaf)
        if value is None:
            bad.append(f"{key}  a {type(leaf).__name__}")
        stored[key] = value
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: {len(bad)} leaves are no data.",
            where=bad,
            why="a checkpoint holds arrays, numbers and texts, and objects with get_state() and set_state().",
            do="leave them out of the state, or save what they are made of.",
        )
    return stored


def restored(value: Any, like: Any) -> Any:
    """A stored value in the kind that its counterpart in `like` has; positions in data are set."""
    if is_data_position(like):
        set_position(like, value)
        return like
    if isinstance(like, bool | int | float | str):
        return type(like)(value)
    if isinstance(like, np.generic):
        return like.dtype.type(value)
    return value


def is_array(leaf: Any) -> bool:
    """Whether a leaf lies on devices, or would."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def abstract(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Shape, dtype and sharding of every array; other leaves stay as they are.

    Arrays that were given no sharding, such as the random state of an abstract model, are replicated over the mesh
    of the others.
    """
    found = (getattr(leaf, "sharding", None) for leaf in leaves.values())
    meshes = [sharding.mesh for sharding in found if isinstance(sharding, NamedSharding)]
    rest = NamedSharding(meshes[0], PartitionSpec()) if meshes else SingleDeviceSharding(jax.local_devices()[0])

    def one(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else rest
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {path: one(leaf) for path, leaf in leaves.items()}


def _stored(leaf: Any) -> Any:
    """A leaf as it is stored; None for what cannot be."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf if leaf.dtype != object else None
    if isinstance(leaf, bool):
        return int(leaf)
    if isinstance(leaf, int | float | str):
        return leaf
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if is_data_position(leaf):
        return position_text(leaf)
    return None


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return "" if is_data_position(leaf) else _stored(leaf)


def _is_named(state: Any) -> bool:
    return isinstance(state, Mapping) and not isinstance(state, nnx.State)


def _parts(state: Any) -> list[tuple[Path, Any]]:
    if _is_named(state):
        return [((str(name),), value) for name, value in state.items()]
    return [((), state)]


def _is_nnx(value: Any) -> bool:
    return isinstance(value, nnx.Pytree) and not isinstance(value, nnx.State)


def _leaves(value: Any, name: Path) -> Iterator[tuple[Path, Any]]:
    if _is_nnx(value) or isinstance(value, nnx.State):
        for path, variable in nnx.to_flat_state(nnx.state(value) if _is_nnx(value) else value):
            raw = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
            if jax.tree.leaves(raw):  # Optax masks parameters out with nodes that hold nothing
                yield (*name, *map(str, path)), raw
    else:
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            yield (*name, *(jax.tree_util.keystr((key,), simple=True) for key in path)), leaf


def _filled(value: Any, name: Path, leaves: Mapping[Path, Any]) -> Any:
    if _is_nnx(value):
        graphdef, state = nnx.split(value)
        return nnx.merge(graphdef, _filled(state, name, leaves))
    if not isinstance(value, nnx.State):
        return jax.tree.unflatten(jax.tree.structure(value), [leaves[path] for path, _ in _leaves(value, name)])
    filled = []
    for path, variable in nnx.to_flat_state(value):
        leaf = leaves.get((*name, *map(str, path)))
        if leaf is not None:
            variable = variable.replace(leaf) if isinstance(variable, nnx.Variable) else leaf
        filled.append((path, variable))
    return nnx.from_flat_state(filled)
