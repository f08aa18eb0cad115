"""`js.shard_matrices`: each device runs an optimizer's whole-matrix computations for the matrices it owns.

Muon multiplies a matrix with itself, Shampoo decomposes it. If every device holds some rows, the compiler sums each
such product over all devices, and every device repeats the rest. Instead, this module reads the equations of the
update: those of one matrix between its first and last product, batched with equal ones of other matrices. The batch is
split over the devices: one all-to-all brings each whole matrix to one device, and one returns the results. Only
the placement of arrays changes: the results are those of the same equations.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.rules import record_of
from jshard.errors import CallError
from jshard.plans.array_paths import key_texts
from jshard.plans.mesh import AnyMesh
from jshard.plans.model_axes import axes_of
from jshard.plans.state_places import update_layout

_BIG = 1024  # elements; a smaller array is not treated as a matrix
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
_PRODUCTS = frozenset("dot_general cholesky eigh eig lu qr householder_product svd triangular_solve schur".split())


def shard_matrices(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation, with each whole-matrix computation done by the device that owns the matrix.

    Matrices of one shape and sharding are stacked; one all-to-all brings whole matrices to their owners, the same
    number to each, and one returns the results. The state's sharding and storage are unchanged. If the equal matrices
    number fewer than half the devices that share one, or an update has no matrix product, it runs as
    without `shard_matrices`.
    Stacked layers, `(layers, rows, columns)`, are split by layers.

    Args:
        tx: any Optax transformation, such as `optax.contrib.muon(1e-3)`. Pass the result to `js.shard_optimizer`,
            alone or inside `optax.chain` and the like.

    Returns:
        A transformation with the same state.

    Raises:
        CallError: on an update without `js.shard_optimizer`, which knows the mesh.

    Source: owner-computed updates, as in "Muon is Scalable for LLM Training", https://arxiv.org/abs/2502.16982.

    Example:
        >>> optimizer = js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)))
    """
    plain = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found = update_layout.get()
        if found is None:
            raise CallError(
                "js.shard_matrices does not know where the arrays are.",
                where="js.shard_matrices(tx).update(...)",
                why="the model has the mesh and the placements, and js.shard_optimizer passes them on.",
                do="optimizer = js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)))\n"
                "Linen: TrainState.create(..., tx=js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)"
                ")))",
            )
        given, tree = jax.tree.flatten_with_path((grads, state, params, extra))
        at = [i for i, (_, x) in enumerate(given) if isinstance(x, jax.Array)]

        def flat(*arrays: jax.Array) -> Any:
            leaves = [x for _, x in given]
            for i, x in zip(at, arrays, strict=True):
                leaves[i] = x
            grads, state, params, extra = jax.tree.unflatten(tree, leaves)
            return plain.update(grads, state, params, **extra)

        arrays = [given[i][1] for i in at]
        specs = [found.places.spec(key_texts(given[i][0]), given[i][1].shape) for i in at]
        return _UpdateProgram(flat, arrays, specs, found.mesh).run(arrays)

    return optax.GradientTransformationExtraArgs(plain.init, cast(Any, update))


Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _MatrixPart:
    """The equations of one matrix as a program, from the first that needs it whole to the last."""

    program: Any  # a closed jaxpr
    inputs: tuple[Any, ...]  # variables of the whole program, like the outputs
    outputs: tuple[Any, ...]
    equations: frozenset[int]  # their numbers in the whole program


class _UpdateProgram:
    """An update as equations, and the parts of it that owners compute."""

    def __init__(self, fn: Callable[..., Any], arrays: Sequence[Any], specs: Sequence[Any], mesh: AnyMesh) -> None:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        self.tree = jax.tree.structure(shape)
        closed = jax.make_jaxpr(functools.partial(_evaluated, closed))(*arrays)
        self.jaxpr, self.consts, self.mesh = closed.jaxpr, closed.consts, mesh
        self.specs: dict[Any, PartitionSpec] = {}
        for variable, spec in zip(self.jaxpr.invars, specs, strict=True):
            if self._axes(spec) and variable.aval.size >= _BIG:
                self.specs[variable] = spec
        self.makers = {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}
        self.users: dict[Any, set[int]] = collections.defaultdict(set)
        for i in range(len(self.jaxpr.eqns)):
            for v in self._variables(i):
                self.users[v].add(i)
        self.batches = self._batches()

    def run(self, arrays: Sequence[Any]) -> Any:
        """The results of the update."""
        known: dict[Any, Any] = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known |= dict(zip(self.jaxpr.invars, arrays, strict=True))
        inside = {i for batch in self.batches for part in batch for i in part.equations}
        work: list[tuple[Iterable[Any], Callable[[], dict]]] = []
        for i, eqn in enumerate(self.jaxpr.eqns):
            if i not in inside:
                run = lambda eqn=eqn: dict(
                    zip(eqn.outvars, _compat.bind(eqn, [_value(v, known) for v in eqn.invars]), strict=True)
                )
                work.append(([v for v in eqn.invars if not isinstance(v, jex.Literal)], run))
        for batch in self.batches:
            work.append(([v for part in batch for v in part.inputs], functools.partial(self._run, batch, known)))
        while work:  # batches wait for all their members, and delay equations that need one of them
            waiting = []
            for needed, run in work:
                if all(v in known for v in needed):
                    known |= run()
                else:
                    waiting.append((needed, run))
            assert len(waiting) < len(work), "parts are convex: none waits for its own results"
            work = waiting
        return jax.tree.unflatten(self.tree, [_value(v, known) for v in self.jaxpr.outvars])

    def _run(self, batch: Sequence[_MatrixPart], known: dict[Any, Any]) -> dict[Any, Any]:
        """Computes a batch: moves its matrices to their owners, and the results back."""
        spec = self._spec(batch[0])
        axes = self._axes(spec)
        degree = math.prod(self.mesh.shape[axis] for axis in axes)
        by_layers = _layers(batch, spec) > len(batch)
        count = len(batch) if by_layers else -(-len(batch) // degree) * degree
        owners = PartitionSpec(None, axes) if by_layers else PartitionSpec(axes)

        def placed(x: Any, *specs: PartitionSpec | None) -> Any:
            for one in specs if x.size >= _BIG * count else ():
                x = x if one is None else lax.with_sharding_constraint(x, NamedSharding(self.mesh, one))
            return x

        values, dims = [], []
        for variables in zip(*(part.inputs for part in batch), strict=True):
            if len(set(variables)) == 1:
                values.append(known[variables[0]])
                dims.append(None)
                continue
            stacked = jnp.stack([known[variables[k % len(batch)]] for k in range(count)])
            values.append(placed(stacked, self._stacked(variables[0]), owners))
            dims.append(0)
        run = functools.partial(_evaluated, batch[0].program)
        found = jax.vmap(run, in_axes=tuple(dims), axis_size=count)(*values)
        like = {v.aval.shape: self._stacked(v) for v in batch[0].inputs if v in self.specs}
        home = [placed(x, owners, like.get(v.aval.shape)) for x, v in zip(found, batch[0].outputs, strict=True)]
        return {v: x[k] for k, part in enumerate(batch) for v, x in zip(part.outputs, home, strict=True)}

    def _axes(self, spec: PartitionSpec) -> Axes:
        return tuple(axis for entry in spec for axis in axes_of(entry) if self.mesh.shape[axis] > 1)

    def _spec(self, part: _MatrixPart) -> PartitionSpec:
        """The spec of the part's matrix."""
        return next(self.specs[v] for v in part.inputs if v in self.specs)

    def _stacked(self, variable: Any) -> PartitionSpec | None:
        spec = self.specs.get(variable)
        return None if spec is None else PartitionSpec(None, *spec)

    def _batches(self) -> list[list[_MatrixPart]]:
        """The groups of equal parts that are large enough."""
        alike = collections.defaultdict(list)
        for part in self._parts():
            if any(v in self.specs for v in part.inputs):
                key = str(part.program), tuple((str(v.aval), self.specs.get(v)) for v in part.inputs)
                alike[key].append(part)

        def enough(batch: list[_MatrixPart]) -> bool:
            spec = self._spec(batch[0])
            degree = math.prod(self.mesh.shape[axis] for axis in self._axes(spec))
            return 2 * max(len(batch), _layers(batch, spec)) >= degree

        return list(filter(enough, alike.values()))

    def _parts(self) -> list[_MatrixPart]:
        """The parts that need whole matrices, matrix by matrix."""
        inside = self._between(self._mixing())
        groups: dict[int, int] = {}

        def root(i: int) -> int:
            while groups.setdefault(i, i) != i:
                i = groups[i]
            return i

        for i in inside:
            for v in self._variables(i):
                if self.makers.get(v) in inside:
                    groups[root(i)] = root(self.makers[v])
        members = collections.defaultdict(list)
        for i in sorted(inside):
            members[root(i)].append(i)
        return [self._part(found) for found in members.values() if any(map(self._is_product, found))]

    def _mixing(self) -> set[int]:
        """Equations that compute large arrays from a sharded one, directly or indirectly, and not elementwise."""
        found, mixed = set(), set()
        for i, eqn in enumerate(self.jaxpr.eqns):
            large = [v for v in eqn.outvars if v.aval.size >= _BIG]
            of = next((v for v in self._variables(i) if v in self.specs), None)
            is_mixed = any(v in mixed for v in self._variables(i))
            if record_of(eqn).is_elementwise:
                mixed.update(large if is_mixed else ())
                if of is not None and not is_mixed:
                    self.specs |= {v: self.specs[of] for v in large if v.aval.shape == of.aval.shape}
            elif large and (of is not None or is_mixed):
                found.add(i)
                mixed.update(large)
        return found

    def _between(self, mixing: set[int]) -> set[int]:
        """These equations, and those on a path from one to another."""
        after, before = set(mixing), set(mixing)
        for i in range(len(self.jaxpr.eqns)):
            if any(self.makers.get(v) in after for v in self._variables(i)):
                after.add(i)
        for i in reversed(range(len(self.jaxpr.eqns))):
            if i in before:
                before.update(self.makers[v] for v in self._variables(i) if v in self.makers)
        return after & before

    def _part(self, equations: list[int]) -> _MatrixPart:
        """A program of some equations; it recomputes the constants that it needs."""
        computed = [*self._constants_of(equations), *equations]
        inputs = self._inputs_of(computed)
        outputs = self._outputs_of(equations)
        eqns = [self.jaxpr.eqns[i] for i in computed]

        def run(*values: jax.Array) -> list[jax.Array]:
            return _run_equations(eqns, dict(zip(inputs, values, strict=True)), outputs)

        program = jax.make_jaxpr(run)(*(variable.aval for variable in inputs))
        return _MatrixPart(program, tuple(inputs), tuple(outputs), frozenset(equations))

    def _constants_of(self, equations: Sequence[int]) -> list[int]:
        """The other equations that compute constants for these, in an order in which they can run."""
        own = set(equations)
        constants: dict[int, None] = {}  # a set that keeps its order

        def add_makers(i: int) -> None:
            for variable in self._variables(i):
                maker = self.makers.get(variable)
                if maker is None or maker in constants or maker in own:
                    continue
                if self._is_constant(maker):
                    add_makers(maker)  # first, as its results are needed
                    constants[maker] = None

        for i in equations:
            add_makers(i)
        return list(constants)

    def _inputs_of(self, equations: Sequence[int]) -> list[Any]:
        """The variables that these equations read and do not compute, in the order of their first use."""
        made: set[Any] = set()
        for i in equations:
            made.update(self.jaxpr.eqns[i].outvars)
        inputs: dict[Any, None] = {}  # a set that keeps its order: batched parts pair their inputs by position
        for i in equations:
            for variable in self._variables(i):
                if variable not in made:
                    inputs[variable] = None
        return list(inputs)

    def _outputs_of(self, equations: Sequence[int]) -> list[Any]:
        """The variables that these equations compute for others, or as results of the update."""
        own = set(equations)
        results = {variable for variable in self.jaxpr.outvars if not isinstance(variable, jex.Literal)}
        outputs = []
        for i in equations:
            for variable in self.jaxpr.eqns[i].outvars:
                has_other_users = not self.users[variable] <= own
                if variable in results or has_other_users:
                    outputs.append(variable)
        return outputs

    def _is_constant(self, i: int) -> bool:
        return all(v in self.makers and self._is_constant(self.makers[v]) for v in self._variables(i))

    def _is_product(self, i: int) -> bool:
        eqn = self.jaxpr.eqns[i]
        return eqn.primitive.name in _PRODUCTS or any(_has_jaxpr(value) for value in eqn.params.values())

    def _variables(self, i: int) -> list[Any]:
        return [v for v in self.jaxpr.eqns[i].invars if not isinstance(v, jex.Literal)]


def _layers(batch: Sequence[_MatrixPart], spec: PartitionSpec) -> int:
    """Layers of a stacked matrix that is not split by layers; 1 for a matrix."""
    shape = next(v.aval.shape for v in batch[0].inputs if v.aval.size >= _BIG and v.aval.ndim >= len(spec))
    return shape[0] if len(shape) > 2 and (not spec or spec[0] is None) else 1


def _has_jaxpr(value: Any) -> bool:
    return (
        hasattr(value, "jaxpr") or hasattr(value, "eqns") or (isinstance(value, tuple) and any(map(_has_jaxpr, value)))
    )


def _value(variable: Any, known: dict[Any, Any]) -> Any:
    return variable.val if isinstance(variable, jex.Literal) else known[variable]


def _evaluated(closed: Any, *arrays: Any) -> list[Any]:
    """The results of a program, with the programs that it calls inlined."""
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arrays), strict=True))
    return _run_equations(jaxpr.eqns, known, jaxpr.outvars)


def _run_equations(eqns: Sequence[Any], known: dict[Any, Any], results: Sequence[Any]) -> list[Any]:
    for eqn in eqns:
        values = [_value(v, known) for v in eqn.invars]
        called = _CALLS.get(eqn.primitive.name)
        found = _compat.bind(eqn, values) if called is None else _evaluated(eqn.params[called], *values)
        known |= dict(zip(eqn.outvars, found, strict=True))
    return [_value(v, known) for v in results]
