"""Published step times, beside the estimates of `jshard plan` for the same configurations.

The rows are in published_rows.json: model, cluster, batch and remat as the source states them, and the source. Each is
compiled for its cluster, which is not here, and estimated with the constants of jshard.facts.devices and
jshard.cluster.machine. Each is from a source, and of those for GPUs none was fitted; but which
source an A100 and attention on an H100 go by was decided after a first look at the rows of lf, pax, mt, titan and fms,
not at those of kf, il and tl.

A row of an NVIDIA GPU has two estimates: of jshard's own program, and of the one that ran, as far as its source code
says what it does otherwise (`published_programs`). The second one is compared with the published time.

Beside it stand predictors of one line, whose constants are fitted to the rows: once to all of them, and once for each
source to those of the others. Rows of AMD GPUs and of TPUs stand apart.

A row of an AMD GPU, or of several TPU slices, also has in words what is "assumed" because its source does not state it,
and in what jshard's program "differs" from the one that ran.

With `--pairs FILE`, configurations of one model on one cluster are planned in place of the rows, and counted by whether
the plan orders them as they were measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.planned import require
from benchmarks.published_pairs import By, plan_pairs
from benchmarks.published_pairs_report import table as table_of_pairs
from benchmarks.published_programs import estimated_as, program_of
from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology, require_compiler
from jshard.errors import MissingExtraError
from jshard.facts.device_files import SUFFIX
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

TITLE = "Published step times, and planned ones"
MEASURES_TIME = False

_ROWS = Path(__file__).with_name("published_rows.json")
_MODELS = Path(__file__).parents[1] / "models"
_QUICK = ("kf_7b_4", "mt_7b_8", "fms_7b_128")
_QUICK_PAIRS = "kf_7b_4"
_NAMES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs"}
_EXTRAS = {"cuda": "plan-gpu", "rocm": "plan-rocm", "tpu": "plan-tpu"}

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
    parser.add_argument("--only", default="", metavar="ID,...", help="some of them; of pairs, the ids that begin so")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="as published_pairs.json: ranks them, plans no rows")
    parser.add_argument(
        "--by",
        choices=typing.get_args(By),
        default="estimate",
        help="how pairs are planned: in seconds or minutes each",
    )


def run(
    *, quick: bool, rows: Path = _ROWS, only: str = "", pairs: Path | None = None, by: By = "estimate"
) -> dict[str, Any]:
    """Plans the rows, or pairs.

    Returns:
        "rows": a dict per row; or what `plan_pairs` returns.
    """
    if pairs is not None:
        return plan_pairs(pairs, by=by, only=only or (_QUICK_PAIRS if quick else ""))
    wanted = only.split(",") if only else _QUICK if quick else ()
    requested = [row for row in json.loads(rows.read_text())["rows"] if not wanted or row["id"] in wanted]
    return {"rows": [_planned(row) for row in _compilable(requested)]}


def _compilable(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that can be compiled here; says which cannot, and ends the run if that is all of them."""
    compilers = list(dict.fromkeys(map(_compiler, rows)))
    installed = {compiler for compiler in compilers if _is_installed(compiler)}
    if not installed:
        require(compilers[0])
    for compiler in compilers:
        if compiler not in installed:
            print(f"rows of {_NAMES[compiler]} are left out: they need the extra {_EXTRAS[compiler]}, too", flush=True)
    return [row for row in rows if _compiler(row) in installed]


def _is_installed(compiler: str) -> bool:
    try:
        require_compiler(compiler)
    except MissingExtraError:
        return False
    return True


def _compiler(row: Row) -> str:
    """The compiler of a row's cluster: "cuda", "rocm" or "tpu"."""
    return parse_topology(_topology(row)).device.compiler


def _topology(row: Row) -> str:
    """The row's cluster. Files of devices are in this folder."""
    text = row["topology"]
    if SUFFIX in text:
        return str(Path(__file__).parent / text)
    return text


def _planned(row: Row) -> dict[str, Any]:
    print(f"compiling {row['id']} for {row['topology']}", flush=True)
    request = CompileRequest(
        model=str(_MODELS / row["model"]),
        recipe=row["recipe"],
        settings=tuple(row["settings"]),
        mesh=row["mesh"],
        units=row.get("units", {}),
        topology=_topology(row),
        profile="fastest",
    )
    known = parse_known([f"{name}={value}" for name, value in row["assume"].items()])
    cluster = PlannedCluster(parse_topology(_topology(row)), known)
    plan = ClusterPlan.of(compile_step(request), cluster=cluster, name=row["id"])
    recipe = override(load_model_file(request.model).recipe(request.recipe)[1], request.settings)
    program = program_of(row)
    own = plan.estimates
    found = estimated_as(program, plan, recipe, clock_share=row.get("clock_share", 1.0))
    device = plan.topology.device
    peak = device.flops_per_s["bf16"]
    return dict(row) | {
        "ran": program.words,
        "own_low_s": own.fastest.step_s,
        "own_s": own.stated.step_s,
        "own_high_s": own.slowest.step_s,
        "device": device.name,
        "states": not cluster.has_bounds_only,
        "devices": plan.topology.num_devices,
        "low_s": found.fastest.step_s,
        "stated_s": found.stated.step_s,
        "high_s": found.slowest.step_s,
        "model_s": plan.step.flops / plan.topology.num_devices / peak,
        "compiled_s": own.stated.flops / peak,
        "hidden": own.stated.hidden,
        "exposed_s": own.stated.exposed_s,
        "mfu": plan.mfu(own.stated),
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
    """The estimate that is compared: that of the published program."""
    return row["stated_s"]


def own(row: Row) -> float:
    """The result of `jshard plan`, of jshard's program."""
    return row["own_s"]


# ---- the report -----------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> list[str]:
    """The rows, the errors beside those of simple predictors, and those by source; AMD GPUs and TPUs separately."""
    if "configurations" in result:
        return table_of_pairs(result)
    by_compiler: dict[str, list[Row]] = {"cuda": [], "rocm": [], "tpu": []}
    for row in result["rows"]:
        by_compiler[_compiler(row)].append(row)
    sections = {"cuda": _of_gpus, "rocm": _of_amd, "tpu": _of_tpus}
    lines = [
        "Planned, and nothing was run: each row is compiled for its cluster and estimated, as `jshard plan` does it.",
        "",
    ]
    for compiler, rows in by_compiler.items():
        if rows:
            lines += sections[compiler](rows)
    in_order = [row for rows in by_compiler.values() for row in rows]
    sources = dict.fromkeys(row["source"] for row in in_order)
    return [*lines, "Sources:", "", *(f"- {source}" for source in sources)]


def _rows_and_errors(rows: Sequence[Row]) -> list[str]:
    head = ["row", "cluster", "published, s", "low", "stated", "high", "stated / published", "inside", "hidden", "GiB"]
    return [*markdown_table(head, map(_cells, rows), num_words=2), "", f"{_counted(rows)}, {_fitting(rows)}.", ""]


def _counted(rows: Sequence[Row]) -> str:
    inside = sum(row["low_s"] <= row["published_step_s"] <= row["high_s"] for row in rows)
    return (
        f"{len(rows)} rows: {_errors_in_words(rows)}"
        f" {inside} of {len(rows)} published times are inside the stated range"
    )


def _fitting(rows: Sequence[Row]) -> str:
    return f"{sum(row['fits'] for row in rows)} of {len(rows)} fit (all ran)"


def _errors_in_words(rows: Sequence[Row]) -> str:
    """The errors of the rows for which a time is stated; for others there are bounds only."""
    with_time = [row for row in rows if _states(row)]
    if not with_time:
        return "no time is stated, only bounds;"
    mine = errors(with_time, stated)
    words = f"median error {statistics.median(mine):.1%}, 90th percentile {percentile(mine, 0.9):.1%}"
    if len(with_time) < len(rows):
        words += f" of the {len(with_time)} with a stated time"
    return f"{words};"


def _states(row: Row) -> bool:
    """Whether the plan states a time, and not only bounds."""
    return row.get("states", True)


def _of_gpus(rows: Sequence[Row]) -> list[str]:
    head = ["row", "cluster", "published, s", "jshard's own, s", "own / published", "what ran"]
    head += ["low", "stated", "high", "stated / published", "inside", "hidden", "GiB"]
    return [
        *markdown_table(head, map(_cells_with_program, rows), num_words=2),
        "",
        "*jshard's own* is the stated estimate of `jshard plan`: of its program, in which XLA fuses elementwise"
        " operations and attention is cuDNN's. *What ran* is by the source code of the run. *Low*, *stated* and *high*"
        " are of the same compiled schedule with what that program does otherwise (benchmarks/published_programs.py):"
        " its attention kernel, its elementwise operations, what it computes again. **These are compared.** *Hidden*"
        " and GiB are of jshard's own program.",
        "",
        f"jshard's own program, {_counted(_as_own(rows))}.",
        "",
        f"What ran, {_counted(rows)}, {_fitting(rows)}.",
        "",
        *markdown_table(
            ["predictor", "constants fitted", "median", "90th percentile", "median, source left out"], _ranked(rows)
        ),
        "",
        "No constant of `jshard plan` was fitted, nor one of the published programs, so leaving a source out changes"
        " none of these errors. Each is from a source. Which one an A100 (80 %, not 85) and attention on an H100 (42 %,"
        " not 45) go by was decided after a first look at lf, pax, mt, titan and fms; what of the programs is counted"
        " was decided after a look at all rows.",
        "",
        *markdown_table(
            ["source", "rows", "own, median error", "median error", "largest", "stated / published, median"],
            map(_cells_of_source, _by_source(rows)),
        ),
        "",
    ]


def _as_own(rows: Iterable[Row]) -> list[Row]:
    """The rows with the estimates of jshard's own program in place of the compared ones."""
    return [{**row, "low_s": row["own_low_s"], "stated_s": row["own_s"], "high_s": row["own_high_s"]} for row in rows]


def _by_source(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if source_of(row) == source] for source in dict.fromkeys(map(source_of, rows))]


def _cells_of_source(rows: Sequence[Row]) -> list[str]:
    mine = errors(rows, stated)
    ratio = statistics.median(stated(row) / row["published_step_s"] for row in rows)
    of_own, median = (statistics.median(each) for each in (errors(rows, own), mine))
    return [source_of(rows[0]), str(len(rows)), f"{of_own:.1%}", f"{median:.1%}", f"{max(mine):.1%}", f"{ratio:.2f}"]


def _of_amd(rows: Sequence[Row]) -> list[str]:
    return [
        "AMD GPUs, apart; no constant was fitted to these rows, and none was chosen after a look at them:",
        "",
        *_rows_and_errors(rows),
        *_in_words(rows),
    ]


def _in_words(rows: Sequence[Row]) -> list[str]:
    """What is assumed and what differs, of the rows that have it in words."""
    cells = [[row["id"], row["framework"], row["assumed"], row["differs"]] for row in rows if "assumed" in row]
    if not cells:
        return []
    return [
        "What ran, what its source does not state and is assumed, and in what jshard's program differs from it:",
        "",
        *markdown_table(["row", "what ran", "assumed", "jshard's program"], cells, num_words=4),
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
        *_in_words(rows),
    ]


def _cells(row: Row) -> list[str]:
    published, peak = row["published_step_s"], row.get("published_peak_gib")
    inside = "yes" if row["low_s"] <= published <= row["high_s"] else "no"
    gib = (
        f"{row['peak_gib']:.1f}" + (f" (published {peak:.1f})" if peak else "") + ("" if row["fits"] else ", too large")
    )
    low, middle, high = (f"{row[name]:.3f}" for name in ("low_s", "stated_s", "high_s"))
    ratio = f"{stated(row) / published:.2f}"
    if not _states(row):
        middle = ratio = "-"
    times = [f"{published:.3f}", low, middle, high]
    return [row["id"], row["topology"], *times, ratio, inside, f"{row['hidden']:.0%}", gib]


def _cells_with_program(row: Row) -> list[str]:
    name, cluster, published, *rest = _cells(row)
    return [name, cluster, published, f"{own(row):.3f}", f"{own(row) / row['published_step_s']:.2f}", row["ran"], *rest]


def _ranked(rows: Sequence[Row]) -> list[list[str]]:
    found = []
    for name, predicted in (("**what ran, stated**", stated), ("jshard's own program, stated", own)):
        mine = errors(rows, predicted)
        found.append([name, "0", *_two(mine), f"{statistics.median(mine):.1%}"])
    for name, (arithmetic, group) in _PREDICTORS.items():
        constants = str(len({group(row) for row in rows}))
        apart = statistics.median(left_out(rows, arithmetic, group))
        found.append([name, constants, *_two(errors(rows, fitted(rows, arithmetic, group))), f"{apart:.1%}"])
    return found


def _two(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.1%}", f"{percentile(values, 0.9):.1%}"


def pictures(result: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Published against planned: the ratio of each row with its range, and a line at 1. Of pairs, none.

    The ring is jshard's own program.
    """
    if "configurations" in result:
        return []
    rows = result["rows"]
    axes = new_axes(width=8, height=0.24 * len(rows) + 1)
    for place, row in enumerate(reversed(rows)):
        published = row["published_step_s"]
        axes.plot([row["low_s"] / published, row["high_s"] / published], [place, place], color="0.7", linewidth=4)
        if _states(row):
            axes.plot(stated(row) / published, place, marker="o", color="C0", markersize=4)
            axes.plot(own(row) / published, place, marker="o", color="C0", markersize=4, fillstyle="none")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row['id']}, {row['topology']}" for row in reversed(rows)])
    axes.set_xlabel("planned / published step time; the bar is the stated range, the ring jshard's own program")
    return [save(axes, folder / f"{stem}.svg")]
