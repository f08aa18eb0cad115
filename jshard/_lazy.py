"""Packages whose names are loaded on first use.

`import jshard` is then a matter of milliseconds, and who needs little of it does not wait for jax: the processes that
read data, `jshard --help`.
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
        file: its `__file__`. Beside it is `__init__.pyi` with the imports, which type checkers and editors read, too.
        moved: names that have left the package, separated by spaces, by the module that has them now. They work for
            one more release, with a warning that has the new line.
        unlisted: modules of further names, which work and are in neither `__dir__` nor `__all__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    new_homes = {name: module for module, names in (moved or {}).items() for name in names.split()}

    def load(name: str) -> object:
        if name in new_homes:
            warnings.warn(
                f"{package.replace('jshard', 'js')}.{name} has moved, and goes with the next release. The new line:\n"
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
