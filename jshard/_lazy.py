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
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        file: its `__file__`. Beside it is `__init__.pyi` with the imports, which type checkers and editors also read.
        moved: names that have moved out of the package, separated by spaces, by their new module. They work for one
            more release, with a warning that shows the new import.
        unlisted: modules of further names, which work but are in neither `__dir__` nor `__all__`.
    """
    listed = _imports(Path(file).with_suffix(".pyi"))
    modules = {**(unlisted or {}), **listed}
    new_modules = _by_name(moved or {})

    def load(name: str) -> object:
        if name in new_modules:
            module = new_modules[name]
            warnings.warn(
                f"{package.replace('jshard', 'js')}.{name} has moved, and the next release removes it here. Use:\n"
                f"  from {module} import {name}",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(importlib.import_module(module), name)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:  # the name is a module of the package
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module), name)
        # Python calls `__getattr__` only for names that the package lacks: the next use is a plain attribute. One that
        # has moved is not kept, so that each use warns.
        setattr(importlib.import_module(package), name, value)
        return value

    def names() -> list[str]:
        return list(listed)

    return load, names, names()


def _imports(stub: Path) -> dict[str, str]:
    """Returns the names that a stub file imports, with their modules."""
    modules: dict[str, str] = {}
    for statement in ast.parse(stub.read_text()).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                modules[alias.name] = statement.module
    return modules


def _by_name(moved: Mapping[str, str]) -> dict[str, str]:
    """Returns the new modules by name, of names by new module."""
    modules: dict[str, str] = {}
    for module, names in moved.items():
        for name in names.split():
            modules[name] = module
    return modules
