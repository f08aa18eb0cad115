"""What experts chose for large published runs, and what `jshard plan --auto` chooses: both estimated before compiling.

The runs are in expert_runs.json: model, cluster, batch, the mesh of the run, and the source. What a source does not
say, remat and microbatches for instance, is the best of a search on that mesh. The other search is free in all axes.
Both are estimates of jshard's program on a mesh, not of the one that the experts ran.

The CPU time and the memory of a search are those of its process. For figures of each run, make a report of each, with
`--only ID --out DIR`, and merge these.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jshard as js
from benchmarks.tables import markdown_table
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.layouts import free_axes
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.search import Search, search, why_lost
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

TITLE = "What experts chose, and what the search chooses"
MEASURES_TIME = False

_RUNS = Path(__file__).with_name("expert_runs.json")
_MODELS = Path(__file__).parents[1] / "models"
_QUICK = ("titan_8b_8",)

Run = Mapping[str, Any]


def arguments(parser: argparse._ArgumentGroup) -> None:
    """The options of this case."""
    parser.add_argument("--runs", type=Path, default=_RUNS, metavar="FILE", help="as expert_runs.json, with other runs")
    parser.add_argument("--only", default="", metavar="ID,...", help="some of them")


def run(*, quick: bool, runs: Path = _RUNS, only: str = "") -> Iterator[dict[str, Any]]:
    """Searches for the runs, twice each.

    Yields:
        "runs": a dict per run so far.
    """
    wanted = only.split(",") if only else _QUICK if quick else ()
    requested = [each for each in json.loads(runs.read_text())["runs"] if not wanted or each["id"] in wanted]
    searched = []
    for each in requested:
        searched.append(_searched(each))
        yield {"runs": list(searched)}


def _searched(requested: Run) -> dict[str, Any]:
    print(f"searching for {requested['id']} on {requested['topology']}", flush=True)
    topology = parse_topology(requested["topology"])
    known = parse_known([f"{name}={value}" for name, value in requested.get("assume", {}).items()])
    model_file = load_model_file(_MODELS / requested["model"])
    _, recipe = model_file.recipe(requested["recipe"])
    begin_s = time.process_time()
    with traced_for_device(topology.device):
        costs = Costs(model_file, override(recipe, requested["settings"]), PlannedCluster(topology, known).machine)
        free = search(costs, _mesh(topology.num_devices), free=free_axes({}))
        cpu_s = time.process_time() - begin_s
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        experts_mesh = _mesh(topology.num_devices, **requested["mesh"])
        experts = search(costs, experts_mesh, free=())
    return {
        "id": requested["id"],
        "source": requested["source"],
        "differs": requested.get("differs", ""),
        "topology": requested["topology"],
        "devices": topology.num_devices,
        "experts": _record(_best(experts)),
        "auto": _record(_best(free)),
        "why": why_lost(_best(experts), _best(free)),
        "considered": len(free.considered),
        "cpu_s": cpu_s,
        "peak_gib": peak_bytes / 2**30,
    }


def _mesh(num_devices: int, **degrees: int) -> dict[str, int]:
    return dict(js.mesh(**degrees, devices=num_devices).shape)


def _best(searched: Search) -> Cost:
    """The fastest that fits; if none does, the smallest."""
    return (*searched.ranked, *searched.too_large)[0]


def _record(cost: Cost) -> dict[str, Any]:
    mesh = " ".join(f"{axis}={degree}" for axis, degree in cost.variant.mesh.items() if degree > 1)
    return {
        "name": cost.variant.name,
        "mesh": mesh,
        "step_s": cost.step_s,
        "exposed_s": cost.exposed_s,
        "gib": cost.memory.step_bytes / 2**30,
    }


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one report from those of some runs each, in their order; a later one replaces equal runs."""
    runs = {}
    for report in reports:
        for each in report["runs"]:
            runs[each["id"]] = each
    loads = [report["load_per_core_before"] for report in reports]
    return {**reports[-1], "runs": list(runs.values()), "load_per_core_before": max(loads)}


def table(result: dict[str, Any]) -> list[str]:
    """The runs, with both choices and both estimates."""
    runs = result["runs"]
    head = ["run", "cluster", "experts' mesh", "with it", "step, s", "GiB", "search", "step, s", "GiB", "ratio", "why"]
    slower = [each["id"] for each in runs if each["auto"]["step_s"] > 1.002 * each["experts"]["step_s"]]
    return [
        "Estimated before compiling; nothing was compiled or run. Of the experts' choice only the mesh is taken, and"
        " the rest is the best of a search on it; both columns are of jshard's program. `ratio`: the search's step by"
        " the experts'. `why`: where the experts' mesh takes longer.",
        "",
        *markdown_table(head, map(_cells, runs), num_words=2),
        "",
        f"The search's choice is slower in {len(slower)} of {len(runs)} runs. {', '.join(slower)}".strip(),
        "",
        *markdown_table(
            ["run", "configurations", "CPU, s", "peak, GiB", "what differs from the run that was published"],
            map(_cells_of_search, runs),
            num_words=1,
        ),
        "",
        "`CPU`: of the search over all axes, on all cores together. `peak`: the resident memory of its process then.",
        "",
        "Sources:",
        "",
        *(f"- {each['id']}: {each['source']}" for each in runs),
    ]


def _cells_of_search(each: Run) -> list[str]:
    return [each["id"], str(each["considered"]), f"{each['cpu_s']:.0f}", f"{each['peak_gib']:.2f}", each["differs"]]


def _cells(each: Run) -> list[str]:
    experts = each["experts"]
    auto = each["auto"]
    ratio = auto["step_s"] / experts["step_s"]
    cells = [each["id"], each["topology"], experts["mesh"], experts["name"], f"{experts['step_s']:.3g}"]
    cells += [f"{experts['gib']:.1f}", f"{auto['mesh']}: {auto['name']}", f"{auto['step_s']:.3g}", f"{auto['gib']:.1f}"]
    return [*cells, f"{ratio:.2f}", each["why"] or "the same"]
