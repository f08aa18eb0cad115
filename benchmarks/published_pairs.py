"""Pairs of published configurations, planned, and counted by whether the plan orders them as they were measured.

The configurations are in published_pairs.json, or in another file of its form, which docs/published_pairs.md describes.
Each is estimated before compiling, which takes a second, or compiled for its cluster, which takes minutes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.ranking import (
    APART,
    Configuration,
    Judge,
    Knobs,
    Pair,
    apart,
    by_plan,
    by_rule,
    fits,
    is_conflicting,
    pairs_of,
    score,
    separated,
    worst,
)
from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, Variant, compile_step
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster, parse_known
from jshard.cluster.report import ClusterPlan
from jshard.cluster.search import ROOM
from jshard.cluster.topology import parse_topology
from jshard.errors import ShardingError
from jshard.facts.device_files import SUFFIX
from jshard.plans.mesh import PIPE
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe

PAIRS = Path(__file__).with_name("published_pairs.json")

_MODELS = Path(__file__).parents[1] / "models"
_SHOWN_WORST = 20

By = Literal["estimate", "compiled"]
Entry = Mapping[str, Any]
"""A configuration of the file, with what its group says of all of its configurations."""


# ---- the file


def read_pairs(file: Path, only: str = "") -> list[Entry]:
    """Returns the configurations of a file, each with what is shared in its group.

    Args:
        file: of the form of published_pairs.json.
        only: beginnings of the wanted ids, with commas between them; empty for all.
    """
    wanted = tuple(only.split(",")) if only else ("",)
    entries = []
    for group in json.loads(file.read_text())["groups"]:
        shared = {name: value for name, value in group.items() if name not in ("id", "configurations")}
        for own in group["configurations"]:
            if own["id"].startswith(wanted):
                entries.append(_merged(shared, own) | {"group": group["id"]})
    return entries


def _merged(shared: Entry, own: Entry) -> dict[str, Any]:
    """Returns a configuration with its group's values: its settings are added to theirs, other values replace them."""
    merged = {**shared, **own}
    merged["settings"] = [*shared["settings"], *own["settings"]]
    differences = [entry["differs"] for entry in (shared, own) if "differs" in entry]
    merged["differs"] = "; ".join(differences)
    return merged


def topology_of(entry: Entry) -> str:
    """Returns the entry's cluster. Files of devices are in this folder."""
    text = entry["topology"]
    if SUFFIX in text:
        return str(Path(__file__).parent / text)
    return text


def cluster_of(entry: Entry) -> PlannedCluster:
    """Returns the entry's cluster with what is known of it."""
    known = parse_known([f"{name}={value}" for name, value in entry["assume"].items()])
    return PlannedCluster(parse_topology(topology_of(entry)), known)


# ---- planning


def plan_pairs(file: Path, *, by: By, only: str = "") -> dict[str, Any]:
    """Plans the configurations of a file.

    Returns:
        "configurations": a dict for each; "refused": why the others cannot be planned, by id.
    """
    plan = _estimated if by == "estimate" else _compiled
    planned = []
    refused = {}
    for entry in read_pairs(file, only):
        print(f"planning {entry['id']} for {entry['topology']}", flush=True)
        try:
            planned.append({**entry, **plan(entry)})
        except ShardingError as error:
            refused[entry["id"]] = error.what
    return {"by": by, "configurations": planned, "refused": refused}


def _estimated(entry: Entry) -> dict[str, Any]:
    """Returns what is estimated before compiling."""
    cluster = cluster_of(entry)
    recipe = _recipe(entry["model"], entry["recipe"], tuple(entry["settings"]))
    shared = tuple(setting for setting in entry["settings"] if not setting.startswith("accumulate="))
    costs = _costs(entry["model"], entry["recipe"], shared, entry["topology"], tuple(entry["assume"].items()))
    mesh = _whole(entry["mesh"])
    room_bytes = ROOM * cluster.topology.device.hbm_bytes
    as_written, *with_more_in_flight = [costs.of(variant) for variant in _variants(entry, recipe, mesh)]
    quickest = min((as_written, *with_more_in_flight), key=lambda cost: cost.step_s)
    return {
        "settings_planned": list(quickest.variant.settings),
        "step_s": quickest.step_s,
        "planned_tokens_per_s_per_device": _tokens(recipe) / quickest.step_s / cluster.topology.num_devices,
        "planned_gib": as_written.memory.step_bytes / 2**30,
        "fits": as_written.memory.step_bytes <= room_bytes,
        "not_in_the_estimate": list(as_written.left_out),
    }


def _variants(entry: Entry, recipe: Recipe, mesh: Mapping[str, int]) -> Iterator[Variant]:
    """Yields a configuration as it is written, and with more microbatches in flight.

    Pipelines elsewhere have all microbatches of a step in flight, sum gradients once, and hold the values of as many as
    there are stages (1F1B). jshard holds those of all that are in flight. So the memory is that of the configuration as
    written, with as many as there are stages, and the time is that of the quickest.
    """
    pipe = mesh.get(PIPE, 1)
    in_flight = recipe.stages.microbatches or pipe
    for factor in range(1, recipe.accumulate + 1):
        if recipe.accumulate % factor:
            continue
        yield Variant(
            name=entry["id"],
            mesh=mesh,
            accumulate=recipe.accumulate // factor,
            units=entry["units"],
            stage_microbatches=in_flight * factor if pipe > 1 else None,
        )
        if pipe == 1:  # the first is the only one
            return


@functools.lru_cache(maxsize=4)  # as many as the settings of neighbors in a file differ
def _costs(
    model: str, recipe: str, settings: tuple[str, ...], topology: str, assume: tuple[tuple[str, Any], ...]
) -> Costs:
    """Returns the costs of configurations that differ in mesh and microbatches alone: they share what is traced."""
    cluster = cluster_of({"topology": topology, "assume": dict(assume)})
    return Costs(load_model_file(str(_MODELS / model)), _recipe(model, recipe, settings), cluster.machine)


def _recipe(model: str, recipe: str, settings: tuple[str, ...]) -> Recipe:
    return override(load_model_file(str(_MODELS / model)).recipe(recipe)[1], settings)


def _whole(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the mesh with all of its data axes, as a search has it."""
    return {"replica": 1, "fsdp": 1, **mesh}


def _compiled(entry: Entry) -> dict[str, Any]:
    """Returns what is estimated from the compiled step."""
    cluster = cluster_of(entry)
    request = CompileRequest(
        model=str(_MODELS / entry["model"]),
        recipe=entry["recipe"],
        settings=tuple(entry["settings"]),
        mesh=entry["mesh"],
        units=entry["units"],
        topology=topology_of(entry),
        profile="fastest",
    )
    plan = ClusterPlan.of(compile_step(request), cluster=cluster, name=entry["id"])
    step_s = plan.estimates.stated.step_s
    recipe = _recipe(entry["model"], entry["recipe"], tuple(entry["settings"]))
    return {
        "step_s": step_s,
        "planned_tokens_per_s_per_device": _tokens(recipe) / step_s / cluster.topology.num_devices,
        "planned_gib": plan.step.memory.peak_bytes / 2**30,
        "fits": plan.fits,
        "not_in_the_estimate": [],
    }


def _tokens(recipe: Recipe) -> int:
    return recipe.batch_size * recipe.sequence_length


# ---- the report


def table(result: Mapping[str, Any]) -> list[str]:
    """The counts, those of each source, what fits, and the pairs that are ordered most wrongly."""
    configurations = [_configuration(entry) for entry in result["configurations"]]
    pairs = pairs_of(configurations)
    sources = dict.fromkeys(entry["source"] for entry in result["configurations"])
    return [
        *_how(result),
        *_counts(pairs),
        *_by_source(pairs),
        *_what_fits(configurations),
        *_worst(pairs),
        *_refused(result["refused"]),
        "Sources:",
        "",
        *(f"- {source}" for source in sources),
    ]


def _configuration(entry: Entry) -> Configuration:
    return Configuration(
        id=entry["id"],
        group=entry["group"],
        knobs=Knobs(**entry["knobs"]),
        published=entry.get("tokens_per_s_per_device"),
        planned=entry["planned_tokens_per_s_per_device"],
        planned_to_fit=entry["fits"],
    )


def _how(result: Mapping[str, Any]) -> list[str]:
    words = "estimated before compiling" if result["by"] == "estimate" else "compiled for its cluster, and estimated"
    missing = dict.fromkeys(text for entry in result["configurations"] for text in entry["not_in_the_estimate"])
    lines = [f"Planned, and nothing was run: each configuration is {words}, and pairs are ordered by tokens a second"]
    lines[0] += " and device. Pairs that differ by a tenth or less are apart. Of ties, half count as ordered."
    if missing:
        lines += ["", f"Not in the estimate: {'; '.join(missing)}."]
    return [*lines, ""]


def _counts(pairs: Sequence[Pair]) -> list[str]:
    far = apart(pairs)
    conflicting = [pair for pair in far if is_conflicting(pair)]
    agreeing = [pair for pair in far if not is_conflicting(pair)]
    near = [pair for pair in pairs if pair.gap <= APART]
    kinds = {
        "**more than 10 % apart**": far,
        "of these, knobs pull against each other": conflicting,
        "of these, knobs agree or are equal": agreeing,
        "at most 10 % apart": near,
    }
    rows = [[kind, str(len(them)), _share(them, by_plan), _share(them, by_rule)] for kind, them in kinds.items()]
    return [*markdown_table(["pairs", "number", "ordered by the plan", "by the rule of thumb"], rows), ""]


def _share(pairs: Sequence[Pair], judge: Judge) -> str:
    result = score(pairs, judge)
    if not result.total:
        return "-"
    ties = f", {result.tied} tied" if result.tied else ""
    return f"{result.share:.1%} ({result.wrong} wrong{ties})"


def _by_source(pairs: Sequence[Pair]) -> list[str]:
    far = apart(pairs)
    rows = []
    shares: dict[Judge, list[float]] = {by_plan: [], by_rule: []}
    for source in dict.fromkeys(pair.faster.source for pair in far):
        mine = [pair for pair in far if pair.faster.source == source]
        conflicting = [pair for pair in mine if is_conflicting(pair)]
        cells = [str(len(mine)), _share(mine, by_plan), _share(mine, by_rule)]
        cells += [str(len(conflicting)), _share(conflicting, by_plan), _share(conflicting, by_rule)]
        rows.append([source, *cells])
        for judge, each in shares.items():
            each.append(score(mine, judge).share)
    means = {judge: math.fsum(each) / len(each) for judge, each in shares.items() if each}
    head = ["source", "pairs", "plan", "rule", "conflicting", "plan", "rule"]
    lines = ["Of the pairs more than 10 % apart, by source:", "", *markdown_table(head, rows), ""]
    if means:
        words = f"Each source counted once: the plan {means[by_plan]:.1%}, the rule {means[by_rule]:.1%}."
        lines += [words, ""]
    return lines


def _what_fits(configurations: Sequence[Configuration]) -> list[str]:
    counts = fits(configurations)
    total, right = separated(configurations)
    lines = [
        f"{counts.ran} configurations ran, of which {counts.ran_as_planned} are planned to fit."
        f" {counts.out_of_memory} ran out of memory, of which {counts.out_of_memory_as_planned} are planned not to fit."
    ]
    if total:
        lines[0] += (
            f" Together {counts.share:.1%} are planned as they were. Of {total} pairs of which one ran out of memory,"
            f" {right} are separated ({right / total:.1%})."
        )
    return [*lines, ""]


def _worst(pairs: Sequence[Pair]) -> list[str]:
    rows = [
        [pair.faster.id, pair.slower.id, f"{1 + pair.gap:.2f}", f"{1 + pair.planned_gap:.2f}"]
        for pair in worst(apart(pairs), _SHOWN_WORST)
    ]
    if not rows:
        return []
    head = ["faster, as published", "slower", "published ratio", "planned ratio"]
    return ["Ordered most wrongly:", "", *markdown_table(head, rows, num_words=2), ""]


def _refused(refused: Mapping[str, str]) -> Iterator[str]:
    if refused:
        yield "Not planned:"
        yield ""
        yield from (f"- {name}: {why}" for name, why in refused.items())
        yield ""
