"""Finds the parameters among the leaves of a state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import jax
from flax import nnx

from jshard._types import PyTree
from jshard.checkpoint.state.leaves import Path, parts_of, text, variables_of
from jshard.checkpoint.state.named_nodes import named_node

_PARAMS = "params"


def parameter_paths(like: PyTree, paths: Mapping[str, object]) -> set[str]:
    """Returns the paths of a state that are parameters."""
    tree_paths = {text(tree.path) for tree in _all_parameter_trees(like)}
    if "" in tree_paths:  # the state is a tree of parameters
        return set(paths)
    parameters: set[str] = set()
    for path in paths:
        is_in_tree = not tree_paths.isdisjoint(_with_paths_above(path))
        if is_in_tree:
            parameters.add(path)
    return parameters


def parameter_roots(like: PyTree) -> set[str]:
    """Returns the paths of the models in a state, and of its trees `params`: what is stored below is of a model."""
    return {text(tree.root) for tree in _all_parameter_trees(like)}


def _with_paths_above(path: str) -> Iterator[str]:
    """Yields `a`, `a/b` and `a/b/c` for `a/b/c`."""
    return itertools.accumulate(path.split("/"), "{}/{}".format)


@dataclasses.dataclass(frozen=True)
class _ParameterTree:
    """Parameters in a state, or one of them: everything at and below a path."""

    path: Path
    root: Path  # of the model, or of the tree `params`, that they are part of


def _all_parameter_trees(like: PyTree) -> Iterator[_ParameterTree]:
    for path, value in parts_of(like):
        yield from _parameter_trees(value, path)


def _parameter_trees(value: PyTree, path: Path, *, is_in_named_tuple: bool = False) -> Iterator[_ParameterTree]:
    """Yields the parameters in a part of a state.

    In a named tuple, as Optax's states are, a tree `params` counts only if it is a field of it, and of Flax's types
    only modules: others hold statistics of the parameters.
    """
    if isinstance(value, nnx.Optimizer):
        return
    if path[-1:] == (_PARAMS,) and not is_in_named_tuple:
        yield _ParameterTree(path, root=path)
        return
    types_with_parameters = (nnx.Module,) if is_in_named_tuple else (nnx.Pytree, nnx.State)
    if isinstance(value, types_with_parameters):
        yield from _parameters_of_module(value, path)
        return
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    for key, child in _children(value):
        is_other_field = is_named_tuple and key != _PARAMS
        yield from _parameter_trees(child, (*path, key), is_in_named_tuple=is_in_named_tuple or is_other_field)


def _parameters_of_module(module: nnx.Pytree | nnx.State, path: Path) -> Iterator[_ParameterTree]:
    for variable_path, variable in variables_of(module) or ():
        if isinstance(variable, nnx.Param):
            yield _ParameterTree((*path, *variable_path), root=path)


def _children(node: PyTree) -> list[tuple[str, PyTree]]:
    """Returns the direct children of a pytree node, by key."""
    named = named_node(node)
    if named is not None:
        return list(zip(named.names, named.children, strict=True))
    # Everything below the node counts as a leaf, so these are its direct children.
    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    children: list[tuple[str, PyTree]] = []
    for path, child in flat:
        if path:  # a leaf has an empty path, to itself
            children.append((jax.tree_util.keystr(path, simple=True), child))
    return children
