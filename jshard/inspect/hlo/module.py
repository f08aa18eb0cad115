"""The text of a compiled program as values: computations, and their instructions in the order of the text.

Everything that reads compiled programs reads them through here. In a scheduled module the order of the text is
the order of execution.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from jshard.errors import ShardingError

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_ASSIGNED = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)(?=\()")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_ITEM_BITS = frozenset((1, 2, 4, 8, 16, 32, 64, 128))
# Passed on as they are: nothing is computed between such an instruction and its first operand.
_ALIASES = frozenset("bitcast copy copy-start copy-done opt-barrier optimization-barrier async-update".split())


class ProgramError(ShardingError):
    """A compiled program holds something that this reader cannot count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """`%name = shape opcode(operands), attributes`."""

    name: str  # without `%`
    opcode: str  # such as `all-gather-start` or `fusion`
    shape: str  # of the result, as written
    inside: str  # what stands between the parentheses: operands, the literal of a constant, a parameter's number
    attributes: str  # what follows them
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
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The arrays of the result: dtype and dims of each."""
        return arrays(self.shape)

    def attribute(self, key: str) -> str | None:
        """The value of `key=%name`, without `%`."""
        found = re.search(rf"[ ,{{]{key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, such as `jit(step)/jshard[blocks/3]/all_gather`."""
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
        """Where a value comes from, behind copies, bitcasts and tuples made in this computation."""
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
    num_devices: int  # devices that run it together; 1 if the text does not say
    is_scheduled: bool  # the order of the instructions is the order in which they run

    def called(self, instruction: Instruction) -> tuple[str, ...]:
        """Names of the computations that an instruction runs."""
        names = re.findall(r"[{,=]\s*%?([\w.\-]+)", instruction.attributes)
        return tuple(n for n in dict.fromkeys(names) if n in self.computations)

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an instruction runs."""
        for name in self.called(instruction):
            yield self.computations[name]


def parse_module(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
        ProgramError: it is not such a text.
    """
    computations: dict[str, Computation] = {}
    current, entry, body = None, "", []
    for line in text.splitlines():
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


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The arrays in a shape, tuples flattened: `(f32[8,4]{1,0}, s32[])` has `("f32", (8, 4))` and `("s32", ())`."""
    return tuple(
        (dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(shape)
    )


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
    """Bytes of an element, by the HLO name of its type; 0 for a token.

    Raises:
        KeyError: no such type is known.
    """
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 1
    bits = re.fullmatch(r"(?:bf|f|s|u|c)(\d+)(?:e\d+m\d+\w*)?", dtype)
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
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    test = condition.source(condition.root)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    start_values = _start_values(home, loop)
    counter = condition.source(condition.operand(test, 0))
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    begin = start_values.get(tuple_index(counter))
    end = _bound(condition, test, body, start_values)
    step = _step(body, tuple_index(counter))
    if begin is None or end is None or step is None:
        return None
    return max(0, -(-(end - begin) // step))


def _start_values(home: Computation, loop: Instruction) -> dict[int, int]:
    """What the loop's state holds before the first round, as far as it is constant: by place in the tuple."""
    state = home.source(home.operand(loop, 0))
    if state is None or state.opcode != "tuple":
        return {}
    sources = [home.source(home.by_name.get(name)) for name in state.operands]
    values = {place: _integer(source) for place, source in enumerate(sources)}
    return {place: value for place, value in values.items() if value is not None}


def _bound(condition: Computation, test: Instruction, body: Computation, start_values: dict[int, int]) -> int | None:
    """What the counter is compared with: a constant, or a part of the state that stays as it began."""
    bound = condition.source(condition.operand(test, 1))
    if bound is None or bound.opcode != "get-tuple-element":
        return _integer(bound)
    place = tuple_index(bound)
    after = _after(body, place)
    stays = after is not None and after.opcode == "get-tuple-element" and tuple_index(after) == place
    return start_values.get(place) if stays else None


def _after(body: Computation, place: int) -> Instruction | None:
    """What a part of the state is at the end of a round."""
    state = body.root
    if state is None or state.opcode != "tuple" or place >= len(state.operands):
        return None
    return body.source(body.by_name.get(state.operands[place]))


def _step(body: Computation, place: int) -> int | None:
    """What a round adds to the counter: an unrolled loop adds 2 or more, perhaps in several additions."""
    value, total = _after(body, place), 0
    while value is not None and value.opcode == "add":
        sides = [body.source(body.operand(value, side)) for side in (0, 1)]
        known = [_integer(side) for side in sides]
        if (known[0] is None) == (known[1] is None):
            return None
        total += next(k for k in known if k is not None)
        value = next(side for side, k in zip(sides, known, strict=True) if k is None)
    counted = value is not None and value.opcode == "get-tuple-element" and tuple_index(value) == place
    return total if counted and total > 0 else None


def _integer(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.inside) if re.fullmatch(r"-?\d+", instruction.inside.strip()) else None
