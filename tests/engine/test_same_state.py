"""Dropout masks, BatchNorm statistics, codebooks and counts are those of one device on every mesh, after some steps."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import jshard as js
from tests.engine.one_device import apart
from tests.engine.trained_states import NAMES, trained
from tests.wide import wide

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]  # of what the mixing costs
TOLERANCE = 2e-5  # after three steps
MESHES = {
    "1": lambda: js.mesh(fsdp=1, devices=jax.devices()[:1]),
    "8": lambda: js.mesh(fsdp=8),
    "2x4": lambda: js.mesh(replica=2, fsdp=4),
}


@pytest.fixture(autouse=True)
def ranks_as_users_have_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def one_device(name: str) -> dict[str, np.ndarray]:
    return trained(name, None)


@pytest.mark.parametrize(
    ("name", "degree"),
    [(name, "8") for name in NAMES]
    + [
        (name, "2x4")
        for name in ("nnx: an EMA codebook", "nnx: batch norms", "Linen: norms and dropout in blocks", "masks")
    ]
    + [("masks", "1"), ("nnx: batch norms", "1")]
    + [wide(name, degree) for name in NAMES for degree in ("1", "2x4")],
)
def test_state_is_that_of_one_device(name: str, degree: str):
    differences = apart(trained(name, MESHES[degree]()), one_device(name))
    assert max(differences.values()) <= TOLERANCE, {k: x for k, x in differences.items() if x > TOLERANCE}
