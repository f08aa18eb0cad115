"""How compilers write collectives: their arrays, their groups, and the units and lines that they are for."""

import collections
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jshard.engine.mixing import Mixing, named_in
from jshard.inspect.hlo.module import (
    HloArray,
    Instruction,
    ProgramError,
    arrays,
    elements,
    item_bytes,
)

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Communication that cannot be counted: an error is better than a total that is too small.
OTHERS = ("ragged-all-to-all", "collective-broadcast", "send", "recv")


def axes_of_groups(group: Sequence[int], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ."""
    positions = np.unravel_index(group, mesh.axis_sizes)  # for each axis those of all devices
    axes = []
    for axis, on_axis in zip(mesh.axis_names, positions, strict=True):
        if len(set(on_axis)) > 1:
            axes.append(axis)
    return tuple(axes)


def ring_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Returns the bytes that each device of a group sends in one collective, by the ring algorithm."""
    if kind == "collective-permute":
        return full_bytes  # to one other device, whatever the size of the group
    # In each round all devices send one part of the array in turn. An all-reduce reduces parts, then gathers them.
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * full_bytes * (group_size - 1) / group_size


def sizes_of(instruction: Instruction, kind: str, group_size: int) -> dict[str, int]:
    """Returns the bytes of the whole arrays of a collective, by dtype: as in `Window.sizes`."""
    parts = group_size if kind == "reduce-scatter" else 1  # its result is one of them
    sizes: dict[str, int] = collections.defaultdict(int)
    for dtype, dims in results_of(instruction, kind):
        sizes[dtype] += math.prod(dims) * _item_bytes(dtype, instruction.name) * parts
    return dict(sizes)


def results_of(instruction: Instruction, kind: str) -> tuple[HloArray, ...]:
    """Returns the arrays of a collective's result."""
    shape = instruction.shape
    # (operands, results, context); an all-reduce of jax 0.10 has the results alone. With operands it would count twice.
    if instruction.opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
        shape = elements(shape)[1]
    return arrays(shape)


# Pairs `{{0,1},{1,2}}` of a collective-permute.
_PAIRS = re.compile(r"source_target_pairs=\{\{([\d,{}]*)\}\}")
# Lists `{{0,4},{1,5}}`, of which the first counts.
_LISTS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
# An iota `[2,4]<=[4,2]T(1,0)`: the numbers of all devices, shaped, transposed, and shaped into rows of groups.
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Axes of a mesh `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`, whose devices may be in the order of an iota.
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)


def group_of(instruction: Instruction, kind: str, num_devices: int) -> tuple[int, ...]:
    """Returns the positions of the devices in the first group of a collective."""
    attributes = instruction.attributes
    if kind == "collective-permute":
        # It has no groups, but pairs of devices of which one sends to the other.
        pairs = _PAIRS.search(attributes)
        if pairs:
            return _linked([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])])
    all_devices = tuple(range(num_devices))
    if "replica_groups={}" in attributes:  # no groups: all devices are one
        return all_devices
    if lists := _LISTS.search(attributes):
        return tuple(_ints(lists[1])) or all_devices
    if iota := _IOTA.search(attributes):
        shape, source, order = iota.groups()
        groups = _iota(source, order).reshape(_ints(shape))
        return tuple(groups[0].tolist())
    if mesh := _MESH.search(attributes):
        sizes, source, order, axes = mesh.groups()
        group = _mesh_group(instruction, sizes, axes)
        if source is None:
            return group
        devices = _iota(source, order).reshape(-1)
        return tuple(devices[list(group)].tolist())
    raise cannot(instruction.text, "its groups of devices are written in an unknown way.")


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Returns the numbers of all devices in a shape, transposed if an order of its dims is given."""
    sizes = _ints(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_ints(order) or None)


def _linked(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the largest group of devices that send to each other, directly or through others.

    Of several that are equally large, it is the first.
    """
    groups: list[set[int]] = []
    for pair in pairs:
        # All groups that the pair links become one.
        linked = set(pair)
        separate = []
        for group in groups:
            if group.isdisjoint(pair):
                separate.append(group)
            else:
                linked |= group
        groups = [*separate, linked]
    return tuple(sorted(max(groups, key=lambda group: (len(group), -min(group)))))


def _mesh_group(instruction: Instruction, sizes: str, axes: str) -> tuple[int, ...]:
    """Returns the first group of `mesh['a'=2,'b'=4] {'b'}`."""
    size_of_axis = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    group_axes = re.findall(r"'([^']+)'", axes)
    if ":" in axes or not set(group_axes) <= set(size_of_axis):
        raise cannot(instruction.text, f"a part of a mesh axis is not understood: {axes}.")
    return group_along(size_of_axis, group_axes)


def group_along(sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the positions of the first group of devices along some axes of a mesh."""
    positions = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    index: list[slice | int] = []
    for axis in sizes:
        index.append(slice(None) if axis in axes else 0)
    first = positions[tuple(index)]
    return tuple(np.ravel(first).tolist())


def _ints(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]


def _item_bytes(dtype: str, name: str) -> int:
    try:
        return math.ceil(item_bytes(dtype))
    except KeyError:
        raise cannot(name, f"the size of its element type {dtype!r} is not known.") from None


def cannot(where: str, why: str) -> ProgramError:
    """Returns the error for communication that this reader does not understand."""
    return ProgramError(
        "A collective cannot be counted.",
        where=where,
        why=why,
        do="report an issue with the program's text.",
    )


# ---- units, phases and lines of the model, from the names that operations have in the traced program

_UNIT = re.compile(r"jshard\[([^\]]*)\](/backward)?")


def unit_and_phase(op_name: str) -> tuple[tuple[str, ...], str | None]:
    """Returns the units and the phase in a traced name: `.../jshard[blocks/3]/backward/...`.

    Names of no unit and of no line that mixes examples have no say in the phase: those of the optimizer, for instance.
    """
    units: dict[str, None] = {}  # a set that keeps the order
    phases: set[str] = set()
    for name in _joined_names(op_name):
        tags = _UNIT.findall(name)
        is_backward = "transpose(" in name  # JAX's name of what it differentiates
        if tags:
            unit, backward = tags[-1]  # the innermost unit
            units[unit] = None
            is_backward = is_backward or bool(backward)
        if tags or named_in(name):
            phases.add("backward" if is_backward else "forward")
    if len(phases) > 1:
        return tuple(units), "both"
    return tuple(units), next(iter(phases), None)


def mixing_in(op_name: str) -> tuple[tuple[Mixing, ...], bool]:
    """Returns the lines of the model that mix examples by an operation, and whether all of its names contain one."""
    lines: dict[Mixing, None] = {}  # a set that keeps the order
    is_in_all = True
    for name in _joined_names(op_name):
        of_name = named_in(name)
        lines.update(dict.fromkeys(of_name))
        is_in_all = is_in_all and bool(of_name)
    return tuple(lines), is_in_all


def _joined_names(op_name: str) -> list[str]:
    """Returns the names that the compiler joined into one: `a/(b/c:d/e)` is `a/b/c` and `a/d/e`.

    Other parentheses, as in `transpose(jvp(f))`, hold no colon at their top level, and are part of the name.
    """
    prefix = ""  # what all joined names begin with
    parts = [""]  # of the parentheses that are open; of none, the text since the last ones
    depth = 0
    for char in op_name:
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        if depth == 1 and char == "(":  # perhaps the joined part begins: what comes before is common
            prefix += "".join(parts)
            parts = [""]
        elif depth == 1 and char == ":":
            parts.append("")
        elif depth == 0 and char == ")":
            if len(parts) > 1:
                return [prefix + part for part in parts]
            prefix += f"({parts[0]})"
            parts = [""]
        else:
            parts[-1] += char
    return [op_name]
