"""A recipe as the options request it, and its plan: what `plan`, `tune` and `train` share. No devices are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from flax import nnx

import jshard as js
from jshard._types import PyTree
from jshard.cli._arguments import RecipeArgs
from jshard.cli._config import as_setting, check_keys, leaves, read_config
from jshard.cli._data import own_data
from jshard.cli._devices import parse_mesh
from jshard.data import Data
from jshard.errors import FourPartError, ShardingError
from jshard.inspect.explain import Explanation
from jshard.inspect.memory import gathered_once
from jshard.plans.mesh import AnyMesh
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.ema import with_averages
from jshard.recipes.hf_config import settings_of
from jshard.recipes.model_file import ModelFile, load_model_file, refuses_batches
from jshard.recipes.overrides import override, parse_units
from jshard.recipes.recipe import Recipe, check_batch, check_recipe, gathers_once, tree

RecipeArgsType = TypeVar("RecipeArgsType", bound=RecipeArgs)

KEY_OF_OPTION = {"steps": "num_steps", "seed": "seed"}
"""The keys of a recipe that have an option of their own, by these options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """A recipe of a model file, with the values of the options, for a mesh.

    Attributes:
        model_file: with the requested settings of its units.
        name: of the recipe.
        recipe: with the requested values.
        settings: all that differ from the recipe of the model file, from whatever option or file.
        sizes: the requested degrees of the mesh axes.
    """

    model_file: ModelFile
    name: str
    recipe: Recipe
    settings: tuple[str, ...]
    sizes: Mapping[str, int]


def recipe_request_of(args: RecipeArgs) -> RecipeRequest:
    """Reads the model file, and applies the options to its recipe."""
    check_given_once(args)  # before the config: its values give way to an option, those of --set do not
    model_file = load_model_file(args.model)
    args = without_config(args, model_file)
    name, recipe = model_file.recipe(args.recipe)
    settings = all_settings(args)
    recipe = override(recipe, settings)
    check_recipe(recipe, options=option_names(args))
    return RecipeRequest(
        model_file=model_file.with_units(parse_units(args.unit)),
        name=name,
        recipe=recipe,
        settings=settings,
        sizes=parse_mesh(args.mesh),
    )


# Options and settings. A setting is the text of one `--set`: "key=value".


def used_keys(args: RecipeArgs) -> dict[str, str]:
    """Returns the keys of the recipe that the used options set, by these options."""
    return {option: key for option, key in KEY_OF_OPTION.items() if getattr(args, option) is not None}


def option_names(args: RecipeArgs) -> dict[str, str]:
    """Returns the options that set keys of the recipe, by these keys, for errors."""
    return {key: f"--{option}" for option, key in used_keys(args).items()}


def all_settings(args: RecipeArgs) -> tuple[str, ...]:
    """Returns the values of `--set`, and those of the options for keys of the recipe, all as settings."""
    of_options = [f"{key}={getattr(args, option)}" for option, key in used_keys(args).items()]
    return (*args.set, *of_options)


def setting_key(setting: str) -> str:
    """Returns the key of "key=value"."""
    return setting.partition("=")[0].strip()


def setting_keys(settings: Sequence[str]) -> set[str]:
    """Returns the keys of settings."""
    return {setting_key(setting) for setting in settings}


def merged_settings(before: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Returns settings, with later ones replacing earlier ones."""
    # `override` refuses a key that is set twice.
    return (*without_keys(before, setting_keys(later)), *later)


def without_keys(settings: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
    """Returns settings, except those of some keys."""
    return tuple(setting for setting in settings if setting_key(setting) not in keys)


def check_given_once(args: RecipeArgs) -> None:
    """Checks that no key of the recipe is set by its own option and by `--set`."""
    settings = {setting_key(setting): setting for setting in args.set}
    for option, key in used_keys(args).items():
        if key in settings:
            value = getattr(args, option)
            raise ShardingError(
                "A setting is given twice.",
                where=f"--{option} {value} --set {shlex.quote(settings[key])}",
                why=f"--{option} sets the recipe's {key}, too.",
                do=f"--{option} {value}",
            )


def without_config(args: RecipeArgsType, model_file: ModelFile) -> RecipeArgsType:
    """Returns the arguments, with the values of a `--config` that differ from the recipe's as settings."""
    if args.config is None:
        return args
    config = read_config(args.config)
    name, recipe = model_file.recipe(args.recipe)
    settings: list[str] = []
    if config.get("recipe_name", name) == name:  # a different recipe on the command line has its own values
        values = leaves(config.get("recipe", {}))
        defaults = leaves(tree(recipe))
        check_keys(values, defaults, f"--config {args.config}, recipe")
        overridden = used_keys(args).values()  # an option is stronger than a file
        for key, value in values.items():
            if key not in overridden and value != defaults[key]:
                settings.append(as_setting(key, value))
    return dataclasses.replace(args, config=None, set=merged_settings(settings, args.set))


def stored_settings(model_file: ModelFile, recipe: Recipe, path: Path) -> list[str]:
    """Returns the settings that the config.json of Hugging Face's weights makes; none without such a file."""
    if not model_file.hf_types:
        return []
    keys = leaves(tree(recipe))
    settings = []
    for name, value in settings_of(path, model_file.hf_types).items():
        key = f"model.{name}"
        if key in keys:  # a config of the user's own may have only some of the fields
            settings.append(as_setting(key, value))
    return settings


# The plan.


@contextlib.contextmanager
def abstract(request: RecipeRequest, mesh: AnyMesh, data: Data | None) -> Iterator[tuple[nnx.Module, PyTree]]:
    """Yields the annotated model and a microbatch as shapes; a ValueError of the model becomes a ModelFileError."""
    model_file = request.model_file
    recipe = request.recipe
    check_batch(recipe, mesh)
    if data is not None:
        # The shapes of a batch are those of its data; reading these again may take minutes.
        model_file = dataclasses.replace(model_file, data=lambda recipe: data)
    batch = batch_of(model_file, recipe, recipe.batch_size // recipe.accumulate)
    try:
        yield abstract_model(model_file, recipe, mesh), batch
    except FourPartError:
        raise
    except Exception as error:
        # A model raises a ValueError for a request beyond its limits. For sizes that it does not check, such as a
        # vocabulary of 0, the error is that of an operation in it.
        sets_model = any(key.startswith("model.") for key in setting_keys(request.settings))
        if not isinstance(error, ValueError) and not sets_model:
            raise
        raise refuses_batches(model_file.path, error) from error


def explained(request: RecipeRequest, mesh: AnyMesh, data: Data | None = None) -> Explanation:
    """Returns the plan of a recipe and its memory, on a mesh that need not have devices.

    Args:
        request: the recipe.
        mesh: for which it is planned.
        data: the data, if they are already read.
    """
    model_file = request.model_file
    with abstract(request, mesh, data or own_data(model_file, request.recipe)) as (model, batch):
        optimizer = request.recipe.optimizer()
        trained = model_file.trained(request.recipe)
        explanation = js.explain(model, optimizer=optimizer, loss_fn=model_file.loss, batch=batch, wrt=trained)
    memory = with_averages(explanation.memory, explanation.plan, request.recipe)
    if gathers_once(request.recipe):
        memory = gathered_once(memory, explanation.plan)
    return dataclasses.replace(explanation, memory=memory)
