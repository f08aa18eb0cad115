"""The report of `jshard plan --topology` for one configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import duration, human_bytes, three_digits
from jshard._types import Json
from jshard.cluster.compile import CompiledStep
from jshard.cluster.estimate import Estimate, EstimateRange
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.replay import WORKS
from jshard.cluster.topology import Topology
from jshard.inspect.audit import Audit, audit
from jshard.inspect.communication import traffic_of
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.plans.plan import ShardPlan

NOT_MEASURED = "Estimate: a replay of the compiled schedule under assumptions, not a measurement"
_NO_SOURCE = "; no source for what its matrix products sustain: bounds only"
_PREALLOCATED = 0.75  # share of a GPU's memory that JAX allocates at startup by default
# Above the one share of the memory and below the other of the communication, a line says that both are related.
_CLOSE_TO_LIMIT = 0.85
_LITTLE_HIDDEN = 0.5
_LEAST_IN_GIB = 2**30 / 10


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


@dataclasses.dataclass(frozen=True)
class EstimatedFigure:
    """A figure of a plan that is estimated, as text.

    Attributes:
        name: what it is of.
        value_of: its value in one of the estimates of a plan.
        text: writes a value.
    """

    name: str
    value_of: Callable[[ClusterPlan, Estimate], float]
    text: Callable[[float], str]

    def bounds(self, plan: ClusterPlan) -> tuple[str, str]:
        """Returns the lowest and the highest value."""
        # Sorted for each figure: the slowest case has the highest time and the lowest MFU.
        values = sorted(self.value_of(plan, case) for case in plan.estimates.cases)
        return self.text(values[0]), self.text(values[-1])

    def stated(self, plan: ClusterPlan) -> str:
        """Returns the value under the stated assumptions."""
        return self.text(self.value_of(plan, plan.estimates.stated))

    def in_short(self, plan: ClusterPlan) -> str:
        """Returns the stated value with its range; the range alone if there are bounds only."""
        lowest, highest = self.bounds(plan)
        between = f"{lowest} to {highest}"
        if plan.cluster.has_bounds_only:
            return between
        return f"{self.stated(plan)} ({between})"


def varied_assumptions(cluster: PlannedCluster) -> str:
    """Returns the assumptions that vary, with their ranges; "" if all are known."""
    varied = []
    for name, (low, high) in cluster.ranges.items():
        if name in _RANGE_TEXTS:
            varied.append(_RANGE_TEXTS[name].written(low, high))
        else:
            varied.append(f"{name} {low:g} to {high:g}")
    return ", ".join(varied)


def percent(share: float) -> str:
    """Returns a share as text, with one digit after the point."""
    return f"{share:.1%}"


_STEP = EstimatedFigure("step", lambda plan, case: case.step_s, duration)
_MFU = EstimatedFigure("MFU, of dense bf16", lambda plan, case: plan.mfu(case), percent)
_HIDDEN = EstimatedFigure("communication hidden", lambda plan, case: case.hidden, percent)
_EXPOSED = EstimatedFigure("communication exposed", lambda plan, case: case.exposed_s, duration)
ANSWERS = (_STEP, _MFU, _HIDDEN, _EXPOSED)
"""The figures that a plan is asked for, beside whether it fits."""

_HIDDEN_IN_LOOPS = EstimatedFigure("communication in loops hidden", lambda plan, case: case.hidden_in_loops, percent)
_RATE = EstimatedFigure(
    "TFLOP/s per device (the model's)", lambda plan, case: plan.flops_per_s(case) / 1e12, three_digits
)
_HFU = EstimatedFigure("HFU, with recomputation", lambda plan, case: plan.hfu(case), percent)


def _time_of(work: str) -> EstimatedFigure:
    return EstimatedFigure(f"  {work}", lambda plan, case: case.split_s[work], duration)


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
        audited = audit(step.text, plan=step.plan, memory=step.memory, accumulate=step.accumulate, sync=step.sync)
        estimates = cluster.estimate(audited.schedule)
        return cls(name=name, cluster=cluster, step=step, audit=audited, estimates=estimates, notes=step.notes)

    @property
    def topology(self) -> Topology:
        """Returns the devices of the cluster and their arrangement."""
        return self.cluster.topology

    @property
    def axes(self) -> str:
        """Returns the mesh, as text."""
        return ", ".join(f"{axis}={degree}" for axis, degree in self.step.plan.mesh)

    @property
    def fits(self) -> bool:
        """Returns whether the compiled peak fits into a device's memory."""
        return self.step.memory.peak_bytes <= self.topology.device.hbm_bytes

    @property
    def verdict(self) -> str:
        """Returns the peak compared with a device's memory, as text."""
        peak_bytes = self.step.memory.peak_bytes
        capacity_gib = self.topology.device.hbm_bytes / 2**30
        answer = "fits" if self.fits else "does not fit"
        if peak_bytes < _LEAST_IN_GIB:  # it would be 0.0 GiB
            return f"{answer}: {human_bytes(peak_bytes)} of {capacity_gib:.1f} GiB"
        peak_gib = peak_bytes / 2**30
        return f"{answer}: {peak_gib:.1f} GiB of {capacity_gib:.1f}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Returns a line on what the estimates leave out: the replay does not model copies from and to the host."""
        host_bytes = self.step.memory.host_bytes
        if not host_bytes:
            return ()
        line = f"not in the estimate: copies to and from the host, where {human_bytes(host_bytes)} are"
        rate = self.cluster.assumptions.host_bytes_per_s
        if rate:
            once = duration(host_bytes / rate)
            line += f"; moving that once takes {once} at {rate / 1e9:g} GB/s"
        return (line,)

    def mfu(self, estimate: Estimate) -> float:
        """Returns the MFU: the model's arithmetic as a share of the peak, for the time of an estimate."""
        return self.flops_per_s(estimate) / self.topology.device.flops_per_s["bf16"]

    def hfu(self, estimate: Estimate) -> float:
        """Returns the HFU: the same for the arithmetic of the compiled step, including recomputation."""
        return estimate.flops / estimate.step_s / self.topology.device.flops_per_s["bf16"]

    def flops_per_s(self, estimate: Estimate) -> float:
        """Returns the model's arithmetic per device and second."""
        return self.step.flops / estimate.step_s / self.topology.num_devices

    # ---- as text

    def __rich__(self) -> Group:
        # The answer first: the tables after it fill several screens.
        return Group(*self._answer(), Text(), *self._compiled(), Text(), *self._estimated())

    def _answer(self) -> list[RenderableType]:
        verdict_style = "bold" if self.fits else "bold red"
        parts: list[RenderableType] = [Text(self._headline()), Text(self.verdict, style=verdict_style)]
        parts += map(Text, self._estimates_in_short())
        parts += map(Text, self._memory_notes())
        return parts

    def _compiled(self) -> list[RenderableType]:
        title = Text(self._compiled_title(), style="bold")
        return [title, Text(self._compiler_options()), self.audit]

    def _estimated(self) -> list[RenderableType]:
        title = NOT_MEASURED
        if self.cluster.has_bounds_only:
            title += _NO_SOURCE
        parts: list[RenderableType] = [Text(title, style="bold"), self._estimate_table(), Text(self._assumed())]
        parts += map(Text, self.left_out)
        parts += map(Text, self.notes)
        return parts

    def _headline(self) -> str:
        return f"{self.name} on {self.topology.describe()} ({self.axes})"

    def _estimates_in_short(self) -> tuple[str, str, str]:
        """Returns the figures that a plan is asked for, of all that are in the table of the estimate."""
        return (
            f"step: {_STEP.in_short(self)}, estimated",
            f"MFU: {_MFU.in_short(self)}, estimated",
            f"communication hidden: {_HIDDEN.in_short(self)}, estimated",
        )

    def _compiled_title(self) -> str:
        step = self.step
        jax_version = step.versions.get("jax")
        rss_gib = step.rss_bytes / 2**30
        traced = f"traced in {step.trace_s:.0f} s"
        compiled = f"compiled in {step.compile_s:.0f} s"
        return f"Compiled: facts, nothing was run (jax {jax_version}; {traced}, {compiled}, {rss_gib:.1f} GiB)"

    def _compiler_options(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.step.options.items())
        return f"options of the compiler: {options or 'none'}"

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
        is_close = peak_bytes > _CLOSE_TO_LIMIT * device.hbm_bytes
        if is_close and hidden < _LITTLE_HIDDEN:
            microbatches = 2 * self.step.accumulate
            lines.append(
                f"This close to the limit, the compiler overlaps less: {hidden:.0%} of the communication is hidden."
                f" --unit remat=full, or --set accumulate={microbatches}, frees memory."
            )
        return lines

    def _estimate_table(self) -> FittedTable:
        """Returns the estimated figures: lowest, highest, and as stated if there are sources for it."""
        has_stated = not self.cluster.has_bounds_only
        stated_columns = ("stated>",) if has_stated else ()
        table = made_table("", "", "from>", "to>", *stated_columns)
        for figure in self._estimated_figures():
            cells = list(figure.bounds(self))
            if has_stated:
                cells.append(figure.stated(self))
            add_row(table, figure.name, *cells)
        return table

    def _estimated_figures(self) -> list[EstimatedFigure]:
        figures = [_STEP]
        figures += [_time_of(work) for work in WORKS]
        figures += [dataclasses.replace(_EXPOSED, name="  communication not hidden"), _HIDDEN]
        if self.audit.schedule.in_loops:
            figures.append(_HIDDEN_IN_LOOPS)
        figures += [_RATE, _MFU, _HFU]
        return figures

    def _assumed(self) -> str:
        """Returns the assumptions, those that vary, and the formula of the arithmetic."""
        stated = "between" if self.cluster.has_bounds_only else "stated"
        varied = varied_assumptions(self.cluster)
        if not varied:
            varied = "the same, as all assumptions are known"
        lines = [f"{stated}: {self.cluster.assumptions}"]
        lines.append(f"from, to: {varied}")
        lines.append(f"flops of a step: {self.step.flops_formula}")
        return "\n".join(lines)

    # ---- for programs

    def to_dict(self) -> dict[str, Json]:
        """Returns everything, for JSON, with compiled and estimated figures separate."""
        record = self._request_record()
        record |= self._communication_record()
        record["compiled"] = self._compiled_record()
        record["estimate"] = self._estimates_record()
        record["sources"] = dict(self.topology.device.sources)
        record["left_out"] = list(self.left_out)
        record["notes"] = list(self.notes)
        return record

    def _request_record(self) -> dict[str, Json]:
        """Returns what was compiled, and for which devices."""
        step = self.step
        device = self.topology.device
        record: dict[str, Json] = {"name": self.name, "topology": self.topology.text}
        record["platform"] = device.platform
        record["compiler"] = device.compiler
        record["device"] = device.title
        record["devices"] = self.topology.num_devices
        record["batch_size"] = step.batch_size
        record["sequence_length"] = step.sequence_length
        record["accumulate"] = step.accumulate
        record["sync"] = step.sync
        record["mesh"] = dict(step.plan.mesh)
        return record

    def _communication_record(self) -> dict[str, Json]:
        """Returns the collectives that the plan requires: here, and on a platform that sums no gradient on arrival."""
        plan = self.step.plan
        # A run on another platform is compared with the second.
        return {
            "communication_per_step": _traffic_records(plan),
            "communication_by_reduce_scatters": _traffic_records(plan.with_reduce_scatters()),
        }

    def _compiled_record(self) -> dict[str, Json]:
        """Returns what the compiler has made of it."""
        step = self.step
        record: dict[str, Json] = {"fits": self.fits}
        record["capacity_bytes"] = self.topology.device.hbm_bytes
        record["options"] = dict(step.options)
        record["versions"] = dict(step.versions)
        record["seconds"] = {"trace": step.trace_s, "compile": step.compile_s, "cpu": step.cpu_s}
        record["compiler_rss_bytes"] = step.rss_bytes
        record["audit"] = json.loads(self.audit.to_json())
        return record

    def _estimates_record(self) -> dict[str, Json]:
        """Returns the estimates, and the arithmetic that they are of."""
        record: dict[str, Json] = {"low": self._estimate_record(self.estimates.fastest), "stated": None}
        if not self.cluster.has_bounds_only:
            record["stated"] = self._estimate_record(self.estimates.stated)
        record["high"] = self._estimate_record(self.estimates.slowest)
        record["flops_per_step"] = self.step.flops
        record["flops_formula"] = self.step.flops_formula
        return record

    def _estimate_record(self, estimate: Estimate) -> dict[str, Json]:
        """Returns an estimate with the figures that are published of runs."""
        tokens = self.step.batch_size * self.step.sequence_length
        tokens_per_s = tokens / estimate.step_s
        record = estimate.to_dict()
        record["mfu"] = self.mfu(estimate)
        record["hfu"] = self.hfu(estimate)
        record["model_flops_per_s_per_device"] = self.flops_per_s(estimate)
        record["tokens_per_s"] = tokens_per_s
        record["tokens_per_s_per_device"] = tokens_per_s / self.topology.num_devices
        return record


def _traffic_records(plan: ShardPlan) -> list[Json]:
    """Returns the collectives of a plan, for JSON."""
    return [dataclasses.asdict(traffic) for traffic in traffic_of(plan)]
