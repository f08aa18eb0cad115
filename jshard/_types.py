"""Names for values that a type checker cannot describe."""

from typing import Any

PyTree = Any
"""A tree of arrays, or of what takes their place: shapes, shardings, truth values."""

Json = Any
"""A value as `json.loads` returns it."""

TreeDef = Any
"""The structure of a tree, a `jax.tree_util.PyTreeDef`: a type checker sees a variable there, no class."""
