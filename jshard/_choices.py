"""Which submodules are units, in the words of `fully_shard(units=...)`."""

import fnmatch
from collections.abc import Callable
from typing import Any

UnitChoice = type | str | Callable[[str, Any], bool]
"""A class, a pattern of paths such as `"blocks/*"`, or a function of (path, module)."""


def chosen(choice: UnitChoice, path: str, module: Any) -> bool:
    """Whether a submodule at a path is meant."""
    if isinstance(choice, type):
        return isinstance(module, choice)
    if isinstance(choice, str):
        return path.count("/") == choice.count("/") and fnmatch.fnmatch(path, choice)
    return bool(choice(path, module))
