"""What the planner and the trainer share: model files, recipes, and the state and step made from them.

This file needs no jax: it has the model files included in jshard, and resolves a name such as `gpt` to a file.

    recipe         a training run as a value, and the check of its values
    overrides      `--set key=value` and `--unit name=value`
    model_file     the Python file that defines model, loss, data and recipes
    hf_keys        keys of Hugging Face's config.json, and the fields of a recipe that have their values
    hf_families    the table of keys of each `model_type`
    hf_config      a config.json read by its table, and compared with a recipe
    linen_model    a Linen model with the interface of an nnx model
    building       the model of a recipe: abstract, initialised sharded, or from a checkpoint
    step           the compiled step of a run, and its use of the devices
"""

import os
import re
from pathlib import Path


def shipped_folder() -> Path:
    """Returns the folder of the included model files: in the package when it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    # First, so that an installed package never reads what happens to be beside it in site-packages.
    installed = package / "models"
    if installed.is_dir():
        return installed
    return package.parent / "models"


def shipped_models() -> dict[str, Path]:
    """Returns the included model files by name, without files that only help others."""
    models = {}
    for file in sorted(shipped_folder().glob("*.py")):
        # Read as text: running each file would import jax.
        if re.search(r"^RECIPES\b", file.read_text(), re.MULTILINE):
            models[file.stem] = file
    return models


def model_path(name_or_path: Path) -> Path:
    """Returns the file that the name or path of a model refers to.

    A path means itself. A name without folder and suffix means that file, or NAME.py, in the working folder; where
    there is neither, the model of that name included in jshard.
    """
    is_name = str(name_or_path) == name_or_path.name and not name_or_path.suffix
    if not is_name or os.path.isfile(name_or_path):
        return name_or_path
    in_working_folder = name_or_path.with_suffix(".py")
    if os.path.isfile(in_working_folder):
        return in_working_folder
    return shipped_models().get(name_or_path.name, name_or_path)
