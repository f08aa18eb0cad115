"""`jshard plan MODEL`: what a recipe needs, and with --topology how it compiles for a cluster that is not there."""

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
from jshard.cli._arguments import (
    RecipeArgs,
    Seconds,
    Settings,
    answer,
    check_writable,
    num_devices,
    parse,
    remark,
)
from jshard.cli._devices import open_mesh
from jshard.cli._request import Request, check_profile_name, explained, request_of
from jshard.cluster.compile import (
    COMPARED,
    CompileRequest,
    Variant,
    compile_step,
    flags_of,
    latency_flag,
    unused_flags,
    variants_for,
)
from jshard.cluster.costs import Costs
from jshard.cluster.estimate import PlannedCluster, parse_known
from jshard.cluster.report import ClusterPlan, Compared, Comparison, VariantCompiler, compare
from jshard.cluster.search import Chosen, choose, suggestions
from jshard.cluster.topology import Topology, parse_topology, require_compiler, traced_for_device
from jshard.errors import ShardingError
from jshard.inspect.tables import Printed, broken_line
from jshard.plans.mesh import AnyMesh
from jshard.recipes.overrides import parse_units
from jshard.recipes.recipe import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(Printed):
    """The answer to one command.

    Attributes:
        plan: the step that was asked for.
        comparison: strategies beside it.
        tried: ways to make it fit, the last of which does if any does; None if none was needed.
        chosen: the outcome of a search.
    """

    plan: ClusterPlan
    comparison: Comparison | None = None
    tried: tuple[Compared, ...] | None = None
    chosen: Chosen | None = None

    @property
    def fits(self) -> bool:
        """Whether the step asked for fits; after a search, whether the chosen one does."""
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
        whole = self.plan.to_dict()
        if self.tried is not None:
            whole["suggestions"] = [row.to_dict() for row in self.tried if row.fits]
        if self.comparison is not None:
            whole["comparison"] = [row.to_dict() for row in self.comparison.rows]
        if self.chosen is not None:
            whole["chosen"] = self.chosen.to_dict()
        return json.dumps(whole, indent=1)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        return self.plan.to_html(str(self))

    def _advice(self) -> str:
        assert self.tried is not None
        found = [row for row in self.tried if row.fits]
        if found:
            row = found[-1]
            assert row.plan is not None
            return f"try, as it compiles and {row.plan.verdict}:\n{broken_line(row.command)}"
        ways = f"{len(self.tried)} ways that hold less were compiled, and none fits"
        ways = ways if self.tried else "no way to compute or to keep less would fit, by the estimate"
        return f"{ways}: it needs more devices, or a smaller --set batch_size=N."


# `jshard plan MODEL`: what a recipe needs, and with --topology how it compiles for a cluster that is not here.

_WELL_HIDDEN = 0.95


@dataclasses.dataclass(frozen=True)
class PlanArgs(RecipeArgs):
    """Says what training a recipe of a model file needs: without a device, and without memory for parameters.

    Without --topology: the plan of the annotation and its memory. With it the train step is compiled for that cluster
    by the compiler of its devices, and it prints two things, never mixed: what was compiled (memory, every collective
    and what is computed beside it), and what is estimated from that (times, as a range over stated assumptions).
    Exit codes: 0 it fits, 1 it does not fit or could not be compiled, 2 the request was wrong.
    """

    topology: Annotated[str, tyro.conf.arg(metavar="DEVICE:SHAPE")] = ""
    """The cluster: hosts x GPUs (h100:64x8), slices x hosts x GPUs (h100:4x16x8), or a TPU slice (v5p:8x8x8). Devices:
    h100, h200, a100-40, a100-80, b200, gb200, v5e, v5p, v6e, or as clouds rent them: a3-high, a3-mega, p4d, p4de, p5,
    dgx-a100, dgx-h100. Needs the extra `plan-gpu` or `plan-tpu`."""
    options: Annotated[str, tyro.conf.arg(metavar="PROFILE")] = "fastest"
    """Options of the compiler, as of js.compiler_options: fastest, memory, or none."""
    assume: Settings = ()
    """What is known of the cluster, for the estimates: --assume slow_bytes_per_s=25e9, or a range:
    --assume slow_bytes_per_s=10e9..14e9."""
    xla_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """What a run would have in XLA_FLAGS, for what no option of one program can say; auto says to the scheduler how
    long collectives take on this cluster and mesh."""
    compare: Annotated[str, tyro.conf.arg(metavar="NAME,...")] = ""
    """Strategies to compile beside it: replicate, zero1, zero2, zero3, hsdp, hsdp_zero2, hpz, and gspmd, which is plain
    Flax under jax.jit; or all, for replicate,zero2,zero3,hsdp,gspmd."""
    auto: bool = False
    """Search: how to split the devices, what to keep and what to compute again, in how many microbatches. The best by
    the estimates are compiled, and the quickest that fits is chosen."""
    json: bool = False
    """Print JSON and nothing else."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the report with its timeline into one file, too, and the timeline beside it as *.trace.json. Needs
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
        with traced_for_device(None) as assumed:
            found = explained(request, mesh)
        answer(found, json=args.json)
        for line in assumed():
            remark(line)
        return 0
    topology = parse_topology(args.topology)
    with traced_for_device(topology.device):  # the processes that compile do so for themselves
        return _planned(args, request, topology)


def _planned(args: PlanArgs, request: Request, topology: Topology) -> int:
    mesh = open_mesh(request.sizes, devices=topology.num_devices)
    check_batch(request.recipe, mesh)
    known = parse_known(args.assume)
    variants = _variants(args, request, mesh, topology)
    require_compiler(topology.device.platform)
    job = _PlanJob(args, request, PlannedCluster(topology, known), dict(mesh.shape))
    try:
        report = job.report(variants)
    except KeyboardInterrupt:
        if (done := job.done()) is not None:
            answer(done, json=args.json)
        raise
    if args.html is not None:
        _write(args.html, report.to_html())
        _write(args.html.with_suffix(".trace.json"), report.plan.to_chrome_trace())
    answer(report, json=args.json)
    return 0 if report.fits else 1


class _PlanJob:
    """What is compiled for one command, and what is made of it."""

    def __init__(self, args: PlanArgs, request: Request, cluster: PlannedCluster, mesh: dict[str, int]) -> None:
        self._args, self._request, self._cluster, self._mesh = args, request, cluster, mesh
        self._costs = Costs(request.model_file, request.recipe, cluster.machine)
        self._asked = CompileRequest(
            model=str(args.model),
            recipe=args.recipe,
            settings=args.set,
            mesh=mesh,
            units=parse_units(args.unit),
            topology=cluster.topology.text,
            profile=None if args.options == "none" else args.options,
            xla_flags=args.xla_flags,
            unit_bytes=self._costs.unit_bytes(mesh) if args.xla_flags == "auto" else 0,
        )
        self._bench = VariantCompiler(cluster=cluster, timeout_s=args.timeout, say=remark, stream=sys.stderr)
        self._plan: ClusterPlan | None = None

    def report(self, variants: tuple[Variant, ...]) -> PlanReport:
        """Compiles what was asked for, then what is printed beside it."""
        args, bench = self._args, self._bench
        what = f"compiling {args.model}, recipe {self._request.name}, for {self._cluster.topology.describe()}"
        with at_work(what, say=remark, stream=sys.stderr):
            step = compile_step(self._asked, timeout_s=args.timeout)
        plan = ClusterPlan.of(step, cluster=self._cluster, name=f"{args.model.stem}, recipe {self._request.name}")
        notes = [unused_flags(os.environ), *_on_latencies(plan, self._asked)]
        plan = dataclasses.replace(plan, notes=(*plan.notes, *filter(None, notes)))
        self._plan = plan
        comparison = compare(self._asked, variants, bench) if variants else None
        tried = chosen = None
        if args.auto:
            chosen = choose(self._costs, self._asked, self._mesh, plan=plan, bench=bench)
        elif not plan.fits:
            peak_bytes = step.memory.peak_bytes
            tried = suggestions(self._costs, self._asked, self._mesh, peak_bytes=peak_bytes, bench=bench)
        return PlanReport(plan=plan, comparison=comparison, tried=tried, chosen=chosen)

    def done(self) -> PlanReport | None:
        """What is compiled of a command that was interrupted; None if nothing is."""
        if self._plan is None:
            return None
        rows = tuple(self._bench.rows)
        return PlanReport(plan=self._plan, comparison=Comparison(rows=rows) if rows else None)


def _on_latencies(plan: ClusterPlan, asked: CompileRequest) -> list[str]:
    """What to say of the flags of the process."""
    flags = flags_of(asked)
    if flags:
        return [f"compiled with XLA_FLAGS='{flags}', which a run needs in its environment, too."]
    if plan.estimates.stated.hidden >= _WELL_HIDDEN or latency_flag(plan.topology, asked.mesh, 0) is None:
        return []
    return ["more may be hidden if the compiler knew how long collectives take on this mesh: --xla-flags auto"]


def _variants(args: PlanArgs, request: Request, mesh: AnyMesh, topology: Topology) -> tuple[Variant, ...]:
    """The strategies to compare; replicas of the smallest groups of whole hosts that can hold the state."""
    if not args.compare:
        return ()
    names = COMPARED if args.compare == "all" else tuple(name.strip() for name in args.compare.split(","))
    costs = Costs(request.model_file, request.recipe, PlannedCluster(topology).machine)
    return variants_for(
        names,
        dict(mesh.shape),
        near=topology.fast_group,
        capacity_bytes=topology.device.hbm_bytes,
        held_bytes=costs.held_bytes,
    )


def _check(args: PlanArgs) -> None:
    check_profile_name(args.options)
    needing = [name for name in ("compare", "auto", "assume", "xla_flags") if getattr(args, name)]
    if needing and not args.topology:
        raise ShardingError(
            "There is nothing to estimate without a cluster.",
            where=", ".join(f"--{name.replace('_', '-')}" for name in needing),
            why="strategies are compared as they compile for a cluster; nothing is compiled without --topology.",
            do="--topology h100:1x8",
        )
    if args.html is not None and not args.topology:
        raise ShardingError(
            "There is no timeline without a cluster.",
            where=f"--html {args.html}",
            why="it shows a compiled step; nothing is compiled without --topology.",
            do="--topology h100:1x8",
        )
    check_writable(args.html, option="--html")


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    remark(f"written: {path}")
