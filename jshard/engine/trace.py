"""A call as programs: traced once in global view, differentiated there.

The user's method runs once, on abstract arrays, and becomes a `Program`. Its derivatives come from that program, never
from running the Python again: `Gradient` holds a forward with residuals and a backward. Values that depend only on
parameters and constants are not residuals; backward recomputes them from the parameters, which makes any remat
policy ZeRO-3.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex

from jshard import _compat
from jshard._text import ATTENTION, CONTEXT
from jshard.engine import rules
from jshard.engine.blame import inside_annotated_call
from jshard.engine.call import is_float
from jshard.engine.context import attention_again
from jshard.errors import CallError
from jshard.plans.placement import Placement
from jshard.plans.policies import ATTENTION_AGAIN, KEPT_PRODUCT, NONE, SELECTIVE, Remat, checkpoint_policy, kept_names


class Call(Protocol):
    """A call into an annotated module, split into arrays by the adapter of its kind of module."""

    where: str  # class and method, for messages
    location: str  # the same, after the path of a unit inside the model
    params: list[Any]  # the parameters under the module as they are stored, tied ones once
    placements: list[Placement | None]  # of each parameter; None for one added after the annotation
    owners: list[str]  # who gathers each parameter: this module, a unit inside, or one around it
    names: list[str]  # path of each parameter from the module
    inputs: list[Any]  # all other arrays: state, then arguments
    num_state: int  # how many of the inputs are state
    result: Any  # for `finish`, besides arrays; set by `body`
    written: Sequence[str]
    """Places of parameters that the method wrote, set by `body`. Their values before, then after, are the last of the
    state. Most are the same: `nnx.remat` writes back whatever it was given."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that run the same program on arrays of the same types."""

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The parameters, or copies of them, entering the region; raises if they cannot be differentiated."""
        ...

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the method on a plain copy of the module: arrays of its result, and of the state it changed or made."""
        ...

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Sets which of the `written` parameters the method has changed: their values are the last outputs."""

    def without_passed(self, outs: Sequence[Any]) -> list[Any]:
        """The outputs of `body` outside a trace, with the written parameters that it has changed as the last ones."""
        ...

    def finish(self, outs: Sequence[Any], result: Any) -> Any:
        """Writes the state back to the caller's objects, and returns the method's result."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that is not an array, among a custom derivative's residuals."""

    value: Any


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, or of a variable of a jaxpr."""
    aval: Any = x.aval if isinstance(x, (jex.Var, jex.Literal)) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class Program:
    """A traced function (a closed jaxpr) of operands: parameters, then the rest; `remat` is for its gradient."""

    def __init__(self, jaxpr: Any, num_params: int, *, remat: Remat = NONE) -> None:
        self.jaxpr, self.num_params, self.remat = jaxpr, num_params, remat
        self.gradient = functools.cache(functools.partial(Gradient, self))


def trace_call(call: Call, body: Callable, params: list[Any], inputs: list[Any], remat: Remat) -> tuple[Program, list]:
    """Traces a call's body, a function of parameters and inputs: a program, and constants to append to its operands."""
    with inside_annotated_call(call), attention_again(remat == ATTENTION_AGAIN) as attention_calls:
        closed = jax.make_jaxpr(body)(params, inputs)
    _warn_of_names(call, closed.jaxpr, remat, len(attention_calls))
    if n := len(call.written):  # the program omits the parameters that were only passed through
        outs = closed.jaxpr.outvars
        pairs = zip(outs[-2 * n : -n], outs[-n:], strict=True)
        changed = [i for i, (old, new) in enumerate(pairs) if not _is_passed(closed.jaxpr, old, new)]
        call.keep_written(changed)
        results = [*outs[: -2 * n], *(outs[-n:][i] for i in changed)]
        closed = jex.ClosedJaxpr(_compat.with_results(closed.jaxpr, results), closed.consts)
    if names := _compat.axis_names(closed.jaxpr):  # backward is traced where that axis no longer exists
        raise CallError(
            "The model has collectives over an axis that a vmap or pmap around it names.",
            where=f"{call.where}: {', '.join(map(repr, names))}",
            why="an annotated model is called on the whole batch: its means already cover the batch.",
            do="nn.BatchNorm(axis_name=None)  # and call it without the vmap\n"
            "If the vmap is inside the model: js.fully_shard(model, mesh=mesh)  # and no units in it",
        )
    consts = list(closed.consts)
    if consts:
        run = lambda *xs: evaluate_jaxpr(jex.ClosedJaxpr(closed.jaxpr, xs[len(xs) - len(consts) :]), xs[: -len(consts)])
        closed = jax.make_jaxpr(run)(*params, *inputs, *map(abstract, consts))
    return Program(closed, len(params), remat=remat), consts


def _warn_of_names(call: Call, jaxpr: Any, remat: Remat, attention_calls: int) -> None:
    """Warns of a policy by names if the program has none of them."""
    names, found = kept_names(remat), set(_names_in(jaxpr)) | ({CONTEXT} if attention_calls else set())
    if remat == ATTENTION_AGAIN and not attention_calls:
        why, do = "everything is kept: it does not call js.kernels.attention", "y = js.kernels.attention(q, k, v)"
    elif names and not found & {*names}:
        why = f"nothing is kept: it names only {', '.join(sorted(found))}" if found else "nothing is kept by name"
        do = f"x = jax.ad_checkpoint.checkpoint_name(x, {names[0]!r})"
    else:
        return
    _compat.warn_user(f"remat={remat!r} matches nothing in {call.where}: {why}. In the model: {do}")


def _names_in(jaxpr: Any) -> Iterator[str]:
    """The names of values, for policies; the results of cuDNN's attention have one by themselves."""
    for e in jaxpr.eqns:
        if e.primitive.name == "name":
            yield e.params["name"]
        elif e.primitive.name == ATTENTION:
            yield CONTEXT
        for inner in jex.jaxprs_in_params(e.params):
            yield from _names_in(inner)


def _is_passed(jaxpr: Any, old: Any, new: Any) -> bool:
    """Whether a variable is another one, passed through calls and loops."""
    while new is not old:
        e = next((e for e in jaxpr.eqns if new in e.outvars), None)
        if e is None:
            return False
        at = next((i for i, inner, v, out in _handed(e, e.outvars.index(new)) if _is_passed(inner, v, out)), None)
        if at is None:
            return False
        new = e.invars[at]
    return True


def _handed(e: Any, k: int) -> Iterator[tuple[int, Any, Any, Any]]:
    """Operands that a result could be: the number of each, the program inside, and both variables there."""
    if e.primitive.name == "scan":
        (inner, _), (n_consts, n_carry) = rules.opened(e.params["jaxpr"]), _compat.scan_arguments(e)
        at = [n_consts + k] if k < n_carry else range(n_consts + n_carry, len(e.invars))
        yield from ((i, inner, inner.invars[i], inner.outvars[k]) for i in at)
    elif e.primitive.name in rules.CALLS:
        inner, _ = rules.program(e)
        at = rules.operands(e, range(len(e.invars)))
        yield from ((i, inner, v, inner.outvars[k]) for i, v in zip(at, inner.invars, strict=True))


class Gradient:
    """A program's derivative with respect to some operands, as a forward and a backward program.

    Forward takes the program's operands, and returns its results, then the residuals that are kept. Backward takes the
    parameters, the kept residuals and the cotangents of the results that have one, and returns a gradient for each
    operand that is differentiated, according to `wrt`.
    """

    def __init__(self, program: Program, wrt: tuple[bool, ...]) -> None:
        self.program, self.wrt = program, wrt
        self.is_float: list[bool] = []
        self._tree: Any = None

        def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
            fixed = others(wrt, operands)

            def f(diff: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = evaluate_jaxpr(program.jaxpr, merged(wrt, diff, fixed))
                self.is_float = [is_float(x) for x in outs]
                return picked(self.is_float, outs), others(self.is_float, outs)

            outs, vjp, rest = jax.vjp(checkpointed(f, program.remat), picked(wrt, operands), has_aux=True)
            residuals, self._tree = jax.tree.flatten(vjp)
            return merged(self.is_float, outs, rest), residuals

        closed = jax.make_jaxpr(forward)(*map(abstract, program.jaxpr.jaxpr.invars))
        jaxpr, num_outs = closed.jaxpr, len(self.is_float)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._residuals = jaxpr.invars[: program.num_params], jaxpr.outvars[num_outs:]
        of_data = dependents(jaxpr, jaxpr.invars[program.num_params :])  # others follow from the parameters alone
        residuals = dict.fromkeys(a for a in self._residuals if isinstance(a, jex.Var))
        self.kept = [a for a in residuals if a in of_data]
        again, needed = [], {a for a in residuals if a not in of_data}
        for e in reversed(jaxpr.eqns):
            if any(v in needed for v in e.outvars):
                again.append(e)
                needed.update(a for a in e.invars if isinstance(a, jex.Var))
        self._again = again[::-1]
        self._outs, self._unused, self._backwards = jaxpr.outvars[:num_outs], [], {}
        self._keep_what_is_needed()
        self.forward = jex.ClosedJaxpr(_compat.with_results(jaxpr, [*self._outs, *self.kept]), closed.consts)

    def forward_keeping(self, which: Sequence[bool]) -> Any:
        """Forward, with some of the parameters among the kept values."""
        results = [*self.forward.jaxpr.outvars, *picked(which, self._params)]
        return jex.ClosedJaxpr(_compat.with_results(self.forward.jaxpr, results), self.forward.consts)

    def backward_given(self, live: tuple[bool, ...], which: Sequence[bool]) -> Any:
        """Backward, which takes some of the parameters from further operands."""
        jaxpr, n, num_given = self.backward(live), len(which), sum(which)

        def backward(*operands: Any) -> list[Any]:
            operands, given = operands[: len(operands) - num_given], operands[len(operands) - num_given :]
            params = merged(which, given, others(which, operands[:n]))
            return evaluate_jaxpr(jaxpr, [*params, *operands[n:]])

        return jax.make_jaxpr(backward)(*map(abstract, [*jaxpr.jaxpr.invars, *picked(which, self._params)]))

    def backward(self, live: tuple[bool, ...]) -> Any:
        """The backward program, given for which results there is a cotangent."""
        if live not in self._backwards:
            self._backwards[live] = self._traced(live)
        return self._backwards[live]

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

    def _traced(self, live: tuple[bool, ...]) -> Any:
        """The backward program that takes all kept values."""

        def backward(params: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            env = self._consts | dict(zip(self._params, params, strict=True)) | dict(zip(self.kept, kept, strict=True))
            env |= {v: _zeros(v) for v in self._unused}  # nothing of a gradient reads them
            leaves, given = _evaluate(self._again, env, self._residuals), iter(cotangents)
            cts = [next(given) if is_live else _zeros(a) for a, is_live in zip(self._outs, live, strict=True)]
            (grads,) = jax.tree.unflatten(self._tree, leaves)(picked(self.is_float, cts))
            return grads

        avals = [list(map(abstract, group)) for group in (self._params, self.kept, picked(live, self._outs))]
        return jax.make_jaxpr(backward)(*avals)


def differentiable(program: Program, plain: Callable, forward: Callable, backward: Callable) -> Callable[..., list]:
    """A program as a function of its operands, whose derivative is run by the caller's functions; `plain` has none.

    Further outputs of forward, besides results and residuals, are passed to backward unchanged. Backward takes these,
    the results that have cotangents, parameters, residuals and cotangents.
    """

    @jax.custom_vjp
    def run(*operands: Any) -> list[Any]:
        return plain(*operands)

    def forward_of(*operands: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values = [x.value for x in operands]
        gradient = program.gradient(tuple(x.perturbed and is_float(x.value) for x in operands))
        outs, more = forward(gradient, values)
        num_outs = len(gradient.is_float)
        return outs[:num_outs], (values[: program.num_params], outs[num_outs:], Static((gradient, more)))

    def backward_of(saved: tuple[Any, ...], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        params, kept, (gradient, more) = saved[0], saved[1], saved[2].value
        live = tuple(not isinstance(ct, SymbolicZero) and is_float(ct) for ct in cotangents)
        grads = iter(backward(gradient, more, live, params, kept, picked(live, cotangents)))
        return tuple(next(grads) if is_wanted else None for is_wanted in gradient.wrt)

    run.defvjp(forward_of, backward_of, symbolic_zeros=True)
    return run


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


def _zeros(a: Any) -> jax.Array:
    return jnp.zeros(a.aval.shape, a.aval.dtype)


# ---- equal layers are equal programs, though Python ran for each: one derivative and one partitioning are enough


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
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(_is_same_parameter, x, y))
    try:
        return bool(x == y) or _compat.is_same_rule(x, y)
    except (TypeError, ValueError):
        return False


def evaluate_jaxpr(closed: Any, operands: Sequence[Any], bind: Callable = _compat.bind) -> list[Any]:
    """Runs a closed jaxpr inline, like `jax.core.eval_jaxpr`, keeping the user's lines and names."""
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))
    return _evaluate(jaxpr.eqns, env, jaxpr.outvars, bind)


def _evaluate(equations: list[Any], env: dict, wanted: Sequence[Any], bind: Callable = _compat.bind) -> list[Any]:
    """Runs equations on the values in `env`; the values of some variables."""
    read = lambda a: a.val if isinstance(a, jex.Literal) else env[a]
    for e in equations:
        with _compat.equation_context(e):
            env.update(zip(e.outvars, bind(e, list(map(read, e.invars))), strict=True))
    return list(map(read, wanted))


def dependents(jaxpr: Any, variables: Sequence[Any]) -> set[Any]:
    """The given variables, those that depend on them, and the results of equations with effects."""
    found = set(variables)
    for e in jaxpr.eqns:
        if e.effects or any(isinstance(a, jex.Var) and a in found for a in e.invars):
            found.update(e.outvars)
    return found


def picked(which: Sequence[bool], xs: Sequence[Any]) -> list[Any]:
    """The values that are marked."""
    return [x for x, is_marked in zip(xs, which, strict=True) if is_marked]


def others(which: Sequence[bool], xs: Sequence[Any]) -> list[Any]:
    """The values that are not marked."""
    return [x for x, is_marked in zip(xs, which, strict=True) if not is_marked]


def merged(which: Sequence[bool], marked: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """Marked and other values in one list again."""
    marked_it, rest_it = iter(marked), iter(rest)
    return [next(marked_it) if is_marked else next(rest_it) for is_marked in which]
