"""The owners of a collective without a name: the units that read its result.

XLA of jax 0.10 names an added collective after the operation that reads it, XLA of 0.12 after the one that made its
operand.
"""

from jshard.inspect.hlo.collectives import unit_and_phase
from jshard.inspect.hlo.module import Computation, Instruction, Module

_NO_UNIT = ""
"""Stands among the readers of a value for an operation that belongs to no unit, or for the result of a computation."""

_WRAPPING = ("fusion", "call")
_OPAQUE = ("while", "conditional")
# The results of these stand for their operands: a parameter that was cast or cut is still a parameter.
_MOVING = frozenset(
    "parameter constant get-tuple-element tuple convert transpose reshape bitcast copy slice dynamic-slice pad"
    " broadcast all-gather all-gather-start all-gather-done".split()
)

_ReadersByName = dict[str, frozenset[str]]
"""The units that read the result of an instruction first, by the instruction's name."""


class Readers:
    """Finds which units read a value first, after operations that belong to no unit."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._by_computation: dict[str, _ReadersByName] = {}

    def units(self, home: Computation, collective: Instruction) -> tuple[str, ...]:
        """Returns the units whose operations are the first to read the result of a collective.

        Empty if some of it is read by no unit, or cannot be followed, as into a loop. Also empty if the data sent is
        stored, like a parameter: for any reader, the plan decides whether it is sent.
        """
        are_computed = all(self._is_computed(home, operand) for operand in home.operands(collective))
        if not are_computed:
            return ()
        readers = self._readers(home)[collective.name]
        if _NO_UNIT in readers:
            return ()
        return tuple(sorted(readers))

    def _is_computed(self, home: Computation, value: Instruction | None) -> bool:
        """Returns whether anything was computed between the arguments of a computation and a value."""
        source = home.source(value)
        if source is None or source.opcode in _OPAQUE:
            return False
        if any(instruction.opcode not in _MOVING for instruction in self._unwrapped(source)):
            return True
        return any(self._is_computed(home, operand) for operand in home.operands(source))

    def _unwrapped(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions inside a fusion or a call; of any other one, itself."""
        unwrapped: list[Instruction] = []
        if instruction.opcode in _WRAPPING:
            for body in self._module.callees(instruction):
                unwrapped += body.instructions
        return unwrapped or [instruction]

    def _readers(self, home: Computation) -> _ReadersByName:
        """Returns the first readers of each instruction; `_NO_UNIT` is among them where it ends as a result."""
        if home.name not in self._by_computation:
            readers: _ReadersByName = {}
            for value in reversed(home.instructions):  # users come after what they use
                units: set[str] = set()
                if value.is_root:
                    units.add(_NO_UNIT)
                for user in home.users.get(value.name, ()):
                    units |= self._read_through(user, value, readers)
                readers[value.name] = frozenset(units)
            self._by_computation[home.name] = readers
        return self._by_computation[home.name]

    def _read_through(self, user: Instruction, value: Instruction, readers: _ReadersByName) -> frozenset[str]:
        """Returns the units that read a value in one of its users, or behind it.

        Args:
            user: an instruction that takes the value.
            value: the value.
            readers: of the instructions after `value`.
        """
        units_inside = self._read_inside(user, value)
        if _NO_UNIT not in units_inside:
            return units_inside  # none of it gets through
        units, _ = unit_and_phase(user.op_name)
        if units:
            units_behind = frozenset(units)
        elif user.opcode in _OPAQUE:
            units_behind = frozenset((_NO_UNIT,))  # not followed into loops and branches
        else:
            units_behind = readers[user.name]
        return (units_inside - {_NO_UNIT}) | units_behind

    def _read_inside(self, user: Instruction, value: Instruction) -> frozenset[str]:
        """Returns the units that read a value inside a fusion or a call; `_NO_UNIT` where it gets through."""
        if user.opcode not in _WRAPPING:
            return frozenset((_NO_UNIT,))  # nothing is inside
        body = next(self._module.callees(user))
        places = [str(place) for place, name in enumerate(user.operands) if name == value.name]
        units: set[str] = set()
        for instruction in body.instructions:
            # Of a parameter the text in parentheses is its place among the operands.
            if instruction.opcode == "parameter" and instruction.inside in places:
                units |= self._readers(body)[instruction.name]
        return frozenset(units)
