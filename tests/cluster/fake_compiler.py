"""The micro GPT on clusters that are not here, and in the place of their compiler a function of a test."""

import functools
import math
from collections.abc import Callable
from typing import Any

from flax import nnx

import jshard as js
from jshard.cluster import comparison
from jshard.cluster.compile import CompiledStep, CompileRequest
from jshard.cluster.costs import Costs
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.topology import parse_topology
from jshard.inspect.audit import CompiledMemory
from jshard.recipes.overrides import override
from jshard.train import load_model_file
from tests.micro_gpt import MODELS, micro
from tests.scheduled_text import dot, gather, gathered, program

GPT = load_model_file(MODELS / "gpt.py")


def cluster_of(topology: str, **known: Any) -> PlannedCluster:
    """A cluster, and what is known of it."""
    return PlannedCluster(parse_topology(topology), known)


def mesh_of(cluster: PlannedCluster, **degrees: int) -> dict[str, int]:
    """Degrees on all devices of a cluster."""
    return dict(js.mesh(**degrees, devices=cluster.topology.num_devices).shape)


def costs_of(cluster: PlannedCluster, *settings: str, **units: Any) -> Costs:
    """Estimates for the micro GPT with other settings of its recipe and of its units."""
    traced = _traced(tuple(key for key in settings if key.startswith("model.")), tuple(units.items()))
    return traced.on(cluster.machine, settings=settings)


@functools.cache
def _traced(settings: tuple[str, ...], units: tuple[tuple[str, Any], ...]) -> Costs:
    return Costs(GPT.with_units(dict(units)), override(micro(), settings), cluster_of("h100:1x8").machine)


def request_of(cluster: PlannedCluster, **changes: Any) -> CompileRequest:
    """The micro GPT, as it is asked for on a cluster."""
    asked: dict[str, Any] = {"model": "my_model.py", "topology": cluster.topology.text, "mesh": mesh_of(cluster)}
    return CompileRequest(**asked | {"profile": "fastest"} | changes)


def step_of(asked: CompileRequest, *, peak_bytes: int, products: int = 1) -> CompiledStep:
    """A step of so many matrix products beside a gather, one after another."""
    lines = (gather("start", 1), *(dot(f"d{i}") for i in range(products)), gathered("done", "start"))
    recipe = override(micro(), asked.settings)
    held_bytes = peak_bytes // 10
    return CompiledStep(
        text=program(*lines),
        memory=CompiledMemory(
            arguments_bytes=held_bytes,
            results_bytes=held_bytes,
            shared_bytes=held_bytes,
            temporaries_bytes=peak_bytes - held_bytes,
            peak_bytes=peak_bytes,
        ),
        plan=_plan(tuple(asked.mesh.items())),
        options={},
        batch_size=recipe.batch_size,
        sequence_length=recipe.sequence_length,
        accumulate=recipe.accumulate,
        sync=recipe.sync,
        flops=1e12,
        flops_formula="made up",
        trace_s=1.0,
        compile_s=2.0,
        cpu_s=3.0,
        rss_bytes=2**30,
        versions={"jax": "0.10.2"},
    )


class Compiler:
    """Stands where ways are compiled.

    Args:
        monkeypatch: of pytest.
        compiled: gives the step for a request, or raises.
    """

    def __init__(self, monkeypatch: Any, compiled: Callable[[CompileRequest], CompiledStep]) -> None:
        self.asked: list[CompileRequest] = []
        self._compiled = compiled
        monkeypatch.setattr(comparison, "compile_step", self._compile)

    def _compile(self, asked: CompileRequest, *, timeout_s: float) -> CompiledStep:
        self.asked.append(asked)
        return self._compiled(asked)


@functools.cache
def _plan(degrees: tuple[tuple[str, int], ...]) -> js.ShardPlan:
    mesh = js.mesh(**dict(degrees), devices=math.prod(degree for _, degree in degrees))
    return js.plan(
        js.abstract_init(lambda: GPT.build(micro().model, nnx.Rngs(0)), lambda model: GPT.annotate(model, mesh))
    )
