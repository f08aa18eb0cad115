"""The text of a compiled program as values: computations, and their instructions in the order of the text.

All code that reads compiled programs uses this module. In a scheduled module the order of the text is the order of
execution.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jshard.errors import ShardingError

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_ASSIGNED = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)(?=\()")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_ITEM_BITS = frozenset((1, 2, 4, 8, 16, 32, 64, 128))
# Passed on as they are: nothing is computed between such an instruction and its first operand.
_ALIASES = frozenset("bitcast copy copy-start copy-done opt-barrier optimization-barrier async-update".split())


class ProgramError(ShardingError):
    """A compiled program contains something that this reader cannot count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """`%name = shape opcode(operands), attributes`."""

    name: str  # without `%`
    opcode: str  # such as `all-gather-start` or `fusion`
    shape: str  # of the result, as written
    inside: str  # the text between the parentheses: operands, the literal of a constant, a parameter's number
    attributes: str  # the text after them
    is_root: bool = False  # it is the result of its computation

    @property
    def text(self) -> str:
        """Its name in errors."""
        return f"%{self.name} = {self.opcode}(...)"

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        if self.opcode in ("constant", "parameter"):
            return ()
        if "%" in self.inside:
            return tuple(re.findall(r"%([\w.\-]+)", self.inside))
        return tuple(part.split()[-1] for part in self.inside.split(",") if part.split())

    @property
    def arrays(self) -> tuple["HloArray", ...]:
        """The arrays of the result."""
        return arrays(self.shape)

    def attribute(self, key: str) -> str | None:
        """The value of `key=%name`, without `%`."""
        found = re.search(rf"[ ,{{]{key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    @property
    def op_name(self) -> str:
        """Its origin in the traced program, such as `jit(step)/jshard[blocks/3]/all_gather`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module: its instructions in order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The one that is the result."""
        return next((i for i in self.instructions if i.is_root), None)

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read an instruction, by its name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction that computes an operand."""
        names = instruction.operands
        return self.by_name.get(names[index]) if index < len(names) else None

    def source(self, instruction: Instruction | None) -> Instruction | None:
        """The origin of a value, behind copies, bitcasts and tuples made in this computation."""
        while instruction is not None:
            before = self._before(instruction)
            if before is None:
                return instruction
            instruction = before
        return None

    def _before(self, instruction: Instruction) -> Instruction | None:
        if instruction.opcode in _ALIASES:
            return self.operand(instruction, 0)
        if instruction.opcode == "get-tuple-element":
            whole = self.source(self.operand(instruction, 0))
            if whole is not None and whole.opcode == "tuple":
                return self.operand(whole, tuple_index(instruction))
        return None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]  # by name
    entry: str  # name of the one that runs
    num_devices: int  # devices that run it together; 1 if the text has no number
    is_scheduled: bool  # the order of the instructions is the order in which they run

    def called(self, instruction: Instruction) -> tuple[str, ...]:
        """Names of the computations that an instruction runs."""
        names = re.findall(r"[{,=]\s*%?([\w.\-]+)", instruction.attributes)
        return tuple(n for n in dict.fromkeys(names) if n in self.computations)

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an instruction runs."""
        for name in self.called(instruction):
            yield self.computations[name]


_BROKEN = re.compile(r'\n(?="|}})')  # within an instruction: a kernel's metadata are lines of their own


def parse_module(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
        ProgramError: it is not such a text.
    """
    computations: dict[str, Computation] = {}
    current, entry, body = None, "", []
    for line in _BROKEN.sub("", text).splitlines():
        if line.startswith("}"):
            if current is not None:
                computations[current] = Computation(current, tuple(body))
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                body.append(instruction)
        elif match := _HEADER.match(line):
            current, body = match.group(2), []
            entry = current if match.group(1) else entry
    if not entry:
        raise ProgramError(
            "This is not the text of a compiled program.",
            where=repr(text[:60]),
            why="it has no ENTRY computation.",
            do="jshard.inspect.collectives(jax.jit(f).lower(...).compile())",
        )
    head = text.lstrip().partition("\n")[0]
    partitions = re.search(r"num_partitions=(\d+)", head)
    return Module(computations, entry, int(partitions.group(1)) if partitions else 1, "is_scheduled=true" in head)


def _instruction(line: str) -> Instruction | None:
    match = _ASSIGNED.match(line)
    if not match:
        return None
    is_root, name, right = match.groups()
    end = _closing(right) if right.startswith("(") else right.find(" ")  # a tuple shape has spaces in it
    opcode = _OPCODE.match(right, max(end, 0))
    if not opcode:
        return None
    start = opcode.end()
    stop = start + _closing(right[start:])
    return Instruction(name, opcode.group(1), right[:end], right[start + 1 : stop - 1], right[stop:], bool(is_root))


def _closing(text: str) -> int:
    """Length of the parenthesis that a text opens with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


class HloArray(NamedTuple):
    """The type of one array in a program."""

    dtype: str  # by HLO's names, such as `bf16`
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Its bytes; an element of less than a byte counts as a whole one."""
        return self.num_elements * math.ceil(item_bytes(self.dtype))


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[HloArray, ...]:
    """Returns the arrays in a shape, tuples flattened: `(f32[8,4]{1,0}, s32[])` has `f32[8,4]` and `s32[]`."""
    parsed = []
    for dtype, dims in _ARRAY.findall(shape):
        sizes = (int(size.strip("<=")) for size in dims.split(",") if size)  # a size that may vary is written `<=8`
        parsed.append(HloArray(dtype, tuple(sizes)))
    return tuple(parsed)


def elements(shape: str) -> tuple[str, ...]:
    """The parts of a tuple's shape at its top level, or the shape itself."""
    if not shape.startswith("("):
        return (shape,)
    parts, depth, begin = [], 0, 1
    for position, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:position].strip())
            begin = position + 1
        if depth == 0:
            break
    return tuple(parts)


def tuple_index(instruction: Instruction) -> int:
    """Which part of a tuple a `get-tuple-element` takes."""
    found = re.search(r"index=(\d+)", instruction.attributes)
    return int(found.group(1)) if found else 0


def item_bytes(dtype: str) -> float:
    """Bytes of an element, by the name of its type in HLO or StableHLO; 0 for a token.

    Raises:
        KeyError: no such type is known.
    """
    if dtype in ("token", "opaque"):
        return 0
    if dtype in ("pred", "i1"):
        return 1
    bits = re.fullmatch(r"(?:bf|f|s|u|c|i|ui)(\d+)(?:e\d+m\d+\w*)?", dtype.lower())
    if bits is None or int(bits.group(1)) not in _ITEM_BITS:
        raise KeyError(dtype)
    return int(bits.group(1)) / 8


# How often a loop runs.


def trip_count(module: Module, home: Computation, loop: Instruction) -> int | None:
    """Rounds of a `while`: as the compiler noted them, or from a counter that runs to a constant; None if unknown."""
    noted = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if noted:
        return int(noted.group(1))
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    test = condition.source(condition.root) if condition is not None else None
    if condition is None or body is None or test is None or "direction=LT" not in test.attributes:
        return None
    states = [_values(home, home.source(home.operand(loop, 0)), {})]
    for _ in range(2):  # an unrolled loop adds 2 or more, perhaps in several additions
        states.append(_values(body, body.root, states[-1]))
    counts, limits = ([_value(condition, condition.operand(test, side), state) for state in states] for side in (0, 1))
    begin, second, third = counts
    if begin is None or second is None or third is None or limits[0] is None or len(set(limits)) > 1:
        return None
    step = second - begin
    return max(0, -(-(limits[0] - begin) // step)) if third - second == step > 0 else None


def _values(home: Computation, state: Instruction | None, before: dict[int, int]) -> dict[int, int]:
    """The integers in a loop's state, by place in the tuple, as far as they follow from those in the one before."""
    names = state.operands if state is not None and state.opcode == "tuple" else ()
    found = ((place, _value(home, home.by_name.get(name), before)) for place, name in enumerate(names))
    return {place: value for place, value in found if value is not None}


def _value(home: Computation, instruction: Instruction | None, state: dict[int, int]) -> int | None:
    """An integer: a constant, a part of the state that a computation is given, or a sum of such."""
    source = home.source(instruction)
    if source is None:
        return None
    if source.opcode == "constant":
        return int(source.inside) if re.fullmatch(r"\s*-?\d+\s*", source.inside) else None
    given = home.operand(source, 0)
    if source.opcode == "get-tuple-element" and given is not None and given.opcode == "parameter":
        return state.get(tuple_index(source))
    if source.opcode != "add":
        return None
    left, right = (_value(home, home.operand(source, side), state) for side in (0, 1))
    return None if left is None or right is None else left + right
