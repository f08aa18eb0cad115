"""Recipes and model files: what `jshard train` is given.

A *model file* is an ordinary Python file with four names in it:

    RECIPES                    dict: recipe name -> function returning a `Recipe`; first = default
    build(config, rngs)        the Flax model for `recipe.model`
    annotate(model, mesh)      calls `js.fully_shard` on the units, the root last
    loss_fn(model, batch)      the mean loss over the global batch, a scalar

`batch` is a dict of two int32 arrays of shape (batch_size, sequence_length): "inputs", and
"targets", the same text one token later. `models/gpt.py` is an example to copy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard._errors import ShardingError

Batch = Mapping[str, jax.Array]


class ModelFileError(ShardingError):
    """The model file or the recipe asked for cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run as a value.

    Attributes:
        model: the frozen config that the model file's `build` takes.
        sequence_length: tokens per sequence.
        batch_size: sequences per step, over all devices and microbatches.
        num_steps: optimizer steps.
        learning_rate: peak of the schedule: linear warmup, then a cosine down to a tenth.
        warmup_steps: steps of warmup.
        weight_decay: AdamW's decay, on matrices only (not on biases and norms).
        b1: AdamW's decay of the first moment.
        b2: AdamW's decay of the second moment.
        clip_norm: largest global norm of the gradient.
        accumulate: microbatches per step.
        eval_every: steps between two evaluations; the last step is always followed by one.
        eval_sequences: held-out sequences per evaluation, spread evenly over the held-out text.
        seed: seed of the parameters, of dropout and of the sample order.
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
    accumulate: int = 1
    eval_every: int = 1000
    eval_sequences: int = 1024
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

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip of the global gradient norm."""
        adamw = optax.adamw(
            self.schedule(),
            b1=self.b1,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """The four names of a model file; see the module's docstring."""

    path: Path
    recipes: Mapping[str, Callable[[], Recipe]]
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    annotate: Callable[[Any, Mesh | AbstractMesh], None]
    loss_fn: Callable[[Any, Batch], jax.Array]

    def recipe(self, name: str | None = None) -> tuple[str, Recipe]:
        """The named recipe, or the file's first, with its name.

        Raises:
            ModelFileError: the file has no recipe of that name.
        """
        name = next(iter(self.recipes)) if name is None else name
        if name not in self.recipes:
            known = ", ".join(self.recipes)
            raise ModelFileError(
                f"There is no recipe {name!r}.",
                where=str(self.path),
                why=f"RECIPES of that file has: {known}.",
                do=f"pick one of them, or add {name!r} to RECIPES.",
            )
        return name, self.recipes[name]()


def load_model_file(path: str | Path) -> ModelFile:
    """Runs a model file and picks its four names.

    Raises:
        ModelFileError: the file does not exist, or lacks one of the names.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(
            "The model file cannot be read.",
            where=str(path),
            why="it is a folder." if path.is_dir() else f"no such file, seen from {Path.cwd()}.",
            do="give the path of a Python file with a model, for example models/gpt.py.",
        )
    # A name of its own in sys.modules, so that the file's classes can be pickled and that two
    # files called model.py do not meet.
    name = f"jshard_model_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # true of every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return _pick(module, path)


def _pick(module: Any, path: Path) -> ModelFile:
    names = ("RECIPES", "build", "annotate", "loss_fn")
    missing = [name for name in names if not getattr(module, name, None)]  # empty RECIPES are none
    if missing:
        raise ModelFileError(
            f"The model file lacks {', '.join(missing)}.",
            where=str(path),
            why="`jshard train` needs RECIPES, build, annotate and loss_fn in it.",
            do="see `python -m pydoc jshard.train.recipe`, or start from a copy of models/gpt.py.",
        )
    return ModelFile(path, *(getattr(module, name) for name in names))
