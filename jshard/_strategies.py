"""Sharding strategies as values: what each passes to the API, and what it costs by formula."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a strategy holds on one device and sends in one step, in units of P.

    P is the bytes of all parameters. Parameters and gradients count in their own dtypes; the largest gathered unit and
    small replicated parameters come on top.

    Args:
        parameters: stored parameters, held between steps.
        gradients: gradients as the optimizer gets them.
        optimizer: optimizer state, in units of the state of the whole model.
        gathered: gathered copies kept from forward to backward.
        all_gather: bytes gathered, counted as whole arrays.
        reduce_scatter: likewise reduced and scattered.
        all_reduce: likewise all-reduced.
        wire: bytes that each device sends, by the ring algorithm.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    wire: float


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard a model, as keywords for `js.mesh`, `js.fully_shard` and `js.shard_optimizer`.

    Take one of `js.strategies`, and `dataclasses.replace` what should differ.

    Args:
        name: its key in `js.strategies`.
        summary: one line.
        replica: degree of the replica axis; -1 takes the rest.
        fsdp: degree of the sharding axis; -1 takes the rest.
        reshard_after_forward: as in `js.fully_shard`; None keeps only the root's parameters gathered.
        shard_replicated: as in `js.shard_optimizer`.

    Example:
        >>> strategy = dataclasses.replace(js.strategies["hsdp"], replica=2)
        >>> mesh = js.mesh(**strategy.mesh)
        >>> model = js.fully_shard(model, units=Block, mesh=mesh, **strategy.annotation)
    """

    name: str
    summary: str
    replica: int = 1
    fsdp: int = -1
    reshard_after_forward: bool | int | None = None
    shard_replicated: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Keywords for `js.mesh`."""
        return {"replica": self.replica, "fsdp": self.fsdp}

    @property
    def annotation(self) -> dict[str, Any]:
        """Keywords for `js.fully_shard`."""
        return {"reshard_after_forward": self.reshard_after_forward}

    @property
    def optimizer(self) -> dict[str, Any]:
        """Keywords for `js.shard_optimizer`."""
        return {"shard_replicated": self.shard_replicated}

    def costs(self, *, replica: int = 1, fsdp: int = 1) -> Costs:
        """The formulas, for a mesh of these degrees.

        Args:
            replica: degree of the replica axis.
            fsdp: degree of the sharding axis.
        """
        held = 1 / fsdp
        kept, again = self._backward(fsdp)
        gathers = 1 if fsdp > 1 else 0
        all_gather = gathers * (1 + (again > 1))
        wire = gathers * (2 * _around(fsdp) + _around(again))
        all_reduce = held if replica > 1 else 0.0
        wire += 2 * all_reduce * _around(replica)
        if self.shard_replicated and replica > 1:  # the optimizer's new values, gathered over the replicas
            all_gather += held
            wire += held * _around(replica)
        return Costs(
            parameters=held,
            gradients=held,
            optimizer=held / (replica if self.shard_replicated else 1),
            gathered=gathers * kept,
            all_gather=all_gather,
            reduce_scatter=float(gathers),
            all_reduce=all_reduce,
            wire=wire,
        )

    def _backward(self, fsdp: int) -> tuple[float, int]:
        """The part of the gathered parameters that each device keeps for backward, and the group that gathers them."""
        reshard = self.reshard_after_forward
        if reshard is None or reshard is True:
            return 0.0, fsdp
        return (1.0, 1) if reshard is False else (1 / int(reshard), int(reshard))


def _around(size: int) -> float:
    """Part of an array that each of `size` devices sends once around a ring."""
    return (size - 1) / size


_ALL = (
    Strategy("replicate", "every device holds the model; gradients are all-reduced (DDP)", replica=-1, fsdp=1),
    Strategy("zero1", "replicate, with sharded optimizer state", replica=-1, fsdp=1, shard_replicated=True),
    Strategy("zero2", "sharded; gathered once, kept until backward", reshard_after_forward=False),
    Strategy("zero3", "sharded; gathered for forward and again for backward (FSDP)"),
    Strategy("hsdp", "zero3 within a group of devices, replicated across groups", replica=2),
    Strategy("hsdp_zero2", "zero2 within a group, replicated across groups", replica=2, reshard_after_forward=False),
    Strategy("hpz", "zero3, but backward gathers from neighbours (ZeRO++ hpZ)", reshard_after_forward=8),
)

strategies: Mapping[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in _ALL})
"""The strategies by name."""
