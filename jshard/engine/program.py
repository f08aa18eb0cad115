"""Traced programs, and their derivatives as programs.

A program is a closed jaxpr in global view. Its derivatives come from the jaxpr, never from running the user's Python
again: `Gradient` has a forward with residuals, a backward, and the linear map between them for forward mode. Values
that depend only on parameters and constants are not residuals; backward computes them again from the parameters,
which makes any remat policy ZeRO-3.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from jshard import _compat
from jshard._types import TreeDef
from jshard.engine.selections import merged, others, picked
from jshard.engine.values import have_gradients
from jshard.plans.remat import ATTENTION_AGAIN, AUTO, KEPT_PRODUCT, NONE, SELECTIVE, Remat, checkpoint_policy

Atom: TypeAlias = Var | Literal
Bind = Callable[[JaxprEqn, list[jax.Array]], list[jax.Array]]
T = TypeVar("T")


class Program:
    """A traced function of operands: first parameters, then the rest.

    Attributes:
        jaxpr: the function, in global view.
        num_params: how many of the operands are parameters.
        remat: which values its derivative keeps; `AUTO` until `settle`, if jshard is to choose.
    """

    def __init__(self, jaxpr: ClosedJaxpr, num_params: int, *, remat: Remat = NONE) -> None:
        self.jaxpr = jaxpr
        self.num_params = num_params
        self.remat = remat
        # By what it is differentiated with respect to. A cache of this object: a module's would keep each program
        # alive.
        self.gradient = functools.cache(functools.partial(Gradient, self))
        self.under = functools.cache(self._under)

    def _under(self, remat: Remat) -> "Program":
        """Returns the same function under another policy."""
        return Program(self.jaxpr, self.num_params, remat=remat)

    def settle(self, remat: Remat) -> None:
        """Sets the policy of a program that was `AUTO`; derivatives that were made to choose it are used again."""
        self.remat = remat
        self.gradient = self.under(remat).gradient
        self.under.cache_clear()  # derivatives under other policies


class SummingProgram(Program):
    """A program that adds some of its results to running sums, which are its last operands.

    The sum takes the place of the result, in the dtype of the sum.

    Attributes:
        addends: the program before: it has no sums, and returns what is added.
        positions: which results are added, in the order of the sums.
    """

    def __init__(self, before: Program, sums: Mapping[int, ShapedArray]) -> None:
        """Adds the results at some positions to sums of these types."""
        self.addends = before.jaxpr
        self.positions = tuple(sums)
        num_operands = len(before.jaxpr.in_avals)

        def run(*operands: jax.Array) -> list[jax.Array]:
            results = evaluate_jaxpr(before.jaxpr, operands[:num_operands])
            for position, total in zip(self.positions, operands[num_operands:], strict=True):
                results[position] = total + results[position].astype(total.dtype)
            return results

        # In the program a stored parameter has no padding, nor has its sum.
        types = abstract_all(before.jaxpr.jaxpr.invars)
        for position, total in sums.items():
            types.append(jax.ShapeDtypeStruct(before.jaxpr.out_avals[position].shape, total.dtype))
        super().__init__(jax.make_jaxpr(run)(*types), before.num_params, remat=before.remat)


def abstract(x: Atom | ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, or of a variable of a jaxpr."""
    aval: Any = x.aval if isinstance(x, (Var, Literal)) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def abstract_all(xs: Iterable[Atom | ArrayLike | jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of arrays, or of variables of a jaxpr."""
    return [abstract(x) for x in xs]


def types_of(arrays: Iterable[jax.Array]) -> list[ShapedArray]:
    """Returns the types of arrays as a trace has them, with all that `abstract` leaves out."""
    return [jax.typeof(x) for x in arrays]


def variables_among(atoms: Iterable[Atom]) -> list[Var]:
    """Returns those that are no literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


class Gradient:
    """A program's derivative with respect to some operands.

    Attributes:
        program: the program.
        wrt: for each operand, whether the program is differentiated with respect to it.
        is_float: for each result, whether it has a tangent.
        kept: the residuals that forward keeps: variables of its jaxpr.
        forward: takes the program's operands; returns its results, then the kept residuals.
    """

    def __init__(self, program: Program, wrt: tuple[bool, ...]) -> None:
        self.program = program
        self.wrt = wrt
        self.is_float: list[bool] = []
        self._tree: TreeDef = None  # of the function from cotangents to gradients, whose leaves are the residuals

        # `jax.vjp` is called inside a trace. What it saves are then variables of a jaxpr, of which it can be said what
        # each depends on, and which of them backward reads.
        closed = jax.make_jaxpr(self._forward)(*abstract_all(program.jaxpr.jaxpr.invars))
        jaxpr = closed.jaxpr
        num_outs = len(self.is_float)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params = jaxpr.invars[: program.num_params]
        self._outs = jaxpr.outvars[:num_outs]
        self._residuals = jaxpr.outvars[num_outs:]

        # Residuals that follow from the parameters alone are not kept: backward computes them again.
        # What has effects counts as data: it must not run a second time.
        of_data = dependents(jaxpr, jaxpr.invars[program.num_params :])
        self.kept: list[Var] = []
        of_parameters: set[Var] = set()
        for v in dict.fromkeys(variables_among(self._residuals)):  # each once, in order
            if v in of_data:
                self.kept.append(v)
            else:
                of_parameters.add(v)
        self._recomputed = _equations_for(jaxpr, of_parameters)
        self._unused: list[Var] = []
        self._backwards: dict[tuple[bool, ...], ClosedJaxpr] = {}
        self._drop_unneeded()  # before forward is made: it returns what is left
        self.forward = ClosedJaxpr(_compat.with_results(jaxpr, [*self._outs, *self.kept]), closed.consts)

    def _forward(self, *operands: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the program; returns its results and all residuals, and notes what they are."""
        fixed = others(self.wrt, operands)

        def run(diff: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = evaluate_jaxpr(self.program.jaxpr, merged(self.wrt, diff, fixed))
            self.is_float = have_gradients(outs)
            return picked(self.is_float, outs), others(self.is_float, outs)

        # Results that are no floats are aux: JAX would demand a cotangent of type float0 for each.
        run = checkpointed(run, self.program.remat)
        float_outs, vjp, other_outs = jax.vjp(run, picked(self.wrt, operands), has_aux=True)
        residuals, self._tree = jax.tree.flatten(vjp)
        return merged(self.is_float, float_outs, other_outs), residuals

    def forward_with_copies(self, is_copied: Sequence[bool]) -> ClosedJaxpr:
        """Returns forward with some of the parameters as further results."""
        results = [*self.forward.jaxpr.outvars, *picked(is_copied, self._params)]
        return ClosedJaxpr(_compat.with_results(self.forward.jaxpr, results), self.forward.consts)

    def backward_with_copies(self, live: tuple[bool, ...], is_copied: Sequence[bool]) -> ClosedJaxpr:
        """Returns backward, which takes some of the parameters from further operands, the last ones."""
        # The operands in front stay, for one order of operands in both forms; of these parameters only the type is
        # read.
        jaxpr = self.backward(live)
        num_params = len(is_copied)
        num_copies = sum(is_copied)

        def backward(*operands: jax.Array) -> list[jax.Array]:
            first_copy = len(operands) - num_copies
            copies = operands[first_copy:]
            params = merged(is_copied, copies, others(is_copied, operands[:num_params]))
            return evaluate_jaxpr(jaxpr, [*params, *operands[num_params:first_copy]])

        return jax.make_jaxpr(backward)(*abstract_all([*jaxpr.jaxpr.invars, *picked(is_copied, self._params)]))

    def backward(self, live: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns the backward program.

        It takes the parameters, the kept residuals, and the cotangents of the results that have one; it returns a
        gradient for each operand of `wrt`.

        Args:
            live: for each result, whether it has a cotangent.
        """
        if live not in self._backwards:
            self._backwards[live] = self._traced_backward(live)
        return self._backwards[live]

    @functools.cached_property
    def tangents(self) -> ClosedJaxpr:
        """The linear map of the derivative, for forward mode.

        It takes the parameters, the kept residuals, and a tangent for each operand of `wrt`; it returns a tangent for
        each result that is a float.
        """

        def tangents(
            params: Sequence[jax.Array], kept_values: Sequence[jax.Array], tangents: Sequence[jax.Array]
        ) -> list[jax.Array]:
            vjp = jax.tree.unflatten(self._tree, self._residual_values(params, kept_values))
            results = abstract_all(picked(self.is_float, self._outs))
            return _compat.tangents_of(vjp, tangents, results)

        operands = picked(self.wrt, self.program.jaxpr.jaxpr.invars)
        return jax.make_jaxpr(tangents)(abstract_all(self._params), abstract_all(self.kept), abstract_all(operands))

    def _drop_unneeded(self) -> None:
        """Drops residuals that no gradient needs if every float has a cotangent.

        Autodiff also keeps what a stopped gradient would need, such as the scores whose maximum a softmax subtracts.
        """
        # With fewer cotangents fewer residuals are needed. But forward is one program for all losses, so it keeps what
        # the loss needs that uses all results.
        live = tuple(self.is_float)
        first = self.program.num_params
        last = first + len(self.kept)
        closed = self._traced_backward(live)
        must_stay = []
        for i, aval in enumerate(closed.in_avals):
            is_residual = first <= i < last
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # `_zeros` cannot take its place
            must_stay.append(is_key or not is_residual)
        closed, used = _compat.without_dead_code(closed, must_stay)
        is_needed = used[first:last]
        self._unused = others(is_needed, self.kept)
        self.kept = picked(is_needed, self.kept)
        # It takes what is kept now, so it is the backward of these cotangents, and need not be traced again.
        self._backwards[live] = closed

    def _traced_backward(self, live: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns the backward program that takes all kept values."""

        def backward(
            params: Sequence[jax.Array], kept_values: Sequence[jax.Array], cotangents: Sequence[jax.Array]
        ) -> list[jax.Array]:
            residuals = self._residual_values(params, kept_values)
            zeros = [_zeros(atom) for atom in others(live, self._outs)]
            every_cotangent = merged(live, cotangents, zeros)
            (grads,) = jax.tree.unflatten(self._tree, residuals)(picked(self.is_float, every_cotangent))
            return grads

        outs = picked(live, self._outs)
        return jax.make_jaxpr(backward)(abstract_all(self._params), abstract_all(self.kept), abstract_all(outs))

    def _residual_values(self, params: Sequence[jax.Array], kept_values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the values of all residuals; those that follow from the parameters alone are computed again."""
        env = dict(self._consts)
        env.update(zip(self._params, params, strict=True))
        env.update(zip(self.kept, kept_values, strict=True))
        for v in self._unused:
            env[v] = _zeros(v)  # nothing of a gradient reads them; `jax.vjp` takes all of its residuals
        return _evaluate(self._recomputed, env, self._residuals)


def _equations_for(jaxpr: Jaxpr, results: set[Var]) -> list[JaxprEqn]:
    """Returns the equations that are needed to compute some variables, in order."""
    # From the last one back, so that each equation is met after all of its readers.
    needed = set(results)
    equations = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            equations.append(eqn)
            needed.update(variables_among(eqn.invars))
    return equations[::-1]


def checkpointed(f: Callable[..., T], remat: Remat) -> Callable[..., T]:
    """Returns a function whose values are kept for backward by a policy."""
    # Attention has its own checkpoint. What is still `AUTO` is no layer of a region.
    if remat in (NONE, ATTENTION_AGAIN, AUTO):
        return f
    if remat == SELECTIVE:
        f = _naming_products(f)
    return jax.checkpoint(f, policy=checkpoint_policy(remat))


def _naming_products(f: Callable[..., T]) -> Callable[..., T]:
    """Gives a name to the result of every second product with weights, beginning with the first."""

    # A policy of `jax.checkpoint` sees one equation at a time, and cannot count. So products are named before, and the
    # policy keeps names.
    def run(*args: jax.Array) -> T:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        is_turn = itertools.cycle([True, False])

        def bind(eqn: JaxprEqn, xs: list[jax.Array]) -> list[jax.Array]:
            if eqn.primitive.name == "jit":
                return evaluate_jaxpr(eqn.params["jaxpr"], xs, bind)
            results = _compat.bind(eqn, xs)
            if _is_product_with_weights(eqn) and next(is_turn):
                return [checkpoint_name(x, KEPT_PRODUCT) for x in results]
            return results

        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate_jaxpr(closed, jax.tree.leaves(args), bind))

    return run


def _is_product_with_weights(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a product without batch dims: a product of activations has them."""
    if eqn.primitive.name != "dot_general":
        return False
    _, batch_dims = eqn.params["dimension_numbers"]
    return not any(batch_dims)


def _zeros(a: Atom) -> jax.Array:
    aval = abstract(a)
    return jnp.zeros(aval.shape, aval.dtype)


def evaluate_jaxpr(closed: ClosedJaxpr, operands: Sequence[jax.Array], bind: Bind = _compat.bind) -> list[jax.Array]:
    """Runs a closed jaxpr inline, like `jax.core.eval_jaxpr`, keeping the user's lines and names."""
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))
    return _evaluate(jaxpr.eqns, env, jaxpr.outvars, bind)


def _evaluate(
    equations: Sequence[JaxprEqn], env: dict[Var, jax.Array], results: Sequence[Atom], bind: Bind = _compat.bind
) -> list[jax.Array]:
    """Runs equations on the values in `env`, which gets theirs; returns the values of some atoms."""

    def values_of(atoms: Sequence[Atom]) -> list[jax.Array]:
        return [atom.val if isinstance(atom, Literal) else env[atom] for atom in atoms]

    for eqn in equations:
        with _compat.equation_context(eqn):
            values = bind(eqn, values_of(eqn.invars))
            env.update(zip(eqn.outvars, values, strict=True))
    return values_of(results)


def dependents(jaxpr: Jaxpr, variables: Sequence[Var]) -> set[Var]:
    """Returns some variables, those that depend on them, and the results of equations with effects."""
    # A random number or a callback with an effect may differ each time, whatever it depends on.
    dependent = set(variables)
    for eqn in jaxpr.eqns:
        if eqn.effects or not dependent.isdisjoint(variables_among(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent
