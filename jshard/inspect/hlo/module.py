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

# A computation begins with its name and its type, and ends with a line that begins with `}`: instructions are indented.
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
            return ()  # a literal, or a number
        if "%" in self.inside:
            return tuple(re.findall(r"%([\w.\-]+)", self.inside))
        names = []
        for operand in self.inside.split(","):
            words = operand.split()  # a type may be before the name
            if words:
                names.append(words[-1])
        return tuple(names)

    @property
    def arrays(self) -> tuple["HloArray", ...]:
        """The arrays of the result."""
        return arrays(self.shape)

    def attribute(self, key: str) -> str | None:
        """Returns the value of `key=%name`, without `%`; None if there is none."""
        match = re.search(rf"[ ,{{]{key}=%?([\w.\-]+)", self.attributes)
        if match is None:
            return None
        return match[1]

    @property
    def op_name(self) -> str:
        """Its origin in the traced program, such as `jit(step)/jshard[blocks/3]/all_gather`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        if match is None:
            return ""
        return match[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module: its instructions in order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The one that is the result."""
        return next((instruction for instruction in self.instructions if instruction.is_root), None)

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read an instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):  # once, if it is two operands of one instruction
                users.setdefault(name, []).append(instruction)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """Returns the instruction that computes an operand; None if it is not in the text."""
        names = instruction.operands
        if index >= len(names):
            return None
        return self.by_name.get(names[index])

    def operands(self, instruction: Instruction) -> "list[Instruction | None]":
        """Returns the instructions that compute the operands, in order; None for one that is not in the text."""
        return [self.by_name.get(name) for name in instruction.operands]

    def source(self, instruction: Instruction | None) -> Instruction | None:
        """Returns the origin of a value, behind copies, bitcasts and tuples made in this computation."""
        while instruction is not None:
            before = self._before(instruction)
            if before is None:
                return instruction
            instruction = before
        return None

    def _before(self, instruction: Instruction) -> Instruction | None:
        """Returns the instruction that an instruction passes on; None if it computes."""
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
        """Returns the names of the computations that an instruction runs."""
        # Which attribute names a computation depends on the opcode, so that all names are tried.
        names = re.findall(r"[{,=]\s*%?([\w.\-]+)", instruction.attributes)
        return tuple(name for name in dict.fromkeys(names) if name in self.computations)

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that an instruction runs."""
        for name in self.called(instruction):
            yield self.computations[name]


# Line breaks within an instruction: a kernel's metadata are lines of their own, and its `op_name` comes after them.
_BROKEN = re.compile(r'\n(?="|}})')


def parse_module(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
        ProgramError: it is not such a text.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name: str | None = None  # of the computation that the line is in
    instructions: list[Instruction] = []
    for line in _BROKEN.sub("", text).splitlines():
        if line.startswith("}"):
            if name is not None:
                computations[name] = Computation(name, tuple(instructions))
            name = None
        elif name is not None:
            instruction = _instruction(line)
            if instruction is not None:
                instructions.append(instruction)
        elif header := _HEADER.match(line):
            is_entry, name = header.groups()
            instructions = []
            if is_entry:
                entry = name
    if not entry:
        raise ProgramError(
            "This is not the text of a compiled program.",
            where=repr(text[:60]),
            why="it has no ENTRY computation.",
            do="jshard.inspect.collectives(jax.jit(f).lower(...).compile())",
        )
    head = text.lstrip().partition("\n")[0]
    partitions = re.search(r"num_partitions=(\d+)", head)
    num_devices = int(partitions[1]) if partitions else 1
    return Module(computations, entry, num_devices, is_scheduled="is_scheduled=true" in head)


def _instruction(line: str) -> Instruction | None:
    """Returns the instruction in a line; None if there is none."""
    assigned = _ASSIGNED.match(line)
    if not assigned:
        return None
    is_root, name, right = assigned.groups()
    shape_end = _closing(right) if right.startswith("(") else right.find(" ")  # a tuple shape has spaces in it
    opcode = _OPCODE.match(right, max(shape_end, 0))
    if not opcode:
        return None
    open_at = opcode.end()
    end = open_at + _closing(right[open_at:])
    return Instruction(
        name,
        opcode[1],
        shape=right[:shape_end],
        inside=right[open_at + 1 : end - 1],
        attributes=right[end:],
        is_root=bool(is_root),
    )


def _closing(text: str) -> int:
    """Returns the length of the parenthesis that a text opens with."""
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
    """Returns the parts of a tuple's shape at its top level, or the shape itself."""
    if not shape.startswith("("):
        return (shape,)
    parts = []
    part_begin = 1
    depth = 0  # of parentheses, and of the brackets of dims and layouts, which hold commas too
    for position, char in enumerate(shape):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if depth == 0 or (char == "," and depth == 1):
            parts.append(shape[part_begin:position].strip())
            part_begin = position + 1
        if depth == 0:
            break
    return tuple(parts)


def tuple_index(instruction: Instruction) -> int:
    """Returns which part of a tuple a `get-tuple-element` takes."""
    index = re.search(r"index=(\d+)", instruction.attributes)
    return int(index[1]) if index else 0


def item_bytes(dtype: str) -> float:
    """Returns the bytes of an element, by the name of its type in HLO or StableHLO; 0 for a token.

    Raises:
        KeyError: no such type is known.
    """
    if dtype in ("token", "opaque"):
        return 0
    if dtype in ("pred", "i1"):
        return 1
    bits = re.fullmatch(r"(?:bf|f|s|u|c|i|ui)(\d+)(?:e\d+m\d+\w*)?", dtype.lower())
    if bits is None or int(bits[1]) not in _ITEM_BITS:
        raise KeyError(dtype)
    return int(bits[1]) / 8


# ---- how often a loop runs

_State = dict[int, int]
"""The integers in a loop's state, by place in its tuple."""


def trip_count(module: Module, home: Computation, loop: Instruction) -> int | None:
    """Returns the rounds of a `while`: as the compiler noted them, or from a counter; None if unknown."""
    # XLA:GPU notes it. On a TPU it follows from the condition alone.
    known_count = re.search(r"known_trip_count\D*(\d+)", loop.attributes)
    if known_count:
        return int(known_count[1])
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    if condition is None or body is None:
        return None
    return _count_from_counter(condition, body, _integers(home, home.source(home.operand(loop, 0)), {}))


def _count_from_counter(condition: Computation, body: Computation, initial: _State) -> int | None:
    """Returns the rounds of a loop that runs while a counter is less than a constant."""
    test = condition.source(condition.root)
    if test is None or "direction=LT" not in test.attributes:
        return None
    # Two rounds show the step of the counter: an unrolled loop adds 2 or more, perhaps in several additions.
    second = _integers(body, body.root, initial)
    third = _integers(body, body.root, second)
    counts: list[int] = []
    limits: set[int] = set()
    for state in (initial, second, third):
        count = _integer(condition, condition.operand(test, 0), state)
        limit = _integer(condition, condition.operand(test, 1), state)
        if count is None or limit is None:
            return None
        counts.append(count)
        limits.add(limit)
    step = counts[1] - counts[0]
    is_even = counts[2] - counts[1] == step
    if len(limits) > 1 or step <= 0 or not is_even:
        return None
    distance = limits.pop() - counts[0]
    return max(0, -(-distance // step))  # rounded up


def _integers(home: Computation, state: Instruction | None, before: _State) -> _State:
    """Returns the integers in a loop's state, as far as they follow from those in the state before."""
    integers: _State = {}
    if state is not None and state.opcode == "tuple":
        for place, operand in enumerate(home.operands(state)):
            value = _integer(home, operand, before)
            if value is not None:
                integers[place] = value
    return integers


def _integer(home: Computation, instruction: Instruction | None, state: _State) -> int | None:
    """Returns an integer: a constant, a part of the state that a computation takes, or a sum of such."""
    source = home.source(instruction)
    if source is None:
        return None
    if source.opcode == "constant":
        is_integer = re.fullmatch(r"\s*-?\d+\s*", source.inside)
        if not is_integer:
            return None  # a float, or the elements of an array
        return int(source.inside)
    operand = home.operand(source, 0)
    if source.opcode == "get-tuple-element" and operand is not None and operand.opcode == "parameter":
        return state.get(tuple_index(source))
    if source.opcode == "add":
        left = _integer(home, operand, state)
        right = _integer(home, home.operand(source, 1), state)
        if left is not None and right is not None:
            return left + right
    return None
