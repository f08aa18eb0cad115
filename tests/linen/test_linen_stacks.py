"""Layers that `nn.scan` stacks and no unit names: the plan and explain say how they are gathered, and so they are."""

import collections
from typing import Any

import flax.linen as nn
import jax
import pytest

import jshard as js
from jshard.inspect.memory import memory_of
from tests.helpers import compile_to_read
from tests.linen_models import WIDTH, Layer

LAYERS = 4
SHAPE = jax.ShapeDtypeStruct((16, WIDTH), "float32")
KERNEL = 4 * WIDTH * WIDTH


class Stack(nn.Module):
    """Layers in a loop, each with parameters of its own or all with the same."""

    lifted: Any = None

    @nn.compact
    def __call__(self, x):
        lifted = self.lifted or {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Layer, length=LAYERS, **lifted)(name="layers")(x, None)[0]


class TowerAndHead(nn.Module):
    tower: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="head")(self.tower(x))


def annotated(tower: nn.Module | None = None, **settings: Any) -> nn.Module:
    model = js.fully_shard(TowerAndHead(tower or Stack()), mesh=js.mesh(), **settings)
    jax.eval_shape(model.init, jax.random.key(0), SHAPE)
    return model


NOT_AHEAD = {
    "a unit beside": ("head", "(root)", "each layer when it is needed"),
    "a unit around": (Stack, "tower", "all layers at once"),
}


@pytest.mark.parametrize(("units", "unit", "how"), NOT_AHEAD.values(), ids=NOT_AHEAD)
def test_explain_names_layers_that_no_unit_names(units, unit, how):
    size = 4 * LAYERS * 2 * KERNEL
    model = annotated(units=units)
    plan = js.plan(model)
    assert plan.unscheduled_stacks == {("tower/layers", unit): size}
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    words = f"Stacked layers: tower/layers, 128.00 KiB, gathered by {unit}, {how}: no unit is inside their loop"
    assert words in " ".join(str(js.explain(model)).split())


@pytest.mark.parametrize(("units", "loop", "whole"), [("head", 2, False), (Stack, 0, True)], ids=str)
def test_the_program_does_as_instructed(units, loop, whole):
    """A layer's kernel at a time, forward and backward; or those of all layers before the first."""
    model = annotated(units=units)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), SHAPE)["params"], model)
    grad = jax.jit(jax.grad(lambda params, x: (model.apply({"params": params}, x) ** 2).mean()))
    found = js.audit(compile_to_read(grad.lower(params, SHAPE)), model=model)
    gathered = collections.Counter()
    for window in found.schedule.windows:
        for _, shape in window.arrays if window.kind == "all-gather" else ():
            gathered[shape] += window.executions
    assert gathered[WIDTH, 4 * WIDTH] == loop * LAYERS
    assert gathered[LAYERS, WIDTH, 4 * WIDTH] in ((1, 2) if whole else (0,))  # XLA:CPU may join those of both passes
    assert found.ok, found.differences
    memory = memory_of(js.plan(model))  # two kernels of four bytes an element; the head may be the root's, and kept
    assert memory.largest_unit_bytes == 2 * KERNEL * 4 * (LAYERS if whole else 1)
    assert memory.kept_bytes == (4 * WIDTH * WIDTH if whole else 0)
