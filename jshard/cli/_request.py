"""The request of a command: the recipe of its options, what a resumed run inherits, the plan without devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

import jshard as js
from jshard.checkpoint.buckets import BucketPath
from jshard.checkpoint.lookup import OF_A_RUN, no_checkpoint, place_of, steps_in
from jshard.cli._arguments import TrainArgs, parse_mesh, parse_steps
from jshard.cli._config import NOT_IN_FILES, as_setting, check_keys, leaves, read_config
from jshard.cluster.compile import Variant, as_text
from jshard.data import Data, Tokenizer
from jshard.data.files import Dtype
from jshard.data.text import ByteTokenizer, HuggingFaceTokenizer, load_text
from jshard.errors import FourPartError, ShardingError
from jshard.inspect.explain import Explanation
from jshard.plans.mesh import AnyMesh
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.hf_config import check, settings_of
from jshard.recipes.model_file import ModelFile, load_model_file, refuses_batches
from jshard.recipes.overrides import override, parse_units
from jshard.recipes.recipe import Recipe, check_batch, check_recipe, tree, versions
from jshard.train.progress import check_profile
from jshard.train.run_folder import RunFolder
from jshard.train.trackers import available

_RUNS = Path("runs")
# Options that a resumed run inherits.
_WHAT = ("recipe", "set", "unit", "steps", "seed", "data", "held_out", "text_key", "dtype", "tokenizer", "init_from")
_WHAT += ("checkpoints", "extra")
_KEYS = {"steps": "num_steps", "seed": "seed"}  # options for keys of the recipe


@dataclasses.dataclass(frozen=True)
class Request:
    """What to train, as far as it is known without devices."""

    args: TrainArgs  # with the options that a resumed run inherits
    given: TrainArgs
    model_file: ModelFile
    name: str
    recipe: Recipe
    sizes: Mapping[str, int]
    out: Path | None  # None for a new folder of the usual name
    profile: range | None = None  # steps to profile

    @property
    def track(self) -> tuple[str, ...]:
        """Names of the further records."""
        asked = self.args.track
        return tuple(name for name in available() if name == "tensorboard") if asked is None else asked

    @property
    def settings(self) -> tuple[str, ...]:
        """All settings that differ from the recipe of the model file, from whatever option or file."""
        own = [
            f"{key}={getattr(self.args, name)}" for name, key in _KEYS.items() if getattr(self.args, name) is not None
        ]
        return (*self.args.set, *own)

    @property
    def options(self) -> dict[str, Any]:
        """The options that determine what is trained."""
        absolute = {  # a run may be resumed from another folder
            "data": [path.absolute() for path in self.args.data],
            "held_out": [path.absolute() for path in self.args.held_out],
            "tokenizer": self.args.tokenizer and self.args.tokenizer.absolute(),
            "init_from": self.args.init_from and str(place_of(self.args.init_from)),
        }
        return {key: getattr(self.args, key) for key in _WHAT} | absolute | {"recipe": self.name}

    def folder(self) -> Path:
        """The folder of the run, as it is now."""
        return self.out or RunFolder.free_name(_RUNS, f"{self.model_file.path.stem}-{self.name}")

    def as_begun(self, devices: int) -> Request:
        """The request on the mesh of the run's last start, if that has as many devices."""
        sizes = {} if self.out is None else RunFolder.last_mesh(self.out)
        return dataclasses.replace(self, sizes=sizes) if math.prod(sizes.values()) == devices else self

    def with_variant(self, variant: Variant) -> Request:
        """The request for a given variant, by its options, without `--auto`."""
        texts = tuple(f"{name}={as_text(value)}" for name, value in variant.units.items())

        def asks(args: TrainArgs) -> TrainArgs:
            changed = {"set": _settings(args.set, variant.settings), "unit": _settings(args.unit, texts)}
            return dataclasses.replace(args, mesh=variant.mesh_text, auto=False, **changed)

        return dataclasses.replace(
            self,
            args=asks(self.args),
            given=asks(self.given),
            model_file=self.model_file.with_units(variant.units),
            recipe=override(self.recipe, variant.settings),
            sizes=dict(variant.mesh),
        )

    def config(self) -> dict[str, Any]:
        """The full configuration, in the JSON form that `--config` reads."""
        options = {key: value for key, value in vars(self.args).items() if key not in NOT_IN_FILES}
        return {
            "model_file": str(self.args.model),
            "recipe_name": self.name,
            "recipe": tree(self.recipe),
            **tree(options | {"out": self.out}),
            "versions": versions(),
        }


def request_of(args: TrainArgs) -> Request:
    """Reads the model file, and the record of a resumed run."""
    _check(args)
    model_file = load_model_file(args.model)
    given = args = _without_config(args, model_file)
    out = args.out
    if args.resume:
        out = out or RunFolder.newest(_RUNS, f"{model_file.path.stem}-{model_file.recipe(args.recipe)[0]}")
        # A job script may always pass --resume: the first time there is nothing to resume.
        stored = RunFolder.options(out) if out is not None and RunFolder.holds_run(out) else None
        _check_origin(args, stored or {}, out)
        args = _with_stored(dataclasses.replace(args, resume=stored is not None), stored or {})
    is_written = not (args.dry_run or args.print_config or args.resume)
    if out is not None and not args.resume:
        RunFolder.check_vacant(out)  # now: the data may take minutes to read
    elif is_written:
        RunFolder.check_vacant(RunFolder.free_name(_RUNS, model_file.path.stem))
    is_begun = args.init_from is not None and _has_checkpoints(out, args.checkpoints)
    if args.init_from is not None and not is_begun and not place_of(args.init_from).exists():
        raise no_checkpoint(args.init_from)
    name, recipe = model_file.recipe(args.recipe)
    weights = None if is_begun else args.init_from
    if weights is not None:
        # As settings they are in the run's record: a resumed run has them even if the weights are gone.
        args = dataclasses.replace(args, set=_settings(stored_settings(model_file, recipe, weights), args.set))
    own = {option: key for option, key in _KEYS.items() if getattr(args, option) is not None}
    recipe = override(recipe, [*args.set, *(f"{key}={getattr(args, option)}" for option, key in own.items())])
    if weights is not None and model_file.hf_types:
        check(weights, recipe.model, model_file.hf_types)
    check_recipe(recipe, options={key: f"--{option}" for option, key in own.items()})
    profile = parse_steps(args.profile, option="--profile") if args.profile else None
    if profile is not None:
        check_profile(profile, num_steps=recipe.num_steps)
    model_file = model_file.with_units(parse_units(args.unit))
    return Request(args, given, model_file, name, recipe, parse_mesh(args.mesh), out, profile)


def stored_settings(model_file: ModelFile, recipe: Recipe, path: Path) -> list[str]:
    """The settings of a recipe that the config.json of Hugging Face's weights makes; none without such a file."""
    if not model_file.hf_types:
        return []
    keys = leaves(tree(recipe))
    values = {f"model.{name}": value for name, value in settings_of(path, model_file.hf_types).items()}
    return [as_setting(key, value) for key, value in values.items() if key in keys]


def _without_config(args: TrainArgs, model_file: ModelFile) -> TrainArgs:
    """The arguments, with the values of a `--config` that differ from the recipe's as settings."""
    if args.config is None:
        return args
    config, settings = read_config(args.config), []
    name, recipe = model_file.recipe(args.recipe)
    if config.get("recipe_name", name) == name:  # a different recipe on the command line has its own values
        found, has = leaves(config.get("recipe", {})), leaves(tree(recipe))
        check_keys(found, has, f"--config {args.config}, recipe")
        own = {key for option, key in _KEYS.items() if getattr(args, option) is not None}
        settings = [as_setting(*item) for item in found.items() if item[1] != has[item[0]] and item[0] not in own]
    return dataclasses.replace(args, config=None, set=_settings(settings, args.set))


def _check(args: TrainArgs) -> None:
    """Raises for options that do not go together."""
    settings = {_key(setting): setting for setting in args.set}
    for option, key in _KEYS.items():
        if getattr(args, option) is not None and key in settings:
            raise ShardingError(
                "A setting is given twice.",
                where=f"--{option} {getattr(args, option)} --set {shlex.quote(settings[key])}",
                why=f"--{option} sets the recipe's {key}, too.",
                do=f"--{option} {getattr(args, option)}",
            )
    given = [f"--{name.replace('_', '-')}" for name in ("dry_run", "print_config") if getattr(args, name)]
    if args.auto and given:
        raise ShardingError(
            "A configuration cannot be chosen without devices.",
            where=f"--auto {' '.join(given)}",
            why=f"--auto measures steps, and {given[0]} runs none.",
            do=f"jshard plan {args.model} --auto --topology h100:1x8  # estimates; or leave out --auto",
        )
    if args.extra is not None and args.init_from is None and not args.resume:
        raise ShardingError(
            "There are no initial parameters.",
            where=f"--extra {args.extra}",
            why="it says what to do with those of --init-from that the model has no place for.",
            do=f"--init-from PATH --extra {args.extra}; or leave it out.",
        )
    if args.checkpoints is not None and BucketPath.parse(args.checkpoints) is None:
        raise ShardingError(
            "The checkpoints cannot be stored there.",
            where=f"--checkpoints {args.checkpoints}",
            why="it is not an address in a bucket; on a disk they are in the folder of the run.",
            do="--checkpoints gs://bucket/name, or s3://bucket/name; or leave it out.",
        )


def _has_checkpoints(out: Path | None, place: str | None) -> bool:
    return out is not None and bool(steps_in(place_of(place or out / OF_A_RUN)))


def _check_origin(args: TrainArgs, stored: Mapping[str, Any], out: Path | None) -> None:
    """A resumed run may repeat --checkpoints and --init-from, as job scripts do, but not change them."""
    place, began = stored.get("checkpoints"), stored.get("init_from")
    if stored and args.checkpoints not in (None, place):
        option, why = "--checkpoints", f"{out} has its checkpoints in {place or OF_A_RUN}."
    elif args.init_from is None or "init_from" not in stored or not _has_checkpoints(out, place):
        return
    elif began is None or Path(began).resolve() != args.init_from.resolve():
        option = "--init-from"
        why = f"{out} started from {'new parameters' if began is None else began}, and continues with its own."
    else:
        return
    raise ShardingError(
        "The resumed run was started with another value.",
        where=f"--resume {option} {getattr(args, option[2:].replace('-', '_'))}",
        why=why,
        do=f"leave out {option}; or begin a new run: without --resume, in another --out.",
    )


def _with_stored(args: TrainArgs, stored: Mapping[str, Any]) -> TrainArgs:
    """The arguments, completed by those the run was started with; values chosen for the run are kept."""
    if args.auto and stored:
        args = dataclasses.replace(args, unit=(), set=tuple(s for s in args.set if _key(s) != "accumulate"))
    taken = {key: value for key, value in stored.items() if key in _WHAT and getattr(args, key) in (None, ())}
    settings = list(_settings(stored.get("set", ()), args.set))
    for option, key in _KEYS.items():  # which of the two gave it before, and which does now
        if getattr(args, option) is not None:
            settings = [setting for setting in settings if _key(setting) != key]
        elif key in map(_key, args.set):
            taken.pop(option, None)
    as_path = lambda path: path and Path(path)
    as_given = {
        "data": lambda paths: tuple(map(Path, paths)),
        "held_out": lambda paths: tuple(map(Path, paths)),
        "tokenizer": as_path,
        "init_from": as_path,
        "unit": tuple,
    }
    taken = {key: as_given.get(key, lambda value: value)(value) for key, value in taken.items()}
    return dataclasses.replace(args, **taken | {"set": tuple(settings)})


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _settings(before: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Settings, with later ones replacing earlier ones."""
    return (*(setting for setting in before if _key(setting) not in {*map(_key, later)}), *later)


def own_data(model_file: ModelFile, recipe: Recipe) -> Data | None:
    """The model file's own data; None if it has none."""
    if model_file.data is None:
        return None
    data = model_file.data(recipe)
    if not isinstance(data, Data):
        raise ShardingError(
            "The model file's `data` returns no data.",
            where=f"{model_file.path}: data(recipe)",
            why=f"it returns {'None' if data is None else f'a {type(data).__name__}'}.",
            do="return jshard.data.Data(train=..., held_out=..., description=..., fingerprint=...).",
        )
    return data


def data_of(
    model_file: ModelFile,
    recipe: Recipe,
    data: Sequence[Path],
    tokenizer: Path | None,
    *,
    held_out: Sequence[Path] = (),
    text_key: str | None = None,
    dtype: Dtype | None = None,
) -> Data:
    """The model file's own data, or the data of the files on the command line."""
    options = {"data": data, "tokenizer": tokenizer, "held_out": held_out, "text_key": text_key, "dtype": dtype}
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if model_file.data is not None and given:
        raise ShardingError(
            "The model file has its own data.",
            where=f"{' and '.join(given)}, {model_file.path}: data(recipe)",
            why="they apply only if the file has no `data`.",
            do="leave out the options, or remove `data` from the file.",
        )
    if (own := own_data(model_file, recipe)) is not None:
        return own
    return load_text(
        data,
        sequence_length=recipe.sequence_length,
        tokenizer=tokenizer_of(tokenizer),
        held_out=held_out,
        text_key=text_key or "text",
        dtype=dtype,
        vocab_size=getattr(recipe.model, "vocab_size", None),
    )


def tokenizer_of(path: Path | None) -> Tokenizer:
    """The tokenizer of a file; without one every byte is a token."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


def loss_unit(model_file: ModelFile, data: Data) -> str:
    """The unit of the loss; empty if only the model file knows it."""
    is_bytes = isinstance(data.tokenizer, ByteTokenizer)
    return "" if model_file.data is not None else " nats per byte" if is_bytes else " nats per token"


@contextlib.contextmanager
def abstract(request: Request, mesh: AnyMesh, data: Data | None) -> Iterator[tuple[nnx.Module, Any]]:
    """The annotated model and a microbatch as shapes; the model's ValueError in the block becomes a ModelFileError."""
    model_file, recipe = request.model_file, request.recipe
    check_batch(recipe, mesh)
    if data is not None:
        model_file = dataclasses.replace(model_file, data=lambda recipe: data)
    batch = batch_of(model_file, recipe, recipe.batch_size // recipe.accumulate)
    try:
        yield abstract_model(model_file, recipe, mesh), batch
    except FourPartError:
        raise
    except Exception as error:
        # A model raises a ValueError for a request beyond its limits. For sizes that it does not check, such as a
        # vocabulary of 0, the error is that of an operation in it.
        sets_model = any(_key(setting).startswith("model.") for setting in request.args.set)
        if not isinstance(error, ValueError) and not sets_model:
            raise
        raise refuses_batches(model_file.path, error) from error


def explained(request: Request, mesh: AnyMesh, data: Data | None = None) -> Explanation:
    """The plan of a recipe and its memory, on a mesh that need not have devices; `data` is data already read."""
    model_file = request.model_file
    with abstract(request, mesh, data or own_data(model_file, request.recipe)) as (model, batch):
        optimizer = request.recipe.optimizer()
        return js.explain(model, optimizer=optimizer, loss=model_file.loss, batch=batch, wrt=model_file.wrt)
