"""What Flax's own wrapper does around a method of a Linen module."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.linen import module as _linen


def run_method(function: Callable[..., Any], module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Runs a plain method of a bound copy of a module.

    Interceptors, captured results and names belong to the call of the module itself: they have seen it already.
    """
    module._try_setup()
    _linen._context.module_stack.append(module)
    try:
        return function(module, *args, **kwargs)
    finally:
        _linen._context.module_stack.pop()


def exported_state(module: nn.Module) -> Any:
    """What of a module's own notes about its call goes to a copy that runs it, as in Flax's transformations."""
    return module._state.export()


def in_state_of(module: nn.Module, copy: nn.Module) -> nn.Module:
    """A copy of a module with its notes."""
    object.__setattr__(copy, "_state", exported_state(module))
    return copy
