"""Nodes of a pytree whose children have names that JAX does not know.

These are objects of dict-like classes that are registered without keys, whose children JAX numbers, and dicts with keys
of several types, which JAX cannot sort.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeGuard, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.tree_util import FlattenedIndexKey

from jshard._types import PyTree


@dataclasses.dataclass(frozen=True)
class NamedNode:
    """A node of a pytree whose children have names that JAX does not know."""

    names: tuple[str, ...]
    children: tuple[PyTree, ...]
    rebuild: Callable[[list[PyTree]], PyTree]  # with other children, in the same order
    is_numbered: bool  # whether JAX numbers the children


# Types that JAX flattens with keys, or not at all; only nodes of other types are examined, which takes longer.
_KEYED = (
    list,
    tuple,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    np.ndarray,
    np.generic,
    jax.Array,
    jax.ShapeDtypeStruct,
    nnx.Variable,
    nnx.State,
    nnx.Pytree,
)


def named_node(node: object) -> NamedNode | None:
    """Returns the names of a node's children; None if JAX knows them, or there are none."""
    if isinstance(node, _KEYED):
        return None
    # No subclass: JAX registers `OrderedDict` and `defaultdict` by themselves, and others are leaves.
    if type(node) is dict:
        return _mixed_dict(node)
    return _dict_like(node)


_Key = TypeVar("_Key", bound=Hashable)


def names_by_key(keys: Iterable[_Key]) -> dict[_Key, str]:
    """Returns the names of keys in paths: unchanged, or quoted if a number with the same spelling is also a key."""
    keys = list(keys)
    numbers = {str(key) for key in keys if not isinstance(key, str)}
    names = {}
    for key in keys:
        is_ambiguous = isinstance(key, str) and key in numbers
        names[key] = repr(key) if is_ambiguous else str(key)
    return names


def _mixed_dict(node: dict[Hashable, PyTree]) -> NamedNode | None:
    """Returns the names of a dict's children if it mixes strings with other keys; JAX flattens other dicts."""
    is_mixed = len({isinstance(key, str) for key in node}) > 1
    if not is_mixed:
        return None
    names = names_by_key(node)

    def rebuild(children: list[PyTree]) -> dict[Hashable, PyTree]:
        return dict(zip(names, children, strict=True))

    return NamedNode(tuple(names.values()), tuple(node.values()), rebuild, is_numbered=False)


def _dict_like(node: object) -> NamedNode | None:
    """Returns the names of the children of an object whose class is registered without keys."""
    # Only the node itself is flattened, to its direct children.
    flat, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if not flat or not all(_is_numbered(path) for path, _ in flat):
        return None
    children = tuple(child for _, child in flat)
    keys = _keys_of(node, structure.node_data(), children)
    if keys is None:
        return None
    names = names_by_key(keys)
    return NamedNode(tuple(names.values()), children, structure.unflatten, is_numbered=True)


def _is_numbered(path: Sequence[object]) -> bool:
    return len(path) == 1 and isinstance(path[0], FlattenedIndexKey)


def _keys_of(
    node: PyTree, node_data: tuple[type, object] | None, children: tuple[PyTree, ...]
) -> list[str | int] | None:
    """Returns the keys of the children of a dict-like class that is registered without keys; None if it has none.

    Such a class keeps its keys beside the children, in the order in which they were inserted. By number, values would
    be swapped if they are inserted in another order.
    """
    candidates: list[object] = []
    if node_data is not None:
        # The data that the class returns beside the children when it is flattened: the keys, or a tuple with them.
        auxiliary_data = node_data[1]
        candidates.append(auxiliary_data)
        if isinstance(auxiliary_data, tuple | list):
            candidates += auxiliary_data
    if callable(getattr(node, "keys", None)):
        candidates.append(list(node.keys()))
    for candidate in candidates:
        if _are_keys(candidate, node, children):
            return list(candidate)
    return None


def _are_keys(candidate: object, node: PyTree, children: tuple[PyTree, ...]) -> TypeGuard[Sequence[str | int]]:
    """Returns whether these are the keys of a node's children, in order."""
    if not isinstance(candidate, tuple | list) or len(candidate) != len(children):
        return False
    if not all(isinstance(key, str | int) for key in candidate):
        return False
    # Equal keys would give two children one path.
    if len(set(candidate)) != len(candidate):
        return False
    return all(_has_child(node, key, child) for key, child in zip(candidate, children, strict=True))


def _has_child(node: PyTree, key: str | int, child: object) -> bool:
    """Returns whether a node has this child under this key: as an item, an attribute, or in a dict of its own."""
    if isinstance(key, str) and getattr(node, key, None) is child:
        return True
    attributes = getattr(node, "__dict__", {}).values()
    tables = [node, *(value for value in attributes if isinstance(value, Mapping))]
    return any(_has_item(table, key, child) for table in tables)


def _has_item(table: PyTree, key: str | int, child: object) -> bool:
    try:
        return table[key] is child
    except (KeyError, IndexError, TypeError):
        return False
