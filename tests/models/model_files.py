"""What every file in models/ has to hold: it trains sharded as on one device, and its largest recipes plan in seconds.

A test of a model file is given by the file's name: `assert_parity_of("llama", replica=2, fsdp=4)`.
"""

import dataclasses
import functools
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import jshard as js
from jshard.data import Data, Loader, load_text
from jshard.train import ModelFile, Recipe, load_model_file
from tests.parity import assert_parity

MODELS = Path(__file__).parents[2] / "models"
STEPS = 3
LARGE = 1 << 20  # elements; smaller leaves may be whole on every device


@functools.cache
def model_file(name: str) -> ModelFile:
    """models/NAME.py, loaded once: its classes are the same for every test."""
    return load_model_file(MODELS / f"{name}.py")


def module(name: str) -> types.ModuleType:
    """The module of models/NAME.py, for what is not one of the names of a model file."""
    return sys.modules[model_file(name).build.__module__]


def tiny(name: str) -> Recipe:
    """The tiny recipe of models/NAME.py."""
    return model_file(name).recipe("tiny")[1]


def smaller(recipe: Recipe, *, batch_size: int = 8, sequence_length: int | None = None, **config: Any) -> Recipe:
    """A recipe derived from another one: of fewer and shorter samples, with other fields of the model's config."""
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, **config),
        batch_size=batch_size,
        sequence_length=sequence_length or recipe.sequence_length,
    )


def neighbour(name: str) -> types.ModuleType:
    """The module of models/NAME.py that is no model file itself; a model file that imports it is loaded by then."""
    return sys.modules[name]


@functools.cache
def data_of(name: str, recipe: Recipe) -> Data:
    """The data that `jshard train` gives the recipe."""
    data = model_file(name).data
    return data(recipe) if data else load_text(sequence_length=recipe.sequence_length)


@functools.cache
def first_batches(name: str, recipe: Recipe, steps: int = STEPS) -> tuple[dict[str, np.ndarray], ...]:
    """The batches of the first steps of a run of the recipe."""
    size = recipe.batch_size
    loader = Loader(data=data_of(name, recipe), batch_size=size, seed=recipe.seed, rows=range(size))
    return tuple(loader.train(steps))


def assert_parity_of(name: str, recipe: Recipe, **degrees: int) -> None:
    """Trains a recipe for some steps in plain Flax on one device, and annotated on eight, and compares.

    The optimizer is the recipe's own, its warmup cut to one step, as a rate of nothing would show nothing; and so are
    the data: those of the first steps of its run. Losses, the gradients of the first step, the parameters after the
    last and all other state have to agree.
    """
    recipe = dataclasses.replace(recipe, warmup_steps=1)
    file, mesh = model_file(name), js.mesh(**degrees)
    batches = [(batch,) for batch in first_batches(name, recipe)]

    def annotate(model: nnx.Module) -> None:
        plan = js.plan(file.annotate(model, mesh) or model)
        assert plan.bytes_per_device < plan.logical_bytes, "nothing is sharded"

    build = lambda: file.build(recipe.model, nnx.Rngs(recipe.seed))
    assert_parity(build, annotate, file.loss, batches, tx=recipe.optimizer())


def plan_of(name: str, recipe_name: str, **degrees: int) -> js.ShardPlan:
    """The plan of a recipe on devices that are not there: `fsdp=512, replica=4`."""
    file = model_file(name)
    _, recipe = file.recipe(recipe_name)
    mesh = js.mesh(**degrees, devices=math.prod(degrees.values()))
    model = js.abstract_init(lambda: file.build(recipe.model, nnx.Rngs(0)), lambda model: file.annotate(model, mesh))
    return js.plan(model)


def assert_plans(name: str, recipe_name: str, *, num_parameters: int, **degrees: int) -> js.ShardPlan:
    """Plans a recipe for a cluster, from shapes alone: of the size it claims, and nothing large left whole."""
    plan = plan_of(name, recipe_name, **degrees)
    assert plan.num_parameters == num_parameters
    whole = [leaf.path for leaf in plan.replicated if leaf.placement.size >= LARGE]
    assert not whole, whole
    shards = degrees.get("fsdp", 1)
    assert plan.logical_bytes / shards / degrees.get("tensor", 1) <= plan.bytes_per_device
    assert plan.bytes_per_device <= 1.02 * plan.logical_bytes / shards
    return plan
