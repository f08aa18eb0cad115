"""Memory and time of a train step, estimated before anything is compiled, and compiled; and the differences.

    python -m benchmarks.run memory --compiled rows.jsonl          # compiles what is not in the file, and adds it
    python -m benchmarks.run memory --compiled rows.jsonl --stored-only

The estimate is that of `jshard plan --auto`, by which configurations are ranked and those that do not fit are left out.
It is compared with the same configuration compiled for an absent cluster of GPUs, and estimated from its compiled
schedule, as by `jshard plan --topology`. Nothing is run, no time is measured, and no GPU is needed: only the extra
`plan-gpu`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.cells import as_key
from benchmarks.grid.rows import append, read
from benchmarks.memory_configurations import FULL, QUICK, Configuration
from benchmarks.planned import require
from benchmarks.tables import markdown_table
from jshard.cluster.compile import Variant, compile_step
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.plans.mesh import CONTEXT, data_shards
from jshard.recipes.building import batch_of
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe, versions

Row = Mapping[str, Any]

TITLE = "Memory and time of a train step, estimated before compiling and compiled"
MEASURES_TIME = False

_MEMORY_BOUND = 0.15  # relative differences that an estimate may have
_TIME_BOUND = 0.10
_TIMEOUT_S = 3600


def arguments(parser: argparse._ArgumentGroup) -> None:
    """Adds the options of this case."""
    add = parser.add_argument
    add("--only", default="", metavar="PATTERN,...", help="of labels, as 'gpt 124M*'; * is anything")
    add("--compiled", type=Path, metavar="FILE", help="takes compiled programs from it, and adds those that it lacks")
    add("--stored-only", action="store_true", help="compiles nothing: only what is in that file")
    add("--compile-only", action="store_true", help="estimates nothing: fills that file")
    add("--programs", type=Path, metavar="DIR", help="stores the text of compiled programs there")
    add("--show", action="store_true", help="prints the labels, and compiles nothing")


def run(
    *,
    quick: bool,
    only: str = "",
    compiled: Path | None = None,
    stored_only: bool = False,
    compile_only: bool = False,
    programs: Path | None = None,
    show: bool = False,
) -> Iterator[dict[str, Any]]:
    """Estimates and compiles the configurations, or takes them as compiled before; yields the rows so far after each.

    A quick run only shows that it works.
    """
    configurations = list(_requested(QUICK if quick else FULL, only))
    if show:
        raise SystemExit("\n".join(configuration.label for configuration in configurations))
    if not stored_only:
        require("cuda")
    stored = _Stored(compiled)
    rows: list[Row] = []
    for configuration in configurations:
        program = stored.row(configuration)
        if program is None and stored_only:
            continue
        if program is None:
            program = compiled_row(configuration, programs)
            stored.add(program)
        if not compile_only:
            rows.append(row_of(configuration, program))
            print(_in_words(rows[-1]), flush=True)
        yield {"rows": rows}


def _requested(configurations: Sequence[Configuration], only: str) -> Iterator[Configuration]:
    patterns = [pattern for pattern in only.split(",") if pattern]
    for configuration in configurations:
        if not patterns or any(fnmatch.fnmatch(configuration.label, pattern) for pattern in patterns):
            yield configuration


def row_of(configuration: Configuration, program: Row) -> dict[str, Any]:
    """Returns the estimate of a configuration beside its compiled program."""
    cost = estimated(configuration)
    memory = cost.memory
    return {
        "name": configuration.name,
        "model": configuration.model,
        "topology": configuration.topology,
        "command": configuration.command,
        "held_bytes": memory.held_bytes,
        "held_compiled_bytes": program["held_bytes"],
        "estimate_bytes": memory.step_bytes,
        "peak_bytes": program["peak_bytes"],
        "memory_ratio": memory.step_bytes / program["peak_bytes"],
        "estimate_s": cost.step_s,
        "compiled_s": program["step_s"],
        "time_ratio": cost.step_s / program["step_s"],
        "estimate": dataclasses.asdict(memory),
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
        "left_out": list(cost.left_out),
        "program": dict(program),
    }


# ---- estimated


def estimated(configuration: Configuration) -> Cost:
    """Returns the estimate before compiling, as a search makes it."""
    model_file, recipe = _recipe_of(configuration)
    topology = parse_topology(configuration.topology)
    with traced_for_device(topology.device):
        costs = Costs(model_file, recipe, PlannedCluster(topology).machine)
        variant = Variant(name=configuration.name, mesh=configuration.sizes, units=configuration.units)
        return costs.of(variant)


def _recipe_of(configuration: Configuration) -> tuple[ModelFile, Recipe]:
    model_file = load_model_file(configuration.request.model)
    _, recipe = model_file.recipe(configuration.recipe)
    return model_file, override(recipe, configuration.settings)


# ---- compiled


class _Stored:
    """Programs compiled before, by what they depend on beside the code of jshard and of the model file.

    Args:
        path: a file with a line of JSON for each; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def row(self, configuration: Configuration) -> Row | None:
        """Returns the program of a configuration; None if it is not stored. Others may add to the file meanwhile."""
        if self._path is None or not self._path.exists():
            return None
        key = _text(as_key(configuration.request, versions()))
        for row in read([self._path]):
            if _text(row["key"]) == key:
                return row
        return None

    def add(self, row: Row) -> None:
        """Stores a program."""
        if self._path is not None:
            append(self._path, row)


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def compiled_row(configuration: Configuration, programs: Path | None = None) -> dict[str, Any]:
    """Compiles a configuration."""
    print(f"compiling {configuration.label}: {configuration.command}", flush=True)
    step = compile_step(configuration.request, timeout_s=_TIMEOUT_S)
    if programs is not None:
        programs.mkdir(parents=True, exist_ok=True)
        name = configuration.label.replace(" ", "_").replace("/", "-")
        (programs / f"{name}.hlo.gz").write_bytes(gzip.compress(step.text.encode()))
    cluster = PlannedCluster(parse_topology(configuration.topology))
    plan = ClusterPlan.of(step, cluster=cluster, name=configuration.name)
    stated = plan.estimates.stated
    return {
        "key": as_key(configuration.request, versions()),
        "held_bytes": step.memory.arguments_bytes - _batch_bytes(configuration),
        "peak_bytes": step.memory.peak_bytes,
        "memory": dataclasses.asdict(step.memory),
        "step_s": stated.step_s,
        "exposed_s": stated.exposed_s,
        "communication_s": stated.communication_s,
        "split_s": dict(stated.split_s),
        "remats": sorted({unit.remat for unit in step.plan.units[1:]}),
        "options": dict(step.options),
        "cpu_s": step.cpu_s,
    }


def _batch_bytes(configuration: Configuration) -> int:
    """Returns the bytes of a device's part of the batch, which is an argument of the compiled step, too."""
    model_file, recipe = _recipe_of(configuration)
    total_bytes = 0
    for array in batch_of(model_file, recipe, recipe.batch_size).values():
        total_bytes += array.size * array.dtype.itemsize
    sizes = configuration.sizes
    return total_bytes // (data_shards(sizes) * sizes.get(CONTEXT, 1))


# ---- the report


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the rows by model, and how many are within the bounds."""
    rows = result["rows"]
    lines = [
        "Compiled and estimated; nothing was run.",
        "GiB on one device, and seconds of a step. *held*: parameters and optimizer state, which the compiled step",
        "takes as arguments beside the batch. *peak*: of the step. The estimates are made from the traced model,",
        "before anything is compiled; *compiled* seconds are those of the compiled schedule, as estimated by",
        "`jshard plan`.",
        "",
    ]
    if not rows:
        return lines
    head = ["configuration", "cluster", "held, plan", "held, compiled"]
    head += ["peak, estimate", "peak, compiled", "ratio", "s, estimate", "s, compiled", "ratio"]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        lines += [f"models/{model}.py: {_summary(of_model)}", ""]
        lines += [*markdown_table(head, map(_cells, of_model), num_words=2), ""]
    differences = [
        abs(row["held_bytes"] / row["held_compiled_bytes"] - 1) for row in rows if row["held_compiled_bytes"]
    ]
    held = f" Held: within {max(differences):.1%}." if differences else ""
    return [*lines, f"All: {_summary(rows)}{held}"]


def _summary(rows: Sequence[Row]) -> str:
    memory = _share_in_words(rows, "memory_ratio", _MEMORY_BOUND)
    time = _share_in_words(rows, "time_ratio", _TIME_BOUND)
    return f"peak: {memory}; time: {time}."


def _share_in_words(rows: Sequence[Row], name: str, bound: float) -> str:
    ratios = [row[name] for row in rows]
    num_near = sum(abs(ratio - 1) <= bound for ratio in ratios)
    return f"{num_near} of {len(ratios)} within {bound:.0%}, ratios from {min(ratios):.2f} to {max(ratios):.2f}"


def _cells(row: Row) -> list[str]:
    gib = [_gib(row[name]) for name in ("held_bytes", "held_compiled_bytes", "estimate_bytes", "peak_bytes")]
    seconds = [f"{row[name]:.3f}" for name in ("estimate_s", "compiled_s")]
    return [row["name"], row["topology"], *gib, f"{row['memory_ratio']:.2f}", *seconds, f"{row['time_ratio']:.2f}"]


def _in_words(row: Row) -> str:
    memory = f"{_gib(row['estimate_bytes'])} for {_gib(row['peak_bytes'])} GiB ({row['memory_ratio']:.2f})"
    time = f"{row['estimate_s']:.3f} for {row['compiled_s']:.3f} s ({row['time_ratio']:.2f})"
    return f"{row['model']} {row['name']}: {memory}, {time}"


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
