"""The audit compares a program with loops on pipeline stages with what they should send, byte by byte."""

import collections
import dataclasses
import functools
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.replay import Replay
from jshard.engine.layer_stacks import as_traced
from jshard.inspect.audit import Audit, audit
from jshard.inspect.communication import differences, traffic_of
from jshard.inspect.hlo import Window
from tests.helpers import compile_to_read, mean_square
from tests.wide import wide

WIDTH = 32
BATCH = 16


class Layer(nnx.Module):
    """Two products and a norm: what compiles fast, with parameters that are sharded and some that are not."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Tower(nnx.Module):
    """Layers in a list or in a stack, between a table and the same table."""

    layers: Any  # a list, or a stack

    def __init__(self, layers: int, form: str, rngs: nnx.Rngs) -> None:
        self.form = form
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        if form == "stack":

            @nnx.split_rngs(splits=layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Layer:
                return Layer(rngs)

            self.layers = stack(rngs)
        else:
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        if self.form == "stack":

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, layer: Layer) -> jax.Array:
                return layer(x)

            x = run(x, self.layers)
        elif self.form == "unrolled":
            for layer in self.layers:
                x = layer(x)
        else:
            x = js.scan_layers(self.layers, x)
        return self.embed.attend(x)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))), None


class LinenTower(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(256, WIDTH, name="embed")
        layers = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = layers(name="layers")(embed(ids), None)
        return embed.attend(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a mesh and settings."""

    layers: int = 4
    form: str = "list"
    mesh: tuple[tuple[str, int], ...] = (("pipe", 2), ("fsdp", 2))
    stages: tuple[tuple[str, Any], ...] = ()
    fully: tuple[tuple[str, Any], ...] = ()


BFLOAT16 = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
CASES = {
    "rounds": Case(layers=8),
    "late, layers that do not divide": Case(layers=5, stages=(("late", True),)),
    "a stack, with replicas": Case(form="stack", mesh=(("replica", 2), ("pipe", 2), ("fsdp", 2))),
    "neighbouring layers, called one after another": Case(form="unrolled", stages=(("rounds", 1),)),
    "tensor": Case(mesh=(("pipe", 2), ("fsdp", 2), ("tensor", 2))),
    "more microbatches, four places": Case(8, mesh=(("pipe", 4), ("fsdp", 2)), stages=(("microbatches", 8),)),
    "pipe alone, computed again": Case(mesh=(("pipe", 4), ("fsdp", 1)), fully=(("remat", "full"),)),
    "bfloat16": Case(fully=(("mixed_precision", BFLOAT16),)),
    "kept until backward": Case(fully=(("reshard_after_forward", False),)),
}
BY_DEFAULT = ("rounds", "late, layers that do not divide", "a stack, with replicas", "tensor")


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A model and its compiled step: loss and gradients."""

    plan: js.ShardPlan
    compiled: jax.stages.Compiled

    @functools.cached_property
    def audit(self) -> Audit:
        return audit(self.compiled, plan=self.plan)


def mesh_of(case: Case) -> Any:
    degrees = dict(case.mesh)
    return js.mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])


def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (BATCH, 8)).astype(np.int32)


@functools.cache
def pipelined(name: str) -> Pipelined:
    case = CASES[name]
    mesh = mesh_of(case)

    def annotate(model: Tower) -> None:
        if "tensor" in dict(case.mesh):
            js.parallel.split(model, {"*/up/*": ("tensor",), "*/down/kernel": ("tensor", None)})
        if case.form == "stack":
            js.fully_shard(model.layers, mesh=mesh, placement=js.PlacementPolicy(stacked=1))
            js.fully_shard(model, mesh=mesh)
        else:
            settings = {"remat": "none"} | dict(case.fully)  # products are counted
            js.fully_shard(model, units=Layer, mesh=mesh, **settings)
        js.parallel.stages(model, **dict(case.stages))

    model = js.abstract_init(lambda: Tower(case.layers, case.form, nnx.Rngs(0)), annotate)
    step = nnx.jit(nnx.value_and_grad(lambda model, ids: mean_square(model, ids)))
    # XLA:CPU takes what forward and backward gather, or exchange, for one: then less would be sent than planned.
    options = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "cse"}
    compiled = step.lower(model, ids()).lowered.compile(compiler_options=options)
    return Pipelined(as_traced(js.plan(model)), compiled)


def planned_bytes(plan: js.ShardPlan) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    sizes: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for traffic in traffic_of(plan):
        sizes[traffic.kind, traffic.axes] += traffic.full_bytes
    return sizes


def over_tensor(window: Window) -> bool:
    return "tensor" in (window.axes or ())


@pytest.mark.parametrize("name", [name if name in BY_DEFAULT else wide(name) for name in CASES])
def test_a_program_sends_what_is_planned(name: str):
    run = pipelined(name)
    assert run.plan.stages
    assert run.audit.ok, run.audit.differences
    assert all("as f32" in str(note) for note in run.audit.notes)  # XLA:CPU sends bfloat16 as float32
    compiled: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for window in run.audit.schedule.windows:
        is_of_loss = window.full_bytes <= 8
        if not over_tensor(window) and not is_of_loss:
            compiled[window.kind, window.axes or ()] += window.total_bytes
    planned = planned_bytes(run.plan)
    if name == "bfloat16":
        assert compiled.keys() == planned.keys()
    else:
        assert compiled == planned


def test_linen_layers():
    model = js.fully_shard(LinenTower(), units=LinenLayer, mesh=mesh_of(Case()))
    params = jax.eval_shape(model.init, jax.random.key(0), ids())["params"]

    def loss(params, ids):
        scores = cast(jax.Array, model.apply({"params": params}, ids))
        return (scores**2).mean()

    found = audit(compile_to_read(jax.jit(jax.grad(loss)).lower(params, ids())), model=model)
    assert found.plan is not None and len(found.plan.stages.loops) == 2
    assert found.ok, found.differences
    kinds = {note.planned for note in found.notes}
    assert kinds == {"all-gather", "all-to-all"}  # those of backward are joined with those of forward


# ---- what an audit would miss if it knew nothing of stages


def test_without_the_trace_the_program_differs():
    run = pipelined("rounds")
    blind = dataclasses.replace(run.plan, stages=type(run.plan.stages)())
    found = {(difference.compiled, difference.axes) for difference in audit(run.compiled, plan=blind).differences}
    assert ("collective-permute", ("pipe",)) in found
    assert run.audit.ok


@pytest.mark.parametrize("kind", ["collective-permute", "all-to-all", "reduce-scatter"])
def test_more_than_planned_is_a_difference(kind: str):
    run = pipelined("rounds")
    windows = run.audit.schedule.windows
    doubled = [window for window in windows if window.kind == kind] + list(windows)
    found = differences(doubled, run.plan, platform="cpu")
    assert [difference.compiled for difference in found if not difference.by_compiler] == [kind] * len(
        {window.axes for window in windows if window.kind == kind and window.total_bytes > 2**12}
    )


def test_less_than_planned_is_a_difference_of_any_compiler():
    run = pipelined("rounds")
    windows = [window for window in run.audit.schedule.windows if window.kind != "all-to-all"]
    found = [
        str(difference) for difference in differences(windows, run.plan, platform="cpu") if not difference.by_compiler
    ]
    assert any("less all-to-all than planned" in text or "all-to-all written" in text for text in found)


def test_activations_are_sent_for_each_microbatch_of_a_step():
    """Parameters are gathered once for all of them with sync="last", and activations are not."""
    run = pipelined("rounds")
    windows = run.audit.schedule.windows
    twice = list(windows)
    for window in windows:
        if window.kind == "collective-permute":
            twice.append(window)
    kinds = {difference.planned for difference in differences(twice, run.plan, accumulate=2, sync="last")}
    assert "collective-permute" not in kinds
    kinds = {difference.planned for difference in differences(windows, run.plan, accumulate=2, sync="last")}
    assert "collective-permute" in kinds


# ---- the estimator


def test_products_and_permutes_count_in_every_tick():
    """The bubble is in the trips of the loops: 9 ticks for 4 layers of a place on 2 microbatches."""
    run = pipelined("rounds")
    schedule = run.audit.schedule
    (loop, _) = run.plan.stages.loops
    num_ticks = loop.schedule.num_ticks
    assert num_ticks == 9
    tokens = BATCH // 2 * 8 // 2  # of a microbatch, on a device
    layer_flops = 3 * 2 * (2 * tokens * WIDTH * 4 * WIDTH)  # forward, and twice that in backward
    table_flops = 3 * (2 * BATCH // 4 * 8 * WIDTH * 256)
    assert schedule.flops == pytest.approx(num_ticks * layer_flops + table_flops, rel=0.01)
    permutes = [window for window in schedule.windows if window.kind == "collective-permute"]
    assert sum(window.executions for window in permutes) == 2 * (num_ticks - 1)


def test_a_replay_has_the_time_of_every_permute():
    run = pipelined("rounds")
    schedule = run.audit.schedule
    assumptions = Assumptions(
        name="round numbers",
        flops_per_s=1e12,
        memory_bytes_per_s=1e12,
        fast_bytes_per_s=1e9,
        fast_group=2,
        slow_bytes_per_s=1e8,
    )
    replay = Replay(schedule, assumptions)
    for window, seconds in zip(schedule.windows, replay.communication_s, strict=True):
        once_s = assumptions.transfer_s(window.kind, window.full_bytes, window.group)
        assert seconds == pytest.approx(window.executions * once_s)


def test_branches_that_are_alike_count_once():
    """Split over `tensor`, a layer has one sum in each direction; it is in both branches of a tick."""
    run = pipelined("tensor")
    sums = [window for window in run.audit.schedule.windows if over_tensor(window) and window.kind == "all-reduce"]
    (loop, _) = run.plan.stages.loops
    assert {window.conditional for window in sums} == {False}
    assert sum(window.executions for window in sums) == 2 * loop.schedule.num_ticks
