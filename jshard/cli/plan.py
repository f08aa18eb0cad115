"""`jshard plan MODEL.py`: what a recipe needs, and with --topology how it compiles for a cluster that is not here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard._errors import ShardingError
from jshard.cli._arguments import parse
from jshard.cli._mesh_option import num_devices, open_mesh
from jshard.cli._train_request import Request, TrainArgs, request_of
from jshard.cli.train import explained, own_data
from jshard.cluster.compile import CompileRequest, compile_step, unused_flags
from jshard.cluster.options import PROFILES
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import Topology, parse_topology, require_compiler
from jshard.train.settings.recipe_check import check_batch


@dataclasses.dataclass(frozen=True)
class PlanArgs:
    """Says what training a recipe of a model file needs: without a device, and without memory for parameters.

    Without --topology: the plan of the annotation and its memory. With it the train step is compiled for that cluster
    by the compiler of its devices, and two things are told, never mixed: what was compiled (memory, every collective
    and what is computed beside it), and what is estimated from that (times, as a range over stated assumptions).
    Exit codes: 0 it fits, 1 it does not fit or could not be compiled, 2 the request was wrong.
    """

    model: tyro.conf.Positional[Path]
    """Python file with the model, its annotation and its recipes, e.g. models/gpt.py."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set batch_size=512 --set model.n_layer=4."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=8,fsdp=64 (default: fsdp takes all devices; without --topology 8)."""
    topology: Annotated[str, tyro.conf.arg(metavar="DEVICE:SHAPE")] = ""
    """The cluster: hosts x GPUs (h100:64x8), slices x hosts x GPUs (h100:4x16x8), or a TPU slice (v5p:8x8x8). Devices:
    h100, h200, a100-40, a100-80, b200, gb200, v5e, v5p, v6e. Needs the extra `plan-gpu` or `plan-tpu`."""
    options: Annotated[str, tyro.conf.arg(metavar="PROFILE")] = "fastest"
    """Options of the compiler, as of js.compiler_options: fastest, memory, or none."""
    json: bool = False
    """Print JSON and nothing else."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report with its timeline into one file, too. Needs --topology."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 3600
    """How long the compiler may take."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard plan`."""
    args = parse(PlanArgs, argv, command="jshard plan")
    _check(args)
    asked = TrainArgs(model=args.model, recipe=args.recipe, set=args.set, mesh=args.mesh, dry_run=True)
    request = request_of(asked, argv)
    if not args.topology:
        return _plan(args, request)
    topology = parse_topology(args.topology)
    check_batch(request.recipe, open_mesh(request.sizes, devices=topology.num_devices))
    require_compiler(topology.device.platform)
    return _plan_cluster(args, request, topology)


def _plan(args: PlanArgs, request: Request) -> int:
    mesh = open_mesh(request.sizes, devices=num_devices(request.sizes))
    check_batch(request.recipe, mesh)
    found = explained(request, mesh, None if request.model_file.data is None else own_data(request))
    print(found.to_json() if args.json else found)
    return 0


def _plan_cluster(args: PlanArgs, request: Request, topology: Topology) -> int:
    _say(f"compiling {args.model}, recipe {request.name}, for {topology.describe()}, in a process of its own ...")
    step = compile_step(
        CompileRequest(
            model=str(args.model),
            recipe=args.recipe,
            settings=args.set,
            mesh=request.sizes,
            topology=topology.text,
            profile=None if args.options == "none" else args.options,
        ),
        timeout_s=args.timeout,
    )
    flags = unused_flags(os.environ)
    report = ClusterPlan.of(step, topology=topology, name=f"{args.model.stem}, recipe {request.name}")
    report = dataclasses.replace(report, notes=(*report.notes, *([flags] if flags else [])))
    if args.html is not None:
        _write(args.html, report.to_html())
    print(report.to_json() if args.json else report)
    return 0 if report.fits else 1


def _check(args: PlanArgs) -> None:
    if args.options not in (*PROFILES, "none"):
        raise ShardingError(
            f"There is no profile {args.options!r}.",
            where=f"--options {args.options}",
            why=f"the profiles are {', '.join(PROFILES)}, and none.",
            do="--options fastest",
        )
    if args.html is not None and not args.topology:
        raise ShardingError(
            "There is no timeline without a cluster.",
            where=f"--html {args.html}",
            why="it shows a compiled step; nothing is compiled without --topology.",
            do="--topology h100:1x8",
        )
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise ShardingError(
            "The file cannot be written.",
            where=f"--html {args.html}",
            why=f"there is no folder {args.html.absolute().parent}.",
            do=f"mkdir -p {args.html.parent}",
        )


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _say(f"written: {path}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
