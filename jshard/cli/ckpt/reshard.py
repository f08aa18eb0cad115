"""`jshard ckpt reshard PATH OUT`: rewrites a checkpoint in pieces for another mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.checkpoint.listing import listing
from jshard.checkpoint.lookup import checkpoint_at, local_path
from jshard.checkpoint.reshard import reshard
from jshard.cli._arguments import parse
from jshard.cli.ckpt import progress
from jshard.cli.ckpt._model import ModelArgs, cpu_mesh, show_written


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardArgs(ModelArgs):
    """Rewrites a checkpoint in pieces that suit another mesh, and verifies the checksums of the values meanwhile.

    Any mesh can restore any checkpoint; resharding reduces reads if many do. Without --model, leaves are sharded as
    when they were saved, as far as the mesh allows. It needs no accelerator, and memory for two to three times 256 MiB
    or the largest leaf. Exit codes: 0 done, 1 damaged, or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=16; that many devices are simulated on the CPU (8 by default)."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt reshard`."""
    args = parse(ReshardArgs, argv, command="jshard ckpt reshard")
    model = args.requested_model()
    mesh = cpu_mesh(args.mesh)
    path = checkpoint_at(args.path)
    specs = None if model is None else model.specs(mesh)
    # The only entry: `path` is one checkpoint.
    num_bytes = listing(path).entries[0].num_bytes
    with progress("reshard", num_bytes) as note_written:
        manifest = reshard(path, local_path(args.out), mesh, specs=specs, on_written=note_written)
    show_written(args.out, manifest, json=args.json)
    return 0
