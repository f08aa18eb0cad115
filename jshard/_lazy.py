"""Packages whose names are loaded when they are first asked for.

`import jshard` is then a matter of milliseconds, and who needs little of it does not wait for jax: the processes that
read data, `jshard --help`.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def attach(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        file: its `__file__`. Beside it lies `__init__.pyi` with the imports, which type checkers and editors read, too.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a module of its own
            return importlib.import_module(f"{package}.{name}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(importlib.import_module(package), name, found)
        return found

    return load, lambda: list(homes), list(homes)
