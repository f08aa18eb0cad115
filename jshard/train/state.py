"""The state of a run: model and optimizer, born sharded or read from a checkpoint; and what its batches look like."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard._init import abstract_init, shard_init
from jshard._mesh import batch_sharding
from jshard._optimizer import abstract_optimizer, shard_optimizer
from jshard.checkpoint import Checkpointer
from jshard.train.data import Data
from jshard.train.model_file import ModelFile
from jshard.train.settings.recipe import Recipe


def create(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """The model of a recipe and its optimizer, every leaf born sharded.

    Args:
        model_file: builds and annotates the model.
        recipe: its config, its seed and its optimizer.
        mesh: the devices.

    Returns:
        The model and the optimizer.
    """
    model = shard_init(
        lambda: model_file.build(recipe.model, nnx.Rngs(recipe.seed)),
        lambda model: model_file.annotate(model, mesh),
        mesh=mesh,
    )
    return model, shard_optimizer(model, recipe.optimizer())


def restore(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, checkpoints: Checkpointer, step: int | None = None
) -> tuple[nnx.Module, nnx.Optimizer[Any], int]:
    """The state of a checkpoint; it is in memory once.

    Args:
        model_file: builds and annotates the model, as it did for the run that was saved.
        recipe: its config and its optimizer.
        mesh: the devices; they may be others than those of the run that was saved.
        checkpoints: the series of that run.
        step: which checkpoint; the newest by default.

    Returns:
        The model, the optimizer, and the number of steps that are done.

    Raises:
        CheckpointError: there is no checkpoint, or the model and its optimizer do not fit it.
        RunError: it is damaged, or cannot be read.
    """
    model = abstract_init(
        lambda: model_file.build(recipe.model, nnx.Rngs(recipe.seed)),
        lambda model: model_file.annotate(model, mesh),
    )
    optimizer = abstract_optimizer(model, recipe.optimizer())
    state = checkpoints.restore({"model": model, "optimizer": optimizer, "step": 0}, step)
    return state["model"], state["optimizer"], int(state["step"])


def batch_like(data: Data, batch_size: int, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the data without its arrays: shapes, dtypes, and with a mesh shardings."""
    sharding = None if mesh is None else batch_sharding(mesh)

    def stacked(x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)  # as arrays have it on the devices
        return jax.ShapeDtypeStruct((batch_size, *x.shape), dtype, sharding=sharding)

    return {key: stacked(np.asarray(x)) for key, x in data.train[0].items()}
