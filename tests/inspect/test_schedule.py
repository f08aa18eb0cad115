"""The reader of schedules says what runs beside each collective, and refuses what it does not understand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jshard as js
from jshard.inspect import ProgramError, collectives
from jshard.inspect.hlo import Loop, Schedule, Wait
from jshard.inspect.hlo.walk import read_schedule
from tests.golden_texts import GoldenTexts
from tests.scheduled_text import (
    DOT_FLOPS,
    EIGHT,
    GATHERED,
    body,
    computation,
    dot,
    gather,
    gathered,
    loop,
    program,
    scatter,
    scattered,
)


def test_an_async_collective_and_what_runs_beside_it():
    text = program(
        gather("ag", 1, unit="blocks/3"),
        dot("a"),
        dot("b"),
        gathered("full", "ag"),
        scatter("rs", 2),
        scattered("part", "rs"),
        dot("c"),
    )
    schedule = read_schedule(text, mesh=js.mesh())
    first, second = schedule.windows
    assert (first.kind, first.sizes, first.axes, len(first.group)) == (
        "all-gather",
        (("f32", GATHERED),),
        ("fsdp",),
        8,
    )
    assert (first.units, first.phase, first.is_async, first.loop) == (("blocks/3",), "forward", True, "")
    assert (first.operations, first.matmuls, first.flops) == (2, 2, 2 * DOT_FLOPS)
    assert (second.kind, second.full_bytes, second.phase) == ("reduce-scatter", GATHERED, "backward")
    assert second.is_async
    assert not second.is_overlapped
    assert schedule.flops == 3 * DOT_FLOPS


@pytest.mark.parametrize(
    ("name", "is_sum"),
    [
        ("jit(reduce_unit)/psum", True),
        ("jit(reduce_unit)/psum_scatter", False),
        ("jit(reduce_unit)/reduce_scatter", False),
    ],
)
def test_a_sum_that_the_program_asks_for(name, is_sum):
    reduction = f'all-reduce(%gradient), channel_id=1, {EIGHT}, metadata={{op_name="{name}"}}'
    (window,) = collectives(program(f"%sum = f32[2000000]{{0}} {reduction}"))
    assert window.is_sum == is_sum


@pytest.mark.parametrize(
    ("sent_by", "links"),
    [
        ('{"color_strategies":[{"phase_rings":[{"core_count":"4"}]},{"phase_rings":[{"core_count":"4"}]}]}', 2),
        ('{"debug":"UniDirectionNDRingStrategy{colors:6 phases:3 cores:{4 4 4}"}', 6),
        ('{"debug":"StrategyRing{colors:1 phases:1 cores:{64}"}', 2),  # both ways around
        ('{"emitter":"1DAllGatherNonMajorDimImbalanced","debug":"group_size = 64"}', 2),
        ('{"emitter":"3DAllGatherOnMajorDim"}', 6),
        ('{"emitter":"BarnaCoreAllGatherEmitter","debug":"group_size = 64"}', 2),
        ('{"flag_configs":[]}', 0),
    ],
)
def test_the_links_of_a_torus_that_a_collective_uses(sent_by: str, links: int):
    text = program(gather("ag", 1) + f", backend_config={sent_by}", dot("a"), gathered("full", "ag"))
    (window,) = read_schedule(text).windows
    assert window.links == links


def between_slices(opcode: str, name: str, shape: str, operands: str, transfer: str = "") -> str:
    """A part of a collective between TPU slices, as libtpu prints it."""
    attributes = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
    if transfer:
        attributes += ',_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target="{1,2}x{0:3}"'
        attributes += f',_xla_megascale_transfer_type="{transfer}"'
    return f"%{name} = {shape} {opcode}({operands}), is_host_transfer=true, frontend_attributes={{{attributes}}}"


def on_two_slices(transfer: str, sent: int, arriving: int) -> str:
    """A collective between two slices of four devices, beside a product."""
    return program(
        "%after = token[] after-all()",
        between_slices("send", "s", f"(f32[{sent},10]{{1,0}}, u32[], token[])", "%gradient, %after", transfer),
        between_slices("recv", "r", f"(f32[{arriving},10]{{1,0}}, u32[], token[])", "%after", transfer),
        dot("a"),
        between_slices("send-done", "sd", "token[]", "%s"),
        between_slices("recv-done", "rd", f"(f32[{arriving},10]{{1,0}}, token[])", "%r"),
        dot("b"),
        devices=4,
    )


@pytest.mark.parametrize(
    ("transfer", "kind", "sent", "arriving"),
    [
        ("ALL_REDUCE", "all-reduce", 100, 100),
        ("ALL_GATHER", "all-gather", 50, 100),
        ("REDUCE_SCATTER", "reduce-scatter", 100, 50),
    ],
)
def test_a_collective_between_tpu_slices_lasts_from_its_send_to_the_end_of_its_recv(transfer, kind, sent, arriving):
    mesh = js.mesh(replica=2, devices=8)
    schedule = read_schedule(on_two_slices(transfer, sent, arriving), mesh=mesh)
    assert (schedule.num_devices, schedule.num_slices) == (8, 2)
    (window,) = schedule.windows
    assert (window.kind, window.axes, window.group, window.sizes) == (kind, ("replica",), (0, 4), (("f32", 4000),))
    assert window.is_async and window.matmuls == 1
    assert window.arrays == (("f32", (arriving, 10)),)


@pytest.mark.parametrize("fault", ['_xla_megascale_target="{1,2}x{0:3}",', "ALL_REDUCE", "xla_megascale_runtime"])
def test_other_transfers_by_hosts_are_refused(fault):
    text = on_two_slices("ALL_REDUCE", 100, 100).replace(fault, "")
    with pytest.raises(ProgramError, match="cannot be counted"):
        read_schedule(text)


@pytest.mark.parametrize(
    ("op_name", "unit", "phase"),
    [
        ("jit(step)/jvp()/shard_map/jshard[(root)]/jshard[blocks/3]/all_gather", "blocks/3", "forward"),
        ("jit(step)/jshard[(root)]/transpose(jvp(jshard[blocks/3]))/all_gather", "blocks/3", "backward"),
        ("jit(step)/jshard[(root)]/jshard[blocks/3]/backward/reduce_scatter", "blocks/3", "backward"),
        ("jit(step)/jshard[(root)]/(jshard[b/0]/x:jshard[b/1]/x:jshard[(root)]/x)", "b/0..1+(root)", "forward"),
        ("jit(step)/jshard[(root)]/jshard[b/(0]/x:1]/x:2]/backward/x)", "b/0..2", "both"),
        ("jit(step)/jshard[b/0]/(x:transpose(y)/z)", "b/0", "both"),
        ("jit(step)/jvp()/all_gather", None, None),
    ],
)
def test_units_and_phases_are_read_from_the_names_of_the_trace(op_name: str, unit: str | None, phase: str | None):
    text = program(gather("ag", 1), dot("a"), gathered("full", "ag"))
    (window,) = read_schedule(text.replace("jit(step)/jshard[blocks/0]/all_gather", op_name)).windows
    assert (window.unit, window.phase) == (unit, phase)


def test_the_work_of_a_loop_counts_for_a_window_around_it():
    layer = body("layer", dot("a"), results="%next, %shard")
    text = program(gather("ag", 1), *loop("layer", 12, "%shard"), gathered("full", "ag"), computations=layer)
    (window,) = read_schedule(text).windows
    assert (window.loop, window.matmuls, window.flops) == ("", 12, 12 * DOT_FLOPS)


CARRIED = "s32[], f32[250000]{0}, (f32[250000]{0}, f32[2000000]{0})"


def carried(after: str) -> Schedule:
    """A loop that waits for the gather of the round before and begins the next one."""
    layer = body(
        "layer",
        "%arriving = (f32[250000]{0}, f32[2000000]{0}) get-tuple-element(%state), index=2",
        dot("a"),
        gathered("full", "arriving"),
        dot("b"),
        gather("ag", 2),
        dot("c"),
        state=CARRIED,
        results="%next, %shard, %ag",
    )
    text = program(
        gather("first", 1),
        dot("d"),
        *loop("layer", 12, "%shard", "%first", state=CARRIED),
        "%last = (f32[250000]{0}, f32[2000000]{0}) get-tuple-element(%layer_loop), index=2",
        after,
        computations=layer,
    )
    return read_schedule(text)


def test_windows_across_the_edge_of_a_loop():
    schedule = carried(gathered("final", "last"))
    first, inner = schedule.windows
    assert (first.loop, first.matmuls) == ("", 2)  # d, then a of the first round
    assert (inner.loop, inner.matmuls) == ("layer_loop", 2)  # c, then a of the next round
    around = next(step for step in schedule.steps if isinstance(step, Loop))
    ((outside, inside),) = around.enters
    assert outside == "first"
    assert around.turns == (("ag", inside),)
    assert Wait(inside) in around.steps
    assert inner.executions == 12 and schedule.in_loops == (inner,) and schedule.not_overlapped() == ()
    assert [schedule.steps[-1]] == [Wait(token) for _, token in around.leaves]


@pytest.mark.parametrize(("opcode", "called"), [("async", "calls"), ("fusion", "calls"), ("call", "to_apply")])
def test_a_computation_wrapped_to_run_beside(opcode: str, called: str):
    """GPU: async-start, and fusion-start since jax 0.12. TPU, on its sparse cores: call-start."""
    wrapped = computation(
        "wrapped", f"ROOT %rs = f32[250000]{{0}} reduce-scatter(%p), channel_id=1, {EIGHT}, to_apply=%add"
    )
    text = program(
        f"%s = ((f32[2000000]{{0}}), f32[250000]{{0}}, u32[]) {opcode}-start(%gradient), {called}=%wrapped",
        dot("a"),
        f"%e = f32[250000]{{0}} {opcode}-done(%s), {called}=%wrapped",
        computations=wrapped,
    )
    (window,) = read_schedule(text).windows
    assert (window.kind, window.full_bytes, window.matmuls) == ("reduce-scatter", GATHERED, 1)


def tpu_fusion(stage: str, chain: int, channel: int) -> str:
    return computation(
        f"fused_{stage.lower()}_{chain}",
        "%p = f32[250000]{0} parameter(0)",
        f"%ag = f32[2000000]{{0}} all-gather(%p), channel_id={channel}, {EIGHT}, dimensions={{0}},"
        f' frontend_attributes={{chain_id="{chain}"}}',
        f'ROOT %c = f32[2000000]{{0}} custom-call(%ag), custom_call_target="AsyncCollective{stage}"',
    )


def test_tpu_fusions_that_print_a_collective_three_times_count_once():
    between = computation(
        "async_collective_fusion_1",
        "%l = bf16[1000,1000]{1,0} parameter(0)",
        "%r = bf16[1000,500]{1,0} parameter(1)",
        "%p = f32[250000]{0} parameter(2)",
        f"%ag = f32[2000000]{{0}} all-gather(%p), channel_id=7, {EIGHT}, dimensions={{0}}",
        "ROOT " + dot("d", "l", "r"),
    )
    text = program(
        "%s = f32[2000000]{0} fusion(%shard), kind=kCustom, calls=%fused_start_3",
        "%m = bf16[1000,500]{1,0} fusion(%left, %right, %shard), kind=kOutput, calls=%async_collective_fusion_1",
        "%e = f32[2000000]{0} fusion(%s), kind=kCustom, calls=%fused_done_3",
        computations=tpu_fusion("Start", 3, 7) + between + tpu_fusion("Done", 3, 7),
    )
    (window,) = read_schedule(text).windows
    assert (window.kind, window.is_async, window.matmuls, window.full_bytes) == ("all-gather", True, 1, GATHERED)


def test_a_cpu_program_blocks_and_its_counts_are_those_of_the_counter():
    def shard(x):
        full = lax.all_gather(x, "fsdp", tiled=True)
        return lax.psum_scatter(full @ jnp.ones((4, 4)), "fsdp", tiled=True)

    def step(x):
        return lax.scan(lambda carry, _: (shard(carry), None), x, length=5)[0]

    spec = PartitionSpec("fsdp")
    run = jax.shard_map(step, mesh=js.mesh(), in_specs=spec, out_specs=spec)
    compiled = jax.jit(run).lower(jnp.zeros((64, 4))).compile()
    schedule = read_schedule(compiled, expect_collectives=True)
    found = {w.kind: (w.full_bytes, w.executions, w.is_async) for w in schedule.windows}
    assert found == {"all-gather": (1024, 5, False), "reduce-scatter": (1024, 5, False)}
    assert found.keys() == {c.kind for c in collectives(compiled)}
    assert schedule.flops == 5 * 2 * 64 * 4 * 4


COUNTED = """%condition (p: (s32[], f32[250000])) -> pred[] {
  %p = (s32[], f32[250000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(BOUND)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}
"""


def test_rounds_from_a_counter_that_steps_by_more_than_one():
    layer = body("layer", gather("ag", 1), dot("a"), gathered("full", "ag"), results="%next, %shard")
    layer = layer.replace("%next = s32[] add(%i, %one)", "%mid = s32[] add(%i, %one)\n  %next = s32[] add(%mid, %one)")
    lines = [line.partition(", backend_config")[0] for line in loop("layer", 0, "%shard")]
    text = program(*lines, computations=layer + COUNTED.replace("BOUND", "11"))
    assert read_schedule(text).windows[0].executions == 6


WRAPPED = computation("wrapped", f"ROOT %ag = f32[2000000]{{0}} all-gather(%p), channel_id=5, {EIGHT}")
ENDLESS = [line.partition(", backend_config")[0] for line in loop("layer", 0, "%shard")]
GATHERING = body("layer", gather("ag", 1), gathered("full", "ag"), results="%next, %shard")
ERRORS = {
    "no schedule": program(dot("a")).replace("is_scheduled=true, ", ""),
    "no collectives": program(dot("a")),
    "an unknown form": program(
        gather("seen", 5),  # another one on the same channel, as GPU programs have it
        gathered("full", "seen"),
        "%m = f32[2000000]{0} map(%shard), to_apply=%wrapped",
        computations=WRAPPED,
    ),
    "a function": jax.jit(jnp.sin),
    "no start": program(gathered("full", "shard")),
    "an unknown kind": program("%r = f32[8]{0} ragged-all-to-all(%shard), channel_id=1"),
}
GOLDEN = GoldenTexts("program_errors.txt", ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_read_is_an_error(name: str):
    with pytest.raises(ProgramError) as raised:
        read_schedule(ERRORS[name], expect_collectives=True)
    GOLDEN.check(name, raised.value)


def test_a_mesh_of_another_size_is_an_error():
    with pytest.raises(ProgramError, match="runs on 16 devices, the mesh has 8"):
        read_schedule(program(dot("a"), devices=16), mesh=js.mesh())


def test_a_loop_of_unknown_length_counts_its_collectives_once_per_iteration():
    schedule = read_schedule(program(*ENDLESS, computations=GATHERING), expect_collectives=True)
    (window,) = schedule.windows
    assert (window.executions, window.per_iteration, window.loop) == (1, True, "layer_loop")
    assert schedule.notes == (
        "loop layer_loop: the number of iterations is unknown; its collectives are counted once per iteration",
    )


def test_what_is_not_counted_is_reported():
    text = program(
        '%c = f32[8]{0} custom-call(%shard), custom_call_target="my_kernel"',
        *ENDLESS,
        computations=body("layer", dot("a"), results="%next, %shard"),
    )
    assert read_schedule(text).notes == (
        "loop layer_loop: the number of iterations is unknown; counted once",
        "custom call my_kernel: its operations are unknown; only its memory traffic is counted",
    )
