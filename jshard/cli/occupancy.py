"""`jshard occupancy`: how many blocks of a kernel fit on an SM, and whether a collective fits beside them."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.text import Text

from jshard.cli._arguments import Count, parse
from jshard.cli._output import remark
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
from jshard.occupancy.blocks import PAD_UNIT_BYTES, Plan, drain, limits, plans, refusals, resident
from jshard.occupancy.footprints import SHIPPED_SOURCE


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
        print(to_json(reports))
    else:
        _show(reports)
    return 0


def _check(args: OccupancyArgs) -> None:
    """Raises one error for all that is wrong with the options."""
    problems: list[_OptionProblem] = []
    if args.block and args.kernel:
        why = "a kernel is named or given by its numbers, not both."
        problems.append(_OptionProblem("--kernel --block", why, "leave out one of them."))
    if args.plot is not None and not (args.gpu and args.plot.absolute().parent.is_dir()):
        why = "the plot is of one GPU, in an existing folder."
        problems.append(_OptionProblem(f"--plot {args.plot}", why, f"mkdir -p {args.plot.parent}; --gpu h200"))
    unknown = [kind for kind in args.footprint if kind not in FOOTPRINTS]
    if unknown:
        why = f"the footprints are {', '.join(FOOTPRINTS)}."
        problems.append(_OptionProblem(f"--footprint {unknown[0]}", why, "--footprint ring"))
    if problems:
        raise ShardingError(
            "The request cannot be met.",
            where=[problem.where for problem in problems],
            why="\n".join(problem.why for problem in problems),
            do="\n".join(problem.do for problem in problems),
        )


@dataclasses.dataclass(frozen=True)
class _OptionProblem:
    where: str
    why: str
    do: str


def _show(reports: Sequence[OccupancyReport]) -> None:
    parts: list[Text | OccupancyReport] = []
    for report in reports:
        if parts:
            parts.append(Text())
        parts.append(report)
    show(Group(*parts))


# What the options name.


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
        known = list(dict.fromkeys(kernel.name for kernel in SHIPPED))
        families = [name.split("_")[0] for name in known]
        nearest, *_ = [*difflib.get_close_matches(unknown[0], [*known, *families], n=1), known[0]]
        raise OccupancyError(
            "The kernel is not known.",
            where=[f"--kernel {name}" for name in unknown],
            why=f"the kernels are {', '.join(known)}.",
            do=f"--kernel {nearest}  # or any by its numbers: --block 128,90,90176",
        )
    return tuple(kernel for kernel in SHIPPED if any(kernel.is_called(name) for name in names))


# The report.


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
        smem_kib = self.gpu.smem_per_sm_bytes // 1024
        parts: list[Text | FittedTable] = []
        parts.append(Text(f"{self.gpu.title}: {self.gpu.num_sms} SMs of {smem_kib} KiB shared memory"))
        for comm in self.footprints:
            parts += [Text(), self._table(comm)]
        refused: list[str] = []
        for kernel in self.kernels:
            refused += [f"{kernel.label}: {why}" for why in refusals(self.gpu, kernel.block)]
        if refused:
            parts += [Text("\n".join(refused)), Text()]
        parts.append(Text(_LEGEND))
        return Group(*parts)

    def to_dict(self) -> dict[str, object]:
        """Returns the whole report with its sources, as JSON values."""
        # `asdict` copies deeply, which the mapping of sources does not allow.
        facts = dataclasses.asdict(dataclasses.replace(self.gpu, sources={})) | {"sources": dict(self.gpu.sources)}
        return {
            "gpu": facts,
            "footprints": [dataclasses.asdict(footprint) for footprint in self.footprints],
            "kernels": [self._kernel_dict(kernel) for kernel in self.kernels],
        }

    def _kernel_dict(self, kernel: ShippedKernel) -> dict[str, object]:
        values: dict[str, object] = {"kernel": kernel.label, **dataclasses.asdict(kernel)}
        reasons = refusals(self.gpu, kernel.block)
        if reasons:
            return values | {"refusals": reasons}
        beside: dict[str, object] = {}
        for comm in self.footprints:
            ways = self._plans(kernel, comm)
            drained = _unchanged(ways).drain
            beside[str(comm)] = {"drain": drained, "plans": [dataclasses.asdict(plan) for plan in ways]}
        values["blocks_per_sm"] = resident(self.gpu, kernel.block)
        values["limits"] = limits(self.gpu, kernel.block)
        values["beside"] = beside
        return values

    def _table(self, comm: CommFootprint) -> FittedTable:
        columns = ("kernel", "a block>??", "per SM>", "bound by", "drain>", "best by the model")
        table = made_table(f"beside {self._footprint_text(comm)}", *columns)
        for kernel in self.kernels:
            block = f"{kernel.threads} x {kernel.registers}, {kernel.smem_bytes:,} B"
            add_row(table, kernel.label, block, *self._fit_cells(kernel, comm))
        return table

    def _fit_cells(self, kernel: ShippedKernel, comm: CommFootprint) -> list[str]:
        """Returns the last four cells of a row: how the kernel fits on an SM, and beside a collective."""
        if refusals(self.gpu, kernel.block):
            return ["-", "cannot run", "-", "-"]
        blocks_by_limit = limits(self.gpu, kernel.block)
        bound_by = min(blocks_by_limit, key=lambda name: blocks_by_limit[name])
        ways = self._plans(kernel, comm)
        return [
            str(blocks_by_limit[bound_by]),
            _SHORT.get(bound_by, bound_by),
            _drain_text(_unchanged(ways)),
            _plan_text(ways[0]),  # the best comes first
        ]

    def _plans(self, kernel: ShippedKernel, comm: CommFootprint) -> tuple[Plan, ...]:
        return plans(self.gpu, kernel.block, comm, persistent=kernel.persistent)

    def _footprint_text(self, comm: CommFootprint) -> str:
        if comm.block is None:
            return f"{comm}: no SM"
        block = f"{comm.threads} x {comm.registers}, {comm.smem_bytes:,} B"
        return f"{comm}: {comm.ctas} blocks of {block}, {resident(self.gpu, comm.block)} on an empty SM"


def _unchanged(ways: Sequence[Plan]) -> Plan:
    """Returns the plan of the kernel as it is, without padding and without reserved SMs."""
    return next(plan for plan in ways if not plan.smem_pad_bytes and not plan.reserved_sms)


def _drain_text(plan: Plan) -> str:
    return "kernel" if plan.drain is None else str(plan.drain)


def _plan_text(plan: Plan) -> str:
    if plan.reserved_sms:
        return f"reserve {plan.reserved_sms} SMs"
    if plan.smem_pad_bytes:
        return f"pad {plan.smem_pad_bytes:,}: {plan.blocks_per_sm} per SM, drain {_drain_text(plan)}"
    return "as it is"


def to_json(reports: list[OccupancyReport]) -> str:
    """Returns reports of several GPUs as text."""
    return json.dumps({"gpus": [report.to_dict() for report in reports]}, indent=2)


# The plot.


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A figure of a kernel against the padding of its blocks."""

    name: str
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Panel:
    """The curves of a kernel. Hashable: kernels with equal ones share a panel of the plot."""

    paddings_kib: tuple[float, ...]
    curves: tuple[_Curve, ...]

    @property
    def is_flat(self) -> bool:
        """Whether padding changes nothing."""
        return all(len(set(curve.values)) <= 1 for curve in self.curves)


def write_png(report: OccupancyReport, path: Path) -> None:
    """Draws blocks on an SM and drain against padding: a panel for each kernel where padding changes either.

    Kernels with the same curves share a panel. Those where nothing changes are named below.
    """
    # Not pyplot, which would choose a backend for the screen, and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[_Panel, list[str]] = {}
    flat_labels: list[str] = []
    for kernel in report.kernels:
        if refusals(report.gpu, kernel.block):
            continue
        panel = _panel(report, kernel)
        if panel.is_flat:
            flat_labels.append(kernel.label)
        else:
            panels.setdefault(panel, []).append(kernel.label)
    num_columns = min(3, len(panels)) or 1
    num_rows = math.ceil(len(panels) / num_columns) or 1
    figure = Figure(figsize=(4.5 * num_columns, 0.8 + 2.6 * num_rows), layout="constrained")
    subplots = figure.subplots(num_rows, num_columns, sharex=True, squeeze=False).ravel()
    for axes in subplots[len(panels) :]:
        axes.set_axis_off()
    for axes, (panel, labels) in zip(subplots, panels.items(), strict=False):
        _draw(axes, panel, labels)
    figure.suptitle(report.gpu.title, x=0.01, ha="left", fontsize=10)
    if flat_labels:
        caption = f"Padding changes nothing for {', '.join(flat_labels)}."
        figure.supxlabel("\n".join(textwrap.wrap(caption, 70 * num_columns)), x=0.01, ha="left", fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw(axes: Any, panel: _Panel, labels: Sequence[str]) -> None:
    """Draws a panel into axes of matplotlib, with the names of its kernels above."""
    styles = itertools.cycle(("-", "--", ":", "-."))
    for curve, style in zip(panel.curves, styles, strict=False):
        axes.step(panel.paddings_kib, curve.values, style, where="post", label=curve.name)
    axes.set_title("\n".join(textwrap.wrap(", ".join(labels), 60)), loc="left", fontsize=8)
    axes.set_xlabel("padding of a block, KiB of shared memory", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", fontsize=7)


def _panel(report: OccupancyReport, kernel: ShippedKernel) -> _Panel:
    """Returns the blocks on an SM, and the drain beside each collective, for all paddings of a kernel's blocks."""
    gpu = report.gpu
    paddings = range(0, gpu.smem_per_block_bytes - kernel.smem_bytes + 1, PAD_UNIT_BYTES)
    blocks = [kernel.block.padded(padding) for padding in paddings]
    curves = [_Curve("blocks per SM", tuple(resident(gpu, block) for block in blocks))]
    for comm in report.footprints:
        # A collective without blocks waits for none, and beside a persistent kernel it waits for all, at any padding.
        if comm.block is not None and not kernel.persistent:
            drains = tuple(drain(gpu, block, comm.block) for block in blocks)
            curves.append(_Curve(f"drain, {comm}", drains))
    return _Panel(tuple(padding / 1024 for padding in paddings), tuple(curves))
