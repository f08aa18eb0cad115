"""What the planner and the trainer share: model files, recipes, and the state and step made of them.

Here, as it needs no jax: the model files that come with jshard, and which file a command means by `gpt`.
"""

import os
import re
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
