"""A home for the values of a Flax variable: no tree shows it, and every write to the variable goes through it."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from flax import nnx

from jshard._compat import private_names

_plain_set_raw_value = nnx.Variable.set_raw_value  # before it goes through homes, at the end of this file


class VariableHome(Protocol):
    """Where the values of a variable belong."""

    def arriving(self, value: object) -> object:
        """Returns a value, or a part of one, in a form that can be written into the variable's value."""

    def settled(self, value: object) -> object:
        """Returns the value that the variable holds after it was written; the same one if nothing has to change."""


@functools.cache
def _remembering_class() -> type:
    """Returns the class of a variable's trace that has a home for its values, too.

    Of what a variable has, only its trace is in no tree: a class or metadata of its own would make the tree of a
    placed model differ from that of a plain one, and `jax.tree.map` over both would fail.
    """
    trace_state = private_names.TRACE_STATE.get()
    trace_of_state = private_names.TRACE_OF_STATE

    class Remembering(trace_state):
        __slots__ = ("home",)

        def __init__(self, trace: object, home: VariableHome) -> None:
            setattr(self, trace_of_state.attribute, trace_of_state.get_in(trace))
            self.home = home

        def __reduce__(self) -> tuple:
            return trace_state, ()  # devices are not pickled: the next call gives a new home

    return Remembering


def home_of(variable: nnx.Variable) -> VariableHome | None:
    """Returns the home that `give_home` has set; None if the variable has none."""
    return getattr(private_names.VARIABLE_TRACE.find_in(variable), "home", None)


def give_home(variable: nnx.Variable, home: VariableHome) -> None:
    """Sets the home of a variable: it stays through writes and copies."""
    trace = private_names.VARIABLE_TRACE
    object.__setattr__(variable, trace.attribute, _remembering_class()(trace.get_in(variable), home))


def write_past_home(variable: nnx.Variable, value: object) -> None:
    """Sets the value of a variable as it is, for a value that stays for a moment.

    Flax refuses to write a variable of an outer trace, which this may be: then the caller restores its value.
    """
    if private_names.VARIABLE_VALUE.exists():
        object.__setattr__(variable, private_names.VARIABLE_VALUE.attribute, value)
    else:
        _plain_set_raw_value(variable, value)


def write_unchecked(variable: nnx.Variable, value: object) -> None:
    """Sets the value of a variable that Flax has just written, and so has checked; it is placed as planned."""
    write_past_home(variable, value)
    settle(variable)


def settle(variable: nnx.Variable) -> None:
    """Lets the home of a variable, if it has one, decide what it holds."""
    home = home_of(variable)
    if home is None:
        return
    value = variable.get_raw_value()
    settled = home.settled(value)
    # Past the home: a plain write would settle again.
    if settled is not value:
        write_past_home(variable, settled)


def has_metadata(variable: nnx.Variable, name: str) -> bool:
    """Returns whether a variable has metadata of a name, without a look at its value."""
    if private_names.VARIABLE_METADATA.exists():
        # Past `__getattr__`, from which this is called: while a variable is unpickled, it has no metadata yet.
        return name in object.__getattribute__(variable, private_names.VARIABLE_METADATA.attribute)
    return name in variable.get_metadata()


def _settling(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def settling(self: nnx.Variable, *args: object, **kwargs: object) -> None:
        write(self, *args, **kwargs)
        settle(self)

    return settling


def _arriving(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def arriving(self: nnx.Variable, value: object, **kwargs: object) -> None:
        home = home_of(self)
        if home is not None:
            value = home.arriving(value)
        write(self, value, **kwargs)

    return arriving


def _with_home(copy: Callable[..., nnx.Variable]) -> Callable[..., nnx.Variable]:
    @functools.wraps(copy)
    def with_home(self: nnx.Variable, *args: object, **kwargs: object) -> nnx.Variable:
        copied = copy(self, *args, **kwargs)
        home = home_of(self)
        # Flax makes a copy with a fresh trace state, which has no home.
        if home is not None and type(copied) is type(self):
            give_home(copied, home)
        return copied

    return with_home


def _go_through_homes(cls: Any) -> None:
    """Makes the writes of a variable's class go through homes: Flax has no hook that all of them call."""
    # A variable without a home is written as before, at the price of one look-up.
    cls.set_raw_value = _settling(cls.set_raw_value)
    cls.update_from_state = _settling(cls.update_from_state)
    # First to the home's devices, because Flax computes with the value when it writes a part; then to its sharding.
    cls.set_value = _arriving(_settling(cls.set_value))
    cls.copy = _with_home(cls.copy)


_go_through_homes(nnx.Variable)
