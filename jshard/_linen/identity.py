"""What makes two Linen modules, or two constants, the same part of a program."""

import dataclasses
import functools
import os
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class _Itself:
    """Something that is equal to itself alone; it is held, so that no other object takes its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def identity(module: nn.Module, seen: dict[int, int] | None = None) -> Hashable:
    """Equal for modules that differ in nothing but their names and where they are, as `nn.jit` has it."""
    seen = {} if seen is None else seen
    if id(module) in seen:
        return type(module), seen[id(module)]
    seen[id(module)] = len(seen)
    fields = (f.name for f in dataclasses.fields(module) if f.init and f.name not in ("parent", "name"))
    return type(module), tuple((name, constant(getattr(module, name), seen)) for name in fields)


def constant(value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """Equal for values that a program cannot tell apart; an array is an operand of the program, not a part."""
    if isinstance(value, nn.Module):
        return identity(value, {} if seen is None else seen)
    if isinstance(value, jax.Array):
        return jax.Array
    if isinstance(value, np.ndarray):
        return np.ndarray, value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, Mapping):
        return type(value), tuple((constant(k), constant(v, seen)) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return type(value), tuple(constant(x, seen) for x in value)
    if isinstance(value, (float, complex, np.generic)):
        return type(value), repr(value)  # 0.0 equals -0.0
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


_FLAX = os.path.dirname(flax.__file__)
_NAMES = frozenset({"name", "path", "scope", "parent"})


def reads_names(function: Callable[..., Any]) -> bool:
    """Whether a method of a user's may read the name or the path of its module, to do something else in another one."""
    code = getattr(function, "__code__", None)
    return code is None or (not _is_flax(code) and any(_NAMES & set(one.co_names) for one in _codes(code)))


def _is_flax(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_FLAX)


@functools.cache
def _codes(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """The code of a function, and of those inside it."""
    inside = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return (code, *(one for x in inside for one in _codes(x)))
