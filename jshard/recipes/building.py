"""The model of a recipe and the state of a run: without arrays, initialised sharded, or read from a checkpoint.

Only this module distinguishes nnx models from Linen models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard import checkpoint
from jshard._types import PyTree
from jshard.api.init import abstract_init, shard_init
from jshard.api.loss_scale import LossScale
from jshard.api.optimizer import abstract_optimizer, shard_optimizer
from jshard.api.revise import revise, revise_layers
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError, SurplusError
from jshard.checkpoint.formats import Names, foreign_source
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.restore_operation import Extra
from jshard.data import Data, DataError
from jshard.data.loader import read_sample
from jshard.errors import RunError
from jshard.linen.annotation import annotation_of
from jshard.linen.dispatch import initialise
from jshard.linen.parameters import PARAMS
from jshard.plans.mesh import AnyMesh, batch_sharding
from jshard.plans.plan import plan
from jshard.plans.stages import DEFAULT_STAGES
from jshard.plans.units import dotted
from jshard.recipes.ema import WEIGHTS, Ema, ema_of
from jshard.recipes.hf_config import unchecked_names
from jshard.recipes.linen_model import Initialising, LinenModel
from jshard.recipes.lora import adapter_names, lora_of
from jshard.recipes.model_file import LossFn, ModelFile, ModelFileError, check_is_text, next_token_loss
from jshard.recipes.peft_folder import adapter_weights
from jshard.recipes.recipe import Recipe

Placer = Callable[..., Any]
"""`shard_init` or `abstract_init`, which differ in what they return."""


class _IsLinen(Exception):
    """Raised by a trace of `build` that creates a Linen module; an nnx model has its parameters at creation."""


def abstract_model(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh) -> nnx.Module:
    """Returns the model of a recipe without arrays: shapes, dtypes and shardings."""
    return _made(model_file, recipe, mesh, abstract_init)


def new_model(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> nnx.Module:
    """Returns the model of a recipe, with every parameter initialised sharded."""
    return _made(model_file, recipe, mesh, functools.partial(shard_init, mesh=mesh))


def batch_of(
    model_file: ModelFile, recipe: Recipe, rows: int, mesh: Mesh | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns an abstract batch of a recipe; for text, the shapes are known without reading it."""
    if model_file.data is not None:
        batch = batch_like(model_file.data(recipe), rows, mesh)
        if model_file.loss_fn is next_token_loss:
            check_is_text(batch, where=f"{model_file.path}: data(recipe)")
        return batch
    tokens = _abstract_rows((rows, recipe.sequence_length), jnp.int32, mesh)
    return {"inputs": tokens, "targets": tokens}


def batch_like(data: Data, batch_size: int, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns an abstract batch of the data: shapes, dtypes, and with a mesh also shardings."""
    batch = {}
    for key, x in read_sample(data.train, "train", 0, DataError).items():
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)  # that of arrays on the devices
        batch[key] = _abstract_rows((batch_size, *x.shape), dtype, mesh)
    return batch


def _abstract_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else batch_sharding(mesh, shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _made(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh, place: Placer) -> nnx.Module:
    """Builds and annotates a model.

    Args:
        model_file: the model.
        recipe: its sizes.
        mesh: the mesh that it is annotated for.
        place: `shard_init` or `abstract_init`: takes functions that build and annotate.
    """

    def build() -> nnx.Module:
        model = model_file.build(recipe.model, nnx.Rngs(recipe.seed))
        if isinstance(model, nn.Module):
            # Ends the trace of `place`: a Linen module has nothing to place before its `init`.
            raise _IsLinen
        return model

    def annotate(model: nnx.Module) -> None:
        model_file.annotate(model, mesh)
        if model_file.units:
            revise_layers(model, model_file.units)
        if recipe.stages != DEFAULT_STAGES:
            revise(model, stages=recipe.stages)

    try:
        model = place(build, annotate)
    except _IsLinen:
        model = _made_linen(model_file, recipe, mesh, place)
    _check_trained(model_file, recipe, model)
    return model


def _made_linen(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh, place: Placer) -> nnx.Module:
    module = _annotated_linen(model_file, recipe, mesh)
    # One microbatch: what a call of the model in a step receives.
    rows = recipe.batch_size // recipe.accumulate
    model = _initialised_linen(module, model_file.loss, batch_of(model_file, recipe, rows), recipe.seed, place)
    if model_file.units:
        revise_layers(model, model_file.units)
    return model


def _check_trained(model_file: ModelFile, recipe: Recipe, model: nnx.Module) -> None:
    trained = model_file.trained(recipe)
    if trained is nnx.Param or jax.tree.leaves(nnx.state(model, trained)):
        return
    paths = [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    raise ModelFileError(
        "No parameter of the model is trained.",
        where=f"{model_file.path}: wrt = {trained!r}",
        why=f"it selects none of {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}.",
        do='wrt = "*/lora_*"  # a pattern of their paths, or an nnx filter',
    )


def _initialised_linen(
    module: nn.Module, loss_fn: LossFn, batch: Mapping[str, jax.ShapeDtypeStruct], seed: int, place: Placer
) -> LinenModel:
    """Returns the model, initialised by its loss, which calls it with what it needs from a batch."""

    def create() -> tuple[dict[str, PyTree], nnx.State]:
        # Only shapes matter: parameters are created from keys and shapes.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        requested: set[str] = set()  # the loss reads these collections: they are results, not state

        def run_loss(bound: nn.Module, batch: object) -> None:
            initialise(bound, lambda: loss_fn(Initialising(bound, requested), batch))

        # By the loss: only it knows which entries of a batch the model receives, and by which methods.
        collections = nn.init(run_loss, module, mutable=True)(jax.random.key(seed), zeros)
        variables = {}
        for name, collection in collections.items():
            # Parameters may be tuples themselves, as of a weight and its scale.
            if name not in requested and (name == PARAMS or not _is_sown(collection)):
                variables[name] = collection
        # With the keys of later calls, so that these are on the mesh, too, like any state of a step.
        return variables, nnx.state(nnx.Rngs(seed))

    collections, keys = place(create, module)
    # The object around those keys: `place` returns only their state.
    rngs = cast(nnx.Rngs, nnx.eval_shape(lambda: nnx.Rngs(seed)))
    nnx.update(rngs, keys)
    return LinenModel(module, collections, rngs)


def _is_sown(collection: PyTree) -> bool:
    """Returns whether a collection holds tuples of values from `sow`; if kept, it would grow with every step."""

    def is_tuple(x: object) -> bool:
        return isinstance(x, tuple) and not hasattr(x, "_fields")  # a named tuple is a value of the user's

    return any(map(is_tuple, jax.tree.leaves(collection, is_leaf=is_tuple)))


def _annotated_linen(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh) -> nn.Module:
    model = model_file.build(recipe.model, nnx.Rngs(recipe.seed))
    annotated: Any = model_file.annotate(model, mesh)
    if annotation_of(annotated) is None:
        returned = "None" if annotated is None else f"a {type(annotated).__name__}"
        raise ModelFileError(
            "The model file returns no annotated model.",
            where=f"{model_file.path}: annotate(model, mesh)",
            why=f"it returns {returned}; for a Linen module js.fully_shard returns an annotated copy.",
            do="return js.fully_shard(model, mesh=mesh, units=Block)",
        )
    if recipe.stages != DEFAULT_STAGES:
        annotated = revise(annotated, stages=recipe.stages)
    return annotated


# The state of a run.


class RunState(NamedTuple):
    """The state of a run after so many steps.

    Attributes:
        model: with its weights.
        optimizer: with its state.
        step: number of completed steps.
        ema: the average of the weights; None if the recipe asks for none, or the checkpoint has none.
    """

    model: nnx.Module
    optimizer: nnx.Optimizer
    step: int
    ema: Ema | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> RunState:
        """Returns the state that was stored with these names."""
        return cls(stored["model"], stored["optimizer"], int(stored["step"]), stored.get("ema"))

    def named(self) -> dict[str, object]:
        """Returns the parts of the state by the names under which they are stored."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def create(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> tuple[nnx.Module, nnx.Optimizer]:
    """Returns the model of a recipe and its optimizer, with every leaf initialised sharded."""
    model = new_model(model_file, recipe, mesh)
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.trained(recipe))


def optimizer_of(recipe: Recipe, model: nnx.Module) -> optax.GradientTransformation:
    """Returns the optimizer of a recipe for an annotated model, wrapped in a loss scale if it needs one."""
    is_scaled = recipe.loss_scale == "dynamic"
    if recipe.loss_scale == "auto":
        is_scaled = _computes_in_float16(model)
    optimizer = recipe.optimizer()
    return LossScale().around(optimizer) if is_scaled else optimizer


def _computes_in_float16(model: nnx.Module) -> bool:
    """Returns whether gradients of a model may underflow: bfloat16 has the exponents of float32."""
    placements = [leaf.placement for leaf in plan(model).leaves]
    return any("float16" in (placement.gathered_dtype, placement.reduce_dtype) for placement in placements)


def restore(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, checkpoints: checkpoint.Checkpointer, step: int | None = None
) -> RunState:
    """Returns the state of a checkpoint, in memory only once. It has an average if the recipe and the checkpoint do.

    Raises:
        CheckpointError: there is no checkpoint, or the model and its optimizer do not fit it.
        RunError: all checkpoints are damaged, or cannot be read.
    """
    like = abstract_state(model_file, recipe, mesh)
    if "ema" in like and not _stores_average(checkpoints, step):
        del like["ema"]
    return RunState.of(checkpoints.restore(like, step, fall_back=True))


AVERAGES = f"ema/{WEIGHTS}"
"""The path of the averages in a checkpoint of a run; below it they have the names of their weights."""


def check_has_average(place: Place) -> None:
    """Raises a `CheckpointError` for a checkpoint without averages of the weights."""
    if not has_average(place):
        raise CheckpointError(
            "The run has no average of the weights.",
            where=f"{place}: {AVERAGES}",
            why="its newest checkpoint was saved with ema_decay=none.",
            do="--weights model  # or train with an average: --set ema_decay=0.999",
        )


def _stores_average(checkpoints: checkpoint.Checkpointer, step: int | None) -> bool:
    """Returns whether the newest checkpoint that can be read has averages of the weights."""
    for stored in reversed(checkpoints.steps()):
        if step is not None and stored > step:
            continue
        with contextlib.suppress(RunError):  # damaged: the restore says so, and goes back to an older one
            return has_average(checkpoints.path(stored))
    return True


def has_average(place: Place) -> bool:
    """Returns whether a checkpoint has averages of the weights."""
    return any(path.startswith(f"{AVERAGES}/") for path in own_checkpoint(place, verify=False).leaves)


def abstract_state(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> dict[str, object]:
    """Returns the abstract state in a checkpoint of a run, by the names of its parts."""
    model = abstract_model(model_file, recipe, mesh)
    # In the placement of this mesh, which may be another than that of the run that saved.
    optimizer = abstract_optimizer(model, optimizer_of(recipe, model), wrt=model_file.trained(recipe))
    return RunState(model, optimizer, 0, ema_of(recipe, model, model_file.trained(recipe))).named()


def create_from(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    path: Path,
    *,
    extra: Extra = "error",
    adapters: Path | None = None,
) -> tuple[nnx.Module, nnx.Optimizer]:
    """Returns a new model with the parameters of a checkpoint, and a new optimizer for it.

    If the model file freezes parameters, such as the base of adapters, those that the checkpoint lacks keep their
    initial values, with a warning.

    Args:
        model_file: the model.
        recipe: its sizes and its optimizer.
        mesh: the devices.
        path: the checkpoint.
        extra: what to do with stored parameters that the model has no place for, as in `restore`.
        adapters: a folder of PEFT with the values of the adapters.

    Raises:
        ShardingError: there is no checkpoint, or its parameters do not fit the model.
        RunError: it is damaged, or cannot be read.
    """
    source, names = _source(model_file, recipe, path)
    model = new_model(model_file, recipe, mesh)
    # Adapters are new, and the checkpoint of their base lacks them.
    missing = "error" if model_file.trained(recipe) is nnx.Param else "init"
    like: PyTree = model
    is_base = names is not None and lora_of(recipe.model).rank > 0
    if is_base:  # another library's weights never have them: no warning that they are missing
        like = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    with _in_words_of_the_command(path, source):
        restored = checkpoint.restore(
            source, like={"model": like}, only="params", names=names, missing=missing, extra=extra
        )
    if is_base:
        nnx.update(model, restored["model"])
    else:
        model = restored["model"]
    if adapters is not None:
        _restore_adapters(model_file, recipe, model, adapters)
    return model, shard_optimizer(model, optimizer_of(recipe, model), wrt=model_file.trained(recipe))


def _restore_adapters(model_file: ModelFile, recipe: Recipe, model: nnx.Module, folder: Path) -> None:
    """Gives a model the adapters in a folder of PEFT."""
    like = nnx.state(model, nnx.LoRAParam)
    names = _adapter_names(model_file, recipe, model)
    restored = checkpoint.restore(adapter_weights(folder), like={"model": like}, names=names)
    nnx.update(model, restored["model"])


def _adapter_names(model_file: ModelFile, recipe: Recipe, model: nnx.Module) -> Names:
    """Returns PEFT's name of each adapter of a model."""
    names = model_file.names_elsewhere(recipe.model)
    if names is None:
        raise ModelFileError(
            "The model file does not say what its layers are called in PEFT.",
            where=str(model_file.path),
            why="it has no function hf_names(config).",
            do="def hf_names(config): ...  # jshard init llama my_llama.py copies a file that has one",
        )
    adapters = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    return adapter_names(names, {"/".join(map(str, path)) for path, _ in adapters})


def check_source(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    path: Path,
    *,
    extra: Extra = "error",
    adapters: Path | None = None,
) -> None:
    """Raises what `create_from` would raise for a source that does not fit, before any array exists."""
    source, names = _source(model_file, recipe, path)
    model = abstract_model(model_file, recipe, mesh)
    like: PyTree = model
    if adapters is not None:
        lora = nnx.state(model, nnx.LoRAParam)
        checkpoint.forecast(
            adapter_weights(adapters), like={"model": lora}, names=_adapter_names(model_file, recipe, model)
        )
    if model_file.trained(recipe) is not nnx.Param:  # adapters may be missing, frozen parameters may not
        like = nnx.state(like, nnx.All(nnx.Param, nnx.Not(model_file.trained(recipe))))
        extra = "ignore"  # `create_from` knows what the adapters take
    with _in_words_of_the_command(path, source):
        checkpoint.forecast(source, like={"model": like}, only="params", names=names, extra=extra)


_SIZES = "choose the recipe that has its sizes: --recipe NAME, or --set model.n_layer=N"


@contextlib.contextmanager
def _in_words_of_the_command(path: Path, source: Place) -> Iterator[None]:
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
        lacks_names = any("stored nothing" in place for place in error.where)
        if lacks_names and isinstance(source, Path) and foreign_source(source) is not None:
            do += "\nIf only names differ: hf_names(config) in the model file maps its parameters to those stored."
        raise CheckpointError(error.what, where=error.where, why=error.why, do=do) from error


def _source(model_file: ModelFile, recipe: Recipe, path: Path) -> tuple[Place, Names | None]:
    """Returns the checkpoint that a path refers to, and its names of the parameters if another library wrote it."""
    place = checkpoint_at(path)
    if not isinstance(place, Path) or foreign_source(place) is None:
        return place, None
    # Before the new model is made: names that the model file cannot give are an error at once.
    names = model_file.names_elsewhere(recipe.model)
    if names is None:
        # Warns of a config.json beside the weights. The names are then those of the model itself.
        unchecked_names({}, str(model_file.path)).check(place)
    return place, names
