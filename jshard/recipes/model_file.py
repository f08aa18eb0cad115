"""Model files: the input of `jshard train`.

A *model file* is an ordinary Python file. It must define three names:

    RECIPES                    dict: recipe name -> function returning a `Recipe`; first = default
    build(config, rngs)        the Flax model for `recipe.model`
    annotate(model, mesh)      calls `js.fully_shard` on the units, the root last; for Linen it returns the copy

and may define seven more:

    loss_fn(model, batch)      the mean loss over the global batch, a scalar or a `js.WeightedMean`; or (loss, metrics),
                               with a dict of them; without it `next_token_loss`, the cross entropy of `model(inputs)`
                               with the targets
    data(recipe)               a `jshard.data.Data` instead of text
    flops(recipe)              floating-point operations of a step, and their formula as text, for the MFU
    hf_names(config)           the Hugging Face name of each parameter, for --init-from and `jshard ckpt`
    hf_config(config)          the contents of its config.json for such a model, for `jshard ckpt export`
    hf_types                   the model types of Hugging Face that it computes, such as ("llama", "mistral"): the
                               config.json of weights fills the recipe
    wrt                        the parameters that are trained: an nnx filter, such as `nnx.LoRAParam`, or patterns of
                               their paths, such as "*/lora_*"; all by default

`batch` has the samples, stacked; for text it is a dict of two int32 arrays of shape (batch_size, sequence_length):
"inputs", and "targets", the same text one token later. `jshard init gpt my_gpt.py` copies an example.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh

from jshard import _compat
from jshard._paths import expanded
from jshard._types import Json
from jshard.checkpoint.formats import CheckedNames, Stored
from jshard.data.worker_pool import MODEL_FILE
from jshard.engine.weighted import WeightedMean, mean_of
from jshard.errors import FourPartError, ShardingError
from jshard.plans.plan import ShardPlan
from jshard.plans.units import as_filter
from jshard.recipes import model_path, shipped_folder, shipped_models
from jshard.recipes.hf_config import checked_names, unchecked_names
from jshard.recipes.hf_families import FAMILIES
from jshard.recipes.hf_keys import ModelConfig
from jshard.recipes.lora import trained_in
from jshard.recipes.recipe import Recipe

Batch = Mapping[str, jax.Array]
"""What a loss takes beside the model: arrays by key, sharded along their first dim."""

LossValue = jax.Array | WeightedMean
LossFn = Callable[[Any, Any], Any]
"""Of a model and a batch: the loss, or the loss and a dict of metrics; each a scalar or a `WeightedMean`."""

_NEEDED = ("RECIPES", "build", "annotate")
_OPTIONAL = ("loss_fn", "data", "flops", "hf_names", "hf_config")


class ModelFileError(ShardingError):
    """The model file or the requested recipe cannot be used."""


def next_token_loss(model: Callable[..., jax.Array], batch: Batch) -> LossValue:
    """Returns the mean cross entropy of `model(inputs)`, logits in float32, with the targets, in nats per token.

    With "weights" in the batch it is the mean over the tokens by their weights. Packed conversations have "segment_ids"
    and "positions", which the model is called with.
    """
    check_is_text(batch, where="batch of next_token_loss")
    packed = segments_in(batch)
    if packed:
        _check_takes(model, packed)
    return token_loss(model(batch["inputs"], **packed), batch)


def _check_takes(model: Callable[..., object], packed: Mapping[str, object]) -> None:
    """Raises for a model whose call does not take the arguments by which packed conversations are kept apart."""
    try:
        inspect.signature(model).bind(None, **packed)
    except TypeError as error:
        raise ModelFileError(
            "The model does not keep packed conversations apart.",
            where=f"{type(model).__name__}.__call__",
            why=f"{error}: they would see each other.",
            do="--pack no  # each conversation in a sequence of its own; or write the call as in llama.py:\n"
            "def __call__(self, tokens, segments=None, positions=0): ...",
        ) from error


def token_loss(logits: jax.Array, batch: Batch) -> LossValue:
    """Returns the mean cross entropy of logits (B, T, V) with the targets of a batch, in nats per token.

    It is computed in float32. With "weights" in the batch (1 for a token to learn, else 0) it is the mean by weight: a
    `js.WeightedMean`, which is right over all microbatches and data shards.

    Examples:
        >>> def loss_fn(model, batch):
        ...     return js.train.token_loss(model(batch["inputs"]), batch)
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
    if "weights" not in batch:
        return losses.mean()
    return WeightedMean((losses * batch["weights"]).sum(), batch["weights"].sum())


def segments_in(batch: Batch) -> dict[str, jax.Array]:
    """Returns the arguments by which a model keeps packed conversations apart; none if they are not packed.

    They are `segments`, which number the conversations of a sequence from 1, with 0 for padding, and `positions`, which
    begin at 0 in each.
    """
    if "segment_ids" not in batch:
        return {}
    return {"segments": batch["segment_ids"], "positions": batch["positions"]}


# Other entries in a line of the record: not allowed as names of metrics.
_TAKEN = frozenset(
    "step loss grad_norm param_norm learning_rate loss_scale skipped_steps step_s last_step_s tokens_per_s"
    " samples_per_s tokens_seen samples_seen elapsed_s mfu peak_bytes used_bytes host_bytes time".split()
)


def with_metrics(loss_fn: LossFn) -> Callable[[Any, Any], tuple[LossValue, dict[str, LossValue]]]:
    """Returns a loss function that always returns the loss and its metrics, an empty dict without metrics."""

    @functools.wraps(loss_fn)
    def run(model: object, batch: object) -> tuple[Any, dict[str, LossValue]]:
        loss: Any = loss_fn(model, batch)
        metrics: Any = {}
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, metrics = loss
        _check_loss(loss_fn, loss)
        _check_metrics(loss_fn, metrics)
        return loss, dict(metrics)

    return run


def _check_loss(loss_fn: LossFn, loss: Any) -> None:
    """Raises unless the loss is one real number: for others, the gradient would fail with an error of JAX."""
    # A `WeightedMean` is judged by its quotient.
    value = mean_of(loss)
    leaves = jax.tree.leaves(value, is_leaf=lambda x: x is None)
    returned = _kind(loss)
    is_single = len(leaves) == 1 and leaves[0] is value and value is not None
    if is_single:
        # Shape and dtype alone: also of a traced value, and of a number.
        form = jax.eval_shape(jnp.asarray, value)
        if form.shape == () and jnp.issubdtype(form.dtype, jnp.floating):
            return
        returned = f"{form.dtype}{list(form.shape)}"
    raise ModelFileError(
        "The loss is not a number.",
        where=getattr(loss_fn, "__qualname__", repr(loss_fn)),
        why=f"it returns {returned}, and a gradient needs one real number in floating point.",
        do="return losses.mean()  # over the batch; or return losses.mean(), metrics",
    )


def _check_metrics(loss_fn: LossFn, metrics: object) -> None:
    why = _problem_of_metrics(metrics)
    if why:
        raise ModelFileError(
            "The metrics of a loss function cannot be recorded.",
            where=getattr(loss_fn, "__qualname__", repr(loss_fn)),
            why=why,
            do='return loss, {"accuracy": (scores.argmax(-1) == labels).mean()}',
        )


def _problem_of_metrics(metrics: object) -> str:
    """Returns why metrics cannot be recorded; empty if they can."""
    if not isinstance(metrics, Mapping):
        return f"the second of the two is {_kind(metrics)}, not a dict."
    wrong = []
    for name, metric in metrics.items():
        value = mean_of(metric)
        if not isinstance(name, str) or jnp.ndim(value):
            wrong.append(f"{name!r} {jnp.shape(value)}")
    if wrong:
        return f"a metric must be a scalar with a name: {', '.join(wrong)}."
    # Prefixes of the record: for evaluations, and for the slowest process.
    taken = sorted(name for name in metrics if name in _TAKEN or name.startswith(("val_", "slow_")))
    if taken:
        return f"{', '.join(map(repr, taken))}: the record has fields with these names."
    return ""


def check_is_text(batch: Mapping[str, object], *, where: str) -> None:
    """Checks that a batch has the entries read by the default loss."""
    missing = [key for key in ("inputs", "targets") if key not in batch]
    if missing:
        raise ModelFileError(
            "The data need a loss_fn.",
            where=where,
            why=f"a sample has {', '.join(map(repr, batch))}, and no {' and no '.join(map(repr, missing))}:\n"
            "without loss_fn the loss is the cross entropy of model(inputs) with the targets.",
            do="def loss_fn(model, batch): ...  # in the model file: a mean over the batch",
        )


def dense_flops(*, num_parameters: int, num_tokens: int, num_frozen: int = 0) -> tuple[float, str]:
    """Returns the arithmetic of a step of a dense transformer, and its formula as text: 6 x parameters x tokens.

    Each parameter costs a multiplication and an addition per token, once forward and twice backward (Kaplan et al.
    2020, arXiv 2001.08361; PaLM, arXiv 2204.02311, appendix B); a frozen one once backward. Attention over long
    sequences is extra, and recomputation is not counted. Tied parameters count once.
    """
    if not num_frozen:
        return 6.0 * num_parameters * num_tokens, f"6 x {num_parameters:,} parameters x {num_tokens:,} tokens"
    trained = num_parameters - num_frozen
    formula = f"(6 x {trained:,} trained + 4 x {num_frozen:,} frozen parameters) x {num_tokens:,} tokens"
    return (6.0 * trained + 4.0 * num_frozen) * num_tokens, formula


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The names of a model file; see the module's docstring.

    Attributes:
        path: its path.
        recipes: `RECIPES`.
        build: creates the model of a config.
        annotate: annotates the model; for a Linen module it returns the annotated copy.
        loss_fn: the mean loss over the global batch, or that and a dict of metrics.
        data: creates the data of a recipe; None for text.
        flops: of a step, with their formula; None for those of a dense transformer.
        hf_names: the Hugging Face name of each parameter; None if not defined.
        hf_config: the contents of its config.json; None if not defined.
        hf_types: the `model_type`s of Hugging Face that it computes.
        wrt: the parameters that are trained, as for `nnx.Optimizer`; the others are frozen.
        units: settings of the units changed on the command line, by name; see `jshard.api.revise.revise_layers`.
    """

    path: Path
    recipes: Mapping[str, Callable[[], Recipe]]
    build: Callable[[ModelConfig, nnx.Rngs], nnx.Module | nn.Module]
    annotate: Callable[[Any, Mesh | AbstractMesh], object]
    loss_fn: LossFn = next_token_loss
    data: Callable[[Any], Any] | None = None
    flops: Callable[[Any], tuple[float, str]] | None = None
    hf_names: Callable[[ModelConfig], Mapping[str, str | Stored]] | None = None
    hf_config: Callable[[ModelConfig], Mapping[str, Json]] | None = None
    hf_types: tuple[str, ...] = ()
    wrt: Filter = nnx.Param
    units: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> Callable[[Any, Any], jax.Array]:
        """`loss_fn` without metrics, as a scalar."""
        run = with_metrics(self.loss_fn)

        @functools.wraps(self.loss_fn)
        def loss_of(model: object, batch: object) -> jax.Array:
            loss, _ = run(model, batch)
            return mean_of(loss)

        return loss_of

    @property
    def name(self) -> str:
        """Its name in a run's record: the model's name if it is included in jshard, valid anywhere; else its path."""
        # A record may be read on another machine, where the folder of the package is another.
        is_included = self.path.parent == shipped_folder()
        return self.path.stem if is_included else str(self.path)

    def recipe(self, name: str | None = None) -> tuple[str, Recipe]:
        """Returns the named recipe, or the file's first, with its name.

        Raises:
            ModelFileError: the file has no recipe of that name, or its function does not return a recipe.
        """
        first = next(iter(self.recipes))
        if name is None:
            name = first
        if name not in self.recipes:
            similar = next(iter(difflib.get_close_matches(name, self.recipes, n=1)), first)
            raise ModelFileError(
                f"There is no recipe {name!r}.",
                where=str(self.path),
                why=f"RECIPES of that file has: {', '.join(self.recipes)}.",
                do=f"--recipe {similar}  # or add {name!r} to RECIPES",
            )
        return name, _made(self.path, name, self.recipes[name])

    def trained(self, recipe: Recipe) -> Filter:
        """Returns the parameters that are trained: `wrt`, or of a config with adapters these alone."""
        return trained_in(recipe.model, self.wrt)

    def with_units(self, settings: Mapping[str, object]) -> ModelFile:
        """Returns the model file with other settings of the units."""
        return dataclasses.replace(self, units={**self.units, **settings})

    def step_flops(self, recipe: Recipe, plan: ShardPlan, tokens_per_sample: int | None = None) -> tuple[float, str]:
        """Returns the arithmetic of a step and its formula: the file's own, or that of a dense transformer."""
        if self.flops is not None:
            return self.flops(recipe)
        tokens = recipe.batch_size * (tokens_per_sample or recipe.sequence_length)
        return dense_flops(num_parameters=plan.num_parameters, num_frozen=plan.num_frozen, num_tokens=tokens)

    def names_elsewhere(self, config: object) -> Mapping[str, str | Stored] | None:
        """Returns the result of `hf_names` for a config; None if the file has no such function."""
        if self.hf_names is None:
            return None
        try:
            names = self.hf_names(config)
        # Such an error is complete; most are ValueErrors, too, which the next clause would wrap.
        except FourPartError:
            raise
        except ValueError as error:
            raise ModelFileError(
                "The parameters of this config have no names in other formats.",
                where=place_in(self.path, error),
                why=f"hf_names raised: {error}.",
                do="use a config that it supports; or a checkpoint of jshard, whose names are the model's own.",
            ) from error
        if isinstance(names, CheckedNames):
            return names
        if self.hf_types:
            return checked_names(names, config, self.hf_types)
        return unchecked_names(names, str(self.path))

    def config_elsewhere(self, config: object) -> Mapping[str, Json] | None:
        """Returns the result of `hf_config` for a config; None if the file has no such function."""
        if self.hf_config is None:
            return None
        try:
            return self.hf_config(config)
        except FourPartError:
            raise
        except ValueError as error:
            raise ModelFileError(
                "The model of this config has no config.json.",
                where=place_in(self.path, error),
                why=f"hf_config raised: {error}.",
                do="--own-names  # exports it under the model's own names, without a config.json",
            ) from error


def load_model_file(path: str | Path) -> ModelFile:
    """Runs a model file and collects its names.

    As with `python FILE`, the file's folder comes first in `sys.path`, so that it can import its neighbours; loading a
    file twice gives two modules.

    Args:
        path: a Python file, or the name of a model included in jshard, such as "gpt"; a file of that name in the
            working folder takes precedence.

    Returns:
        Its names, checked as far as possible without calling them.

    Raises:
        ModelFileError: the file is not valid Python, raises an error, imports a package that is not installed, or lacks
            a name.
    """
    path = model_path(expanded(path))
    _check_file(path)
    folder = str(path.resolve().parent)
    # First, also if it is in the path already: the folder of another model file may have neighbours of the same names.
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    return _pick(_module(path), path)


def _check_file(path: Path) -> None:
    try:
        why = _problem_of_file(path)
    except OSError as error:
        why = f"{error.strerror}."
    if why:
        similar = next(iter(difflib.get_close_matches(path.stem, shipped_models(), n=1)), "gpt")
        raise ModelFileError(
            "The model file cannot be read.",
            where=str(path),
            why=why,
            do="give the path of a Python file with a model, or the name of an included model, such as"
            f" {similar};\njshard init {similar} my_{similar}.py  # copies it, for you to edit",
        )


def _problem_of_file(path: Path) -> str:
    """Returns why a path is no model file; empty if it may be one."""
    if path.is_dir():
        return "it is a folder."
    if path.exists() and not path.is_file():
        return "it is not a file."
    if not path.is_file():
        return f"no such file, seen from {Path.cwd()}; the included models are {', '.join(shipped_models())}."
    # Also a link to such a file, whatever its own name is.
    if ".py" not in (path.suffix, path.resolve().suffix):
        return f"a model file is Python and ends in .py; this is {path.name!r}."
    return ""


def _module_name(path: Path) -> str:
    """Returns a name that is not in sys.modules: two files called model.py do not collide."""
    stem = MODEL_FILE + re.sub(r"\W", "_", path.stem)
    name = stem
    number = 1
    while name in sys.modules:
        number += 1
        name = f"{stem}_{number}"
    return name


def _module(path: Path) -> types.ModuleType:
    """Runs a model file as a module, which is in sys.modules, so that the file's classes can be pickled."""
    # The prefix `MODEL_FILE` marks modules that worker processes load by their file.
    name = _module_name(path)
    resolved = path.resolve()
    module = types.ModuleType(name)
    module.__file__ = str(resolved)
    # Before the code runs: dataclasses look up their own module there.
    sys.modules[name] = module
    try:
        # As with `python FILE`, and unlike an import: compiled now, so that the last edit is always used.
        exec(compile(resolved.read_bytes(), str(resolved), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        # An error with its own four parts says more than a wrapper; an interrupt is the user's.
        if isinstance(error, FourPartError | KeyboardInterrupt):
            raise
        raise _file_error(error, path) from error
    return module


def _file_error(error: BaseException, path: Path) -> ModelFileError:
    """Returns the error for a model file that raised an error, or ended the program, when it ran."""
    if isinstance(error, SyntaxError):
        return _syntax_error(error, path)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_module(error, error.name, path)
    return ModelFileError(
        "The model file raises an error.",
        where=place_in(path, error),
        why=f"{type(error).__name__}: {error}",
        do=f"correct it; python {shlex.quote(str(path))} shows the same.",
    )


def _syntax_error(error: SyntaxError, path: Path) -> ModelFileError:
    line = f", line {error.lineno}" if error.lineno else ""
    text = f"\n{error.text.strip()}" if error.text else ""
    return ModelFileError(
        "The model file is not valid Python.",
        where=f"{error.filename or path}{line}",
        why=f"{error.msg}.{text}",
        do=f"correct it; python -m py_compile {shlex.quote(str(path))} shows the same.",
    )


def _missing_module(error: ModuleNotFoundError, name: str, path: Path) -> ModelFileError:
    # `import a.b` may fail because `a` lacks `b`, or because there is no `a`.
    top = name.partition(".")[0]
    if top in sys.modules:
        why = f"{top!r} exists, but does not have this part."
        do = f"correct the name, or install a version of {top} that has it."
    else:
        why = f"no installed package and nothing in {path.resolve().parent} has that name."
        do = f"install the package that provides it (often: pip install {top}), or put {top}.py into that folder."
    what = f"The model file imports {name!r}, which is not there."
    return ModelFileError(what, where=place_in(path, error), why=why, do=do)


def refuses_batches(path: Path, error: Exception) -> ModelFileError:
    """Returns the error for a model that raises while its step is traced, as for a sequence that is too long."""
    why = f"{str(error).rstrip('.')}."
    if not isinstance(error, ValueError):  # others are from the library that the model calls, and may name only a value
        why = f"{type(error).__name__}: {error}."
    return ModelFileError(
        "The model refuses the batches of the recipe.",
        where=place_in(path, error),
        why=why,
        do="change the recipe, for example --set sequence_length=...; --debug shows the traceback.",
    )


def place_in(path: Path, error: BaseException) -> str:
    """Returns the innermost line of the model file that an error was raised through; the file if there is none."""
    resolved = str(path.resolve())
    innermost = None
    for frame, line in traceback.walk_tb(error.__traceback__):  # from the outermost call inwards
        if frame.f_code.co_filename == resolved:
            innermost = line
    if innermost is None:
        return str(path)
    return f"{path}, line {innermost}"


def _made(path: Path, name: str, make: Callable[[], Recipe]) -> Recipe:
    try:
        recipe = make()
    except FourPartError:
        raise
    except Exception as error:
        raise ModelFileError(
            f"The recipe {name!r} cannot be created.",
            where=place_in(path, error),
            why=f"{type(error).__name__}: {error}",
            do="correct that function in RECIPES; --debug shows the traceback.",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ModelFileError(
            f"The recipe {name!r} is not a Recipe.",
            where=f"{path}, RECIPES[{name!r}]",
            why=f"its function returns {_kind(recipe)}.",
            do="return jshard.train.Recipe(model=..., ...), or an object of a subclass of it.",
        )
    return recipe


def _pick(module: types.ModuleType, path: Path) -> ModelFile:
    missing = [name for name in _NEEDED if getattr(module, name, None) in (None, {})]  # no recipe is none, too
    if missing:
        raise ModelFileError(
            f"The model file lacks {', '.join(missing)}.",
            where=str(path),
            why="`jshard train` needs RECIPES, build and annotate in it.",
            do="jshard init gpt my_gpt.py  # an example; python -m pydoc jshard.recipes.model_file explains it",
        )
    if hasattr(module, "generate"):
        _compat.warn_user(
            f"{path}: generate is no longer called; a model generates text by its method `decode`, or whole."
        )
    functions = {}
    for name in ("build", "annotate", *_OPTIONAL):
        value = getattr(module, name, None)
        if value is not None:
            functions[name] = value
    wrt = getattr(module, "wrt", nnx.Param)
    # Not a function like the others, and so not in `_OPTIONAL`; nor is `wrt`.
    hf_types = getattr(module, "hf_types", ())
    problems = [*_wrong_kinds(module.RECIPES, functions, wrt), *_wrong_types(hf_types)]
    if problems:
        raise ModelFileError(
            "The model file defines names that cannot be used.",
            where=[f"{path}, {name}" for name, _ in problems],
            why="\n".join(why for _, why in problems),
            do='def build(config, rngs): ..., def annotate(model, mesh): ..., RECIPES = {"tiny": tiny}.',
        )
    return ModelFile(path=path, recipes=module.RECIPES, hf_types=tuple(hf_types), wrt=_filter(wrt), **functions)


def _wrong_kinds(recipes: object, functions: Mapping[str, object], wrt: Any) -> Iterator[tuple[str, str]]:
    """Yields the names with values of a wrong kind, each with the reason."""
    if not isinstance(recipes, Mapping):
        yield "RECIPES", f"RECIPES is {_kind(recipes)}, not a dict of functions."
        recipes = {}
    for name, make in recipes.items():
        if not isinstance(name, str):
            yield f"RECIPES[{name!r}]", f"the name {name!r} is {_kind(name)}, not text."
        if not callable(make):
            yield f"RECIPES[{name!r}]", f"RECIPES[{name!r}] is {_kind(make)}, not a function that returns a Recipe."
    for name, value in functions.items():
        if not callable(value):
            yield name, f"{name} is {_kind(value)}, not a function."
    try:
        nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError):
        yield "wrt", f"wrt is {_kind(wrt)}, not an nnx filter, such as nnx.LoRAParam."


def _wrong_types(hf_types: object) -> Iterator[tuple[str, str]]:
    is_known = isinstance(hf_types, list | tuple) and all(name in FAMILIES for name in hf_types)
    if not is_known:
        yield "hf_types", f"hf_types is {hf_types!r}, not a tuple of names among {', '.join(FAMILIES)}."


def _filter(wrt: Filter) -> Filter:
    """Returns the nnx filter of a file's `wrt`: patterns select among parameters."""
    choices = wrt if isinstance(wrt, (list, tuple)) else [wrt]
    has_patterns = any(isinstance(choice, str) for choice in choices)
    if not has_patterns:
        return wrt
    # A pattern alone would also match statistics and random keys on its path.
    return nnx.All(nnx.Param, as_filter(wrt))


def _kind(value: object) -> str:
    """Returns the type of a value as in a sentence: `an int`."""
    if value is None:
        return "None"
    name = type(value).__name__
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}"
