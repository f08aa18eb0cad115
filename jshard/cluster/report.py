"""The report of `jshard plan --topology` for one configuration, and the timeline of its step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import duration, human_bytes, three_digits
from jshard._types import Json
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.compile import CompiledStep
from jshard.cluster.estimate import Estimate, EstimateRange
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.replay import WORKS, Replay, Segment, Span
from jshard.cluster.topology import Topology
from jshard.inspect.audit import Audit, audit
from jshard.inspect.communication import traffic_of
from jshard.inspect.hlo import Schedule, Window
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.inspect.timelines import Bar, chrome_trace, html_page, phase_bars

# ---- the timeline

_BACKWARD_TIP = ", backward"


def timeline(schedule: Schedule, assumptions: Assumptions) -> list[Bar]:
    """Returns the computing and the communicating stream of one step, as bars to draw.

    A loop is drawn as one steady round, labelled with the number of rounds. Lengths are to scale within and between
    parts, but the picture is shorter than the step.
    """
    replay = Replay(schedule, assumptions)
    bars = []
    begin_s = 0.0  # of the segment, in the picture
    for segment in replay.segments:
        bars += _segment_bars(segment, replay.spans, schedule.windows, begin_s)
        begin_s += segment.end_s - segment.begin_s
    # Forward ends where the first collective of backward begins.
    backward_begins_s = [bar.begin_s for bar in bars if bar.tip.endswith(_BACKWARD_TIP)]
    turn_s = min(backward_begins_s, default=0.0)
    return [*phase_bars(turn_s, begin_s), *bars]


def _segment_bars(segment: Segment, spans: Sequence[Span], windows: Sequence[Window], begin_s: float) -> list[Bar]:
    """Returns the bars of a segment that begins at a time in the picture."""
    bars = []
    if segment.rounds > 1:
        end_s = begin_s + segment.end_s - segment.begin_s
        label = f"x {segment.rounds}"
        tip = f"{segment.loop}: {label} {duration(end_s - begin_s)}"
        bars.append(Bar("loops", begin_s, end_s, "loop", label, tip))
    shift_s = begin_s - segment.begin_s
    for span in spans:
        # Cut to the segment: a collective may be in flight at both of its ends.
        first_s = max(span.begin_s, segment.begin_s)
        last_s = min(span.end_s, segment.end_s)
        if last_s > first_s:
            bars.append(_bar(span, windows, first_s + shift_s, last_s + shift_s))
    return bars


def _bar(span: Span, windows: Sequence[Window], begin_s: float, end_s: float) -> Bar:
    """Returns the bar of an operation; its tip has the whole time, also if the bar is a part of it."""
    took = duration(span.end_s - span.begin_s)
    if span.window is None:
        return Bar("computation", begin_s, end_s, span.lane, "", f"{span.name}: {took}")
    window = windows[span.window]
    unit = window.unit or ""
    size = f"{window.full_bytes / 2**20:.1f} MiB over {len(window.group)}"
    tip = f"{window.kind} {unit} ({size}): {took}"
    if window.phase == "backward":
        tip += _BACKWARD_TIP
    if span.lane == "exposed":
        return Bar("computation", begin_s, end_s, "exposed", "", f"waits for {tip}")
    return Bar("communication", begin_s, end_s, window.kind, unit, tip)


# ---- one step

_ESTIMATE = "Estimate: a replay of the compiled schedule under assumptions, not a measurement"
_NO_SOURCE = "; no source for the speed of its matrix products: bounds only"
_PREALLOCATED = 0.75  # share of a GPU's memory that JAX allocates at startup by default
# Above the one share of the memory and below the other of the communication, a line says that both are related.
_CLOSE_TO_LIMIT = 0.85
_LITTLE_HIDDEN = 0.5


@dataclasses.dataclass(frozen=True)
class _RangeText:
    """How the range of an assumption is written."""

    form: str  # with {} for the range
    is_percent: bool  # or a rate

    def written(self, low: float, high: float) -> str:
        if self.is_percent:
            return self.form.format(f"{low:.0%} to {high:.0%}")
        return self.form.format(f"{low / 1e9:g} to {high / 1e9:g}")


_RANGE_TEXTS = {
    "slow_bytes_per_s": _RangeText("adapters at {} GB/s", is_percent=False),
    "fast_bytes_per_s": _RangeText("fast links at {} GB/s", is_percent=False),
    "matmul_efficiency": _RangeText("matrix products at {} of their peak", is_percent=True),
    "attention_efficiency": _RangeText("attention at {}", is_percent=True),
    "contention": _RangeText("computation {} longer beside a collective", is_percent=True),
    "straggling": _RangeText("{} longer on the slowest device", is_percent=True),
}


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
        audited = audit(step.text, plan=step.plan, memory=step.memory, accumulate=step.accumulate)
        estimates = cluster.estimate(audited.schedule)
        return cls(name=name, cluster=cluster, step=step, audit=audited, estimates=estimates, notes=step.notes)

    @property
    def topology(self) -> Topology:
        """Returns the devices of the cluster and their arrangement."""
        return self.cluster.topology

    @property
    def fits(self) -> bool:
        """Returns whether the compiled peak fits into a device's memory."""
        return self.step.memory.peak_bytes <= self.topology.device.hbm_bytes

    @property
    def verdict(self) -> str:
        """Returns the peak compared with a device's memory, as text."""
        peak_gib = self.step.memory.peak_bytes / 2**30
        capacity_gib = self.topology.device.hbm_bytes / 2**30
        return f"{'fits' if self.fits else 'does not fit'}: {peak_gib:.1f} GiB of {capacity_gib:.1f}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns a line on what the estimates leave out: the replay does not model copies from and to the host."""
        host_bytes = self.step.memory.host_bytes
        if not host_bytes:
            return ()
        line = f"not in the estimate: copies to and from the host, where {human_bytes(host_bytes)} are"
        rate = self.cluster.assumptions.host_bytes_per_s
        if rate:
            line += f"; moving that once takes {duration(host_bytes / rate)} at {rate / 1e9:g} GB/s"
        return (line,)

    def mfu(self, estimate: Estimate) -> float:
        """Returns the MFU: the model's arithmetic as a share of the peak, for the time of an estimate."""
        return self._flops_per_s(estimate) / self.topology.device.flops_per_s["bf16"]

    def hfu(self, estimate: Estimate) -> float:
        """Returns the HFU: the same for the arithmetic of the compiled step, including recomputation."""
        return estimate.flops / estimate.step_s / self.topology.device.flops_per_s["bf16"]

    def _flops_per_s(self, estimate: Estimate) -> float:
        """Returns the model's arithmetic per device and second."""
        return self.step.flops / estimate.step_s / self.topology.num_devices

    # ---- as text

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(self._headline())]
        parts += [Text(), Text(self._compiled_title(), style="bold"), self.audit]
        parts += [Text(), Text(self.verdict, style="bold" if self.fits else "bold red")]
        parts += [Text(note) for note in self._memory_notes()]
        title = _ESTIMATE + _NO_SOURCE if self.cluster.has_bounds_only else _ESTIMATE
        parts += [Text(), Text(title, style="bold"), self._estimate_table(), Text(self._assumed())]
        parts += [Text(line) for line in (*self.left_out, *self.notes)]
        return Group(*parts)

    def _headline(self) -> str:
        axes = ", ".join(f"{axis}={degree}" for axis, degree in self.step.plan.mesh)
        options = ", ".join(f"{name}={value}" for name, value in self.step.options.items())
        return f"{self.name} on {self.topology.describe()} ({axes})\noptions of the compiler: {options or 'none'}"

    def _compiled_title(self) -> str:
        step = self.step
        return (
            f"Compiled: facts, nothing was run (jax {step.versions.get('jax')}; traced in {step.trace_s:.0f} s, "
            f"compiled in {step.compile_s:.0f} s, {step.rss_bytes / 2**30:.1f} GiB)"
        )

    def _memory_notes(self) -> list[str]:
        """Returns lines on the memory that a run needs beside the program's."""
        device = self.topology.device
        # The lines are about the libraries and JAX's allocator on GPUs.
        if device.platform != "gpu" or not self.fits:
            return []
        peak_bytes = self.step.memory.peak_bytes
        libraries = "RCCL, HIP" if device.compiler == "rocm" else "NCCL, CUDA"
        lines = [f"{libraries} and fragmentation need more: leave several GiB free."]
        if peak_bytes > _PREALLOCATED * device.hbm_bytes:
            lines.append("JAX uses three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION=.95 is set.")
        hidden = self.estimates.stated.hidden
        if peak_bytes > _CLOSE_TO_LIMIT * device.hbm_bytes and hidden < _LITTLE_HIDDEN:
            lines.append(
                f"This close to the limit, the compiler overlaps less: {hidden:.0%} of the communication is hidden."
                f" --unit remat=full, or --set accumulate={2 * self.step.accumulate}, frees memory."
            )
        return lines

    def _estimate_table(self) -> FittedTable:
        """Returns the estimated quantities: lowest, highest, and as stated if there are sources for it."""
        stated_columns = () if self.cluster.has_bounds_only else ("stated>",)
        table = made_table("", "", "from>", "to>", *stated_columns)

        def add(name: str, value_of: Callable[[Estimate], float], text: Callable[[float], str]) -> None:
            # Sorted for each row: the slowest case has the highest time and the lowest MFU.
            values = sorted(value_of(case) for case in self.estimates.cases)
            cells = [text(values[0]), text(values[-1])]
            if stated_columns:
                cells.append(text(value_of(self.estimates.stated)))
            add_row(table, name, *cells)

        add("step", lambda case: case.step_s, duration)
        for work in WORKS:
            add(f"  {work}", lambda case, work=work: case.split_s[work], duration)
        add("  communication not hidden", lambda case: case.exposed_s, duration)
        add("communication hidden", lambda case: case.hidden, percent)
        if self.audit.schedule.in_loops:
            add("communication in loops hidden", lambda case: case.hidden_in_loops, percent)
        add("TFLOP/s per device (the model's)", lambda case: self._flops_per_s(case) / 1e12, three_digits)
        add("MFU, of dense bf16", self.mfu, percent)
        add("HFU, with recomputation", self.hfu, percent)
        return table

    def _assumed(self) -> str:
        """Returns the assumptions, those that vary, and the formula of the arithmetic."""
        varied = []
        for name, (low, high) in self.cluster.ranges.items():
            if name in _RANGE_TEXTS:
                varied.append(_RANGE_TEXTS[name].written(low, high))
            else:
                varied.append(f"{name} {low:g} to {high:g}")
        stated = "between" if self.cluster.has_bounds_only else "stated"
        lines = (
            f"{stated}: {self.cluster.assumptions}",
            f"from, to: {', '.join(varied) or 'the same, as all assumptions are known'}",
            f"flops of a step: {self.step.flops_formula}",
        )
        return "\n".join(lines)

    # ---- for programs

    def to_dict(self) -> dict[str, Json]:
        """Returns everything, for JSON, with compiled and estimated figures separate."""
        step = self.step
        device = self.topology.device
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
            "compiler": device.compiler,
            "device": device.title,
            "devices": self.topology.num_devices,
            "batch_size": step.batch_size,
            "sequence_length": step.sequence_length,
            "accumulate": step.accumulate,
            "mesh": dict(step.plan.mesh),
            "communication_per_step": [dataclasses.asdict(traffic) for traffic in traffic_of(step.plan)],
            "compiled": compiled,
            "estimate": self._estimates_record(),
            "sources": dict(device.sources),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }

    def _estimates_record(self) -> dict[str, Json]:
        return {
            "low": self._estimate_record(self.estimates.fastest),
            "stated": None if self.cluster.has_bounds_only else self._estimate_record(self.estimates.stated),
            "high": self._estimate_record(self.estimates.slowest),
            "flops_per_step": self.step.flops,
            "flops_formula": self.step.flops_formula,
        }

    def _estimate_record(self, estimate: Estimate) -> dict[str, Json]:
        """Returns an estimate with the figures that are published of runs."""
        tokens_per_s = self.step.batch_size * self.step.sequence_length / estimate.step_s
        return estimate.to_dict() | {
            "mfu": self.mfu(estimate),
            "hfu": self.hfu(estimate),
            "model_flops_per_s_per_device": self._flops_per_s(estimate),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self.topology.num_devices,
        }

    def to_html(self, report: str, others: Sequence[ClusterPlan] = ()) -> str:
        """Returns a self-contained page: a report and the timeline of the step, with those of others below."""
        assumed = self.estimates.stated.assumptions
        subtitle = f"The timeline is an estimate; nothing was run. A loop is drawn as one round. {assumed}"
        return html_page(f"{self.name} on {self.topology.text}", subtitle, self._bars(others), report)

    def to_chrome_trace(self, others: Sequence[ClusterPlan] = ()) -> str:
        """Returns the same timelines, as JSON for https://ui.perfetto.dev."""
        return chrome_trace(self._bars(others))

    def _bars(self, others: Sequence[ClusterPlan]) -> list[Bar]:
        if not others:
            return self._timeline()
        plans: dict[str, ClusterPlan] = {"as asked": self}
        for other in others:
            plans[other.name] = other
        bars = []
        for name, plan in plans.items():
            for bar in plan._timeline():
                # Each plan has lanes of its own.
                bars.append(dataclasses.replace(bar, lane=f"{name}: {bar.lane}"))
        return bars

    def _timeline(self) -> list[Bar]:
        return timeline(self.audit.schedule, self.estimates.stated.assumptions)


def percent(share: float) -> str:
    """Returns a share as text, with one digit after the point."""
    return f"{share:.1%}"
