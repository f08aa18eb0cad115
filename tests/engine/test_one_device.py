"""Models that mix examples or keep a state of them, under the three lines: the numbers of one device, nnx and Linen.

And what a user writes between two layers. No setting says what is per example and what is of the whole batch. Values,
gradients, state and random bits are compared, of one call, or after some steps.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.engine.batch_bodies import GROUPS
from tests.engine.mixing_linen import LINEN
from tests.engine.mixing_models import IDS, MODELS, VECTORS, Decodes, OwnCache
from tests.engine.one_device import (
    TOLERANCE,
    annotated,
    apart,
    assert_equal,
    body_results,
    linen_results,
    nnx_results,
    of_bodies,
    on_host,
    worst_of,
)
from tests.engine.trained_states import NAMES, trained
from tests.wide import wide

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what the mixing costs
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def ranks_as_users_have_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


# ---- Models -------------------------------------------------------------------------------------

# A norm over the batch magnifies rounding: the first is 2.2e-6 apart on one device, with its batch turned over.
LOOSER = dict.fromkeys(
    (f"Linen: {name}" for name in ("a running normaliser", "norms and dropout in blocks", "recomputed blocks")), 5e-6
)
CALLS = [*(f"nnx: {name}" for name in MODELS), *(f"Linen: {name}" for name in LINEN)]


@functools.cache
def results(call: str, on: str | None = None) -> Any:
    form, name = call.split(": ")
    if form == "Linen":
        return linen_results(LINEN[name], on)
    case = MODELS[name]
    model = case.build(nnx.Rngs(0))
    return nnx_results(annotated(model, case.units, on=on) if on else model, case.loss, *case.batch)


# Each call once: on eight devices, or where there is more to find. The others repeat what another call has proved.
ELSEWHERE = {
    "nnx: an EMA codebook": "2x4",
    "nnx: batch norms": "2x4",
    "nnx: two towers": "2x4",
    "nnx: one large graph": "2x4",
    "nnx: a running normaliser": "tensor",
    "nnx: recomputed blocks": "tensor",
    "Linen: an EMA codebook": "2x4",
    "Linen: norms and dropout in blocks": "2x4",
    "Linen: a running normaliser": "tensor",
    "Linen: scanned blocks": "tensor",
}
AGAIN = ("nnx: dropout in blocks", "nnx: jitted blocks", "Linen: two towers", "Linen: recomputed blocks")
ONCE = [(call, ELSEWHERE.get(call, "fsdp=8")) for call in CALLS if call not in AGAIN]


@pytest.mark.parametrize(
    ("call", "on"),
    ONCE + [wide(call, on) for call in CALLS for on in ("fsdp=8", "2x4", "tensor") if (call, on) not in ONCE],
)
def test_a_call_equals_one_device(call: str, on: str):
    assert_equal(results(call, on), results(call), LOOSER.get(call, TOLERANCE))


@pytest.mark.parametrize("kind", [Decodes, OwnCache])
def test_a_cache_of_tokens_before(kind: type):
    run = nnx.jit(lambda model, token: model(token))
    plain, model = kind(nnx.Rngs(0)), annotated(kind(nnx.Rngs(0)))
    found, wanted = (on_host(([run(m, IDS[:, i : i + 1]) for i in range(3)], nnx.state(m))) for m in (model, plain))
    assert max(apart(found, wanted).values()) <= TOLERANCE


@pytest.mark.parametrize("name", ["two towers", "loops over time", "batch norms"])
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


# ---- What a user writes between two layers ------------------------------------------------------

# Partial sums of the first are rounded to bfloat16; those of the others cancel.
LOOSER_BODIES = {
    ("products", "a product in bfloat16"): 8e-3,
    ("products", "a sigmoid loss of all pairs"): 6e-6,
    ("loops", "a carry of sums"): 4e-6,
    ("reductions", "a largest"): 4e-6,
    ("sorts", "added where labels say"): 4e-6,
}


def differences(group: str, names: tuple[str, ...], on: str, linen: bool) -> dict[str, Any]:
    """The functions that do not give what one device gives, and by how much; or how they fail."""
    wanted = of_bodies(group, names, linen)
    try:
        found = body_results(group, names, on, linen)
    except Exception as error:
        if len(names) == 1:
            return {names[0]: error}
        return {k: x for name in names for k, x in differences(group, (name,), on, linen).items()}
    worst = {name: worst_of(found[name], wanted[name]) for name in names}
    return {name: x for name, x in worst.items() if x[0] > LOOSER_BODIES.get((group, name), TOLERANCE)}


EVERYWHERE = [(on, linen) for on in ("fsdp=8", "2x4", "tensor") for linen in (False, True)]
# By default each group once, and each mesh and each form some time; gammas are in "mixup", and compile long.
DEFAULT = dict.fromkeys(GROUPS, ("fsdp=8", False)) | {
    "reductions": ("2x4", True),
    "images": ("tensor", False),
    "gammas": None,
}


@pytest.mark.parametrize(
    ("group", "on", "linen"),
    [(group, *where) if where == DEFAULT[group] else wide(group, *where) for group in GROUPS for where in EVERYWHERE],
)
def test_functions_of_the_batch_equal_one_device(group: str, on: str, linen: bool):
    assert differences(group, tuple(GROUPS[group]), on, linen) == {}


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


TRAINED = [(name, "8") for name in NAMES] + [("nnx: batch norms", "2x4"), ("masks", "2x4"), ("masks", "1")]


@pytest.mark.parametrize(
    ("name", "degree"),
    TRAINED + [wide(name, degree) for name in NAMES for degree in DEGREES if (name, degree) not in TRAINED],
)
def test_state_after_some_steps_is_that_of_one_device(name: str, degree: str):
    differences = apart(trained(name, DEGREES[degree]()), trained_alone(name))
    assert max(differences.values()) <= AFTER_STEPS, {k: x for k, x in differences.items() if x > AFTER_STEPS}
