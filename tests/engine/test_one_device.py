"""Models that mix examples or keep a state of them, under the three lines: the numbers of one device, nnx and Linen.

No setting says what is per example and what is of the whole batch. Values, gradients, state and random bits are
compared, of one call, or after some steps.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.engine.mixing_models import IDS, LINEN, MODELS, VECTORS, Decodes
from tests.engine.one_device import (
    NAMES,
    TOLERANCE,
    annotated,
    apart,
    assert_equal,
    linen_results,
    nnx_results,
    on_host,
    trained,
)

pytestmark = [
    pytest.mark.usefixtures("ranks_as_users_have_them"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what the mixing costs
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]


# ---- Models -------------------------------------------------------------------------------------

CALLS = [*(f"nnx: {name}" for name in MODELS), *(f"Linen: {name}" for name in LINEN)]


@functools.cache
def results(call: str, on: str | None = None) -> Any:
    form, name = call.split(": ")
    if form == "Linen":
        return linen_results(LINEN[name], on)
    case = MODELS[name]
    model = case.build(nnx.Rngs(0))
    return nnx_results(annotated(model, case.units, on=on) if on else model, case.loss, *case.batch)


# Each call once: on eight devices, or where there is more to find.
ELSEWHERE = {
    "nnx: two towers": "2x4",
    "nnx: recomputed blocks": "tensor",
    "Linen: scanned blocks": "tensor",
}


@pytest.mark.parametrize("call", [call for call in CALLS if call not in NAMES])
def test_a_call_equals_one_device(call: str):
    assert_equal(results(call, ELSEWHERE.get(call, "fsdp=8")), results(call), TOLERANCE)


def test_a_cache_of_tokens_before():
    run = nnx.jit(lambda model, token: model(token))
    plain, model = Decodes(nnx.Rngs(0)), annotated(Decodes(nnx.Rngs(0)))
    found, wanted = (on_host(([run(m, IDS[:, i : i + 1]) for i in range(3)], nnx.state(m))) for m in (model, plain))
    assert max(apart(found, wanted).values()) <= TOLERANCE


@pytest.mark.parametrize("name", ["two towers", "batch norms"])
def test_a_call_outside_jit(name: str):
    case = MODELS[name]
    plain, model = case.build(nnx.Rngs(0)), annotated(case.build(nnx.Rngs(0)), case.units)
    found, wanted = (on_host((m(*case.batch), nnx.state(m, nnx.BatchStat))) for m in (model, plain))
    assert max(apart(found, wanted).values()) <= TOLERANCE


@pytest.mark.parametrize("examples", [3, 1])
def test_a_batch_that_does_not_divide(examples: int):
    """It is computed whole, on all devices: slow, and right."""
    case = MODELS["an EMA codebook"]
    plain, model = case.build(nnx.Rngs(0)), annotated(case.build(nnx.Rngs(0)))
    assert_equal(*(nnx_results(m, case.loss, VECTORS[:examples]) for m in (model, plain)))


# ---- After some steps ---------------------------------------------------------------------------

AFTER_STEPS = 2e-5
DEGREES = {
    "1": lambda: js.mesh(fsdp=1, devices=jax.devices()[:1]),
    "8": lambda: js.mesh(fsdp=8),
    "2x4": lambda: js.mesh(replica=2, fsdp=4),
}


@functools.cache
def trained_alone(name: str) -> dict[str, np.ndarray]:
    return trained(name, None)


@pytest.mark.parametrize(
    ("name", "degree"), [(name, ("8", "2x4")[i % 2]) for i, name in enumerate(NAMES)] + [("masks", "1"), ("masks", "8")]
)
def test_state_after_some_steps_is_that_of_one_device(name: str, degree: str):
    differences = apart(trained(name, DEGREES[degree]()), trained_alone(name))
    assert max(differences.values()) <= AFTER_STEPS, {k: x for k, x in differences.items() if x > AFTER_STEPS}
