"""The meshes that a search considers: how many devices for each axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from jshard.cluster.costs import Costs
from jshard.plans.mesh import AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR

DATA_AND_STAGES = (REPLICA, FSDP, PIPE)
"""The axes that every model can have."""

_MOST_SPLITS = 16  # divisors; of more only some are tried
# Shorter sequences are split over devices only if there are more devices than sequences: attention of a short one takes
# little of the memory and of the time.
_LONG_SEQUENCE = 16_384
# Of sequences that are longer by this factor, attention takes so long that it hides an exchange between hosts.
_FAR = 4


def free_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes whose degrees a search may choose: those that are not named, or open."""
    return tuple(axis for axis in AXES if sizes.get(axis, -1) == -1)


def layouts(costs: Costs, mesh: Mapping[str, int], free: Collection[str]) -> Iterator[dict[str, int]]:
    """Yields the meshes to consider, those without a split of the layers first.

    Args:
        costs: estimates for the recipe on a machine.
        mesh: the requested mesh, with degrees of all devices.
        free: the axes whose degrees may be others.
    """
    num_devices = math.prod(mesh.values())
    options = [_degrees(costs, mesh, axis, free) for axis in (PIPE, EXPERT, CONTEXT, TENSOR)]
    for pipe, expert, context, tensor in itertools.product(*options):
        inner = expert * context * tensor
        if num_devices % (pipe * inner) or not _is_near(costs, expert, context, tensor):
            continue
        split = {PIPE: pipe, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
        for replica, fsdp in _data_splits(num_devices // (pipe * inner), split, mesh, free):
            degrees = split | {REPLICA: replica, FSDP: fsdp}
            # An axis of degree 1 is named only if it was in the request.
            yield {axis: degrees[axis] for axis in AXES if degrees[axis] > 1 or axis in mesh}


def splits_layers_anew(layout: Mapping[str, int], mesh: Mapping[str, int]) -> bool:
    """Returns whether devices share the work on an example, and otherwise than on the requested mesh."""
    degrees = {axis: layout.get(axis, 1) for axis in (EXPERT, CONTEXT, TENSOR)}
    is_requested = all(degree == mesh.get(axis, 1) for axis, degree in degrees.items())
    return max(degrees.values()) > 1 and not is_requested


def _is_near(costs: Costs, expert: int, context: int, tensor: int) -> bool:
    """Returns whether devices that share the work on an example are on one host, as far as they need to be.

    What they exchange over `tensor` and `context` nothing can hide. Experts exchange less, and may be on several hosts.
    """
    near = costs.machine.near
    blocking = tensor * context
    if costs.recipe.sequence_length >= _FAR * _LONG_SEQUENCE:
        blocking = tensor
    inner = expert * context * tensor
    return blocking <= near and (inner <= near or inner % near == 0)


def _degrees(costs: Costs, mesh: Mapping[str, int], axis: str, free: Collection[str]) -> list[int]:
    """Returns the degrees to consider of an axis other than `replica` and `fsdp`: powers of two."""
    requested = mesh.get(axis, 1)
    if axis not in free or (axis == PIPE and requested > 1):
        return [requested]
    limit = _limit(costs, mesh, axis)
    degrees = [1]
    while 2 * degrees[-1] <= limit:
        degrees.append(2 * degrees[-1])
    return degrees


def _limit(costs: Costs, mesh: Mapping[str, int], axis: str) -> int:
    """Returns the largest degree of an axis that can be worth considering."""
    num_devices = math.prod(mesh.values())
    near = costs.machine.near
    if axis == PIPE:
        # Within one host the links are fast, and stages would only add their bubble. Each has a layer or more.
        num_hosts = num_devices // near
        return min(num_hosts, costs.traces.num_layers)
    if axis == CONTEXT:
        if not _splits_sequences(costs, num_devices):
            return 1
        return _FAR * near if costs.recipe.sequence_length >= _FAR * _LONG_SEQUENCE else near
    largest = costs.traces.largest_degree(axis)
    return min(largest, near if axis == TENSOR else num_devices)


def _splits_sequences(costs: Costs, num_devices: int) -> bool:
    """Returns whether a split of each sequence can be worth its exchanges."""
    recipe = costs.recipe
    if not costs.traces.has_sequences:
        return False
    return recipe.sequence_length >= _LONG_SEQUENCE or recipe.batch_size < num_devices


def _data_splits(
    num_devices: int, split: Mapping[str, int], mesh: Mapping[str, int], free: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Yields degrees of `replica` and `fsdp` for the devices that other axes leave over."""
    if REPLICA not in free:
        replica = mesh[REPLICA]
        if num_devices % replica == 0 and (FSDP in free or num_devices == replica * mesh[FSDP]):
            yield replica, num_devices // replica
        return
    if FSDP not in free:
        if num_devices % mesh[FSDP] == 0:
            yield num_devices // mesh[FSDP], mesh[FSDP]
        return
    if split[PIPE] > 1 or splits_layers_anew(split, mesh):
        # Their parameters are split further already.
        yield 1, num_devices
        return
    for fsdp in splits(num_devices):
        yield num_devices // fsdp, fsdp


def splits(num_devices: int) -> Sequence[int]:
    """Returns the degrees of sharding of some devices, the largest first."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    if len(divisors) > _MOST_SPLITS:  # only repeated halves of the devices, and 1
        divisors = [n for n in divisors if n == 1 or is_power_of_two(num_devices // n)]
    divisors.reverse()
    return divisors


def is_power_of_two(n: int) -> bool:
    """Returns whether a positive number is one."""
    return n & (n - 1) == 0
