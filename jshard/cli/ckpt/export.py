"""`jshard ckpt export PATH OUT`: writes a checkpoint as safetensors, or for PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jshard._text import counted, human_bytes
from jshard.checkpoint.formats import ArraySource, ForeignSource, Names, write_dcp, write_safetensors
from jshard.checkpoint.lookup import checkpoint_at, local_path
from jshard.checkpoint.manifest import Value
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.part import Part, part_of
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.verifying import verify
from jshard.cli._arguments import Weights, parse
from jshard.cli._output import remark
from jshard.cli._stored import StoredRun
from jshard.cli.ckpt import as_json, progress
from jshard.cli.ckpt._leaf_tree import num_bytes_of
from jshard.cli.ckpt._merged import Merged
from jshard.cli.ckpt._model import Model, ModelArgs, adapter_files, other_model
from jshard.errors import RunError, ShardingError
from jshard.inspect.tables import show
from jshard.recipes.building import AVERAGES, check_has_average
from jshard.recipes.lora import LoRA, adapter_names, lora_of
from jshard.train.run_folder import RunFolder
from jshard.train.trust import UntrustedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArgs(ModelArgs):
    """Writes the parameters of a checkpoint as safetensors, or as a distributed checkpoint of PyTorch, array by array.

    For a run, or with --model, they get Hugging Face's names and orientation, layer by layer even if the run had them
    stacked, and a config.json beside them, as far as the model file defines these. The checkpoint is verified
    first. Exit codes: 0 done, 1 damaged, or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """Folder to write into: model.safetensors, or several files with an index; or a checkpoint for
    torch.distributed.checkpoint.load."""
    format: Literal["safetensors", "dcp", "peft"] = "safetensors"
    """Format of the files. In dcp, names have dots between the keys, and numbers and strings are also written. In peft
    these are the adapters of a run alone, with their adapter_config.json."""
    merge: bool = False
    """Add the adapters of a run to its weights, which are then those of a model without adapters."""
    part: Annotated[str, tyro.conf.arg(metavar="PREFIX")] = "model"
    """The part of the state: a prefix of the paths, which is removed from the names."""
    weights: Weights = "model"
    """Which weights: those of the last step (model), or their exponential moving average (ema) in its own dtype, if the
    run has one."""
    extra: Literal["error", "ignore"] = "error"
    """What to do with leaves of that part that the model lacks, such as more layers: refuse, or leave them out."""
    max_shard_gb: Annotated[float, tyro.conf.arg(metavar="GB")] = 5.0
    """Largest size of a file, in 10^9 bytes."""
    own_names: bool = False
    """Keep the model's own names."""
    no_verify: bool = False
    """Skip reading everything first to verify its checksums."""
    trust: bool = False
    """Execute the model file that the run names, although the run was not made by you on this machine."""

    def names_model(self) -> bool:
        """Returns whether an option names a model, or a recipe of it."""
        return self.model is not None or self.names_recipe()

    def names_recipe(self) -> bool:
        """Returns whether an option names a recipe, or its values."""
        return self.recipe is not None or bool(self.set)


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt export`."""
    args = parse(ExportArgs, argv, command="jshard ckpt export")
    preferred = None
    if args.weights == "ema":
        _check_average(args)
        preferred = AVERAGES
    model = _model(args, argv)
    if model is not None:
        args = dataclasses.replace(args, model=model.file.path)  # for errors, where the run named it
    checkpoint = own_checkpoint(checkpoint_at(args.path))
    if not args.no_verify:
        _check_good(checkpoint)
    source: ArraySource  # reads arrays when they are written: they need not fit into memory together
    if model is None:
        _check_has_model(args)
        source = part_of(checkpoint, args.part, preferred=preferred)
    else:
        source = _renamed(checkpoint, model, args, preferred)
    num_bytes = num_bytes_of(source.leaves.values())
    with progress("export", num_bytes) as note_written:
        files = _write(args, source, checkpoint, model, note_written)
    if args.json:
        print(as_json({"files": list(map(str, files)), "leaves": len(source.leaves), "bytes": num_bytes}))
    else:
        file_names = ", ".join(file.name for file in files)
        show(f"{args.out}: {counted(len(source.leaves), 'array')}, {human_bytes(num_bytes, 1)}: {file_names}")
    return 0


def _write(
    args: ExportArgs,
    source: ArraySource,
    checkpoint: Opened,
    model: Model | None,
    on_written: Callable[[int], None],
) -> Sequence[Path]:
    """Writes the files, and returns their paths."""
    out = local_path(args.out)
    if args.format == "peft":
        assert model is not None  # it has named the arrays
        beside = adapter_files(model, source.leaves)
        # PEFT reads one file.
        one_file = {"max_shard_bytes": float("inf"), "stem": "adapter_model"}
        return write_safetensors(out, source, beside=beside, on_written=on_written, **one_file)
    if args.format == "dcp":
        # Another library's names are those of arrays: numbers and strings have none.
        values = _values_of_part(checkpoint, args.part) if model is None else {}
        return write_dcp(out, source, values=values, on_written=on_written)
    return write_safetensors(
        out,
        source,
        max_shard_bytes=args.max_shard_gb * 1e9,
        beside={} if model is None else model.companion_files(),
        on_written=on_written,
    )


def _renamed(checkpoint: Opened, model: Model, args: ExportArgs, preferred: str | None) -> ForeignSource:
    """Returns the arrays of a model under another library's names; of one with adapters, these or the sums."""
    names = model.names()
    lora = lora_of(model.recipe.model)
    _check_adapters(args, lora)
    if not lora.rank:
        part = part_of(checkpoint, args.part, names=names, preferred=preferred)
        _check_all(part, names, args)
        return ForeignSource(part, names)
    adapters = adapter_names(names, _paths_in(checkpoint, args.part))
    if args.format == "peft":
        return ForeignSource(part_of(checkpoint, args.part, names=adapters, preferred=preferred), adapters)
    part = part_of(checkpoint, args.part, names=[*names, *adapters], preferred=preferred)
    _check_all(part, names, args)
    return ForeignSource(Merged(part, lora.scale), names)


def _paths_in(checkpoint: Opened, part: str) -> set[str]:
    """Returns the paths of the arrays below a path, relative to it."""
    prefix = f"{part.strip('/')}/" if part else ""
    return {path.removeprefix(prefix) for path in checkpoint.arrays if path.startswith(prefix)}


def _check_has_model(args: ExportArgs) -> None:
    """Checks that adapters are not asked for where nothing says what they are."""
    if args.format == "peft" or args.merge:
        option = "--merge" if args.merge else "--format peft"
        raise ShardingError(
            "Adapters need the model.",
            where=f"{option} {args.path}",
            why="the path is of no run, or keeps its own names; the model's file says which layers have adapters.",
            do=f"jshard ckpt export RUN {args.out} {option}  # the folder of the run; without --own-names",
        )


def _check_adapters(args: ExportArgs, lora: LoRA) -> None:
    """Checks that what is asked for fits a run with adapters, or without."""
    wants_adapters = args.format == "peft"
    if wants_adapters and args.merge:
        raise ShardingError(
            "Merged weights have no adapters.",
            where="--format peft --merge",
            why="--merge adds the adapters to the weights, and --format peft writes them by themselves.",
            do="leave out one of them.",
        )
    if lora.rank and not (wants_adapters or args.merge):
        raise ShardingError(
            "The run has adapters.",
            where=f"{args.path}: model.lora.rank={lora.rank}",
            why="its weights alone are those of the model that it began with.",
            do=f"jshard ckpt export {args.path} {args.out} --merge  # the sums, as a whole model\n"
            f"jshard ckpt export {args.path} {args.out} --format peft  # the adapters alone",
        )
    if not lora.rank and (wants_adapters or args.merge):
        raise ShardingError(
            "The run has no adapters.",
            where=f"{args.path}: model.lora.rank=0",
            why="all of its parameters were trained.",
            do=f"jshard ckpt export {args.path} {args.out}",
        )


def _check_average(args: ExportArgs) -> None:
    if args.part != "model":
        raise ShardingError(
            "Only a model has an average of its weights.",
            where=f"--weights ema --part {args.part}",
            why="the averages take the places of the weights in the part called model.",
            do="leave out --part; or --weights.",
        )
    check_has_average(checkpoint_at(args.path))


def _values_of_part(checkpoint: Opened, part: str) -> dict[str, Value]:
    """Returns the numbers and strings below a path, by paths relative to it."""
    # The same prefix as that of the arrays, see `part_of`.
    prefix = f"{part.strip('/')}/" if part else ""
    values = checkpoint.values()
    below = {}
    for path, value in values.items():
        if path.startswith(prefix):
            below[path.removeprefix(prefix)] = value
    return below


# Whose names the arrays get.


def _model(args: ExportArgs, argv: Sequence[str]) -> Model | None:
    """Returns the model that names the arrays: the requested one, or that of the run that saved the checkpoint.

    None if the arrays keep their names, also where the model of the run defines no others.
    """
    _check_names(args)
    run_folder = _run_of(args.path)
    if run_folder is None or args.names_recipe():
        return args.requested_model()
    # Of another part, or in another format, other names must be requested by --model.
    has_other_names = args.part == "model" and args.format in ("safetensors", "peft")
    takes_names_of_run = args.model is not None or has_other_names
    if args.own_names or not takes_names_of_run:
        return None
    # Without names there are no adapters to write, and nothing to add.
    needs_names = args.model is not None or args.format == "peft" or args.merge
    try:
        return _model_of_run(run_folder, args, argv)
    except UntrustedError:
        raise
    except ShardingError as error:
        if needs_names:
            raise
        remark(f"under the names that the model has here: {error.why}")
        return None


def _check_names(args: ExportArgs) -> None:
    if args.own_names and args.names_model():
        raise ShardingError(
            "Two kinds of names are asked for.",
            where="--own-names --model",
            why="a model file gives the arrays the names that others have for them.",
            do="leave out --own-names; or --model, --recipe and --set.",
        )


def _run_of(path: Path) -> Path | None:
    """Returns the folder of the run that a path is in: the path, or one of the two above it; None if none is."""
    place = path.absolute()
    for folder in (place, *place.parents[:2]):  # RUN, RUN/checkpoints, RUN/checkpoints/STEP
        if RunFolder.holds_run(folder):
            return folder
    return None


def _model_of_run(folder: Path, args: ExportArgs, argv: Sequence[str]) -> Model:
    command = ["jshard", "ckpt", "export", *argv]
    stored = StoredRun.read(folder, model=args.model, is_trusted=args.trust, command=command)
    model = Model(stored.model_file, stored.recipe, stored)
    model.names()  # raises if there are none, which the caller turns into a remark
    return model


def _check_all(part: Part, names: Names, args: ExportArgs) -> None:
    """Checks that the arrays are all that the model has, and nothing else is left."""
    prefix = f"{args.part}/" if args.part else ""
    missing = [f"{prefix}{path}" for path in names if path not in part.leaves]
    if missing:
        raise other_model(args, args.path, count=len(names), singular="is missing", plural="are missing", lines=missing)
    if part.left_over and args.extra == "error":
        raise other_model(
            args,
            args.path,
            count=len(names),
            singular="is left over",
            plural="are left over",
            lines=part.left_over,
            extra=";\n--extra ignore  # leaves out what would not be written",
        )


def _check_good(checkpoint: Opened) -> None:
    """Verifies the sums of all values: the exported files have none, so damage would be silent there."""
    num_bytes = num_bytes_of(checkpoint.arrays.values())
    with progress("verify", num_bytes) as note_read:
        verdict = verify(checkpoint.path, on_read=note_read)
    if verdict.is_good:
        return
    findings = [f"{finding.leaf or finding.file or 'it'}  {finding.why}" for finding in verdict.findings]
    raise RunError(
        f"The checkpoint is damaged: {counted(len(findings), 'finding')}.",
        where=[str(checkpoint.path), *findings],
        why="what is exported would not be what was saved.",
        do="export another one; --no-verify exports what is there.",
    )
