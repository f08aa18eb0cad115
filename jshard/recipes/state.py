"""The state of a run: model and optimizer, born sharded or read from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from jshard.api.init import abstract_optimizer, shard_optimizer
from jshard.checkpoint import Checkpointer, forecast
from jshard.checkpoint import restore as restore_state
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.formats import foreign_source
from jshard.checkpoint.formats.source import Names
from jshard.checkpoint.series_folder import checkpoint_at
from jshard.plans.plan import plan
from jshard.recipes.building import abstract_model, new_model
from jshard.recipes.loss_scale import LossScale
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe


def create(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """The model of a recipe and its optimizer, every leaf born sharded.

    Returns:
        The model and the optimizer.
    """
    model = new_model(model_file, recipe, mesh)
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)


def optimizer_of(recipe: Recipe, model: nnx.Module) -> optax.GradientTransformation:
    """The optimizer of a recipe for an annotated model: with a loss scale around it where it needs one."""
    placements = [leaf.placement for leaf in plan(model).leaves] if recipe.loss_scale == "auto" else []
    in_half = any("float16" in (p.gathered_dtype, p.reduce_dtype) for p in placements)
    is_scaled = recipe.loss_scale == "dynamic" or in_half
    return LossScale().around(recipe.optimizer()) if is_scaled else recipe.optimizer()


def restore(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, checkpoints: Checkpointer, step: int | None = None
) -> tuple[nnx.Module, nnx.Optimizer[Any], int]:
    """The state of a checkpoint; it is in memory once.

    Returns:
        The model, the optimizer, and the number of steps that are done.

    Raises:
        CheckpointError: there is no checkpoint, or the model and its optimizer do not fit it.
        RunError: all are damaged, or cannot be read.
    """
    state = checkpoints.restore(abstract_state(model_file, recipe, mesh), step, fall_back=True)
    return state["model"], state["optimizer"], int(state["step"])


def abstract_state(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """What a checkpoint of a run holds, without values."""
    model = abstract_model(model_file, recipe, mesh)
    optimizer = abstract_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)
    return {"model": model, "optimizer": optimizer, "step": 0}


def create_from(model_file: ModelFile, recipe: Recipe, mesh: Mesh, path: Path) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """A new model with the parameters of a checkpoint, and a new optimizer for it.

    Where the model file freezes parameters, such as the base of adapters, those that the checkpoint lacks stay as they
    are made, with a warning.

    Returns:
        The model and the optimizer.

    Raises:
        ShardingError: there is no checkpoint, or its parameters do not fit the model.
        RunError: it is damaged, or cannot be read.
    """
    found, names = _source(model_file, recipe, path)
    model = new_model(model_file, recipe, mesh)
    missing = "error" if model_file.wrt is nnx.Param else "init"
    model = restore_state(found, like={"model": model}, only="params", names=names, missing=missing)["model"]
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)


def check_source(model_file: ModelFile, recipe: Recipe, mesh: Mesh, path: Path) -> None:
    """Raises what `create_from` would raise of a source that does not fit, before there is an array.

    Raises:
        ShardingError: there is no checkpoint, or its parameters do not fit the model.
        RunError: what describes it is damaged.
    """
    found, names = _source(model_file, recipe, path)
    model = abstract_model(model_file, recipe, mesh)
    if model_file.wrt is nnx.Param:
        forecast(found, like={"model": model}, only="params", names=names)
    else:  # adapters may be missing, and what is frozen may not
        frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(model_file.wrt)))
        forecast(found, like={"model": frozen}, only="params", names=names, extra="ignore")


def _source(model_file: ModelFile, recipe: Recipe, path: Path) -> tuple[Place, Names | None]:
    """The checkpoint that a path means, and what it calls the parameters if others wrote it."""
    found = checkpoint_at(path)
    is_foreign = isinstance(found, Path) and foreign_source(found) is not None
    return found, model_file.names_elsewhere(recipe.model) if is_foreign else None
