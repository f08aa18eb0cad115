"""One step on 8 to 16,384 GPUs, compiled for each: one sequence (or more) per GPU at every size.

`fsdp` takes all GPUs up to 64 for the model of 1.6B parameters, and up to 512 for that of 175B; the rest are replicas.
Nothing is run, no time is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.planned import EXPLAINED, MODEL, SMALL, Point, fitting, rows_of, table_of
from jshard.cluster.compile import CompileRequest
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.topology import parse_topology
from jshard.recipes.overrides import override
from jshard.train import load_model_file

TITLE = "A step from 8 to 16,384 GPUs"
MEASURES_TIME = False
_FULL = {"gpt2_xl": ((1, 8, 64, 2048), 8, 64), "gpt3_175b": ((16, 64, 256, 2048), 1, 512)}  # hosts, each, shards
_QUICK = {"gpt2_small": ((1,), 1, 8)}


def run(*, quick: bool) -> dict[str, Any]:
    """Compiles the step for every number of hosts with eight H100 each."""
    points = [
        _point(recipe, hosts, each, widest, SMALL if quick else ())
        for recipe, (counts, each, widest) in (_QUICK if quick else _FULL).items()
        for hosts in counts
    ]
    return {"rows": rows_of(points)}


def _point(recipe: str, hosts: int, each: int, widest: int, settings: tuple[str, ...]) -> Point:
    gpus = 8 * hosts
    topology = f"h100:{hosts}x8"
    fsdp = min(gpus, widest)
    mesh = {"replica": gpus // fsdp, "fsdp": fsdp, "tensor": 1}
    settings = (*settings, f"batch_size={each * gpus}")
    model_file = load_model_file(MODEL)
    costs = Costs(
        model_file, override(model_file.recipe(recipe)[1], settings), PlannedCluster(parse_topology(topology)).machine
    )
    return Point(
        labels={"model": recipe, "GPUs": gpus, "mesh": f"{mesh['replica']} x {fsdp}", "sequences per GPU": each},
        request=CompileRequest(
            model=MODEL,
            recipe=recipe,
            settings=settings,
            mesh=mesh,
            topology=topology,
            profile="fastest",
            xla_flags="auto",  # else the scheduler takes collectives over many groups for quick
            unit_bytes=costs.unit_bytes(mesh),
        ),
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """The rows, and the share of the smallest cluster's rate that remains on the largest."""
    lines = [EXPLAINED, "mesh: replicas x shards, on H100 with eight in a host.", "", *table_of(result["rows"]), ""]
    for recipe, rows in _by_recipe(result).items():
        first, last = rows[0], rows[-1]
        left = last["stated"]["flops_per_s"] / first["stated"]["flops_per_s"]
        lines.append(f"{recipe}: {left:.1%} of the rate per GPU is left from {_gpus(first)} to {_gpus(last)} GPUs.")
    return lines


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """The rate per GPU over the number of GPUs."""
    axes = new_axes(width=7, height=4)
    for recipe, rows in _by_recipe(result).items():
        gpus = [_gpus(row) for row in rows]
        axes.plot(gpus, [row["stated"]["flops_per_s"] / 1e12 for row in rows], marker="o", label=recipe)
        low, high = ([row[case]["flops_per_s"] / 1e12 for row in rows] for case in ("slowest", "fastest"))
        axes.fill_between(gpus, low, high, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("H100s")
    axes.set_ylabel("estimated TFLOP/s per GPU (the model's)")
    axes.legend(fontsize=8)
    return [save(axes, folder / f"{stem}.svg")]


def _by_recipe(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in fitting(result["rows"]):
        found.setdefault(row["labels"]["model"], []).append(row)
    return found


def _gpus(row: Mapping[str, Any]) -> int:
    return row["labels"]["GPUs"]
