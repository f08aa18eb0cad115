"""What failures of nodes and checkpoints leave of a run's time on a cluster, by stated assumptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jshard._types import Json
from jshard.checkpoint.series.ettr import FORMULA, best_interval_s, ettr
from jshard.cluster.cases import Cases
from jshard.cluster.machine import Known
from jshard.inspect.memory import Memory

_DAY_S = 86400.0

# Time between failures of one node, in days:
#   stated: Llama 3 405B, 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node (arXiv 2407.21783, 3.3.4);
#   best: 2.34 failures in 1,000 node-days on Meta's RSC-2 (Kokolis et al. 2024, arXiv 2410.21680);
#   worst: there, jobs of 1,024 GPUs on RSC-1 failed every 7.9 hours.
_NODE_MTBF_DAYS = Cases(stated=54 * 2048 / 419, best=1000 / 2.34, worst=7.9 / 24 * 128)
# What a host writes to shared storage, and reads from it. Llama 3 had 2 TB/s sustained, and 7 TB/s at most, for 2,048
# hosts (arXiv 2407.21783, 3.3.1). The worst is an assumption: a quarter of what is stated.
_STORAGE_BYTES_PER_S = Cases(stated=2e12 / 2048, best=7e12 / 2048, worst=2e12 / 2048 / 4)
# From a failure to the restored state, without the read. MegaScale takes less than 10 minutes on average to detect and
# diagnose a fault (arXiv 2402.15627, 4.1). The range is an assumption: half of that, and twice.
_RESTART_S = Cases(stated=600.0, best=300.0, worst=1200.0)

_DEFAULTS = {
    "node_mtbf_days": _NODE_MTBF_DAYS,
    "storage_bytes_per_s": _STORAGE_BYTES_PER_S,
    "restart_s": _RESTART_S,
}
_MEASURED = ("stall_s", "save_s", "load_s")
FAILURE_ASSUMPTIONS = (*_DEFAULTS, *_MEASURED)
"""The assumptions about failures; the times of saves and loads follow from the state's bytes unless they are known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state of a run, as checkpoints have it.

    Attributes:
        device_bytes: of one device, in its memory and the host's.
        host_bytes: of the devices of a host, each value once.
        copy_bytes_per_s: rate of copies from a device to its host; None if unknown.
    """

    device_bytes: int
    host_bytes: int
    copy_bytes_per_s: float | None

    @classmethod
    def of(
        cls, memory: Memory, *, devices_per_host: int, devices_per_replica: int, copy_bytes_per_s: float | None
    ) -> SavedState:
        """Returns the state of a step.

        Args:
            memory: of one device.
            devices_per_host: devices of one host.
            devices_per_replica: devices that together hold the parameters once.
            copy_bytes_per_s: as the attribute.
        """
        on_host_bytes = memory.host_parameters_bytes + memory.host_optimizer_bytes + memory.host_averages_bytes
        device_bytes = memory.held_bytes + on_host_bytes
        # Values that several devices hold are written once.
        num_distinct = min(devices_per_host, devices_per_replica)
        return cls(device_bytes=device_bytes, host_bytes=device_bytes * num_distinct, copy_bytes_per_s=copy_bytes_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """The time that failures take, with checkpoints at the best interval.

    Attributes:
        mtbf_s: time between failures of the whole run.
        stall_s: how long a save blocks the step.
        save_s: how long it takes until it is complete.
        load_s: how long a restore takes.
        restart_s: how long everything else takes until the run continues.
        steps: between two saves; the best number by Young and Daly, under the stated assumptions.
        lost_s: what a failure costs.
        ettr: the effective training time ratio.
        recipe_ettr: the same with the recipe's own interval.
        assumed: the assumptions, by name.
    """

    mtbf_s: Cases
    stall_s: Cases
    save_s: Cases
    load_s: Cases
    restart_s: Cases
    steps: int
    lost_s: Cases
    ettr: Cases
    recipe_ettr: Cases
    assumed: Mapping[str, Cases]

    def to_dict(self) -> dict[str, Json]:
        """Returns all figures, for JSON."""
        record: dict[str, Json] = {"formula": FORMULA, "steps": self.steps}
        for field in dataclasses.fields(self):
            figure = getattr(self, field.name)
            if isinstance(figure, Cases):
                record[field.name] = figure.to_dict()
        record["assumed"] = {name: cases.to_dict() for name, cases in self.assumed.items()}
        return record


def failures_of(
    state: SavedState, *, num_hosts: int, step_s: Cases, checkpoint_every: int, known: Mapping[str, Known]
) -> Failures:
    """Estimates the time that failures take.

    Any failing node stops the run, so the run fails as many times as often as one node as it has nodes.

    Args:
        state: what a checkpoint has.
        num_hosts: nodes of the cluster.
        step_s: time of a step.
        checkpoint_every: the recipe's steps between two checkpoints.
        known: known values of `FAILURE_ASSUMPTIONS`.
    """
    assumed = {**_DEFAULTS, **{name: _cases_of(name, value) for name, value in known.items()}}
    rate = assumed["storage_bytes_per_s"]
    mtbf_s = Cases.of(lambda days: days * _DAY_S / num_hosts, assumed["node_mtbf_days"])
    transfer_s = Cases.of(lambda bytes_per_s: state.host_bytes / bytes_per_s, rate)
    save_s = assumed.get("save_s", transfer_s)
    load_s = assumed.get("load_s", transfer_s)
    stall_s = assumed.get("stall_s") or _stall_s(state, save_s)
    restart_s = assumed["restart_s"]
    again_s = Cases.of(lambda load, restart: load + restart, load_s, restart_s)
    # One number for all cases: a run has one, and does not know which case it is. No save begins before another ends.
    best_s = best_interval_s(stall_s=stall_s.stated, save_s=save_s.worst, mtbf_s=mtbf_s.stated)
    steps = max(1, round(best_s / step_s.stated))
    interval_s = Cases.of(lambda step: steps * step, step_s)
    recipe_interval_s = Cases.of(lambda step: checkpoint_every * step, step_s)
    return Failures(
        mtbf_s=mtbf_s,
        stall_s=stall_s,
        save_s=save_s,
        load_s=load_s,
        restart_s=restart_s,
        steps=steps,
        lost_s=Cases.of(_lost_s, interval_s, stall_s, save_s, again_s),
        ettr=Cases.of(_ettr, interval_s, stall_s, save_s, again_s, mtbf_s),
        recipe_ettr=Cases.of(_ettr, recipe_interval_s, stall_s, save_s, again_s, mtbf_s),
        assumed=assumed,
    )


def _stall_s(state: SavedState, save_s: Cases) -> Cases:
    """Returns how long a save blocks the step: until the host has the state; without a known rate, all of the save."""
    rate = state.copy_bytes_per_s
    if rate is None:
        return save_s
    copy_s = state.device_bytes / rate
    return Cases(stated=copy_s, best=copy_s, worst=copy_s)


def _lost_s(interval_s: float, stall_s: float, save_s: float, again_s: float) -> float:
    """Returns what a failure costs on average, as in `ettr`."""
    return again_s + save_s + (interval_s + stall_s) / 2


def _ettr(interval_s: float, stall_s: float, save_s: float, again_s: float, mtbf_s: float) -> float:
    return ettr(interval_s=interval_s, stall_s=stall_s, save_s=save_s, load_s=again_s, mtbf_s=mtbf_s)


def _cases_of(name: str, value: Known) -> Cases:
    """Returns a known value as cases; of a range the middle is stated."""
    if not isinstance(value, tuple):
        return Cases(stated=value, best=value, worst=value)
    low, high = value
    middle = (low + high) / 2
    if name in ("node_mtbf_days", "storage_bytes_per_s"):  # the more, the better; of times, the less
        return Cases(stated=middle, best=high, worst=low)
    return Cases(stated=middle, best=low, worst=high)
