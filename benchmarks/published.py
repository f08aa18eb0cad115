"""Published step times, beside the estimates of `jshard plan` for the same configurations.

The rows are in published_rows.json: model, cluster, batch and remat as the source states them, and the source. Each is
compiled for its cluster, which is not here, and estimated with the constants of jshard.facts.devices and
jshard.cluster.machine. Each is from a source, and of those for GPUs none was fitted; but which
source an A100 and attention on an H100 go by was decided after a first look at the rows of lf, pax, mt, titan and fms,
not at those of kf, il and tl. Beside it stand predictors of one line, whose constants are fitted to the rows: once to
all of them, and once for each source to those of the others. Rows of TPUs stand apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.planned import require
from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology

TITLE = "Published step times, and planned ones"
MEASURES_TIME = False

_ROWS = Path(__file__).with_name("published_rows.json")
_MODELS = Path(__file__).parents[1] / "models"
_QUICK = ("kf_7b_4", "mt_7b_8", "fms_7b_128")

Row = Mapping[str, Any]
Group = Callable[[Row], str]
_ALL: Group = lambda row: ""
_FAMILY: Group = lambda row: row["device"].partition("-")[0]
# Arithmetic over a part of the peak that is the same for all rows, or for all of a kind of device.
_PREDICTORS: Mapping[str, tuple[str, Group]] = {
    "model FLOPs / (c x peak)": ("model_s", _ALL),
    "model FLOPs / (c by device x peak)": ("model_s", _FAMILY),
    "compiled FLOPs / (c x peak)": ("compiled_s", _ALL),
    "compiled FLOPs / (c by device x peak)": ("compiled_s", _FAMILY),
}


def arguments(parser: argparse._ArgumentGroup) -> None:
    """The options of this case."""
    parser.add_argument(
        "--rows", type=Path, default=_ROWS, metavar="FILE", help="as published_rows.json, with other rows"
    )
    parser.add_argument("--only", default="", metavar="ID,...", help="some of them")


def run(*, quick: bool, rows: Path = _ROWS, only: str = "") -> dict[str, Any]:
    """Plans the rows.

    Returns:
        "rows": a dict per row.
    """
    wanted = only.split(",") if only else _QUICK if quick else ()
    asked = [row for row in json.loads(rows.read_text())["rows"] if not wanted or row["id"] in wanted]
    if importlib.util.find_spec("libtpu") is None and not all(map(_is_tpu, asked)):
        asked = [row for row in asked if not _is_tpu(row)]
        print("rows of TPUs are left out: they need the extra plan-tpu, too", flush=True)
    for compiler in {parse_topology(row["topology"]).device.compiler for row in asked}:
        require(compiler)
    return {"rows": [_planned(row) for row in asked]}


def _is_tpu(row: Row) -> bool:
    return parse_topology(row["topology"]).device.platform == "tpu"


def _planned(row: Row) -> dict[str, Any]:
    print(f"compiling {row['id']} for {row['topology']}", flush=True)
    request = CompileRequest(
        model=str(_MODELS / row["model"]),
        recipe=row["recipe"],
        settings=tuple(row["settings"]),
        mesh=row["mesh"],
        units=row.get("units", {}),
        topology=row["topology"],
        profile="fastest",
    )
    known = parse_known([f"{name}={value}" for name, value in row["assume"].items()])
    cluster = PlannedCluster(parse_topology(row["topology"]), known)
    plan = ClusterPlan.of(compile_step(request), cluster=cluster, name=row["id"])
    device, found = plan.topology.device, plan.estimates
    peak = device.flops_per_s["bf16"]
    return dict(row) | {
        "device": device.name,
        "devices": plan.topology.num_devices,
        "low_s": found.fastest.step_s,
        "stated_s": found.stated.step_s,
        "high_s": found.slowest.step_s,
        "model_s": plan.step.flops / plan.topology.num_devices / peak,
        "compiled_s": found.stated.flops / peak,
        "hidden": found.stated.hidden,
        "exposed_s": found.stated.exposed_s,
        "mfu": plan.mfu(found.stated),
        "peak_gib": plan.step.memory.peak_bytes / 2**30,
        "fits": plan.fits,
    }


# ---- errors ---------------------------------------------------------------------------------------------------------


def errors(rows: Iterable[Row], planned: Callable[[Row], float]) -> list[float]:
    """The relative differences of planned times from published ones."""
    return [abs(planned(row) / row["published_step_s"] - 1) for row in rows]


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that is at least as large as the given fraction of the values."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def fitted(rows: Sequence[Row], arithmetic: str, group: Group) -> Callable[[Row], float]:
    """A predictor with the constants that minimise its median error."""
    constants = {}
    for name in {group(row) for row in rows}:
        mine = [row for row in rows if group(row) == name]
        each = [row[arithmetic] / row["published_step_s"] for row in mine]
        constants[name] = min(each, key=lambda c: statistics.median(abs(other / c - 1) for other in each))
    anywhere = statistics.median(constants.values())
    return lambda row: row[arithmetic] / constants.get(group(row), anywhere)


def source_of(row: Row) -> str:
    """Its publisher."""
    return row["id"].partition("_")[0]


def left_out(rows: Sequence[Row], arithmetic: str, group: Group) -> list[float]:
    """Errors of a predictor whose constants are fitted to the rows of the other sources."""
    found = []
    for source in dict.fromkeys(map(source_of, rows)):
        mine, others = ([row for row in rows if (source_of(row) == source) is own] for own in (True, False))
        found += errors(mine, fitted(others or mine, arithmetic, group))
    return found


def stated(row: Row) -> float:
    """The result of `jshard plan`."""
    return row["stated_s"]


# ---- the report -----------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> list[str]:
    """The rows, the errors beside those of simple predictors, and those by source; TPUs separately."""
    rows = [row for row in result["rows"] if not _is_tpu(row)]
    tpus = [row for row in result["rows"] if _is_tpu(row)]
    return [
        "Planned, and nothing was run: each row is compiled for its cluster and estimated, as `jshard plan` does it.",
        "",
        *(_of_gpus(rows) if rows else []),
        *(_of_tpus(tpus) if tpus else []),
        "Sources:",
        "",
        *(f"- {source}" for source in dict.fromkeys(row["source"] for row in (*rows, *tpus))),
    ]


def _rows_and_errors(rows: Sequence[Row]) -> list[str]:
    mine = errors(rows, stated)
    inside = sum(row["low_s"] <= row["published_step_s"] <= row["high_s"] for row in rows)
    fits = sum(row["fits"] for row in rows)
    head = ["row", "cluster", "published, s", "low", "stated", "high", "stated / published", "inside", "hidden", "GiB"]
    return [
        *markdown_table(head, map(_cells, rows), num_words=2),
        "",
        f"{len(rows)} rows: median error {statistics.median(mine):.1%}, 90th percentile {percentile(mine, 0.9):.1%};"
        f" {inside} of {len(rows)} published times are inside the stated range, {fits} of {len(rows)} fit (all ran).",
        "",
    ]


def _of_gpus(rows: Sequence[Row]) -> list[str]:
    by_source = [
        [source, str(len(them)), f"{statistics.median(e):.1%}", f"{max(e):.1%}", f"{statistics.median(r):.2f}"]
        for source in dict.fromkeys(map(source_of, rows))
        for them in [[row for row in rows if source_of(row) == source]]
        for e, r in [(errors(them, stated), [stated(row) / row["published_step_s"] for row in them])]
    ]
    return [
        *_rows_and_errors(rows),
        *markdown_table(
            ["predictor", "constants fitted", "median", "90th percentile", "median, source left out"], _ranked(rows)
        ),
        "",
        "No constant of `jshard plan` was fitted, so leaving a source out changes none of its errors. Each is from a"
        " source; which one an A100 (80 %, not 85) and attention on an H100 (42 %, not 45) go by was decided after a"
        " first look at lf, pax, mt, titan and fms. The rows of kf, il and tl were compiled after that:",
        "",
        *markdown_table(["source", "rows", "median error", "largest", "stated / published, median"], by_source),
        "",
    ]


def _of_tpus(rows: Sequence[Row]) -> list[str]:
    return [
        "TPUs, apart:",
        "",
        *_rows_and_errors(rows),
        "The least that products reach of a TPU's peak, 89 %, is what the row mx_32b_v5e executes of it: fitted to one"
        " row of these. The most is a measured product's. What attention reaches is assumed to be as on an H100.",
        "",
    ]


def _cells(row: Row) -> list[str]:
    published, peak = row["published_step_s"], row.get("published_peak_gib")
    inside = "yes" if row["low_s"] <= published <= row["high_s"] else "no"
    gib = (
        f"{row['peak_gib']:.1f}" + (f" (published {peak:.1f})" if peak else "") + ("" if row["fits"] else ", too large")
    )
    times = [f"{row[name]:.3f}" for name in ("published_step_s", "low_s", "stated_s", "high_s")]
    return [row["id"], row["topology"], *times, f"{stated(row) / published:.2f}", inside, f"{row['hidden']:.0%}", gib]


def _ranked(rows: Sequence[Row]) -> list[list[str]]:
    mine = errors(rows, stated)
    found = [["**jshard plan, stated**", "0", *_two(mine), f"{statistics.median(mine):.1%}"]]
    for name, (arithmetic, group) in _PREDICTORS.items():
        constants = str(len({group(row) for row in rows}))
        apart = statistics.median(left_out(rows, arithmetic, group))
        found.append([name, constants, *_two(errors(rows, fitted(rows, arithmetic, group))), f"{apart:.1%}"])
    return found


def _two(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.1%}", f"{percentile(values, 0.9):.1%}"


def pictures(result: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Published against planned: the ratio of each row with its range, and a line at 1."""
    rows = result["rows"]
    axes = new_axes(width=8, height=0.24 * len(rows) + 1)
    for place, row in enumerate(reversed(rows)):
        published = row["published_step_s"]
        axes.plot([row["low_s"] / published, row["high_s"] / published], [place, place], color="0.7", linewidth=4)
        axes.plot(stated(row) / published, place, marker="o", color="C0", markersize=4)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row['id']}, {row['topology']}" for row in reversed(rows)])
    axes.set_xlabel("planned / published step time; the bar is the stated range")
    return [save(axes, folder / f"{stem}.svg")]
