"""The model files that come with jshard, and which file a command means by `gpt`. It reads no jax."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path


def shipped_folder() -> Path:
    """Where they are: inside the package when it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "models"
    return inside if inside.is_dir() else package.parent / "models"


def shipped_models() -> dict[str, Path]:
    """The files by their names, without those that only help others."""
    files = sorted(shipped_folder().glob("*.py"))
    return {file.stem: file for file in files if re.search(r"^RECIPES\b", file.read_text(), re.MULTILINE)}


def model_path(given: Path) -> Path:
    """The file that is meant where a model is asked for.

    A path means itself. A name without folder and suffix means that file, or NAME.py, in the working folder; where
    there is neither, the model of that name that comes with jshard.
    """
    is_name = str(given) == given.name and not given.suffix
    if not is_name or os.path.isfile(given):
        return given
    ours = given.with_suffix(".py")
    return ours if os.path.isfile(ours) else shipped_models().get(given.name, given)


def neighbours(file: Path) -> list[Path]:
    """The files beside a model file that it imports, and those that they import."""
    found = [file]
    for each in found:  # grows
        beside = (each.with_name(f"{name.partition('.')[0]}.py") for name in _imported(each))
        found += [path for path in dict.fromkeys(beside) if path.is_file() and path not in found]
    return found[1:]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
