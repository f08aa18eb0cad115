"""Packages whose names are loaded on first use.

`import jshard` then takes milliseconds, and programs that need little of it, such as data workers and `jshard --help`,
do not wait for jax.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        file: its `__file__`. Beside it is `__init__.pyi` with the imports, which type checkers and editors also read.
    """
    homes = _homes_of_names(Path(file).with_suffix(".pyi"))
    names = list(homes)

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:  # `from jshard import data as data`: a module, which the import sets on its package
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        # Python asks `__getattr__` only for what a module lacks: the next use costs nothing.
        setattr(importlib.import_module(package), name, value)
        return value

    def list_names() -> list[str]:
        return list(names)

    return load, list_names, names


def _homes_of_names(stub: Path) -> dict[str, str]:
    """Returns the module from which a stub file imports each name."""
    homes: dict[str, str] = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.name] = node.module or ""
    return homes
