"""`jshard ckpt reshard PATH OUT`: writes a checkpoint anew, cut for another mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard._text import human_bytes
from jshard.checkpoint.listing import checkpoint_at, listing
from jshard.checkpoint.manifest import Seal
from jshard.checkpoint.reshard import reshard
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import Model, as_json, cpu_mesh, progress


@dataclasses.dataclass(frozen=True)
class ReshardArgs:
    """Writes a checkpoint anew, in pieces that suit another mesh. The values are compared with their sums on the way.

    Any mesh restores any checkpoint: this makes it read less where many do so. Without --model, leaves are sharded as
    they were when they were saved, as far as the mesh allows. It needs no accelerator, and memory for 256 MiB or the
    largest leaf, two to three times over. Exit codes: 0 done, 1 damaged, or writing failed, 2 the request was wrong.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=16; on the CPU as many devices are simulated (8 by default)."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, or a model that comes with jshard by its name, whose annotation says how leaves are sharded."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set model.n_layer=4."""
    json: bool = False
    """Print JSON and nothing else."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt reshard`."""
    args = parse(ReshardArgs, argv, command="jshard ckpt reshard", example="runs/gpt-tiny out --mesh fsdp=16")
    model = Model.load(args.model, args.recipe, args.set)
    mesh = cpu_mesh(args.mesh)  # before anything asks for devices
    path = checkpoint_at(args.path)
    specs = None if model is None else model.specs(mesh)
    with progress("reshard", listing(path).entries[0].num_bytes) as note:
        seal = reshard(path, args.out.absolute(), mesh, specs=specs, on_written=note)
    print(as_json(written(args.out, seal)) if args.json else summary(args.out, seal))
    return 0


def summary(out: Path, seal: Seal) -> str:
    """One line on a checkpoint that was written."""
    found = written(out, seal)
    return f"{out}: {found['leaves']} leaves, {human_bytes(sum(leaf.nbytes for leaf in seal.leaves.values()), 1)}"


def written(out: Path, seal: Seal) -> dict[str, object]:
    """The same as JSON."""
    num_bytes = sum(leaf.nbytes for leaf in seal.leaves.values())
    return {"path": str(out.absolute()), "leaves": len(seal.leaves), "bytes": num_bytes, "mesh": dict(seal.mesh)}
