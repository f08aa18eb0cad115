"""The derivative of a function that acts on each example: one equation forward, one backward.

    forward:   operands ───────────▶ results, residuals with a dim of examples
    backward:  operands, results, residuals, cotangents ─▶ gradients

Backward traces forward again, for the structure of its residuals. The residuals that forward saved replace those that
it would compute, and what computed these is then dead code. A policy of `jax.checkpoint` sees the forward equation, and
the names that the function gave to its results and residuals.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jshard import _compat
from jshard.engine.example_call import Body, per_example_p
from jshard.engine.program import Atom, abstract_all, dependents, types_of
from jshard.engine.rules import PARTIAL
from jshard.engine.selections import at_positions, merged, others, picked
from jshard.engine.values import have_gradients
from jshard.errors import CallError

Shape = tuple[int, ...]


def differentiable(body: Body) -> Callable[..., list[jax.Array]]:
    """Returns the call of a body, which can be differentiated any number of times in reverse mode."""

    # The primitive has no rule for derivatives, as that of the whole batch's program is not what a shard runs. Backward
    # is again such a call, so derivatives of any order are equations.
    @jax.custom_vjp
    def call(*arrays: jax.Array) -> list[jax.Array]:
        return per_example_p.bind(*arrays, body=body)

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], tuple[list[jax.Array], "_Static"]]:
        derivative = _Derivative(body, types_of(arrays))
        outs, saved = derivative.forward(arrays)
        return outs, (saved, _Static(derivative))

    def backward(
        residuals: tuple[list[jax.Array], "_Static"], cotangents: list[jax.Array]
    ) -> tuple[jax.Array | None, ...]:
        saved, derivative = residuals
        return derivative.value.backward(saved, cotangents)

    call.defvjp(forward, backward)
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """Carries a value that is no array from the forward of a custom derivative to its backward."""

    value: "_Derivative"


@dataclasses.dataclass(frozen=True)
class _Vjp:
    """What `jax.vjp` of a body returns.

    Attributes:
        outs: the results.
        residuals: the residuals.
        with_residuals: returns the function from cotangents to gradients that has these residuals.
    """

    outs: list[jax.Array]
    residuals: list[jax.Array]
    with_residuals: Callable[[list[jax.Array]], Callable[[list[jax.Array]], Sequence[jax.Array]]]

    @property
    def arrays(self) -> list[jax.Array]:
        return [*self.outs, *self.residuals]


class _Derivative:
    """The two equations of a call that is differentiated.

    Of the residuals of `jax.vjp`, forward saves those that have the examples along exactly one dim. A residual that is
    also a result is not saved twice. Backward computes the others again: they are arguments or constants, or belong to
    no example.

    Attributes:
        from_outs: the residuals that are results: position of the residual -> position of the result.
        saved: the residuals that forward saves: position of the residual -> dim of its examples.
        used: for each operand, whether backward reads it.
    """

    def __init__(self, body: Body, avals: Sequence[ShapedArray]) -> None:
        self.body = body
        self.avals = list(avals)
        self.num_outs = len(body.outs)
        self.operand_has_gradient = have_gradients(avals)

        # For the whole batch, only to choose residuals: forward and backward trace the body for the examples of a
        # shard.
        program = jax.make_jaxpr(lambda *xs: self._vjp(xs).arrays)(*avals)
        out_avals = program.out_avals[: self.num_outs]
        self.out_has_gradient = have_gradients(out_avals)

        residuals = program.jaxpr.outvars[self.num_outs :]
        self.num_residuals = len(residuals)
        self.from_outs, self.saved = self._choose_residuals(program.jaxpr, residuals)
        self.saved_avals = {i: residuals[i].aval for i in self.saved}

        results = [*program.jaxpr.outvars[: self.num_outs], *at_positions(residuals, self.saved)]
        # A policy sees the equation, not the program inside, so the names in it are given again to what the equation
        # returns.
        self.names = [_checkpoint_name_of(program.jaxpr, atom) for atom in results]
        self.used = self._operands_of_backward(out_avals)

    def _operands_of_backward(self, out_avals: Sequence[ShapedArray]) -> list[bool]:
        # What backward does not read need not be kept for it, such as the input of a large layer.
        reused_avals = at_positions(out_avals, self.from_outs.values())
        cotangents = picked(self.out_has_gradient, out_avals)
        program = jax.make_jaxpr(self._gradients)(self.avals, reused_avals, list(self.saved_avals.values()), cotangents)
        _, is_used = _compat.without_dead_code(program)
        used = []
        for aval, is_read in zip(self.avals, is_used, strict=False):  # the operands come first
            # A key cannot be replaced by zeros, as other operands that are not read are.
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
            used.append(is_read or is_key)
        return used

    # ---- the two equations

    def forward(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the results, and the values for backward: used operands, reused results, saved residuals."""

        def run(*xs: jax.Array) -> list[jax.Array]:
            vjp = self._vjp(xs)
            self._check(vjp.residuals, self._has_saved_shape)
            return [*vjp.outs, *at_positions(vjp.residuals, self.saved)]

        # Saved residuals are results of the equation, split along their dim of examples.
        states = (*self.body.outs, *self.saved.values())
        results = differentiable(dataclasses.replace(self.body, run=run, outs=states))(*arrays)
        named = []
        for x, name in zip(results, self.names, strict=True):
            named.append(x if name is None else checkpoint_name(x, name))
        outs = named[: self.num_outs]
        saved = named[self.num_outs :]
        return outs, [*picked(self.used, arrays), *at_positions(outs, self.from_outs.values()), *saved]

    def backward(self, values: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        """Returns the gradients of the operands; None for an operand without one.

        Args:
            values: the second result of `forward`.
            cotangents: of all results.
        """
        # A result that is a sum over the shards is the same on all of them, and so is its cotangent.
        out_dims = [state if isinstance(state, int) else None for state in self.body.outs]
        num_operands = sum(self.used)
        num_reused = num_operands + len(self.from_outs)
        # In the order of the values that `forward` has returned, then the cotangents.
        in_dims = (
            *picked(self.used, self.body.ins),
            *at_positions(out_dims, self.from_outs.values()),
            *self.saved.values(),
            *picked(self.out_has_gradient, out_dims),
        )
        inputs = (*values, *picked(self.out_has_gradient, cotangents))
        # Any operand with examples says how many there are: on a shard, fewer than here.
        position, examples_dim = _first_with_examples(in_dims)
        num_examples = inputs[position].shape[examples_dim]

        def run(*xs: jax.Array) -> Sequence[jax.Array]:
            examples_here = xs[position].shape[examples_dim]
            # Operands that backward does not read are zeros. They are needed for their shapes only.
            zeros = []
            for is_used, aval, dim in zip(self.used, self.avals, self.body.ins, strict=True):
                if not is_used:
                    shape = _with_examples(aval.shape, dim, examples_here, num_examples)
                    zeros.append(jnp.zeros(shape, aval.dtype))
            operands = merged(self.used, xs[:num_operands], zeros)
            reused = list(xs[num_operands:num_reused])
            saved = list(xs[num_reused : len(values)])
            arguments = operands, reused, saved, list(xs[len(values) :])
            program, is_read = _compat.without_dead_code(jax.make_jaxpr(self._gradients)(*arguments))
            return jex.jaxpr_as_fun(program)(*picked(is_read, jax.tree.leaves(arguments)))

        # The gradient of an operand that all examples share is a sum over the shards, of which each has a part.
        grad_states = tuple(PARTIAL if dim is None else dim for dim in picked(self.operand_has_gradient, self.body.ins))
        # Not the reused results: by the declaration they have a row for each example, on a shard as of the whole batch.
        from_forward = tuple(range(num_reused, len(values)))
        body = Body(run, in_dims, grad_states, f"the backward of {self.body.name}", from_forward)
        gradients = iter(differentiable(body)(*inputs))
        return tuple(next(gradients) if is_float else None for is_float in self.operand_has_gradient)

    # ---- what they compute

    def _vjp(self, arrays: Sequence[jax.Array]) -> _Vjp:
        """Traces the body with `jax.vjp`; through a jaxpr, so that the order of the residuals is always the same."""
        structures = []

        def trace(*arrays: jax.Array) -> list[jax.Array]:
            fixed = others(self.operand_has_gradient, arrays)

            def run(*floats: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
                outs = list(self.body.run(*merged(self.operand_has_gradient, floats, fixed)))
                return picked(have_gradients(outs), outs), outs

            _, vjp, outs = jax.vjp(run, *picked(self.operand_has_gradient, arrays), has_aux=True)
            residuals, structure = jax.tree.flatten(vjp)
            structures.append(structure)
            return [*outs, *residuals]

        results = jex.jaxpr_as_fun(jax.make_jaxpr(trace)(*arrays))(*arrays)
        return _Vjp(results[: self.num_outs], results[self.num_outs :], structures[0].unflatten)

    def _gradients(
        self,
        operands: Sequence[jax.Array],
        reused: Sequence[jax.Array],
        saved: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
    ) -> Sequence[jax.Array]:
        vjp = self._vjp(operands)
        from_forward = dict(zip((*self.from_outs, *self.saved), (*reused, *saved), strict=True))

        def fits(i: int, x: jax.Array) -> bool:
            return from_forward[i].shape == x.shape

        self._check(vjp.residuals, fits)
        residuals = [from_forward.get(i, x) for i, x in enumerate(vjp.residuals)]
        return vjp.with_residuals(residuals)(list(cotangents))

    def _has_saved_shape(self, i: int, x: jax.Array) -> bool:
        dim = self.saved[i]
        return _without_dim(x.shape, dim) == _without_dim(self.saved_avals[i].shape, dim)

    def _check(self, residuals: Sequence[jax.Array], fits: Callable[[int, jax.Array], bool]) -> None:
        """Raises if the residuals of fewer examples are not those of the whole batch."""
        # They are known by position alone: were they others, backward would read one for another.
        num_wrong = 0
        for i, x in enumerate(residuals):
            if i in self.saved and not fits(i, x):
                num_wrong += 1
        if len(residuals) == self.num_residuals and not num_wrong:
            return
        raise CallError(
            "A function declared with js.per_example keeps different residuals for fewer examples.",
            where=self.body.name,
            why=f"arrays kept: {self.num_residuals} for the whole batch, {len(residuals)} for the examples of a "
            f"shard, {num_wrong} of these with another shape.",
            do="js.per_example(jax.checkpoint(fn))  # keeps none: backward recomputes them",
        )

    # ---- which residuals forward saves

    def _choose_residuals(self, jaxpr: Jaxpr, residuals: Sequence[Atom]) -> tuple[dict[int, int], dict[int, int]]:
        """Returns `from_outs` and `saved`."""
        out_positions: dict[jex.Var, int] = {}
        for k, atom in enumerate(jaxpr.outvars[: self.num_outs]):
            if isinstance(atom, jex.Var):
                out_positions.setdefault(atom, k)
        # What depends on no operand, and the operands themselves, cost backward nothing.
        candidates = dependents(jaxpr, jaxpr.invars) - set(jaxpr.invars)
        shapes = _shapes_of(abstract_all(residuals))
        part = self._residuals_of_a_part(shapes)

        from_outs: dict[int, int] = {}
        saved: dict[int, int] = {}
        for i, atom in enumerate(residuals):
            if isinstance(atom, jex.Literal) or atom not in candidates:
                continue
            out_position = out_positions.get(atom)
            examples_dim = part.examples_dim(i, shapes[i])
            # A result that is a sum over the shards is no residual of one: the shard computed its part of it.
            if out_position is not None and isinstance(self.body.outs[out_position], int):
                from_outs[i] = out_position
            elif examples_dim is not None:
                saved[i] = examples_dim
            else:
                continue  # of no example, or of all together: backward computes it again
            candidates.discard(atom)  # a residual that occurs twice is saved once
        return from_outs, saved

    def _residuals_of_a_part(self, shapes: list[Shape]) -> "_PartialBatch":
        """Traces the body for a part of the batch: its number of examples divided by its smallest divisor.

        Args:
            shapes: of the residuals of the whole batch.
        """
        whole_batch = _PartialBatch(divisor=1, shapes=shapes)  # in which no dim shrinks: nothing is saved
        dims = self.body.ins
        # Nothing says along which dim a residual has the examples. Traced for fewer of them, it is the dim that
        # shrinks.
        position, examples_dim = _first_with_examples(dims)
        divisor = _smallest_divisor(self.avals[position].shape[examples_dim])
        if divisor is None:
            return whole_batch
        operands = []
        for aval, dim in zip(self.avals, dims, strict=True):
            shape = _with_examples(aval.shape, dim, 1, divisor)
            operands.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        try:
            program = jax.make_jaxpr(lambda *xs: self._vjp(xs).arrays)(*operands)
        except Exception:
            # The function cannot run on fewer examples. It raises when it is partitioned, if it ever is.
            return whole_batch
        part_shapes = _shapes_of(program.out_avals[self.num_outs :])
        if _num_dims(part_shapes) != _num_dims(shapes):
            return whole_batch
        return _PartialBatch(divisor, part_shapes)


@dataclasses.dataclass(frozen=True)
class _PartialBatch:
    """The shapes of the residuals of a part of the batch, which has 1 of `divisor` examples."""

    divisor: int
    shapes: list[Shape]

    def examples_dim(self, i: int, shape: Shape) -> int | None:
        """Returns the only dim of a residual that shrinks with the number of examples; None if there is none.

        Args:
            i: the position of the residual.
            shape: its shape for the whole batch.
        """
        part = self.shapes[i]
        changed = [dim for dim, size in enumerate(shape) if part[dim] != size]
        if len(changed) != 1:
            return None
        (dim,) = changed
        shrinks_with_batch = part[dim] * self.divisor == shape[dim]
        return dim if shrinks_with_batch else None


def _first_with_examples(dims: Sequence[int | None]) -> tuple[int, int]:
    """Returns the position of the first array that has examples, and their dim in it."""
    for position, dim in enumerate(dims):
        if dim is not None:
            return position, dim
    raise ValueError("No array has examples.")


def _shapes_of(avals: Sequence[ShapedArray | jax.ShapeDtypeStruct]) -> list[Shape]:
    return [aval.shape for aval in avals]


def _num_dims(shapes: Sequence[Shape]) -> list[int]:
    return [len(shape) for shape in shapes]


def _smallest_divisor(n: int) -> int | None:
    for divisor in range(2, n + 1):
        if n % divisor == 0:
            return divisor
    return None


def _with_examples(shape: Shape, dim: int | None, numerator: int, denominator: int) -> Shape:
    """Returns the shape for a fraction of the examples, which are along `dim`."""
    if dim is None:
        return shape
    return (*shape[:dim], shape[dim] * numerator // denominator, *shape[dim + 1 :])


def _without_dim(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _checkpoint_name_of(jaxpr: Jaxpr, atom: Atom) -> str | None:
    """Returns the name that `checkpoint_name` gave to a result of a program, in it or in a program inside it."""
    if isinstance(atom, jex.Literal):
        return None
    eqn = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
    if eqn is None:
        return None
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    position = eqn.outvars.index(atom)
    for inner in jex.jaxprs_in_params(eqn.params):
        if len(inner.outvars) != len(eqn.outvars):
            continue
        name = _checkpoint_name_of(inner, inner.outvars[position])
        if name is not None:
            return name
    return None
