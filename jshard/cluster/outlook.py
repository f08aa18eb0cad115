"""What is expected of a run on a cluster before compiling: its pace, and what slower links or a lost node cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jshard.cluster.cases import Cases
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.estimate import best_and_worst
from jshard.cluster.failures import Failures, SavedState, failures_of
from jshard.cluster.goals import Pace
from jshard.cluster.machine import Known, PlannedCluster
from jshard.cluster.search import ROOM
from jshard.cluster.sizing import Size, Workload
from jshard.errors import FourPartError
from jshard.plans.mesh import FSDP, REPLICA, data_shards

SLOWER = 0.9
"""The rate of the slower network, relative to the stated one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """A configuration on a cluster, and what is expected of it.

    Attributes:
        workload: what is trained.
        cluster: the devices.
        costs: estimates there.
        cost: the estimate of the configuration.
        step_s: time of a step.
        failures: the time that failures take.
    """

    workload: Workload
    cluster: PlannedCluster
    costs: Costs
    cost: Cost
    step_s: Cases
    failures: Failures

    @classmethod
    def of(
        cls, workload: Workload, size: Size, *, known_of_failures: Mapping[str, Known], is_ranged: bool = True
    ) -> Outlook:
        """Returns what is expected of the best configuration on a cluster.

        Args:
            workload: what is trained.
            size: the cluster, with a configuration.
            known_of_failures: known values of `FAILURE_ASSUMPTIONS`.
            is_ranged: whether to estimate it over the ranges of assumptions, too; for a comparison it need not be.
        """
        assert size.costs is not None and size.best is not None
        stated_s = size.best.step_s
        step_s = Cases(stated=stated_s, best=stated_s, worst=stated_s)
        if is_ranged:
            step_s = _step_s(size.costs, size.cluster, size.best.variant)
        topology = size.cluster.topology
        state = SavedState.of(
            size.best.memory,
            devices_per_host=topology.num_devices // topology.num_hosts,
            devices_per_replica=topology.num_devices // size.best.variant.mesh.get(REPLICA, 1),
            copy_bytes_per_s=size.cluster.assumptions.host_bytes_per_s,
        )
        failures = failures_of(
            state,
            num_hosts=topology.num_hosts,
            step_s=step_s,
            checkpoint_every=size.costs.recipe.checkpoint_every,
            known=known_of_failures,
        )
        return cls(
            workload=workload,
            cluster=size.cluster,
            costs=size.costs,
            cost=size.best,
            step_s=step_s,
            failures=failures,
        )

    @property
    def num_devices(self) -> int:
        """Returns the devices of the cluster."""
        return self.cluster.topology.num_devices

    @property
    def variant(self) -> Variant:
        """Returns the configuration, with its number of microbatches also where it is the recipe's."""
        variant = self.cost.variant
        return dataclasses.replace(variant, accumulate=variant.accumulate or self.costs.recipe.accumulate)

    @property
    def pace(self) -> Pace:
        """Returns the pace by the stated assumptions."""
        return self._pace(self.step_s.stated, self.failures.ettr.stated)

    @property
    def tokens_per_s(self) -> Cases:
        """Returns the tokens per second while it trains, with their range."""
        return self.figure(lambda pace: pace.tokens_per_s)

    @property
    def run_s(self) -> Cases:
        """Returns the time of the whole run with what failures take, with its range."""
        return self.figure(lambda pace: pace.run_s)

    def figure(self, value_of: Callable[[Pace], float]) -> Cases:
        """Returns a figure of the pace, with its range."""
        return Cases.of(lambda step_s, ettr: value_of(self._pace(step_s, ettr)), self.step_s, self.failures.ettr)

    def _pace(self, step_s: float, ettr: float) -> Pace:
        return self.workload.pace(step_s, self.num_devices, ettr=ettr)

    def slower_network(self) -> Cases:
        """Returns how many times as long a step takes if the limiting links have `SLOWER` of their rate."""
        slower_s = _step_s(self.costs, self.cluster, self.cost.variant, rate=SLOWER)
        return Cases.of(lambda slower, step: slower / step, slower_s, self.step_s)


def limiting_link(cluster: PlannedCluster) -> str:
    """Returns the assumption about the links that limit a cluster: those between hosts, if there are several."""
    topology = cluster.topology
    return "slow_bytes_per_s" if topology.num_devices > topology.fast_group else "fast_bytes_per_s"


def _step_s(costs: Costs, cluster: PlannedCluster, variant: Variant, *, rate: float = 1.0) -> Cases:
    """Returns the time of a step over the ranges of the cluster's least certain assumptions.

    Args:
        costs: estimates on the cluster.
        cluster: the devices.
        variant: the configuration.
        rate: of the limiting links, relative to the stated one.
    """
    best, worst = best_and_worst(cluster.ranges)
    link = limiting_link(cluster)

    def step_s(changes: Mapping[str, float]) -> float:
        assumptions = dataclasses.replace(cluster.assumptions, **dict(changes))
        slower = dataclasses.replace(assumptions, **{link: rate * getattr(assumptions, link)})
        machine = dataclasses.replace(cluster.machine, assumptions=slower)
        return costs.on(machine).of(variant).step_s

    return Cases(stated=step_s({}), best=step_s(best), worst=step_s(worst))


# ---- a lost node


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewerHosts:
    """The configuration after a node is lost: as jshard continues it, with fewer replicas or a smaller `fsdp`."""

    num_hosts: int
    step_s: float


def fewer_hosts(outlook: Outlook) -> FewerHosts | None:
    """Returns how a run continues on the most of the remaining hosts that can be used.

    Returns:
        None if more than half of the hosts cannot continue: the batch does not divide, or the step does not fit.
    """
    topology = outlook.cluster.topology
    if topology.device.platform == "tpu":  # a slice is a whole
        return None
    gpus = topology.extents[-1]
    for num_hosts in range(topology.num_hosts - 1, topology.num_hosts // 2, -1):
        remaining = dataclasses.replace(outlook.cluster, topology=topology.with_extents((1, num_hosts, gpus)))
        variant = _on_fewer(outlook, remaining.topology.num_devices)
        if variant is None:
            continue
        try:
            cost = outlook.costs.on(remaining.machine, settings=variant.settings).of(variant)
        except FourPartError:
            continue
        if cost.memory.step_bytes <= ROOM * topology.device.hbm_bytes:
            return FewerHosts(num_hosts=num_hosts, step_s=cost.step_s)
    return None


def _on_fewer(outlook: Outlook, num_devices: int) -> Variant | None:
    """Returns a configuration on fewer devices, with microbatches that are not larger; None if it does not divide."""
    variant = outlook.variant
    mesh = dict(variant.mesh)
    degree = mesh.get(REPLICA, 1) * mesh[FSDP]
    inner = outlook.num_devices // degree
    if num_devices % inner:
        return None
    data = num_devices // inner
    fsdp = mesh[FSDP] if data % mesh[FSDP] == 0 else data
    mesh |= {REPLICA: data // fsdp, FSDP: fsdp}
    batch_size = outlook.costs.recipe.batch_size
    rows, rest = divmod(batch_size, data_shards(mesh))
    if rest:
        return None
    assert variant.accumulate is not None
    most = batch_size // variant.accumulate // data_shards(variant.mesh)
    of_microbatch = max(count for count in range(1, min(rows, most) + 1) if rows % count == 0)
    return dataclasses.replace(variant, mesh=mesh, accumulate=rows // of_microbatch)
