"""`jshard tune MODEL`: the best settings of kernels beside the collectives of a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard.cli._arguments import Count, RecipeArgs, answer, num_devices, open_mesh, parse, remark
from jshard.cli._request import abstract, own_data, request_of
from jshard.errors import ShardingError
from jshard.occupancy import OccupancyWarning, footprint
from jshard.occupancy.device import device_named
from jshard.occupancy.measured import default_path
from jshard.occupancy.tune import NOT_MEASURED, rank, tune

_ASSUMED = "h200"  # if there is no GPU and none is given


@dataclasses.dataclass(frozen=True)
class TuneArgs(RecipeArgs):
    """Measures the matrix products of a model beside a load like its collectives, and stores the best settings.

    On a GPU each product of the model's units is timed with XLA's own kernel and with every distinct setting of
    js.kernels.matmul, alone and beside the load; js.tune_overlap reads the results. Without a GPU, or with --gpu, settings
    are ranked by the occupancy model, and nothing is measured. The devices of --mesh need not exist. Exit codes: 0
    done, 1 the work failed, 2 invalid request.
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
    """The command: `argv` are the arguments after `jshard tune`."""
    args = parse(TuneArgs, argv, command="jshard tune")
    request = request_of(args.without_devices())
    device = device_named(args.gpu or None)
    is_here = not args.gpu and device.platform == "gpu"
    if not args.gpu and not is_here:
        device = device_named(_ASSUMED)
    if device.why_unshaped or device.gpu is None:
        raise ShardingError(
            "There is nothing to tune for this GPU.",
            where=f"--gpu {args.gpu}" if args.gpu else device.title,
            why=device.why_unshaped,
            do=f"--gpu {_ASSUMED}  # or run it on an H100 or H200",
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OccupancyWarning)
        comm = footprint(args.footprint, gpu=device.gpu, version=args.nccl or None, ctas=args.ctas)
    for warning in caught:
        remark(str(warning.message))
    mesh, path = open_mesh(request.sizes, devices=num_devices(request.sizes)), args.cache or default_path()
    with abstract(request, mesh, own_data(request.model_file, request.recipe)) as (model, batch):
        asked = (model, request.model_file.loss, batch)
        if is_here:
            report = tune(*asked, device=device, comm=comm, path=path, again=args.again, say=remark)
            remark(f"stored in {path}")
        else:
            why = NOT_MEASURED if not args.gpu else f"--gpu {args.gpu}: {NOT_MEASURED.partition(': ')[2]}"
            report = rank(*asked, device=device, comm=comm, why=why)
    answer(report, json=args.json)
    return 0
