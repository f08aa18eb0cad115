"""Traced programs, and their derivatives as programs.

A program is a closed jaxpr in global view. Its derivatives come from the jaxpr, never from running the user's Python
again: `Gradient` has a forward with residuals, a backward, and the linear map between them for forward mode. Values
that depend only on parameters and constants are not residuals; backward computes them again from the parameters,
which makes any remat policy ZeRO-3.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jshard import _compat
from jshard.engine.values import has_gradient
from jshard.plans.policies import ATTENTION_AGAIN, KEPT_PRODUCT, NONE, SELECTIVE, Remat, checkpoint_policy

Atom: TypeAlias = Var | Literal
Bind = Callable[[JaxprEqn, list[Any]], list[Any]]
T = TypeVar("T")


class Program:
    """A traced function of operands: first parameters, then the rest.

    Attributes:
        jaxpr: the function, in global view.
        num_params: how many of the operands are parameters.
        remat: which values its derivative keeps.
    """

    def __init__(self, jaxpr: ClosedJaxpr, num_params: int, *, remat: Remat = NONE) -> None:
        self.jaxpr = jaxpr
        self.num_params = num_params
        self.remat = remat
        self.gradient = functools.cache(functools.partial(Gradient, self))


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, or of a variable of a jaxpr."""
    aval: Any = x.aval if isinstance(x, (Var, Literal)) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


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
        self._tree: Any = None

        def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
            fixed = others(wrt, operands)

            def f(diff: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = evaluate_jaxpr(program.jaxpr, merged(wrt, diff, fixed))
                self.is_float = [has_gradient(x) for x in outs]
                return picked(self.is_float, outs), others(self.is_float, outs)

            outs, vjp, rest = jax.vjp(checkpointed(f, program.remat), picked(wrt, operands), has_aux=True)
            residuals, self._tree = jax.tree.flatten(vjp)
            return merged(self.is_float, outs, rest), residuals

        closed = jax.make_jaxpr(forward)(*map(abstract, program.jaxpr.jaxpr.invars))
        jaxpr, num_outs = closed.jaxpr, len(self.is_float)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._residuals = jaxpr.invars[: program.num_params], jaxpr.outvars[num_outs:]
        of_data = dependents(jaxpr, jaxpr.invars[program.num_params :])  # others follow from the parameters alone
        residuals = dict.fromkeys(a for a in self._residuals if isinstance(a, Var))
        self.kept = [a for a in residuals if a in of_data]
        again, needed = [], {a for a in residuals if a not in of_data}
        for e in reversed(jaxpr.eqns):
            if any(v in needed for v in e.outvars):
                again.append(e)
                needed.update(a for a in e.invars if isinstance(a, Var))
        self._again = again[::-1]
        self._outs, self._unused, self._backwards = jaxpr.outvars[:num_outs], [], {}
        self._keep_what_is_needed()
        self.forward = ClosedJaxpr(_compat.with_results(jaxpr, [*self._outs, *self.kept]), closed.consts)

    def forward_keeping(self, which: Sequence[bool]) -> ClosedJaxpr:
        """Returns forward with some of the parameters as further results."""
        results = [*self.forward.jaxpr.outvars, *picked(which, self._params)]
        return ClosedJaxpr(_compat.with_results(self.forward.jaxpr, results), self.forward.consts)

    def backward_given(self, live: tuple[bool, ...], which: Sequence[bool]) -> ClosedJaxpr:
        """Returns backward, which takes some of the parameters from further operands."""
        jaxpr, n, num_given = self.backward(live), len(which), sum(which)

        def backward(*operands: Any) -> list[Any]:
            operands, given = operands[: len(operands) - num_given], operands[len(operands) - num_given :]
            params = merged(which, given, others(which, operands[:n]))
            return evaluate_jaxpr(jaxpr, [*params, *operands[n:]])

        return jax.make_jaxpr(backward)(*map(abstract, [*jaxpr.jaxpr.invars, *picked(which, self._params)]))

    def backward(self, live: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns the backward program.

        It takes the parameters, the kept residuals, and the cotangents of the results that have one; it returns a
        gradient for each operand of `wrt`.

        Args:
            live: for each result, whether it has a cotangent.
        """
        if live not in self._backwards:
            self._backwards[live] = self._traced(live)
        return self._backwards[live]

    @functools.cached_property
    def tangents(self) -> ClosedJaxpr:
        """The linear map of the derivative, for forward mode.

        It takes the parameters, the kept residuals, and a tangent for each operand of `wrt`; it returns a tangent for
        each result that is a float.
        """

        def tangents(params: Sequence[Any], kept: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            vjp = jax.tree.unflatten(self._tree, self._residual_values(params, kept))
            results = picked(self.is_float, [abstract(atom) for atom in self._outs])
            return _compat.tangents_of(vjp, tangents, results)

        operands = picked(self.wrt, self.program.jaxpr.jaxpr.invars)
        avals = [list(map(abstract, group)) for group in (self._params, self.kept, operands)]
        return jax.make_jaxpr(tangents)(*avals)

    def _keep_what_is_needed(self) -> None:
        """Of the values that autodiff keeps, keeps those that a gradient needs if every float has a cotangent.

        Autodiff also keeps what a stopped gradient would need, such as the scores whose maximum a softmax subtracts.
        """
        live, num_params, end = tuple(self.is_float), self.program.num_params, self.program.num_params + len(self.kept)
        closed = self._traced(live)
        may_go = lambda i, v: num_params <= i < end and not jnp.issubdtype(v.dtype, jax.dtypes.extended)
        closed, used = _compat.without_dead_code(closed, [not may_go(i, v) for i, v in enumerate(closed.in_avals)])
        self._unused = others(used[num_params:end], self.kept)
        self.kept = picked(used[num_params:end], self.kept)
        self._backwards[live] = closed

    def _traced(self, live: tuple[bool, ...]) -> ClosedJaxpr:
        """Returns the backward program that takes all kept values."""

        def backward(params: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            leaves, given = self._residual_values(params, kept), iter(cotangents)
            cts = [next(given) if is_live else _zeros(a) for a, is_live in zip(self._outs, live, strict=True)]
            (grads,) = jax.tree.unflatten(self._tree, leaves)(picked(self.is_float, cts))
            return grads

        avals = [list(map(abstract, group)) for group in (self._params, self.kept, picked(live, self._outs))]
        return jax.make_jaxpr(backward)(*avals)

    def _residual_values(self, params: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """Returns the values of all residuals; those that follow from the parameters alone are computed again."""
        env = self._consts | dict(zip(self._params, params, strict=True)) | dict(zip(self.kept, kept, strict=True))
        env |= {v: _zeros(v) for v in self._unused}  # nothing of a gradient reads them
        return _evaluate(self._again, env, self._residuals)


def checkpointed(f: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A function whose values are kept for backward by a policy."""
    if remat in (NONE, ATTENTION_AGAIN):  # attention has its own checkpoint
        return f
    return jax.checkpoint(_naming_products(f) if remat == SELECTIVE else f, policy=checkpoint_policy(remat))


def _naming_products(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a name for the result of every second product with weights, beginning with the first."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        turns = itertools.cycle([True, False])

        def named(e: Any, xs: list[Any]) -> list[Any]:
            if e.primitive.name == "jit":
                return evaluate_jaxpr(e.params["jaxpr"], xs, named)
            found = _compat.bind(e, xs)
            if e.primitive.name != "dot_general" or any(e.params["dimension_numbers"][1]) or not next(turns):
                return found
            return [checkpoint_name(x, KEPT_PRODUCT) for x in found]

        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate_jaxpr(closed, jax.tree.leaves(args), named))

    return run


def _zeros(a: Atom) -> jax.Array:
    aval = abstract(a)
    return jnp.zeros(aval.shape, aval.dtype)


def evaluate_jaxpr(closed: ClosedJaxpr, operands: Sequence[Any], bind: Bind = _compat.bind) -> list[Any]:
    """Runs a closed jaxpr inline, like `jax.core.eval_jaxpr`, keeping the user's lines and names."""
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))
    return _evaluate(jaxpr.eqns, env, jaxpr.outvars, bind)


def _evaluate(
    equations: Sequence[JaxprEqn], env: dict[Var, Any], wanted: Sequence[Atom], bind: Bind = _compat.bind
) -> list[Any]:
    """Runs equations on the values in `env`; the values of some variables."""
    read = lambda a: a.val if isinstance(a, Literal) else env[a]
    for e in equations:
        with _compat.equation_context(e):
            env.update(zip(e.outvars, bind(e, list(map(read, e.invars))), strict=True))
    return list(map(read, wanted))


def dependents(jaxpr: Jaxpr, variables: Sequence[Var]) -> set[Var]:
    """The given variables, those that depend on them, and the results of equations with effects."""
    found = set(variables)
    for e in jaxpr.eqns:
        if e.effects or any(isinstance(a, Var) and a in found for a in e.invars):
            found.update(e.outvars)
    return found


def picked(which: Sequence[bool], xs: Sequence[T]) -> list[T]:
    """The values that are marked."""
    return [x for x, is_marked in zip(xs, which, strict=True) if is_marked]


def others(which: Sequence[bool], xs: Sequence[T]) -> list[T]:
    """The values that are not marked."""
    return [x for x, is_marked in zip(xs, which, strict=True) if not is_marked]


def merged(which: Sequence[bool], marked: Sequence[T], rest: Sequence[T]) -> list[T]:
    """Marked and other values in one list again."""
    marked_it, rest_it = iter(marked), iter(rest)
    return [next(marked_it) if is_marked else next(rest_it) for is_marked in which]
