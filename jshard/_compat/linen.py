"""What Flax's own wrapper does around a method of a Linen module."""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.linen import module as _linen

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
