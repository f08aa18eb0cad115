"""`check`: compares a call into an annotated model with the result on one device, by running it both ways."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.api.gradients import value_and_grad
from jshard.engine.accumulate import microbatches
from jshard.engine.border import arrays_of, opened
from jshard.engine.context import global_view, without_update
from jshard.engine.values import has_gradient, is_array
from jshard.engine.weighted import WeightedMean, mean_of
from jshard.errors import CallError
from jshard.linen.annotation import annotation_for, annotation_of
from jshard.plans.memories import key_texts
from jshard.plans.plan import root_forgotten
from jshard.plans.policies import wide_dtype
from jshard.plans.units import Unit, is_key, plain_class, unit_of, units_in

Pairs = dict[str, tuple[Any, Any]]
"""An array of the sharded region and its counterpart in global view, by name."""

Arrays = dict[str, Any]


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
    accumulate: int = 1,
    sync: str = "each",
    tolerance: float = 1e-4,
    **kwargs: Any,
) -> CheckReport:
    """Compares a call into an annotated model with the same call in global view: outputs, gradients, changed state.

    Random numbers are the same in both. The model is not changed. Gradients are compared for parameters that have
    one: real and complex floats.

    Args:
        model: the annotated model, nnx or Linen.
        *args: arguments of the call, or of `loss_fn` after the model. For a Linen model the variables are first:
            `js.check(model, variables, x)` checks `model.apply(variables, x)`, and with `mutable=["batch_stats"]`
            also the state that it returns.
        loss_fn: `loss_fn(model, *args, **kwargs)`; the model's own `__call__` by default. If it returns a
            scalar, that is differentiated; otherwise a fixed weighted sum of the outputs. For a Linen model:
            `loss_fn(variables, ...)`.
        accumulate: number of microbatches. Above 1, `js.value_and_grad` with these microbatches is compared with
            means over the same ones, each in global view, summed in double precision; `args` are the batch.
        sync: as in `js.value_and_grad`.
        tolerance: largest allowed difference, relative to the largest element of an array.
        **kwargs: keyword arguments of the call.

    Returns:
        The differences.

    Raises:
        CallError: a difference is larger than `tolerance`; or a dtype differs, and no policy of the model asks for
            that.

    Example:
        >>> report = js.check(model, x)
    """
    if annotation_of(model) is not None:
        call = _linen_call(model, args, kwargs, loss_fn)
    elif unit_of(model) is not None:
        call = _nnx_call(model, args, kwargs, loss_fn)
    else:
        raise root_forgotten(model)
    return _compared(call, tolerance) if accumulate == 1 else _compared_over(call, accumulate, sync, tolerance)


@dataclasses.dataclass(frozen=True)
class _CheckedCall:
    """A call as a function of arrays, and the arrays that it is called with.

    Attributes:
        run: takes parameters, state, the positional arguments, and arrays given by keyword; returns the result, and
            the state after the call.
        accumulated: `js.value_and_grad` of the call: takes the same, the number of microbatches (`steps`) and `sync`;
            returns the loss, gradients by name, and the state after the last microbatch.
        inputs: these arrays.
        root: the record of the model.
        units: the records that set dtypes.
        where: the model and the function, for messages.
    """

    run: Callable[[Any, Any, tuple, Arrays], tuple[Any, Any]]
    accumulated: Callable[..., tuple[Any, Arrays, Any]]
    inputs: tuple[Any, Any, tuple, Arrays]
    root: Unit
    units: tuple[Unit, ...]
    where: str

    @property
    def keeps_dtypes(self) -> bool:
        """Whether results have the dtypes of plain Flax: no policy of the model sets another."""
        precisions = [unit.policy.mixed_precision for unit in self.units]
        return not any(precision.param or precision.output for precision in precisions)


def _nnx_call(
    model: nnx.Module, args: tuple, kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None
) -> _CheckedCall:
    function = loss_fn or (lambda model, *args, **kwargs: model(*args, **kwargs))
    arrays, static = _split_keywords(kwargs)
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    units = units_in(model)

    def run(params: Any, state: Any, args: tuple, arrays: Arrays) -> tuple[Any, Any]:
        live = nnx.merge(graphdef, params, state, copy=True)
        out = function(live, *args, **arrays, **static)
        return out, nnx.state(live, nnx.Not(nnx.Param))

    def accumulated(
        params: Any, state: Any, args: tuple, arrays: Arrays, steps: int, sync: str
    ) -> tuple[Any, Arrays, Any]:
        live = nnx.merge(graphdef, params, state, copy=True)
        trained = nnx.All(nnx.Param, lambda path, variable: has_gradient(variable.get_raw_value()))
        loss = lambda model, *batch: _loss_of(function(model, *batch, **arrays, **static))
        value, grads = value_and_grad(loss, accumulate=steps, sync=sync, wrt=trained)(live, *args)
        return value, _named(grads), nnx.state(live, nnx.Not(nnx.Param))

    where = f"{plain_class(model).__name__}: {getattr(loss_fn, '__name__', '__call__')}"
    inputs = params, state, args, arrays
    return _CheckedCall(run, accumulated, inputs, units[()], tuple(units.values()), where)


def _linen_call(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None
) -> _CheckedCall:
    """The call of a Linen model, whose first argument is the variables: parameters, state, other arguments."""
    if not args or not isinstance(args[0], Mapping) or "params" not in args[0]:
        raise CallError(
            "The variables of the Linen model are missing.",
            where=f"check({type(model).__name__}, ...)",
            why="a Linen module holds no parameters; pass the variables, with 'params', as its first argument.",
            do="js.check(model, variables, x)",
        )
    variables, *rest = args
    function = loss_fn or model.apply
    arrays, static = _split_keywords(kwargs)
    returns_state = loss_fn is None and bool(static.get("mutable"))
    annotation = annotation_for(model)

    def run(params: Any, state: Any, rest: tuple, arrays: Arrays) -> tuple[Any, Any]:
        out = function({**state, "params": params}, *rest, **arrays, **static)
        return out if returns_state else (out, {})

    def accumulated(
        params: Any, state: Any, rest: tuple, arrays: Arrays, steps: int, sync: str
    ) -> tuple[Any, Arrays, Any]:
        def loss(params: Any, *batch: Any) -> jax.Array:
            return _loss_of(run(params, state, batch, arrays)[0])

        has_all = all(map(has_gradient, jax.tree.leaves(params)))
        trained = nnx.Param if has_all else (lambda path, variable: has_gradient(variable.get_raw_value()))
        of_loss = value_and_grad(loss, model=model, accumulate=steps, sync=sync, wrt=trained)
        value, grads = of_loss(params, *rest)
        return value, _named(grads), {}

    where = f"{type(model).__name__}: {getattr(loss_fn, '__name__', 'apply')}"
    state = {name: collection for name, collection in variables.items() if name != "params"}
    units = (annotation.root, *(record for _, record in annotation.choices))
    inputs = variables["params"], state, tuple(rest), arrays
    return _CheckedCall(run, accumulated, inputs, annotation.root, units, where)


def _split_keywords(kwargs: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    arrays = {name: value for name, value in kwargs.items() if is_array(value)}
    static = {name: value for name, value in kwargs.items() if name not in arrays}
    return arrays, static


def _loss_of(out: Any) -> Any:
    """Returns what is differentiated: a weighted mean as it is, or a sum of all outputs."""
    return out if isinstance(out, WeightedMean) else _weighted_sum(arrays_of(out))


def _differentiated(call: _CheckedCall) -> Callable[[Any, tuple], tuple[Arrays, Arrays, Any, Any]]:
    """Returns a function of state and arguments.

    It returns outputs and gradients by name, the state after the call, and the weight of a `js.WeightedMean`, else 1.
    """
    params, _, first_args, arrays = call.inputs
    _, together = opened(first_args)

    @jax.jit
    def program(params: Any, state: Any, values: list[Any], arrays: Arrays) -> tuple[Arrays, Arrays, Any, Any]:
        args = together(values)
        named = _named(params)
        tree = jax.tree.structure(params)

        def scalar(trained: Arrays) -> tuple[jax.Array, tuple[Arrays, Any, Any]]:
            leaves = [trained.get(name, x) for name, x in named.items()]
            out, after = call.run(jax.tree.unflatten(tree, leaves), state, args, arrays)
            weight = out.weight if isinstance(out, WeightedMean) else 1.0
            outputs = arrays_of(mean_of(out))
            return _weighted_sum(outputs), (outputs, after, weight)

        trained = {name: x for name, x in named.items() if has_gradient(x)}
        (_, (outputs, after, weight)), grads = jax.value_and_grad(scalar, has_aux=True)(trained)
        return outputs, grads, after, weight

    def run(state: Any, args: tuple) -> tuple[Arrays, Arrays, Any, Any]:
        values, _ = opened(args)
        return program(params, state, values, arrays)

    return run


def _compared(call: _CheckedCall, tolerance: float) -> CheckReport:
    """Runs a call both ways; raises if a difference is too large."""
    program = _differentiated(call)
    _, state, args, _ = call.inputs
    with without_update():
        outputs, grads, after, _ = program(state, args)
    with global_view(), without_update():
        wanted_outputs, wanted_grads, wanted_after, _ = program(state, args)
    of_outputs = {name or "output": (x, wanted_outputs[name]) for name, x in outputs.items()}
    of_grads = {name: (x, wanted_grads[name]) for name, x in grads.items()}
    of_state = _changed(*map(_compared_state, (after, wanted_after, call.inputs[1])))
    report = CheckReport(
        _differences(of_outputs, same_dtypes=call.keeps_dtypes),
        _differences(of_grads, same_dtypes=True),
        _differences(of_state, floor=1e-6),  # a count and a mean are on unrelated scales
        tolerance,
    )
    _raise_if_apart(report, call.where)
    return report


def _compared_over(call: _CheckedCall, steps: int, sync: str, tolerance: float) -> CheckReport:
    """Compares `js.value_and_grad` over microbatches with their means; raises if a difference is too large."""
    accumulated = jax.jit(functools.partial(call.accumulated, steps=steps, sync=sync))
    with without_update():
        value, grads, after = accumulated(*call.inputs)
    wanted_value, wanted_grads, wanted_after = _mean_of_microbatches(call, steps)
    of_grads = {name: (x, wanted_grads[name]) for name, x in grads.items()}
    of_state = _changed(*map(_compared_state, (after, wanted_after, call.inputs[1])))
    report = CheckReport(
        _differences({"output": (value, wanted_value)}),
        _differences(of_grads),
        _differences(of_state, floor=1e-6),
        tolerance,
    )
    _raise_if_apart(report, call.where)
    return report


def _mean_of_microbatches(call: _CheckedCall, steps: int) -> tuple[Any, Arrays, Any]:
    """Returns loss and gradients as means over microbatches in global view, and the state after the last."""
    _, state, args, _ = call.inputs
    program = _differentiated(call)
    parts = microbatches(args, call.root, steps, call.where)
    values: list[np.ndarray] = []
    weights: list[float] = []
    of_parts: list[dict[str, np.ndarray]] = []
    after: Any = None
    for i in range(steps):
        part = jax.tree.map(lambda rows, i=i: rows[i], parts)
        with global_view(), without_update():
            outputs, grads, after, weight = program(state, part)
        weights.append(float(weight))
        values.append(_exact(_weighted_sum(outputs)) * weights[-1])
        of_parts.append({name: _exact(x) * weights[-1] for name, x in grads.items()})
        state = after or state  # a Linen model's loss returns none
    total = sum(weights)
    means = {name: sum(part[name] for part in of_parts) / total for name in of_parts[0]}
    return sum(values) / total, means, after


def _named(tree: Any) -> Arrays:
    """Returns the arrays in a tree by path, in the order of its leaves."""
    return {"/".join(key_texts(path)) or "(root)": x for path, x in jax.tree.leaves_with_path(tree)}


def _compared_state(state: Any) -> Arrays:
    """Returns the arrays of a state by path, without random numbers."""
    if isinstance(state, nnx.State):
        state = nnx.split_state(state, nnx.RngState, ...)[1]
    return {name: x for name, x in _named(state).items() if is_array(x) and not is_key(x)}


def _changed(found: Arrays, wanted: Arrays, before: Arrays) -> Pairs:
    """The state that either call changed; None where one call lacks it."""
    pairs = {k: (found.get(k), wanted.get(k)) for k in dict.fromkeys([*wanted, *found])}
    same = lambda k, pair: k in before and all(x is not None and np.array_equal(x, before[k]) for x in pair)
    return {k: pair for k, pair in pairs.items() if not same(k, pair)}


def _weighted_sum(outputs: Arrays) -> jax.Array:
    """A scalar with a different weight for every real number; a real scalar output is returned unchanged."""
    parts = list(_real_parts(outputs.values()))
    if len(parts) == 1 and parts[0].ndim == 0:
        return parts[0]
    total = jnp.zeros(())
    for x in parts:
        wide = x.astype(wide_dtype(x.dtype))
        weights = jnp.cos(jnp.arange(x.size, dtype=wide.dtype)).reshape(x.shape)
        total = total + jnp.vdot(weights, wide)
    return total


def _real_parts(arrays: Iterable[jax.Array]) -> Iterable[jax.Array]:
    """Yields the arrays that have a gradient; of complex ones both parts."""
    for x in arrays:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            yield x.real
            yield x.imag
        elif has_gradient(x):
            yield x


def _exact(x: Any) -> np.ndarray:
    """Returns an array on the host, in double precision."""
    if is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _differences(pairs: Pairs, *, floor: float = 1e-2, same_dtypes: bool = False) -> dict[str, float]:
    """Largest difference of each pair, relative to its largest element; nan if shapes, structure or dtypes differ.

    The reference is at least `floor` times the largest element of all pairs. Dtypes are compared if `same_dtypes`.
    """
    unlike = {}
    exact = {}
    for name, (x, wanted) in pairs.items():
        if x is None or wanted is None or x.shape != wanted.shape or (same_dtypes and x.dtype != wanted.dtype):
            unlike[name] = float("nan")
        elif x.size:
            exact[name] = _exact(x), _exact(wanted)
    scale = {name: float(np.abs(wanted).max()) for name, (_, wanted) in exact.items()}
    least = max(floor * max(scale.values(), default=0.0), float(np.finfo(np.float32).tiny))
    found = {name: float(np.abs(x - wanted).max()) / max(scale[name], least) for name, (x, wanted) in exact.items()}
    return found | unlike


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
