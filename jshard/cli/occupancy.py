"""`jshard occupancy`: how many blocks of a kernel an SM holds, and whether a collective finds room beside them."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group
from rich.text import Text

from jshard.cli._arguments import Count, parse, remark
from jshard.errors import ShardingError
from jshard.inspect.tables import show
from jshard.occupancy import (
    ASSUMED_CTAS,
    FOOTPRINTS,
    GPUS,
    SHIPPED,
    GpuFacts,
    OccupancyError,
    OccupancyReport,
    OccupancyWarning,
    ShippedKernel,
    check,
    footprint,
    gpu,
)
from jshard.occupancy.report import to_json, write_png


@dataclasses.dataclass(frozen=True)
class OccupancyArgs:
    """Says how many blocks of a kernel run at once on an SM, and how many must end before a collective begins there.

    A model, from the numbers of the devices: no GPU is needed, and none is asked. Exit codes: 0 done, 2 the request was
    wrong.
    """

    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The GPU: a40, a100, h100, h200, b200, gb200; all of them by default."""
    kernel: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")]] = ()
    """A kernel of jshard, as often as needed: --kernel matmul for all products of matrices, --kernel matmul_nn_tiled,
    or one form of it, --kernel matmul_nn_tiled:64x64x64/2; all of them by default."""
    block: Annotated[str, tyro.conf.arg(metavar="THREADS,REGISTERS,BYTES")] = ""
    """Any kernel instead: threads of a block, registers of a thread, bytes of shared memory: --block 128,90,90176."""
    footprint: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND")]] = ()
    """What runs beside it, as often as needed: ring (the default), tree, nvls, pat, p2p, symmetric, copy-engine."""
    nccl: Annotated[str, tyro.conf.arg(metavar="VERSION")] = ""
    """Version of NCCL, e.g. 2.30.7; the newest whose kernels were read by default."""
    ctas: Count = ASSUMED_CTAS
    """Blocks of the collective; the default is an assumption."""
    json: bool = False
    """Print JSON with all plans and sources, and nothing else."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw blocks and drain against padding into a PNG, too. Needs --gpu."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard occupancy`."""
    args = parse(OccupancyArgs, argv, command="jshard occupancy")
    _check(args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OccupancyWarning)
        reports = [_report(args, facts) for facts in ([gpu(args.gpu)] if args.gpu else GPUS.values())]
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        remark(line)
    if args.plot is not None:
        write_png(reports[0], args.plot)
        remark(f"written: {args.plot}")
    if args.json:
        print(to_json(reports))
    else:
        show(Group(*[part for report in reports for part in (Text(), report)][1:]))
    return 0


def _report(args: OccupancyArgs, facts: GpuFacts) -> OccupancyReport:
    kernels = _of_numbers(args.block) if args.block else _named(args.kernel)
    if args.block and args.gpu:
        check(facts, kernels[0].block)
    how = {"version": args.nccl or None, "ctas": args.ctas}
    comms = [footprint(kind, gpu=facts, **how) for kind in args.footprint or ("ring",)]
    return OccupancyReport(facts, kernels, tuple(comms))


def _of_numbers(text: str) -> tuple[ShippedKernel, ...]:
    try:
        threads, registers, smem_bytes = (int(part.replace("_", "")) for part in text.split(","))
    except ValueError as error:
        raise OccupancyError(
            "The block cannot be read.",
            where=f"--block {text}",
            why="it is three whole numbers: threads of a block, registers of a thread, bytes of shared memory.",
            do="--block 128,90,90176",
        ) from error
    return (ShippedKernel("block", "", threads, registers, smem_bytes, persistent=False),)


def _named(names: Sequence[str]) -> tuple[ShippedKernel, ...]:
    wrong = [name for name in names if not any(kernel.is_called(name) for kernel in SHIPPED)]
    if wrong:
        known = list(dict.fromkeys(kernel.name for kernel in SHIPPED))
        near = difflib.get_close_matches(wrong[0], [*known, *(name.split("_")[0] for name in known)], n=1) or known
        raise OccupancyError(
            "The kernel is not known.",
            where=[f"--kernel {name}" for name in wrong],
            why=f"there are {', '.join(known)}.",
            do=f"--kernel {near[0]}  # or any by its numbers: --block 128,90,90176",
        )
    return tuple(kernel for kernel in SHIPPED if not names or any(map(kernel.is_called, names)))


def _check(args: OccupancyArgs) -> None:
    problems = []
    if args.block and args.kernel:
        problems.append(("--kernel --block", "a kernel is named or given by its numbers, not both.", "leave one away."))
    if args.plot is not None and not (args.gpu and args.plot.absolute().parent.is_dir()):
        why = "one GPU is drawn, into a folder that is there."
        problems.append((f"--plot {args.plot}", why, f"mkdir -p {args.plot.parent}; --gpu h200"))
    unknown = [kind for kind in args.footprint if kind not in FOOTPRINTS]
    if unknown:
        why = f"it is none of {', '.join(FOOTPRINTS)}."
        problems.append((f"--footprint {unknown[0]}", why, "--footprint ring"))
    if problems:
        where, why, do = zip(*problems, strict=True)
        raise ShardingError("The request cannot be met.", where=where, why="\n".join(why), do="\n".join(do))
