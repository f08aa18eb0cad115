"""The collectives of a unit: its parameters gathered, kept, gathered again, and their gradients reduced."""

from jax import lax
from jax.sharding import Mesh

from jshard._mesh import FSDP, data_axes, data_degree, degree
from jshard._placement import Placement
from jshard.engine.chain import tie
from jshard.engine.collectives import (
    all_reduce_unit,
    gather_pieces,
    gather_unit,
    keep_piece,
    scatter,
    small_ones,
    vary,
)


class Wires:
    """What a unit sends and receives; lists are in the order of its parameters, with None for a gradient not asked for.

    Args:
        placements: those of its parameters.
        mesh: the mesh.
        reshard: what forward keeps for backward, as in `Saving`.
    """

    def __init__(self, placements: list[Placement], mesh: Mesh, reshard: bool | int) -> None:
        self._placements, self._mesh, self._reshard = placements, mesh, reshard
        self.axes = data_axes(mesh)
        self.has_replicas = data_degree(mesh) > degree(mesh, FSDP)

    def gather(self, shards: list) -> list:
        """The full parameters."""
        return gather_unit(self.varied(shards), self._placements, self._mesh)

    def kept(self, full: list) -> list | None:
        """What forward keeps of the full parameters for backward; None if that is the shards."""
        if self._reshard is True:
            return None
        if self._reshard is False:
            return full
        return [keep_piece(x, p, self._reshard) for x, p in zip(full, self._placements, strict=True)]

    def gather_again(self, kept: list) -> list:
        """The full parameters, from what was kept or from shards."""
        if self._reshard is False:
            return kept
        if self._reshard is True:
            return self.gather(kept)
        return [gather_pieces(x, p, self._reshard) for x, p in zip(kept, self._placements, strict=True)]

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers."""
        return self._reshard is not False

    def after_small(self, gathered: list, gradients: list) -> list:
        """Gradients that are reduced no earlier than a layer's small parameters are there: see `gather_unit`."""
        small = [gathered[i] for i in small_ones(self._placements, self._mesh)]
        return lax.optimization_barrier((small, gradients))[1] if small else gradients

    def scatter(self, gradients: list) -> list:
        """Their reduce-scatter over `fsdp`."""
        found = zip(gradients, self._placements, strict=True)
        return [None if g is None else scatter(g, p, self._mesh) for g, p in found]

    def finish(self, scattered: list, shards: list) -> list:
        """Their all-reduce over what is left, as gradients of the shards."""
        return all_reduce_unit(scattered, self._placements, self._mesh, shards)

    def varied(self, shards: list) -> list:
        """Arrays that count as different on all data shards."""
        return [vary(x, self.axes) for x in shards]

    def once_there(self, ahead: list[list], inputs: list, shards: list) -> tuple[list[list], list, list]:
        """A layer's parameters and inputs, and the shards to gather meanwhile: no earlier, even before the loop."""
        (*ahead, inputs, shards), _ = tie(None, self.axes, *ahead, inputs, self.varied(shards))
        return ahead, inputs, shards
