"""Paths of the arrays in a tree as tuples of text, by which a gradient or a state is matched with its parameter.

The state of an optimizer repeats the tree of the parameters: `mu/blocks/0/kernel` ends in the path of a parameter.
"""

from collections.abc import Container

import jax
from jax.tree_util import KeyPath

from jshard._types import PyTree

Keys = tuple[str, ...]
"""The keys of a path as text."""


def key_texts(path: KeyPath) -> Keys:
    """Returns the keys of a `jax.tree_util` path, without those that lead into a Flax variable or box."""
    while path and getattr(path[-1], "name", None) == "value":  # a parameter of that name has a `key`
        path = path[:-1]
    return tuple(map(_key_text, path))


def _key_text(entry: object) -> str:
    """Returns the key of a `DictKey`, the name of a `GetAttrKey` or the index of a `SequenceKey`."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def paths_of(tree: PyTree) -> list[Keys]:
    """Returns the paths of the arrays in a tree."""
    return [key_texts(path) for path, _ in jax.tree.leaves_with_path(tree)]


def tail_in(paths: Container[Keys], path: Keys) -> Keys | None:
    """Returns the longest of some paths that a path ends in, or None."""
    # The longest tail first: `kernel` may be a parameter of the root, and `head/kernel` another one.
    for start in range(len(path)):
        tail = path[start:]
        if tail in paths:
            return tail
    return None
