"""Runs of equal units in a traced program, as loops.

Only a loop over units runs on the stages of a pipeline. A model that calls its layers one after another has no loop,
but a run of equations, one for each layer. It becomes the loop that `js.scan_layers` makes of the same layers:

    x1 = unit p0 x0                       p  = stack p0 p1 p2
    x2 = unit p1 x1        becomes        x3 = scan of unit, which carries x0, over the rows of p
    x3 = unit p2 x2

A run consists of *rows*, each of which becomes an iteration. A row may have several equations: layers alternate, and
there are small equations between them. All rows have equal equations, whose operands have the same origins: they are
from the same row, from the row before, or from outside of the run. So they are carried, stacked, or shared by all rows.
Other equations between the rows run before the loop, or after it if they depend on the run.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jshard import _compat
from jshard.engine.equality import literals_equal
from jshard.engine.equation_kinds import has_unit, kinds_of, renamed_equation
from jshard.engine.program import Atom, Program, abstract, abstract_all, variables_among
from jshard.engine.selections import at_positions
from jshard.plans.units import numberless

Values: TypeAlias = dict[Var, jax.Array]
Arrays: TypeAlias = list[jax.Array]


def as_loops(program: Program) -> Program:
    """Returns a program in which each run of equal units is one loop.

    Args:
        program: a region's program as it was traced, before it is differentiated.

    Returns:
        A program with the same operands and results; `program` itself if it has no run.
    """
    jaxpr = program.jaxpr.jaxpr
    steps = _with_loops(jaxpr.eqns)
    if not any(isinstance(step, _LayerLoop) for step in steps):
        return program
    read = set(variables_among(jaxpr.outvars))
    for step in steps:
        read.update(variables_among(step.operands))

    def run(*operands: jax.Array) -> Arrays:
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, [*program.jaxpr.consts, *operands], strict=True))
        for step in steps:
            if isinstance(step, _LayerLoop):
                values |= step.run(values, read)
            else:
                values |= step.run(values)
        return [_value(atom, values) for atom in jaxpr.outvars]

    closed = jax.make_jaxpr(run)(*abstract_all(jaxpr.invars))
    return Program(closed, program.num_params, remat=program.remat)


# ---- equations and rows


@dataclasses.dataclass(frozen=True, eq=False)
class _Equation:
    """An equation of a program.

    Attributes:
        eqn: the equation.
        kind: the same number for equations that do the same with operands of the same types.
        has_unit: whether it calls a unit, or a program that does.
    """

    eqn: JaxprEqn
    kind: int
    has_unit: bool

    @property
    def operands(self) -> Sequence[Atom]:
        """The operands."""
        return self.eqn.invars

    @property
    def results(self) -> Sequence[Var]:
        """The results."""
        return self.eqn.outvars

    def reads(self, variables: set[Var]) -> bool:
        """Returns whether an operand is among some variables."""
        return not variables.isdisjoint(variables_among(self.operands))

    def run(self, values: Values) -> Values:
        """Runs the equation; returns the values of its results."""
        results = _bind(self.eqn, [_value(atom, values) for atom in self.operands])
        return dict(zip(self.results, results, strict=True))


def _value(atom: Atom, values: Values) -> jax.Array:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _bind(eqn: JaxprEqn, operands: Arrays) -> Arrays:
    """Runs an equation with the user's line and names."""
    with _compat.equation_context(eqn):
        return _compat.bind(eqn, operands)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a row has an operand from: it is a result of this row, or of the one before.

    Attributes:
        rows_back: 0 for this row, 1 for the one before.
        result: the number of the result.
    """

    rows_back: int
    result: int


class _Row:
    """Equations that become one iteration of a loop, with their operands, and their results, in one list."""

    def __init__(self, equations: Sequence[_Equation]) -> None:
        self.equations = equations
        self.operands: list[Atom] = []
        self.results: list[Var] = []
        for equation in equations:
            self.operands += equation.operands
            self.results += equation.results

    def origins(self, previous: "_Row | None") -> list[_Origin | None]:
        """Returns the origin of each operand; None where it is from outside of this row and the previous one."""
        origins = {variable: _Origin(0, number) for number, variable in enumerate(self.results)}
        if previous is not None:
            origins |= {variable: _Origin(1, number) for number, variable in enumerate(previous.results)}
        return [origins.get(atom) if isinstance(atom, Var) else None for atom in self.operands]


# ---- a run as a loop


Key: TypeAlias = _Origin | tuple[int, ...]
"""Of an operand: where it is a result of its own row, the origin. Else the identities of the operand in all rows: what
several equations of a row read is carried, or stacked, once."""


@dataclasses.dataclass(frozen=True)
class _Carried:
    """What a row has from the one before.

    Attributes:
        start: what the first row has in its place.
        result: the number of the result that it is.
    """

    start: Atom
    result: int


class _LayerLoop:
    """A run as a loop.

    Args:
        rows: two or more, of equal equations whose operands have the same origins.
    """

    def __init__(self, rows: Sequence[_Row]) -> None:
        self.rows = rows
        self._carried: dict[Key, _Carried] = {}
        self._stacked: dict[Key, list[Atom]] = {}
        self._shared: dict[Key, Atom] = {}
        origins = rows[1].origins(rows[0])
        self._keys = [self._enter(position, origin) for position, origin in enumerate(origins)]

    def _enter(self, position: int, origin: _Origin | None) -> Key:
        """Notes how the iterations get an operand; returns its key."""
        if origin is not None and origin.rows_back == 0:
            return origin
        of_rows = [row.operands[position] for row in self.rows]
        key = tuple(id(atom) for atom in of_rows)
        if origin is not None:
            self._carried[key] = _Carried(of_rows[0], origin.result)
        elif all(_are_same(of_rows[0], atom) for atom in of_rows):
            self._shared[key] = of_rows[0]
        else:
            self._stacked[key] = of_rows
        return key

    @property
    def operands(self) -> list[Atom]:
        """The operands from outside of the run."""
        operands = [carried.start for carried in self._carried.values()]
        for of_rows in self._stacked.values():
            operands += of_rows
        return [*operands, *self._shared.values()]

    @property
    def results(self) -> list[Var]:
        """The results of all rows."""
        return [variable for row in self.rows for variable in row.results]

    @property
    def equations(self) -> list[_Equation]:
        """The equations of all rows."""
        return [equation for row in self.rows for equation in row.equations]

    def run(self, values: Values, read: set[Var]) -> Values:
        """Runs the loop; returns the values of those of its results that are read outside."""
        stacked_results = self._stacked_results(read)
        first = self.rows[0].equations[0].eqn
        # With the user's line, for messages. Without names: those of the body's equations follow the loop's, and would
        # be there twice.
        with _compat.line_of(first):
            starts = [_array(carried.start, values) for carried in self._carried.values()]
            stacks = [jnp.stack([_array(x, values) for x in of_rows]) for of_rows in self._stacked.values()]
            shared = {key: _value(atom, values) for key, atom in self._shared.items()}
            body = self._body(shared, stacked_results)
            carry, columns = lax.scan(body, starts, stacks, length=len(self.rows))
            results: Values = {}
            for number, column in zip(stacked_results, columns, strict=True):
                of_rows = [row.results[number] for row in self.rows]
                results |= zip(of_rows, jnp.unstack(column), strict=True)
        # Afterwards: of the last row, both may have a result.
        for carried, x in zip(self._carried.values(), carry, strict=True):
            results[self.rows[-1].results[carried.result]] = x
        return results

    def _stacked_results(self, read: set[Var]) -> list[int]:
        """Returns which results of a row are stacked: those that are read, unless only the last row's are, a carry."""
        is_carried = {carried.result for carried in self._carried.values()}
        numbers = []
        for number, of_last in enumerate(self.rows[-1].results):
            of_others = [row.results[number] for row in self.rows[:-1]]
            needs_last = of_last in read and number not in is_carried
            if needs_last or not read.isdisjoint(of_others):
                numbers.append(number)
        return numbers

    def _body(
        self, shared: dict[Key, jax.Array], stacked_results: list[int]
    ) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
        """Returns the function of the carry and of a row of what is stacked."""
        # The equations of the first row stand for those of all.
        equations = [renamed_equation(equation.eqn, numberless) for equation in self.rows[0].equations]

        def body(carry: Arrays, stacked: Arrays) -> tuple[Arrays, Arrays]:
            inputs = dict(shared)
            inputs |= zip(self._carried, carry, strict=True)
            inputs |= zip(self._stacked, stacked, strict=True)
            keys = iter(self._keys)
            results: Arrays = []
            for eqn in equations:
                operands = []
                for key in itertools.islice(keys, len(eqn.invars)):
                    operands.append(results[key.result] if isinstance(key, _Origin) else inputs[key])
                results += _bind(eqn, operands)
            new_carry = [results[carried.result] for carried in self._carried.values()]
            return new_carry, at_positions(results, stacked_results)

        return body


def _are_same(a: Atom, b: Atom) -> bool:
    if isinstance(a, Literal):
        return isinstance(b, Literal) and literals_equal(a, b)
    return a is b


def _array(atom: Atom, values: Values) -> jax.Array:
    """Returns the value of an atom; of a literal in its own dtype, where a number of Python would adapt to others."""
    if isinstance(atom, Literal):
        return jnp.asarray(atom.val, abstract(atom).dtype)
    return values[atom]


# ---- finding runs


def _with_loops(eqns: Sequence[JaxprEqn]) -> list[_Equation | _LayerLoop]:
    """Returns the equations of a program, with a loop in the place of each run."""
    steps: list[_Equation | _LayerLoop] = []
    equations = [_Equation(eqn, kind, has_unit(eqn)) for eqn, kind in zip(eqns, kinds_of(eqns), strict=True)]
    # Nothing is moved across an equation with effects, and none becomes part of a loop: a stage of a pipeline also runs
    # its layers when it has no examples yet, and would print.
    for has_effects, group in itertools.groupby(equations, key=lambda equation: bool(equation.eqn.effects)):
        rest = list(group)
        run = None if has_effects else _first_run(rest)
        while run is not None:
            before, rest = _around(run, rest)
            steps += [*before, run]
            run = _first_run(rest)
        steps += rest
    return steps


def _around(run: _LayerLoop, equations: list[_Equation]) -> tuple[list[_Equation], list[_Equation]]:
    """Returns the equations that run before a loop, and those that run after it."""
    members = set(run.equations)
    positions = [position for position, equation in enumerate(equations) if equation in members]
    first = positions[0]
    end = positions[-1] + 1
    dependent = _dependents(equations, run.results)
    before = equations[:first]
    after: list[_Equation] = []
    for equation in equations[first:end]:
        if equation in members:
            continue
        if equation.reads(dependent):
            after.append(equation)
        else:
            before.append(equation)
    return before, [*after, *equations[end:]]


def _first_run(equations: list[_Equation]) -> _LayerLoop | None:
    """Returns the first run; of those that begin with the same equation, the longest."""
    chain = _chain(equations)
    for start in range(len(chain)):
        runs: list[_LayerLoop] = []
        for size in range(1, (len(chain) - start) // 2 + 1):
            rows = _independent(_connected(_equal_rows(chain, start, size)), equations)
            if len(rows) >= 2:
                runs.append(_LayerLoop(rows))
        if runs:
            return max(runs, key=lambda run: len(run.equations))
    return None


def _chain(equations: list[_Equation]) -> list[_Equation]:
    """Returns the units, in order, with the other equations that rows may have.

    What comes before or after each layer is found between two layers. Before the first one and after the last, it is
    found by its kind.
    """
    units = {equation for equation in equations if equation.has_unit}
    if len(units) < 2:
        return []
    chain = _with_neighbors(units | _between(equations, units), equations)
    return [equation for equation in equations if equation in chain]


def _between(equations: Sequence[_Equation], units: set[_Equation]) -> set[_Equation]:
    """Returns the equations that depend on a unit, and on which a unit depends."""
    dependent = _dependents(equations, _results(units))
    needed = _operands(units)
    between: set[_Equation] = set()
    for equation in reversed(equations):
        if needed.isdisjoint(equation.results):
            continue
        needed.update(variables_among(equation.operands))
        if equation.reads(dependent):
            between.add(equation)
    return between


def _with_neighbors(chain: set[_Equation], equations: list[_Equation]) -> set[_Equation]:
    """Returns a chain with the equations of its kinds that read it, or that it reads."""
    kinds = {equation.kind for equation in chain}
    alike = [equation for equation in equations if equation.kind in kinds]
    extended = set(chain)
    # In order, and then in reverse: there may be several of them behind the last layer, each reading the one before.
    results = _results(chain)
    for equation in alike:
        if equation.reads(results):
            extended.add(equation)
            results.update(equation.results)
    operands = _operands(chain)
    for equation in reversed(alike):
        if not operands.isdisjoint(equation.results):
            extended.add(equation)
            operands.update(variables_among(equation.operands))
    return extended


def _results(equations: Iterable[_Equation]) -> set[Var]:
    results: set[Var] = set()
    for equation in equations:
        results.update(equation.results)
    return results


def _operands(equations: Iterable[_Equation]) -> set[Var]:
    operands: set[Var] = set()
    for equation in equations:
        operands.update(variables_among(equation.operands))
    return operands


def _dependents(equations: Sequence[_Equation], variables: Iterable[Var]) -> set[Var]:
    """Returns some variables, and those that depend on them."""
    dependent = set(variables)
    for equation in equations:
        if equation.reads(dependent):
            dependent.update(equation.results)
    return dependent


def _equal_rows(chain: list[_Equation], start: int, size: int) -> list[_Row]:
    """Returns rows of so many equations each, from a position on, as long as their equations are equal."""
    pattern = chain[start : start + size]
    # The second row decides in most cases: first its first equation alone, as there are many positions and sizes.
    if chain[start + size].kind != pattern[0].kind or not any(equation.has_unit for equation in pattern):
        return []
    kinds = [equation.kind for equation in pattern]
    rows: list[_Row] = []
    for first in range(start, len(chain), size):
        equations = chain[first : first + size]
        if [equation.kind for equation in equations] != kinds:
            break
        rows.append(_Row(equations))
    return rows


def _connected(rows: list[_Row]) -> list[_Row]:
    """Returns the first rows, as long as each has the same operands from the row before it, one or more."""
    if len(rows) < 2:
        return []
    first, second = rows[:2]
    origins = second.origins(first)
    from_same_row: list[_Origin | None] = []
    for origin in origins:
        is_same_row = origin is not None and origin.rows_back == 0
        from_same_row.append(origin if is_same_row else None)
    if origins == from_same_row or first.origins(None) != from_same_row:
        return []
    for number in range(2, len(rows)):
        if rows[number].origins(rows[number - 1]) != origins:
            return rows[:number]
    return rows


def _independent(rows: list[_Row], equations: list[_Equation]) -> list[_Row]:
    """Returns the first rows, as long as what they have from outside can be computed before the loop."""
    if not rows:  # as for most positions and sizes
        return []
    dependent = _dependents(equations, _results(equation for row in rows for equation in row.equations))
    previous = None
    for number, row in enumerate(rows):
        for atom, origin in zip(row.operands, row.origins(previous), strict=True):
            if origin is None and isinstance(atom, Var) and atom in dependent:
                return rows[:number]
        previous = row
    return rows
