"""The trainer behind `jshard train`: recipes, text, the loop and its records."""

from jshard.train.recipe import Batch, ModelFile, ModelFileError, Recipe, load_model_file

__all__ = ["Batch", "ModelFile", "ModelFileError", "Recipe", "load_model_file"]
