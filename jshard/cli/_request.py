"""The request of `train`: the recipe of its options, and what a resumed run inherits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from jshard._types import Json
from jshard.checkpoint.buckets import BucketPath
from jshard.checkpoint.lookup import OF_A_RUN, no_checkpoint, place_of, steps_in
from jshard.cli._arguments import TrainArgs, parse_steps
from jshard.cli._config import NOT_IN_FILES, as_setting
from jshard.cli._devices import parse_mesh
from jshard.cli._recipe_request import (
    KEY_OF_OPTION,
    RecipeRequest,
    all_settings,
    check_given_once,
    merged_settings,
    option_names,
    setting_keys,
    stored_settings,
    used_keys,
    without_config,
    without_keys,
)
from jshard.cluster.compile import Variant, as_text
from jshard.data.stream_rows import stream_address
from jshard.errors import ShardingError
from jshard.recipes.hf_config import check
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override, parse_units
from jshard.recipes.peft_folder import adapter_settings
from jshard.recipes.recipe import Recipe, check_recipe, tree, versions
from jshard.train.progress import check_profile
from jshard.train.run_folder import RunFolder
from jshard.train.trackers import available

_RUNS = Path("runs")
_INHERITED = tuple(
    "recipe set unit steps seed data held_out text_key pack dtype tokenizer init_from adapters checkpoints"
    " extra".split()
)
"""Options that determine what is trained: they are recorded, and a resumed run inherits them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(RecipeRequest):
    """What to train, as far as it is known without devices.

    Attributes:
        args: with the options that a resumed run inherits.
        given: as on the command line, for the command that continues the run.
        out: folder of the run; None for a new folder of the usual name.
        profile: steps to profile.
    """

    args: TrainArgs
    given: TrainArgs
    out: Path | None
    profile: range | None = None

    @property
    def track(self) -> tuple[str, ...]:
        """Names of the further records."""
        if self.args.track is not None:
            return self.args.track
        return tuple(name for name in available() if name == "tensorboard")

    @property
    def options(self) -> Mapping[str, object]:
        """The options that determine what is trained."""
        args = self.args
        absolute = {  # a run may be resumed from another folder
            "data": [_absolute(path) for path in args.data],
            "held_out": [_absolute(path) for path in args.held_out],
            "tokenizer": args.tokenizer and args.tokenizer.absolute(),
            "init_from": args.init_from and str(place_of(args.init_from)),
            "adapters": args.adapters and args.adapters.absolute(),
        }
        return {name: getattr(args, name) for name in _INHERITED} | absolute | {"recipe": self.name}

    def folder(self) -> Path:
        """Returns the folder of the run: the requested one, or one that is free at the moment of the call."""
        return self.out or RunFolder.free_name(_RUNS, f"{self.model_file.path.stem}-{self.name}")

    def as_begun(self, devices: int) -> Request:
        """Returns the request on the mesh of the run's last start, if that has as many devices."""
        sizes = {} if self.out is None else RunFolder.last_mesh(self.out)
        # Without a record the product is 1: on a single device every mesh is the same.
        if math.prod(sizes.values()) != devices:
            return self
        return dataclasses.replace(self, sizes=sizes)

    def with_variant(self, variant: Variant) -> Request:
        """Returns the request for a given variant, by its options, without `--auto`."""
        args = _with_variant(self.args, variant)
        return dataclasses.replace(
            self,
            args=args,
            given=_with_variant(self.given, variant),
            model_file=self.model_file.with_units(variant.units),
            recipe=override(self.recipe, variant.settings),
            settings=all_settings(args),
            sizes=dict(variant.mesh),
        )

    def config(self) -> dict[str, Json]:
        """Returns the full configuration, in the JSON form that `--config` reads."""
        options = {key: value for key, value in vars(self.args).items() if key not in NOT_IN_FILES}
        return {
            "model_file": str(self.args.model),
            "recipe_name": self.name,
            "recipe": tree(self.recipe),
            **tree(options | {"out": self.out}),
            "versions": versions(),
        }


def _absolute(data: Path) -> Path:
    """Returns a path, or the address of a stream, as it is from any folder."""
    address = stream_address(data)
    if address is None:
        return data.absolute()
    return Path(address.absolute().text)


def _with_variant(args: TrainArgs, variant: Variant) -> TrainArgs:
    units = [f"{name}={as_text(value)}" for name, value in variant.units.items()]
    return dataclasses.replace(
        args,
        mesh=variant.mesh_text,
        auto=False,
        # Merged: a resumed run must not have a setting twice, as requested and as chosen.
        set=merged_settings(args.set, variant.settings),
        unit=merged_settings(args.unit, units),
    )


def request_of(args: TrainArgs) -> Request:
    """Reads the model file, and the record of a resumed run."""
    _check(args)
    model_file = load_model_file(args.model)
    # The command that continues the run has what was given: a resumed run inherits the rest from its record.
    given = without_config(args, model_file)
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
        if args.adapters is not None:
            settings += [
                as_setting(f"model.lora.{key}", value) for key, value in adapter_settings(args.adapters).items()
            ]
        args = dataclasses.replace(args, set=merged_settings(settings, args.set))
    recipe = override(recipe, all_settings(args))
    if weights is not None and model_file.hf_types:
        check(weights, recipe.model, model_file.hf_types)
    check_recipe(recipe, options=option_names(args))
    profile = _profiled_steps(args, recipe)
    return Request(
        args=args,
        given=given,
        model_file=model_file.with_units(parse_units(args.unit)),
        name=name,
        recipe=recipe,
        settings=all_settings(args),
        sizes=parse_mesh(args.mesh),
        out=out,
        profile=profile,
    )


def _resumed_folder(args: TrainArgs, model_file: ModelFile) -> Path | None:
    """Returns the folder of the run to resume: --out, or the newest run of the recipe; None if there is none."""
    if args.out:
        return args.out
    name, _ = model_file.recipe(args.recipe)
    return RunFolder.newest(_RUNS, f"{model_file.path.stem}-{name}")


def _resumed(args: TrainArgs, out: Path | None) -> TrainArgs:
    """Returns the arguments with those of the run in a folder. Without a run there, they are for a new one."""
    # A job script may always pass --resume: the first time there is nothing to resume.
    stored: dict[str, Json] | None = None
    if out is not None and RunFolder.holds_run(out):
        stored = RunFolder.options(out)
    _check_origin(args, stored or {}, out)
    args = dataclasses.replace(args, resume=stored is not None)
    return _with_stored(args, stored or {})


def _check_vacant(args: TrainArgs, model_file: ModelFile, out: Path | None) -> None:
    """Checks that a new run may write to its folder; now, as the data may take minutes to read."""
    # The command of a run with --dry-run shows the tables of its plan, also while it trains.
    writes_nothing = args.dry_run or args.print_config
    if args.resume or writes_nothing:
        return
    if out is not None:
        RunFolder.check_vacant(out)
    else:
        # A free name is vacant: what is checked is that the folder of runs can be written.
        RunFolder.check_vacant(RunFolder.free_name(_RUNS, model_file.path.stem))


def _initial_weights(args: TrainArgs, out: Path | None) -> Path | None:
    """Returns the weights that a run starts from; None if they are new, or it continues from its own checkpoint."""
    # With a checkpoint of its own a run continues even if the weights are gone.
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


def _check(args: TrainArgs) -> None:
    """Raises for options that do not go together."""
    check_given_once(args)
    _check_auto(args)
    if args.extra is not None and args.init_from is None and not args.resume:
        raise ShardingError(
            "There are no initial parameters.",
            where=f"--extra {args.extra}",
            why="it says what to do with those of --init-from that the model has no place for.",
            do=f"--init-from PATH --extra {args.extra}; or leave it out.",
        )
    if args.adapters is not None and args.init_from is None and not args.resume:
        raise ShardingError(
            "The adapters have no base.",
            where=f"--adapters {args.adapters}",
            why="they are added to the weights of a model, which --init-from names.",
            do=f"--init-from BASE --adapters {args.adapters}",
        )
    if args.checkpoints is not None and BucketPath.parse(args.checkpoints) is None:
        raise ShardingError(
            "The checkpoints cannot be stored there.",
            where=f"--checkpoints {args.checkpoints}",
            why="it is not an address in a bucket; on a disk they are in the folder of the run.",
            do="--checkpoints gs://bucket/name, or s3://bucket/name; or leave it out.",
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


def _check_origin(args: TrainArgs, stored: Mapping[str, Json], out: Path | None) -> None:
    """A resumed run may repeat --checkpoints and --init-from, as job scripts do, but not change them."""
    place = stored.get("checkpoints")
    if stored and args.checkpoints not in (None, place):
        why = f"{out} has its checkpoints in {place or OF_A_RUN}."
        raise _changed("--checkpoints", args.checkpoints, why)
    # Without checkpoints the weights are read again, and may be others.
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


def _with_stored(args: TrainArgs, stored: Mapping[str, Json]) -> TrainArgs:
    """Returns the arguments, completed by those the run was started with; values chosen for the run are kept."""
    if args.auto and stored:
        # `--auto` chooses these again.
        args = dataclasses.replace(args, unit=(), set=without_keys(args.set, {"accumulate"}))
    # A key of the recipe may have been set by its option before and by --set now, or the other way round. The way used
    # now replaces the other, or the run would have the key twice.
    settings = without_keys(merged_settings(stored.get("set", ()), args.set), used_keys(args).values())
    set_now = setting_keys(args.set)
    inheritable = set(_INHERITED)
    for option, key in KEY_OF_OPTION.items():
        if key in set_now:
            inheritable.discard(option)
    values = {}
    for name, value in stored.items():
        if name in inheritable and not _is_given(args, name):
            values[name] = _from_record(name, value)
    return dataclasses.replace(args, **values | {"set": settings})


def _is_given(args: TrainArgs, name: str) -> bool:
    # Not by its truth: 0 and False are values that a user may have given.
    return getattr(args, name) not in (None, ())


def _from_record(name: str, value: Json) -> object:
    """Returns an option's value, from its JSON form in the record of a run."""
    if name in ("data", "held_out"):
        return tuple(map(Path, value))
    if name in ("tokenizer", "init_from", "adapters"):
        return value and Path(value)
    if name == "unit":
        return tuple(value)
    return value
