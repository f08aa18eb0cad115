"""The leaves of a checkpoint as a tree, and its rows in a table: equal layers are one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from jshard._text import counted, human_bytes, is_layer
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.state import leaves as _leaves
from jshard.cli.ckpt._values import shape_text

Tree: TypeAlias = "dict[str, StoredLeaf | Tree]"
"""Leaves by the keys of their paths, in nested dicts."""

# Functions that walk the tree take a few frames per level. A deeper leaf has the rest of its path as its name.
_MOST_LEVELS = 100


def tree_of(leaves: Mapping[str, StoredLeaf]) -> Tree:
    """Returns leaves by path as nested dicts; unlike `leaves.nested` for any paths, as another program may store."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/", _MOST_LEVELS)
        node = tree
        for key in folders:
            node = _folder(node, key)
        if last in node:  # a folder has this name: the leaf goes into it, without a name
            _folder(node, last)[""] = leaf
        else:
            node[last] = leaf
    return tree


def _folder(node: Tree, key: str) -> Tree:
    """Returns the folder of this name; a leaf of the same name is moved into it, without a name."""
    child = node.get(key)
    if isinstance(child, dict):
        return child
    folder: Tree = {} if child is None else {"": child}
    node[key] = folder
    return folder


@dataclasses.dataclass(frozen=True)
class TreeRow:
    """A leaf or a folder of the tree.

    Attributes:
        name: its key, or for equal layers those of the first and the last.
        node: the leaf, or the folder as a dict.
        level: how many folders it is in.
        count: for how many equal ones it stands.
    """

    name: str
    node: StoredLeaf | Tree
    level: int
    count: int

    def cells(self) -> list[str]:
        """Returns a cell for each column of the table."""
        indented = "  " * self.level + self.name
        if isinstance(self.node, StoredLeaf):
            return [indented, *self._leaf_cells(self.node)]
        leaves = _leaves.flat(self.node).values()
        size = human_bytes(self.count * num_bytes_of(leaves), 1)
        return [f"{indented}/", counted(self.count * len(leaves), "leaf"), "", size, "", ""]

    def _leaf_cells(self, leaf: StoredLeaf) -> list[str]:
        # Nothing if the leaf is stored in one piece.
        chunk = "" if leaf.chunk in (None, leaf.shape) else shape_text(leaf.chunk)
        if not leaf.is_array:
            return ["", leaf.kind, "", "", chunk]
        size = human_bytes(self.count * leaf.nbytes, 1)
        return [shape_text(leaf.shape), leaf.kind, size, leaf.spec or "", chunk]


def rows_of(tree: Tree, depth: int | None, level: int = 0, count: int = 1) -> Iterator[TreeRow]:
    """Yields the rows of a tree which `count` equal folders have; those of a folder follow its own."""
    for keys in _equal_layers(tree):
        name = keys[0] if len(keys) == 1 else f"{keys[0]}..{keys[-1]}"
        node = tree[keys[0]]
        row = TreeRow(name, node, level, count * len(keys))
        yield row
        if isinstance(node, dict) and (depth is None or level + 1 < depth):
            yield from rows_of(node, depth, level + 1, row.count)


def _equal_layers(tree: Tree) -> list[list[str]]:
    """Returns the keys of a folder in runs: adjacent layers whose leaves are alike are in one."""
    runs: list[list[str]] = []
    for key in sorted(tree, key=_order):
        previous = runs[-1][-1] if runs else ""
        is_next_layer = is_layer(key) and is_layer(previous) and int(key) == int(previous) + 1
        # Forms are equal transitively, so the previous layer stands for its run.
        if is_next_layer and _form(tree[previous]) == _form(tree[key]):
            runs[-1].append(key)
        else:
            runs.append([key])
    return runs


def _order(key: str) -> tuple[bool, int, str]:
    """Returns the place of a key among others: names by the alphabet, then layers by their numbers."""
    number = int(key) if is_layer(key) else 0
    return is_layer(key), number, key


def _form(node: StoredLeaf | Tree) -> object:
    """Returns what equal layers have in common: everything but the sums of their values."""
    if isinstance(node, StoredLeaf):
        return dataclasses.replace(node, sums=None)
    return {key: _form(child) for key, child in node.items()}


def num_bytes_of(leaves: Iterable[StoredLeaf]) -> int:
    """Returns the size of leaves together."""
    return sum(leaf.nbytes for leaf in leaves)
