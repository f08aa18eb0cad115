"""`js.per_example`: a declared function is one equation, which runs only on the examples of a shard.

The equation keeps the function, not its program: a kernel's grid depends on the number of examples, so the function
is traced again for those of a shard. Forward and backward are one equation each. Backward traces forward again for its
structure; the residuals that forward kept replace those that it would compute, and the rest of forward is dead code.
A policy of `jax.checkpoint` sees one equation, and the names that the function gave to its results and residuals.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jshard import _compat
from jshard.engine.call import has_gradient
from jshard.engine.program import dependents, merged, others, picked
from jshard.engine.rules import PARTIAL, State
from jshard.errors import CallError

Function = TypeVar("Function", bound=Callable)
Axes = int | None | tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A function of arrays, and how its operands and results are split over the shards."""

    run: Callable[..., Sequence[jax.Array]]  # arrays to arrays, for any number of examples
    ins: tuple[int | None, ...]  # the dim of the examples of each operand; None: the same on all shards
    outs: tuple[State, ...]  # the same for each result; PARTIAL: the sum over the shards is the result
    name: str  # the function's name and place, for messages
    own: tuple[int, ...] = ()  # operands in a private order: this call's forward made them

    def without_rows(self, why: str, *where: str) -> CallError:
        """The error for results whose number of rows differs from the number of examples."""
        return CallError(
            "A result of a function declared with js.per_example does not have a row for each example.",
            where=[self.name, *where],
            why=why,
            do="y = js.per_example(fn)(x).mean(0)  # fn returns a row for each example; combine them outside",
        )


def per_example(fn: Function, in_axes: Axes = 0) -> Function:
    """Declares that a function acts on each example independently; for kernels and other opaque calls.

    Operations that the engine knows are split over the data shards without a declaration. An opaque call (Pallas, FFI,
    your own `custom_partitioning`) is computed for the whole batch on every device, unless it is declared. The function
    is then called with the examples of one shard, forward and backward. Outside a sharded model it is called unchanged.

    Args:
        fn: a function of arrays and static values. All results have the examples as dim 0. It must not close over
            traced values.
        in_axes: as in `jax.vmap`: 0 for an argument whose dim 0 is the examples, None for one that is the same for
            all examples, such as weights; a tuple has one entry per argument. Keyword arrays have axis 0. The
            gradient of an argument with None is summed over the shards.

    Returns:
        The function, declared.

    Raises:
        CallError: on a call whose arrays are not as declared.

    Example:
        >>> normalize = js.per_example(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))  # a kernel of yours
        >>> project = js.per_example(lambda x, w: x @ w, in_axes=(0, None))  # also takes weights
        >>> project(normalize(x), jnp.ones((64, 8))).shape
        (32, 8)
    """
    name = _place(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        arrays, axes, rebuild = _taken_apart(args, kwargs, in_axes, name)
        num_examples = _num_examples(arrays, axes, name)
        trees = []

        def run(*arrays: jax.Array) -> list[jax.Array]:
            args, kwargs = rebuild(arrays)
            found, tree = jax.tree.flatten(fn(*args, **kwargs))
            trees.append(tree)
            return found

        outs = jax.make_jaxpr(run)(*arrays)
        if traced := [jax.typeof(x).str_short() for x in outs.consts if _compat.is_tracer(x)]:
            raise CallError(
                "A function declared with js.per_example closes over a traced array.",
                where=name,
                why=f"{', '.join(traced)}: it is unknown whether a shard has all of it.",
                do="pass it as an argument: js.per_example(fn, in_axes=(0, None))(x, w)",
            )
        body = Body(run, axes, (0,) * len(outs.out_avals), name)
        if wrong := [a.str_short() for a in outs.out_avals if a.ndim == 0 or a.shape[0] != num_examples]:
            raise body.without_rows(f"{', '.join(wrong)} for {num_examples} examples.")
        return jax.tree.unflatten(trees[0], _differentiable(body)(*arrays))

    return call  # type: ignore[return-value]


def sum_of_parts(fn: Callable[[Any, Any], jax.Array], whole: Any, parts: Any) -> jax.Array:
    """A function of arrays that each shard has whole (`whole`) or in part along dim 0; returns the sum over parts."""
    arrays, tree = jax.tree.flatten((whole, parts))
    ins = (None,) * len(jax.tree.leaves(whole)) + (0,) * len(jax.tree.leaves(parts))
    body = Body(lambda *xs: [fn(*jax.tree.unflatten(tree, xs))], ins, (PARTIAL,), _place(fn))
    return _differentiable(body)(*arrays)[0]


per_example_p = jex.Primitive("per_example")
per_example_p.multiple_results = True
_run = lambda *arrays, body: body.run(*arrays)
per_example_p.def_impl(_run)
mlir.register_lowering(per_example_p, mlir.lower_fun(_run, multiple_results=True))


@per_example_p.def_effectful_abstract_eval
def _results(*avals: Any, body: Body) -> tuple[Sequence[Any], Any]:
    program = jax.make_jaxpr(body.run)(*avals)
    return program.out_avals, program.effects  # of a kernel that runs step by step


def _batched(arrays: Sequence[Any], dims: Sequence[int | None], *, body: Body) -> tuple[list, list[int]]:
    """`jax.vmap` adds its dim after all others, so the dims of the examples do not move."""
    moved = [x if d is None else jnp.moveaxis(x, d, -1) for x, d in zip(arrays, dims, strict=True)]
    in_axes = tuple(None if d is None else -1 for d in dims)
    run = lambda *arrays: list(jax.vmap(lambda *row: tuple(body.run(*row)), in_axes, -1)(*arrays))
    found = per_example_p.bind(*moved, body=dataclasses.replace(body, run=run))
    return found, [x.ndim - 1 for x in found]


batching.primitive_batchers[per_example_p] = _batched


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that is not an array, among a custom derivative's residuals."""

    value: Any


def _differentiable(body: Body) -> Callable[..., list[jax.Array]]:
    @jax.custom_vjp
    def call(*arrays: jax.Array) -> list[jax.Array]:
        return per_example_p.bind(*arrays, body=body)

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], Any]:
        derivative = _Derivative(body, list(map(jax.typeof, arrays)))
        outs, kept = derivative.forward(arrays)
        return outs, (kept, Static(derivative))

    def backward(saved: Any, cotangents: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        kept, derivative = saved
        return derivative.value.backward(kept, cotangents)

    call.defvjp(forward, backward)
    return call


class _Derivative:
    """The two equations of a call that is differentiated.

    The residuals of `jax.vjp` that have the examples along one dim are kept; a result that is a residual is reused.
    Backward computes the others again: those that are arguments or constants, or have no such dim.
    """

    def __init__(self, body: Body, avals: Sequence[Any]) -> None:
        self.body, self.avals = body, list(avals)
        self.floats_in = list(map(has_gradient, avals))
        self.num_outs = len(body.outs)
        program = jax.make_jaxpr(lambda *xs: self._vjp(xs)[0])(*avals)
        out_avals = program.out_avals[: self.num_outs]
        self.floats_out = list(map(has_gradient, out_avals))
        residuals = program.jaxpr.outvars[self.num_outs :]
        self.num_residuals = len(residuals)
        self.from_outs, self.own = self._kept(program.jaxpr, residuals)
        kept = [*program.jaxpr.outvars[: self.num_outs], *(residuals[i] for i in self.own)]
        self.names = [_name_of(program.jaxpr, v) for v in kept]
        self.grad_states = tuple(PARTIAL if d is None else d for d in picked(self.floats_in, body.ins))
        self.own_avals = {i: residuals[i].aval for i in self.own}
        float_outs = picked(self.floats_out, out_avals)
        out_residuals = [out_avals[k] for k in self.from_outs.values()]
        back = jax.make_jaxpr(self._back)(self.avals, out_residuals, list(self.own_avals.values()), float_outs)
        _, used = _compat.without_dead_code(back)
        self.used = [u or jnp.issubdtype(a.dtype, jax.dtypes.extended) for u, a in zip(used, avals, strict=False)]

    def forward(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Results, and the values for backward: operands, results, residuals."""

        def run(*xs: jax.Array) -> list[jax.Array]:
            found, _ = self._vjp(xs)
            outs, residuals = found[: self.num_outs], found[self.num_outs :]
            others_of = lambda i, x: (*x.shape[: self.own[i]], *x.shape[self.own[i] + 1 :])
            self._check(residuals, lambda i, x: others_of(i, x) == others_of(i, self.own_avals[i]))
            return [*outs, *(residuals[i] for i in self.own)]

        states = (*self.body.outs, *self.own.values())
        found = _differentiable(dataclasses.replace(self.body, run=run, outs=states))(*arrays)
        found = [x if name is None else checkpoint_name(x, name) for x, name in zip(found, self.names, strict=True)]
        outs, own = found[: self.num_outs], found[self.num_outs :]
        return outs, [*picked(self.used, arrays), *(outs[k] for k in self.from_outs.values()), *own]

    def backward(self, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
        """Gradients of the operands; None for operands without one."""
        of_outs = [state if isinstance(state, int) else None for state in self.body.outs]
        num_args, start = sum(self.used), sum(self.used) + len(self.from_outs)
        ins = (
            *picked(self.used, self.body.ins),
            *(of_outs[k] for k in self.from_outs.values()),
            *self.own.values(),
            *picked(self.floats_out, of_outs),
        )

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            given, size = iter(operands[:num_args]), operands[place].shape[along]
            shape = lambda a, d: tuple(n * size // whole if i == d else n for i, n in enumerate(a.shape))
            args = [  # those that backward does not use are zeros that nothing reads
                next(given) if used else jnp.zeros(shape(a, d), a.dtype)
                for used, a, d in zip(self.used, self.avals, self.body.ins, strict=True)
            ]
            from_outs, own = operands[num_args:start], operands[start : len(kept)]
            arrays = args, list(from_outs), list(own), list(operands[len(kept) :])
            program, used = _compat.without_dead_code(jax.make_jaxpr(self._back)(*arrays))
            return jex.jaxpr_as_fun(program)(*picked(used, jax.tree.leaves(arrays)))

        cts = picked(self.floats_out, cotangents)
        place, along = next((i, d) for i, d in enumerate(ins) if d is not None)
        whole = (*kept, *cts)[place].shape[along]
        name, own = f"the backward of {self.body.name}", tuple(range(start, len(kept)))
        grads = iter(_differentiable(Body(run, ins, self.grad_states, name, own))(*kept, *cts))
        return tuple(next(grads) if has_gradient else None for has_gradient in self.floats_in)

    def _vjp(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Results and residuals, and the structure of these: traced, so that their order is always the same."""
        trees: list[Any] = []

        def trace(*arrays: jax.Array) -> list[jax.Array]:
            fixed = others(self.floats_in, arrays)

            def run(*floats: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
                outs = self.body.run(*merged(self.floats_in, floats, fixed))
                return picked(list(map(has_gradient, outs)), outs), list(outs)

            _, vjp, outs = jax.vjp(run, *picked(self.floats_in, arrays), has_aux=True)
            residuals, tree = jax.tree.flatten(vjp)
            trees.append(tree)
            return [*outs, *residuals]

        return jex.jaxpr_as_fun(jax.make_jaxpr(trace)(*arrays))(*arrays), trees[0]

    def _back(self, args: Sequence, from_outs: Sequence, own: Sequence, cotangents: Sequence) -> Sequence[jax.Array]:
        found, tree = self._vjp(args)
        residuals = found[self.num_outs :]
        kept = dict(zip((*self.from_outs, *self.own), (*from_outs, *own), strict=True))
        self._check(residuals, lambda i, x: i not in kept or kept[i].shape == x.shape)
        return jax.tree.unflatten(tree, [kept.get(i, x) for i, x in enumerate(residuals)])(list(cotangents))

    def _check(self, residuals: Sequence[jax.Array], fits: Callable[[int, jax.Array], bool]) -> None:
        """Raises if the residuals of fewer examples differ from those of the whole batch."""
        wrong = [x.shape for i, x in enumerate(residuals) if i in self.own and not fits(i, x)]
        if len(residuals) != self.num_residuals or wrong:
            raise CallError(
                "A function declared with js.per_example keeps different residuals for fewer examples.",
                where=self.body.name,
                why=f"arrays kept: {self.num_residuals} for the whole batch, {len(residuals)} for the examples of a "
                f"shard, {len(wrong)} of these with another shape.",
                do="js.per_example(jax.checkpoint(fn))  # keeps none: backward recomputes them",
            )

    def _kept(self, jaxpr: Any, residuals: Sequence[Any]) -> tuple[dict[int, int], dict[int, int]]:
        """Residuals that are results, and those that forward keeps with the dim of their examples."""
        outs = {v: k for k, v in reversed(list(enumerate(jaxpr.outvars[: self.num_outs]))) if isinstance(v, jex.Var)}
        of_data = dependents(jaxpr, jaxpr.invars)
        factor, fewer = self._fewer([a.aval for a in residuals])
        from_outs, own, seen = {}, {}, set()
        for i, atom in enumerate(residuals):
            if isinstance(atom, jex.Literal) or atom in jaxpr.invars or atom not in of_data or atom in seen:
                continue
            differ = [d for d, (n, m) in enumerate(zip(atom.aval.shape, fewer[i], strict=True)) if n != m]
            if atom in outs and isinstance(self.body.outs[outs[atom]], int):
                from_outs[i] = outs[atom]
            elif len(differ) == 1 and fewer[i][differ[0]] * factor == atom.aval.shape[differ[0]]:
                own[i] = differ[0]
            else:
                continue
            seen.add(atom)
        return from_outs, own

    def _fewer(self, residuals: Sequence[Any]) -> tuple[int, list[tuple[int, ...]]]:
        """The shapes of the residuals of a part of the examples: one of the smallest number that they divide by.

        The same shapes where there is one example, or where the residuals are not the same ones.
        """
        same = [a.shape for a in residuals]
        num = next(a.shape[d] for a, d in zip(self.avals, self.body.ins, strict=True) if d is not None)
        factor = next((k for k in range(2, num + 1) if num % k == 0), 1)
        if factor == 1:
            return 1, same
        shape = lambda a, d: tuple(n // factor if i == d else n for i, n in enumerate(a.shape))
        part = lambda a, d: jax.ShapeDtypeStruct(shape(a, d), a.dtype)
        try:
            program = jax.make_jaxpr(lambda *xs: self._vjp(xs)[0])(*map(part, self.avals, self.body.ins))
        except Exception:  # a function that cannot run on fewer examples raises later, if it must
            return 1, same
        found = [a.shape for a in program.out_avals[self.num_outs :]]
        return (factor, found) if list(map(len, found)) == list(map(len, same)) else (1, same)


def _name_of(jaxpr: Any, atom: Any) -> str | None:
    """The name that `checkpoint_name` gave to a result of a program, in it or in a program that it holds."""
    eqn = None if isinstance(atom, jex.Literal) else next((e for e in jaxpr.eqns if atom in e.outvars), None)
    if eqn is None or eqn.primitive.name == "name":
        return eqn and eqn.params["name"]
    inside = (i for i in jex.jaxprs_in_params(eqn.params) if len(i.outvars) == len(eqn.outvars))
    names = (_name_of(inner, inner.outvars[eqn.outvars.index(atom)]) for inner in inside)
    return next(filter(None, names), None)


def _taken_apart(args: tuple, kwargs: dict, in_axes: Axes, name: str) -> tuple[list, tuple, Callable]:
    """Arrays, the dim of the examples of each, and how to put other arrays in their place."""
    each = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    if len(each) != len(args) or any(axis not in (0, None) for axis in each):
        raise CallError(
            "js.per_example cannot match in_axes with the arguments.",
            where=name,
            why=f"in_axes={in_axes!r} for {len(args)} arguments; each must be 0 or None.",
            do=f"js.per_example(fn, in_axes={(0,) * len(args)})",
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    axes = [axis for axis, arg in zip(each, args, strict=True) for _ in jax.tree.leaves(arg)]
    axes += [0] * (len(leaves) - len(axes))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    static = others(is_array, leaves)
    rebuild = lambda arrays: jax.tree.unflatten(tree, merged(is_array, arrays, static))
    return picked(is_array, leaves), tuple(picked(is_array, axes)), rebuild


def _num_examples(arrays: Sequence[Any], axes: Sequence[int | None], name: str) -> int:
    """The number of examples; raises if the arrays disagree, and for one key for all examples."""
    along = [x.shape[0] if x.ndim else None for x, d in zip(arrays, axes, strict=True) if d == 0]
    if not along or len(set(along)) > 1 or None in along:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        guess = tuple(0 if x.ndim and x.shape[0] == next(iter(along), None) else None for x in arrays)
        raise CallError(
            "The arguments of a function declared with js.per_example do not have the same number of examples.",
            where=name,
            why=f"dim 0 of each array along in_axes 0 are the examples; these are {shapes}.",
            do=f"js.per_example(fn, in_axes={guess})  # None for arguments shared by all examples",
        )
    for x, d in zip(arrays, axes, strict=True):
        if d is None and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise CallError(
                "A function declared with js.per_example got one random key for all examples.",
                where=name,
                why="every data shard would draw the same numbers, which differ from those of one device.",
                do="keys = jax.random.split(key, x.shape[0])  # and in_axes 0 for them",
            )
    return next(n for n in along if n is not None)


def _place(fn: Callable) -> str:
    """The name of a function, with its file and line."""
    found = inspect.unwrap(fn)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    name = getattr(found, "__qualname__", type(found).__name__)
    code = getattr(found, "__code__", None)
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else name
