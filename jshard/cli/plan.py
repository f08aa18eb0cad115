"""`jshard plan MODEL`: what a recipe needs, and with --topology how it compiles for a cluster you do not have."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import counted
from jshard.cli._arguments import (
    Options,
    RecipeArgs,
    Seconds,
    Settings,
    answer,
    check_writable,
    num_devices,
    open_mesh,
    parse,
    remark,
    write,
)
from jshard.cli._request import Request, explained, request_of
from jshard.cluster.choose import Chosen, choose
from jshard.cluster.comparison import Compared, Comparison, VariantCompiler, compare
from jshard.cluster.compile import (
    CompileRequest,
    Variant,
    command_line,
    compile_step,
    flags_of,
    latency_flag,
    train_command,
    unused_flags,
)
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.report import ClusterPlan
from jshard.cluster.strategies import COMPARED, variants_for
from jshard.cluster.suggest import suggestions
from jshard.cluster.topology import Topology, parse_topology, require_compiler, traced_for_device
from jshard.errors import ShardingError
from jshard.inspect.tables import Printed, broken_line
from jshard.recipes.overrides import parse_units
from jshard.recipes.recipe import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(Printed):
    """The result of one command: the requested step, and what it is compared with."""

    plan: ClusterPlan
    commands: tuple[str, str] = ("", "")  # that plan this step again, and that train it
    comparison: Comparison | None = None  # with other strategies
    tried: tuple[Compared, ...] | None = None  # configurations tried to make it fit; the last one does if any does
    chosen: Chosen | None = None  # by a search

    @property
    def fits(self) -> bool:
        """Whether the requested step fits; after a search, whether the chosen one does."""
        return self.plan.fits if self.chosen is None else self.chosen.fits

    def __rich__(self) -> Group:
        parts: list[Any] = [self.plan]
        if self.tried is not None:
            parts += [Text(), Text(self._advice(), style="bold")]
        for more in (self.comparison, self.chosen):
            parts += [] if more is None else [Text(), more]
        return Group(*parts)

    def to_json(self) -> str:
        """Everything as JSON text."""
        whole = dict(zip(("command", "train_command"), self.commands, strict=True)) | self.plan.to_dict()
        if self.tried is not None:
            whole["suggestions"] = [row.to_dict() for row in self.tried if row.fits]
        if self.comparison is not None:
            whole["comparison"] = [row.to_dict() for row in self.comparison.rows]
        if self.chosen is not None:
            whole["chosen"] = self.chosen.to_dict()
        return json.dumps(whole, indent=1)

    def _advice(self) -> str:
        assert self.tried is not None
        found = [row for row in self.tried if row.fits]
        if found:
            row = found[-1]
            assert row.plan is not None
            return f"try this, which compiles and {row.plan.verdict}:\n{broken_line(row.command)}"
        ways = "by the estimate, no configuration that keeps less would fit"
        if self.tried:
            one, many = "configuration that keeps less was", "configurations that keep less were"
            ways = f"{counted(len(self.tried), one, many)} compiled, and none fits"
        return f"{ways}: it needs more devices, or a smaller --set batch_size=N."


_WELL_HIDDEN = 0.95
_QUIET_S = 10.0  # a plan without a cluster takes longer only for large models


@dataclasses.dataclass(frozen=True)
class PlanArgs(RecipeArgs):
    """Reports what training a recipe of a model file needs, without devices or memory for parameters.

    Without --topology: the plan of the annotation and its memory. With it, the train step is compiled for that cluster
    by the compiler of its devices. Two things are printed separately: what was compiled (memory, every collective
    and the computation beside it), and estimates from that (times, as a range over stated assumptions).
    Exit codes: 0 it fits, 1 it does not fit or could not be compiled, 2 invalid request.
    """

    topology: Annotated[str, tyro.conf.arg(metavar="DEVICE:SHAPE")] = ""
    """The cluster: hosts x GPUs (h100:64x8), slices x hosts x GPUs (h100:4x16x8), or a TPU slice (v5p:8x8x8). Devices:
    h100, h200, a100-40, a100-80, b200, gb200, v5e, v5p, v6e, or cloud machine types: a3-high, a3-mega, p4d, p4de, p5,
    dgx-a100, dgx-h100; or a file that describes one, h20.toml:64x8 (docs/planning.md). Needs the extra `plan-gpu` or
    `plan-tpu`."""
    options: Options = "fastest"
    """Compiler options, as in js.compiler_options."""
    assume: Settings = ()
    """Set an assumption of the estimates to a known value: --assume slow_bytes_per_s=25e9, or a range:
    --assume slow_bytes_per_s=10e9..14e9."""
    xla_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """The XLA_FLAGS of the run, for settings that cannot be per-program options; auto gives the scheduler the
    latencies of collectives on this cluster and mesh."""
    compare: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ""
    """Strategies to compile for comparison: replicate, zero1, zero2, zero3, hsdp, hsdp_zero2, hpz, and gspmd, which is
    plain Flax under jax.jit; or all, for replicate,zero2,zero3,hsdp,gspmd."""
    auto: bool = False
    """Search: how to split the devices, what to keep and what to recompute, and the number of microbatches. The best
    by the estimates are compiled, and the fastest that fits is chosen."""
    json: bool = False
    """Print JSON only."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the report with its timeline as one HTML file, and the timeline beside it as *.trace.json. Needs
    --topology."""
    timeout: Seconds = 3600
    """How long the compiler may take."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard plan`."""
    args = parse(PlanArgs, argv, command="jshard plan")
    _check(args)
    request = request_of(args.without_devices())
    if not args.topology:
        mesh = open_mesh(request.sizes, devices=num_devices(request.sizes))
        work = f"planning {args.model}, recipe {request.name}"
        with (
            traced_for_device(None) as assumed,
            at_work(work, say=remark, stream=sys.stderr, quiet_s=_QUIET_S),
        ):
            found = explained(request, mesh)
        answer(found, json=args.json)
        for line in assumed():
            remark(line)
        return 0
    topology = parse_topology(args.topology)
    with traced_for_device(topology.device):  # the compile processes do this themselves
        return _planned(args, request, topology)


def _planned(args: PlanArgs, request: Request, topology: Topology) -> int:
    mesh = open_mesh(request.sizes, devices=topology.num_devices)
    check_batch(request.recipe, mesh)
    cluster = PlannedCluster(topology, parse_known(args.assume))
    costs, sizes = Costs(request.model_file, request.recipe, cluster.machine), dict(mesh.shape)
    variants = _variants(args, costs, sizes, topology)
    require_compiler(topology.device.platform)
    asked = CompileRequest(
        model=str(args.model),
        recipe=args.recipe,
        settings=request.settings,
        mesh=sizes,
        units=parse_units(args.unit),
        topology=topology.text,
        profile=None if args.options == "none" else args.options,
        xla_flags=args.xla_flags,
        unit_bytes=costs.unit_bytes(sizes) if args.xla_flags == "auto" else 0,
    )
    name = f"{args.model.stem}, recipe {request.name}"
    work = f"compiling {args.model}, recipe {request.name}, for {topology.describe()}"
    with at_work(work, say=remark, stream=sys.stderr):
        step = compile_step(asked, timeout_s=args.timeout)
    plan = ClusterPlan.of(step, cluster=cluster, name=name)
    notes = [unused_flags(os.environ), _on_latencies(plan, asked)]
    plan = dataclasses.replace(plan, notes=(*plan.notes, *filter(None, notes)))
    bench = VariantCompiler(cluster=cluster, timeout_s=args.timeout, say=remark, stream=sys.stderr)
    commands = command_line(asked, assume=args.assume), train_command(asked)
    as_asked = Compared(variant=Variant(name="as asked", mesh=sizes), command=commands[0], plan=plan)
    comparison = tried = chosen = None
    try:
        comparison = Comparison(rows=(as_asked, *compare(asked, variants, bench).rows)) if variants else None
        if args.auto:
            chosen = choose(costs, asked, sizes, plan=plan, bench=bench)
        elif not plan.fits:
            tried = suggestions(costs, asked, sizes, peak_bytes=step.memory.peak_bytes, bench=bench)
    except KeyboardInterrupt:  # the results so far are shown
        done = Comparison(rows=(as_asked, *bench.rows)) if bench.rows else None
        answer(PlanReport(plan=plan, comparison=done), json=args.json)
        raise
    report = PlanReport(plan=plan, commands=commands, comparison=comparison, tried=tried, chosen=chosen)
    if args.html is not None:
        rows = [] if comparison is None else [row.plan for row in comparison.ranked if row is not as_asked]
        others = [one for one in rows if one is not None]
        write(args.html, plan.to_html(str(report), others))
        write(args.html.with_suffix(".trace.json"), plan.to_chrome_trace(others))
    answer(report, json=args.json)
    return 0 if report.fits else 1


def _on_latencies(plan: ClusterPlan, asked: CompileRequest) -> str | None:
    """A remark on the flags of the process."""
    flags = flags_of(asked)
    if flags:
        return f"compiled with XLA_FLAGS='{flags}'; a run needs the same in its environment."
    if plan.estimates.stated.hidden >= _WELL_HIDDEN or latency_flag(plan.topology, asked.mesh, 0) is None:
        return None
    return "more may be hidden if the compiler knows how long collectives take on this mesh: --xla-flags auto"


def _variants(args: PlanArgs, costs: Costs, sizes: dict[str, int], topology: Topology) -> tuple[Variant, ...]:
    """The strategies to compare; replicas of the smallest groups of whole hosts that can hold the state."""
    if not args.compare:
        return ()
    names = COMPARED if args.compare == "all" else tuple(name.strip() for name in args.compare.split(","))
    capacity = topology.device.hbm_bytes
    return variants_for(names, sizes, near=topology.fast_group, capacity_bytes=capacity, held_bytes=costs.held_bytes)


def _check(args: PlanArgs) -> None:
    needing = [name for name in ("compare", "auto", "assume", "xla_flags", "html") if getattr(args, name)]
    if needing and not args.topology:
        raise ShardingError(
            "Nothing can be estimated without a cluster.",
            where=", ".join(f"--{name.replace('_', '-')}" for name in needing),
            why="they concern the step compiled for a cluster; nothing is compiled without --topology.",
            do="--topology h100:1x8",
        )
    check_writable(args.html, option="--html")
