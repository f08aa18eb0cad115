"""Which submodules are units, and which parameters are meant, in the words of a user: classes, patterns, functions."""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

from jshard._nnx import Path, dotted

UnitChoice = type | str | Callable[[str, Any], bool]
"""A class, a pattern of paths such as `"blocks/*"`, or a function of (path, module)."""


def chosen(choice: UnitChoice, path: str, module: Any) -> bool:
    """Whether a submodule at a path is meant."""
    if isinstance(choice, type):
        return isinstance(module, choice)
    if isinstance(choice, str):
        return path.count("/") == choice.count("/") and fnmatch.fnmatch(path, choice)
    return bool(choice(path, module))


def as_filter(choice: Any) -> Any:
    """An nnx filter from filters and path patterns of parameters; hashable, as it is part of records."""
    if choice is None:
        return False
    if isinstance(choice, str):
        return _PathPattern(choice)
    if isinstance(choice, (list, tuple, set)):
        return tuple(as_filter(one) for one in choice)
    return choice


@dataclasses.dataclass(frozen=True)
class _PathPattern:
    pattern: str

    def __call__(self, path: Path, value: Any) -> bool:
        return fnmatch.fnmatch(dotted(path), self.pattern)
