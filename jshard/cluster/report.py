"""The report of `jshard plan --topology`, for one configuration or for several that are compiled and compared."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration, human_bytes, three_digits
from jshard.cluster.compile import CompiledStep, CompileRequest, Variant, command_line, compile_step
from jshard.cluster.estimate import Estimate, EstimateRange, PlannedCluster
from jshard.cluster.replay import WORKS, Assumptions, Replay, Span
from jshard.cluster.topology import Topology
from jshard.errors import FourPartError
from jshard.inspect.audit import Audit, audit
from jshard.inspect.communication import traffic_of
from jshard.inspect.hlo import Schedule, Window
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.inspect.timelines import Bar, chrome_trace, html_page, phase_bars

_BACKWARD_TIP = ", backward"


def timeline(schedule: Schedule, assumptions: Assumptions) -> list[Bar]:
    """The computing and the communicating stream of one step, as bars to draw.

    A loop is drawn as one steady round, labelled with the number of rounds. Lengths are to scale within and between
    parts, but the picture is shorter than the step.
    """
    replay = Replay(schedule, assumptions)
    bars = []
    begin_s = 0.0
    for segment in replay.segments:
        end_s = begin_s + segment.end_s - segment.begin_s
        if segment.rounds > 1:
            label = f"x {segment.rounds}"
            name = f"{segment.loop}: {label} {duration(end_s - begin_s)}"
            bars.append(Bar("loops", begin_s, end_s, "loop", label, name))
        moved_s = begin_s - segment.begin_s
        for span in replay.spans:
            first_s, last_s = max(span.begin_s, segment.begin_s), min(span.end_s, segment.end_s)
            if last_s > first_s:
                bars.append(_bar(span, schedule.windows, first_s + moved_s, last_s + moved_s))
        begin_s = end_s
    turn_s = min((bar.begin_s for bar in bars if bar.tip.endswith(_BACKWARD_TIP)), default=0.0)
    return [*phase_bars(turn_s, begin_s), *bars]


def _bar(span: Span, windows: Sequence[Window], begin_s: float, end_s: float) -> Bar:
    took = duration(span.end_s - span.begin_s)
    if span.window is None:
        return Bar("computation", begin_s, end_s, span.lane, "", f"{span.name}: {took}")
    window = windows[span.window]
    size = f"{window.full_bytes / 2**20:.1f} MiB over {len(window.group)}"
    unit = window.unit or ""
    what = f"{window.kind} {unit} ({size}): {took}{_BACKWARD_TIP * (window.phase == 'backward')}"
    if span.lane == "exposed":
        return Bar("computation", begin_s, end_s, "exposed", "", f"waits for {what}")
    return Bar("communication", begin_s, end_s, window.kind, unit, what)


# One step.

_ESTIMATE = "Estimate: a replay of the compiled schedule under assumptions, not a measurement"
_CLOSE, _HALF = 0.85, 0.5  # shares of the memory, and of the communication
_PREALLOCATED = 0.75  # share of a GPU's memory that JAX allocates at startup by default


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ClusterPlan(Printed):
    """A train step as compiled for a cluster, and its estimated time there."""

    name: str
    cluster: PlannedCluster
    step: CompiledStep
    audit: Audit
    estimates: EstimateRange
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: CompiledStep, *, cluster: PlannedCluster, name: str) -> ClusterPlan:
        """Reads a compiled step, and replays it under the assumptions about the cluster."""
        found = audit(step.text, plan=step.plan, memory=step.memory, accumulate=step.accumulate)
        estimates = cluster.estimate(found.schedule)
        return cls(name=name, cluster=cluster, step=step, audit=found, estimates=estimates, notes=step.notes)

    @property
    def topology(self) -> Topology:
        """The mesh of the cluster."""
        return self.cluster.topology

    @property
    def fits(self) -> bool:
        """Whether the compiled peak fits into a device's memory."""
        return self.step.memory.peak_bytes <= self.topology.device.hbm_bytes

    @property
    def verdict(self) -> str:
        """The peak compared with a device's memory, as text."""
        peak, capacity = self.step.memory.peak_bytes / 2**30, self.topology.device.hbm_bytes / 2**30
        return f"{'fits' if self.fits else 'does not fit'}: {peak:.1f} GiB of {capacity:.1f}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """A line on what the estimates leave out: the replay does not model copies between device and host."""
        away, rate = self.step.memory.host_bytes, self.cluster.assumptions.host_bytes_per_s
        if not away:
            return ()
        once = f"; moving that once takes {duration(away / rate)} at {rate / 1e9:g} GB/s" if rate else ""
        return (f"not in the estimate: copies to and from the host, where {human_bytes(away)} are{once}",)

    def mfu(self, estimate: Estimate) -> float:
        """MFU: the model's arithmetic as a share of the peak, for the time of an estimate."""
        return self._flops_per_s(estimate) / self.topology.device.flops_per_s["bf16"]

    def hfu(self, estimate: Estimate) -> float:
        """HFU: the same for the arithmetic of the compiled step, including recomputation."""
        return estimate.flops / estimate.step_s / self.topology.device.flops_per_s["bf16"]

    def _flops_per_s(self, estimate: Estimate) -> float:
        """The model's arithmetic per device and second."""
        return self.step.flops / estimate.step_s / self.topology.num_devices

    def __rich__(self) -> Group:
        parts: list[Any] = [Text(self._headline()), Text(), Text(self._compiled_title(), style="bold")]
        parts += [self.audit, Text(), Text(self.verdict, style="bold" if self.fits else "bold red")]
        parts += [*map(Text, self._memory_notes()), Text(), Text(_ESTIMATE, style="bold")]
        parts += [self._estimate_table(), Text(self._assumed()), *map(Text, (*self.left_out, *self.notes))]
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON, with compiled and estimated figures separate."""
        step, device = self.step, self.topology.device
        compiled = {
            "fits": self.fits,
            "capacity_bytes": device.hbm_bytes,
            "options": dict(step.options),
            "versions": dict(step.versions),
            "seconds": {"trace": step.trace_s, "compile": step.compile_s, "cpu": step.cpu_s},
            "compiler_rss_bytes": step.rss_bytes,
            "audit": json.loads(self.audit.to_json()),
        }
        return {
            "name": self.name,
            "topology": self.topology.text,
            "platform": device.platform,
            "device": device.title,
            "devices": self.topology.num_devices,
            "batch_size": step.batch_size,
            "sequence_length": step.sequence_length,
            "accumulate": step.accumulate,
            "mesh": dict(step.plan.mesh),
            "communication_per_step": [dataclasses.asdict(one) for one in traffic_of(step.plan)],
            "compiled": compiled,
            "estimate": self._estimates_json(),
            "sources": dict(device.sources),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }

    def to_html(self, report: str, others: Sequence[ClusterPlan] = ()) -> str:
        """A self-contained page: a report and the timeline of the step, with those of others below."""
        assumed = self.estimates.stated.assumptions
        subtitle = f"The timeline is an estimate; nothing was run. A loop is drawn as one round. {assumed}"
        return html_page(f"{self.name} on {self.topology.text}", subtitle, self._bars(others), report)

    def to_chrome_trace(self, others: Sequence[ClusterPlan] = ()) -> str:
        """The same timelines, as JSON for https://ui.perfetto.dev."""
        return chrome_trace(self._bars(others))

    def _bars(self, others: Sequence[ClusterPlan] = ()) -> list[Bar]:
        if not others:
            return timeline(self.audit.schedule, self.estimates.stated.assumptions)
        named = {"as asked": self, **{one.name: one for one in others}}
        return [
            dataclasses.replace(bar, lane=f"{name}: {bar.lane}") for name, one in named.items() for bar in one._bars()
        ]

    def _estimates_json(self) -> dict[str, Any]:
        found = self.estimates
        named = {"low": found.fastest, "stated": found.stated, "high": found.slowest}
        cases = {name: case.to_dict() | self._rates(case) for name, case in named.items()}
        return cases | {"flops_per_step": self.step.flops, "flops_formula": self.step.flops_formula}

    def _rates(self, estimate: Estimate) -> dict[str, float]:
        """Published figures of runs."""
        per_s = self.step.batch_size * self.step.sequence_length / estimate.step_s
        return {
            "mfu": self.mfu(estimate),
            "hfu": self.hfu(estimate),
            "model_flops_per_s_per_device": self._flops_per_s(estimate),
            "tokens_per_s": per_s,
            "tokens_per_s_per_device": per_s / self.topology.num_devices,
        }

    def _headline(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.step.plan.mesh)
        options = ", ".join(f"{name}={value}" for name, value in self.step.options.items()) or "none"
        lines = f"{self.name} on {self.topology.describe()} ({axes})", f"options of the compiler: {options}"
        return "\n".join(lines)

    def _compiled_title(self) -> str:
        step, jax = self.step, self.step.versions.get("jax")
        return (
            f"Compiled: facts, nothing was run (jax {jax}; traced in {step.trace_s:.0f} s, "
            f"compiled in {step.compile_s:.0f} s, {step.rss_bytes / 2**30:.1f} GiB)"
        )

    def _memory_notes(self) -> list[str]:
        device, peak = self.topology.device, self.step.memory.peak_bytes
        if device.platform != "gpu" or not self.fits:
            return []
        lines = ["NCCL, CUDA and fragmentation need more: leave several GiB free."]
        if peak > _PREALLOCATED * device.hbm_bytes:
            lines.append("JAX uses three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION=.95 is set.")
        hidden = self.estimates.stated.hidden
        if peak > _CLOSE * device.hbm_bytes and hidden < _HALF:
            more = f"--set accumulate={2 * self.step.accumulate}"
            lines.append(
                f"This close to the limit, the compiler overlaps less: {hidden:.0%} of the communication is hidden."
                f" --unit remat=full, or {more}, frees memory."
            )
        return lines

    def _estimate_table(self) -> FittedTable:
        found = self.estimates
        table = made_table("", "", "from>", "to>", "stated>")
        rows: tuple[tuple[str, Callable[[Estimate], float], Callable[[float], str]], ...] = (
            ("step", lambda e: e.step_s, duration),
            *((f"  {work}", lambda e, work=work: e.split_s[work], duration) for work in WORKS),
            ("  communication not hidden", lambda e: e.exposed_s, duration),
            ("communication hidden", lambda e: e.hidden, "{:.1%}".format),
            ("communication in loops hidden", lambda e: e.hidden_in_loops, "{:.1%}".format),
            ("TFLOP/s per device (the model's)", lambda e: self._flops_per_s(e) / 1e12, three_digits),
            ("MFU, of dense bf16", self.mfu, "{:.1%}".format),
            ("HFU, with recomputation", self.hfu, "{:.1%}".format),
        )
        for name, value, written in rows:
            if "loops" in name and not self.audit.schedule.in_loops:
                continue
            values = sorted(value(case) for case in found.cases)
            add_row(table, name, written(values[0]), written(values[-1]), written(value(found.stated)))
        return table

    def _assumed(self) -> str:
        percent = lambda text: lambda ends: text.format(f"{ends[0]:.0%} to {ends[1]:.0%}")
        rate = lambda text: lambda ends: text.format(f"{ends[0] / 1e9:g} to {ends[1] / 1e9:g}")
        words = {
            "slow_bytes_per_s": rate("adapters at {} GB/s"),
            "fast_bytes_per_s": rate("fast links at {} GB/s"),
            "matmul_efficiency": percent("matrix products at {} of their peak"),
            "attention_efficiency": percent("attention at {}"),
            "contention": percent("computation {} longer beside a collective"),
            "straggling": percent("{} longer on the slowest device"),
        }
        other = lambda name: lambda ends: f"{name} {ends[0]:g} to {ends[1]:g}"
        varied = [words.get(name, other(name))(ends) for name, ends in self.cluster.ranges.items()]
        lines = (
            f"stated: {self.cluster.assumptions}",
            f"from, to: {', '.join(varied) or 'the same, as all assumptions are known'}",
            f"flops of a step: {self.step.flops_formula}",
        )
        return "\n".join(lines)


# Several configurations of a recipe on one cluster, compiled side by side.

_COLUMNS = "", "mesh??", "GiB>", "fits", "AG>", "RS>?", "AR>?", "loops>", "est. step>", "hidden>", "MFU>"
_CAPTION = (
    "Compiled: peak GiB; AG, RS, AR: elements of all-gathers, reduce-scatters, all-reduces relative to the number of"
    " parameters; loops: collectives in loops that overlap matrix products. Estimated: step, hidden, MFU, as stated,"
    " and below it the range of the assumptions above; the fastest is first and marked *. Configurations that do not"
    " fit have no estimate, as the compiler then trades speed for memory."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A configuration and its result."""

    variant: Variant
    command: str  # the command line for it, if there is one
    plan: ClusterPlan | None = None  # None if it was not compiled
    error: FourPartError | None = None  # the reason, in that case

    @property
    def fits(self) -> bool:
        """Whether it compiles and fits into a device's memory."""
        return self.plan is not None and self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """Its figures, with compiled and estimated ones separate."""
        given = {"name": self.variant.name, "mesh": dict(self.variant.mesh), "command": self.command or None}
        if self.plan is None:
            return given | {"error": str(self.error)}
        return self.plan.to_dict() | given


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Printed):
    """Configurations side by side."""

    rows: tuple[Compared, ...]

    @property
    def ranked(self) -> list[Compared]:
        """Those that fit first, fastest first."""
        return sorted(self.rows, key=_rank)

    def __rich__(self) -> Group:
        table = made_table("Side by side", *_COLUMNS, caption=_CAPTION)
        for row in self.ranked:
            _add(table, row, is_quickest=row is self.ranked[0] and row.fits)
        failed = [f"{row.variant.name}: {row.error}" for row in self.rows if row.error is not None]
        return Group(table, *map(Text, failed))


def compare(asked: CompileRequest, variants: Sequence[Variant], bench: VariantCompiler) -> Comparison:
    """Compiles configurations of a recipe, one after another."""
    count = len(variants)
    return Comparison(rows=tuple(bench.compiled(asked, v, f"{i} of {count}") for i, v in enumerate(variants, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantCompiler:
    """Compiles configurations, shows progress, and keeps the results."""

    cluster: PlannedCluster
    timeout_s: float = 3600  # for each configuration
    say: Callable[[str], object] = lambda line: None  # prints a line
    stream: TextIO | None = None  # for progress; see `at_work`
    rows: list[Compared] = dataclasses.field(default_factory=list)  # results so far, also after an interrupt

    def compiled(self, asked: CompileRequest, variant: Variant, place: str) -> Compared:
        """Compiles one configuration."""
        request = variant.of(asked)
        found = Compared(variant=variant, command=command_line(request, assume=self.cluster.assume))
        with at_work(f"[{place}] {variant.name}: {variant.command}", say=self.say, stream=self.stream) as work:
            try:
                step = compile_step(request, timeout_s=self.timeout_s)
                plan = ClusterPlan.of(step, cluster=self.cluster, name=variant.name)
                found, work.result = dataclasses.replace(found, plan=plan), plan.verdict
            except FourPartError as error:
                found, work.result = dataclasses.replace(found, error=error), "does not compile"
        self.rows.append(found)
        return found


def _rank(row: Compared) -> tuple[bool, bool, float]:
    """Those that fit first, fastest first by the stated estimate; those not compiled last."""
    if row.plan is None:
        return True, True, 0.0
    return False, not row.fits, row.plan.estimates.stated.step_s if row.fits else 0.0


def _add(table: FittedTable, row: Compared, *, is_quickest: bool) -> None:
    mesh = [f"{axis}={n}" for axis, n in row.variant.mesh.items() if n > 1]
    if row.plan is None:
        add_row(table, row.variant.name, mesh, *["-"] * (len(_COLUMNS) - 2))
        return
    plan, audit = row.plan, row.plan.audit
    loops = audit.schedule.in_loops
    amounts = [f"{audit.amount(kind):.2f}" for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    add_row(
        table,
        row.variant.name + "*" * is_quickest,
        mesh,
        three_digits(plan.step.memory.peak_bytes / 2**30),
        "yes" if plan.fits else "no",
        *amounts,
        f"{len(loops) - len(audit.not_overlapped())}/{len(loops)}" if loops else "-",
        *(_estimates(plan) if plan.fits else "---"),
    )


def _estimates(plan: ClusterPlan) -> tuple[list[str], list[str], str]:
    found = plan.estimates
    step, hidden = (
        _with_range(text(getattr(found.stated, name)), *map(text, found.span(name)))
        for name, text in (("step_s", duration), ("hidden", "{:.1%}".format))
    )
    return step, hidden, f"{plan.mfu(found.stated):.1%}"


def _with_range(stated: str, low: str, high: str) -> list[str]:
    number, unit = re.fullmatch(r"([\d.-]+)(.*)", low).groups()  # type: ignore[union-attr]
    return [stated, f"{number if high.endswith(unit) else low}-{high}"]
