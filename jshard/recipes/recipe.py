"""A recipe: a whole training run as a value, its JSON form, and the check for invalid values."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from jshard import _compat
from jshard.errors import ShardingError
from jshard.plans.mesh import CONTEXT, AnyMesh, data_axes, data_degree, degree

_PACKAGES = ("jshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that a run depends on; None for one that is not installed."""
    return {"python": platform.python_version()} | _compat.versions(_PACKAGES)


def tree(value: Any) -> Any:
    """A value in JSON types.

    A dataclass becomes a dict that begins with its "class"; types that JSON lacks become text: an enum by its name,
    inf, a dtype, a function by its qualified name.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(key): tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [tree(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.generic):
        return tree(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    """A text without memory addresses, so that two runs of the same configuration print the same."""
    if isinstance(value, Path | np.dtype):
        return str(value)
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


# A recipe: a whole training run as a value.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run as a value.

    Attributes:
        model: the frozen config that is passed to the model file's `build`.
        sequence_length: tokens per sequence.
        batch_size: sequences per step, over all devices and microbatches.
        num_steps: optimizer steps.
        learning_rate: peak of the schedule: linear warmup, then a cosine down to a tenth.
        warmup_steps: steps of warmup.
        weight_decay: AdamW's decay, on matrices only (not on biases and norms).
        b1: AdamW's decay of the first moment.
        b2: AdamW's decay of the second moment.
        clip_norm: largest global norm of the gradient.
        loss_scale: "dynamic", "none", or "auto": dynamic where units compute or reduce in float16.
        accumulate: microbatches per step.
        eval_every: steps between two evaluations; one always follows the last step.
        eval_sequences: held-out sequences per evaluation, spread evenly over the held-out text.
        checkpoint_every: steps between two checkpoints; one always follows the last step.
        keep_checkpoints: number of checkpoints to keep; older ones are deleted.
        seed: seed of the parameters, of dropout and of the sample order.

    A subclass may add settings and override `schedule` and `optimizer`.
    """

    model: Any
    sequence_length: int
    batch_size: int
    num_steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0
    loss_scale: str = "auto"
    accumulate: int = 1
    eval_every: int = 1000
    eval_sequences: int = 1024
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    seed: int = 0

    def schedule(self) -> optax.Schedule:
        """The learning rate as a function of the step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.num_steps),
            decay_steps=max(self.num_steps, self.warmup_steps + 1),
            end_value=self.learning_rate / 10,
        )

    @property
    def recorded_rate(self) -> optax.Schedule | None:
        """`schedule`, for the record; None if an overridden `optimizer` may not use it."""
        own = type(self).optimizer is not Recipe.optimizer and type(self).schedule is Recipe.schedule
        return None if own else self.schedule()

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW, after clipping by the global gradient norm."""
        adamw = optax.adamw(
            self.schedule(),
            b1=self.b1,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)


# Invalid values of a recipe, refused before anything is built.

# The minimum of each; the other values are free.
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
_MOST = 2**63 - 1
LOSS_SCALES = ("auto", "dynamic", "none")
_SEEDS = 2**32  # the seeds that grain takes


class RecipeError(ShardingError):
    """A recipe with invalid values."""


def check_recipe(recipe: Recipe, *, options: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises one `RecipeError` for all invalid numbers; `options` are the options of some keys."""
    problems = [*_counts(recipe)] or [*_together(recipe)]  # the second uses numbers checked by the first
    if not problems:
        _check_optimizer(recipe)
        return
    keys, whys, values = zip(*problems, strict=True)
    raise RecipeError(
        "The recipe has invalid values.",
        where=[f"{key}={getattr(recipe, key)!r}" for key in keys],
        why="\n".join(whys),
        do=" ".join(
            f"{options[key]} {value}" if key in options else f"--set {key}={value}"
            for key, value in zip(keys, values, strict=True)
        )
        + "\nor the same in the model file.",
    )


def _check_optimizer(recipe: Recipe) -> None:
    optimizer = recipe.optimizer()
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    raise RecipeError(
        "The optimizer of the recipe is not one of Optax.",
        where=f"{type(recipe).__name__}.optimizer",
        why=f"it returns {'None' if optimizer is None else f'a {type(optimizer).__name__}'}.",
        do="return optax.adamw(self.schedule())",
    )


def check_batch(recipe: Recipe, mesh: AnyMesh) -> None:
    """Raises a `RecipeError` unless a recipe's batches split over a mesh, each microbatch and each sequence evenly."""
    length, over = recipe.sequence_length, degree(mesh, CONTEXT)
    if length > 1 and length % over:  # if 1, samples are not token sequences
        raise RecipeError(
            "The sequences do not split over the context axis of the mesh.",
            where=[f"sequence_length={length}", f"mesh {CONTEXT}={over}"],
            why=f"{length} = {length // over} x {over} + {length % over}.",
            do=f"--set sequence_length={max(length // over, 1) * over}"
            + (f"  # or a smaller mesh: --mesh context={math.gcd(length, over)}" if math.gcd(length, over) > 1 else ""),
        )
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
            yield key, f"{key} must be at least {least}.", least
        elif int(value) > _MOST:
            yield key, f"{key} must be at most 2**63 - 1, as arrays count in 64 bits.", max(least, 1)
    if recipe.loss_scale not in LOSS_SCALES:
        yield "loss_scale", f"loss_scale must be one of {', '.join(LOSS_SCALES)}.", "auto"
    if not _is_finite(recipe.learning_rate):
        yield "learning_rate", "learning_rate must be a finite number, 0 or more.", 1e-3


def _together(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    if recipe.batch_size % recipe.accumulate:
        rest = recipe.batch_size % recipe.accumulate
        why = f"batch_size={recipe.batch_size} does not split into {recipe.accumulate} microbatches: {rest} over."
        fewer = range(min(recipe.accumulate, recipe.batch_size), 0, -1)
        yield "accumulate", why, next(n for n in fewer if recipe.batch_size % n == 0)
    if recipe.seed >= _SEEDS:
        yield "seed", f"seed must be below 2**32 = {_SEEDS}.", recipe.seed % _SEEDS


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
