"""The stored form of a state: leaves by path, without any class of Flax, Optax or the user.

A state is a dict of parts, or one part. A part is a Flax module or state, whose leaves are under the names of its
variables, or any other pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jshard._types import PyTree
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.state.named_nodes import named_node, names_by_key
from jshard.linen.boxes import is_padded
from jshard.plans.padding import padding_of

Path = tuple[str, ...]
_Value = TypeVar("_Value")


# ---- paths


_ESCAPED = {"%": "%25", "/": "%2F", ".": "%2E", "\\": "%5C", "\0": "%00"}  # not allowed in a folder name
_TABLE = str.maketrans(_ESCAPED)


def text(path: Path) -> str:
    """Returns a path as shown and stored: `model/blocks/0/attention/qkv/kernel`."""
    return "/".join(escape(key) for key in path)


def by_text(by_path: Mapping[Path, _Value]) -> dict[str, _Value]:
    """Returns what belongs to leaves by their paths as text."""
    return {text(path): value for path, value in by_path.items()}


def escape(key: str) -> str:
    """Returns a key with the separators of keys and folders escaped."""
    # An empty key needs a name; "%" is that of no other key, as a percent sign is escaped.
    return key.translate(_TABLE) or "%"


def unescape(path: str) -> str:
    """Inverts `escape`, of a key or of a path with its slashes, except for empty keys."""
    # "%25" last, or the "%2F" that a key contains would be unescaped twice.
    for letter, code in reversed(_ESCAPED.items()):
        path = path.replace(code, letter)
    return path


def check_paths(paths: Collection[str]) -> None:
    """Raises `CheckpointError` if a leaf's path is a prefix of another, because Orbax stores a tree."""
    all_paths = set(paths)
    bad = []
    for path in paths:
        keys = path.split("/")
        for count in range(1, len(keys)):
            path_above = "/".join(keys[:count])
            if path_above in all_paths:
                bad.append(f"{path_above}  and {path}")
    if bad:
        raise CheckpointError(
            "The state cannot be stored by path.",
            where=bad,
            why="the first is an array, so the other cannot be stored below it.",
            do="rename one of them.",
        )


def nested(leaves: Mapping[str, object]) -> dict[str, PyTree]:
    """Returns leaves by path as nested dicts, the form that other Orbax users see."""
    tree: dict[str, PyTree] = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        node = tree
        for key in folders:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def flat(tree: PyTree, path: str = "") -> dict[str, PyTree]:
    """Inverts `nested`; lists, which other programs store, are treated as dicts with numeric keys."""
    if tree is None:
        return {}
    if isinstance(tree, list | tuple):
        tree = {str(number): leaf for number, leaf in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: tree}
    leaves: dict[str, PyTree] = {}
    for key, subtree in tree.items():
        leaves |= flat(subtree, f"{path}/{key}" if path else str(key))
    return leaves


# ---- leaves of a state


@dataclasses.dataclass(frozen=True)
class FlatState:
    """The leaves of a state, by path.

    Attributes:
        leaves: the values.
        logical_shapes: the stored shapes, without padding, of leaves whose arrays are padded to divide over a mesh.
    """

    leaves: Mapping[Path, object]
    logical_shapes: Mapping[Path, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: Path
    value: object
    logical_shape: tuple[int, ...] | None = None  # of a padded array


def flat_state(state: PyTree) -> FlatState:
    """Returns every leaf of a state by its path; raises `CheckpointError` if two leaves have the same path."""
    leaves: dict[Path, object] = {}
    logical_shapes: dict[Path, tuple[int, ...]] = {}
    repeated: set[str] = set()
    for leaf in _all_leaves(state):
        if leaf.path in leaves:
            repeated.add(text(leaf.path))
        leaves[leaf.path] = leaf.value
        if leaf.logical_shape is not None:
            logical_shapes[leaf.path] = leaf.logical_shape
    if repeated:
        raise CheckpointError(
            "The state cannot be stored by path.",
            where=sorted(repeated),
            why="two leaves have the same path: keys are stored as text.",
            do="rename one of them.",
        )
    return FlatState(leaves, logical_shapes)


def flatten(state: PyTree) -> Mapping[Path, object]:
    """Returns every leaf of a state by its path; raises `CheckpointError` if two leaves have the same path."""
    return flat_state(state).leaves


def logical_shapes(state: PyTree) -> Mapping[Path, tuple[int, ...]]:
    """Returns the stored shapes, without padding, of leaves whose arrays are padded to divide over a mesh."""
    return flat_state(state).logical_shapes


def by_number(state: PyTree) -> dict[str, str]:
    """Returns the paths of leaves below dict-like nodes as earlier versions stored them: with numbers for keys.

    They are by today's path; equal ones are left out.
    """
    numbered_paths = {}
    by_name = _all_leaves(state)
    by_numbers = _all_leaves(state, is_numbered=True)
    # Both walks visit the same leaves in the same order.
    for named, numbered in zip(by_name, by_numbers, strict=True):
        if named.path != numbered.path:
            numbered_paths[text(named.path)] = text(numbered.path)
    return numbered_paths


def parts_of(state: PyTree) -> list[tuple[Path, PyTree]]:
    """Returns the parts of a state by path: the items of a dict, or the state itself under the empty path."""
    if not _is_dict(state):
        return [((), state)]
    return [((name,), state[key]) for key, name in names_by_key(state).items()]


def _is_dict(state: object) -> bool:
    return isinstance(state, Mapping) and not isinstance(state, nnx.State)


def variables_of(value: PyTree, *, is_numbered: bool = False) -> list[tuple[Path, PyTree]] | None:
    """Returns the variables of a Flax module or state by path; None for any other pytree.

    Args:
        value: a part of a state.
        is_numbered: whether to leave the numbers that Flax gives the children of dict-like nodes.
    """
    if not isinstance(value, nnx.Pytree | nnx.State):
        return None
    state = value if isinstance(value, nnx.State) else nnx.state(value)
    variables = []
    for flax_path, variable in nnx.to_flat_state(state):
        path = tuple(map(str, flax_path)) if is_numbered else _named_path(value, flax_path)
        variables.append((path, variable))
    return variables


def _named_path(owner: PyTree, flax_path: Iterable[Any]) -> Path:
    """Returns the path of a variable in a module, with the keys of dict-like nodes that Flax numbers."""
    names: list[str] = []
    node = owner
    for key in flax_path:
        named = named_node(node)
        if named is not None and named.is_numbered:
            names.append(named.names[key])
            node = named.children[key]
        else:
            names.append(str(key))
            node = _child(node, key)
    return tuple(names)


def _child(node: PyTree, key: object) -> PyTree:
    """Returns an attribute or item of a module or container; None if it has none, as a state, which has no objects."""
    # Attributes first: what `node[key]` means is up to the class of the module.
    if isinstance(key, str) and key in getattr(node, "__dict__", {}):
        return vars(node)[key]
    try:
        return node[key]
    except (KeyError, IndexError, TypeError, AttributeError):
        pass
    return getattr(node, key, None) if isinstance(key, str) else None


def _all_leaves(state: PyTree, *, is_numbered: bool = False) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    for name, value in parts_of(state):
        leaves += _leaves_of_part(value, name, is_numbered=is_numbered)
    return leaves


def _leaves_of_part(value: PyTree, name: Path, *, is_numbered: bool) -> Iterator[_Leaf]:
    variables = variables_of(value, is_numbered=is_numbered)
    if variables is None:
        yield from _leaves_of_tree(value, name, is_numbered=is_numbered)
        return
    for path, variable in variables:
        shape = _logical_shape_of(variable)
        # Usually one leaf; Optax may mask it out.
        for leaf in _leaves_of_tree(_raw_value(variable), (*name, *path), is_numbered=is_numbered):
            yield leaf if shape is None else dataclasses.replace(leaf, logical_shape=shape)


def _leaves_of_tree(tree: PyTree, name: Path, *, is_numbered: bool) -> Iterator[_Leaf]:
    # Boxes and variables are nodes of a pytree. Their arrays alone, its leaves, do not say what is padding.
    for path, node in _nodes(tree, name, is_leaf=_has_padding, is_numbered=is_numbered):
        if is_padded(node):
            # The same path, padded or not: a checkpoint restores onto any mesh.
            yield _Leaf(path, node.value, node.shape)
            continue
        shape = _logical_shape_of(node)
        if shape is None:
            yield _Leaf(path, node)
            continue
        for array_path, array in _nodes(node, path, is_leaf=is_padded, is_numbered=is_numbered):
            yield _Leaf(array_path, array, shape)


def _has_padding(node: object) -> bool:
    return is_padded(node) or padding_of(node) is not None


def _logical_shape_of(node: PyTree) -> tuple[int, ...] | None:
    """Returns the shape of a variable's array without its padding; None if it has none, or this is no variable."""
    padding = padding_of(node)
    if padding is None:
        return None
    # A variable of a tree of other values, such as a mask, has no array.
    shape = getattr(_raw_value(node), "shape", None)
    return None if shape is None else padding.logical_shape(shape)


def _nodes(
    tree: PyTree, name: Path, *, is_leaf: Callable[[object], bool], is_numbered: bool = False
) -> Iterator[tuple[Path, PyTree]]:
    """Yields leaves by path; below nodes whose children JAX cannot name, by the names they have here."""

    def is_end(node: object) -> bool:
        # JAX would number the children of the latter, or fail to sort them.
        return is_leaf(node) or named_node(node) is not None

    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)[0]:
        path = (*name, *map(_key_text, keys))
        named = None if is_leaf(node) else named_node(node)
        if named is None:
            yield path, node
            continue
        names: Iterable[str] = named.names
        if is_numbered and named.is_numbered:
            names = map(str, range(len(named.children)))
        for child_name, child in zip(names, named.children, strict=True):
            yield from _nodes(child, (*path, child_name), is_leaf=is_leaf, is_numbered=is_numbered)


def _key_text(key: object) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _raw_value(variable: object) -> object:
    """Returns a variable's value as it is, without the hooks of `get_value`; states may hold values alone."""
    if isinstance(variable, nnx.Variable):
        return variable.get_raw_value()
    return variable


# ---- a state with other leaves


def unflatten_like(like: PyTree, leaves: Mapping[Path, object]) -> PyTree:
    """Inverts `flatten`: returns new objects of the types in `like`, with other leaves."""
    # By the names in paths, as parts of a state were read; the keys of `like` may be numbers.
    filled = {name: _filled_part(value, name, leaves) for name, value in parts_of(like)}
    if _is_dict(like):
        return {key: filled[(name,)] for key, name in names_by_key(like).items()}
    return filled[()]


def _filled_part(value: PyTree, name: Path, leaves: Mapping[Path, object]) -> PyTree:
    if isinstance(value, nnx.State):
        return _filled_state(value, value, name, leaves)
    if isinstance(value, nnx.Pytree):
        graphdef, state = nnx.split(value)
        # A new module: `like` keeps its own values.
        return nnx.merge(graphdef, _filled_state(state, value, name, leaves))
    return _filled_tree(value, name, leaves)


def _filled_state(state: nnx.State, owner: PyTree, name: Path, leaves: Mapping[Path, object]) -> nnx.State:
    """Returns a state with other leaves; `owner` is the module that it is of, or itself."""
    filled = []
    for flax_path, variable in nnx.to_flat_state(state):
        path = (*name, *_named_path(owner, flax_path))
        value = _filled_tree(_raw_value(variable), path, leaves)
        if isinstance(variable, nnx.Variable):
            # A new variable with the same metadata, such as its sharding.
            value = variable.replace(value)
        filled.append((flax_path, value))
    return nnx.from_flat_state(filled)


def _filled_tree(tree: PyTree, name: Path, leaves: Mapping[Path, object]) -> PyTree:
    """Returns a pytree with other leaves. It walks the tree as `_nodes` does, so that the paths are the same."""

    def is_end(node: object) -> bool:
        return is_padded(node) or named_node(node) is not None

    def is_named(node: object) -> bool:
        return not is_padded(node) and named_node(node) is not None

    filled = []
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)[0]:
        path = (*name, *map(_key_text, keys))
        named = None if is_padded(node) else named_node(node)
        if named is None:
            filled.append(leaves[path])
            continue
        children = []
        for child_name, child in zip(named.names, named.children, strict=True):
            children.append(_filled_tree(child, (*path, child_name), leaves))
        filled.append(named.rebuild(children))
    # A padded box is no leaf of this structure: it keeps its class, and gets the array.
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_named), filled)


def plain_like(like: PyTree, leaves: Mapping[Path, object]) -> PyTree:
    """Returns other leaves in the structure of `like`, with plain dicts for Flax's objects, and arrays for boxes.

    The keys of these dicts are those of `nnx.to_pure_dict`: names, and numbers for the items of lists.
    """
    plain = {name: _plain_part(value, name, leaves) for name, value in parts_of(like)}
    if _is_dict(like):
        return {key: plain[(name,)] for key, name in names_by_key(like).items()}
    return plain[()]


def _plain_part(value: PyTree, name: Path, leaves: Mapping[Path, object]) -> PyTree:
    if not isinstance(value, nnx.Pytree | nnx.State):
        return jax.tree.map(_unboxed, _filled_tree(value, name, leaves), is_leaf=is_padded)
    state = value if isinstance(value, nnx.State) else nnx.state(value)
    filled = _filled_state(state, value, name, leaves)
    return nnx.to_pure_dict(filled)


def _unboxed(node: PyTree) -> PyTree:
    """Returns what a box holds, which is not padded here."""
    return node.value if is_padded(node) else node
