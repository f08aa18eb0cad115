"""The plan's estimates beside the step as it is compiled and measured on the device: time and memory."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

import jshard as js
from benchmarks.first_gpu.kernels import reason
from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.planned import MODEL
from benchmarks.step.summary import Spread
from benchmarks.tables import markdown_table
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.estimate import EstimateRange, estimate_range
from jshard.cluster.machine import PlannedCluster, machine_here
from jshard.cluster.report import ClusterPlan
from jshard.cluster.topology import parse_topology, require_compiler
from jshard.errors import FourPartError
from jshard.facts.devices import device_of
from jshard.inspect.audit import CompiledMemory, audit
from jshard.inspect.hlo import Schedule
from jshard.recipes.building import abstract_model, batch_of, new_model
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import program_bytes
from jshard.train import TrainStep, load_model_file

_RECIPE = "gpt2_small"
_QUICK_RECIPE = "tiny"
_WARM_STEPS = 3
_STEPS = 30
_AHEAD_S = 20.0  # the compiler that needs no device is not begun with less
_PLANNED = "planned ahead"
_HERE = "the program compiled here"
_TRACED = "traced model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """An estimated time of the step, seconds."""

    source: str  # the program that is replayed
    assumptions: str  # about the device
    stated_s: float
    least_s: float
    most_s: float

    @classmethod
    def of(cls, estimates: EstimateRange, source: str) -> TimeEstimate:
        """Takes the time of the step."""
        least_s, most_s = estimates.span("step_s")
        stated = estimates.stated
        return cls(
            source=source,
            assumptions=stated.assumptions.name,
            stated_s=stated.step_s,
            least_s=least_s,
            most_s=most_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFigure:
    """The most memory of a device in the step, as it is not measured."""

    kind: str  # "estimated" or "compiled"
    source: str
    num_bytes: int


def measure(work: Work) -> None:
    """Measures the step, and then makes the estimates: without the step they would say nothing."""
    settings = _settings(work)
    name = _QUICK_RECIPE if work.setup.quick else _RECIPE
    model_file = load_model_file(MODEL)
    recipe = override(model_file.recipe(name)[1], settings)
    mesh = js.mesh(devices=jax.devices()[:1])
    work.keep(recipe=name, settings=list(settings), memory=[], times=[])
    _estimate_memory(work, model_file, recipe, mesh)
    schedule = _measure_step(work, model_file, recipe, mesh)
    _estimate_here(work, schedule, mesh)
    _plan_ahead(work, CompileRequest(model=MODEL, recipe=name, settings=settings, topology="", profile="fastest"))


def _settings(work: Work) -> tuple[str, ...]:
    if work.setup.quick:
        return ("batch_size=2", "sequence_length=16", "model.n_layer=2", "model.d_model=48", "model.scan=true")
    return (f"batch_size={work.setup.batch}", "accumulate=1", "model.scan=true")


def _add_memory(work: Work, figure: MemoryFigure) -> None:
    work.add("memory", dataclasses.asdict(figure))


def _estimate_memory(work: Work, model_file: ModelFile, recipe: Recipe, mesh: jax.sharding.Mesh) -> None:
    """Estimates the memory before anything is compiled, as `jshard plan` does."""
    explanation = js.explain(
        abstract_model(model_file, recipe, mesh),
        optimizer=recipe.optimizer(),
        loss_fn=model_file.loss_fn,
        batch=batch_of(model_file, recipe, recipe.batch_size),
    )
    _add_memory(work, MemoryFigure(kind="estimated", source=_TRACED, num_bytes=explanation.memory.step_bytes))


def _measure_step(work: Work, model_file: ModelFile, recipe: Recipe, mesh: jax.sharding.Mesh) -> Schedule:
    """Compiles the step of the recipe, runs it, and returns its schedule."""
    model = new_model(model_file, recipe, mesh)
    optimizer = js.shard_optimizer(model, recipe.optimizer())
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 256, (recipe.batch_size, recipe.sequence_length)), jnp.int32)
    batch = js.shard_batch({"inputs": tokens, "targets": tokens}, mesh=mesh)
    options = js.compiler_options("fastest", mesh=mesh)
    begin_s = time.monotonic()
    step = TrainStep(model_file.loss_fn, model, optimizer, batch, compiler_options=options)
    work.keep(compile_s=time.monotonic() - begin_s)
    memory = CompiledMemory.of(step.compiled)
    compiled_bytes = program_bytes(step.compiled) if memory is None else memory.peak_bytes
    _add_memory(work, MemoryFigure(kind="compiled", source=_HERE, num_bytes=compiled_bytes))
    _time_steps(work, step, batch)
    return audit(step.compiled, model=step.model).schedule


def _time_steps(work: Work, step: TrainStep, batch: dict[str, jax.Array]) -> None:
    """Times steps one by one, each until the device has done it."""
    num_steps = _WARM_STEPS + (3 if work.setup.quick else _STEPS)
    times_s = []
    for number in range(num_steps):
        begin_s = time.perf_counter()
        jax.block_until_ready(step(batch))
        if number >= _WARM_STEPS:
            times_s.append(time.perf_counter() - begin_s)
    stats = jax.local_devices()[0].memory_stats() or {}
    work.keep(step_s=times_s, peak_bytes=stats.get("peak_bytes_in_use"))


def _estimate_here(work: Work, schedule: Schedule, mesh: jax.sharding.Mesh) -> None:
    """Estimates the time of the very program that was measured."""
    device = jax.devices()[0]
    facts = device_of(device.device_kind)
    if facts is not None:
        estimates = PlannedCluster(parse_topology(f"{facts.name}:1x1")).estimate(schedule)
    elif device.platform == "cpu":
        estimates = estimate_range(schedule, machine_here(mesh).assumptions, {})  # a guess, without ranges
    else:
        work.leave_out("the estimated time", f"no row of jshard's table of devices is for {device.device_kind}.")
        return
    work.add("times", dataclasses.asdict(TimeEstimate.of(estimates, _HERE)))


def _plan_ahead(work: Work, request: CompileRequest) -> None:
    """Plans the step as `jshard plan --topology` does, in a process that does not see the device."""
    facts = device_of(jax.devices()[0].device_kind)
    if facts is None:
        work.leave_out(_PLANNED, "the device is in no row of jshard's table of devices.")
        return
    if work.left_s < _AHEAD_S:
        work.leave_out(_PLANNED, "no time was left.")
        return
    topology = parse_topology(f"{facts.name}:1x1")
    try:
        require_compiler(facts.compiler)
        step = compile_step(dataclasses.replace(request, topology=topology.text), timeout_s=work.left_s)
    except FourPartError as error:
        work.leave_out(_PLANNED, reason(error))
        return
    plan = ClusterPlan.of(step, cluster=PlannedCluster(topology), name=request.recipe or "")
    _add_memory(work, MemoryFigure(kind="compiled", source=_PLANNED, num_bytes=step.memory.peak_bytes))
    work.add("times", dataclasses.asdict(TimeEstimate.of(plan.estimates, _PLANNED)))


# ---- the report


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    settings = " ".join(f"--set {setting}" for setting in figures.get("settings", []))
    lines = [f"models/gpt.py --recipe {figures.get('recipe')} {settings}, on one device.", ""]
    times_s: list[float] = figures.get("step_s", [])
    spread = Spread.of(times_s) if times_s else None
    if spread:
        lines += [f"Measured: {spread.text('.2f', 1e3)} ms a step, median of {len(times_s)} (least to most).", ""]
    rows = [_time_row(TimeEstimate(**row), spread) for row in figures.get("times", [])]
    if rows:
        head = ["estimated step from", "assumed", "inside", "stated, ms", "range, ms", "measured / stated"]
        lines += [*markdown_table(head, rows, num_words=3), ""]
    peak_bytes = figures.get("peak_bytes")
    measured = "this device does not count it" if peak_bytes is None else f"{peak_bytes / 2**20:,.1f} MiB"
    lines += [f"Measured: peak of memory in use since the process began: {measured}.", ""]
    rows = [_memory_row(MemoryFigure(**row), peak_bytes) for row in figures.get("memory", [])]
    return [*lines, *markdown_table(["peak of the step", "from", "MiB", "measured / it"], rows, num_words=2)]


def _time_row(estimate: TimeEstimate, measured: Spread | None) -> list[str]:
    stated = f"{1e3 * estimate.stated_s:.2f}"
    range_text = f"{1e3 * estimate.least_s:.2f} to {1e3 * estimate.most_s:.2f}"
    if measured is None:
        return [estimate.source, estimate.assumptions, "", stated, range_text, ""]
    is_inside = estimate.least_s <= measured.median <= estimate.most_s
    ratio = f"{measured.median / estimate.stated_s:.2f}"
    return [estimate.source, estimate.assumptions, "yes" if is_inside else "no", stated, range_text, ratio]


def _memory_row(figure: MemoryFigure, measured_bytes: int | None) -> list[str]:
    ratio = "" if measured_bytes is None else f"{measured_bytes / figure.num_bytes:.2f}"
    return [figure.kind, figure.source, f"{figure.num_bytes / 2**20:,.1f}", ratio]
