"""A home for the values of a Flax variable: no tree shows it, and every write to the variable goes through it."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from flax import nnx
from flax.nnx import tracers


class VariableHome(Protocol):
    """Where the values of a variable belong."""

    def arriving(self, value: Any) -> Any:
        """A value, or a part of one, in a form that can be written into the variable's value."""

    def settled(self, value: Any) -> Any:
        """The value that the variable holds after it was written; the same one if nothing has to change."""


class _Remembering(tracers.TraceState):
    """The trace of a variable, with a home for its values.

    Of what a variable has, only its trace is in no tree: a class or metadata of its own would make the tree of a
    placed model differ from that of a plain one, and `jax.tree.map` over both would fail.
    """

    __slots__ = ("home",)

    def __init__(self, trace: tracers.TraceState, home: VariableHome) -> None:
        self._jax_trace = trace.jax_trace
        self.home = home

    def __reduce__(self) -> tuple:
        return tracers.TraceState, ()  # devices are not pickled: the next call gives a new home


def home_of(variable: nnx.Variable) -> Any:
    """The home that `give_home` has set; None if the variable has none."""
    return getattr(variable._trace_state, "home", None)


def give_home(variable: nnx.Variable, home: VariableHome) -> None:
    """Sets the home of a variable: it stays through writes and copies."""
    object.__setattr__(variable, "_trace_state", _Remembering(variable._trace_state, home))


def write_past_home(variable: nnx.Variable, value: Any) -> None:
    """Sets the value of a variable as it is, for a value that stays for a moment."""
    object.__setattr__(variable, "_raw_value", value)


def settle(variable: nnx.Variable) -> None:
    """Lets the home of a variable, if it has one, decide what it holds."""
    home = home_of(variable)
    if home is None:
        return
    value = variable.get_raw_value()
    settled = home.settled(value)
    if settled is not value:
        write_past_home(variable, settled)


def _settling(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def written(self: nnx.Variable, *args: Any, **kwargs: Any) -> None:
        write(self, *args, **kwargs)
        settle(self)

    return written


def _arriving(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def written(self: nnx.Variable, value: Any, **kwargs: Any) -> None:
        home = home_of(self)
        write(self, value if home is None else home.arriving(value), **kwargs)

    return written


def _with_home(copy: Callable[..., nnx.Variable]) -> Callable[..., nnx.Variable]:
    @functools.wraps(copy)
    def copied(self: nnx.Variable, *args: Any, **kwargs: Any) -> nnx.Variable:
        made = copy(self, *args, **kwargs)
        home = home_of(self)
        if home is not None and type(made) is type(self):
            give_home(made, home)
        return made

    return copied


def _go_through_homes(cls: Any) -> None:
    """Makes the writes of a variable's class go through homes: Flax has no hook that all of them call."""
    cls.set_raw_value = _settling(cls.set_raw_value)
    cls.update_from_state = _settling(cls.update_from_state)
    cls.set_value = _arriving(_settling(cls.set_value))
    cls.copy = _with_home(cls.copy)


_go_through_homes(nnx.Variable)
