"""`check`: compares a call into an annotated model with the result on one device, by running it both ways."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.engine.border import arrays_of, opened
from jshard.engine.call import is_array, is_float
from jshard.engine.context import global_view, without_update
from jshard.errors import CallError
from jshard.linen.annotation import annotation_of
from jshard.plans.memories import key_texts
from jshard.plans.plan import root_forgotten
from jshard.plans.units import dotted, plain_class, unit_of

Pairs = dict[str, tuple[Any, Any]]
"""An array of the sharded region and its counterpart in global view, by name."""

_Run = Callable[[Any, Any, tuple, dict[str, Any]], tuple[Any, Any]]
"""From parameters, state, arguments and arrays given by keyword: outputs and state."""


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Differences between the sharded region and global view, relative to the largest element of each array.

    If all elements of an array are below a hundredth of the largest of its kind, its difference is relative to that.
    """

    outputs: dict[str, float]  # by path of the output
    gradients: dict[str, float]  # by path of the parameter
    state: dict[str, float]  # by path of the variable that the call changed
    tolerance: float  # the allowed difference

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        return max(self.named.values(), default=0.0)

    @property
    def named(self) -> dict[str, float]:
        """All differences, by the name of the output, gradient or state."""
        heads = {"output ": self.outputs, "gradient of ": self.gradients, "state ": self.state}
        return {f"{head}{name}": size for head, found in heads.items() for name, size in found.items()}

    def __repr__(self) -> str:
        place = max(self.named, key=self.named.__getitem__, default="none")
        counts = f"{len(self.outputs)} outputs, {len(self.gradients)} gradients and {len(self.state)} changed states"
        return (
            f"check: {counts} agree with global view; worst {self.worst:.1e} of {self.tolerance:.0e} allowed ({place})"
        )


def check(
    model: Any,
    *args: Any,
    loss_fn: Callable[..., Any] | None = None,
    tolerance: float = 1e-4,
    **kwargs: Any,
) -> CheckReport:
    """Compares a call into an annotated model with the same call in global view: outputs, gradients, changed state.

    Random numbers are the same in both. The model is not changed.

    Args:
        model: the annotated model, nnx or Linen.
        *args: arguments of the call, or of `loss_fn` after the model. For a Linen model the variables are first:
            `js.check(model, variables, x)` checks `model.apply(variables, x)`, and with `mutable=["batch_stats"]`
            also the state that it returns.
        loss_fn: `loss_fn(model, *args, **kwargs)`; the model's own `__call__` by default. If it returns a
            scalar, that is differentiated; otherwise a fixed weighted sum of the outputs. For a Linen model:
            `loss_fn(variables, ...)`.
        tolerance: largest allowed difference, relative to the largest element of an array.
        **kwargs: keyword arguments of the call.

    Returns:
        The differences.

    Raises:
        CallError: a difference is larger than `tolerance`.

    Example:
        >>> report = js.check(model, x)
    """
    static = {k: v for k, v in kwargs.items() if not is_array(v)}
    arrays = {k: v for k, v in kwargs.items() if is_array(v)}
    if annotation_of(model) is not None:
        where = f"{type(model).__name__}: {getattr(loss_fn, '__name__', 'apply')}"
        return _compared(*_linen_call(model, args, static, loss_fn), arrays, tolerance, where)
    if unit_of(model) is None:
        raise root_forgotten(model)
    call = loss_fn or (lambda model, *args, **kwargs: model(*args, **kwargs))
    graphdef, params, state = nnx.split(model, nnx.Param, ...)

    def run(params: Any, state: Any, args: tuple, arrays: dict[str, Any]) -> tuple[Any, Any]:
        live = nnx.merge(graphdef, params, state, copy=True)
        out = call(live, *args, **arrays, **static)
        return out, nnx.state(live, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))

    where = f"{plain_class(model).__name__}: {getattr(loss_fn, '__name__', '__call__')}"
    return _compared(run, params, state, args, arrays, tolerance, where)


def _linen_call(
    model: Any, args: tuple, static: dict[str, Any], loss_fn: Callable[..., Any] | None
) -> tuple[_Run, Any, Any, tuple]:
    """The call of a Linen model, whose first argument is the variables: parameters, state, other arguments."""
    if not args or not isinstance(args[0], Mapping) or "params" not in args[0]:
        raise CallError(
            "The variables of the Linen model are missing.",
            where=f"check({type(model).__name__}, ...)",
            why="a Linen module holds no parameters; pass the variables, with 'params', as its first argument.",
            do="js.check(model, variables, x)",
        )
    variables, *rest = args
    call = loss_fn or model.apply
    returns_state = loss_fn is None and bool(static.get("mutable"))

    def run(params: Any, state: Any, rest: tuple, arrays: dict[str, Any]) -> tuple[Any, Any]:
        out = call({**state, "params": params}, *rest, **arrays, **static)
        return out if returns_state else (out, {})

    return run, variables["params"], {k: v for k, v in variables.items() if k != "params"}, tuple(rest)


def _compared(
    run: _Run, params: Any, state: Any, args: tuple, arrays: dict[str, Any], tolerance: float, where: str
) -> CheckReport:
    """Runs a call both ways; raises if a difference is too large."""
    values, together = opened(args)

    @jax.jit
    def program(params: Any, state: Any, values: list[Any], arrays: dict[str, Any]) -> tuple[Any, Any, Any]:
        def scalar(params: Any) -> tuple[jax.Array, tuple]:
            out, after = run(params, state, together(values), arrays)
            found = arrays_of(out)
            return _weighted_sum(found), (found, after)

        (_, (found, after)), grads = jax.value_and_grad(scalar, has_aux=True)(params)
        return found, grads, after

    with without_update():
        found, grads, after = program(params, state, values, arrays)
    with global_view(), without_update():
        wanted, wanted_grads, wanted_after = program(params, state, values, arrays)
    outputs = {name or "output": (x, wanted[name]) for name, x in found.items()}
    flat, wanted_flat = _flat(grads), _flat(wanted_grads)
    gradients = {name: (x, wanted_flat[name]) for name, x in flat.items()}
    changed = _changed(*map(_arrays, (after, wanted_after, state)))
    of_state = _differences(changed, floor=1e-6)  # a count and a mean are on unrelated scales
    report = CheckReport(_differences(outputs), _differences(gradients), of_state, tolerance)
    _raise_if_apart(report, where)
    return report


def _arrays(state: Any) -> dict[str, Any]:
    """The arrays of a state by path, without random keys."""
    if isinstance(state, nnx.State):
        state = nnx.to_pure_dict(state)
    found = {"/".join(key_texts(path)): x for path, x in jax.tree.leaves_with_path(state)}
    return {k: x for k, x in found.items() if is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def _changed(found: dict[str, Any], wanted: dict[str, Any], before: dict[str, Any]) -> Pairs:
    """The state that either call changed; None where one call lacks it."""
    pairs = {k: (found.get(k), wanted.get(k)) for k in dict.fromkeys([*wanted, *found])}
    same = lambda k, pair: k in before and all(x is not None and np.array_equal(x, before[k]) for x in pair)
    return {k: pair for k, pair in pairs.items() if not same(k, pair)}


def _weighted_sum(outputs: dict[str, jax.Array]) -> jax.Array:
    """A scalar with a different weight for every element; a scalar output is returned unchanged."""
    floats = [x for x in outputs.values() if is_float(x)]
    if len(floats) == 1 and floats[0].ndim == 0:
        return floats[0]
    weights = [jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in floats]
    return sum((jnp.vdot(w, x.astype(jnp.float32)) for w, x in zip(weights, floats, strict=True)), jnp.zeros(()))


def _flat(grads: Any) -> dict[str, jax.Array]:
    """Gradients by the path of their parameter."""
    if isinstance(grads, nnx.State):
        return {dotted(path): v.get_raw_value() for path, v in nnx.to_flat_state(grads)}
    return {"/".join(key_texts(path)): x for path, x in jax.tree.leaves_with_path(grads)}


def _differences(pairs: Pairs, *, floor: float = 1e-2) -> dict[str, float]:
    """Largest difference of each pair, relative to its largest element; nan if shapes or structure differ.

    The reference is at least `floor` times the largest element of all pairs.
    """
    lacking = {k: float("nan") for k, pair in pairs.items() if any(x is None for x in pair)}
    both = {k: pair for k, pair in pairs.items() if k not in lacking and pair[0].size}
    host = {k: (np.asarray(x, np.float64), np.asarray(y, np.float64)) for k, (x, y) in both.items()}
    scale = {k: float(np.abs(y).max()) for k, (_, y) in host.items()}
    least = max(floor * max(scale.values(), default=0.0), float(np.finfo(np.float32).tiny))
    apart = lambda x, y: float(np.abs(x - y).max()) if x.shape == y.shape else float("nan")
    return {k: apart(x, y) / max(scale[k], least) for k, (x, y) in host.items()} | lacking


def _raise_if_apart(report: CheckReport, where: str) -> None:
    every = report.named
    bad = sorted((k for k in every if not every[k] <= report.tolerance), key=lambda k: -every[k])
    if bad:
        raise CallError(
            "The sharded region and global view do not agree.",
            where=[f"{where}: {k}  {every[k]:.1e}" for k in bad],
            why=f"differences relative to the largest element; {report.tolerance:.0e} is allowed. In bfloat16, or near"
            " a norm of few values, rounding can be that large. A function declared with js.per_example that"
            " combines examples also causes such differences.",
            do="js.check(model, x, tolerance=1e-2)  # for bfloat16\n"
            "with js.global_view(): step(model, batch)  # computes the numbers of one device",
        )
