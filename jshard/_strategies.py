"""Sharding strategies as values: what each passes to the API, and `fully_shard(strategy=...)`."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jshard._errors import AnnotationError
from jshard._mesh import FSDP, REPLICA, AnyMesh, degree


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


def check_strategy(strategy: Any) -> None:
    """Raises unless it is a strategy, its name or None."""
    if strategy is None or isinstance(strategy, Strategy) or strategy in strategies:
        return
    if strategy == "auto":
        raise AnnotationError(
            "fully_shard does not choose a strategy.",
            where='fully_shard(strategy="auto")',
            why="it chose by a file in the home folder and by the memory of the devices: the same script could shard"
            " differently on two machines.",
            do="jshard train MODEL --auto  # measures here; or jshard plan MODEL --topology h100:64x8 --auto\n"
            "js.fully_shard(model, mesh=mesh, units=Block, reshard_after_forward=False)  # as either prints",
        )
    raise AnnotationError(
        "The strategy is not known.",
        where=f"fully_shard(strategy={strategy!r})",
        why=f"it is one of {', '.join(strategies)}, or a value of js.strategies.",
        do='js.fully_shard(model, mesh=mesh, strategy="zero2")',
    )


def settings_of(strategy: str | Strategy, mesh: AnyMesh) -> tuple[dict[str, Any], str]:
    """The settings of the layers, as `jshard._revise.revise` takes them, and the name of the strategy.

    Args:
        strategy: a strategy or its name.
        mesh: of the root.

    Raises:
        AnnotationError: a strategy of replicas on a mesh without, or one without shards on a mesh that shards.
    """
    found = strategies[strategy] if isinstance(strategy, str) else strategy
    if (found.fsdp == 1 and degree(mesh, FSDP) > 1) or (found.replica > 1 and degree(mesh, REPLICA) == 1):
        wanted = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
        given = ", ".join(f"{axis}={degree(mesh, axis)}" for axis in found.mesh)
        raise AnnotationError(
            "The strategy is for another mesh.",
            where=f"fully_shard(strategy={found.name!r}), mesh {given}",
            why=f"{found.summary}: the mesh says where the parameters are, and a strategy does not change it.",
            do=f"mesh=js.mesh({wanted})",
        )
    reshard = found.reshard_after_forward
    return {"reshard_after_forward": True if reshard is None else reshard}, found.name
