"""Linen models that mix examples or keep a state of them, under the three lines: the numbers of one device."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.engine.mixing_linen import LINEN
from tests.engine.one_device import TOLERANCE, assert_equal, linen_results
from tests.wide import wide

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]  # of what the mixing costs
# A norm over the batch magnifies rounding: the first is 2.2e-6 apart on one device, with its batch turned over.
LOOSER = dict.fromkeys(("a running normaliser", "norms and dropout in blocks", "recomputed blocks"), 5e-6)


@pytest.fixture(autouse=True)
def ranks_as_users_have_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def one_device(name: str) -> Any:
    return linen_results(LINEN[name])


@pytest.mark.parametrize(
    ("name", "on"),
    [(name, "fsdp=8") for name in LINEN]
    + [(name, "2x4") for name in ("an EMA codebook", "norms and dropout in blocks", "loops over time")]
    + [(name, "tensor") for name in ("a running normaliser", "scanned blocks")]
    + [wide(name, on) for name in LINEN for on in ("2x4", "tensor")],
)
def test_equals_one_device(name: str, on: str):
    assert_equal(linen_results(LINEN[name], on), one_device(name), LOOSER.get(name, TOLERANCE))
