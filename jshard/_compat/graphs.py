"""Flax's graphs of modules, of both its interfaces."""

import types
from typing import Any

from flax.nnx import graphlib

LINEN_CALL = "_call_wrapped_method"
"""The method of a Linen module through which every call of its methods goes: `(self, function, args, kwargs)`."""

SETTINGS = frozenset({int, float, bool, str, bytes, type(None), type, types.FunctionType})
"""Types of most of what a module holds besides modules, variables and arrays."""


def is_node(x: Any) -> bool:
    """Whether something has a place of its own in a Flax graph and things in it; a variable has not.

    As Flax's own function, which takes long, as it asks of every number whether it is a variable.
    """
    return type(x) in graphlib.GRAPH_REGISTRY or (type(x) not in SETTINGS and graphlib.is_node(x))


def children(node: Any) -> dict[Any, Any]:
    """The attributes or items of a node of a Flax graph, without those that Flax keeps for itself; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; this is the step to visit it along every path.
    """
    impl = graphlib.GRAPH_REGISTRY.get(type(node)) or (graphlib.get_node_impl(node) if is_node(node) else None)
    found = {} if impl is None else impl.node_dict(node)
    return {key: child for key, child in found.items() if not str(key).startswith("_pytree__")}
