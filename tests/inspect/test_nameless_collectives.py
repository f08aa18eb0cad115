"""A collective that the compiler left without a unit's name is recognised by the operations that read its result."""

import pytest

import jshard as js
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.walk import read_schedule
from tests.scheduled_text import EIGHT, body, computation, dot, loop, program

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
    """Likewise in a fusion, `inside`, whose own name tells no unit."""
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
def test_the_units_that_read_it_first_are_told(readers: list[str]):
    assert window(*GRADIENT, *readers).read_by == ("table",)


def test_what_is_fused_is_looked_into():
    assert window(*GRADIENT, fused("rows"), computations=inside("table")).read_by == ("table",)
    outside = fused("rows"), read("more", "table", "rows")
    assert window(*GRADIENT, *outside, computations=inside(None)).read_by == ("table",)


def test_nothing_is_told_of_what_goes_into_a_loop():
    layer = body("layer", dot("b"), results="%next, %shard")
    assert window(*GRADIENT, read("rows", "table"), *loop("layer", 2, "%moved"), computations=layer).read_by == ()


@pytest.mark.parametrize("cast", ["convert(%shard)", "slice(%shard)", "fusion(%shard), calls=%cast"])
def test_nothing_is_told_of_what_is_stored(cast: str):
    """A parameter that the compiler gathers counts, whoever reads it."""
    made = f"%made = f32[250000]{{0}} {cast}"
    body = "%a = f32[250000]{0} parameter(0)", "ROOT %b = f32[250000]{0} convert(%a)"
    found = window(made, *GRADIENT[1:], read("rows", "table"), computations=computation("cast", *body))
    assert found.read_by == ()
