"""How compilers write collectives: their arrays, groups, units, and the forms in which they run beside computation."""

import collections
import dataclasses
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
# Communication that cannot be counted: an error is better than a total that is too small.
OTHERS = ("ragged-all-to-all", "collective-broadcast", "send", "recv")


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


def sizes_of(instruction: Instruction, kind: str, group_size: int) -> dict[str, int]:
    """Bytes of the whole arrays of a collective, by dtype: what `Collective.full_bytes` is."""
    scattered = group_size if kind == "reduce-scatter" else 1
    sizes: dict[str, int] = collections.defaultdict(int)
    for dtype, dims in results_of(instruction, kind):
        sizes[dtype] += math.prod(dims) * _item_bytes(dtype, instruction.name) * scattered
    return dict(sizes)


def results_of(instruction: Instruction, kind: str) -> tuple[HloArray, ...]:
    """The arrays of a collective's result."""
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
            return _linked([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs.group(1))])
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


def _linked(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The largest group of devices that send to each other, directly or through others; the first of several."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined] + [set(pair).union(*joined)]
    return tuple(sorted(max(groups, key=lambda group: (len(group), -min(group)))))


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
        do="report an issue with the program's text.",
    )


# Units, phases and lines of the model, from the names that operations have in the traced program.

_UNIT = re.compile(r"jshard\[([^\]]*)\](/backward)?")


def unit_and_phase(op_name: str) -> tuple[tuple[str, ...], str | None]:
    """The units and the phase in a traced name: `.../jshard[blocks/3]/backward/...`."""
    found = [(name, _UNIT.findall(name)) for name in _joined_names(op_name)]
    tagged = [(name, tags[-1]) for name, tags in found if tags]  # the innermost unit
    units = dict.fromkeys(unit for _, (unit, _) in tagged)
    marked = [(name, bool(tags and tags[-1][1])) for name, tags in found if tags or named_in(name)]
    phases = {"backward" if is_marked or "transpose(" in name else "forward" for name, is_marked in marked}
    return tuple(units), "both" if len(phases) > 1 else next(iter(phases), None)


def mixing_in(op_name: str) -> tuple[tuple[Mixing, ...], bool]:
    """The lines of the model that mix examples by an operation, and whether all of its names contain one."""
    found = [named_in(name) for name in _joined_names(op_name)]
    return tuple(dict.fromkeys(one for ones in found for one in ones)), all(found)


def _joined_names(op_name: str) -> list[str]:
    """The names that the compiler joined into one: `a/(b/c:d/e)` is `a/b/c` and `a/d/e`."""
    prefix, parts, depth = "", [""], 0
    for char in op_name:
        depth += (char == "(") - (char == ")")
        if depth == 1 and char == "(":  # perhaps the joined part begins: what comes before is common
            prefix, parts = prefix + "".join(parts), [""]
        elif depth == 1 and char == ":":
            parts.append("")
        elif depth == 0 and char == ")":
            if len(parts) > 1:
                return [prefix + part for part in parts]
            prefix, parts = f"{prefix}({parts[0]})", [""]
        else:
            parts[-1] += char
    return [op_name]


# How compilers write a collective that runs beside the computation: its start, its end.

_WRAPPED = ("async", "call")  # async-start, call-start
_PRINTING = frozenset(
    "fusion fusion-start call async-start async-update async-done call-start call-update call-done".split()
)
_DEPTH = 6  # of calls in calls


@dataclasses.dataclass(frozen=True)
class Role:
    """The role of an instruction in a collective."""

    stage: str  # `start`, `done`, or `blocking` for one that is start and end at once
    kind: str = ""  # one of `KINDS`; empty for a `done`
    collective: Instruction | None = None  # the instruction that has its shape and its group; None for a `done`
    key: str | None = None  # what start and end have in common, where they do not name each other


class Forms:
    """Finds the role of each instruction of a module in a collective."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def role(self, instruction: Instruction) -> Role | None:
        """The role of an instruction; None if it only computes."""
        base = base_opcode(instruction.opcode)
        if instruction.opcode.endswith("-update"):
            return None
        if base in OTHERS:
            raise cannot(instruction.text, f"{instruction.opcode} is not one of {', '.join(KINDS)}.")
        if base in KINDS:
            return self._plain(instruction, base, instruction)
        if base in (*_WRAPPED, "fusion") and instruction.opcode.endswith("-start"):
            inner = self._first(instruction)
            return self._plain(instruction, base_opcode(inner.opcode), inner) if inner is not None else None
        if base in _WRAPPED and instruction.opcode.endswith("-done"):
            return Role("done")
        return self._fusion(instruction) if instruction.opcode == "fusion" else None

    def collectives(self, instruction: Instruction, depth: int = 0) -> list[Instruction]:
        """The collectives that an instruction prints, through fusions and calls."""
        if base_opcode(instruction.opcode) in KINDS:
            return [instruction]
        if depth >= _DEPTH or instruction.opcode not in _PRINTING:
            return []
        inner = (i for body in self._module.callees(instruction) for i in body.instructions)
        return [c for i in inner for c in self.collectives(i, depth + 1)]

    def carries(self, instruction: Instruction) -> bool:
        """Whether it computes beside a collective that another fusion began, and prints that one again."""
        names = self._module.called(instruction)
        return instruction.opcode == "fusion" and any("async_collective_fusion" in name for name in names)

    def _plain(self, instruction: Instruction, kind: str, collective: Instruction) -> Role:
        if instruction.opcode.endswith("-done"):
            return Role("done")
        begins = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
        return Role("start" if begins else "blocking", kind, collective)

    def _fusion(self, fusion: Instruction) -> Role | None:
        targets = self._targets(fusion)
        inner = self._first(fusion)
        if "AsyncCollectiveStart" in targets and inner is not None:
            return Role("start", base_opcode(inner.opcode), inner, _chain(fusion, inner))
        if "AsyncCollectiveDone" in targets:
            return Role("done", key=_chain(fusion, inner))
        if inner is None or self.carries(fusion) or self._multiplies(fusion):
            return None
        scatters = any("scatter" in name for name in (fusion.name, *self._module.called(fusion)))
        return Role("blocking", "reduce-scatter" if scatters else base_opcode(inner.opcode), inner)

    def _first(self, instruction: Instruction) -> Instruction | None:
        return next(iter(self.collectives(instruction)), None)

    def _targets(self, fusion: Instruction) -> set[str]:
        inner = (i for body in self._module.callees(fusion) for i in body.instructions if i.opcode == "custom-call")
        return {t for i in inner for t in re.findall(r'custom_call_target="([^"]*)"', i.attributes)}

    def _multiplies(self, fusion: Instruction) -> bool:
        bodies = self._module.callees(fusion)
        return any(i.opcode in ("dot", "convolution") for body in bodies for i in body.instructions)


def base_opcode(opcode: str) -> str:
    """`all-gather` of `all-gather-start`."""
    for stage in ("-start", "-done", "-update"):
        opcode = opcode.removesuffix(stage)
    return opcode


def channel(collective: Instruction) -> str | None:
    """The channel id of a collective, if it has one. Several collectives may share one."""
    found = re.search(r"channel_id=(\d+)", collective.attributes)
    return found.group(1) if found else None


def _chain(fusion: Instruction, inner: Instruction | None) -> str:
    found = re.search(r'chain_id="?(\d+)', inner.attributes) if inner is not None else None
    return "chain " + (found.group(1) if found else re.sub("start|done", "", fusion.name))


# The owners of a collective without a name: the units that read its result. XLA of jax 0.10 names an added collective
# after the operation that reads it, XLA of 0.12 after the one that made its operand.

_NOBODY = ""
_WRAPPING, _OPAQUE = ("fusion", "call"), ("while", "conditional")
# The results of these stand for their operands: a parameter that was cast or cut is still a parameter.
_MOVING = frozenset(
    "parameter constant get-tuple-element tuple convert transpose reshape bitcast copy slice dynamic-slice pad"
    " broadcast all-gather all-gather-start all-gather-done".split()
)


class Readers:
    """Finds which units read a value first, after operations that belong to no unit."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, dict[str, frozenset[str]]] = {}

    def units(self, home: Computation, collective: Instruction) -> tuple[str, ...]:
        """The units whose operations are the first to read the result of a collective.

        Empty if some of it is read by no unit, or cannot be followed, as into a loop. Also empty if the data sent is
        stored, like a parameter: for any reader, the plan decides whether it is sent.
        """
        if not all(self._is_computed(home, home.by_name.get(name)) for name in collective.operands):
            return ()
        found = self._readers(home)[collective.name]
        return () if _NOBODY in found else tuple(sorted(found))

    def _is_computed(self, home: Computation, value: Instruction | None) -> bool:
        """Whether anything was computed between the arguments of a computation and a value."""
        source = home.source(value)
        if source is None or source.opcode in _OPAQUE:
            return False
        bodies = self._module.callees(source) if source.opcode in _WRAPPING else ()
        inner = [i for body in bodies for i in body.instructions] or [source]
        if any(i.opcode not in _MOVING for i in inner):
            return True
        return any(self._is_computed(home, home.by_name.get(name)) for name in source.operands)

    def _readers(self, home: Computation) -> dict[str, frozenset[str]]:
        """By instruction the units that read it first; `_NOBODY` among them where it ends as a result."""
        if home.name not in self._known:
            known = self._known[home.name] = {}
            for value in reversed(home.instructions):
                found: set[str] = {_NOBODY} if value.is_root else set()
                for user in home.users.get(value.name, ()):
                    found |= self._through(user, value, known)
                known[value.name] = frozenset(found)
        return self._known[home.name]

    def _through(self, user: Instruction, value: Instruction, known: dict[str, frozenset[str]]) -> frozenset[str]:
        """The units that read a value in one of its users, or behind it."""
        inside = self._inside(user, value)
        if _NOBODY not in inside:
            return inside
        units, _ = unit_and_phase(user.op_name)
        behind = units or ((_NOBODY,) if user.opcode in _OPAQUE else known[user.name])
        return inside - {_NOBODY} | frozenset(behind)

    def _inside(self, user: Instruction, value: Instruction) -> frozenset[str]:
        """The same of the operations inside a fusion; `_NOBODY` where the value gets through them."""
        if user.opcode not in _WRAPPING:
            return frozenset((_NOBODY,))
        body = next(self._module.callees(user))
        places = [str(place) for place, name in enumerate(user.operands) if name == value.name]
        arguments = [i.name for i in body.instructions if i.opcode == "parameter" and i.inside in places]
        return frozenset[str]().union(*(self._readers(body)[name] for name in arguments))
