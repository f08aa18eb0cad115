"""Where the units of a region's program run: how often, in a loop or not, and with respect to what they are derived."""

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jshard import _compat
from jshard.engine import rules
from jshard.engine.program import Atom, Program, abstract
from jshard.engine.unit_call import UnitCall, unit_p
from jshard.engine.values import has_gradient
from jshard.plans.remat import AUTO

_RECOMPUTED = ("remat2", "checkpoint")
"""The primitives of `jax.checkpoint`."""


@dataclasses.dataclass(eq=False)
class UnitUse:
    """The calls of one program of a unit; equal layers have one program.

    Attributes:
        program: the program.
        wrt: for each operand, whether a gradient is with respect to it.
        num_layers: how often forward runs it.
        in_loop: whether a loop runs it.
        is_innermost: whether no other unit is inside.
        is_recomputed: whether it is inside of a `jax.checkpoint` of the model itself.
        names: the paths of the units.
    """

    program: Program
    wrt: list[bool]
    num_layers: int = 0
    in_loop: bool = False
    is_innermost: bool = True
    is_recomputed: bool = False
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """Where an equation is.

    Attributes:
        trips: how often the loops around run it.
        in_loop: whether there are such loops.
        is_recomputed: whether a `jax.checkpoint` is around it.
    """

    trips: int = 1
    in_loop: bool = False
    is_recomputed: bool = False


class UnitUses:
    """The uses of the units in a program whose policy is still `AUTO`, in the order of the first.

    Attributes:
        by_program: the uses.
    """

    def __init__(self, jaxpr: Jaxpr, wrt: Sequence[bool]) -> None:
        self.by_program: dict[Program, UnitUse] = {}
        self._num_calls = 0
        self._innermost: set[Program] = set()
        self._visit(jaxpr, wrt, _Surroundings())

    def _visit(self, jaxpr: Jaxpr, wrt: Sequence[bool], around: _Surroundings) -> list[bool]:
        """Visits the equations of a program; returns which results depend on what is differentiated."""
        active = {v for v, is_active in zip(jaxpr.invars, wrt, strict=True) if is_active}

        def is_active(atom: Atom) -> bool:
            return not _compat.is_literal(atom) and atom in active

        for eqn in jaxpr.eqns:
            operands = [is_active(atom) and has_gradient(abstract(atom)) for atom in eqn.invars]
            results = self._results_of(eqn, operands, around)
            active.update(v for v, depends in zip(eqn.outvars, results, strict=True) if depends)
        return [is_active(atom) for atom in jaxpr.outvars]

    def _results_of(self, eqn: JaxprEqn, operands: list[bool], around: _Surroundings) -> list[bool]:
        """Visits an equation; returns which of its results depend on what is differentiated."""
        name = eqn.primitive.name
        if eqn.primitive is unit_p:
            self._add(eqn.params["call"], operands, around)
        elif name == "scan":
            return self._results_of_scan(eqn, operands, around)
        elif name in rules.CALLS:
            inner, _ = rules.program(eqn)
            around = dataclasses.replace(around, is_recomputed=around.is_recomputed or name in _RECOMPUTED)
            return self._visit(inner, rules.operands(eqn, operands), around)
        else:
            # Branches, and loops that cannot be differentiated in reverse: whatever is inside counts as differentiated.
            for inner in jaxprs_in_params(eqn.params):
                self._visit(inner, [True] * len(inner.invars), around)
        return [any(operands)] * len(eqn.outvars)

    def _results_of_scan(self, eqn: JaxprEqn, operands: list[bool], around: _Surroundings) -> list[bool]:
        inner, _ = rules.opened(eqn.params["jaxpr"])
        length = eqn.params["length"]
        num_consts, num_carry = _compat.scan_arguments(eqn)
        # What one iteration makes depend, the next one carries: all of the carry counts as one value.
        operands[num_consts : num_consts + num_carry] = [any(operands)] * num_carry
        around = _Surroundings(around.trips * length, around.in_loop or length > 1, around.is_recomputed)
        return self._visit(inner, operands, around)

    def _add(self, call: UnitCall, operands: list[bool], around: _Surroundings) -> None:
        program = call.program
        self._num_calls += 1
        # Equal layers share a program: it is visited once, unless the units inside are to be counted again.
        if program not in self._innermost:
            num_calls = self._num_calls
            self._visit(call.jaxpr.jaxpr, operands, around)
            if self._num_calls == num_calls:
                self._innermost.add(program)
        if program.remat != AUTO:
            return
        use = self.by_program.setdefault(program, UnitUse(program, operands))
        use.wrt = [before or now for before, now in zip(use.wrt, operands, strict=True)]
        use.num_layers += around.trips
        use.in_loop |= around.in_loop
        use.is_recomputed |= around.is_recomputed
        use.is_innermost = program in self._innermost
        use.names.append(call.settings.name)
