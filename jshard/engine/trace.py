"""A call as programs: traced once in global view, differentiated there.

The user's method runs once, on abstract arrays, and becomes a `Program`. Its derivatives come from that program, never
from the Python again: `Gradient` holds a forward with residuals and a backward. What depends on nothing but parameters
and constants is no residual; backward computes it again from the parameters, which is what makes ZeRO-3 of any remat
policy.
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
from jax.extend import core as jex

from jshard import _compat
from jshard._text import ATTENTION, CONTEXT
from jshard.engine.call import is_float, refuse_written
from jshard.engine.context import attention_again
from jshard.engine.rules import calls
from jshard.errors import CallError
from jshard.plans.placement import Placement
from jshard.plans.policies import ATTENTION_AGAIN, KEPT_PRODUCT, NONE, SELECTIVE, Remat, checkpoint_policy, kept_names


class Call(Protocol):
    """A call into an annotated module, taken apart into arrays by the adapter of its kind of module.

    Attributes:
        where: class and method, for messages.
        params: the parameters under the module as they are stored, tied ones once.
        placements: of each parameter; None for one that the annotation never saw.
        owners: of each parameter: whether this module gathers it, a unit inside, or one around.
        names: path of each parameter from the module.
        inputs: all other arrays: state, then arguments.
        num_state: how many of the inputs are state.
        key: equal for calls that run the same program on arrays of the same types.
        result: what `finish` needs besides arrays; set by `body`.
        written: places of parameters that the method wrote, set by `body`. Their values before, then after, are the
            last of the state: they must be the same, as `nnx.remat` writes back whatever it was given.
    """

    where: str
    params: list[Any]
    placements: list[Placement | None]
    owners: list[str]
    names: list[str]
    inputs: list[Any]
    num_state: int
    result: Any
    written: Sequence[str]

    @property
    def key(self) -> Hashable:
        """See above."""
        ...

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The parameters, or copies of them, on their way into the region; raises if they may not be differentiated."""
        ...

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the method on a plain copy of the module: arrays of its result, and of the state it changed or made."""
        ...

    def finish(self, outs: Sequence[Any], result: Any) -> Any:
        """Writes the state back to the caller's objects, and returns what the method returned."""
        ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Something that is no array, among a custom derivative's residuals."""

    value: Any


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, or of a variable of a jaxpr."""
    aval: Any = x.aval if isinstance(x, (jex.Var, jex.Literal)) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class Program:
    """A traced function of operands: parameters, then the rest.

    Args:
        jaxpr: the program, closed.
        num_params: how many of the operands are parameters.
        remat: for its gradient, as a unit has it.
    """

    def __init__(self, jaxpr: Any, num_params: int, *, remat: Remat = NONE) -> None:
        self.jaxpr, self.num_params, self.remat = jaxpr, num_params, remat
        self.gradient = functools.cache(functools.partial(Gradient, self))

    def __call__(self, *operands: Any) -> list[Any]:
        """Evaluates the program where it is called."""
        return evaluate_jaxpr(self.jaxpr, operands)


def trace(
    call: Call,
    body: Callable[[list[Any], list[Any]], list[Any]],
    params: Sequence[Any],
    inputs: Sequence[Any],
    *,
    remat: Remat,
) -> tuple[Program, list[Any]]:
    """Traces a call's body as a function of parameters and inputs.

    Returns:
        The program, and the constants to append to its operands.
    """
    with attention_again(remat == ATTENTION_AGAIN) as attention_calls:
        closed = jax.make_jaxpr(body)(params, inputs)
    _warn_of_names(call, closed.jaxpr, remat, attention_calls())
    closed = _without_written(closed, call.written)
    _refuse_axis_names(call, closed)
    consts = list(closed.consts)
    if consts:
        run = lambda *xs: evaluate_jaxpr(jex.ClosedJaxpr(closed.jaxpr, xs[len(xs) - len(consts) :]), xs[: -len(consts)])
        closed = jax.make_jaxpr(run)(*params, *inputs, *map(abstract, consts))
    return Program(closed, len(params), remat=remat), consts


def _warn_of_names(call: Call, jaxpr: Any, remat: Remat, attention_calls: int) -> None:
    """Warns of a policy by names of which the program has none."""
    names, found = kept_names(remat), set(_names_in(jaxpr))
    if remat == ATTENTION_AGAIN and not attention_calls:
        why, do = "all is kept, as it does not call js.kernels.attention", "y = js.kernels.attention(q, k, v)"
    elif names and not found & {*names}:
        why = f"nothing is kept, as it names only {', '.join(sorted(found))}" if found else "nothing is kept by name"
        do = f"x = jax.ad_checkpoint.checkpoint_name(x, {names[0]!r})"
    else:
        return
    _compat.warn_user(f"remat={remat!r} finds nothing of its kind in {call.where}: {why}. In the model: {do}")


def _names_in(jaxpr: Any) -> Iterator[str]:
    """The names of values, for policies; the results of cuDNN's attention have one by themselves."""
    for e in jaxpr.eqns:
        if e.primitive.name == "name":
            yield e.params["name"]
        elif e.primitive.name == ATTENTION:
            yield CONTEXT
        for inner in jex.jaxprs_in_params(e.params):
            yield from _names_in(inner)


def _refuse_axis_names(call: Call, closed: Any) -> None:
    """Raises for collectives over an axis of a vmap around: backward is traced where that axis is no more."""
    if names := _compat.axis_names(closed.jaxpr):
        raise CallError(
            "The model has collectives over an axis that a vmap or pmap around it names.",
            where=f"{call.where}: {', '.join(map(repr, names))}",
            why="an annotated model is called on the whole batch: its means are those of the batch already.",
            do="call it without the vmap, and without the name: nn.BatchNorm(axis_name=None).\n"
            "Where the vmap is inside of the model: js.fully_shard(model, mesh=mesh)  # and no units in it",
        )


def _without_written(closed: Any, places: Sequence[str]) -> Any:
    """The program without parameters that the method wrote, which must have been passed through."""
    jaxpr, n = closed.jaxpr, len(places)
    if not n:
        return closed
    outs = jaxpr.outvars
    pairs = zip(places, outs[-2 * n : -n], outs[-n:], strict=True)
    refuse_written([place for place, old, new in pairs if not _is_passed(jaxpr, old, new)])
    return jex.ClosedJaxpr(_compat.with_results(jaxpr, outs[: -2 * n]), closed.consts)


def _is_passed(jaxpr: Any, old: Any, new: Any) -> bool:
    """Whether a variable is another one, handed through calls and loops."""
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
    """Operands that a result could be: the number of each, the program inside, and what the two are there."""
    if e.primitive.name == "scan":
        (inner, _), (n_consts, n_carry) = calls.opened(e.params["jaxpr"]), _compat.scan_arguments(e)
        at = [n_consts + k] if k < n_carry else range(n_consts + n_carry, len(e.invars))
        yield from ((i, inner, inner.invars[i], inner.outvars[k]) for i in at)
    elif e.primitive.name in calls.CALLS:
        inner, _ = calls.program(e)
        at = calls.operands(e, range(len(e.invars)))
        yield from ((i, inner, v, inner.outvars[k]) for i, v in zip(at, inner.invars, strict=True))


class Gradient:
    """A program's derivative with respect to some operands, as a forward and a backward program.

    Forward takes the program's operands, and returns its results, then the residuals that are kept. Backward takes the
    parameters, the kept residuals and the cotangents of the results that have one, and returns a gradient for each
    operand asked for.

    Args:
        program: the program.
        wrt: for each operand, whether it is differentiated.
    """

    def __init__(self, program: Program, wrt: tuple[bool, ...]) -> None:
        self.program, self.wrt = program, wrt
        self.is_float: list[bool] = []
        self._tree: Any = None

        def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
            fixed = others(wrt, operands)

            def f(diff: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = program(*merged(wrt, diff, fixed))
                self.is_float = [is_float(x) for x in outs]
                return picked(self.is_float, outs), others(self.is_float, outs)

            outs, vjp, rest = jax.vjp(checkpointed(f, program.remat), picked(wrt, operands), has_aux=True)
            residuals, self._tree = jax.tree.flatten(vjp)
            return merged(self.is_float, outs, rest), residuals

        closed = jax.make_jaxpr(forward)(*map(abstract, program.jaxpr.jaxpr.invars))
        jaxpr, num_outs = closed.jaxpr, len(self.is_float)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._params, self._residuals = jaxpr.invars[: program.num_params], jaxpr.outvars[num_outs:]
        known = self._known(jaxpr)
        again = {a for a in self._residuals if isinstance(a, jex.Var) and a in known}
        self.kept = list(dict.fromkeys(a for a in self._residuals if isinstance(a, jex.Var) and a not in known))
        self._again, self._outs = _slice(jaxpr.eqns, again), jaxpr.outvars[:num_outs]
        self._unused: list[Any] = []
        self._backwards = self._needed_alone()
        self.forward = jex.ClosedJaxpr(_compat.with_results(jaxpr, [*self._outs, *self.kept]), closed.consts)

    def _known(self, jaxpr: Any) -> set[Any]:
        """What follows from parameters and constants alone."""
        known = {*jaxpr.constvars, *self._params}
        for e in jaxpr.eqns:
            if all(isinstance(a, jex.Literal) or a in known for a in e.invars) and not e.effects:
                known.update(e.outvars)
        return known

    def forward_keeping(self, which: Sequence[bool]) -> Any:
        """Forward, with some of the parameters among what is kept."""
        jaxpr = self.forward.jaxpr
        return jex.ClosedJaxpr(
            _compat.with_results(jaxpr, [*jaxpr.outvars, *picked(which, self._params)]), self.forward.consts
        )

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

    def _needed_alone(self) -> dict[tuple[bool, ...], Any]:
        """Of what autodiff keeps, keeps what a gradient needs; the backward program that has a cotangent of each float.

        Autodiff also keeps what a stopped gradient would need, such as the scores whose maximum a softmax subtracts.
        """
        live, num_params, end = tuple(self.is_float), self.program.num_params, self.program.num_params + len(self.kept)
        closed = self._traced(live)
        may_go = lambda i, v: num_params <= i < end and not jnp.issubdtype(v.dtype, jax.dtypes.extended)
        closed, used = _compat.without_dead_code(closed, [not may_go(i, v) for i, v in enumerate(closed.in_avals)])
        self._unused = others(used[num_params:end], self.kept)
        self.kept = picked(used[num_params:end], self.kept)
        return {live: closed}

    def _traced(self, live: tuple[bool, ...]) -> Any:
        """The backward program that takes all that is kept."""

        def backward(params: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            env = self._consts | dict(zip(self._params, params, strict=True)) | dict(zip(self.kept, kept, strict=True))
            env |= {v: _zeros(v) for v in self._unused}  # nothing of a gradient reads them
            leaves, given = evaluate(self._again, env, self._residuals), iter(cotangents)
            cts = [next(given) if is_live else _zeros(a) for a, is_live in zip(self._outs, live, strict=True)]
            (grads,) = jax.tree.unflatten(self._tree, leaves)(picked(self.is_float, cts))
            return grads

        avals = [list(map(abstract, group)) for group in (self._params, self.kept, picked(live, self._outs))]
        return jax.make_jaxpr(backward)(*avals)


def checkpointed(f: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A function of which backward keeps what a policy says."""
    if remat in (NONE, ATTENTION_AGAIN):  # attention is under a checkpoint of its own
        return f
    return jax.checkpoint(_naming_products(f) if remat == SELECTIVE else f, policy=checkpoint_policy(remat))


def _naming_products(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a name for the result of every second product with weights, the first one's to begin with."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = _with_names(closed, jax.tree.leaves(args), itertools.cycle([True, False]))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _with_names(closed: Any, operands: Sequence[Any], turns: Iterator[bool]) -> list[Any]:
    def name(e: Any, xs: list[Any]) -> list[Any]:
        if e.primitive.name == "jit":
            return _with_names(e.params["jaxpr"], xs, turns)
        found = _compat.bind(e, xs)
        if e.primitive.name != "dot_general" or any(e.params["dimension_numbers"][1]) or not next(turns):
            return found
        return [checkpoint_name(x, KEPT_PRODUCT) for x in found]

    return evaluate_jaxpr(closed, operands, name)


def _zeros(a: Any) -> jax.Array:
    return jnp.zeros(a.aval.shape, a.aval.dtype)


def _slice(equations: Sequence[Any], needed: set[Any]) -> list[Any]:
    """The equations that some variables need."""
    needed, found = set(needed), []
    for e in reversed(equations):
        if any(v in needed for v in e.outvars):
            found.append(e)
            needed.update(a for a in e.invars if isinstance(a, jex.Var))
    return found[::-1]


# Equal layers are equal programs, though their Python ran for each: one derivative and one partitioning will do.


def without_key_data(closed: Any) -> tuple[Any, list[Any]]:
    """A program with what it folds into its keys as further operands, and those numbers.

    Linen folds the path of a module into its keys: without the numbers, layers that differ in nothing else are equal.
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
    (a, consts), (b, others) = map(calls.opened, (one, other))
    if a is b and consts is others:
        return True
    same: dict[Any, Any] = {}

    def bind(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        same.update(zip(mine, theirs, strict=False))
        return len(mine) == len(theirs) and all(x.aval == y.aval for x, y in zip(mine, theirs, strict=True))

    def read(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        return len(mine) == len(theirs) and all(
            _is_same_literal(x, y) if isinstance(x, jex.Literal) else same.get(x) is y
            for x, y in zip(mine, theirs, strict=True)
        )

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


def _is_same_literal(x: Any, y: Any) -> bool:
    bits = lambda literal: np.asarray(literal.val).tobytes()
    return isinstance(y, jex.Literal) and x.aval == y.aval and bits(x) == bits(y)


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


Bind = Callable[[Any, list[Any]], list[Any]]
"""How an equation runs on values."""


def evaluate_jaxpr(closed: Any, operands: Sequence[Any], bind: Bind = _compat.bind) -> list[Any]:
    """Runs a closed jaxpr where it is called, as `jax.core.eval_jaxpr`, keeping the user's lines and names."""
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))
    return evaluate(jaxpr.eqns, env, jaxpr.outvars, bind)


def evaluate(
    equations: Sequence[Any], env: dict[Any, Any], wanted: Sequence[Any], bind: Bind = _compat.bind
) -> list[Any]:
    """Runs equations on the values in `env`; the values of some variables."""
    read = lambda a: a.val if isinstance(a, jex.Literal) else env[a]
    for e in equations:
        with _compat.equation_context(e):
            env.update(zip(e.outvars, bind(e, list(map(read, e.invars))), strict=True))
    return list(map(read, wanted))


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
