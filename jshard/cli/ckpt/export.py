"""`jshard ckpt export PATH OUT`: writes safetensors of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jshard._errors import RunError, ShardingError
from jshard._text import human_bytes
from jshard.checkpoint.boxes import CheckpointSource, Part, part_of
from jshard.checkpoint.formats import ForeignSource, Source, whole_leaves, write_safetensors
from jshard.checkpoint.formats.names import Names
from jshard.checkpoint.listing import checkpoint_at
from jshard.checkpoint.verifying import verify
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import Model, as_json, progress


@dataclasses.dataclass(frozen=True)
class ExportArgs:
    """Writes the parameters of a checkpoint as safetensors, an array at a time.

    With --model they have the names and the orientation of Hugging Face, layer by layer also where a run had them
    stacked. The checkpoint is verified first. Exit codes: 0 done, 1 damaged, or writing failed, 2 the request was
    wrong.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """Folder to write model.safetensors into, or several files with an index."""
    format: Literal["safetensors"] = "safetensors"
    """Of the files."""
    part: Annotated[str, tyro.conf.arg(metavar="PREFIX")] = "model"
    """The part of the state: beginning of the paths, which the names then lack."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, or a model that comes with jshard by its name, whose hf_names(config) says what its parameters are
    called; without it they keep their names."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set model.n_layer=4."""
    extra: Literal["error", "ignore"] = "error"
    """What to do with leaves of that part that the model lacks, such as more layers: refuse, or leave them out."""
    max_shard_gb: Annotated[float, tyro.conf.arg(metavar="GB")] = 5.0
    """Most of a file, in 10^9 bytes."""
    no_verify: bool = False
    """Do not read everything first to compare it with its sums."""
    json: bool = False
    """Print JSON and nothing else."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt export`."""
    args = parse(ExportArgs, argv, command="jshard ckpt export", example="runs/gpt-tiny out")
    model = Model.load(args.model, args.recipe, args.set)
    path = checkpoint_at(args.path)
    ours = CheckpointSource(path)
    if not args.no_verify:
        _check_good(ours)
    part = part_of(ours, args.part, names=None if model is None else model.names())
    source: Source = part if model is None else _named(args, part, model.names())
    total = sum(leaf.nbytes for leaf in source.leaves.values())
    with progress("export", total) as note:
        files = write_safetensors(
            args.out, whole_leaves(source), max_shard_bytes=args.max_shard_gb * 1e9, on_written=note
        )
    if args.json:
        print(as_json({"files": list(map(str, files)), "leaves": len(source.leaves), "bytes": total}))
    else:
        names = ", ".join(file.name for file in files)
        print(f"{args.out}: {len(source.leaves)} arrays, {human_bytes(total, 1)}: {names}")
    return 0


def _check_good(ours: CheckpointSource) -> None:
    with progress("verify", sum(leaf.nbytes for leaf in ours.leaves.values())) as note:
        verdict = verify(ours.path, on_read=note)
    if not verdict.is_good:
        raise RunError(
            f"The checkpoint is damaged: {len(verdict.findings)} findings.",
            where=[str(ours.path), *(f"{x.leaf or x.file or 'it'}  {x.why}" for x in verdict.findings)],
            why="what is exported would not be what was saved.",
            do="export another one; --no-verify exports what is there.",
        )


def _named(args: ExportArgs, source: Part, names: Names) -> Source:
    missing = [path for path in names if path not in source.leaves]
    if missing:
        raise ShardingError(
            f"The checkpoint is not of this model: {len(missing)} leaves are missing.",
            where=[str(args.path), *("/".join(filter(None, (args.part, path))) for path in missing)],
            why=f"hf_names of {args.model} lists {len(names)} leaves.",
            do="choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N.",
        )
    if source.left_over and args.extra == "error":
        raise ShardingError(
            f"The checkpoint is not of this model: {len(source.left_over)} leaves are left over.",
            where=[str(args.path), *source.left_over],
            why=f"hf_names of {args.model} lists {len(names)} leaves, and not these: what is written would lack them.",
            do="choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N;\n"
            "--extra ignore  # leaves them out",
        )
    return ForeignSource(source, names)
