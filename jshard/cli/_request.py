"""The request of a command: the recipe of its options, what a resumed run inherits, the plan without devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from jshard.data.text import load_text
from jshard.data.token_files import Dtype
from jshard.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
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
        if self.args.track is not None:
            return self.args.track
        return tuple(name for name in available() if name == "tensorboard")

    @property
    def settings(self) -> tuple[str, ...]:
        """All settings that differ from the recipe of the model file, from whatever option or file."""
        return (*self.args.set, *_settings_of_options(self.args))

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
        if math.prod(sizes.values()) != devices:
            return self
        return dataclasses.replace(self, sizes=sizes)

    def with_variant(self, variant: Variant) -> Request:
        """The request for a given variant, by its options, without `--auto`."""
        units = tuple(f"{name}={as_text(value)}" for name, value in variant.units.items())

        def with_options(args: TrainArgs) -> TrainArgs:
            return dataclasses.replace(
                args,
                mesh=variant.mesh_text,
                auto=False,
                set=_settings(args.set, variant.settings),
                unit=_settings(args.unit, units),
            )

        return dataclasses.replace(
            self,
            args=with_options(self.args),
            given=with_options(self.given),
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
    given = _without_config(args, model_file)
    args = given
    out = args.out
    if args.resume:
        out = _resumed_folder(args, model_file)
        args = _resumed(args, out)
    _check_vacant(args, model_file, out)
    weights = _initial_weights(args, out)
    name, recipe = model_file.recipe(args.recipe)
    if weights is not None:
        # As settings they are in the run's record: a resumed run has them even if the weights are gone.
        settings = stored_settings(model_file, recipe, weights)
        args = dataclasses.replace(args, set=_settings(settings, args.set))
    recipe = override(recipe, [*args.set, *_settings_of_options(args)])
    if weights is not None and model_file.hf_types:
        check(weights, recipe.model, model_file.hf_types)
    check_recipe(recipe, options={key: f"--{option}" for option, key in _used_keys(args).items()})
    profile = _profiled_steps(args, recipe)
    return Request(
        args=args,
        given=given,
        model_file=model_file.with_units(parse_units(args.unit)),
        name=name,
        recipe=recipe,
        sizes=parse_mesh(args.mesh),
        out=out,
        profile=profile,
    )


def _resumed_folder(args: TrainArgs, model_file: ModelFile) -> Path | None:
    """The folder of the run to resume: that of --out, or the newest run of the recipe; None if there is none."""
    if args.out:
        return args.out
    name, _ = model_file.recipe(args.recipe)
    return RunFolder.newest(_RUNS, f"{model_file.path.stem}-{name}")


def _resumed(args: TrainArgs, out: Path | None) -> TrainArgs:
    """The arguments with those of the run in a folder. Without a run there, they are for a new one."""
    # A job script may always pass --resume: the first time there is nothing to resume.
    stored: dict[str, Any] | None = None
    if out is not None and RunFolder.holds_run(out):
        stored = RunFolder.options(out)
    _check_origin(args, stored or {}, out)
    args = dataclasses.replace(args, resume=stored is not None)
    return _with_stored(args, stored or {})


def _check_vacant(args: TrainArgs, model_file: ModelFile, out: Path | None) -> None:
    """Checks that a new run may write to its folder; now, as the data may take minutes to read."""
    if args.resume:
        return
    if out is not None:
        RunFolder.check_vacant(out)
    elif not (args.dry_run or args.print_config):
        RunFolder.check_vacant(RunFolder.free_name(_RUNS, model_file.path.stem))


def _initial_weights(args: TrainArgs, out: Path | None) -> Path | None:
    """The weights that the run starts from; None if they are new, or the run continues from its own checkpoint."""
    if args.init_from is None or _has_checkpoints(out, args.checkpoints):
        return None
    if not place_of(args.init_from).exists():
        raise no_checkpoint(args.init_from)
    return args.init_from


def _profiled_steps(args: TrainArgs, recipe: Recipe) -> range | None:
    if not args.profile:
        return None
    profile = parse_steps(args.profile, option="--profile")
    check_profile(profile, num_steps=recipe.num_steps)
    return profile


def _used_keys(args: TrainArgs) -> dict[str, str]:
    """The keys of the recipe that have an option of their own, by those of these options that are used."""
    return {option: key for option, key in _KEYS.items() if getattr(args, option) is not None}


def _settings_of_options(args: TrainArgs) -> list[str]:
    """The used options for keys of the recipe, as settings."""
    return [f"{key}={getattr(args, option)}" for option, key in _used_keys(args).items()]


def stored_settings(model_file: ModelFile, recipe: Recipe, path: Path) -> list[str]:
    """The settings of a recipe that the config.json of Hugging Face's weights makes; none without such a file."""
    if not model_file.hf_types:
        return []
    keys = leaves(tree(recipe))
    settings = []
    for name, value in settings_of(path, model_file.hf_types).items():
        key = f"model.{name}"
        if key in keys:
            settings.append(as_setting(key, value))
    return settings


def _without_config(args: TrainArgs, model_file: ModelFile) -> TrainArgs:
    """The arguments, with the values of a `--config` that differ from the recipe's as settings."""
    if args.config is None:
        return args
    config = read_config(args.config)
    name, recipe = model_file.recipe(args.recipe)
    settings: list[str] = []
    if config.get("recipe_name", name) == name:  # a different recipe on the command line has its own values
        values = leaves(config.get("recipe", {}))
        defaults = leaves(tree(recipe))
        check_keys(values, defaults, f"--config {args.config}, recipe")
        overridden = _used_keys(args).values()  # an option is stronger than a file
        for key, value in values.items():
            if key not in overridden and value != defaults[key]:
                settings.append(as_setting(key, value))
    return dataclasses.replace(args, config=None, set=_settings(settings, args.set))


def _check(args: TrainArgs) -> None:
    """Raises for options that do not go together."""
    _check_given_once(args)
    _check_auto(args)
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


def _check_given_once(args: TrainArgs) -> None:
    settings = {_key(setting): setting for setting in args.set}
    for option, key in _used_keys(args).items():
        if key in settings:
            value = getattr(args, option)
            raise ShardingError(
                "A setting is given twice.",
                where=f"--{option} {value} --set {shlex.quote(settings[key])}",
                why=f"--{option} sets the recipe's {key}, too.",
                do=f"--{option} {value}",
            )


def _check_auto(args: TrainArgs) -> None:
    without_steps = []
    if args.dry_run:
        without_steps.append("--dry-run")
    if args.print_config:
        without_steps.append("--print-config")
    if args.auto and without_steps:
        raise ShardingError(
            "A configuration cannot be chosen without devices.",
            where=f"--auto {' '.join(without_steps)}",
            why=f"--auto measures steps, and {without_steps[0]} runs none.",
            do=f"jshard plan {args.model} --auto --topology h100:1x8  # estimates; or leave out --auto",
        )


def _has_checkpoints(out: Path | None, place: str | None) -> bool:
    return out is not None and bool(steps_in(place_of(place or out / OF_A_RUN)))


def _check_origin(args: TrainArgs, stored: Mapping[str, Any], out: Path | None) -> None:
    """A resumed run may repeat --checkpoints and --init-from, as job scripts do, but not change them."""
    place = stored.get("checkpoints")
    if stored and args.checkpoints not in (None, place):
        why = f"{out} has its checkpoints in {place or OF_A_RUN}."
        raise _changed("--checkpoints", args.checkpoints, why)
    if args.init_from is None or "init_from" not in stored or not _has_checkpoints(out, place):
        return
    origin = stored["init_from"]
    if origin is None or Path(origin).resolve() != args.init_from.resolve():
        origin_name = "new parameters" if origin is None else origin
        why = f"{out} started from {origin_name}, and continues with its own."
        raise _changed("--init-from", args.init_from, why)


def _changed(option: str, value: object, why: str) -> ShardingError:
    return ShardingError(
        "The resumed run was started with another value.",
        where=f"--resume {option} {value}",
        why=why,
        do=f"leave out {option}; or begin a new run: without --resume, in another --out.",
    )


def _with_stored(args: TrainArgs, stored: Mapping[str, Any]) -> TrainArgs:
    """The arguments, completed by those the run was started with; values chosen for the run are kept."""
    if args.auto and stored:
        # `--auto` chooses these again.
        args = dataclasses.replace(args, unit=(), set=_without(args.set, {"accumulate"}))
    # A key of the recipe may have been set by its option before and by --set now, or the other way round. The way used
    # now replaces the other, or the run would have the key twice.
    settings = _without(_settings(stored.get("set", ()), args.set), _used_keys(args).values())
    set_now = {_key(setting) for setting in args.set}
    inheritable = set(_WHAT) - {option for option, key in _KEYS.items() if key in set_now}
    values = {}
    for name, value in stored.items():
        if name in inheritable and not _is_given(args, name):
            values[name] = _from_record(name, value)
    return dataclasses.replace(args, **values | {"set": settings})


def _is_given(args: TrainArgs, name: str) -> bool:
    # Not by its truth: 0 and False are values that a user may have given.
    return getattr(args, name) not in (None, ())


def _from_record(name: str, value: Any) -> Any:
    """An option's value, from its JSON form in the record of a run."""
    if name in ("data", "held_out"):
        return tuple(map(Path, value))
    if name in ("tokenizer", "init_from"):
        return value and Path(value)
    if name == "unit":
        return tuple(value)
    return value


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _settings(before: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Settings, with later ones replacing earlier ones."""
    return (*_without(before, {_key(setting) for setting in later}), *later)


def _without(settings: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
    """Settings, except those of some keys."""
    return tuple(setting for setting in settings if _key(setting) not in keys)


def own_data(model_file: ModelFile, recipe: Recipe) -> Data | None:
    """The model file's own data; None if it has none."""
    if model_file.data is None:
        return None
    data = model_file.data(recipe)
    if not isinstance(data, Data):
        result = "None" if data is None else f"a {type(data).__name__}"
        raise ShardingError(
            "The model file's `data` returns no data.",
            where=f"{model_file.path}: data(recipe)",
            why=f"it returns {result}.",
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
    used = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if model_file.data is not None and used:
        raise ShardingError(
            "The model file has its own data.",
            where=f"{' and '.join(used)}, {model_file.path}: data(recipe)",
            why="they apply only if the file has no `data`.",
            do="leave out the options, or remove `data` from the file.",
        )
    data_of_file = own_data(model_file, recipe)
    if data_of_file is not None:
        return data_of_file
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
    if model_file.data is not None:
        return ""
    if isinstance(data.tokenizer, ByteTokenizer):
        return " nats per byte"
    return " nats per token"


@contextlib.contextmanager
def abstract(request: Request, mesh: AnyMesh, data: Data | None) -> Iterator[tuple[nnx.Module, Any]]:
    """The annotated model and a microbatch as shapes; the model's ValueError in the block becomes a ModelFileError."""
    model_file = request.model_file
    recipe = request.recipe
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
        return js.explain(model, optimizer=optimizer, loss_fn=model_file.loss, batch=batch, wrt=model_file.wrt)
