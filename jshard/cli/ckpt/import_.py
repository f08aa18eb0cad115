"""`jshard ckpt import FOREIGN OUT`: writes a checkpoint of what other libraries saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jshard._errors import ShardingError
from jshard.checkpoint.boxes import CheckpointSource
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import NamedSource, Source
from jshard.checkpoint.formats.detect import foreign_source
from jshard.checkpoint.listing import is_checkpoint
from jshard.checkpoint.opened import by_path
from jshard.checkpoint.reshard import import_leaves
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import Model, as_json, cpu_mesh, progress
from jshard.cli.ckpt.reshard import summary, written


@dataclasses.dataclass(frozen=True)
class ImportArgs:
    """Writes a checkpoint of what another library saved: safetensors, PyTorch's distributed checkpoints, plain Orbax.

    With --model the arrays are given the names and the orientation that the model has: its parameters, in a checkpoint
    to be restored by only="params". Memory holds 256 MiB or the largest array, two to three times over. Exit codes: 0
    done, 1 damaged, or writing failed, 2 the request was wrong.
    """

    path: tyro.conf.Positional[Path]
    """A safetensors file or a folder of them, a folder of a PyTorch distributed checkpoint, or one of Orbax."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, or a model that comes with jshard by its name, whose hf_names(config) says what its parameters are
    called there; without it their names are paths."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set model.n_layer=4."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """The mesh for which it is cut, e.g. fsdp=64; any other can restore it, too (default: 8 devices)."""
    json: bool = False
    """Print JSON and nothing else."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt import`."""
    args = parse(ImportArgs, argv, command="jshard ckpt import", example="gpt2/model.safetensors out")
    model = Model.load(args.model, args.recipe, args.set)
    mesh = cpu_mesh(args.mesh)
    source = _opened(args.path)
    if model is not None:
        source = NamedSource(source, model.names())
        _check_whole(args, source)
        paths, values = {f"model/{name}": name for name in source.leaves}, {}
    else:
        paths, values = _paths_and_values(args.path, source)
    total = sum(leaf.nbytes for leaf in source.leaves.values())
    with progress("import", total) as note:
        seal = import_leaves(source, args.out.absolute(), mesh, paths=paths, values=values, on_written=note)
    print(as_json(written(args.out, seal)) if args.json else summary(args.out, seal))
    return 0


def _opened(path: Path) -> Source:
    if is_checkpoint(path):
        return CheckpointSource(path.absolute())
    found = foreign_source(path)
    if found is None:
        raise CheckpointError(
            "There is no checkpoint to import.",
            where=str(path),
            why="no such file or folder." if not path.exists() else "it is of no format that is known here.",
            do="give a .safetensors file or a folder of them, a folder with .metadata, or one that Orbax wrote.",
        )
    return found


def _paths_and_values(path: Path, source: Source) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """Names of arrays by path, and the numbers and texts beside them; what lists PyTorch keeps has no place here."""
    held = source.values() if isinstance(source, CheckpointSource) else getattr(source, "values", {})
    values = {name: value for name, value in held.items() if isinstance(value, int | float | str)}
    if isinstance(source, CheckpointSource):
        return {name: name for name in source.leaves}, values
    do = (
        "write the file anew with another name for one of them;\n"
        "or say by hf_names(config) in a model file which is meant: --model MODEL.py"
    )
    places = by_path(path, [*source.leaves, *values], do=do)
    arrays = {place: name for place, name in places.items() if name in source.leaves}
    return arrays, {place: values[name] for place, name in places.items() if name in values}


def _check_whole(args: ImportArgs, source: NamedSource) -> None:
    bad = [f"{path}  {', '.join(names)} is not there" for path, names in source.absent.items()]
    bad += [f"{name}  has no counterpart in the model" for name in source.unused]
    if bad:
        raise ShardingError(
            f"The checkpoint is not of this model: {len(bad)} leaves differ.",
            where=[str(args.path), *bad],
            why=f"hf_names of {args.model} lists {len(source.leaves) + len(source.absent)} leaves.",
            do="choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N.",
        )
