"""What to try when a step does not fit: ways that hold less, each compiled before it is named."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jshard._errors import AnnotationError
from jshard._mesh import FSDP, REPLICA, data_shards
from jshard.cluster.compare import Bench, Compared
from jshard.cluster.compile import CompileRequest
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.variants import Variant

_TRIES = 4  # compiled at most
_MARGIN = 0.95  # of the memory, by the estimate
_REMATS = {"none": ("dots", "full"), "dots": ("full",), "full": ()}


def suggestions(
    costs: Costs,
    asked: CompileRequest,
    mesh: Mapping[str, int],
    *,
    bench: Bench,
    peak_bytes: int,
) -> tuple[Compared, ...]:
    """Ways that hold less than what was asked for and does not fit, the quickest by the estimate first.

    Compiles until one fits, and returns what it tried. The batch of a step stays as it is.

    Args:
        costs: estimates for the recipe.
        asked: what does not fit.
        mesh: its mesh.
        bench: where they are compiled.
        peak_bytes: what it needs, as compiled: the estimates are corrected by it.
    """
    now = costs.of(Variant(name="asked", mesh=mesh))
    wrong = max(1.0, peak_bytes / now.memory.step_bytes)  # the estimate was at least that much too low
    room = _MARGIN * bench.cluster.topology.device.hbm_bytes / wrong
    tried: list[Compared] = []
    for cost in sorted(_less(costs, mesh), key=lambda cost: cost.step_s):
        if cost.memory.step_bytes <= room:
            room = cost.memory.step_bytes - 1  # if it does not fit, only what holds less is worth another try
            tried.append(bench.compiled(asked, cost.variant, f"{len(tried) + 1} of at most {_TRIES}"))
            if tried[-1].fits or len(tried) == _TRIES:
                break
    return tuple(tried)


def _less(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Cost]:
    """The ways that can hold less: layers computed again, microbatches, parameters spread wider and let go."""
    devices, recipe = mesh[REPLICA] * mesh[FSDP], costs.recipe
    rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
    microbatches = [n for n in range(1, rows + 1) if rows % n == 0]
    remats = (None, *_REMATS.get(costs.remat, ("full",)))
    meshes = [dict(mesh)] + ([dict(mesh) | {REPLICA: 1, FSDP: devices}] if mesh[REPLICA] > 1 else [])
    for wide, remat, n, again in itertools.product(meshes, remats, microbatches, (False, True)):
        units: dict[str, Any] = {} if remat is None else {"remat": remat}
        units |= {"reshard_after_forward": True} if again else {}
        variant = Variant(
            name="suggestion",
            mesh=wide,
            accumulate=None if n == 1 else recipe.accumulate * n,
            units=units,
        )
        with contextlib.suppress(AnnotationError):  # on the wider mesh a large parameter may not divide
            yield costs.of(variant)
