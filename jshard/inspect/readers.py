"""Whose a collective is that the compiler has left without a unit's name: told by the operations that read it.

A compiler that splits arrays names what it sends after the operation that reads it, or, as that of jax 0.12, after the
one that made it. That may be a region as a whole, which no unit names: so goes the gradient of the rows of a table.
"""

from jshard.inspect.module import Computation, Instruction, Module
from jshard.inspect.traced_names import unit_and_phase

_NOBODY = ""
_WRAPPING, _OPAQUE = ("fusion", "call"), ("while", "conditional")
# What these make is as good as what they read: a parameter that was cast or cut is one still.
_MOVING = frozenset(
    "parameter constant get-tuple-element tuple convert transpose reshape bitcast copy slice dynamic-slice pad"
    " broadcast all-gather all-gather-start all-gather-done".split()
)


class Readers:
    """Says which units read a value first, behind operations that are of no unit.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, dict[str, frozenset[str]]] = {}

    def units(self, home: Computation, collective: Instruction) -> tuple[str, ...]:
        """The units whose operations are the first to read what a collective has sent.

        Empty if some of it is read by no unit, or is not followed: into a loop. And if what is sent is stored, as a
        parameter is: whoever reads that, it is the plan that says whether it is sent.

        Args:
            home: the computation that the collective is in.
            collective: the collective, or its start.
        """
        if not all(self._is_computed(home, home.by_name.get(name)) for name in collective.operands):
            return ()
        found = self._readers(home)[collective.name]
        return () if _NOBODY in found else tuple(sorted(found))

    def _is_computed(self, home: Computation, value: Instruction | None) -> bool:
        """Whether anything was computed on the way from the arguments of a computation to a value."""
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
        """Likewise of the operations inside a fusion; `_NOBODY` where the value gets through them."""
        if user.opcode not in _WRAPPING:
            return frozenset((_NOBODY,))
        body = next(self._module.callees(user))
        places = [str(place) for place, name in enumerate(user.operands) if name == value.name]
        arguments = [i.name for i in body.instructions if i.opcode == "parameter" and i.inside in places]
        return frozenset[str]().union(*(self._readers(body)[name] for name in arguments))
