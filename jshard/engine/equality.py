"""Equality of programs.

Equal layers are equal programs, though Python ran for each of them: one derivative and one partitioning are enough.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from jshard import _compat
from jshard.engine import rules
from jshard.engine.program import Program, abstract
from jshard.engine.unit_call import UnitCall


def shared(program: Program, alike: list[Program]) -> tuple[Program, list[Any]]:
    """An equal program among some, to which this one is added if there is none; and further operands for it."""
    jaxpr, numbers = _without_key_data(program.jaxpr)
    found = next((p for p in alike if p.remat == program.remat and are_equal(p.jaxpr, jaxpr)), None)
    if found is None:
        alike.append(found := Program(jaxpr, program.num_params, remat=program.remat))
    return found, numbers


def _without_key_data(closed: Any) -> tuple[Any, list[Any]]:
    """A program with the numbers that it folds into its keys as further operands, and these numbers.

    Linen folds the path of a module into its keys: without the numbers, layers without other differences are equal.
    """
    jaxpr, variables, numbers, equations = closed.jaxpr, [], [], []
    for e in jaxpr.eqns:
        if e.primitive.name == "random_fold_in" and isinstance(number := e.invars[1], jex.Literal):
            variables.append(jex.Var(number.aval))
            numbers.append(np.asarray(number.val, abstract(number).dtype)[()])
            e = e.replace(invars=[e.invars[0], variables[-1]])
        equations.append(e)
    if not numbers:
        return closed, []
    return jex.ClosedJaxpr(jaxpr.replace(invars=[*jaxpr.invars, *variables], eqns=equations), closed.consts), numbers


def are_equal(one: Any, other: Any) -> bool:
    """Whether two programs have the same equations, with the same names and settings, in the same order."""
    (a, consts), (b, others) = map(rules.opened, (one, other))
    if a is b and consts is others:
        return True
    same: dict[Any, Any] = {}

    def bind(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        same.update(zip(mine, theirs, strict=False))
        return len(mine) == len(theirs) and all(x.aval == y.aval for x, y in zip(mine, theirs, strict=True))

    def read(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        return len(mine) == len(theirs) and all(map(is_same, mine, theirs))

    def is_same(x: Any, y: Any) -> bool:
        if not isinstance(x, jex.Literal):
            return same.get(x) is y
        bits = lambda literal: np.asarray(literal.val).tobytes()
        return isinstance(y, jex.Literal) and x.aval == y.aval and bits(x) == bits(y)

    return (
        len(a.eqns) == len(b.eqns)
        and len(consts) == len(others)
        and all(x is y for x, y in zip(consts, others, strict=True))
        and bind([*a.constvars, *a.invars], [*b.constvars, *b.invars])
        and all(
            e.primitive is d.primitive
            and read(e.invars, d.invars)
            and _compat.equation_setting(e) == _compat.equation_setting(d)
            and e.params.keys() == d.params.keys()
            and all(_is_same_parameter(x, d.params[name]) for name, x in e.params.items())
            and bind(e.outvars, d.outvars)
            for e, d in zip(a.eqns, b.eqns, strict=True)
        )
        and read(a.outvars, b.outvars)
    )


def _is_same_parameter(x: Any, y: Any) -> bool:
    """Whether two parameters of equations are the same; False where they cannot be compared."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr)):
        return are_equal(x, y)
    if isinstance(x, UnitCall):
        return x.is_like(y)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(_is_same_parameter, x, y))
    try:
        return bool(x == y) or _compat.is_same_rule(x, y)
    except (TypeError, ValueError):
        return False
