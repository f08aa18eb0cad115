"""Model files: what `jshard train` is given.

A *model file* is an ordinary Python file. Three names in it are needed:

    RECIPES                    dict: recipe name -> function returning a `Recipe`; first = default
    build(config, rngs)        the Flax model for `recipe.model`
    annotate(model, mesh)      calls `js.fully_shard` on the units, the root last

and four are optional:

    loss_fn(model, batch)      the mean loss over the global batch, a scalar;
                               without it `next_token_loss`, the cross entropy of `model(inputs)` with the targets
    data(recipe)               a `jshard.train.Data` instead of text
    generate(model, prompt, num_tokens, *, key)
                               continues prompts, (batch, length) token ids; a run then ends with a sample
    flops(recipe)              floating-point operations of a step, and their formula in words, for the MFU

`batch` is what the data gives, stacked; of text a dict of two int32 arrays of shape (batch_size, sequence_length):
"inputs", and "targets", the same text one token later. `models/gpt.py` is an example to copy.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard._errors import ShardingError
from jshard.train.recipe import Recipe

Batch = Mapping[str, jax.Array]
LossFn = Callable[[Any, Any], jax.Array]

_NEEDED = ("RECIPES", "build", "annotate")


class ModelFileError(ShardingError):
    """The model file or the recipe asked for cannot be used."""


def next_token_loss(model: Any, batch: Batch) -> jax.Array:
    """Mean cross entropy of `model(inputs)`, logits in float32, with the targets, in nats per token."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The names of a model file; see the module's docstring."""

    path: Path
    recipes: Mapping[str, Callable[[], Recipe]]
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    annotate: Callable[[Any, Mesh | AbstractMesh], None]
    loss_fn: LossFn = next_token_loss
    data: Callable[[Any], Any] | None = None
    generate: Callable[..., jax.Array] | None = None
    flops: Callable[[Any], tuple[float, str]] | None = None

    def recipe(self, name: str | None = None) -> tuple[str, Recipe]:
        """The named recipe, or the file's first, with its name.

        Raises:
            ModelFileError: the file has no recipe of that name.
        """
        name = next(iter(self.recipes)) if name is None else name
        if name not in self.recipes:
            near = difflib.get_close_matches(name, self.recipes, n=1)
            raise ModelFileError(
                f"There is no recipe {name!r}.",
                where=str(self.path),
                why=f"RECIPES of that file has: {', '.join(self.recipes)}.",
                do=f"--recipe {near[0] if near else next(iter(self.recipes))}, or add {name!r} to RECIPES.",
            )
        return name, self.recipes[name]()


def load_model_file(path: str | Path) -> ModelFile:
    """Runs a model file and picks its names.

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
    missing = [name for name in _NEEDED if not getattr(module, name, None)]  # empty RECIPES are none
    if missing:
        raise ModelFileError(
            f"The model file lacks {', '.join(missing)}.",
            where=str(path),
            why="`jshard train` needs RECIPES, build and annotate in it.",
            do="see `python -m pydoc jshard.train.model_file`, or start from a copy of models/gpt.py.",
        )
    optional = {name: getattr(module, name, None) for name in ("loss_fn", "data", "generate", "flops")}
    return ModelFile(
        path=path,
        recipes=module.RECIPES,
        build=module.build,
        annotate=module.annotate,
        **{name: value for name, value in optional.items() if value is not None},
    )
