"""Evaluation of a Linen model: dropout off, statistics fixed, however the model says it in training.

A Flax module is told by a field or by an argument of its call. What nnx sets with `nnx.with_attributes` is set here
around each call of a module that has the field, and the argument does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax

_FIELDS = ("deterministic", "use_running_average")

# Part of jit's cache key: an nn.jit in the model must not take the trace that training has made.
_is_on = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def inference(is_on: bool) -> Iterator[None]:
    """Inside, modules with a field `deterministic` or `use_running_average` run as if it were True.

    Args:
        is_on: whether they do; else nothing changes.
    """
    if not is_on:
        yield
        return
    with _is_on(True), nn.intercept_methods(_intercept):
        yield


def _intercept(run: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
    module = context.module
    before = {name: getattr(module, name) for name in _FIELDS if _has_field(module, name)}
    if not before:
        return run(*args, **kwargs)
    args, kwargs = _without(before, context, args, kwargs)
    try:
        for name in before:
            object.__setattr__(module, name, True)
        return run(*args, **kwargs)
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _has_field(module: nn.Module, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(module))


def _without(
    names: dict[str, Any], context: nn.module.InterceptorContext, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with None for these: Flax's modules refuse what is said twice."""
    method = getattr(type(context.module), context.method_name, None) or type(context.module).__call__
    given = inspect.signature(method).bind_partial(context.module, *args, **kwargs)
    for name in names.keys() & given.arguments.keys():
        given.arguments[name] = None
    return given.args[1:], given.kwargs
