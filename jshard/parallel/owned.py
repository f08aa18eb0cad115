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
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.rules import type_of
from jshard.errors import CallError
from jshard.parallel.matrix_parts import (
    MATRIX_SIZE,
    MatrixPart,
    Specs,
    Values,
    evaluated,
    find_parts,
    inlined,
    values_of,
    variables_read,
)
from jshard.plans.array_paths import key_texts
from jshard.plans.mesh import AnyMesh, splitting_axes
from jshard.plans.model_axes import axes_in, num_pieces
from jshard.plans.state_places import update_layout


def shard_matrices(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation in which each whole-matrix computation is done by the device that owns the matrix.

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

    Examples:
        >>> optimizer = js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)))
    """
    plain = optax.with_extra_args_support(tx)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        # Set by `js.shard_optimizer` while it updates.
        layout = update_layout.get()
        if layout is None:
            raise CallError(
                "js.shard_matrices does not know where the arrays are.",
                where="js.shard_matrices(tx).update(...)",
                why="the model has the mesh and the placements, and js.shard_optimizer passes them on.",
                do="optimizer = js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)))\n"
                "Linen: TrainState.create(..., tx=js.shard_optimizer(model, js.shard_matrices(optax.contrib.muon(1e-3)"
                ")))",
            )
        paths_and_leaves, tree = jax.tree.flatten_with_path((grads, state, params, extra))
        leaves = []
        positions = []  # of the arrays among the leaves
        arrays = []
        specs = []
        for i, (path, leaf) in enumerate(paths_and_leaves):
            leaves.append(leaf)
            if isinstance(leaf, jax.Array):  # a tracer is one, too
                positions.append(i)
                arrays.append(leaf)
                specs.append(layout.places.spec(key_texts(path), leaf.shape))

        def update_arrays(*arrays: jax.Array) -> PyTree:
            """Updates from the arrays among the leaves; the others, such as numbers, are constants."""
            all_leaves = list(leaves)
            for i, x in zip(positions, arrays, strict=True):
                all_leaves[i] = x
            grads, state, params, extra = jax.tree.unflatten(tree, all_leaves)
            return plain.update(grads, state, params, **extra)

        return _OwnedUpdate(update_arrays, arrays, specs, layout.mesh).run(arrays)

    return optax.GradientTransformationExtraArgs(plain.init, cast(optax.TransformUpdateExtraArgsFn, update))


@dataclasses.dataclass(frozen=True)
class _UpdateTask:
    """Equations that run together, once all variables that they read are known.

    Attributes:
        needed: those variables.
        run: takes all known values, and returns those that the equations compute.
    """

    needed: Sequence[Var]
    run: Callable[[Values], Values]


class _OwnedUpdate:
    """An update as equations, and the batches of its parts that owners compute."""

    def __init__(
        self, fn: Callable[..., PyTree], arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: AnyMesh
    ) -> None:
        self._mesh = mesh
        self._degrees = dict(mesh.shape)
        traced, result_shapes = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        self._result_tree = jax.tree.structure(result_shapes)
        # Inlined, because the equations of a matrix may be in several functions with `jit`.
        self._program = inlined(traced, arrays)
        sharded: Specs = {}
        for variable, spec in zip(self._program.jaxpr.invars, specs, strict=True):
            # Small arrays, such as a count, are no matrices; those that are not split need no owner.
            if self._axes(spec) and type_of(variable).size >= MATRIX_SIZE:
                sharded[variable] = spec
        self._batches = self._batched(find_parts(self._program.jaxpr, sharded))

    def _axes(self, spec: PartitionSpec) -> tuple[str, ...]:
        """Returns the mesh axes over which an array is split."""
        return splitting_axes(axes_in(spec), self._degrees)

    def _batched(self, parts: Sequence[MatrixPart]) -> list[_MatrixBatch]:
        """Groups equal parts; the groups that are too small for their devices are left to the compiler."""
        groups: dict[Hashable, list[MatrixPart]] = collections.defaultdict(list)
        for part in parts:
            if part.spec is not None:
                # Parts of one kind run as one program, over the matrices of all.
                groups[part.kind].append(part)
        batches = []
        for group in groups.values():
            spec = group[0].spec
            assert spec is not None, "parts without one are left out above"
            batch = _MatrixBatch(group, spec, self._axes(spec), self._mesh)
            # With fewer, more than half of the owners would have no matrix of their own to compute.
            if 2 * max(len(group), batch.num_layers) >= batch.num_owners:
                batches.append(batch)
        return batches

    def run(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Returns the results of the update."""
        jaxpr = self._program.jaxpr
        known: Values = dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        known.update(zip(jaxpr.invars, arrays, strict=True))
        # In rounds: batches move equations of far places together, so the order of the program is not one in which all
        # can run.
        waiting = self._tasks()
        # A batch waits for the inputs of all its parts, and what reads a result of one waits for the batch.
        while waiting:
            still_waiting = []
            for task in waiting:
                if all(variable in known for variable in task.needed):
                    known |= task.run(known)
                else:
                    still_waiting.append(task)
            assert len(still_waiting) < len(waiting), "parts are convex: none waits for its own results"
            waiting = still_waiting
        return jax.tree.unflatten(self._result_tree, values_of(jaxpr.outvars, known))

    def _tasks(self) -> list[_UpdateTask]:
        """Returns the equations outside the batches, in their order, and then the batches."""
        in_batches: set[int] = set()
        for batch in self._batches:
            for part in batch.parts:
                in_batches |= part.equations
        # The order of the program stays for what is not batched.
        tasks = []
        for i, eqn in enumerate(self._program.jaxpr.eqns):
            if i not in in_batches:
                tasks.append(_UpdateTask(variables_read(eqn), functools.partial(_run_equation, eqn)))
        for batch in self._batches:
            needed: list[Var] = []
            for part in batch.parts:
                needed += part.inputs
            tasks.append(_UpdateTask(needed, batch.run))
        return tasks


def _run_equation(eqn: JaxprEqn, known: Values) -> Values:
    results = _compat.bind(eqn, values_of(eqn.invars, known))
    return dict(zip(eqn.outvars, results, strict=True))


class _MatrixBatch:
    """Equal parts of several matrices, stacked, of which each owner computes the same number.

    Attributes:
        parts: one of each matrix.
        num_owners: devices over which the parts are split: those that share a matrix.
        num_layers: layers of a stacked matrix that is not split by layers; 1 for a matrix.
    """

    def __init__(self, parts: Sequence[MatrixPart], spec: PartitionSpec, axes: tuple[str, ...], mesh: AnyMesh) -> None:
        self.parts = parts
        self.num_owners = num_pieces(axes, dict(mesh.shape))
        self.num_layers = _num_layers(parts[0], spec)
        self._mesh = mesh
        if self.num_layers > len(parts):
            # The owners split the layers, which are dim 1 of the stack.
            self._count = len(parts)
            self._spec_of_owners = PartitionSpec(None, axes)
        else:
            # Filled up with matrices that are there: the stack must divide evenly.
            self._count = -(-len(parts) // self.num_owners) * self.num_owners
            self._spec_of_owners = PartitionSpec(axes)

    def run(self, known: Values) -> Values:
        """Computes the parts: moves their matrices to the owners, and the results back."""
        first = self.parts[0]
        values: list[jax.Array] = []
        dims: list[int | None] = []
        for position, spec in enumerate(first.specs):
            variables = [part.inputs[position] for part in self.parts]
            # Such as a step size; or the only matrix of a batch, which the compiler moves for the constraints below.
            if len(set(variables)) == 1:
                values.append(known[variables[0]])
                dims.append(None)
                continue
            # Repeated from the first: the stack may have more places than there are matrices.
            filled_up = itertools.islice(itertools.cycle(variables), self._count)
            stacked = jnp.stack([known[variable] for variable in filled_up])
            values.append(self._placed(stacked, _stacked(spec), self._spec_of_owners))
            dims.append(0)

        run = functools.partial(evaluated, first.program)
        outs = jax.vmap(run, in_axes=tuple(dims), axis_size=self._count)(*values)
        # A result of a matrix's shape is stored as the matrix is; others, if large, stay where they are computed.
        specs_by_shape = {}
        for variable, spec in zip(first.inputs, first.specs, strict=True):
            if spec is not None:
                specs_by_shape[type_of(variable).shape] = _stacked(spec)
        returned = []
        for x, variable in zip(outs, first.outputs, strict=True):
            returned.append(self._placed(x, self._spec_of_owners, specs_by_shape.get(type_of(variable).shape)))

        results: Values = {}
        # The results of the matrices that fill the stack up are left out.
        for i, part in enumerate(self.parts):
            for variable, x in zip(part.outputs, returned, strict=True):
                results[variable] = x[i]
        return results

    def _placed(self, x: jax.Array, *specs: PartitionSpec | None) -> jax.Array:
        """Places a stack of matrices by one spec and then by the next, which is the all-to-all; small arrays stay."""
        if x.size < MATRIX_SIZE * self._count:
            return x
        for spec in specs:
            if spec is not None:
                x = lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))
        return x


def _stacked(spec: PartitionSpec | None) -> PartitionSpec | None:
    """Returns the spec of stacked arrays that have this one each."""
    return None if spec is None else PartitionSpec(None, *spec)


def _num_layers(part: MatrixPart, spec: PartitionSpec) -> int:
    """Returns the layers of a stacked matrix that is not split by layers; 1 for a matrix."""
    for variable in part.inputs:
        if type_of(variable).size >= MATRIX_SIZE and type_of(variable).ndim >= len(spec):
            shape = type_of(variable).shape
            is_split_by_layers = bool(spec) and spec[0] is not None
            if len(shape) > 2 and not is_split_by_layers:
                return shape[0]
            return 1
    raise AssertionError("the part has an input with this spec")
