"""Packages whose names are loaded on first use.

`import jshard` then takes milliseconds, and programs that need little of it, such as data workers and `jshard --help`,
do not wait for jax.
"""

import ast
import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path


def attach(
    package: str, file: str, *, moved: Mapping[str, str] | None = None, unlisted: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        file: its `__file__`. Beside it is `__init__.pyi` with the imports, which type checkers and editors also read.
        moved: names that have moved out of the package, separated by spaces, by their new module. They work for one
            more release, with a warning that shows the new import.
        unlisted: modules of further names, which work but are in neither `__dir__` nor `__all__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    new_homes = {name: module for module, names in (moved or {}).items() for name in names.split()}

    def load(name: str) -> object:
        if name in new_homes:
            warnings.warn(
                f"{package.replace('jshard', 'js')}.{name} has moved, and the next release removes it here. Use:\n"
                f"  from {new_homes[name]} import {name}",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(new_homes[name]), name)
        home = homes.get(name) or (unlisted or {}).get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:  # a module of its own
            return importlib.import_module(f"{package}.{name}")
        found = getattr(importlib.import_module(home), name)
        setattr(importlib.import_module(package), name, found)
        return found

    return load, lambda: list(homes), list(homes)
