"""Flax's modules: the graphs of both its interfaces, and what its own wrapper does around a method of Linen."""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.linen import module as _linen
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


_HANDLED = "method_handler_wrapped"  # Flax's mark of a method that it has wrapped


def is_transformed(method: Any) -> bool:
    """Whether a method was made by one of Flax's transformations, as `nn.vmap(Model)` or `@nn.remat` make one.

    Flax handles the method inside of it, and this one not again.
    """
    return hasattr(method, _HANDLED) and hasattr(getattr(method, "__wrapped__", None), _HANDLED)


def transformed_methods(base: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class that Flax's transformations made."""
    return {name: method for name in dir(base) if is_transformed(method := inspect.getattr_static(base, name))}


def run_method(
    function: Callable[..., Any], module: nn.Module, args: tuple, kwargs: Mapping[str, Any], ours: Callable[..., Any]
) -> Any:
    """Runs a plain method of a bound copy of a module, from inside an interceptor of the module's own call.

    Captured results, names and interceptors around ours belong to that call. Those that the model itself has put inside
    see the copy.
    """
    call: Callable[..., Any] = functools.partial(function, module)
    if is_transformed(function):  # the module inside does all of this
        return call(*args, **kwargs)
    context = nn.module.InterceptorContext(module, function.__name__, call)
    for interceptor in itertools.takewhile(lambda one: one is not ours, _linen._global_interceptor_stack):
        inner = call
        call = lambda *args, inner=inner, interceptor=interceptor, **kw: interceptor(inner, args, kw, context)
    module._try_setup()
    _linen._context.module_stack.append(module)
    try:
        return call(*args, **kwargs)
    finally:
        _linen._context.module_stack.pop()


def exported_state(module: nn.Module) -> Any:
    """What of a module's own notes about its call goes to a copy that runs it, as in Flax's transformations."""
    return module._state.export()


def in_state_of(module: nn.Module, copy: nn.Module) -> nn.Module:
    """A copy of a module with its notes."""
    object.__setattr__(copy, "_state", exported_state(module))
    return copy
