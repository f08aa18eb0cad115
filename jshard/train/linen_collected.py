"""What a call of a Linen model collects, as by `sow`: `mutable=` names the collections, as in Linen's `apply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn

from jshard._linen.values import flat

_STATE = "batch_stats", "cache"  # a run updates them, asked for or not


def names_of(mutable: str | Sequence[str]) -> tuple[str, ...]:
    """The collections that a call asks for."""
    return (mutable,) if isinstance(mutable, str) else tuple(mutable)


def is_method(module: nn.Module, name: str) -> bool:
    """Whether a name of a Linen module is a method that its user wrote."""
    return callable(getattr(type(module), name, None)) and not hasattr(nn.Module, name)


class Initialising:
    """A bound Linen module as a loss sees it while its variables are made: called as a `LinenModel` is.

    Args:
        bound: the module, with all collections mutable.
        asked: gets the names of the collections that calls ask for, which are no state of the model.
    """

    def __init__(self, bound: nn.Module, asked: set[str]) -> None:
        self._bound, self._asked = bound, asked

    def __call__(self, *args: Any, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        """Calls the module. With `mutable`, names of collections, it also returns what the call put there."""
        return self._run("__call__", args, kwargs, names_of(mutable))

    def __getattr__(self, name: str) -> Any:
        return self._method(name) if is_method(self._bound, name) else getattr(self._bound, name)

    def _method(self, name: str) -> Callable[..., Any]:
        return lambda *args, mutable=(), **kwargs: self._run(name, args, kwargs, names_of(mutable))

    def _run(self, name: str, args: tuple, kwargs: dict[str, Any], asked: tuple[str, ...]) -> Any:
        self._asked |= set(asked) - set(_STATE)
        before = self._bound.variables
        out = getattr(self._bound, name)(*args, **kwargs)
        after = self._bound.variables
        return (out, {key: _since(before.get(key, {}), after.get(key, {})) for key in asked}) if asked else out


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A collection without what earlier calls have sown: each call of a `LinenModel` starts anew."""
    old, found = dict(flat(before)), {}
    for path, value in flat(after):
        tree = found
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        sown = isinstance(value, tuple) and isinstance(old.get(path), tuple)
        tree[path[-1]] = value[len(old[path]) :] if sown else value
    return found
