"""Memory of a train step, estimated from the plan and compiled, and the difference between the two.

Each configuration of models/gpt.py is compiled for an absent cluster of GPUs, as by `jshard plan --topology`, and
estimated from the traced model alone, as by `jshard plan` without a cluster. Nothing is run, no time is measured, and
no GPU is needed: only the extra `plan-gpu`.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jshard as js
from benchmarks.planned import MODEL, SMALL, require
from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.inspect.memory import Memory
from jshard.recipes.building import abstract_model
from jshard.recipes.overrides import override
from jshard.train import Recipe, load_model_file

TITLE = "Memory of a train step, estimated and compiled"
MEASURES_TIME = False

_GIB = {  # columns of the table
    "held, plan": "held_bytes",
    "held, compiled": "held_compiled_bytes",
    "peak, estimate": "estimate_bytes",
    "peak, compiled": "peak_bytes",
}
_MIDDLE = (
    "accumulate=1",
    "batch_size=64",
    "model.n_layer=8",
    "model.n_head=16",
    "model.d_model=2048",
    "model.d_ff=8192",
    "model.vocab_size=50304",
)
_13B = ("batch_size=1024", "model.n_layer=40", "model.n_head=40", "model.d_model=5120", "model.d_ff=20480")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe of models/gpt.py on a cluster."""

    name: str  # for the table
    recipe: str  # of the file
    topology: str  # as `jshard plan --topology` takes it
    settings: tuple[str, ...] = ()  # as `--set` takes them
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # degrees; `fsdp` takes all devices by default
    units: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other settings of the units

    @property
    def command(self) -> str:
        """The command that reports both figures."""
        words = ["jshard", "plan", "models/gpt.py", "--recipe", self.recipe, "--topology", self.topology]
        words += [word for setting in self.settings for word in ("--set", setting)]
        words += [word for name, value in self.units.items() for word in ("--unit", f"{name}={value}")]
        return shlex.join(words + (["--mesh", _text(self.mesh)] if self.mesh else []))


_MIDDLE_UNROLLED: dict[str, Any] = {"recipe": "gpt2_small", "topology": "h100:8x8", "settings": _MIDDLE}
_MIDDLE_SCAN: dict[str, Any] = _MIDDLE_UNROLLED | {"settings": (*_MIDDLE, "model.scan=true")}
_XL: dict[str, Any] = {"recipe": "gpt2_xl", "topology": "h100:8x8"}
FULL = (
    Case(name="124M", recipe="gpt2_small", topology="h100:1x8", settings=("accumulate=1", "batch_size=64")),
    Case(name="124M, 5 microbatches", recipe="gpt2_small", topology="h100:1x8"),
    Case(name="0.5B", **_MIDDLE_UNROLLED),
    Case(name="0.5B, remat full", **_MIDDLE_UNROLLED, units={"remat": "full"}),
    Case(name="0.5B, scan", **_MIDDLE_SCAN),
    Case(name="0.5B, scan, remat full, 2 ahead", **_MIDDLE_SCAN, units={"remat": "full", "prefetch": 2}),
    Case(name="1.6B", **_XL, settings=("batch_size=64",), units={"remat": "none"}),
    Case(name="1.6B, remat dots", **_XL, units={"remat": "dots"}),
    Case(name="1.6B, remat full", **_XL),
    Case(name="1.6B, remat full, zero2", **_XL, units={"reshard_after_forward": False}),
    Case(name="1.6B, remat full, hsdp", **_XL, mesh={"replica": 8, "fsdp": 8}),
    Case(name="13B, remat full", recipe="gpt3_175b", topology="h100:64x8", settings=_13B),
    Case(name="175B, remat full", recipe="gpt3_175b", topology="h100:64x8", settings=("batch_size=512",)),
    Case(
        name="175B, remat full, hsdp",
        recipe="gpt3_175b",
        topology="h100:2048x8",
        settings=("batch_size=16384",),
        mesh={"replica": 32, "fsdp": 512},
    ),
)
QUICK = (Case(name="two blocks", recipe="gpt2_small", topology="h100:1x2", settings=(*SMALL, "batch_size=8")),)


def run(*, quick: bool) -> dict[str, Any]:
    """Estimates and compiles the cases; a quick run only shows that it works.

    Returns:
        "rows": a dict per case.
    """
    require("cuda")
    rows = []
    for case in QUICK if quick else FULL:
        print(f"compiling {case.name}: {case.command}", flush=True)
        rows.append(_row(case))
    return {"rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    """The rows as lines of a Markdown table."""
    text = [
        "Compiled and estimated; nothing was run.",
        "GiB on one device. *held*: parameters and optimizer state, which the compiled step takes as arguments beside",
        "the batch. *peak*: of the step. The estimate is made from the traced model, before anything is compiled.",
        "",
    ]
    head = ["configuration", "GPUs", *_GIB, "ratio"]
    ratios = [row["ratio"] for row in result["rows"]]
    held = max(abs(row["held_bytes"] / row["held_compiled_bytes"] - 1) for row in result["rows"])
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    return [
        *text,
        *markdown_table(head, map(_cells, result["rows"])),
        "",
        f"Peak: {near} of {len(ratios)} within 15 %, ratios from {min(ratios):.2f} to {max(ratios):.2f}."
        f" Held: within {held:.1%}.",
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    gib = [f"{row[key] / 2**30:.2f}" for key in _GIB.values()]
    return [row["name"], f"{row['devices']:,}", *gib, f"{row['ratio']:.2f}"]


def _row(case: Case) -> dict[str, Any]:
    estimate, recipe = _estimate(case)
    step = compile_step(
        CompileRequest(
            model=MODEL,
            recipe=case.recipe,
            settings=case.settings,
            mesh=case.mesh,
            units=case.units,
            topology=case.topology,
            profile="fastest",
        )
    )
    devices = math.prod(degree for _, degree in step.plan.mesh)
    batch_bytes = 2 * 4 * recipe.batch_size * recipe.sequence_length // devices  # inputs and targets, int32
    return {
        "name": case.name,
        "command": case.command,
        "devices": devices,
        "held_bytes": estimate.held_bytes,
        "held_compiled_bytes": step.memory.arguments_bytes - batch_bytes,
        "estimate_bytes": estimate.step_bytes,
        "peak_bytes": step.memory.peak_bytes,
        "ratio": estimate.step_bytes / step.memory.peak_bytes,
        "estimate": dataclasses.asdict(estimate),
        "compiled": dataclasses.asdict(step.memory),
        "options": dict(step.options),
        "cpu_s": step.cpu_s,
    }


def _estimate(case: Case) -> tuple[Memory, Recipe]:
    """The estimate of `jshard plan` without a cluster, and its recipe."""
    model_file = load_model_file(MODEL).with_units(case.units)
    recipe = override(model_file.recipe(case.recipe)[1], case.settings)
    mesh = js.mesh(**case.mesh, devices=parse_topology(case.topology).num_devices)
    model = abstract_model(model_file, recipe, mesh)
    tokens = jax.ShapeDtypeStruct((recipe.batch_size // recipe.accumulate, recipe.sequence_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    with traced_for_device(parse_topology(case.topology).device):
        explained = js.explain(model, optimizer=recipe.optimizer(), loss_fn=model_file.loss_fn, batch=batch)
    return explained.memory, recipe


def _text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={degree}" for axis, degree in mesh.items())
