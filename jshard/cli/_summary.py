"""What `jshard train` prints of a run before it begins: six lines, and what their sums do not show."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from jshard._live import fitted
from jshard._text import counted, human_bytes
from jshard.cli._devices import as_option
from jshard.cli._request import Request
from jshard.data import Data
from jshard.inspect.communication import BACKWARD
from jshard.inspect.explain import Explanation
from jshard.inspect.memory import Memory
from jshard.inspect.plan_tables import beyond_the_sums
from jshard.plans.plan import ShardPlan
from jshard.recipes.recipe import Recipe, gathers_once

_MARGIN = len("traffic") + 2


def summary(request: Request, explanation: Explanation, mesh: Mesh, data: Data, out: Path) -> Iterator[str]:
    """Yields the lines on a run that is about to begin; `--dry-run` prints the tables that they are taken from."""
    plan = explanation.plan
    lines = {
        "model": f"{request.model_file.path.stem}, recipe {request.name}: {_size_text(plan)}",
        "mesh": f"{_mesh_text(mesh)} on {devices_text()}",
        "memory": _memory_text(explanation.memory),
        "traffic": _traffic_text(explanation, request.recipe),
        "data": data.description,
        "folder": f"{out} (all tables of the plan: --dry-run)",
    }
    for name, text in lines.items():
        yield fitted(f"{name:<{_MARGIN}}{text}", sys.stdout, indent=" " * _MARGIN)
    # A user who sees only the sums would not look for these.
    yield from beyond_the_sums(plan, explanation.others)


def devices_text() -> str:
    """Describes the devices: how many of which kind, and whether they are simulated."""
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind}"
    if jax.process_count() > 1:
        text += f" of {counted(jax.process_count(), 'process')}"
    # A process has one CPU device unless more are simulated.
    if devices[0].platform == "cpu" and len(devices) > jax.process_count():
        text += f", simulated on {counted(os.cpu_count() or 1, 'core')} (not for speed)"
    return text


def _size_text(plan: ShardPlan) -> str:
    text = f"{plan.num_parameters:,} parameters, {human_bytes(plan.logical_bytes)}"
    if plan.num_frozen:
        text += f"; {plan.num_frozen:,} are frozen"
    return text


def _mesh_text(mesh: Mesh) -> str:
    """Returns the axes that split something; `fsdp` in any case, as on a single device none does."""
    # In the form of `--mesh`, which another run may repeat.
    degrees = {axis: degree for axis, degree in mesh.shape.items() if degree > 1}
    return as_option(degrees) or "fsdp=1"


def _memory_text(memory: Memory) -> str:
    text = f"{human_bytes(memory.held_bytes)} per device between steps, {human_bytes(memory.step_bytes)} in a step"
    if memory.activations_bytes is None:
        text += " without activations"
    text += " (estimate)"
    if memory.host_bytes:
        text += f"; {human_bytes(memory.host_bytes)} in host memory"
    return text


def _traffic_text(explanation: Explanation, recipe: Recipe) -> str:
    """Returns what a device sends for parameters and gradients: all of it for each microbatch, or once a step."""
    if gathers_once(recipe):
        # What backward has gathered in each microbatch is there already.
        traffic = [row for row in explanation.traffic if not row.purpose.startswith(BACKWARD)]
        sent_bytes = sum(row.wire_bytes for row in traffic)
    else:
        sent_bytes = recipe.accumulate * sum(row.wire_bytes for row in explanation.traffic)
    text = f"{human_bytes(sent_bytes)} sent per device and step"
    gathered_bytes = explanation.plan.gathered_part.logical_bytes
    if gathered_bytes:
        text += f", {sent_bytes / gathered_bytes:.2f} x the gathered parameters"
    if explanation.mixing:
        text += "; the model's own mixing of examples is not in it"
    return text
