"""The audit says what a compiled program communicates, in units of the parameters, and what differs from its plan."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.inspect import ProgramError, collectives
from jshard.inspect.audit import Audit, CompiledMemory, audit
from jshard.inspect.communication import Traffic, differences, hlo_dtype, traffic_of
from jshard.inspect.hlo import Window
from jshard.recipes.building import create
from jshard.recipes.step import lower_step
from jshard.train import load_model_file
from tests.helpers import Config, Decoder, abstract, compile_to_read, full_bytes, program, token_batch
from tests.micro_gpt import micro
from tests.scheduled_text import body, dot, gather, gathered, loop, scatter, scattered
from tests.scheduled_text import program as text_of

DECODER = Config(layers=4, width=128, hidden=512, vocab=64, scanned=True)


@pytest.fixture(scope="module")
def scanned() -> Audit:
    made = program(DECODER, replica=2)
    return audit(made.compiled, plan=made.plan)


def test_a_program_that_does_as_planned(scanned: Audit):
    assert scanned.ok
    assert scanned.amount("all-gather") == pytest.approx(2.00, abs=0.02)
    assert scanned.amount("reduce-scatter") == pytest.approx(1.00, abs=0.02)
    compiled = collectives(program(DECODER, replica=2).compiled)
    for total in scanned.totals:
        assert total.total_bytes == full_bytes(compiled, total.kind)
        assert total.elements * 4 == total.total_bytes


def test_rows_fold_what_is_alike(scanned: Audit):
    gathers = [r for r in scanned.rows if r.kind == "all-gather" and r.in_loop]
    assert [r.over for r in gathers] == [("fsdp",)] * 2
    assert {r.phase for r in gathers} == {"forward", "backward"}
    for row in gathers:  # the first layer is gathered before the loop, each other one in the round before
        layers = [r for r in scanned.rows if (r.kind, r.unit, r.phase) == (row.kind, "blocks", row.phase)]
        assert sum(r.executions for r in layers) == DECODER.layers * len(row.windows)
    assert sum(len(r.windows) for r in scanned.rows) == len(scanned.schedule.windows)
    assert scanned.not_overlapped() == scanned.schedule.in_loops and "Every collective blocks" in str(scanned)  # a CPU


def test_memory_is_the_compilers(scanned: Audit):
    found = program(DECODER, replica=2).compiled.memory_analysis()
    assert scanned.memory is not None
    assert scanned.memory.arguments_bytes == found.argument_size_in_bytes
    assert scanned.memory.peak_bytes >= found.argument_size_in_bytes + found.temp_size_in_bytes


@pytest.mark.wide
def test_a_whole_train_step_of_a_model_file():
    """The optimizer's part of the step gathers nothing: its amounts are those of the plan of the model."""
    file = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
    mesh = js.mesh()
    model, optimizer = create(file, micro(), mesh)
    ids = jax.ShapeDtypeStruct((16, 32), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    lowered = lower_step(file.loss_fn, model, optimizer, {"inputs": ids, "targets": ids})
    found = audit(compile_to_read(lowered), model=model)
    assert found.amount("reduce-scatter") == pytest.approx(1.00, abs=0.03)
    assert {row.unit for row in found.rows if row.kind == "reduce-scatter"} == {"blocks/0..1", "(root)"}
    assert found.ok, found.differences


# XLA:CPU of jax 0.10 joins the two gathers of unrolled layers, and sends bfloat16 as float32: no fault of the program.
RIGHT = {
    "unrolled": (Config(tied=False, attends=False), {}, {}),
    "scanned": (Config(scanned=True, attends=False), {}, {}),
    "tied, HSDP": (Config(attends=False), {"replica": 2}, {}),
    "bfloat16": (
        Config(attends=False),
        {},
        {"mixed_precision": js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")},
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_is_ok_on_cpu_and_what_the_compiler_does_is_a_note(name: str):
    config, axes, settings = RIGHT[name]
    made = program(config, **axes, **settings)
    found = audit(made.compiled, plan=made.plan)
    assert found.ok, found.differences
    assert str(found).endswith("\nCommunicates as planned.")
    joined = [note for note in found.notes if note.words.startswith("less all-gather than planned")]
    assert bool(joined) == (found.amount("all-gather") < 1.5)
    assert json.loads(found.to_json())["notes"] == [str(note) for note in found.notes]
    assert all("XLA:CPU" in str(note) for note in found.notes)


def in_bfloat16(window: Window) -> Window:
    arrays = tuple(array._replace(dtype="bf16") for array in window.arrays)
    return dataclasses.replace(window, sizes=(("bf16", window.full_bytes // 2),), arrays=arrays)


def test_what_the_tpu_compiler_does_is_a_note_and_anything_else_a_difference():
    made = program(Config(scanned=True, attends=False))
    windows = audit(made.compiled, plan=made.plan).schedule.windows
    reduced = [dataclasses.replace(window, kind="all-reduce") for window in windows]
    on_tpu = differences(reduced, made.plan, platform="tpu")
    assert [(found.planned, found.compiled) for found in on_tpu] == [
        ("all-gather", "all-reduce"),
        ("reduce-scatter", "all-reduce"),
    ]
    assert all("the TPU compiler has no" in str(found) and "2.0x the bytes" in str(found) for found in on_tpu)
    assert not any(found.by_compiler for found in differences(reduced, made.plan))  # another compiler's
    sums = [dataclasses.replace(window, is_sum=True) for window in reduced]
    assert not any(found.by_compiler for found in differences(sums, made.plan, platform="tpu"))  # the program's own

    gathers = [window for window in windows if window.kind == "all-gather"]
    others = [window for window in windows if window.kind != "all-gather"]
    (narrowed,) = differences([*map(in_bfloat16, gathers), *others], made.plan, platform="tpu")
    assert str(narrowed).endswith("0.5x the bytes (the TPU compiler casts before it gathers)")
    reductions = [in_bfloat16(window) if window.kind == "reduce-scatter" else window for window in windows]
    (unknown,) = differences(reductions, made.plan, platform="tpu")
    assert not unknown.by_compiler  # gradients are never narrowed
    assert differences(others, made.plan, platform="tpu")[0].by_compiler == ""  # nor is a gather omitted


def in_two_stages(window: Window) -> list[Window]:
    """A collective over two slices of four devices each, as the TPU compiler writes it."""
    part = tuple((dtype, size // 4) for dtype, size in window.sizes)
    between = dataclasses.replace(window, group=(0, 4), sizes=part)
    return [between, dataclasses.replace(window, group=(0, 1, 2, 3))]


def test_over_two_slices_the_stages_of_a_collective_are_one():
    made = program(Config(scanned=True, attends=False))
    windows = audit(made.compiled, plan=made.plan).schedule.windows
    stages = [stage for window in windows for stage in in_two_stages(window)]
    assert differences(stages, made.plan, num_slices=2) == ()
    assert differences(stages, made.plan)  # groups that are no axis
    gathers_only = [stage for stage in stages if stage.kind == "all-gather"]
    (missing,) = differences(gathers_only, made.plan, num_slices=2)
    assert missing.planned == "reduce-scatter"


class Normed(nnx.Module):
    """Statistics of the batch, which are a tenth of so small a model."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.norm = nnx.Linear(16, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.norm(self.up(x))))


def test_statistics_of_a_small_model_are_its_own():
    model = js.abstract_init(lambda: Normed(nnx.Rngs(0)), lambda m: js.fully_shard(m, units=nnx.Linear, mesh=js.mesh()))
    step = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()))
    found = audit(step.lower(model, jnp.zeros((16, 16))).lowered, model=model)
    assert found.ok, found.differences


def gathered_whole(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that holds the model's output whole on every device."""
    logits = jax.lax.with_sharding_constraint(model(inputs), NamedSharding(js.mesh(), PartitionSpec()))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean()


def test_on_cpu_an_activation_that_is_gathered_is_no_parameter():
    """Its bytes are fewer than those of the gathers that are joined, and must not make up for them."""
    config = Config(attends=False)
    model = abstract(config, js.mesh())
    step = nnx.jit(lambda model, *batch: nnx.value_and_grad(gathered_whole)(model, *batch))
    found = audit(step.lower(model, *token_batch(config)).lowered, model=model)
    # Where the gathers are not joined, as on jax 0.12, it is simply more than planned.
    (words,) = [str(d).partition(":")[0] for d in found.differences]
    assert words == ("more all-gather than planned" if found.amount("all-gather") > 2 else "all-gather of no parameter")


def test_on_cpu_a_gather_that_is_missing_is_a_difference():
    plan = js.plan(abstract(Config(attends=False, layers=6), js.mesh()))  # more than twice those of the program
    found = audit(program(Config(attends=False)).compiled, plan=plan)
    assert {d.words.partition(":")[0] for d in found.differences} >= {"less all-gather than planned"}


def windows_of(traffic: tuple[Traffic, ...], change: Callable[[Window], Window | None] = lambda w: w) -> list[Window]:
    """The collectives of a plan as windows of a program that does as planned, but for `change`."""
    made = [
        Window(
            name=f"c{i}",
            kind=t.kind,
            sizes=((hlo_dtype(t.dtype), t.full_bytes),),
            group=tuple(range(t.group_size)),
            axes=t.axes,
            units=("blocks/0", "blocks/1"),
        )
        for i, t in enumerate(traffic)
    ]
    return [w for w in map(change, made) if w is not None]


PRECISION = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")


def instead(kind: str, /, **fields: object) -> Callable[[Window], Window]:
    """Changes the windows of one kind."""
    return lambda w: dataclasses.replace(w, **fields) if w.kind == kind else w  # type: ignore[arg-type]


def as_f32(window: Window) -> Window:
    """An all-gather of twice the bytes."""
    twice = (("f32", 2 * window.full_bytes),)
    return dataclasses.replace(window, sizes=twice) if window.kind == "all-gather" else window


def in_one(window: Window) -> Window | None:
    """One all-reduce in the place of a reduce-scatter and an all-reduce over replicas."""
    if window.kind == "reduce-scatter":
        return dataclasses.replace(window, kind="all-reduce", axes=("replica", "fsdp"), group=tuple(range(8)))
    return None if window.axes == ("replica",) else window


WHERE = "unit blocks/0..1, axis fsdp"


@pytest.mark.parametrize(
    ("replica", "change", "words"),
    [
        (1, lambda w: w, []),
        (2, lambda w: w, []),
        (
            1,
            instead("reduce-scatter", kind="all-reduce"),
            [f"reduce-scatter written, all-reduce compiled: {WHERE}, 2.0x the bytes"],
        ),
        (
            1,
            lambda w: None if w.name == "c1" else w,  # one of the two gathers
            [f"less all-gather than planned: {WHERE}, 1.98 x the parameters planned, 1.00 x compiled"],
        ),
        (
            1,
            instead("all-gather", executions=2),
            [f"more all-gather than planned: {WHERE}, 1.98 x the parameters planned, 3.96 x compiled"],
        ),
        (1, as_f32, [f"all-gather of bf16 written, of f32 compiled: {WHERE}, 2.0x the bytes"]),
        (
            2,
            in_one,
            [
                f"reduce-scatter written, all-reduce compiled: {WHERE} and axes replica, fsdp, 2.3x the bytes",
                "less all-reduce than planned: unit unknown, axis replica,"
                " 0.25 x the parameters planned, 0.00 x compiled",
            ],
        ),
    ],
)
def test_differences_in_words(replica: int, change: Callable, words: list[str]):
    plan = js.plan(abstract(DECODER, js.mesh(replica=replica), mixed_precision=PRECISION))
    found = differences(windows_of(traffic_of(plan), change), plan)
    assert [str(d) for d in found] == words


@pytest.mark.parametrize(("sync", "gathers", "scatters"), [("each", 8, 4), ("last", 1, 1)])
def test_accumulation_is_counted(sync: str, gathers: int, scatters: int):
    plan = js.plan(abstract(DECODER, js.mesh()))
    rounds = {"all-gather": gathers / 2, "reduce-scatter": scatters, "all-reduce": 1}
    made = [
        dataclasses.replace(w, sizes=tuple((d, round(n * rounds[w.kind])) for d, n in w.sizes))
        for w in windows_of(traffic_of(plan))
    ]
    assert differences(made, plan, accumulate=4, sync=sync) == ()
    assert differences(made, plan) != ()


def async_text(*, exposed: bool) -> str:
    """A loop that prefetches; its reduce-scatter has a product beside it or not."""
    order = [scatter("rs", 3, unit="Block"), scattered("part", "rs")]
    layer = body(
        "layer",
        gather("ag", 2, unit="Block"),
        dot("a"),
        gathered("full", "ag"),
        *(order if exposed else [order[0], dot("b"), order[1]]),
    )
    head = gather("first", 1, unit="Block"), gathered("now", "first")
    return text_of(*head, *loop("layer", 12, "%shard"), computations=layer)


def test_which_loop_collectives_are_not_overlapped():
    assert audit(async_text(exposed=False)).not_overlapped() == ()
    found = audit(async_text(exposed=True))
    assert [w.name for w in found.not_overlapped()] == ["rs"]
    assert [w.name for w in found.not_overlapped(in_loops=False)] == ["first", "rs"]
    assert found.not_overlapped(at_least_bytes=10**9) == ()


def test_the_audit_as_text():
    memory = CompiledMemory(
        arguments_bytes=2**20, results_bytes=2**20, shared_bytes=2**20, temporaries_bytes=2**21, peak_bytes=3 * 2**20
    )
    assert str(audit(async_text(exposed=True), memory=memory)) == (
        Path(__file__).parents[1] / "golden" / "audit.txt"
    ).read_text().rstrip("\n")


def test_the_audit_as_json(scanned: Audit):
    found = json.loads(scanned.to_json())
    assert found["ok"] is True
    assert found["num_devices"] == 8
    assert sum(row["total_bytes"] for row in found["collectives"]) == sum(t["total_bytes"] for t in found["totals"])
    assert len(found["not_overlapped_in_loops"]) == len(scanned.schedule.in_loops)
    assert found["memory_per_device"]["peak_bytes"] > 0


def test_a_lowered_program_is_compiled_and_one_without_communication_refused():
    lowered = jax.jit(lambda x: x + 1).lower(
        jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(js.mesh(), PartitionSpec("fsdp")))
    )
    with pytest.raises(ProgramError, match="without a single collective"):
        audit(lowered)


# Loops of unknown length that communicate: the compiler knows the collectives of one iteration, not their number.


def distance(rows: jax.Array) -> jax.Array:
    """A Sinkhorn iteration over the pairs of a batch: its body and its condition sum over all devices."""
    kernel = jnp.exp(-rows @ rows.T / 100)
    ones = jnp.ones(rows.shape[0])

    def goes_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.abs(state[0] * (kernel @ state[1]) - 1).max() > 1e-3

    def iterate(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left = 1 / (kernel @ state[1])
        return left, 1 / (kernel.T @ left)

    left, _ = jax.lax.while_loop(goes_on, iterate, (ones, ones))
    return (jax.lax.stop_gradient(left)[:, None] * kernel).sum()


class Settling(nnx.Module):
    """A fixed point inside the model, over the mean of the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = lambda y: jnp.tanh(x + y - y.mean(0, keepdims=True)) / 2
        y = jax.lax.while_loop(lambda y: jnp.abs(step(y) - y).max() > 1e-3, step, jnp.zeros_like(x))
        return self.layer(jax.lax.stop_gradient(y))


def test_a_loop_of_unknown_length_in_the_loss_is_audited():
    model = js.fully_shard(nn.Dense(64), mesh=js.mesh())
    x = jax.random.normal(jax.random.key(1), (16, 64))
    params = js.shard_init(lambda: model.init(jax.random.key(0), x)["params"], model)
    loss = lambda params: distance(jax.nn.relu(model.apply({"params": params}, x)))
    found = js.audit(jax.jit(jax.grad(loss)).lower(params).compile(), model=model)
    loops = [w for w in found.schedule.windows if w.loop]
    assert loops and all(w.per_iteration and w.executions == 1 for w in loops)
    text = " ".join(str(found).split())
    assert "its collectives are counted once per iteration" in text
    assert "+: per iteration of a loop of unknown length" in text
    assert any(row.get("per_iteration") for row in json.loads(found.to_json())["collectives"])


def test_a_loop_of_unknown_length_in_the_model_is_audited():
    model = Settling(nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh())
    x = jax.random.normal(jax.random.key(1), (16, 64))
    step = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()))
    found = js.audit(step.lower(model, x).lowered, model=model)
    assert found.ok, str(found)
    assert any(w.per_iteration for w in found.schedule.windows)
    assert all(row.per_iteration for row in found.mixing)


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    def body(x):
        summed = lambda state: jax.lax.psum(jnp.sin(state[1]), "fsdp")
        goes_on = lambda state: (state[0] < 4) & (summed(state).sum() < 1e9)
        return jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, state[1] + 1), (0, x))[1]

    spec = PartitionSpec("fsdp")
    run = jax.jit(jax.shard_map(body, mesh=js.mesh(), in_specs=spec, out_specs=spec, check_vma=False))
    found = js.audit(run.lower(jnp.zeros(64)).compile())
    assert [(w.kind, w.per_iteration) for w in found.schedule.windows] == [("all-reduce", True)]
