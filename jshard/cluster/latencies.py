"""What XLA's scheduler for GPUs takes a collective to last, and the flag that corrects it.

The scheduler puts the end of a collective where, by its own estimate, the collective is over. That estimate knows
groups over all devices, and groups whose number divides the GPUs of a host. For others, as for HSDP over more than
eight groups, it falls back to one that knows no cluster: ends come too early, and the computation waits. It also takes
small collectives for quick that stand in a queue behind large ones. Both can be told it, but only by a flag of the
whole process, and not by an option of one program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jshard._mesh import REPLICA
from jshard.cluster.topology import Topology

FLAG = "--xla_gpu_analytical_latency_estimator_options"
_QUEUE = 0.28  # of the time that a unit takes on the wires: what one of its gathers waits for others


def latency_flag(topology: Topology, mesh: Mapping[str, int], unit_bytes: int) -> str | None:
    """The flag that tells the scheduler of a cluster; None where there are no adapters to wait for, as on a TPU.

    Args:
        topology: the cluster.
        mesh: degrees of the mesh axes.
        unit_bytes: gathered bytes of the largest unit.
    """
    if topology.device.platform != "gpu" or topology.num_devices <= topology.fast_group:
        return None
    host_bytes_per_s = topology.device.slow_bytes_per_s * topology.fast_group
    told = {"nccl_op_launch_us": max(100, round(_QUEUE * unit_bytes / host_bytes_per_s * 1e6))}
    groups = math.prod(degree for axis, degree in mesh.items() if axis == REPLICA)
    if groups > 1:
        # The estimate divides the GPUs of a host by the number of groups: with as many of them as groups, each
        # group has one, and its rate is that of all adapters of a host.
        told |= {"gpus_per_node": groups, "nic_speed_gbps": round(host_bytes_per_s / 1e9), "rtt_us": 1}
    return f"{FLAG}={','.join(f'{key}={value}' for key, value in told.items())}"
