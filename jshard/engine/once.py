"""Parameters that are gathered once for all microbatches, and whose gradients are reduced once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jshard._mesh import EXPERT, AnyMesh, data_axes, data_degree, degree, manual_axes
from jshard._offload import placed_like
from jshard._placement import Placement, spec_over
from jshard._state_places import key_texts
from jshard.engine.experts import expert_dim
from jshard.engine.stored import gather, reduce_scatter
from jshard.engine.values import Shard, Value


@dataclasses.dataclass(frozen=True)
class Once:
    """The leaves of a tree that are gathered beforehand: parameters that are ever gathered.

    Args:
        at: their positions among the leaves.
        placements: how each is stored.
        mesh: of the model.
    """

    at: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: AnyMesh

    @classmethod
    def of(cls, placements: Sequence[Placement | None], mesh: AnyMesh) -> "Once":
        """Those of a tree, from the placements of its leaves; None for a leaf that is no parameter.

        None of them where all axes of the data have degree 1, as there is nothing to gather or to reduce.
        """
        found = {i: p for i, p in enumerate(placements) if p is not None and p.gathered and data_degree(mesh) > 1}
        return cls(tuple(found), tuple(found.values()), mesh)

    def gather(self, tree: Any) -> list[jax.Array]:
        """Every data shard's own full copy of the parameters: arrays with one leading row per data shard."""
        if not self.at:
            return []
        mesh, specs, layout = self._layout()

        def gather_all(values: list) -> list:
            found = zip(values, self.placements, strict=True)
            return [gather(Value(x, Shard(p)), mesh, p.gathered_dtype)[None] for x, p in found]

        run = jax.shard_map(gather_all, in_specs=(specs,), out_specs=PartitionSpec(data_axes(mesh)), **layout)
        return run(self._values(tree))

    def zeros(self, copies: list[jax.Array]) -> list[jax.Array]:
        """Sums of the gradients of copies, before the first."""
        return [jnp.zeros_like(x, p.reduce_dtype) for x, p in zip(copies, self.placements, strict=True)]

    def reduce(self, tree: Any, sums: list[jax.Array]) -> list[jax.Array]:
        """The gradients of the shards from each data shard's gradients of its copies."""
        if not self.at:
            return []
        mesh, specs, layout = self._layout()

        def reduce_all(values: list, sums: list) -> list:
            found = zip(values, sums, self.placements, strict=True)
            return [placed_like(_reduced(g[0], p, mesh).astype(x.dtype), x) for x, g, p in found]

        run = jax.shard_map(reduce_all, in_specs=(specs, PartitionSpec(data_axes(mesh))), out_specs=specs, **layout)
        return run(self._values(tree), sums)

    def add(self, gradients: Any, more: list[jax.Array]) -> Any:
        """The gradients of the tree, with more of them for these parameters."""
        leaves, form = jax.tree.flatten(gradients)
        for i, x in zip(self.at, more, strict=True):
            leaves[i] = leaves[i] + x
        return jax.tree.unflatten(form, leaves)

    def pairs(self, tree: Any, copies: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        """The parameters in a tree, each with its copy."""
        return list(zip(self._values(tree), copies, strict=True))

    def names(self, tree: Any) -> list[str]:
        """Their paths in a tree, as text."""
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        return ["/".join(key_texts(paths[i])) for i in self.at]

    def _values(self, tree: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self.at]

    def _layout(self) -> tuple[Mesh, list[PartitionSpec], dict[str, Any]]:
        """The mesh, the parameters' specs over the data axes, and where `shard_map` is manual."""
        mesh = self.mesh
        assert isinstance(mesh, Mesh), "the model has arrays"
        specs = [spec_over(data_axes(mesh), placement.spec) for placement in self.placements]
        return mesh, specs, {"mesh": mesh, "axis_names": manual_axes(mesh), "check_vma": False}


def _reduced(x: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """The stored shard of a gradient's sum over all data axes; of experts, without `expert`."""
    found = reduce_scatter(x, placement, mesh)
    is_summed = degree(mesh, EXPERT) > 1 and expert_dim(placement) is None
    return lax.psum(found, EXPERT) if is_summed else found
