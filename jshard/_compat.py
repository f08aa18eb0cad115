"""Every difference between versions of jax and flax, and every name of theirs that is not public."""

from collections.abc import Mapping
from typing import Any

import jax
from flax.nnx import graphlib


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which a value inside `shard_map` differs.

    `jax.typeof(x).vma` was the name before jax 0.10.
    """
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def manual_axes() -> frozenset[str]:
    """Mesh axes that are manual where we are: not empty inside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def children(node: Any) -> Mapping[Any, Any]:
    """The attributes or items of a node of a Flax graph; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; this is the step to visit it along every path.
    """
    if not graphlib.is_node(node):
        return {}
    impl = graphlib.get_node_impl(node)
    return {} if impl is None else impl.node_dict(node)
