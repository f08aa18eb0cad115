"""Which leaves of a state are its parameters: what `only="params"` reads.

They are the `nnx.Param`s of modules, wherever these lie, and what lies below a name `params`: Linen's variables, the
`params` of a `TrainState`. An optimizer's state has the parameters' names too, and holds moments; those of Optax are
named tuples, in which only modules are looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from jshard.checkpoint import leaves as _leaves

_NAME = "params"


def parameter_paths(like: Any, paths: Mapping[str, Any]) -> set[str]:
    """Those of the paths of a state that are parameters.

    Args:
        like: the state.
        paths: every leaf of it, by path.
    """
    is_named = isinstance(like, Mapping) and not isinstance(like, nnx.State)
    parts = [((str(name),), value) for name, value in like.items()] if is_named else [((), like)]
    begins = {_leaves.text(begin) for path, value in parts for begin in _begins(value, path)}
    if "" in begins:
        return set(paths)
    return {path for path in paths if any(above in begins for above in _and_above(path))}


def _begins(value: Any, path: _leaves.Path, *, within: bool = False) -> Iterator[_leaves.Path]:
    """The beginnings of the paths of parameters in a part of a state; `within` a named tuple those of modules alone."""
    if isinstance(value, nnx.Optimizer):
        return
    if path[-1:] == (_NAME,) and not within:
        yield path
    elif isinstance(value, nnx.Module if within else nnx.Pytree | nnx.State):
        # Variables of a part itself lie under their own names, and those of a module in a pytree one key deeper.
        for inner, variable in nnx.to_flat_state(value if isinstance(value, nnx.State) else nnx.state(value)):
            if isinstance(variable, nnx.Param):
                yield *path, *map(str, inner)
    else:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        for key, child in _children(value):
            yield from _begins(child, (*path, key), within=within or (is_named and key != _NAME))


def _children(node: Any) -> list[tuple[str, Any]]:
    """What lies directly below a node of a pytree, by key."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(jax.tree_util.keystr(path, simple=True), child) for path, child in found if path]


def _and_above(path: str) -> list[str]:
    keys = path.split("/")
    return ["/".join(keys[:count]) for count in range(1, len(keys) + 1)]
