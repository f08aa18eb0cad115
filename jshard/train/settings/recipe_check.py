"""Values of a recipe that cannot work, told before anything is built."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jshard._errors import ShardingError
from jshard._mesh import AnyMesh, data_axes, data_degree, degree
from jshard.train.settings.recipe import Recipe

# The least that each may be; the rest of a recipe is free.
_LEAST = {
    "num_steps": 1,
    "batch_size": 1,
    "accumulate": 1,
    "sequence_length": 1,
    "warmup_steps": 0,
    "eval_every": 1,
    "eval_sequences": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "seed": 0,
}
LOSS_SCALES = ("auto", "dynamic", "none")
_SEEDS = 2**32  # the seeds that grain takes


class RecipeError(ShardingError):
    """A recipe with values that cannot work."""


def check_recipe(recipe: Recipe, *, options: Mapping[str, str] = MappingProxyType({})) -> None:
    """Checks the numbers of a recipe, all of them.

    Args:
        recipe: to be trained.
        options: of the command line, by the settings that they were given for; the others are set by `--set`.

    Raises:
        RecipeError: counts below 1 or not whole, a batch that its microbatches do not divide, a seed that is not one,
            a learning rate that is no finite number.
    """
    problems = [*_counts(recipe)] or [*_together(recipe)]  # the second speaks of numbers that the first has checked
    if not problems:
        return
    keys, whys, values = zip(*problems, strict=True)
    raise RecipeError(
        "The recipe cannot work.",
        where=[f"{key}={getattr(recipe, key)!r}" for key in keys],
        why="\n".join(whys),
        do=" ".join(
            f"{options[key]} {value}" if key in options else f"--set {key}={value}"
            for key, value in zip(keys, values, strict=True)
        )
        + "\nor the same in the model file.",
    )


def check_batch(recipe: Recipe, mesh: AnyMesh) -> None:
    """Checks that a recipe's batches can be split over the data axes of a mesh, each microbatch evenly.

    Raises:
        RecipeError: they cannot.
    """
    rows, shards = recipe.batch_size // recipe.accumulate, data_degree(mesh)
    if rows % shards == 0:
        return
    parts = f"{recipe.batch_size} / {recipe.accumulate} = {rows}" if recipe.accumulate > 1 else f"{rows}"
    degrees = ", ".join(f"{axis}={degree(mesh, axis)}" for axis in data_axes(mesh))
    raise RecipeError(
        f"The {'microbatch' if recipe.accumulate > 1 else 'batch'} does not split over the data axes of the mesh.",
        where=[f"batch_size={recipe.batch_size}, accumulate={recipe.accumulate}", f"mesh {degrees}"],
        why=f"{parts} sequences over {shards} data shards.",
        do=f"--set batch_size={math.ceil(rows / shards) * shards * recipe.accumulate}"
        + (f"  # or a smaller mesh: --mesh fsdp={math.gcd(rows, shards)}" if math.gcd(rows, shards) > 1 else ""),
    )


def _counts(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    for key, least in _LEAST.items():
        value = getattr(recipe, key)
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            is_whole = isinstance(value, float) and value.is_integer()
            yield key, f"{key} is a {type(value).__name__}, not an int.", int(value) if is_whole else max(least, 1)
        elif value < least:
            yield key, f"{key} is at least {least}.", least
    if recipe.loss_scale not in LOSS_SCALES:
        yield "loss_scale", f"loss_scale is one of {', '.join(LOSS_SCALES)}.", "auto"
    if not _is_finite(recipe.learning_rate):
        yield "learning_rate", "learning_rate is a finite number, 0 or more.", 1e-3


def _together(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    if recipe.batch_size % recipe.accumulate:
        rest = recipe.batch_size % recipe.accumulate
        why = f"batch_size={recipe.batch_size} does not split into {recipe.accumulate} microbatches: {rest} over."
        fewer = range(min(recipe.accumulate, recipe.batch_size), 0, -1)
        yield "accumulate", why, next(n for n in fewer if recipe.batch_size % n == 0)
    if recipe.seed >= _SEEDS:
        yield "seed", f"seed is below 2**32 = {_SEEDS}.", recipe.seed % _SEEDS


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
