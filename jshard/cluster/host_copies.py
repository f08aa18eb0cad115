"""What crosses the link between a device and its host in a step, where `offload` keeps something there."""

import dataclasses
from collections.abc import Mapping

from jshard._shard_plan import ShardPlan
from jshard.inspect.memory import Memory


@dataclasses.dataclass(frozen=True)
class HostCopies:
    """Bytes that one device copies in a part of a step. Both ways go at once.

    Args:
        to_device: from the host.
        to_host: back.
    """

    to_device: int = 0
    to_host: int = 0

    def time_s(self, host_bytes_per_s: float) -> float:
        """How long the copies take alone on the link."""
        return max(self.to_device, self.to_host) / host_bytes_per_s


def host_copies(plan: ShardPlan, memory: Memory) -> Mapping[str, HostCopies]:
    """The copies of `forward` and of `backward`, which each microbatch makes, and those of the `update`.

    Parameters come to be gathered, again for backward if they were let go. What autodiff saves goes there in forward
    and comes back in backward. Once in a step gradients go there, and the update brings what it needs and takes back
    what it changed: parameters and optimizer state. Only of parameters in host memory are gradients there, of each as
    many bytes.

    Args:
        plan: where the parameters lie.
        memory: of one device, with what is saved.
    """
    again = {unit.name for unit in plan.units if unit.reshard_after_forward is True}
    away = [leaf for leaf in plan.leaves if leaf.placement.on_host]
    forward = sum(leaf.placement.bytes_per_device for leaf in away)
    backward = sum(leaf.placement.bytes_per_device for leaf in away if leaf.by_layer or leaf.unit in again)
    saved, updated = memory.host_activations_bytes, memory.host_optimizer_bytes + 2 * memory.host_gradients_bytes
    return {
        "forward": HostCopies(forward, saved),
        "backward": HostCopies(backward + saved, 0),
        "update": HostCopies(updated, updated),
    }
