"""`jshard occupancy`: how many blocks of a kernel fit on an SM, and whether a collective fits beside them.

On AMD GPUs the same of workgroups and compute units.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group
from rich.text import Text

from jshard.cli._arguments import Count, parse
from jshard.cli._occupancy_amd_report import AmdKernel, AmdOccupancyReport
from jshard.cli._occupancy_plot import write_png
from jshard.cli._occupancy_report import OccupancyReport
from jshard.cli._output import remark
from jshard.errors import ShardingError
from jshard.facts.amd_gpus import is_amd_gpu
from jshard.inspect.tables import show
from jshard.occupancy import (
    ASSUMED_CTAS,
    FOOTPRINTS,
    GPUS,
    RCCL_FOOTPRINTS,
    AmdGpuFacts,
    CommFootprint,
    GpuFacts,
    OccupancyError,
    OccupancyWarning,
    RcclFootprint,
    ShippedKernel,
    Workgroup,
    amd_gpu,
    check,
    footprint,
    gpu,
    rccl_footprint,
    shipped_for,
    workgroups,
)
from jshard.occupancy.rccl import RCCL_VERSION


@dataclasses.dataclass(frozen=True)
class OccupancyArgs:
    """Reports how many blocks of a kernel run at once on an SM, and how many must end before a collective can start.

    The figures are modelled from device specifications: no GPU is needed or used. Exit codes: 0 done, 2 invalid
    request.
    """

    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The GPU: a40, a100, h100, h200, b200, gb200 (all of them by default), and AMD's mi250x, mi300x."""
    kernel: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")]] = ()
    """A kernel of jshard; repeatable: --kernel matmul for all matrix products, --kernel matmul_nn_tiled,
    or one form of it, --kernel matmul_nn_tiled:64x64x64/2; all of them by default."""
    block: Annotated[str, tyro.conf.arg(metavar="THREADS,REGISTERS,BYTES")] = ""
    """Any other kernel: threads per block, registers per thread, bytes of shared memory: --block 128,90,90176.
    For AMD GPUs: work items, vector registers, bytes of local memory, as in the notes of its code object, and if they
    are known scalar registers: --block 256,64,16384,48."""
    footprint: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND")]] = ()
    """What runs beside it; repeatable: ring (the default), tree, nvls, pat, p2p, symmetric, copy-engine; on AMD GPUs
    ring, tree, p2p."""
    nccl: Annotated[str, tyro.conf.arg(metavar="VERSION")] = ""
    """Version of NCCL, e.g. 2.30.7; by default the newest whose kernels were read."""
    ctas: Count = ASSUMED_CTAS
    """Blocks of the collective; the default is an assumption."""
    json: bool = False
    """Print only JSON, with all plans and sources."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also plot blocks and drain against padding as a PNG. Needs --gpu."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard occupancy`."""
    args = parse(OccupancyArgs, argv, command="jshard occupancy")
    _check(args)
    if _is_for_amd(args):
        _print([_amd_report(args, amd_gpu(args.gpu))], as_json=args.json)
        return 0
    gpus = [gpu(args.gpu)] if args.gpu else list(GPUS.values())
    _check_names(args.kernel, gpus)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OccupancyWarning)  # also where the user's filters turn it into an error
        reports = [_report(args, facts) for facts in gpus]
    for line in dict.fromkeys(str(warning.message) for warning in caught):  # once, not for each GPU
        remark(line)
    if args.plot is not None:
        write_png(reports[0], args.plot)
        remark(f"written: {args.plot}")
    _print(reports, as_json=args.json)
    return 0


def _is_for_amd(args: OccupancyArgs) -> bool:
    return is_amd_gpu(args.gpu)


@dataclasses.dataclass(frozen=True)
class _OptionProblem:
    where: str
    why: str
    do: str


def _check(args: OccupancyArgs) -> None:
    """Raises one error for all that is wrong with the options."""
    problems = [*_kernel_problems(args), *_plot_problems(args), *_footprint_problems(args), *_amd_problems(args)]
    if problems:
        raise ShardingError(
            "The request cannot be met.",
            where=[problem.where for problem in problems],
            why="\n".join(problem.why for problem in problems),
            do="\n".join(problem.do for problem in problems),
        )


def _kernel_problems(args: OccupancyArgs) -> Iterator[_OptionProblem]:
    if args.block and args.kernel:
        why = "a kernel is named or given by its numbers, not both."
        yield _OptionProblem("--kernel --block", why, "leave out one of them.")


def _plot_problems(args: OccupancyArgs) -> Iterator[_OptionProblem]:
    if args.plot is None:
        return
    has_folder = args.plot.absolute().parent.is_dir()
    if not args.gpu or not has_folder:
        why = "the plot is of one GPU, in an existing folder."
        yield _OptionProblem(f"--plot {args.plot}", why, f"mkdir -p {args.plot.parent}; --gpu h200")


def _footprint_problems(args: OccupancyArgs) -> Iterator[_OptionProblem]:
    known = RCCL_FOOTPRINTS if _is_for_amd(args) else FOOTPRINTS
    for kind in args.footprint:
        if kind not in known:
            why = f"the footprints are {', '.join(known)}."
            yield _OptionProblem(f"--footprint {kind}", why, "--footprint ring")
            return  # the others get the same answer


def _amd_problems(args: OccupancyArgs) -> Iterator[_OptionProblem]:
    """Yields what makes no sense on an AMD GPU."""
    if not _is_for_amd(args):
        return
    without = f"jshard occupancy --gpu {args.gpu}"
    if args.nccl:
        why = f"RCCL runs the collectives of AMD GPUs, and the kernels that were read are those of {RCCL_VERSION}."
        yield _OptionProblem(f"--nccl {args.nccl}", why, f"{without}  # without --nccl")
    if args.kernel:
        why = "jshard has no kernels for AMD GPUs: the plain forms run there."
        names = " ".join(f"--kernel {name}" for name in args.kernel)
        yield _OptionProblem(names, why, f"{without} --block 256,64,16384  # a kernel by its numbers")
    if args.plot is not None:
        why = "a plot is of the kernels of jshard, which has none for AMD GPUs."
        yield _OptionProblem(f"--plot {args.plot}", why, f"{without}  # the table")


def _print(reports: Sequence[OccupancyReport | AmdOccupancyReport], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"gpus": [report.to_dict() for report in reports]}, indent=2))
        return
    parts: list[Text | OccupancyReport | AmdOccupancyReport] = []
    for report in reports:
        if parts:
            parts.append(Text())
        parts.append(report)
    show(Group(*parts))


def _report(args: OccupancyArgs, facts: GpuFacts) -> OccupancyReport:
    if args.block:
        kernels = (_kernel_of_numbers(args.block),)
        if args.gpu:  # of all GPUs, those that cannot run it say so in their tables
            check(facts, kernels[0].block)
    else:
        kernels = _named_kernels(args.kernel, facts)
    footprints: list[CommFootprint] = []
    for kind in args.footprint or ("ring",):
        footprints.append(footprint(kind, gpu=facts, version=args.nccl or None, ctas=args.ctas))
    return OccupancyReport(facts, kernels, tuple(footprints))


def _kernel_of_numbers(text: str) -> ShippedKernel:
    try:
        threads, registers, smem_bytes = (int(part.replace("_", "")) for part in text.split(","))
    except ValueError as error:
        raise OccupancyError(
            "The block cannot be read.",
            where=f"--block {text}",
            why="it is three whole numbers: threads of a block, registers of a thread, bytes of shared memory.",
            do="--block 128,90,90176",
        ) from error
    return ShippedKernel("block", "", threads, registers, smem_bytes, persistent=False)


# ---- AMD GPUs


def _amd_report(args: OccupancyArgs, facts: AmdGpuFacts) -> AmdOccupancyReport:
    kernels: list[AmdKernel] = []
    if args.block:
        workgroup = _workgroup_of_numbers(args)
        workgroups.check(facts, workgroup)
        kernels.append(AmdKernel("block", workgroup))
    footprints: list[RcclFootprint] = []
    for kind in args.footprint or ("ring",):
        footprints.append(rccl_footprint(kind, gpu=facts, workgroups=args.ctas))
    return AmdOccupancyReport(facts, tuple(kernels), tuple(footprints))


def _workgroup_of_numbers(args: OccupancyArgs) -> Workgroup:
    try:
        work_items, vgprs, lds_bytes, *rest = (int(part.replace("_", "")) for part in args.block.split(","))
        (sgprs,) = rest or (0,)
    except ValueError as error:
        raise OccupancyError(
            "The workgroup cannot be read.",
            where=f"--block {args.block}",
            why=f"for {args.gpu} it is three or four whole numbers: work items of a workgroup, vector registers of a"
            " wave, bytes of local memory, and scalar registers of a wave.",
            do="--block 256,64,16384,48",
        ) from error
    return Workgroup(work_items=work_items, vgprs=vgprs, sgprs=sgprs, lds_bytes=lds_bytes)


# ---- the kernels of jshard


def _check_names(names: Sequence[str], gpus: Sequence[GpuFacts]) -> None:
    """Raises for a name that no kernel for any of the GPUs has."""
    shipped = [kernel for facts in gpus for kernel in shipped_for(facts).kernels]
    unknown = [name for name in names if not any(kernel.is_called(name) for kernel in shipped)]
    if unknown:
        raise _unknown_kernels(unknown, shipped)


def _named_kernels(names: Sequence[str], facts: GpuFacts) -> tuple[ShippedKernel, ...]:
    """Returns the kernels of jshard for a GPU with these names; without any, all of them."""
    shipped = shipped_for(facts).kernels
    if not names:
        return shipped
    # In the order of the tables, whatever the order of the options: a kernel may have several of the names.
    return tuple(kernel for kernel in shipped if any(kernel.is_called(name) for name in names))


def _unknown_kernels(names: Sequence[str], shipped: Sequence[ShippedKernel]) -> OccupancyError:
    known = list(dict.fromkeys(kernel.name for kernel in shipped))
    families = [name.split("_")[0] for name in known]  # `--kernel matmul` names all that begin with it
    nearest, *_ = [*difflib.get_close_matches(names[0], [*known, *families], n=1), known[0]]
    return OccupancyError(
        "The kernel is not known.",
        where=[f"--kernel {name}" for name in names],
        why=f"the kernels are {', '.join(known)}.",
        do=f"--kernel {nearest}  # or any by its numbers: --block 128,90,90176",
    )
