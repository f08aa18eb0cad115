"""Pairs of published configurations, planned, and counted by whether the plan orders them as they were measured.

The configurations are in published_pairs.json, or in another file of its form, which docs/published_pairs.md describes.
Each is estimated before compiling, which takes a second, or compiled for its cluster, which takes minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.published_pipelines import Pipeline, StepCost, pipeline_cost, step_cost
from benchmarks.published_pytorch import EagerMicrobatch, PyTorchProgram, eager_microbatch
from benchmarks.published_sums import more_once_s
from benchmarks.published_tensor import divided_s, sums_s
from benchmarks.stage_traces import StageTraces
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.costs import Costs
from jshard.cluster.machine import Machine, PlannedCluster, parse_known
from jshard.cluster.model_traces import ModelTraces
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.errors import ShardingError
from jshard.facts.device_files import SUFFIX
from jshard.plans.mesh import PIPE, data_shards
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe

PAIRS = Path(__file__).with_name("published_pairs.json")

_MODELS = Path(__file__).parents[1] / "models"

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
    recipe = _recipe(entry["model"], entry["recipe"], _settings(entry))
    mesh = _whole(entry["mesh"])
    with traced_for_device(cluster.topology.device):  # decides which attention is traced
        if mesh.get(PIPE, 1) > 1:
            step = _estimated_pipeline(entry, recipe, mesh, cluster.machine)
        else:
            step = _estimated_step(entry, mesh, cluster.machine)
    return {
        "step_s": step.step_s,
        "planned_tokens_per_s_per_device": _tokens(recipe) / step.step_s / cluster.topology.num_devices,
        "planned_gib": step.step_bytes / 2**30,
        "fits": step.fits(cluster.topology.device.hbm_bytes),
        "not_in_the_estimate": list(step.left_out),
    }


def _estimated_step(entry: Entry, mesh: Mapping[str, int], machine: Machine) -> StepCost:
    costs = _costs_on(entry, machine, _batch_settings(entry))
    rows = costs.recipe.batch_size // costs.recipe.accumulate // data_shards(mesh)
    return step_cost(costs, mesh, _units(entry), _eager(entry, costs, mesh, rows))


def _estimated_pipeline(entry: Entry, recipe: Recipe, mesh: Mapping[str, int], machine: Machine) -> StepCost:
    pipeline = Pipeline.of(recipe, mesh)
    of_stage = dataclasses.replace(machine, num_devices=machine.num_devices // pipeline.num_stages)
    settings = (*pipeline.batch_settings, f"sync={_sync(entry)}")

    def stage_of(num_layers: int) -> Costs:
        return _costs_on(entry, of_stage, settings, num_layers)

    def eager_of(costs: Costs) -> EagerMicrobatch:
        return _eager(entry, costs, pipeline.mesh, pipeline.rows, is_stage=True)

    return pipeline_cost(stage_of, pipeline, _units(entry), eager_of)


def _eager(
    entry: Entry, costs: Costs, mesh: Mapping[str, int], rows: int, *, is_stage: bool = False
) -> EagerMicrobatch:
    """Returns what a microbatch takes in PyTorch; nothing of its own, if that is not what ran."""
    if _is_jax(entry):
        return EagerMicrobatch()
    program = PyTorchProgram(
        remat=entry["knobs"]["remat"],
        is_compiled=entry.get("compiled", False),
        unfused_norms=entry.get("unfused_norms", False),
        split_sequence=entry.get("split_sequence", False),
        whole_logits=entry.get("whole_logits", False),
        fused_loss=entry.get("fused_loss", False),
        kept_logits=entry.get("kept_logits", False),
        whole_sums=entry.get("whole_sums", False),
        broadcasts=entry.get("broadcasts", False),
        blocking_sums=entry.get("blocking_sums", False),
        sums_each_product=entry.get("sums_each_product", False),
    )
    microbatch = eager_microbatch(program, costs.recipe, mesh, rows=rows, assumptions=costs.machine.assumptions)
    over_tensor_s = divided_s(program, costs, mesh, rows=rows) + sums_s(program, costs, mesh, _units(entry), rows=rows)
    return dataclasses.replace(
        microbatch,
        more_s=microbatch.more_s + over_tensor_s,
        more_once_s=more_once_s(program, costs, mesh, _units(entry), is_stage=is_stage),
    )


def _is_jax(entry: Entry) -> bool:
    return "JAX" in entry["framework"]


def _units(entry: Entry) -> Mapping[str, Any]:
    """Returns the settings of the layers.

    jshard gathers the next layer while one computes. Other programs in JAX leave the order of gathers to the compiler,
    and it moves none from one round of a loop over layers into the round before.
    """
    if not _is_jax(entry):
        return entry["units"]
    return {"prefetch": "compiler", **entry["units"]}


def _sync(entry: Entry) -> str:
    """Returns when gradients are reduced: once a step by default where gathered parameters stay, as ZeRO-1 does."""
    keeps_parameters = entry["units"].get("reshard_after_forward") is False
    return entry.get("sync", "last" if keeps_parameters else "each")


def _settings(entry: Entry) -> tuple[str, ...]:
    """Returns the changes of the recipe."""
    return (*entry["settings"], f"sync={_sync(entry)}")


def _is_of_batch(setting: str) -> bool:
    name, _, _ = setting.partition("=")
    return name in ("batch_size", "accumulate", "sync")


def _batch_settings(entry: Entry) -> tuple[str, ...]:
    return tuple(setting for setting in _settings(entry) if _is_of_batch(setting))


def _costs_on(entry: Entry, machine: Machine, batch_settings: Sequence[str], num_layers: int = 0) -> Costs:
    """Returns the costs of a configuration; of one with fewer layers, if a number is given.

    They share with others what is traced: it does not depend on the machine, nor on the batch.
    """
    settings = tuple(setting for setting in entry["settings"] if not _is_of_batch(setting))
    kind, _, _ = entry["topology"].rpartition(":")
    traces = _traces(kind, entry["model"], entry["recipe"], settings)
    if num_layers:
        traces = _stage_traces(traces, num_layers)
    recipe = override(traces.recipe, batch_settings)
    return Costs(traces.model_file, recipe, machine, traces=traces)


@functools.lru_cache(maxsize=16)  # as many as the settings of neighbors in a file differ
def _traces(kind: str, model: str, recipe: str, settings: tuple[str, ...]) -> ModelTraces:
    """Returns the traces of a model on one kind of device."""
    del kind  # the caller traces for it
    return ModelTraces(load_model_file(str(_MODELS / model)), _recipe(model, recipe, settings))


@functools.lru_cache(maxsize=64)
def _stage_traces(whole: ModelTraces, num_layers: int) -> ModelTraces:
    """Returns the traces of a model with fewer layers; without a loop over layers they are its own."""
    recipe = override(whole.recipe, (f"model.n_layer={num_layers}",))
    if not recipe.model.scan:
        return ModelTraces(whole.model_file, recipe)
    return StageTraces(whole, recipe)


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
        settings=_settings(entry),
        mesh=entry["mesh"],
        units=_units(entry),
        topology=topology_of(entry),
        profile="fastest",
    )
    plan = ClusterPlan.of(compile_step(request), cluster=cluster, name=entry["id"])
    step_s = plan.estimates.stated.step_s
    recipe = _recipe(entry["model"], entry["recipe"], _settings(entry))
    return {
        "step_s": step_s,
        "planned_tokens_per_s_per_device": _tokens(recipe) / step_s / cluster.topology.num_devices,
        "planned_gib": plan.step.memory.peak_bytes / 2**30,
        "fits": plan.fits,
        "not_in_the_estimate": [],
    }


def _tokens(recipe: Recipe) -> int:
    return recipe.batch_size * recipe.sequence_length
