"""What a user writes between two layers, under the three lines of `js.fully_shard`: the numbers of one device.

No setting says what is per example and what is of the whole batch. Values, gradients and random bits are compared.
"""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.engine.batch_bodies import GROUPS
from tests.engine.one_device import TOLERANCE, body_results, one_device, worst_of
from tests.wide import wide

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]  # of what the mixing costs
# Partial sums of the first are rounded to bfloat16; those of the others cancel.
LOOSER = {
    ("products", "a product in bfloat16"): 8e-3,
    ("products", "a sigmoid loss of all pairs"): 6e-6,
    ("loops", "a carry of sums"): 4e-6,
    ("reductions", "a largest"): 4e-6,
    ("sorts", "added where labels say"): 4e-6,
}


@pytest.fixture(autouse=True)
def ranks_as_users_have_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def differences(group: str, names: tuple[str, ...], on: str, linen: bool) -> dict[str, Any]:
    """The functions that do not give what one device gives, and by how much; or how they fail."""
    wanted = one_device(group, names, linen)
    try:
        found = body_results(group, names, on, linen)
    except Exception as error:
        if len(names) == 1:
            return {names[0]: error}
        return {k: x for name in names for k, x in differences(group, (name,), on, linen).items()}
    worst = {name: worst_of(found[name], wanted[name]) for name in names}
    return {name: x for name, x in worst.items() if x[0] > LOOSER.get((group, name), TOLERANCE)}


@pytest.mark.parametrize(
    ("group", "on", "linen"),
    [(group, "fsdp=8", False) for group in GROUPS]
    + [("random", "fsdp=8", True), ("known", "fsdp=8", True), ("loops", "fsdp=8", True), ("places", "fsdp=8", True)]
    + [("reductions", "2x4", False), ("random", "2x4", False), ("sorts", "2x4", True), ("branches", "2x4", True)]
    + [("places", "tensor", False), ("products", "tensor", True)]
    + [wide(group, on, linen) for group in GROUPS for on in ("2x4", "tensor") for linen in (False, True)],
)
def test_gives_the_numbers_of_one_device(group: str, on: str, linen: bool):
    assert differences(group, tuple(GROUPS[group]), on, linen) == {}
