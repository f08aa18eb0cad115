"""Whose a collective is: the plan's, a unit's that is never gathered, or a line's that mixes examples."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard as js
from jshard.engine.mixing import Mixing
from jshard.inspect.communication import differences, gathered_anyway, split_by_plan, without_mixing
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import mixing_in, unit_and_phase
from jshard.inspect.hlo.module import HloArray
from jshard.inspect.hlo.walk import read_schedule
from tests.scheduled_text import EIGHT, body, computation, dot, loop, program
from tests.toy_models import Tied

NAME = "jit(step)/(jvp(mixing[sum|square|vae.py|35|VAE.__call__|256])/psum:transpose(jvp(jshard[up]/backward))/psum)"
VAE = Mixing("sum", "square", "vae.py:35 (VAE.__call__)", 1, 256)
ROWS, WIDTH = 1001, 32


def sent(kind: str, *dims: tuple[int, ...], **more: object) -> Window:
    arrays = tuple(HloArray("f32", d) for d in dims)
    size = sum(4 * jnp.zeros(d).size for d in dims)
    return Window("c", kind, (("f32", size),), (*range(8),), ("fsdp",), arrays=arrays, **more)  # type: ignore[arg-type]


def annotate(model: Tied) -> None:
    js.fully_shard(model.table, mesh=js.mesh(), placement=js.PlacementPolicy(gathered=False, shard_dim=1))
    js.fully_shard(model, mesh=js.mesh())


@pytest.fixture(scope="module")
def plan() -> js.ShardPlan:
    return js.plan(js.abstract_init(lambda: Tied(ROWS, WIDTH, nnx.Rngs(0)), annotate))


def test_what_a_compiler_joins_is_taken_apart(plan: js.ShardPlan):
    assert mixing_in(NAME) == ((VAE,), False) and unit_and_phase(NAME) == (("up",), "both")
    others, own = without_mixing([sent("all-reduce", (64,), (16, 64), mixing=(VAE,))])
    assert [w.arrays for w in own] == [(("f32", (64,)),)] and [w.full_bytes for w in others] == [4096]
    rows = sent("all-gather", (WIDTH, WIDTH), (WIDTH, ROWS), units=("(root)", "table"))
    (ours,), (apart,) = split_by_plan([rows], plan)
    assert (ours.arrays, apart.arrays) == (rows.arrays[:1], rows.arrays[1:])
    assert gathered_anyway([apart], plan) == [(apart, [rows.arrays[1]])]


def test_a_line_that_sends_more_than_it_asked_for_is_a_difference(plan: js.ShardPlan):
    right, larger = (sent("all-gather", dims, mixing=(VAE,), is_mixing=True) for dims in ((64,), (8, 64)))
    assert not [d for d in differences([right], plan) if "vae.py" in str(d)]
    (more,) = [d for d in differences([right, larger], plan) if "vae.py" in str(d)]
    assert "2.00 KiB compiled for vae.py:35 (VAE.__call__), which needs 256 B" in str(more)


LINE = "mixing[sum|mul|moe.py|268|Model.__call__|1024]"
JOINED = (
    "%share = f32[32,8]{1,0} constant({...})",
    "%score = f32[32,8]{1,0} constant({...})",
    "%share_flat = f32[256]{0} bitcast(%share)",
    "%score_flat = f32[256]{0} bitcast(%score)",
    "%flat = f32[512]{0} fusion(%share_flat, %score_flat), kind=kLoop, calls=%wrapped",
    f"%both = f32[512]{{0}} all-reduce(%flat), channel_id=1, {EIGHT}, to_apply=%add, "
    f'metadata={{op_name="jit(step)/jvp({LINE})/psum"}}',
)
WRAPPED = computation(
    "wrapped",
    "%first = f32[256]{0} parameter(0)",
    "%second = f32[256]{0} parameter(1)",
    "ROOT %both_flat = f32[512]{0} concatenate(%first, %second), dimensions={0}",
)


@pytest.mark.parametrize("is_fused", [False, True])
def test_arrays_that_a_compiler_concatenated_are_counted_one_by_one(plan: js.ShardPlan, is_fused: bool):
    """As XLA of jax 0.12 does with two sums of the line that balances the experts of moe.py."""
    lines = list(JOINED)
    if not is_fused:
        lines[4] = "%flat = f32[512]{0} concatenate(%share_flat, %score_flat), dimensions={0}"
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    (window,) = read_schedule(program(*lines, computations=WRAPPED), mesh=mesh).windows
    assert window.arrays == (HloArray("f32", (32, 8)), HloArray("f32", (32, 8)))
    assert window.result_bytes == window.full_bytes == 2048
    assert not [d for d in differences([window], plan) if "moe.py" in str(d)]
    # What the model itself concatenates is one array to it.
    named = 'metadata={op_name="jit(step)/concatenate"}'
    lines[4] = f"%flat = f32[512]{{0}} concatenate(%share_flat, %score_flat), dimensions={{0}}, {named}"
    (of_model,) = read_schedule(program(*lines, computations=WRAPPED), mesh=mesh).windows
    assert of_model.arrays == (HloArray("f32", (512,)),)
    # The line asks for 1 KiB at a time. One array of 2 KiB is more than that.
    assert [d for d in differences([of_model], plan) if "2.00 KiB compiled for moe.py:268" in str(d)]


def test_what_has_no_name_is_reported_by_who_reads_it(plan: js.ShardPlan):
    """Of the shape of a kernel, and yet the table's: the gradients of its rows, from a compiler that names no unit."""
    read_by = lambda *units: dataclasses.replace(sent("all-gather", (WIDTH, WIDTH)), read_by=units)
    assert split_by_plan([read_by("table")], plan) == ([], [read_by("table")])
    for units in ((), ("(root)", "table")):
        assert split_by_plan([read_by(*units)], plan) == ([read_by(*units)], [])


# ---- who reads what has no name -----------------------------------------------------------------------------------

GRADIENT = (
    "%made = f32[250000]{0} multiply(%shard, %shard)",
    "%sent = f32[2000000]{0} all-gather(%made), "
    f'channel_id=1, {EIGHT}, dimensions={{0}}, metadata={{op_name="jit(step)/transpose(jvp())/shard_map"}}',
    "%moved = f32[2000,1000]{1,0} bitcast(%sent)",
)


def read(name: str, unit: str | None, operand: str = "moved", end: str = "") -> str:
    """An operation that reads what was sent, and where it is from."""
    scope = f"jshard[{unit}]" if unit else "loss"
    return f'%{name} = f32[126,32]{{1,0}} negate(%{operand}){end}, metadata={{op_name="jit(step)/{scope}/neg"}}'


def fused(name: str, operand: str = "moved") -> str:
    """The same in a fusion, `inside`, whose own name has no unit."""
    return f"%{name} = f32[126,32]{{1,0}} fusion(%shard, %{operand}), kind=kLoop, calls=%inside"


def inside(unit: str | None, result: str = "d") -> str:
    arguments = "%a = f32[250000]{0} parameter(0)", "%b = f32[2000,1000]{1,0} parameter(1)"
    other = '%c = f32[8]{0} negate(%a), metadata={op_name="jit(step)/jshard[blocks/0]/neg"}'
    return computation(
        "inside", *arguments, other, read("d", unit, "b"), f"ROOT %e = f32[126,32]{{1,0}} copy(%{result})"
    )


def window(*lines: str, computations: str = "") -> Window:
    (found,) = read_schedule(program(*lines, dot("a"), computations=computations), mesh=js.mesh()).windows
    assert not found.units
    return found


@pytest.mark.parametrize(
    "readers",
    [
        [read("rows", "table")],
        [read("scaled", None), read("rows", "table", "scaled")],
        [read("rows", "table"), read("more", "table"), read("after", "blocks/0", "rows")],
    ],
    ids=["at once", "behind an operation of no unit", "before another unit"],
)
def test_the_units_that_read_it_first_are_reported(readers: list[str]):
    assert window(*GRADIENT, *readers).read_by == ("table",)


def test_what_is_fused_is_looked_into():
    assert window(*GRADIENT, fused("rows"), computations=inside("table")).read_by == ("table",)
    outside = fused("rows"), read("more", "table", "rows")
    assert window(*GRADIENT, *outside, computations=inside(None)).read_by == ("table",)


def test_nothing_is_reported_of_what_goes_into_a_loop():
    layer = body("layer", dot("b"), results="%next, %shard")
    assert window(*GRADIENT, read("rows", "table"), *loop("layer", 2, "%moved"), computations=layer).read_by == ()


@pytest.mark.parametrize("cast", ["convert(%shard)", "slice(%shard)", "fusion(%shard), calls=%cast"])
def test_nothing_is_reported_of_what_is_stored(cast: str):
    """A parameter that the compiler gathers counts, no matter who reads it."""
    made = f"%made = f32[250000]{{0}} {cast}"
    body = "%a = f32[250000]{0} parameter(0)", "ROOT %b = f32[250000]{0} convert(%a)"
    found = window(made, *GRADIENT[1:], read("rows", "table"), computations=computation("cast", *body))
    assert found.read_by == ()
