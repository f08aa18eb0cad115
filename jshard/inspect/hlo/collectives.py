"""Which collectives a program holds: read from the compiled HLO, or from StableHLO as it was asked for."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jshard.inspect.hlo.module import (
    Instruction,
    ProgramError,
    arrays,
    elements,
    item_bytes,
)

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Communication that is not counted: better an error than a total that is too small.
OTHERS = ("ragged-all-to-all", "collective-broadcast", "send", "recv")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program; one that carries several dtypes counts as one for each.

    Args:
        name: the instruction's name in the text.
        kind: one of `KINDS`.
        dtype: HLO name of the element type, such as `f32` or `bf16`.
        group: positions, in the mesh's order, of the devices of the first group.
        executions: how often it runs in one run of the program, loops counted.
        full_bytes: of one execution, the bytes of the whole array: the result of an all-gather, the input of
            a reduce-scatter, the array of an all-reduce, one device's array of the others.
        conditional: it is in a branch, and may not run at all.
    """

    name: str
    kind: str
    dtype: str
    group: tuple[int, ...]
    executions: int
    full_bytes: int
    conditional: bool = False

    @property
    def total_bytes(self) -> int:
        """The whole array's bytes, times executions."""
        return self.full_bytes * self.executions

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, over all executions, by the ring algorithm."""
        return self.executions * ring_bytes(self.kind, self.full_bytes, len(self.group))

    def axes(self, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
        """The mesh axes that it runs over."""
        return axes_of_groups(self.group, mesh)


def axes_of_groups(group: Sequence[int], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    places = np.stack(np.unravel_index(group, mesh.axis_sizes), axis=1)
    return tuple(a for a, column in zip(mesh.axis_names, places.T, strict=True) if len(set(column)) > 1)


def ring_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Bytes that each device of a group sends in one collective, by the ring algorithm."""
    if kind == "collective-permute":
        return full_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * full_bytes * (group_size - 1) / group_size


def asked_group(name: str, kind: str, attributes: str, meshes: dict[str, str]) -> tuple[int, ...]:
    """The first group of a StableHLO collective: from a table, or from a mesh with axis names."""
    if table := re.search(r"(?:replica_groups|source_target_pairs) = dense<\[(.*?\])\]?>", attributes):
        rows = [_ints(row) for row in re.findall(r"[\d, ]+\d", table.group(1))]
        return tuple(sorted({i for row in rows for i in row}) if kind == "collective-permute" else rows[0])
    if named := re.search(r"replica_group_mesh_axes<mesh = (@[\w.]+), axes = \[(.*?)\]>", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', meshes.get(named.group(1), ""))}
        used = re.findall(r'name = "([^"]+)"', named.group(2))
        if "sub_axis" not in named.group(2) and set(used) <= set(sizes):
            return group_along(sizes, used)
    raise cannot(f"{name} = {kind}(...)", "its groups of devices are written in an unknown way.")


def full_bytes(found: Iterable[Collective], kind: str, *, over: int = 1) -> int:
    """Sum of the whole arrays' bytes over all executions of one kind, for groups of more than `over` devices."""
    return sum(c.total_bytes for c in found if c.kind == kind and len(c.group) > over)


def wire_bytes(found: Iterable[Collective]) -> float:
    """Bytes that each device sends in one run of the program."""
    return sum(c.wire_bytes for c in found)


def sizes_of(instruction: Instruction, kind: str, group_size: int) -> dict[str, int]:
    """Bytes of the whole arrays of a collective, by dtype: what `Collective.full_bytes` is."""
    scattered = group_size if kind == "reduce-scatter" else 1
    sizes: dict[str, int] = collections.defaultdict(int)
    for dtype, dims in results_of(instruction, kind):
        sizes[dtype] += math.prod(dims) * _item_bytes(dtype, instruction.name) * scattered
    return dict(sizes)


def results_of(instruction: Instruction, kind: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The arrays of a collective's result: dtype and dims of each."""
    shape = instruction.shape
    # (operands, results, context); an all-reduce of jax 0.10 has the results alone.
    if instruction.opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
        shape = elements(shape)[1]
    return arrays(shape)


def group_of(instruction: Instruction, kind: str, num_devices: int) -> tuple[int, ...]:
    """Positions of the devices in the first group: from a list, an iota, or a mesh with axis names."""
    rest = instruction.attributes
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{\{([\d,{}]*)\}\}", rest)
        if pairs:
            return tuple(sorted({int(i) for i in re.findall(r"\d+", pairs.group(1))}))
    if "replica_groups={}" in rest:
        return tuple(range(num_devices))
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return tuple(int(i) for i in found.group(1).split(",") if i) or tuple(range(num_devices))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, source, order = (_ints(g) for g in found.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return tuple(ids.transpose(order or None).reshape(shape)[0].tolist())
    ids = r"(?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids}\s*\{{([^}}]*)\}}", rest):
        sizes, source, order, axes = found.groups()
        group = _mesh_group(instruction, sizes, axes)
        if source is None:
            return group
        devices = np.arange(math.prod(_ints(source))).reshape(_ints(source)).transpose(_ints(order) or None)
        return tuple(devices.reshape(-1)[list(group)].tolist())
    raise cannot(instruction.text, "its groups of devices are written in an unknown way.")


def _mesh_group(instruction: Instruction, sizes: str, axes: str) -> tuple[int, ...]:
    """First group of `mesh['a'=2,'b'=4] {'b'}`."""
    known = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    used = re.findall(r"'([^']+)'", axes)
    if ":" in axes or not set(used) <= set(known):
        raise cannot(instruction.text, f"a part of a mesh axis is not understood: {axes}.")
    return group_along(known, used)


def group_along(sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[int, ...]:
    """Positions of the first group of devices along some axes of a mesh."""
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    first = ids[tuple(slice(None) if axis in axes else 0 for axis in sizes)]
    return tuple(np.ravel(first).tolist())


def _ints(text: str | None) -> Sequence[int]:
    return [int(i) for i in text.split(",")] if text else []


def _item_bytes(dtype: str, name: str) -> int:
    try:
        return math.ceil(item_bytes(dtype))
    except KeyError:
        raise cannot(name, f"the size of its element type {dtype!r} is not known.") from None


def cannot(where: str, why: str) -> ProgramError:
    """The error for communication that this reader does not understand."""
    return ProgramError(
        "A collective cannot be counted.",
        where=where,
        why=why,
        do="report the program's text as an issue.",
    )
