"""What the planner and the trainer share: model files, recipes, and the state and step made from them.

This file needs no jax: it has the model files included in jshard, and resolves a name such as `gpt` to a file.
"""

import os
import re
from pathlib import Path


def shipped_folder() -> Path:
    """Their folder: inside the package when it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "models"
    return inside if inside.is_dir() else package.parent / "models"


def shipped_models() -> dict[str, Path]:
    """The files by name, without those that only help others."""
    files = sorted(shipped_folder().glob("*.py"))
    return {file.stem: file for file in files if re.search(r"^RECIPES\b", file.read_text(), re.MULTILINE)}


def model_path(given: Path) -> Path:
    """The file that the name or path of a model refers to.

    A path means itself. A name without folder and suffix means that file, or NAME.py, in the working folder; where
    there is neither, the model of that name included in jshard.
    """
    is_name = str(given) == given.name and not given.suffix
    if not is_name or os.path.isfile(given):
        return given
    ours = given.with_suffix(".py")
    return ours if os.path.isfile(ours) else shipped_models().get(given.name, given)
