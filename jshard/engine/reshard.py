"""Reshard after forward: a unit whose backward gathers its parameters again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jshard import _compat
from jshard._placement import Placement
from jshard.engine.collectives import all_gather, gather_pieces, keep_piece, reduce_scatter

Compute = Callable[[list, list, list], list]


def resharding(
    compute: Compute, placements: list[Placement], mesh: Mesh, *, pieces: int | None, policy: Callable | None
) -> Compute:
    """The unit as a function of its shards whose backward gathers them again.

    Forward saves what the checkpoint policy allows, and for each gathered parameter the shard in its place
    (or the piece of it, with `pieces`). Backward waits for the incoming gradient before it gathers, so that the
    copy of one unit is not brought in while another's is still needed.

    Args:
        compute: the unit as a function of its full parameters, other floating inputs, and the rest.
        placements: those of its parameters.
        mesh: the mesh.
        pieces: keep one of so many pieces from forward to backward, and gather among that many neighbours;
            None keeps the shard and gathers over the whole axis.
        policy: the `jax.checkpoint` policy of its activations.
    """

    @jax.custom_vjp
    def run(shards: list, floats: list, fixed: list) -> list:
        return compute(gather_all(shards), floats, fixed)

    def gather_all(shards: list) -> list:
        return [all_gather(x, p, mesh) for x, p in zip(shards, placements, strict=True)]

    def forward(shards: list, floats: list, fixed: list) -> tuple[list, tuple]:
        full = gather_all(shards)
        step = jax.checkpoint(compute, policy=policy)
        outs, pull = jax.vjp(lambda full, floats: step(full, floats, fixed), full, floats)
        kept = shards
        if pieces is not None:
            kept = [keep_piece(x, p, pieces) for x, p in zip(full, placements, strict=True)]
        residuals, tree = jax.tree.flatten(pull)
        slots = tuple(next((i for i, w in enumerate(full) if r is w), None) for r in residuals)
        saved = [r for r, slot in zip(residuals, slots, strict=True) if slot is None]
        return outs, (shards, kept, saved, _Pull(tree, slots))

    def backward(residuals: tuple, gradients: list) -> tuple[list, list, None]:
        shards, kept, saved, pull = residuals
        kept, gradients = _after(kept, gradients)
        if pieces is None:
            full = gather_all(kept)
        else:
            full = [gather_pieces(x, p, pieces) for x, p in zip(kept, placements, strict=True)]
        of_full, of_floats = pull.restore(full, saved)(gradients)
        parts = zip(of_full, placements, shards, strict=True)
        return [reduce_scatter(g, p, mesh, x) for g, p, x in parts], of_floats, None

    run.defvjp(forward, backward)
    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Pull:
    """The structure of a backward function whose gathered parameters were taken out."""

    tree: Any
    slots: tuple[int | None, ...]

    def restore(self, full: list, saved: list) -> Callable:
        it = iter(saved)
        return jax.tree.unflatten(self.tree, [next(it) if s is None else full[s] for s in self.slots])


def _after(values: list, gradients: list) -> tuple[list, list]:
    """Makes values available only once the gradients that differ between data shards are.

    The barrier would count the others (of synchronised state, say) as different too, so they stay out of it.
    """
    at = [i for i, g in enumerate(gradients) if g.dtype != jax.dtypes.float0 and _compat.varying_axes(g)]
    if not at:
        return values, gradients
    values, waited = lax.optimization_barrier((values, [gradients[i] for i in at]))
    out = list(gradients)
    for i, g in zip(at, waited, strict=True):
        out[i] = g
    return values, out
