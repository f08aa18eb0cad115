"""Names for values of any type, which say what the values are."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A tree of leaves, as `jax.tree` takes it: a leaf, a container, or an object of a class that JAX knows."""

Json: TypeAlias = Any
"""A value of JSON: None, a bool, a number, a string, or a list or dict of such values."""

TreeDef: TypeAlias = Any
"""The structure of a tree, a `jax.tree_util.PyTreeDef`: a type checker sees a variable there, no class."""
