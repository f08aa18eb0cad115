"""Finds the equations of an optimizer's update that need whole matrices, matrix by matrix.

An update is a program. A *mixing* equation computes a large array from a sharded one, and not elementwise: a product,
a decomposition, a norm. The equations of one matrix between its first and its last mixing one are a *part*:

    gradient -> scale -> [ product -> subtract -> product -> ... -> product ] -> add -> update
                           ^^^^^^^^^^^^^^^^^^^ one part ^^^^^^^^^^^^^^^^^^^^

Everything else runs on shards, as before.
"""

import collections
import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.rules import record_of, type_of

MATRIX_SIZE = 1024
"""Elements; a smaller array is not treated as a matrix."""

Specs = dict[Var, PartitionSpec]
"""The specs of the sharded matrices among a program's variables."""

Values = dict[Var, jax.Array]
"""The arrays of a program's variables."""

# The parameter in which each call has its program. The derivative of a `custom_jvp_call` is lost by inlining it.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_PRODUCTS = frozenset("dot_general cholesky eigh eig lu qr householder_product svd triangular_solve schur".split())


@dataclasses.dataclass(frozen=True)
class MatrixPart:
    """The equations of one matrix as a program, from the first that needs it whole to the last.

    Attributes:
        program: these equations, and those of the constants that they need.
        inputs: variables of the update that the program takes.
        specs: for each input its spec; None if it is not a sharded matrix.
        outputs: variables of the update that the program computes.
        equations: the numbers of the equations in the update.
    """

    program: ClosedJaxpr
    inputs: tuple[Var, ...]
    specs: tuple[PartitionSpec | None, ...]
    outputs: tuple[Var, ...]
    equations: frozenset[int]

    @property
    def spec(self) -> PartitionSpec | None:
        """Returns the spec of the part's matrix; None if it takes no sharded one."""
        for spec in self.specs:
            if spec is not None:
                return spec
        return None

    @property
    def kind(self) -> Hashable:
        """Returns a key that parts share if they can be batched: equal equations, of arrays of equal type and spec."""
        # The text has no arrays, and needs none: arrays that the update captured are inputs of the part.
        types = tuple(str(variable.aval) for variable in self.inputs)
        return str(self.program), types, self.specs  # as text, because programs are equal only to themselves


def find_parts(jaxpr: Jaxpr, specs: Mapping[Var, PartitionSpec]) -> list[MatrixPart]:
    """Returns the parts of an update with a product or a decomposition, in the order of their first equations.

    Args:
        jaxpr: the update, without calls of programs.
        specs: those of its sharded arguments that are matrices.
    """
    return _PartFinder(jaxpr, specs).parts()


class _PartFinder:
    """The equations of a program, by number, and who computes and reads each variable."""

    def __init__(self, jaxpr: Jaxpr, specs: Mapping[Var, PartitionSpec]) -> None:
        self._eqns: Sequence[JaxprEqn] = jaxpr.eqns
        self._results = set(_variables(jaxpr.outvars))
        self._specs: Specs = dict(specs)
        self._makers: dict[Var, int] = {}
        self._readers: dict[Var, set[int]] = collections.defaultdict(set)
        for i, eqn in enumerate(self._eqns):
            for variable in eqn.outvars:
                self._makers[variable] = i
            for variable in variables_read(eqn):
                self._readers[variable].add(i)

    def _reads(self, i: int) -> list[Var]:
        return variables_read(self._eqns[i])

    def _sources(self, i: int) -> list[int]:
        """Returns the equations whose results an equation reads."""
        # Arguments and captured arrays have no maker.
        return [self._makers[variable] for variable in self._reads(i) if variable in self._makers]

    def parts(self) -> list[MatrixPart]:
        """Returns the parts."""
        parts = []
        for equations in self._connected(self._between(self._mixing())):
            if any(_is_product(self._eqns[i]) for i in equations):
                parts.append(self._part(equations))
        return parts

    # ---- which equations need whole matrices

    def _mixing(self) -> set[int]:
        """Returns the equations that mix, and notes the specs of what elementwise ones compute from a matrix."""
        mixing: set[int] = set()
        mixed: set[Var] = set()  # variables that come of a mixing equation: the sharding of their source is not theirs
        # In their order: what an equation reads is marked by then.
        for i, eqn in enumerate(self._eqns):
            reads = self._reads(i)
            large = [variable for variable in eqn.outvars if type_of(variable).size >= MATRIX_SIZE]
            sharded = [variable for variable in reads if variable in self._specs]
            reads_mixed = not mixed.isdisjoint(reads)
            if record_of(eqn).is_elementwise:
                if reads_mixed:
                    mixed.update(large)
                elif sharded:
                    self._pass_spec_on(sharded[0], large)
            elif large and (sharded or reads_mixed):
                mixing.add(i)
                mixed.update(large)
        return mixing

    def _pass_spec_on(self, source: Var, targets: Sequence[Var]) -> None:
        for target in targets:
            # A spec names dims, so it fits arrays of the same shape only.
            if type_of(target).shape == type_of(source).shape:
                self._specs[target] = self._specs[source]

    def _between(self, mixing: set[int]) -> set[int]:
        """Returns these equations, and those on a path from one to another: so a part never waits for itself."""
        # One pass in each direction suffices: equations come after those whose results they read.
        after = set(mixing)
        for i in range(len(self._eqns)):
            if not after.isdisjoint(self._sources(i)):
                after.add(i)
        before = set(mixing)
        for i in reversed(range(len(self._eqns))):
            if i in before:
                before.update(self._sources(i))
        return after & before

    def _connected(self, equations: set[int]) -> list[list[int]]:
        """Groups equations that are connected by variables, in the order of their first ones."""
        # A forest: each equation points towards the root of its group.
        parents = {i: i for i in equations}

        def root(i: int) -> int:
            while parents[i] != i:
                i = parents[i]
            return i

        for i in equations:
            for source in self._sources(i):
                if source in parents:
                    parents[root(i)] = root(source)
        groups: dict[int, list[int]] = collections.defaultdict(list)
        # By number, so that the equations of a group are in an order in which they can run.
        for i in sorted(equations):
            groups[root(i)].append(i)
        return list(groups.values())

    # ---- a part as a program

    def _part(self, equations: list[int]) -> MatrixPart:
        """Returns some equations as a program; it computes the constants that it needs again."""
        computed = [*self._constants_of(equations), *equations]
        inputs = self._inputs_of(computed)
        # Not of the constants: the update computes those by itself, for any other reader.
        outputs = self._outputs_of(equations)
        eqns = [self._eqns[i] for i in computed]

        def run(*values: jax.Array) -> list[jax.Array]:
            return run_equations(eqns, dict(zip(inputs, values, strict=True)), outputs)

        types = [variable.aval for variable in inputs]
        return MatrixPart(
            program=jax.make_jaxpr(run)(*types),
            inputs=tuple(inputs),
            specs=tuple(self._specs.get(variable) for variable in inputs),
            outputs=tuple(outputs),
            equations=frozenset(equations),
        )

    def _constants_of(self, equations: Sequence[int]) -> list[int]:
        """Returns the other equations that compute constants for these, in an order in which they can run."""
        of_part = set(equations)
        constants: dict[int, None] = {}  # a set that keeps its order

        def add_sources(i: int) -> None:
            for source in self._sources(i):
                if source in constants or source in of_part:
                    continue
                if self._is_constant(source):
                    add_sources(source)  # first, as its results are needed
                    constants[source] = None

        for i in equations:
            add_sources(i)
        return list(constants)

    def _is_constant(self, i: int) -> bool:
        """Returns whether an equation reads no argument and no captured array of the update, directly or indirectly."""
        for variable in self._reads(i):
            maker = self._makers.get(variable)
            if maker is None or not self._is_constant(maker):
                return False
        return True

    def _inputs_of(self, equations: Sequence[int]) -> list[Var]:
        """Returns the variables that equations read and do not compute, in the order of their first use."""
        made: set[Var] = set()
        for i in equations:
            made.update(self._eqns[i].outvars)
        inputs: dict[Var, None] = {}  # a set that keeps its order: batched parts pair their inputs by position
        for i in equations:
            for variable in self._reads(i):
                if variable not in made:
                    inputs[variable] = None
        return list(inputs)

    def _outputs_of(self, equations: Sequence[int]) -> list[Var]:
        """Returns the variables that equations compute for others, or as results of the update."""
        of_part = set(equations)
        outputs = []
        for i in equations:
            for variable in self._eqns[i].outvars:
                has_other_readers = not self._readers[variable] <= of_part
                # A variable that only the part reads stays inside of it.
                if variable in self._results or has_other_readers:
                    outputs.append(variable)
        return outputs


def _is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a product or a decomposition, or a loop or branch, which may hold one."""
    has_program = next(jaxprs_in_params(eqn.params), None) is not None
    return has_program or eqn.primitive.name in _PRODUCTS


# ---- programs run equation by equation


def variables_read(eqn: JaxprEqn) -> list[Var]:
    """Returns the operands of an equation that are variables."""
    return _variables(eqn.invars)


def _variables(atoms: Sequence[Var | Literal]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def values_of(atoms: Sequence[Var | Literal], known: Values) -> list[jax.Array]:
    """Returns the arrays of some operands."""
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]


def inlined(closed: ClosedJaxpr, arrays: Sequence[jax.Array]) -> ClosedJaxpr:
    """Returns a program with the programs that it calls in the place of their calls."""
    return jax.make_jaxpr(functools.partial(evaluated, closed))(*arrays)


def evaluated(closed: ClosedJaxpr, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the results of a program, which runs with the programs that it calls inlined."""
    jaxpr = closed.jaxpr
    known: Values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arrays), strict=True))
    return run_equations(jaxpr.eqns, known, jaxpr.outvars)


def run_equations(eqns: Sequence[JaxprEqn], known: Values, results: Sequence[Var | Literal]) -> list[jax.Array]:
    """Runs equations in their order and returns some variables; adds all that they compute to `known`."""
    for eqn in eqns:
        computed = _run_inlined(eqn, values_of(eqn.invars, known))
        known.update(zip(eqn.outvars, computed, strict=True))
    return values_of(results, known)


def _run_inlined(eqn: JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    program_param = _INLINED.get(eqn.primitive.name)
    if program_param is None:
        return _compat.bind(eqn, operands)
    return evaluated(eqn.params[program_param], *operands)
