"""The sharding strategies by name, and as configurations of a recipe that are compiled side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jshard.cluster.compile import UnitSettings, Variant
from jshard.errors import AnnotationError, ShardingError
from jshard.plans.mesh import FSDP, REPLICA

GSPMD = "gspmd"
"""The model as plain Flax under `jax.jit`, its parameters sharded as for zero3; the compiler does the rest."""

COMPARED = "replicate", "zero2", "zero3", "hsdp", GSPMD


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A sharding strategy as keywords; docs/strategies.md has its memory and communication."""

    # The degrees of the mesh; -1 stands for all devices that the other one leaves.
    replica: int = 1
    fsdp: int = -1
    reshard_after_forward: bool | int | None = None
    shard_replicated: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Keywords for `js.mesh`."""
        return {"replica": self.replica, "fsdp": self.fsdp}

    @property
    def annotation(self) -> dict[str, bool | int | None]:
        """Keywords for `js.fully_shard`."""
        return {"reshard_after_forward": self.reshard_after_forward}

    @property
    def optimizer(self) -> dict[str, bool]:
        """Keywords for `js.shard_optimizer`."""
        return {"shard_replicated": self.shard_replicated}


strategies = {
    "replicate": Strategy(replica=-1, fsdp=1),
    "zero1": Strategy(replica=-1, fsdp=1, shard_replicated=True),
    "zero2": Strategy(reshard_after_forward=False),
    "zero3": Strategy(),
    "hsdp": Strategy(replica=2),
    "hsdp_zero2": Strategy(replica=2, reshard_after_forward=False),
    "hpz": Strategy(reshard_after_forward=8),  # a usual host; `_unit_settings` has the number of a cluster
}
"""The strategies by name."""


def variants_for(
    names: Sequence[str],
    mesh: Mapping[str, int],
    *,
    near: int,
    capacity_bytes: int,
    held_bytes: Callable[[Mapping[str, int]], int],
) -> tuple[Variant, ...]:
    """Returns the strategies to compare, on the number of devices of a mesh.

    Strategies with replicas use the groups of the mesh if it has replicas itself, otherwise `near` devices, or a
    multiple of them that can hold the state.

    Args:
        names: of the strategies.
        mesh: degrees of the requested mesh.
        near: devices joined by fast links.
        capacity_bytes: memory of a device.
        held_bytes: gives the minimum memory of a device of a mesh.

    Raises:
        ShardingError: a strategy is unknown.
    """
    _check_names(names)
    num_devices = mesh.get(REPLICA, 1) * mesh[FSDP]

    def fits(group: int) -> bool:
        grouped = dict(mesh) | {REPLICA: num_devices // group, FSDP: group}
        try:
            # The state may take half of the memory: activations, which are not known here, need the rest.
            return held_bytes(grouped) <= capacity_bytes / 2
        except AnnotationError:  # a large parameter does not divide
            return False

    group = mesh[FSDP]
    # A mesh with replicas states the groups itself.
    if num_devices == group and any(_has_replicas(name) for name in names):
        group = _smallest_group(num_devices, near, fits)
    return tuple(_variant(name, mesh, num_devices, group, near) for name in dict.fromkeys(names))


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in strategies and name != GSPMD:
            raise ShardingError(
                f"There is no strategy {name!r}.",
                where=f"--compare {','.join(names)}",
                why=f"the strategies are {', '.join(strategies)}, and {GSPMD}, which is plain Flax under jax.jit.",
                do=f"--compare {','.join(COMPARED)}",
            )


def _has_replicas(name: str) -> bool:
    """Returns whether a strategy has replicas of shards, and not of whole parameters."""
    return name in strategies and strategies[name].replica > 1


def _smallest_group(num_devices: int, near: int, fits: Callable[[int], bool]) -> int:
    """Returns the smallest groups of whole hosts that can hold the state, else the largest; within a host, half of it.

    A group is never all devices: then there would be no replicas.
    """
    divisors = [n for n in range(1, num_devices) if num_devices % n == 0] or [1]
    of_whole_hosts = [n for n in divisors if n % near == 0] or divisors[-1:]
    for group in of_whole_hosts:
        if fits(group):
            return group
    return of_whole_hosts[-1]


def _variant(name: str, mesh: Mapping[str, int], num_devices: int, group: int, near: int) -> Variant:
    """Returns a strategy as a configuration, with groups of so many devices if it has replicas."""
    strategy = strategies["zero3" if name == GSPMD else name]
    if strategy.replica == 1:
        fsdp = num_devices
    elif strategy.fsdp == 1:
        fsdp = 1
    else:
        fsdp = group
    return Variant(
        name=name,
        mesh=dict(mesh) | {REPLICA: num_devices // fsdp, FSDP: fsdp},
        units=_unit_settings(name, strategy, near),
        shard_replicated=strategy.shard_replicated,
        plain_flax=name == GSPMD,
    )


def _unit_settings(name: str, strategy: Strategy, near: int) -> UnitSettings:
    """Returns the settings of the units that make a strategy, whatever the model file says."""
    if name == GSPMD:  # plain Flax has no units
        return {}
    if name == "hpz":  # the pieces that are kept stay among neighbours, of which this cluster has so many
        return {"reshard_after_forward": near}
    if strategy.reshard_after_forward is None:
        return {"reshard_after_forward": True}
    return {"reshard_after_forward": strategy.reshard_after_forward}
