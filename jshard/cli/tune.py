"""`jshard tune MODEL`: the best settings of kernels beside the collectives of a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import Count, RecipeArgs, parse
from jshard.cli._data import own_data
from jshard.cli._devices import num_devices, open_mesh
from jshard.cli._output import answer, remark
from jshard.cli._recipe_request import abstract, recipe_request_of
from jshard.errors import ShardingError
from jshard.occupancy import CommFootprint, GpuFacts, OccupancyWarning, footprint
from jshard.occupancy.device import Device, device_named
from jshard.occupancy.measured import default_path
from jshard.occupancy.tune import NOT_MEASURED, rank, tune

_ASSUMED = "h200"  # if there is no GPU and none is given


@dataclasses.dataclass(frozen=True)
class TuneArgs(RecipeArgs):
    """Measures the matrix products of a model beside a load like its collectives, and stores the best settings.

    On a GPU each product of the model's units is timed with XLA's own kernel and with every distinct setting of
    js.kernels.matmul, alone and beside the load; js.tune_overlap reads the results. Without a GPU, or with --gpu,
    settings are ranked by the occupancy model, and nothing is measured. The devices of --mesh need not exist. Exit
    codes: 0 done, 1 the work failed, 2 invalid request.
    """

    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Rank for this GPU and measure nothing: h100, h200, or with its cluster, h200:64x8. By default the present GPU
    is measured; without one, settings are ranked for h200."""
    footprint: Annotated[str, tyro.conf.arg(metavar="KIND")] = "ring"
    """What runs beside the kernels: ring, tree, nvls, pat, p2p, symmetric, copy-engine."""
    nccl: Annotated[str, tyro.conf.arg(metavar="VERSION")] = ""
    """Version of NCCL, e.g. 2.30.7; by default the newest whose kernels were read."""
    ctas: Count | None = None
    """Blocks of a collective; an assumption by default."""
    cache: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the measurements; by default one in the user's cache folder."""
    again: bool = False
    """Repeat measurements that the file already has."""
    json: bool = False
    """Print only JSON, with all settings."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard tune`."""
    args = parse(TuneArgs, argv, command="jshard tune")
    request = recipe_request_of(args)
    device, is_measured = _device(args)
    assert device.gpu is not None  # `_device` has checked it
    comm = _footprint(args, device.gpu)
    mesh = open_mesh(request.sizes, devices=num_devices(request.sizes))
    path = args.cache or default_path()
    with abstract(request, mesh, own_data(request.model_file, request.recipe)) as (model, batch):
        loss = request.model_file.loss
        if is_measured:
            report = tune(model, loss, batch, device=device, comm=comm, path=path, again=args.again, say=remark)
            remark(f"stored in {path}")
        else:
            report = rank(model, loss, batch, device=device, comm=comm, why=_why_not_measured(args))
    answer(report, json=args.json)
    return 0


def _device(args: TuneArgs) -> tuple[Device, bool]:
    """Returns the GPU to tune for, and whether it is here to measure on."""
    device = device_named(args.gpu or None)
    is_measured = not args.gpu and device.platform == "gpu"  # a named GPU may be another than the present one
    if not args.gpu and not is_measured:
        device = device_named(_ASSUMED)
    if device.why_unshaped or device.gpu is None:
        raise ShardingError(
            "There is nothing to tune for this GPU.",
            where=f"--gpu {args.gpu}" if args.gpu else device.title,
            why=device.why_unshaped,
            do=f"--gpu {_ASSUMED}  # or run it on a Hopper or, with jax 0.12, an Ampere GPU",
        )
    return device, is_measured


def _footprint(args: TuneArgs, gpu: GpuFacts) -> CommFootprint:
    """Returns what runs beside the kernels. Its assumptions are remarks of the command, and not warnings of Python."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OccupancyWarning)
        comm = footprint(args.footprint, gpu=gpu, version=args.nccl or None, ctas=args.ctas)
    for warning in caught:
        remark(str(warning.message))
    return comm


def _why_not_measured(args: TuneArgs) -> str:
    if not args.gpu:
        return NOT_MEASURED
    # Without its first words: there may be a GPU here, and another one was named.
    _, _, statement = NOT_MEASURED.partition(": ")
    return f"--gpu {args.gpu}: {statement}"
