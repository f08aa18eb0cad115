"""Configurations as JSON has them, for `--print-config` and the record of a run."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = ("jshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that a run stands on; None for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def tree(value: Any) -> Any:
    """A value as JSON has it.

    A dataclass is a dict that begins with its "class"; what JSON does not have is text: an enum by its name, inf,
    a dtype, a function by its qualified name.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(key): tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [tree(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.generic):
        return tree(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    """A text without memory addresses, so that two runs of the same configuration print the same."""
    if isinstance(value, Path | np.dtype):
        return str(value)
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
