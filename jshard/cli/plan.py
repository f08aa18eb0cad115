"""`jshard plan MODEL`: what a recipe needs, and with --topology how it compiles for a cluster you do not have."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group, RenderableType
from rich.text import Text

from jshard._live import at_work
from jshard._text import counted
from jshard.cli._answers import answer_question, check_question
from jshard.cli._arguments import Options, RecipeArgs, Seconds, Settings, parse
from jshard.cli._config import option_of
from jshard.cli._devices import num_devices, open_mesh
from jshard.cli._output import answer, check_writable, remark, write
from jshard.cli._recipe_request import RecipeRequest, explained, recipe_request_of
from jshard.cluster.choose import Chosen, choose
from jshard.cluster.comparison import Compared, Comparison, VariantCompiler, compare
from jshard.cluster.compile import (
    CompileRequest,
    TooLargeError,
    Variant,
    command_line,
    compile_step,
    flags_of,
    latency_flag,
    train_command,
    unused_flags,
)
from jshard.cluster.costs import Costs
from jshard.cluster.layouts import free_axes
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.plan_page import plan_page, plan_trace
from jshard.cluster.report import ClusterPlan
from jshard.cluster.search import search
from jshard.cluster.strategies import COMPARED, variants_for
from jshard.cluster.suggest import suggestions
from jshard.cluster.topology import Topology, parse_topology, require_compiler, traced_for_device
from jshard.errors import ShardingError
from jshard.inspect.tables import Printed, broken_line
from jshard.plans.mesh import AnyMesh
from jshard.recipes.overrides import parse_units
from jshard.recipes.recipe import RecipeError, check_batch


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(Printed):
    """The result of one command: the requested step, and what it is compared with.

    Attributes:
        plan: of the requested step.
        commands: those that plan this step again, and that train it.
        comparison: with other strategies.
        tried: configurations that were compiled to make it fit; the last one fits if any does.
        chosen: by a search.
    """

    plan: ClusterPlan
    commands: tuple[str, str] = ("", "")
    comparison: Comparison | None = None
    tried: tuple[Compared, ...] | None = None
    chosen: Chosen | None = None

    @property
    def fits(self) -> bool:
        """Whether the requested step fits; after a search, whether the chosen one does."""
        return self.plan.fits if self.chosen is None else self.chosen.fits

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [self.plan]
        if self.tried is not None:
            parts += [Text(), Text(_advice(self.tried), style="bold")]
        for part in (self.comparison, self.chosen):
            if part is not None:
                parts += [Text(), part]
        return Group(*parts)

    def to_json(self) -> str:
        """Returns everything as JSON text."""
        command, train = self.commands
        values: dict[str, object] = {"command": command, "train_command": train, **self.plan.to_dict()}
        if self.tried is not None:
            values["suggestions"] = [row.to_dict() for row in self.tried if row.fits]
        if self.comparison is not None:
            values["comparison"] = [row.to_dict() for row in self.comparison.rows]
        if self.chosen is not None:
            values["chosen"] = self.chosen.to_dict()
        return json.dumps(values, indent=1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RefusedReport(Printed):
    """The result of one command whose requested step the compiler refused for its size: what it is compared with.

    Attributes:
        commands: those that plan the requested step again, and that train it.
        comparison: with other strategies.
    """

    commands: tuple[str, str]
    comparison: Comparison

    def __rich__(self) -> Comparison:
        return self.comparison

    def to_json(self) -> str:
        """Returns everything as JSON text."""
        command, train = self.commands
        rows = [row.to_dict() for row in self.comparison.rows]
        return json.dumps({"command": command, "train_command": train, "comparison": rows}, indent=1)


def _advice(tried: Sequence[Compared]) -> str:
    """Returns what to do about a step that does not fit, after some configurations were tried."""
    fitting = [row for row in tried if row.fits]
    if fitting:
        row = fitting[-1]
        assert row.plan is not None
        return f"try this, which compiles and {row.plan.verdict}:\n{broken_line(row.command)}"
    ways = "by the estimate, no configuration that keeps less would fit"
    if tried:
        singular, plural = "configuration that keeps less was", "configurations that keep less were"
        ways = f"{counted(len(tried), singular, plural)} compiled, and none fits"
    return f"{ways}: it needs more devices, or a smaller --set batch_size=N."


_WELL_HIDDEN = 0.95  # share of the communication; beyond it --xla-flags auto gains little
_QUIET_S = 10.0  # a plan without a cluster takes longer only for large models


@dataclasses.dataclass(frozen=True)
class PlanArgs(RecipeArgs):
    """Reports what training a recipe of a model file needs, without devices or memory for parameters.

    Without --topology: the plan of the annotation and its memory. With it, the train step is compiled for that cluster
    by the compiler of its devices. Two things are printed separately: what was compiled (memory, every collective
    and the computation beside it), and estimates from that (times, as a range over stated assumptions).
    With --target or --budget nothing is compiled: estimates answer how large a cluster has to be, or what it trains.
    Exit codes: 0 it fits or is reached, 1 it does not or could not be compiled, 2 invalid request.
    """

    topology: Annotated[str, tyro.conf.arg(metavar="DEVICE:SHAPE")] = ""
    """The cluster: hosts x GPUs (h100:64x8), slices x hosts x GPUs (h100:4x16x8), a TPU slice (v5p:8x8x8), or slices x
    its extents (v5e:2x16x16). Devices: h100, h200, a100-40, a100-80, b200, gb200, mi250x, mi300x, v4, v5e, v5p, v6e,
    tpu7x, or cloud machine types: a3-high, a3-mega, p4d, p4de, p5, dgx-a100, dgx-h100; or a file that describes one,
    h20.toml:64x8 (docs/planning.md). Needs the extra `plan-gpu`, `plan-rocm` or `plan-tpu`."""
    options: Options = "fastest"
    """Compiler options, as in js.compiler_options."""
    assume: Settings = ()
    """Set an assumption of the estimates to a known value: --assume slow_bytes_per_s=25e9, or a range:
    --assume slow_bytes_per_s=10e9..14e9. For a target or a budget also node_mtbf_days, storage_bytes_per_s of a host,
    restart_s, and the run's own stall_s, save_s and load_s, as `jshard ckpt timeline` measures them."""
    xla_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """The XLA_FLAGS of the run, for settings that cannot be per-program options; auto gives the scheduler the
    latencies of collectives on this cluster and mesh."""
    compare: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ""
    """Strategies to compile for comparison: replicate, zero1, zero2, zero3, hsdp, hsdp_zero2, hpz, and gspmd, which is
    plain Flax under jax.jit; or all, for replicate,zero2,zero3,hsdp,gspmd."""
    auto: bool = False
    """Search: how to split the devices over the axes that --mesh does not name, what to keep and what to recompute, and
    the number of microbatches. The best by the estimates are compiled, and the fastest that fits is chosen."""
    target: Annotated[str, tyro.conf.arg(metavar="FIGURE>=NUMBER")] = ""
    """The smallest cluster of --topology's devices, up to its size, that reaches this by the estimates before
    compiling: "tokens/s >= 2e6", "tokens/s/device >= 4000", "step <= 2.5s", "hours <= 12", "days <= 10"."""
    budget: Annotated[str, tyro.conf.arg(metavar="DEVICES:TIME")] = ""
    """How much is trained, by the estimates before compiling: 512xh100:24h, or 24h with --topology."""
    price: Annotated[float | None, tyro.conf.arg(metavar="NUMBER")] = None
    """Of a device for an hour, in any currency: a target's or a budget's answer then has that of tokens."""
    tokens: Annotated[float | None, tyro.conf.arg(metavar="NUMBER")] = None
    """Tokens of the whole run, for a target or a budget; by default those of the recipe's steps."""
    json: bool = False
    """Print JSON only."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the report with its timeline as one HTML file, and the timeline beside it as *.trace.json. Needs
    --topology."""
    timeout: Seconds = 3600
    """How long the compiler may take."""

    @property
    def profile(self) -> str | None:
        """The compiler options, as a request to compile has them."""
        return None if self.options == "none" else self.options


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard plan`."""
    args = parse(PlanArgs, argv, command="jshard plan")
    _check(args)
    request = recipe_request_of(args)
    if args.target or args.budget:
        return answer_question(args, request)
    if not args.topology:
        return _plan_annotation(args, request)
    topology = parse_topology(args.topology)
    with traced_for_device(topology.device):  # the compile processes do this themselves
        return _plan_cluster(args, request, topology)


def _check(args: PlanArgs) -> None:
    for_clusters = [name for name in ("compare", "auto", "assume", "xla_flags", "html") if getattr(args, name)]
    if for_clusters and not args.topology and not args.budget:
        raise ShardingError(
            "Nothing can be estimated without a cluster.",
            where=", ".join(map(option_of, for_clusters)),
            why="they concern the step compiled for a cluster; nothing is compiled without --topology.",
            do="--topology h100:1x8",
        )
    check_question(args)
    check_writable(args.html, option="--html")


def _plan_annotation(args: PlanArgs, request: RecipeRequest) -> int:
    """Prints the plan of the annotation, and its memory; nothing is compiled."""
    mesh = open_mesh(request.sizes, devices=num_devices(request.sizes))
    work = f"planning {args.model}, recipe {request.name}"
    with (
        traced_for_device(None) as assumed,
        at_work(work, say=remark, stream=sys.stderr, quiet_s=_QUIET_S),
    ):
        explanation = explained(request, mesh)
    answer(explanation, json=args.json)
    for line in assumed():  # known once the model is traced
        remark(line)
    return 0


def _plan_cluster(args: PlanArgs, request: RecipeRequest, topology: Topology) -> int:
    """Compiles the step for a cluster, with those to compare; prints the report, and returns 1 if nothing fits."""
    mesh = open_mesh(request.sizes, devices=topology.num_devices)
    cluster = PlannedCluster(topology, parse_known(args.assume))
    costs = Costs(request.model_file, request.recipe, cluster.machine)
    sizes = dict(mesh.shape)
    if args.auto:
        sizes = _first_mesh(request, costs, mesh)
    else:
        # Before the compiler, which takes minutes, and would report it in its own words.
        check_batch(request.recipe, mesh)
    variants = _variants(args, costs, sizes, topology)
    # Only now: an error in the request is reported even where the compiler is not installed.
    require_compiler(topology.device.compiler)
    compile_request = _compile_request(args, request, topology, costs=costs, sizes=sizes)
    commands = (command_line(compile_request, assume=args.assume), train_command(compile_request))
    compiler = VariantCompiler(cluster=cluster, timeout_s=args.timeout, say=remark, stream=sys.stderr)
    try:
        plan = _compiled(args, request, compile_request, cluster)
    except TooLargeError as error:
        if not variants:
            raise
        # Another strategy may fit.
        refused = Compared(variant=_as_asked(sizes), command=commands[0], error=error)
        rows = compare(compile_request, variants, compiler).rows
        answer(RefusedReport(commands=commands, comparison=Comparison(rows=(refused, *rows))), json=args.json)
        return 1
    report = PlanReport(plan=plan, commands=commands)
    try:
        if variants:
            requested = Compared(variant=_as_asked(sizes), command=commands[0], plan=plan)
            rows = compare(compile_request, variants, compiler).rows
            report = dataclasses.replace(report, comparison=Comparison(rows=(requested, *rows)))
        report = _with_choices(args, request, report, costs=costs, compile_request=compile_request, compiler=compiler)
    except KeyboardInterrupt:  # each step took minutes to compile: the results so far are shown
        answer(_interrupted(plan, compiler, sizes, commands), json=args.json)
        raise
    if args.html is not None:
        _write_page(report, args.html)
    answer(report, json=args.json)
    return 0 if report.fits else 1


def _as_asked(sizes: Mapping[str, int]) -> Variant:
    return Variant(name="as asked", mesh=sizes)


def _compile_request(
    args: PlanArgs, request: RecipeRequest, topology: Topology, *, costs: Costs, sizes: Mapping[str, int]
) -> CompileRequest:
    """Returns what is compiled: texts and numbers, no objects, as another process compiles and reads the file again."""
    # The latency of a collective depends on its size; without "auto" no flag is computed from it.
    unit_bytes = costs.unit_bytes(sizes) if args.xla_flags == "auto" else 0
    return CompileRequest(
        model=str(args.model),
        recipe=args.recipe,
        settings=request.settings,
        mesh=sizes,
        units=parse_units(args.unit),
        topology=topology.text,
        profile=args.profile,
        xla_flags=args.xla_flags,
        unit_bytes=unit_bytes,
    )


def _with_choices(
    args: PlanArgs,
    request: RecipeRequest,
    report: PlanReport,
    *,
    costs: Costs,
    compile_request: CompileRequest,
    compiler: VariantCompiler,
) -> PlanReport:
    """Returns a report with what a search has chosen; without a search, with what fits where the request does not."""
    plan = report.plan
    sizes = compile_request.mesh
    if args.auto:
        chosen = choose(costs, compile_request, sizes, free=free_axes(request.sizes), plan=plan, bench=compiler)
        return dataclasses.replace(report, chosen=chosen)
    if plan.fits:
        return report
    peak_bytes = plan.step.memory.peak_bytes
    tried = suggestions(costs, compile_request, sizes, peak_bytes=peak_bytes, bench=compiler)
    return dataclasses.replace(report, tried=tried)


def _interrupted(
    plan: ClusterPlan, compiler: VariantCompiler, sizes: Mapping[str, int], commands: Sequence[str]
) -> PlanReport:
    """Returns the report of what was compiled until the interruption."""
    if not compiler.rows:
        return PlanReport(plan=plan)
    requested = Compared(variant=_as_asked(sizes), command=commands[0], plan=plan)
    return PlanReport(plan=plan, comparison=Comparison(rows=(requested, *compiler.rows)))


def _first_mesh(request: RecipeRequest, costs: Costs, mesh: AnyMesh) -> dict[str, int]:
    """Returns the mesh with which a search begins: the requested one, if the batch divides over it."""
    try:
        check_batch(request.recipe, mesh)
    except RecipeError as error:
        searched = search(costs, dict(mesh.shape), free=free_axes(request.sizes))
        best = next(iter((*searched.ranked, *searched.too_large)), None)
        if best is None:
            raise
        remark(f"{error.what} The search begins with --mesh {best.variant.mesh_text}.")
        return dict(best.variant.mesh)
    return dict(mesh.shape)


def _write_page(report: PlanReport, path: Path) -> None:
    """Writes the report with its timelines as a page, and the timelines beside it for other viewers."""
    compared = [] if report.comparison is None else report.comparison.ranked
    plans: list[ClusterPlan] = []
    for row in compared:
        if row.plan is not None and row.plan is not report.plan:  # which comes first in any case
            plans.append(row.plan)
    write(path, plan_page(report.plan, str(report), plans))
    write(path.with_suffix(".trace.json"), plan_trace(report.plan, plans))


def _variants(args: PlanArgs, costs: Costs, sizes: dict[str, int], topology: Topology) -> tuple[Variant, ...]:
    """Returns the strategies to compare; replicas of the smallest groups of whole hosts that can hold the state."""
    if not args.compare:
        return ()
    names = COMPARED if args.compare == "all" else tuple(name.strip() for name in args.compare.split(","))
    capacity = topology.device.hbm_bytes
    return variants_for(names, sizes, near=topology.fast_group, capacity_bytes=capacity, held_bytes=costs.held_bytes)


def _compiled(
    args: PlanArgs, request: RecipeRequest, compile_request: CompileRequest, cluster: PlannedCluster
) -> ClusterPlan:
    """Compiles the requested step, and returns its plan with notes on the flags of this process."""
    work = f"compiling {args.model}, recipe {request.name}, for {cluster.topology.describe()}"
    with at_work(work, say=remark, stream=sys.stderr):
        step = compile_step(compile_request, timeout_s=args.timeout)
    plan = ClusterPlan.of(step, cluster=cluster, name=f"{args.model.stem}, recipe {request.name}")
    notes = list(plan.notes)
    for note in (unused_flags(os.environ), _flags_note(plan, compile_request)):
        if note:
            notes.append(note)
    return dataclasses.replace(plan, notes=tuple(notes))


def _flags_note(plan: ClusterPlan, compile_request: CompileRequest) -> str | None:
    """Returns a remark on the flags with which the step was compiled, or could be; None if there is nothing to add."""
    flags = flags_of(compile_request)
    if flags:
        return f"compiled with XLA_FLAGS='{flags}'; a run needs the same in its environment."
    if plan.estimates.stated.hidden >= _WELL_HIDDEN:
        return None
    # Only whether there is a flag for this cluster: the bytes do not matter.
    if latency_flag(plan.topology, compile_request.mesh, 0) is None:
        return None
    return "more may be hidden if the compiler knows how long collectives take on this mesh: --xla-flags auto"
