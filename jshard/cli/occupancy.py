"""`jshard occupancy`: how many blocks of a kernel fit on an SM, and whether a collective fits beside them."""

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
from jshard.cli._occupancy_plot import write_png
from jshard.cli._occupancy_report import OccupancyReport
from jshard.cli._output import remark
from jshard.errors import ShardingError
from jshard.inspect.tables import show
from jshard.occupancy import (
    ASSUMED_CTAS,
    FOOTPRINTS,
    GPUS,
    SHIPPED,
    CommFootprint,
    GpuFacts,
    OccupancyError,
    OccupancyWarning,
    ShippedKernel,
    check,
    footprint,
    gpu,
)


@dataclasses.dataclass(frozen=True)
class OccupancyArgs:
    """Reports how many blocks of a kernel run at once on an SM, and how many must end before a collective can start.

    The figures are modelled from device specifications: no GPU is needed or used. Exit codes: 0 done, 2 invalid
    request.
    """

    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The GPU: a40, a100, h100, h200, b200, gb200; all of them by default."""
    kernel: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")]] = ()
    """A kernel of jshard; repeatable: --kernel matmul for all matrix products, --kernel matmul_nn_tiled,
    or one form of it, --kernel matmul_nn_tiled:64x64x64/2; all of them by default."""
    block: Annotated[str, tyro.conf.arg(metavar="THREADS,REGISTERS,BYTES")] = ""
    """Any other kernel: threads per block, registers per thread, bytes of shared memory: --block 128,90,90176."""
    footprint: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND")]] = ()
    """What runs beside it; repeatable: ring (the default), tree, nvls, pat, p2p, symmetric, copy-engine."""
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
    gpus = [gpu(args.gpu)] if args.gpu else list(GPUS.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OccupancyWarning)  # also where the user's filters turn it into an error
        reports = [_report(args, facts) for facts in gpus]
    for line in dict.fromkeys(str(warning.message) for warning in caught):  # once, not for each GPU
        remark(line)
    if args.plot is not None:
        write_png(reports[0], args.plot)
        remark(f"written: {args.plot}")
    if args.json:
        print(json.dumps({"gpus": [report.to_dict() for report in reports]}, indent=2))
    else:
        _show(reports)
    return 0


@dataclasses.dataclass(frozen=True)
class _OptionProblem:
    where: str
    why: str
    do: str


def _check(args: OccupancyArgs) -> None:
    """Raises one error for all that is wrong with the options."""
    problems = [*_kernel_problems(args), *_plot_problems(args), *_footprint_problems(args)]
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
    for kind in args.footprint:
        if kind not in FOOTPRINTS:
            why = f"the footprints are {', '.join(FOOTPRINTS)}."
            yield _OptionProblem(f"--footprint {kind}", why, "--footprint ring")
            return  # the others get the same answer


def _show(reports: Sequence[OccupancyReport]) -> None:
    parts: list[Text | OccupancyReport] = []
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
        kernels = _named_kernels(args.kernel)
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


def _named_kernels(names: Sequence[str]) -> tuple[ShippedKernel, ...]:
    """Returns the kernels of jshard with these names; without any, all of them."""
    if not names:
        return tuple(SHIPPED)
    unknown = [name for name in names if not any(kernel.is_called(name) for kernel in SHIPPED)]
    if unknown:
        raise _unknown_kernels(unknown)
    # In the order of the tables, whatever the order of the options: a kernel may have several of the names.
    return tuple(kernel for kernel in SHIPPED if any(kernel.is_called(name) for name in names))


def _unknown_kernels(names: Sequence[str]) -> OccupancyError:
    known = list(dict.fromkeys(kernel.name for kernel in SHIPPED))
    families = [name.split("_")[0] for name in known]  # `--kernel matmul` names all that begin with it
    nearest, *_ = [*difflib.get_close_matches(names[0], [*known, *families], n=1), known[0]]
    return OccupancyError(
        "The kernel is not known.",
        where=[f"--kernel {name}" for name in names],
        why=f"the kernels are {', '.join(known)}.",
        do=f"--kernel {nearest}  # or any by its numbers: --block 128,90,90176",
    )
