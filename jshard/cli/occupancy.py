"""`jshard occupancy`: how many blocks of a kernel fit on an SM, and whether a collective fits beside them."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.text import Text

from jshard.cli._arguments import Count, parse, remark
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table, show
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
from jshard.occupancy.blocks import PAD_UNIT_BYTES, drain, limits, refusals, resident
from jshard.occupancy.room_plans import Plan, plans
from jshard.occupancy.shipped_kernels import SHIPPED_SOURCE


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
            why=f"the kernels are {', '.join(known)}.",
            do=f"--kernel {near[0]}  # or any by its numbers: --block 128,90,90176",
        )
    return tuple(kernel for kernel in SHIPPED if not names or any(map(kernel.is_called, names)))


def _check(args: OccupancyArgs) -> None:
    problems = []
    if args.block and args.kernel:
        problems.append(
            ("--kernel --block", "a kernel is named or given by its numbers, not both.", "leave out one of them.")
        )
    if args.plot is not None and not (args.gpu and args.plot.absolute().parent.is_dir()):
        why = "the plot is of one GPU, in an existing folder."
        problems.append((f"--plot {args.plot}", why, f"mkdir -p {args.plot.parent}; --gpu h200"))
    unknown = [kind for kind in args.footprint if kind not in FOOTPRINTS]
    if unknown:
        why = f"the footprints are {', '.join(FOOTPRINTS)}."
        problems.append((f"--footprint {unknown[0]}", why, "--footprint ring"))
    if problems:
        where, why, do = zip(*problems, strict=True)
        raise ShardingError("The request cannot be met.", where=where, why="\n".join(why), do="\n".join(do))


_LEGEND = (
    "a block: threads x registers, shared memory. per SM: blocks at once. drain: blocks that must end on one SM before"
    " one of the collective starts there; with a persistent kernel all must (kernel). Only a measurement shows which is"
    f" fastest. Kernels: {SHIPPED_SOURCE}, so for no other GPU. Assumed: the warps of a block are spread evenly over"
    " the quarters of an SM, which have the registers."
)
_SHORT = {"shared memory": "SMEM"}


@dataclasses.dataclass(frozen=True, repr=False)
class OccupancyReport(Printed):
    """Kernels on one GPU beside some collectives, printed as a table.

    Attributes:
        gpu: the GPU.
        kernels: as compiled.
        footprints: what the collectives take.

    Example:
        >>> print(OccupancyReport(gpu("h200"), SHIPPED, [COPY_ENGINE]))
    """

    gpu: GpuFacts
    kernels: tuple[ShippedKernel, ...]
    footprints: tuple[CommFootprint, ...]

    def __rich__(self) -> Group:
        head = f"{self.gpu.title}: {self.gpu.num_sms} SMs of {self.gpu.smem_per_sm_bytes // 1024} KiB shared memory"
        spaced = [part for comm in self.footprints for part in (Text(), self._table(comm))]
        refused = [f"{kernel.label}: {why}" for kernel in self.kernels for why in refusals(self.gpu, kernel.block)]
        last = [Text("\n".join(refused)), Text()] if refused else []
        return Group(Text(head), *spaced, *last, Text(_LEGEND))

    def to_dict(self) -> dict[str, Any]:
        """The whole report with its sources, as JSON values."""
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
            "kernels": [self._kernel_dict(kernel) for kernel in self.kernels],
        }

    def _kernel_dict(self, kernel: ShippedKernel) -> dict[str, Any]:
        found = {"kernel": kernel.label, **dataclasses.asdict(kernel)}
        if why := refusals(self.gpu, kernel.block):
            return found | {"refusals": why}
        beside = {}
        for comm in self.footprints:
            ways = self._plans(kernel, comm)
            beside[str(comm)] = {"drain": _as_it_is(ways).drain, "plans": [dataclasses.asdict(plan) for plan in ways]}
        at_once = {"blocks_per_sm": resident(self.gpu, kernel.block), "limits": limits(self.gpu, kernel.block)}
        return found | at_once | {"beside": beside}

    def _table(self, comm: CommFootprint) -> FittedTable:
        columns = "kernel", "a block>??", "per SM>", "bound by", "drain>", "best by the model"
        table = made_table(f"beside {self._taken(comm)}", *columns)
        for kernel in self.kernels:
            cells = [kernel.label, f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"]
            if refusals(self.gpu, kernel.block):
                cells += ["-", "cannot run", "-", "-"]
            else:
                each, ways = limits(self.gpu, kernel.block), self._plans(kernel, comm)
                bound_by = min(each, key=lambda name: each[name])
                cells += [f"{each[bound_by]}", _SHORT.get(bound_by, bound_by)]
                cells += [_drain(_as_it_is(ways)), _in_words(ways[0])]
            add_row(table, *cells)
        return table

    def _plans(self, kernel: ShippedKernel, comm: CommFootprint) -> tuple[Plan, ...]:
        return plans(self.gpu, kernel.block, comm, persistent=kernel.persistent)

    def _taken(self, comm: CommFootprint) -> str:
        if comm.block is None:
            return f"{comm}: no SM"
        block = f"{comm.threads} x {comm.registers}, {comm.smem_bytes:,} B"
        return f"{comm}: {comm.ctas} blocks of {block}, {resident(self.gpu, comm.block)} on an empty SM"


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws blocks on an SM and drain against padding: a panel for each kernel where padding changes either.

    Kernels with the same curves share a panel. Those where nothing changes are named below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[Any, list[str]] = {}
    flat = []
    for kernel in report.kernels:
        if not refusals(report.gpu, kernel.block):
            kib, curves = _curves(report, kernel)
            changes = any(len(set(values)) > 1 for _, values in curves)
            (panels.setdefault((kib, curves), []) if changes else flat).append(kernel.label)
    columns = min(3, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 0.8 + 2.6 * rows), layout="constrained")
    every = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    for axes, ((kib, curves), labels) in zip(every, panels.items(), strict=False):
        for (name, values), style in zip(curves, itertools.cycle(("-", "--", ":", "-.")), strict=False):
            axes.step(kib, values, style, where="post", label=name)
        axes.set_title("\n".join(textwrap.wrap(", ".join(labels), 60)), loc="left", fontsize=8)
        axes.set_xlabel("padding of a block, KiB of shared memory", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelbottom=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper right", fontsize=7)
    figure.suptitle(report.gpu.title, x=0.01, ha="left", fontsize=10)
    if flat:
        said = f"Padding changes nothing for {', '.join(flat)}."
        figure.supxlabel("\n".join(textwrap.wrap(said, 70 * columns)), x=0.01, ha="left", fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def _curves(report: OccupancyReport, kernel: ShippedKernel) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    """Paddings in KiB, and (name, its value at each) of the blocks on an SM and of the drain beside each collective."""
    gpu = report.gpu
    pads = range(0, gpu.smem_per_block_bytes - kernel.smem_bytes + 1, PAD_UNIT_BYTES)
    blocks = [kernel.block.padded(pad) for pad in pads]
    curves = [("blocks per SM", tuple(resident(gpu, block) for block in blocks))]
    for comm in report.footprints:
        if comm.block is not None and not kernel.persistent:
            curves.append((f"drain, {comm}", tuple(drain(gpu, block, comm.block) for block in blocks)))
    return tuple(pad / 1024 for pad in pads), tuple(curves)


def to_json(reports: list[OccupancyReport]) -> str:
    """Reports of several GPUs as text."""
    return json.dumps({"gpus": [report.to_dict() for report in reports]}, indent=2)


def _as_it_is(ways: tuple[Plan, ...]) -> Plan:
    return next(plan for plan in ways if not plan.smem_pad_bytes and not plan.reserved_sms)


def _drain(plan: Plan) -> str:
    return "kernel" if plan.drain is None else f"{plan.drain}"


def _in_words(plan: Plan) -> str:
    if plan.reserved_sms:
        return f"reserve {plan.reserved_sms} SMs"
    if plan.smem_pad_bytes:
        return f"pad {plan.smem_pad_bytes:,}: {plan.blocks_per_sm} per SM, drain {_drain(plan)}"
    return "as it is"
