"""Which equations of a program do the same, but for what they are called with, and what their units are named.

Names of units are paths of modules: they are all in which the equations of equal layers differ.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jshard.engine import rules
from jshard.engine.equality import parameters_equal
from jshard.engine.program import Program
from jshard.engine.unit_call import UnitCall, unit_p

Rename: TypeAlias = Callable[[str], str]


def kinds_of(eqns: Sequence[JaxprEqn]) -> list[int]:
    """Returns a number for each equation: the same for two of them if they do the same with operands of equal types."""
    # By type first, so that few of them are compared with each other.
    by_types: dict[Hashable, dict[int, JaxprEqn]] = {}
    numbers = itertools.count()
    kinds = []
    for eqn in eqns:
        nameless = renamed_equation(eqn, lambda name: "")
        candidates = by_types.setdefault(_types(eqn), {})
        kind = _kind_among(candidates, nameless)
        if kind is None:
            kind = next(numbers)
            candidates[kind] = nameless
        kinds.append(kind)
    return kinds


def _types(eqn: JaxprEqn) -> Hashable:
    operands = tuple(atom.aval for atom in eqn.invars)
    results = tuple(variable.aval for variable in eqn.outvars)
    return eqn.primitive, operands, results


def _kind_among(candidates: Mapping[int, JaxprEqn], eqn: JaxprEqn) -> int | None:
    """Returns the number of the candidate that does the same as an equation of the same types; None without one."""
    for kind, candidate in candidates.items():
        if _do_the_same(candidate, eqn):
            return kind
    return None


def _do_the_same(a: JaxprEqn, b: JaxprEqn) -> bool:
    # Name scopes may differ: users number those of their layers.
    if a.params.keys() != b.params.keys() or a.ctx != b.ctx:
        return False
    return all(parameters_equal(value, b.params[name]) for name, value in a.params.items())


# ---- units, and their names


def has_unit(eqn: JaxprEqn) -> bool:
    """Returns whether an equation calls a unit, or a program that does."""
    if eqn.primitive is unit_p:
        return True
    if eqn.primitive.name not in rules.CALLS:
        return False
    inner, _ = rules.program(eqn)
    return any(map(has_unit, inner.eqns))


def renamed_equation(eqn: JaxprEqn, rename: Rename) -> JaxprEqn:
    """Returns an equation with other names of the units that it calls."""
    if not has_unit(eqn):
        return eqn
    params = dict(eqn.params)
    if eqn.primitive is unit_p:
        call = _renamed_call(params["call"], rename)
        params.update(call=call, jaxpr=call.jaxpr)
        return eqn.replace(params=params)
    for name, value in eqn.params.items():
        if isinstance(value, ClosedJaxpr):
            params[name] = _renamed_program(value, rename)
        elif isinstance(value, Jaxpr):
            params[name] = _renamed_jaxpr(value, rename)
    return eqn.replace(params=params)


def _renamed_call(call: UnitCall, rename: Rename) -> UnitCall:
    settings = dataclasses.replace(call.settings, name=rename(call.settings.name))
    jaxpr = _renamed_program(call.jaxpr, rename)
    program = call.program
    if jaxpr is not call.jaxpr:
        program = Program(jaxpr, program.num_params, remat=program.remat)
    return dataclasses.replace(call, program=program, jaxpr=jaxpr, settings=settings)


def _renamed_program(closed: ClosedJaxpr, rename: Rename) -> ClosedJaxpr:
    """Returns a program with other names of units; itself if it has none, so that equal calls go on sharing it."""
    jaxpr = _renamed_jaxpr(closed.jaxpr, rename)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def _renamed_jaxpr(jaxpr: Jaxpr, rename: Rename) -> Jaxpr:
    if not any(map(has_unit, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=[renamed_equation(eqn, rename) for eqn in jaxpr.eqns])
