"""The graphs of Flax NNX: which values are inner nodes of a model, and what is inside each."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jshard._compat import private_names

SETTINGS = frozenset({int, float, bool, str, bytes, type(None), type, types.FunctionType})
"""The usual types of a module's attributes besides modules, variables and arrays."""


def is_linen_module(x: object) -> bool:
    """Returns whether a value is a Linen module, which is a dataclass, too; for parts of the library without Linen."""
    return isinstance(x, nn.Module)


@dataclasses.dataclass(frozen=True)
class _Graphlib:
    """What Flax itself walks graphs with."""

    registry: dict[type, private_names.Private]  # of the classes of NNX: how each is flattened
    impl_of: Callable[[object], private_names.Private]  # the same for any node, also one of JAX's pytrees
    is_node: Callable[[object], bool]


@functools.cache  # a walk over a large model asks for it at every number
def _graphlib() -> _Graphlib | None:
    """Returns Flax's own functions; None if a private name is gone."""
    registry = private_names.GRAPH_REGISTRY.find()
    impl_of = private_names.GRAPH_NODE_IMPL.find()
    is_graph_node = private_names.IS_GRAPH_NODE.find()
    if registry is None or impl_of is None or is_graph_node is None:
        return None
    return _Graphlib(registry, impl_of, is_graph_node)


def is_node(x: object) -> bool:
    """Returns whether a value is an inner node of a Flax graph; a variable is not.

    Equals Flax's own function, which is slow because it checks every number for being a variable.
    """
    graphlib = _graphlib()
    if graphlib is not None and type(x) in graphlib.registry:
        return True
    # By exact type: a subclass of `int` or `str` may be registered as a node.
    if type(x) in SETTINGS:
        return False
    return _is_node_by_public_names(x) if graphlib is None else graphlib.is_node(x)


def children(node: object) -> dict[Any, Any]:
    """Returns the attributes or items of a node of a Flax graph, without Flax's internal ones; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; with this it can be visited along every path.
    """
    if not is_node(node):
        return {}
    graphlib = _graphlib()
    if graphlib is None:
        items = _children_by_public_names(node)
    else:
        impl = graphlib.registry.get(type(node)) or graphlib.impl_of(node)
        items = {} if impl is None else impl.node_dict(node)
    # Flax's own state on a module is no part of the model, and holds no array.
    prefix = private_names.INTERNAL_PREFIX
    return {key: child for key, child in items.items() if not str(key).startswith(prefix)}


def is_pytree_class(cls: type[nnx.Module]) -> bool:
    """Returns whether the modules of a class are pytrees of JAX, as they are unless it was made with `pytree=False`.

    JAX looks at the type of a value alone, so an empty one is enough.
    """
    return not jax.tree_util.all_leaves([object.__new__(cls)])


def _is_node_by_public_names(x: object) -> bool:
    if isinstance(x, nnx.Variable):
        return False
    if isinstance(x, (nnx.Pytree, tuple)):
        return True
    return not jax.tree_util.all_leaves([x])


def _children_by_public_names(node: object) -> dict[Any, Any]:
    """Returns what Flax's own function returns, in its order: sorted by key."""
    if isinstance(node, nnx.List):
        return dict(sorted(map(_list_item, vars(node).items()), key=_numbers_first))
    if isinstance(node, nnx.Pytree):
        return dict(sorted(vars(node).items()))
    # One level: every value but the node itself counts as a leaf.
    items, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return dict(sorted((_key_of(path), child) for path, child in items))


def _list_item(attribute: tuple[str, object]) -> tuple[int | str, object]:
    """Returns an item of an `nnx.List`, which is an attribute named by its number; other attributes as they are."""
    name, value = attribute
    return (int(name) if name.isdigit() else name), value


def _numbers_first(item: tuple[int | str, object]) -> tuple[bool, int | str]:
    key = item[0]
    # Numbers and texts cannot be compared: numbers first, as Flax sorts them.
    return isinstance(key, str), key


def _key_of(path: tuple[object, ...]) -> Any:
    """Returns the key of a child in its node, as Flax names it."""
    (entry,) = path
    match entry:
        case jax.tree_util.SequenceKey():
            return entry.idx
        case jax.tree_util.DictKey() | jax.tree_util.FlattenedIndexKey():
            return entry.key
        case jax.tree_util.GetAttrKey():
            return entry.name
    return str(entry)
