"""The rows of the grid: what a compiled program is and takes, as values that are stored in a line of JSON each."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid.cells import JSHARD, NONE, Cell, as_key
from jshard.cluster.compile import CompiledStep, CompileRequest, compile_step
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology
from jshard.errors import FourPartError
from jshard.inspect.hlo import Window
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import versions

Row = Mapping[str, Any]

_TIMEOUT_S = 3600
_MODELS = Path(__file__).parents[2] / "models"


def compiled_row(cell: Cell, programs: Path | None = None) -> dict[str, Any]:
    """Compiles a cell; of a program that does not compile, the row has the reason.

    Args:
        cell: what to compile.
        programs: a folder for the text of the program, compressed.
    """
    row = as_key(cell.request, versions()) | {
        "model": cell.model,
        "cluster": cell.cluster,
        "system": cell.system,
        "reduce_dtype": cell.reduce_dtype,
        "profile": None if cell.options == NONE else cell.options,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
    }
    try:
        step = compile_step(_with_unit_bytes(cell.request), timeout_s=_TIMEOUT_S)
    except FourPartError as error:
        return row | {"error": str(error).splitlines()[0]}
    if programs is not None:
        programs.mkdir(parents=True, exist_ok=True)
        name = cell.label.replace(" ", "_").replace(":", "-")
        (programs / f"{name}.hlo.gz").write_bytes(gzip.compress(step.text.encode()))
    return row | _facts(cell, step)


def _with_unit_bytes(request: CompileRequest) -> CompileRequest:
    """Returns a request with the size of the largest unit, on which the flag that describes the cluster depends.

    That of plain Flax has none of its own; the flag is made from jshard's units.
    """
    if request.xla_flags != "auto":
        return request
    model_file = load_model_file(_MODELS / Path(request.model).name)
    recipe = override(model_file.recipe(request.recipe)[1], request.settings)
    costs = Costs(model_file, recipe, PlannedCluster(parse_topology(request.topology)).machine)
    return dataclasses.replace(request, unit_bytes=costs.unit_bytes(request.mesh))


def _facts(cell: Cell, step: CompiledStep) -> dict[str, Any]:
    """Returns what a program is, by the compiler, and what it takes, by the estimate."""
    cluster = PlannedCluster(parse_topology(cell.cluster))
    plan = ClusterPlan.of(step, cluster=cluster, name=cell.model)
    stated = plan.estimates.stated
    windows = plan.audit.schedule.windows
    facts = {
        "step_s": stated.step_s,
        "lowest_s": plan.estimates.span("step_s")[0],
        "highest_s": plan.estimates.span("step_s")[1],
        "split_s": dict(stated.split_s),
        "communication_s": stated.communication_s,
        "exposed_s": stated.exposed_s,
        "exposed_by_kind_s": dict(stated.exposed_by_kind_s),
        "hidden": stated.hidden,
        "peak_bytes": step.memory.peak_bytes,
        "temporaries_bytes": step.memory.temporaries_bytes,
        "fits": plan.fits,
        "collectives": sum(window.executions for window in windows),
        "sent_bytes": _sent_bytes(windows),
        "flops": stated.flops,
        "compile_s": step.compile_s,
        "cpu_s": step.cpu_s,
        "notes": list(step.notes),
    }
    if cell.system == JSHARD:  # there is no plan of what plain Flax sends
        facts["as_planned"] = plan.audit.ok
        facts["differences"] = [str(difference) for difference in plan.audit.differences]
    return facts


def _sent_bytes(windows: Sequence[Window]) -> dict[str, dict[str, float]]:
    """Returns the bytes of whole arrays in a step, by kind of collective and by dtype."""
    sent: dict[str, dict[str, float]] = {}
    for window in windows:
        by_dtype = sent.setdefault(window.kind, {})
        for dtype, num_bytes in window.sizes:
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + num_bytes * window.executions
    return sent


# ---- stored rows


def append(path: Path, row: Row) -> None:
    """Adds a row to a file, as one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(paths: Iterable[Path]) -> list[Row]:
    """Returns the rows of files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


class Stored:
    """Stored rows, by what their programs depend on. Of several for the same program the last one counts.

    Args:
        rows: what is stored.
        any_versions: whether rows of other compilers count, too. Those for TPUs are of another jax than those for GPUs.
    """

    def __init__(self, rows: Iterable[Row], *, any_versions: bool = False) -> None:
        self._any_versions = any_versions
        # A row with an error is no result: its program may compile now.
        self._rows = {self._text(row): row for row in rows if "error" not in row}

    def row(self, cell: Cell) -> Row | None:
        """Returns the row of a cell; None if no row is of it, or of these versions."""
        row = self._rows.get(self._text(as_key(cell.request, versions())))
        if row is None:
            return None
        return {**row, "model": cell.model}  # one program may serve models of several names

    def _text(self, key: Mapping[str, Any]) -> str:
        parts = [key["request"]] if self._any_versions else [key["request"], key["versions"]]
        return json.dumps(parts, sort_keys=True)
