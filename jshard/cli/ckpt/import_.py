"""`jshard ckpt import FOREIGN OUT`: converts a checkpoint saved by another library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import ArraySource, FormatSource, NamedSource, check_settings, foreign_source
from jshard.checkpoint.lookup import is_checkpoint, local_path
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.part import ArrayPlace, Part
from jshard.checkpoint.readers import ForeignCheckpoint, own_checkpoint
from jshard.checkpoint.reshard import import_leaves
from jshard.cli._arguments import parse
from jshard.cli._output import remark
from jshard.cli.ckpt import progress
from jshard.cli.ckpt._leaf_tree import num_bytes_of
from jshard.cli.ckpt._model import Model, ModelArgs, cpu_mesh, other_model, show_written

_MOST_NAMES = 3  # of the arrays that are left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportArgs(ModelArgs):
    """Converts a checkpoint of another library: safetensors, PyTorch's distributed checkpoints, DeepSpeed, Orbax.

    With --model the arrays get the model's names and orientation, as its parameters in a checkpoint to restore with
    only="params". It needs memory for two to three times 256 MiB or the largest array. Exit codes: 0 done, 1 damaged,
    or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A safetensors file or a folder of them, the folder of a checkpoint of PyTorch distributed, DeepSpeed
    ZeRO-3, or Orbax, or what a registered format reads."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    extra: Literal["error", "ignore"] = "error"
    """What to do with arrays that --model has no place for, such as more layers: refuse, or leave them out."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """The mesh whose shards it is split into, e.g. fsdp=64; any other can restore it, too (default: 8 devices)."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt import`."""
    args = parse(ImportArgs, argv, command="jshard ckpt import")
    model = args.requested_model(args.path)
    mesh = cpu_mesh(args.mesh)
    checkpoint = _opened(args) if model is None else _opened_as(model, args)  # values are read while it is written
    num_bytes = num_bytes_of(checkpoint.arrays.values())
    with progress("import", num_bytes) as note_written:
        manifest = import_leaves(checkpoint, local_path(args.out), mesh, on_written=note_written)
    show_written(args.out, manifest, json=args.json)
    return 0


def _opened(args: ImportArgs) -> Opened:
    """Opens what is imported, by the paths that it has itself."""
    source = _foreign_source(args.path)
    path = args.path.absolute()
    return own_checkpoint(path) if source is None else ForeignCheckpoint(path, source)


def _foreign_source(path: Path) -> FormatSource | None:
    """Opens a checkpoint of a library that has its own format; None for Orbax, whose format is that of jshard."""
    local_path(path)  # raises for an address in a bucket
    if is_checkpoint(path):
        return None
    source = foreign_source(path)
    if source is None:
        why = "no such file or folder."
        do = "give a .safetensors file, or a folder: of them, with .metadata, or one that DeepSpeed or Orbax wrote."
        if path.exists():
            why = "it is of no format that is known here."
            do += "\nA format of your own must be registered in this process: docs/adding_a_format.md"
        raise CheckpointError("There is no checkpoint to import.", where=str(path), why=why, do=do)
    for note in source.notes:
        remark(note)
    return source


def _opened_as(model: Model, args: ImportArgs) -> Opened:
    """Opens what is imported, by the paths of a model's parameters in a checkpoint."""
    source: ArraySource | None = _foreign_source(args.path)
    if source is None:
        checkpoint = own_checkpoint(args.path.absolute())
        source = Part(checkpoint, {name: ArrayPlace(name) for name in checkpoint.arrays})
    names = model.names()
    check_settings(args.path, names)
    named = NamedSource(source, names)
    _check_model(named, args)
    if named.unused:
        arrays = counted(len(named.unused), "array is", "arrays are")
        ellipsis = ", ..." if len(named.unused) > _MOST_NAMES else ""
        remark(f"{arrays} left out: {', '.join(named.unused[:_MOST_NAMES])}{ellipsis}")
    # Below "model", as in the checkpoints of a run.
    return Part(named, {f"model/{name}": ArrayPlace(name) for name in named.leaves})


def _check_model(named: NamedSource, args: ImportArgs) -> None:
    """Checks that the checkpoint has all that the model needs, and, unless that is ignored, nothing else."""
    lines = []
    for path, names in named.absent.items():
        lines.append(f"{path}  {', '.join(names)} is not there")
    extra = ""
    if args.extra == "error":
        for name in named.unused:
            lines.append(f"{name}  has no counterpart in the model")
        if not named.absent:
            extra = ";\n--extra ignore  # leaves them out: another model is then imported"
    if lines:
        count = len(named.leaves) + len(named.absent)
        raise other_model(args, args.path, count=count, singular="differs", plural="differ", lines=lines, extra=extra)
