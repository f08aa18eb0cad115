"""The model of a recipe and the state of a run: without arrays, initialised sharded, or read from a checkpoint.

Only this module distinguishes nnx models from Linen models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard import checkpoint
from jshard.api.init import abstract_init, shard_init
from jshard.api.loss_scale import LossScale
from jshard.api.optimizer import abstract_optimizer, shard_optimizer
from jshard.api.revise import revise
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError, SurplusError
from jshard.checkpoint.formats import foreign_source
from jshard.checkpoint.formats.source import Names
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.restoring import Extra
from jshard.data import Data, DataError
from jshard.data.loader import read_sample
from jshard.linen.annotation import annotation_of, initialise
from jshard.linen.call import PARAMS
from jshard.plans.mesh import AnyMesh, batch_sharding
from jshard.plans.plan import plan
from jshard.plans.units import dotted
from jshard.recipes.hf_config import unchecked_names
from jshard.recipes.linen_model import Initialising, LinenModel
from jshard.recipes.model_file import ModelFile, ModelFileError, check_is_text, next_token_loss
from jshard.recipes.recipe import Recipe


class _IsLinen(Exception):
    """Whether `build` creates a Linen module; found by tracing it, as an nnx model has its parameters at creation."""


def abstract_model(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh) -> nnx.Module:
    """The model of a recipe without arrays: shapes, dtypes and shardings."""
    return _made(model_file, recipe, mesh, abstract_init)


def new_model(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> nnx.Module:
    """The model of a recipe, with every parameter initialised sharded."""
    return _made(model_file, recipe, mesh, functools.partial(shard_init, mesh=mesh))


def batch_of(model_file: ModelFile, recipe: Recipe, rows: int, mesh: Mesh | None = None) -> dict[str, Any]:
    """An abstract batch of a recipe; for text, the shapes are known without reading it."""
    if model_file.data is not None:
        batch = batch_like(model_file.data(recipe), rows, mesh)
        if model_file.loss_fn is next_token_loss:
            check_is_text(batch, where=f"{model_file.path}: data(recipe)")
        return batch
    shape = (rows, recipe.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=None if mesh is None else batch_sharding(mesh, shape))
    return {"inputs": tokens, "targets": tokens}


def batch_like(data: Data, batch_size: int, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """An abstract batch of the data: shapes, dtypes, and with a mesh also shardings."""

    def stacked(x: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (batch_size, *x.shape)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)  # that of arrays on the devices
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else batch_sharding(mesh, shape))

    return {key: stacked(x) for key, x in read_sample(data.train, "train", 0, DataError).items()}


def _made(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh, place: Callable[..., Any]) -> nnx.Module:
    def build() -> nnx.Module:
        model = model_file.build(recipe.model, nnx.Rngs(recipe.seed))
        if isinstance(model, nn.Module):
            raise _IsLinen
        return model

    def annotate(model: nnx.Module) -> None:
        model_file.annotate(model, mesh)
        if model_file.units:
            revise(model, model_file.units)

    try:
        model = place(build, annotate)
    except _IsLinen:
        model = _made_linen(model_file, recipe, mesh, place)
    _check_trained(model_file, model)
    return model


def _made_linen(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh, place: Callable[..., Any]) -> nnx.Module:
    module = _annotated_linen(model_file, recipe, mesh)
    rows = recipe.batch_size // recipe.accumulate
    model = _held(module, model_file.loss, batch_of(model_file, recipe, rows), recipe.seed, place)
    if model_file.units:
        revise(model, model_file.units)
    return model


def _check_trained(model_file: ModelFile, model: nnx.Module) -> None:
    if model_file.wrt is nnx.Param or jax.tree.leaves(nnx.state(model, model_file.wrt)):
        return
    paths = [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    raise ModelFileError(
        "No parameter of the model is trained.",
        where=f"{model_file.path}: wrt = {model_file.wrt!r}",
        why=f"it selects none of {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}.",
        do='wrt = "*/lora_*"  # a pattern of their paths, or an nnx filter',
    )


def _held(
    module: nn.Module, loss_fn: Callable[..., Any], batch: Mapping[str, Any], seed: int, place: Callable[..., Any]
) -> LinenModel:
    """The model, initialised by its loss, which calls it with what it needs from a batch."""

    def create() -> tuple[dict[str, Any], Any]:
        zeros, asked = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch), set()

        def initialised(bound: nn.Module, batch: Any) -> None:
            initialise(bound, lambda: loss_fn(Initialising(bound, asked), batch))

        made = nn.init(initialised, module, mutable=True)(jax.random.key(seed), zeros)
        is_kept = lambda name: name not in asked and (name == PARAMS or not _is_sown(made[name]))
        return {name: made[name] for name in made if is_kept(name)}, nnx.state(nnx.Rngs(seed))

    collections, keys = place(create, module)
    rngs = cast(nnx.Rngs, nnx.eval_shape(lambda: nnx.Rngs(seed)))
    nnx.update(rngs, keys)
    return LinenModel(module, collections, rngs)


def _is_sown(collection: Any) -> bool:
    """Whether a collection holds tuples of values from `sow`; if kept, it would grow with every step."""
    is_tuple = lambda x: isinstance(x, tuple) and not hasattr(x, "_fields")
    return any(map(is_tuple, jax.tree.leaves(collection, is_leaf=is_tuple)))


def _annotated_linen(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh) -> nn.Module:
    found: Any = model_file.annotate(model_file.build(recipe.model, nnx.Rngs(recipe.seed)), mesh)
    if annotation_of(found) is None:
        raise ModelFileError(
            "The model file returns no annotated model.",
            where=f"{model_file.path}: annotate(model, mesh)",
            why=f"it returns {'None' if found is None else f'a {type(found).__name__}'}; for a Linen module"
            " js.fully_shard returns an annotated copy.",
            do="return js.fully_shard(model, mesh=mesh, units=Block)",
        )
    return found


# The state of a run.


def create(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """The model of a recipe and its optimizer, with every leaf initialised sharded."""
    model = new_model(model_file, recipe, mesh)
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)


def optimizer_of(recipe: Recipe, model: nnx.Module) -> optax.GradientTransformation:
    """The optimizer of a recipe for an annotated model, wrapped in a loss scale if it needs one."""
    placements = [leaf.placement for leaf in plan(model).leaves] if recipe.loss_scale == "auto" else []
    in_half = any("float16" in (p.gathered_dtype, p.reduce_dtype) for p in placements)
    is_scaled = recipe.loss_scale == "dynamic" or in_half
    return LossScale().around(recipe.optimizer()) if is_scaled else recipe.optimizer()


def restore(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, checkpoints: checkpoint.Checkpointer, step: int | None = None
) -> tuple[nnx.Module, nnx.Optimizer[Any], int]:
    """The state of a checkpoint (in memory only once): model, optimizer, and the number of completed steps.

    Raises:
        CheckpointError: there is no checkpoint, or the model and its optimizer do not fit it.
        RunError: all checkpoints are damaged, or cannot be read.
    """
    state = checkpoints.restore(abstract_state(model_file, recipe, mesh), step, fall_back=True)
    return state["model"], state["optimizer"], int(state["step"])


def abstract_state(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """The abstract state in a checkpoint of a run."""
    model = abstract_model(model_file, recipe, mesh)
    optimizer = abstract_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)
    return {"model": model, "optimizer": optimizer, "step": 0}


def create_from(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, path: Path, *, extra: Extra = "error"
) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """A new model with the parameters of a checkpoint, and a new optimizer for it.

    If the model file freezes parameters, such as the base of adapters, those that the checkpoint lacks keep their
    initial values, with a warning.

    Args:
        model_file: the model.
        recipe: its sizes and its optimizer.
        mesh: the devices.
        path: the checkpoint.
        extra: what to do with stored parameters that the model has no place for, as in `restore`.

    Raises:
        ShardingError: there is no checkpoint, or its parameters do not fit the model.
        RunError: it is damaged, or cannot be read.
    """
    found, names = _source(model_file, recipe, path)
    model = new_model(model_file, recipe, mesh)
    missing = "error" if model_file.wrt is nnx.Param else "init"
    like = {"model": model}
    options = {"only": "params", "names": names, "missing": missing, "extra": extra}
    with _in_words_of_the_command(path):
        model = checkpoint.restore(found, like=like, **options)["model"]
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)


def check_source(model_file: ModelFile, recipe: Recipe, mesh: Mesh, path: Path, *, extra: Extra = "error") -> None:
    """Raises what `create_from` would raise for a source that does not fit, before any array exists."""
    found, names = _source(model_file, recipe, path)
    model = abstract_model(model_file, recipe, mesh)
    fits = functools.partial(checkpoint.forecast, found, only="params", names=names)
    with _in_words_of_the_command(path):
        if model_file.wrt is nnx.Param:
            fits(like={"model": model}, extra=extra)
        else:  # adapters may be missing, frozen parameters may not
            frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(model_file.wrt)))
            fits(like={"model": frozen}, extra="ignore")  # `create_from` knows what the adapters take


_SIZES = "choose the recipe that has its sizes: --recipe NAME, or --set model.n_layer=N"


@contextlib.contextmanager
def _in_words_of_the_command(path: Path) -> Iterator[None]:
    """Raises an error about what a checkpoint holds with the options of `jshard train` in place of Python's."""
    try:
        yield
    except SurplusError as error:
        raise CheckpointError(
            error.what,
            where=error.where,
            why=error.why,
            do=f"{_SIZES}\nor skip them, and train another model: --init-from {path} --extra ignore",
        ) from error
    except CheckpointError as error:
        if "`like`" not in error.do:  # it is about the path
            raise
        do = f"{_SIZES}\nIts contents: jshard ckpt inspect {path}"
        raise CheckpointError(error.what, where=error.where, why=error.why, do=do) from error


def _source(model_file: ModelFile, recipe: Recipe, path: Path) -> tuple[Place, Names | None]:
    """The checkpoint that a path refers to, and its names of the parameters if another library wrote it."""
    found = checkpoint_at(path)
    if not isinstance(found, Path) or foreign_source(found) is None:
        return found, None
    names = model_file.names_elsewhere(recipe.model)
    if names is None:
        unchecked_names({}, str(model_file.path)).check(found)
    return found, names
