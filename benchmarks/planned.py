"""Steps compiled for absent clusters: code shared by `scale`, `strategies`, `limiter` and `memory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.estimate import Estimate
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology, require_compiler
from jshard.errors import FourPartError, MissingExtraError

MODEL = str(Path(__file__).parents[1] / "models" / "gpt.py")
SMALL = ("accumulate=1", "model.n_layer=2", "sequence_length=256")  # of quick runs, beside the size of the batch
EXPLAINED = (
    "Compiled and estimated; nothing was run."
    " Peak memory and collectives are the compiler's. Times are estimates: the compiled schedule played on two streams,"
    " as `jshard plan` does it, under the assumptions of docs/planning.md; in brackets over their ranges."
)
_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
_TIMEOUT_S = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A step to be compiled."""

    labels: Mapping[str, Any]  # its row's first cells, by column
    request: CompileRequest  # what to compile


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Compiles the points, one after another; if a step cannot be compiled, its row has the reason."""
    for compiler in {parse_topology(point.request.topology).device.compiler for point in points}:
        require(compiler)
    return [_row(point) for point in points]


def require(compiler: str) -> None:
    """Ends the run, and prints what to install, if a compiler is missing."""
    try:
        require_compiler(compiler)
    except MissingExtraError as error:
        raise SystemExit(str(error)) from error


def _row(point: Point) -> dict[str, Any]:
    print("compiling", ", ".join(map(str, point.labels.values())), flush=True)
    request = point.request
    row = {"labels": dict(point.labels), "topology": request.topology, "mesh": dict(request.mesh)}
    try:
        step = compile_step(request, timeout_s=_TIMEOUT_S)
    except FourPartError as error:
        return row | {"error": str(error).splitlines()[0]}
    plan = ClusterPlan.of(
        step, cluster=PlannedCluster(parse_topology(request.topology)), name=point.labels.get("model", "")
    )
    estimates = plan.estimates
    return row | {
        "mesh": dict(step.plan.mesh),
        "peak_bytes": step.memory.peak_bytes,
        "capacity_bytes": plan.topology.device.hbm_bytes,
        "fits": plan.fits,
        "amounts": {kind: plan.audit.amount(kind) for kind in _KINDS},
        "stated": _estimated(plan, estimates.stated),
        "fastest": _estimated(plan, estimates.fastest),
        "slowest": _estimated(plan, estimates.slowest),
        "trace_s": step.trace_s,
        "compile_s": step.compile_s,
        "cpu_s": step.cpu_s,
        "compiler_versions": dict(step.versions),
    }


def _estimated(plan: ClusterPlan, estimate: Estimate) -> dict[str, float]:
    return {
        "step_s": estimate.step_s,
        "exposed_s": estimate.exposed_s,
        "hidden": estimate.hidden,
        "mfu": plan.mfu(estimate),
        "flops_per_s": plan.step.flops / estimate.step_s / plan.topology.num_devices,
    }


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "GiB": lambda row: f"{row['peak_bytes'] / 2**30:.1f}" + ("" if row["fits"] else " (does not fit)"),
    "all-gathers, reduce-scatters, all-reduces": lambda row: ", ".join(
        f"{row['amounts'][k]:.2f}" for k in row["amounts"]
    ),
    "est. step, s": lambda row: _range(row, "step_s", ".3f"),
    "est. exposed, s": lambda row: _range(row, "exposed_s", ".3f"),
    "est. hidden": lambda row: f"{row['stated']['hidden']:.1%}",
    "est. TFLOP/s per GPU (the model's)": lambda row: f"{row['stated']['flops_per_s'] / 1e12:.0f}",
    "est. MFU": lambda row: f"{row['stated']['mfu']:.1%}",
    "compiler, CPU s": lambda row: f"{row['cpu_s']:.0f}",
}


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    labels = rows[0]["labels"]
    return markdown_table([*labels, *COLUMNS], map(_cells, rows), num_words=len(labels))


def _cells(row: Mapping[str, Any]) -> list[str]:
    failed = [row["error"], *[""] * (len(COLUMNS) - 1)] if "error" in row else None
    return [*map(str, row["labels"].values()), *(failed or [_cell(name, row) for name in COLUMNS])]


def _cell(name: str, row: Mapping[str, Any]) -> str:
    """No time is shown for a step that does not fit, because the compiler then saves memory instead of time."""
    return "" if name.startswith("est.") and not row["fits"] else COLUMNS[name](row)


def _range(row: Mapping[str, Any], name: str, form: str) -> str:
    values = [row[case][name] for case in ("stated", "fastest", "slowest")]
    return f"{values[0]:{form}} ({min(values):{form}} to {max(values):{form}})"


def fitting(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that compiled and fit the memory of a device."""
    return [row for row in rows if row.get("fits")]
