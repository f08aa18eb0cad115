"""Linen's own wrapper around each method of a module: how calls, submodules and call state are taken over.

All private names here are needed, and `check_linen` says so before a model is annotated.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jshard._compat import private_names

Method = Callable[..., Any]
"""A method of a Linen module, or an interceptor of one."""

LINEN_CALL = private_names.LINEN_CALL_METHOD.attribute
"""The method of a Linen module through which every call of its methods goes: `(self, function, args, kwargs)`."""

LINEN_REGISTER = private_names.LINEN_REGISTER_METHOD.attribute
"""The method by which a bound Linen module takes what a field or an attribute has: `(self, name, value)`."""

_HANDLED = private_names.LINEN_IS_HANDLED.attribute  # Flax's mark of a wrapped method

_NEEDED = (
    private_names.LINEN_CALL_METHOD,
    private_names.LINEN_REGISTER_METHOD,
    private_names.LINEN_SETUP,
    private_names.LINEN_INTERCEPTORS,
    private_names.LINEN_CALLERS,
    private_names.LINEN_IS_HANDLED,
)


def check_linen(module: nn.Module) -> None:
    """Checks that a Linen module can be annotated in the installed version of Flax.

    An annotated class overrides methods of Flax by their names. Under another name they would never be called, and the
    model would run without its units, unnoticed.

    Raises:
        UnsupportedVersionError: Flax lacks a name.
    """
    for name in _NEEDED:
        name.get()
    private_names.LINEN_STATE.get_in(module)


def is_transformed(method: object) -> bool:
    """Returns whether a method was created by one of Flax's transformations, such as `nn.vmap(Model)` or `@nn.remat`.

    Flax handles the method inside it, but not this one again.
    """
    return hasattr(method, _HANDLED) and hasattr(getattr(method, "__wrapped__", None), _HANDLED)


def is_method(function: Method) -> bool:
    """Returns whether a function is a method of a Linen module, which Flax calls in its own way."""
    return hasattr(function, _HANDLED)


def linen_children(module: nn.Module) -> list[nn.Module]:
    """Returns the submodules that a bound module has made in its `setup`, or has as fields."""
    state = private_names.LINEN_STATE.get_in(module)
    return [child for child in state.children.values() if isinstance(child, nn.Module)]


def transformed_methods(base: type[nn.Module]) -> dict[str, Method]:
    """Returns the methods of a class that were created by Flax's transformations."""
    methods = {}
    for name in dir(base):
        # As the class has it: a descriptor might run code, or return something else.
        method = inspect.getattr_static(base, name)
        if is_transformed(method):
            methods[name] = method
    return methods


def run_method(function: Method, module: nn.Module, args: tuple, kwargs: Mapping[str, object], ours: Method) -> object:
    """Runs a plain method of a bound copy of a module, from inside an interceptor of the module's own call.

    Captured results, names and interceptors around ours belong to that call. Interceptors of the model itself, inside
    it, see the copy.

    Args:
        function: the method.
        module: the copy.
        args: its arguments.
        kwargs: its named arguments.
        ours: the interceptor that runs now; those entered before it have already seen the call.
    """
    call: Method = functools.partial(function, module)
    if is_transformed(function):  # the module inside does all of this
        return call(*args, **kwargs)
    context = nn.module.InterceptorContext(module, function.__name__, call)
    interceptors = private_names.LINEN_INTERCEPTORS.get()  # the innermost first
    for interceptor in itertools.takewhile(lambda entered: entered is not ours, interceptors):
        call = _intercepted(call, interceptor, context)
    private_names.LINEN_SETUP.get_in(module)()
    callers = private_names.LINEN_CALLERS.get()
    callers.append(module)  # submodules that the method creates belong to the last one
    try:
        return call(*args, **kwargs)
    finally:
        callers.pop()


def _intercepted(call: Method, interceptor: Method, context: nn.module.InterceptorContext) -> Method:
    def run(*args: object, **kwargs: object) -> object:
        return interceptor(call, args, kwargs, context)

    return run


def exported_state(module: nn.Module) -> object:
    """Returns the parts of a module's call state that a copy takes over to run the call, as in Flax's transformations.

    That is whether `setup` has run, and the numbers in the names of its next submodules.
    """
    return private_names.LINEN_STATE.get_in(module).export()


def in_state_of(module: nn.Module, copy: nn.Module) -> nn.Module:
    """Returns the copy of a module, with its call state."""
    object.__setattr__(copy, private_names.LINEN_STATE.attribute, exported_state(module))
    return copy
