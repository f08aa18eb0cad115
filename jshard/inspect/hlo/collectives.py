"""How compilers write collectives: their arrays, their groups, and the units and lines that they are for."""

import collections
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jshard.engine.mixing import Mixing, named_in
from jshard.inspect.hlo.module import (
    Computation,
    HloArray,
    Instruction,
    Module,
    ProgramError,
    arrays,
    elements,
    item_bytes,
)

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Communication that cannot be counted: an error is better than a total that is too small. (Of `send` and `recv`, only
# those of collectives between TPU slices are understood.)
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
    if instruction.opcode == "send":
        return _results_between_slices(instruction, kind)
    shape = instruction.shape
    # (operands, results, context); an all-reduce of jax 0.10 has the results alone. With operands it would count twice.
    if instruction.opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
        shape = elements(shape)[1]
    return arrays(shape)


# ---- arrays that the compiler joined into one


def joined_arrays(
    module: Module, home: Computation, all_reduce: Instruction, results: tuple[HloArray, ...]
) -> tuple[HloArray, ...]:
    """Returns the arrays of an all-reduce's result, with those apart that the compiler concatenated for it.

    XLA of jax 0.10 gives several arrays to one instruction. That of jax 0.12 also concatenates them first. They are
    counted one by one either way, because each has the size that a line of the model, or a parameter, requests.

    Args:
        module: the program.
        home: the computation that the all-reduce is in.
        all_reduce: the instruction; operand and result have the same shape.
        results: the arrays of its result, as written.
    """
    operands = home.operands(all_reduce)
    if len(operands) != len(results):
        return results
    arrays: list[HloArray] = []
    for operand, result in zip(operands, results, strict=True):
        parts = _concatenated(module, home, operand)
        are_all = sum(part.num_elements for part in parts) == result.num_elements
        if are_all:
            arrays += parts
        else:
            arrays.append(result)
    return tuple(arrays)


def _concatenated(module: Module, home: Computation, operand: Instruction | None) -> list[HloArray]:
    """Returns the arrays that the compiler joined in an operand, in the shapes before they were made flat."""
    joined = home.source(operand)
    if joined is None:
        return []
    if _is_made_by_compiler(joined):
        return _arrays_of([home.source(part) for part in home.operands(joined)])
    if joined.opcode == "fusion":
        return _concatenated_in(module, home, joined)
    return []


def _concatenated_in(module: Module, home: Computation, fusion: Instruction) -> list[HloArray]:
    """Returns the arrays that the compiler joined in a fusion, which is in the computation `home`."""
    for fused in module.callees(fusion):
        root = fused.source(fused.root)
        if root is not None and _is_made_by_compiler(root):
            parts = [fused.source(part) for part in fused.operands(root)]
            return _arrays_of([_outside(home, fusion, part) for part in parts])
    return []


def _is_made_by_compiler(instruction: Instruction) -> bool:
    """Returns whether it concatenates, and the traced program does not: what that concatenates is one array to it."""
    return instruction.opcode == "concatenate" and not instruction.op_name


def _outside(home: Computation, fusion: Instruction, part: Instruction | None) -> Instruction | None:
    """Returns the instruction that computes a value of a fusion: for a parameter, the operand of the fusion."""
    if part is None or part.opcode != "parameter":
        return part
    return home.source(home.operand(fusion, int(part.inside)))


def _arrays_of(parts: list[Instruction | None]) -> list[HloArray]:
    arrays: list[HloArray] = []
    for part in parts:
        if part is not None:
            arrays += part.arrays
    return arrays


# ---- groups of devices

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
    if instruction.opcode == "send":  # `num_devices` are those of a slice, and slices are outermost in a mesh
        return tuple(range(0, num_slices_of(instruction) * num_devices, num_devices))
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


# ---- links of a TPU

# libtpu writes down how it sends. It deals an array to "colors", each with its own order of the torus's dimensions, so
# that they use different links at any time. A ring of one color turns one way, except in the older form `StrategyRing`.
_RINGS = '"phase_rings"'  # of each color, on the SparseCores
_COLORS = re.compile(r"(UniDirection\w*|StrategyRing)\{colors:(\d+)")  # on the TensorCores
_DIMS = re.compile(r'"emitter":"(\d)DAllGather')  # of the torus, both ways in each
_BARNA_CORE = '"emitter":"BarnaCoreAllGather'  # a v4's: in one dim


def links_of(collective: Instruction) -> int:
    """Returns the number of links of a TPU chip that carry a collective at once; 0 if the program does not say."""
    attributes = collective.attributes
    num_colors = attributes.count(_RINGS)
    if num_colors:
        return num_colors
    if colors := _COLORS.search(attributes):
        ways = 1 if colors[1].startswith("UniDirection") else 2
        return ways * int(colors[2])
    if dims := _DIMS.search(attributes):
        return 2 * int(dims[1])
    return 2 if _BARNA_CORE in attributes else 0


# ---- collectives between TPU slices

# A program is that of one slice. A collective between slices is a `send` and a `recv`, which the runtimes on the hosts
# join: device i of each slice with device i of the others.
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_KINDS_BETWEEN_SLICES = {"ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter", "ALL_REDUCE": "all-reduce"}


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether a `send`, a `recv` or the end of one is a part of a collective between TPU slices."""
    return _BETWEEN_SLICES in instruction.attributes


def rendezvous(instruction: Instruction) -> str | None:
    """Returns what the `send` and the `recv` of a collective between TPU slices have in common; None for others."""
    if instruction.opcode not in ("send", "recv"):
        return None
    name = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attributes)
    return f"rendezvous {name[1]}" if name else None


def kind_of(collective: Instruction) -> str:
    """Returns the kind of a collective: one of `KINDS`."""
    if collective.opcode != "send":
        return base_opcode(collective.opcode)
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', collective.attributes)
    kind = _KINDS_BETWEEN_SLICES.get(transfer[1]) if transfer else None
    if kind is None:
        raise cannot(collective.text, "it is between TPU slices, and does not gather or reduce.")
    return kind


def num_slices_of(send: Instruction) -> int:
    """Returns the number of slices that a collective between TPU slices joins."""
    target = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', send.attributes)
    if target is None:
        raise cannot(send.text, "it is between some of the TPU slices, and does not name them.")
    return len(target[1].split(","))


def _results_between_slices(send: Instruction, kind: str) -> tuple[HloArray, ...]:
    """Returns the array that arrives, from the one that is sent."""
    sent = arrays(send.shape)[0]
    num_slices = num_slices_of(send)
    first, *others = sent.dims
    if kind == "all-gather":
        first *= num_slices
    elif kind == "reduce-scatter":
        first //= num_slices
    return (HloArray(sent.dtype, (first, *others)),)


def base_opcode(opcode: str) -> str:
    """Returns `all-gather` of `all-gather-start`."""
    for stage in ("-start", "-done", "-update"):
        opcode = opcode.removesuffix(stage)
    return opcode


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


def asks_for_sum(op_name: str) -> bool:
    """Returns whether an operation comes from a sum over devices, of which each gets the whole."""
    return re.search(r"/psum(?!_scatter)", op_name) is not None


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
