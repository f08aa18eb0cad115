"""The trainer behind `jshard train`: recipes, text, the loop and its records."""

from jshard.train.model_file import Batch, ModelFile, ModelFileError, load_model_file
from jshard.train.recipe import Recipe

__all__ = ["Batch", "ModelFile", "ModelFileError", "Recipe", "load_model_file"]
