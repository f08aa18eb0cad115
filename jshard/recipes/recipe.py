"""A recipe: a whole training run as a value, its JSON form, and the check for invalid values."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np
import optax

from jshard import _compat
from jshard._types import Json, PyTree
from jshard.errors import ShardingError
from jshard.plans.mesh import CONTEXT, AnyMesh, data_degree, data_degrees_text, degree
from jshard.plans.stages import DEFAULT_STAGES, Stages

_PACKAGES = ("jshard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages of a run; None for one that is not installed."""
    return {"python": platform.python_version(), **_compat.versions(_PACKAGES)}


def tree(value: object) -> Json:
    """Returns a value in JSON types.

    A dataclass becomes a dict that begins with its "class"; types that JSON lacks become text: an enum by its name,
    inf, a dtype, a function by its qualified name.
    """
    # `is_dataclass` is also true of the class itself.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(key): tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tree(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((tree(item) for item in value), key=str)  # so that equal sets print the same
    if isinstance(value, np.generic):
        return tree(value.item())
    return _scalar(value)


def _scalar(value: object) -> Json:
    if isinstance(value, enum.Enum):  # before its value: an enum may be an int, too
        return value.name
    # JSON has no inf and no nan; Python would write them, and other readers refuse the file.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _text(value)


def _text(value: object) -> str:
    """Returns a text without memory addresses, so that two runs of the same configuration print the same."""
    if isinstance(value, Path | np.dtype):
        return str(value)
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    if " at 0x" in text:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return text


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
        sync: of several microbatches, whether parameters are gathered and gradients reduced in "each" of them, or once
            a step, after the "last": as for `js.value_and_grad`.
        eval_every: steps between two evaluations; one always follows the last step.
        eval_sequences: held-out sequences per evaluation, spread evenly over the held-out text.
        checkpoint_every: steps between two checkpoints; one always follows the last step.
        keep_checkpoints: number of checkpoints to keep; older ones are deleted.
        seed: seed of the parameters, of dropout and of the sample order.
        ema_decay: decay of an exponential moving average of the weights, which is evaluated, too; None for no average.
        ema_dtype: dtype of the averages; None for that of each weight.
        ema_start_step: steps after which the average begins; until then it is the weights themselves.
        ema_warmup: whether the n-th update of the average keeps at most (1 + n) / (10 + n) of it.
        monitor: the metric of the evaluations by which the run ends early and keeps its best checkpoints.
        monitor_mode: "min" if lower values of it are better, "max" if higher ones are.
        patience: evaluations without an improvement after which the run ends; None: it does all its steps.
        min_delta: by how much the metric must be better to count as an improvement.
        stages: how loops over units run on a mesh with an axis `pipe`; see `js.parallel.stages`.
        keep_best: number of checkpoints to keep beside the newest, those with the best values; each is saved after its
            evaluation.

    A subclass may add settings and override `schedule`, `optimizer` and `hooks`.
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
    sync: str = "each"
    eval_every: int = 1000
    eval_sequences: int = 1024
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    seed: int = 0
    ema_decay: float | None = None
    ema_dtype: str | None = "float32"
    ema_start_step: int = 0
    ema_warmup: bool = True
    monitor: str = "val_loss"
    monitor_mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: int = 0
    stages: Stages = DEFAULT_STAGES

    def schedule(self) -> optax.Schedule:
        """Returns the learning rate as a function of the step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            # A short run reaches the peak at its end. Optax refuses a cosine without steps, hence the one more.
            warmup_steps=min(self.warmup_steps, self.num_steps),
            decay_steps=max(self.num_steps, self.warmup_steps + 1),
            end_value=self.learning_rate / 10,
        )

    @property
    def recorded_rate(self) -> optax.Schedule | None:
        """`schedule`, for the record; None if an overridden `optimizer` may not use it."""
        has_own_optimizer = type(self).optimizer is not Recipe.optimizer
        has_own_schedule = type(self).schedule is not Recipe.schedule
        if has_own_optimizer and not has_own_schedule:
            return None
        return self.schedule()

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW, after clipping by the global gradient norm."""
        adamw = optax.adamw(
            self.schedule(),
            b1=self.b1,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=_matrices_in,
        )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)

    def hooks(self, step: Any) -> Sequence[Any]:
        """Returns hooks with code of your own: none by default.

        A `StepHook` runs after a step, an `EvaluatedHook` after an evaluation, a `SavedHook` after a save, and a
        `PeriodicHook` between two steps; all are in `jshard.train`. A resumed run creates them again.

        Args:
            step: the `TrainStep`, which has the current `model`.
        """
        return ()


def _matrices_in(params: PyTree) -> PyTree:
    return jax.tree.map(lambda parameter: parameter.ndim >= 2, params)


# Invalid values of a recipe, refused before anything is built.

# The minimum of each number; other settings have none.
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
    "ema_start_step": 0,
    "patience": 1,
    "keep_best": 0,
}
_MAY_BE_NONE = ("patience",)
_MOST = 2**63 - 1
LOSS_SCALES = ("auto", "dynamic", "none")
_SYNCS = ("each", "last")
_MODES = ("min", "max")
_EMA_DTYPES = ("float32", "float64", "bfloat16", "float16", None)
_SEEDS = 2**32  # the seeds that grain takes


class RecipeError(ShardingError):
    """A recipe with invalid values."""


@dataclasses.dataclass(frozen=True)
class _InvalidValue:
    """A setting with an invalid value, the reason, and a valid value to propose."""

    key: str
    why: str
    proposal: object


def check_recipe(recipe: Recipe, *, options: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises one `RecipeError` for all invalid numbers.

    Args:
        recipe: the recipe.
        options: of keys that have an option of their own on the command line, that option.
    """
    problems = list(_invalid_values(recipe))
    if not problems:
        problems = list(_conflicts(recipe))  # computes with values that are valid alone
    if not problems:
        # Last: making it computes with values that may be invalid.
        _check_optimizer(recipe)
        return
    lines = []
    for problem in problems:
        if problem.key in options:
            lines.append(f"{options[problem.key]} {problem.proposal}")
        else:
            lines.append(f"--set {problem.key}={problem.proposal}")
    raise RecipeError(
        "The recipe has invalid values.",
        where=[f"{problem.key}={getattr(recipe, problem.key)!r}" for problem in problems],
        why="\n".join(problem.why for problem in problems),
        do=" ".join(lines) + "\nor the same in the model file.",
    )


def _check_optimizer(recipe: Recipe) -> None:
    optimizer = recipe.optimizer()
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    returned = "None" if optimizer is None else f"a {type(optimizer).__name__}"
    raise RecipeError(
        "The optimizer of the recipe is not one of Optax.",
        where=f"{type(recipe).__name__}.optimizer",
        why=f"it returns {returned}.",
        do="return optax.adamw(self.schedule())",
    )


def gathers_once(recipe: Recipe) -> bool:
    """Returns whether a step gathers parameters and reduces gradients once for several microbatches."""
    return recipe.sync == "last" and recipe.accumulate > 1


def check_batch(recipe: Recipe, mesh: AnyMesh) -> None:
    """Raises a `RecipeError` unless a recipe's batches split over a mesh, each microbatch and each sequence evenly."""
    _check_length(recipe, mesh)
    _check_rows(recipe, mesh)


def _check_length(recipe: Recipe, mesh: AnyMesh) -> None:
    length = recipe.sequence_length
    parts = degree(mesh, CONTEXT)
    if length <= 1 or length % parts == 0:  # if 1, samples are not token sequences
        return
    do = f"--set sequence_length={max(length // parts, 1) * parts}"
    # The largest degree that divides both: the smaller mesh of the proposal.
    common = math.gcd(length, parts)
    if common > 1:
        do += f"  # or a smaller mesh: --mesh context={common}"
    raise RecipeError(
        "The sequences do not split over the context axis of the mesh.",
        where=[f"sequence_length={length}", f"mesh {CONTEXT}={parts}"],
        why=f"{length} = {length // parts} x {parts} + {length % parts}.",
        do=do,
    )


def _check_rows(recipe: Recipe, mesh: AnyMesh) -> None:
    rows = recipe.batch_size // recipe.accumulate
    shards = data_degree(mesh)
    if rows % shards == 0:
        return
    batch = "batch"
    count = f"{rows}"
    if recipe.accumulate > 1:
        batch = "microbatch"
        count = f"{recipe.batch_size} / {recipe.accumulate} = {rows}"
    do = f"--set batch_size={math.ceil(rows / shards) * shards * recipe.accumulate}"
    common = math.gcd(rows, shards)
    if common > 1:
        do += f"  # or a smaller mesh: --mesh fsdp={common}"
    raise RecipeError(
        f"The {batch} does not split over the data axes of the mesh.",
        where=[f"batch_size={recipe.batch_size}, accumulate={recipe.accumulate}", f"mesh {data_degrees_text(mesh)}"],
        why=f"{count} sequences over {shards} data shards.",
        do=do,
    )


def _invalid_values(recipe: Recipe) -> Iterator[_InvalidValue]:
    """Yields the settings whose values are invalid alone."""
    for key, least in _LEAST.items():
        value = getattr(recipe, key)
        may_be_left_out = key in _MAY_BE_NONE and value is None
        invalid_count = None if may_be_left_out else _invalid_count(key, value, least)
        if invalid_count is not None:
            yield invalid_count
    if recipe.loss_scale not in LOSS_SCALES:
        yield _InvalidValue("loss_scale", f"loss_scale must be one of {', '.join(LOSS_SCALES)}.", "auto")
    if recipe.sync not in _SYNCS:
        yield _InvalidValue("sync", f"sync must be one of {', '.join(_SYNCS)}.", "each")
    if not _is_finite(recipe.learning_rate):
        yield _InvalidValue("learning_rate", "learning_rate must be a finite number, 0 or more.", 1e-3)
    if recipe.monitor_mode not in _MODES:
        yield _InvalidValue("monitor_mode", f"monitor_mode must be one of {', '.join(_MODES)}.", "min")
    if not _is_finite(recipe.min_delta):
        yield _InvalidValue("min_delta", "min_delta must be a finite number, 0 or more.", 0.0)
    yield from _invalid_average(recipe)


def _invalid_count(key: str, value: Any, least: int) -> _InvalidValue | None:
    """Returns what is wrong with a whole number of a recipe; None if it is valid."""
    # `Integral` has NumPy's integers, too, and True, which is no number of steps.
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        is_whole = isinstance(value, float) and value.is_integer()
        proposal = int(value) if is_whole else max(least, 1)
        return _InvalidValue(key, f"{key} is a {type(value).__name__}, not an int.", proposal)
    if value < least:
        return _InvalidValue(key, f"{key} must be at least {least}.", least)
    if int(value) > _MOST:
        why = f"{key} must be at most 2**63 - 1, as arrays count in 64 bits."
        return _InvalidValue(key, why, max(least, 1))
    return None


def _invalid_average(recipe: Recipe) -> Iterator[_InvalidValue]:
    """Yields the settings of the average of the weights whose values are invalid."""
    decay = recipe.ema_decay
    if decay is not None and not (_is_finite(decay) and 0 < decay < 1):
        yield _InvalidValue("ema_decay", "ema_decay must be above 0 and below 1; none for no average.", 0.999)
    if recipe.ema_dtype not in _EMA_DTYPES:
        names = ", ".join(str(dtype).lower() for dtype in _EMA_DTYPES)
        yield _InvalidValue("ema_dtype", f"ema_dtype must be one of {names}.", "float32")


def _conflicts(recipe: Recipe) -> Iterator[_InvalidValue]:
    """Yields the settings whose values are invalid together, or for the libraries that take them."""
    remainder = recipe.batch_size % recipe.accumulate
    if remainder:
        why = f"batch_size={recipe.batch_size} does not split into {recipe.accumulate} microbatches: {remainder} over."
        yield _InvalidValue("accumulate", why, _largest_divisor(recipe.batch_size, recipe.accumulate))
    if recipe.seed >= _SEEDS:
        yield _InvalidValue("seed", f"seed must be below 2**32 = {_SEEDS}.", recipe.seed % _SEEDS)


def _largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number up to a limit."""
    divisor = min(most, number)
    while number % divisor:  # ends at 1
        divisor -= 1
    return divisor


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
