"""Suggestions when a step does not fit: configurations with less memory, each compiled before it is suggested."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from jshard.cluster.comparison import Compared, VariantCompiler
from jshard.cluster.compile import CompileRequest, Variant
from jshard.cluster.costs import Cost, Costs
from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, REPLICA, data_shards
from jshard.plans.remat import AUTO

_TRIES = 4  # compiled at most
_MARGIN = 0.95  # share of the memory, by the estimate
# Policies of remat that save less than another one.
_STRONGER = {"none": ("dots", "full"), "dots": ("full",), "full": ()}


def suggestions(
    costs: Costs,
    requested: CompileRequest,
    mesh: Mapping[str, int],
    *,
    bench: VariantCompiler,
    peak_bytes: int,
) -> tuple[Compared, ...]:
    """Compiles configurations with less memory than the requested one, which does not fit, until one fits.

    The fastest by the estimate comes first. The batch of a step does not change.

    Args:
        costs: estimates for the recipe on the cluster.
        requested: the original request.
        mesh: its mesh.
        bench: compiles the configurations.
        peak_bytes: the compiled peak of the requested step, which corrects the estimates.

    Returns:
        Those that were tried.
    """
    estimated = costs.of(Variant(name="asked", mesh=mesh))
    too_low = max(1.0, peak_bytes / estimated.memory.step_bytes)  # factor by which the estimate was too low
    room_bytes = _MARGIN * bench.cluster.topology.device.hbm_bytes / too_low
    tried: list[Compared] = []
    for cost in sorted(_smaller(costs, mesh), key=lambda cost: cost.step_s):
        if cost.memory.step_bytes > room_bytes:
            continue
        row = bench.compiled(requested, cost.variant, f"{len(tried) + 1} of at most {_TRIES}")
        tried.append(row)
        if row.fits or len(tried) == _TRIES:
            break
        room_bytes = cost.memory.step_bytes - 1  # it does not fit, so only smaller ones are worth trying
    return tuple(tried)


def _smaller(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Cost]:
    """Yields configurations that can reduce memory.

    By remat, microbatches, wider sharding, and resharding after forward.
    """
    recipe = costs.recipe
    rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
    splits = [n for n in range(1, rows + 1) if rows % n == 0]
    annotated = None
    if costs.traces.remat == AUTO:
        # As it chooses for the request: elsewhere it may choose another one, which is among those that save less.
        annotated = costs.remat_of(Variant(name="asked", mesh=mesh))
    remats = (annotated, *_STRONGER.get(annotated or costs.traces.remat, ("full",)))
    meshes = [dict(mesh)]
    if mesh[REPLICA] > 1:
        meshes.append(dict(mesh) | {REPLICA: 1, FSDP: mesh[REPLICA] * mesh[FSDP]})
    for sharded, remat, split, reshards in itertools.product(meshes, remats, splits, (False, True)):
        units: dict[str, bool | str] = {}
        if remat is not None:
            units["remat"] = remat
        if reshards:  # else as annotated
            units["reshard_after_forward"] = True
        variant = Variant(
            name="suggestion",
            mesh=sharded,
            accumulate=None if split == 1 else recipe.accumulate * split,
            units=units,
        )
        try:
            cost = costs.of(variant)
        except AnnotationError:  # a large parameter may not divide over the wider mesh
            continue
        yield cost
