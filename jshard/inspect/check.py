"""`check`: compares a call into an annotated model with the result on one device, by running it both ways."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard._types import PyTree
from jshard.api.gradients import value_and_grad
from jshard.api.reduce_gradients import reduce_gradients
from jshard.engine.accumulate import microbatches
from jshard.engine.border import arrays_of, opened
from jshard.engine.context import global_view, without_update
from jshard.engine.values import has_gradient, is_array
from jshard.engine.weighted import WeightedMean, mean_of
from jshard.errors import CallError
from jshard.linen.annotation import annotation_for, annotation_of
from jshard.plans.array_paths import key_texts
from jshard.plans.plan import root_forgotten
from jshard.plans.policies import wide_dtype
from jshard.plans.units import Unit, is_key, plain_class, unit_of, units_in

Arrays = dict[str, jax.Array]
"""Arrays by path."""


# ---- the report


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
        outputs = _with_prefix("output ", self.outputs)
        gradients = _with_prefix("gradient of ", self.gradients)
        return outputs | gradients | _with_prefix("state ", self.state)

    def __repr__(self) -> str:
        place = max(self.named, key=self.named.__getitem__, default="none")
        counts = f"{len(self.outputs)} outputs, {len(self.gradients)} gradients and {len(self.state)} changed states"
        return (
            f"check: {counts} agree with global view; worst {self.worst:.1e} of {self.tolerance:.0e} allowed ({place})"
        )


def _with_prefix(prefix: str, sizes: Mapping[str, float]) -> dict[str, float]:
    return {prefix + path: size for path, size in sizes.items()}


def check(
    model: Any,
    *args: PyTree,
    loss_fn: Callable[..., PyTree] | None = None,
    accumulate: int = 1,
    sync: str = "each",
    tolerance: float = 1e-4,
    **kwargs: PyTree,
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
        sync: as in `js.value_and_grad`; with `"none"` the sums are reduced by `js.reduce_gradients`.
        tolerance: largest allowed difference, relative to the largest element of an array.
        **kwargs: keyword arguments of the call.

    Returns:
        The differences.

    Raises:
        CallError: a difference is larger than `tolerance`; or a dtype differs, and no policy of the model asks for
            that.

    Examples:
        >>> report = js.check(model, x)
    """
    if annotation_of(model) is not None:
        call = _linen_call(model, args, kwargs, loss_fn)
    elif unit_of(model) is not None:
        call = _nnx_call(model, args, kwargs, loss_fn)
    else:
        raise root_forgotten(model)
    report = _compare(call, tolerance) if accumulate == 1 else _compare_accumulated(call, accumulate, sync, tolerance)
    _raise_if_apart(report, call.where)
    return report


# ---- the call


class _Inputs(NamedTuple):
    """The arrays that a call is run with."""

    params: PyTree
    state: PyTree  # all other variables
    args: tuple
    keywords: Arrays  # keyword arguments that are arrays


class _Run(Protocol):
    """Runs a call; returns its result, and the state after it."""

    def __call__(self, params: PyTree, state: PyTree, args: tuple, keywords: Arrays) -> tuple[PyTree, PyTree]: ...


class _RunAccumulated(Protocol):
    """Runs `js.value_and_grad` of a call; returns the loss, gradients by path, and the state after the last microbatch.

    `steps` is the number of microbatches.
    """

    def __call__(
        self, params: PyTree, state: PyTree, args: tuple, keywords: Arrays, steps: int, sync: str
    ) -> tuple[jax.Array, Arrays, PyTree]: ...


@dataclasses.dataclass(frozen=True)
class _CheckedCall:
    """A call as a function of arrays, and the arrays that it is called with.

    Attributes:
        run: the call.
        accumulated: its loss and gradients over microbatches.
        inputs: the arrays.
        root: the record of the model.
        units: the records that set dtypes.
        where: the model and the function, for messages.
    """

    run: _Run
    accumulated: _RunAccumulated
    inputs: _Inputs
    root: Unit
    units: tuple[Unit, ...]
    where: str

    @property
    def keeps_dtypes(self) -> bool:
        """Whether results have the dtypes of plain Flax: no policy of the model sets another."""
        for unit in self.units:
            precision = unit.policy.mixed_precision
            if precision.param_dtype or precision.output_dtype:
                return False
        return True


def _nnx_call(
    model: nnx.Module, args: tuple, kwargs: dict[str, PyTree], loss_fn: Callable[..., PyTree] | None
) -> _CheckedCall:
    function = loss_fn or _call_model
    keywords, static = _split_keywords(kwargs)
    graphdef, params, state = nnx.split(model, nnx.Param, ...)
    units = units_in(model)

    def run(params: PyTree, state: PyTree, args: tuple, keywords: Arrays) -> tuple[PyTree, PyTree]:
        live = nnx.merge(graphdef, params, state, copy=True)  # the call may change it
        out = function(live, *args, **keywords, **static)
        return out, nnx.state(live, nnx.Not(nnx.Param))

    def accumulated(
        params: PyTree, state: PyTree, args: tuple, keywords: Arrays, steps: int, sync: str
    ) -> tuple[jax.Array, Arrays, PyTree]:
        def loss(model: nnx.Module, *batch: PyTree) -> jax.Array | WeightedMean:
            return _loss_of(function(model, *batch, **keywords, **static))

        live = nnx.merge(graphdef, params, state, copy=True)
        trained = nnx.All(nnx.Param, _is_trained)
        value, grads = value_and_grad(loss, accumulate=steps, sync=sync, wrt=trained)(live, *args)
        grads = reduce_gradients(model, grads) if sync == "none" else grads
        return value, _by_path(grads), nnx.state(live, nnx.Not(nnx.Param))

    where = f"{plain_class(model).__name__}: {getattr(loss_fn, '__name__', '__call__')}"
    inputs = _Inputs(params, state, args, keywords)
    return _CheckedCall(run, accumulated, inputs, units[()], tuple(units.values()), where)


def _linen_call(
    model: nn.Module, args: tuple, kwargs: dict[str, PyTree], loss_fn: Callable[..., PyTree] | None
) -> _CheckedCall:
    """Returns the call of a Linen model, whose first argument is the variables."""
    if not args or not isinstance(args[0], Mapping) or "params" not in args[0]:
        raise CallError(
            "The variables of the Linen model are missing.",
            where=f"check({type(model).__name__}, ...)",
            why="a Linen module holds no parameters; pass the variables, with 'params', as its first argument.",
            do="js.check(model, variables, x)",
        )
    variables, *rest = args
    function = loss_fn or model.apply
    keywords, static = _split_keywords(kwargs)
    returns_state = loss_fn is None and bool(static.get("mutable"))
    annotation = annotation_for(model)

    def run(params: PyTree, state: PyTree, args: tuple, keywords: Arrays) -> tuple[PyTree, PyTree]:
        out = function({**state, "params": params}, *args, **keywords, **static)
        if returns_state:
            return out
        return out, {}

    def accumulated(
        params: PyTree, state: PyTree, args: tuple, keywords: Arrays, steps: int, sync: str
    ) -> tuple[jax.Array, Arrays, PyTree]:
        def loss(params: PyTree, *batch: PyTree) -> jax.Array | WeightedMean:
            out, _ = run(params, state, batch, keywords)
            return _loss_of(out)

        are_all_trained = all(map(has_gradient, jax.tree.leaves(params)))
        trained = nnx.Param if are_all_trained else _is_trained
        value, grads = value_and_grad(loss, model=model, accumulate=steps, sync=sync, wrt=trained)(params, *args)
        grads = reduce_gradients(model, grads) if sync == "none" else grads
        return value, _by_path(grads), {}

    where = f"{type(model).__name__}: {getattr(loss_fn, '__name__', 'apply')}"
    state = {name: collection for name, collection in variables.items() if name != "params"}
    units = (annotation.root, *(chosen.record for chosen in annotation.choices))
    inputs = _Inputs(variables["params"], state, tuple(rest), keywords)
    return _CheckedCall(run, accumulated, inputs, annotation.root, units, where)


def _call_model(model: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
    return model(*args, **kwargs)  # type: ignore[operator]


def _is_trained(path: Sequence[object], variable: nnx.Variable) -> bool:
    """Returns whether a parameter has a gradient, as a filter of nnx."""
    return has_gradient(variable.get_raw_value())


def _split_keywords(kwargs: dict[str, PyTree]) -> tuple[Arrays, dict[str, PyTree]]:
    """Returns the keyword arguments that are arrays, and the others."""
    arrays: Arrays = {}
    static: dict[str, PyTree] = {}
    for name, value in kwargs.items():
        if is_array(value):
            arrays[name] = value
        else:
            static[name] = value
    return arrays, static


# ---- running it


class _Outcome(NamedTuple):
    """What a differentiated call returns."""

    outputs: Arrays
    gradients: Arrays  # those of trained parameters
    state: PyTree  # after the call
    weight: jax.Array | float  # of a `js.WeightedMean`, else 1


def _differentiate(call: _CheckedCall) -> Callable[[PyTree, tuple], _Outcome]:
    """Returns a function of state and arguments that runs the call and differentiates it."""
    # An object among the arguments cannot enter the program: its arrays do, and an equal object is made of them inside.
    _, together = opened(call.inputs.args)

    @jax.jit
    def program(params: PyTree, state: PyTree, values: list[jax.Array], keywords: Arrays) -> _Outcome:
        args = together(values)
        params_by_path = _by_path(params)
        form = jax.tree.structure(params)

        # Integers and the like are no arguments of `scalar`, as JAX differentiates floats only.
        def scalar(trained: Arrays) -> tuple[jax.Array, tuple[Arrays, PyTree, jax.Array | float]]:
            leaves = [trained.get(path, param) for path, param in params_by_path.items()]
            out, state_after = call.run(jax.tree.unflatten(form, leaves), state, args, keywords)
            weight = out.weight if isinstance(out, WeightedMean) else 1.0
            outputs = arrays_of(mean_of(out))
            return _weighted_sum(outputs), (outputs, state_after, weight)

        trained = {path: param for path, param in params_by_path.items() if has_gradient(param)}
        (_, (outputs, state_after, weight)), gradients = jax.value_and_grad(scalar, has_aux=True)(trained)
        return _Outcome(outputs, gradients, state_after, weight)

    def run(state: PyTree, args: tuple) -> _Outcome:
        values, _ = opened(args)
        return program(call.inputs.params, state, values, call.inputs.keywords)

    return run


def _loss_of(out: PyTree) -> jax.Array | WeightedMean:
    """Returns what is differentiated: a weighted mean as it is, or a sum of all outputs."""
    if isinstance(out, WeightedMean):
        return out
    return _weighted_sum(arrays_of(out))


def _weighted_sum(outputs: Arrays) -> jax.Array:
    """Returns a scalar with a different weight for every real number; a real scalar output is returned unchanged.

    With equal weights, a fault that only exchanges elements would have no effect on the gradients.
    """
    parts = list(_real_parts(outputs))
    if len(parts) == 1 and parts[0].ndim == 0:
        return parts[0]
    total = jnp.zeros(())
    for part in parts:
        wide = part.astype(wide_dtype(part.dtype))
        weights = jnp.cos(jnp.arange(part.size, dtype=wide.dtype)).reshape(part.shape)
        total = total + jnp.vdot(weights, wide)
    return total


def _real_parts(outputs: Arrays) -> Iterator[jax.Array]:
    """Yields the arrays that have a gradient; of complex ones both parts."""
    for array in outputs.values():
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            yield array.real
            yield array.imag
        elif has_gradient(array):
            yield array


def _compare(call: _CheckedCall, tolerance: float) -> CheckReport:
    """Runs a call both ways."""
    # One jitted function for both: global view is part of the key of JAX's caches, so it is traced for each. Nothing is
    # updated, so that padded parameters may be differentiated without `js.shard_optimizer`.
    program = _differentiate(call)
    with without_update():
        sharded = program(call.inputs.state, call.inputs.args)
    with global_view(), without_update():
        expected = program(call.inputs.state, call.inputs.args)
    outputs = _pairs(sharded.outputs, expected.outputs)
    if "" in outputs:
        outputs["output"] = outputs.pop("")  # a result that is one array has no path
    return CheckReport(
        _differences(outputs, same_dtypes=call.keeps_dtypes),
        _differences(_pairs(sharded.gradients, expected.gradients), same_dtypes=True),
        _state_differences(sharded.state, expected.state, call.inputs.state),
        tolerance,
    )


def _compare_accumulated(call: _CheckedCall, steps: int, sync: str, tolerance: float) -> CheckReport:
    """Compares `js.value_and_grad` over microbatches with means over the same ones in global view."""
    accumulated = jax.jit(functools.partial(call.accumulated, steps=steps, sync=sync))
    with without_update():
        value, gradients, state = accumulated(*call.inputs)
    expected = _mean_of_microbatches(call, steps)
    return CheckReport(
        _differences({"output": _Pair(value, expected.value)}),
        _differences(_pairs(gradients, expected.gradients)),
        _state_differences(state, expected.state, call.inputs.state),
        tolerance,
    )


class _Means(NamedTuple):
    """Means over microbatches, on the host."""

    value: np.ndarray  # of the loss
    gradients: dict[str, np.ndarray]  # by path
    state: PyTree  # after the last


def _mean_of_microbatches(call: _CheckedCall, steps: int) -> _Means:
    """Returns loss and gradients as means over microbatches in global view, and the state after the last."""
    program = _differentiate(call)
    state = call.inputs.state
    parts = microbatches(call.inputs.args, call.root, steps, call.where)
    # On the host, in double precision: the expected sum must not have the rounding that is looked for.
    total_weight = 0.0
    total_value = np.zeros(())
    total_gradients: dict[str, np.ndarray] = {}
    state_after: PyTree = None
    for i in range(steps):
        part = jax.tree.map(lambda rows, i=i: rows[i], parts)
        with global_view(), without_update():
            outcome = program(state, part)
        weight = float(outcome.weight)
        total_weight += weight
        total_value = total_value + _in_double_precision(_weighted_sum(outcome.outputs)) * weight
        for path, gradient in outcome.gradients.items():
            weighted = _in_double_precision(gradient) * weight
            total_gradients[path] = total_gradients.get(path, 0) + weighted
        state_after = outcome.state
        state = state_after or state  # the next microbatch begins with it; a Linen model's loss returns none
    mean_gradients = {path: total / total_weight for path, total in total_gradients.items()}
    return _Means(np.asarray(total_value / total_weight), mean_gradients, state_after)


# ---- differences


class _Pair(NamedTuple):
    """An array of the sharded region and its counterpart in global view; None where one call lacks it."""

    array: jax.Array | None
    expected: jax.Array | np.ndarray | None

    def is_equal_to(self, array: jax.Array) -> bool:
        """Returns whether both arrays have the values of a third one."""
        if self.array is None or self.expected is None:
            return False
        return np.array_equal(self.array, array) and np.array_equal(self.expected, array)


def _pairs(arrays: Arrays, expected: Mapping[str, jax.Array | np.ndarray]) -> dict[str, _Pair]:
    return {path: _Pair(array, expected[path]) for path, array in arrays.items()}


def _differences(pairs: Mapping[str, _Pair], *, floor: float = 1e-2, same_dtypes: bool = False) -> dict[str, float]:
    """Returns the largest difference of each pair, relative to its largest element.

    Args:
        pairs: the arrays.
        floor: what a difference is relative to is at least this part of the largest element of all pairs.
        same_dtypes: whether dtypes must agree.

    Returns:
        The differences by name; nan if shapes, structure or dtypes differ.
    """
    unlike: dict[str, float] = {}
    apart: dict[str, float] = {}  # absolute
    scales: dict[str, float] = {}
    for name, (array, expected) in pairs.items():
        if array is None or expected is None or not _have_same_form(array, expected, same_dtypes=same_dtypes):
            unlike[name] = float("nan")
        elif array.size:
            reference = _in_double_precision(expected)
            apart[name] = float(np.abs(_in_double_precision(array) - reference).max())
            scales[name] = float(np.abs(reference).max())
    smallest_normal = float(np.finfo(np.float32).tiny)  # if all is zero
    least_scale = max(floor * max(scales.values(), default=0.0), smallest_normal)
    relative = {name: apart[name] / max(scales[name], least_scale) for name in apart}
    return relative | unlike


def _have_same_form(array: jax.Array, expected: jax.Array | np.ndarray, *, same_dtypes: bool) -> bool:
    if array.shape != expected.shape:
        return False
    return not same_dtypes or array.dtype == expected.dtype


def _state_differences(sharded: PyTree, expected: PyTree, before: PyTree) -> dict[str, float]:
    """Returns the differences of the state that either call changed."""
    sharded_arrays = _state_by_path(sharded)
    expected_arrays = _state_by_path(expected)
    arrays_before = _state_by_path(before)
    changed: dict[str, _Pair] = {}
    for path in dict.fromkeys([*expected_arrays, *sharded_arrays]):  # a call may also create or delete state
        pair = _Pair(sharded_arrays.get(path), expected_arrays.get(path))
        if path not in arrays_before or not pair.is_equal_to(arrays_before[path]):
            changed[path] = pair
    return _differences(changed, floor=1e-6)  # a count and a mean are on unrelated scales


def _by_path(tree: PyTree) -> Arrays:
    """Returns the arrays in a tree by path, in the order of its leaves."""
    return {"/".join(key_texts(path)) or "(root)": leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _state_by_path(state: PyTree) -> Arrays:
    """Returns the arrays of a state by path, without random numbers."""
    if isinstance(state, nnx.State):
        _, state = nnx.split_state(state, nnx.RngState, ...)
    return {path: x for path, x in _by_path(state).items() if is_array(x) and not is_key(x)}


def _in_double_precision(x: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array on the host, in double precision."""
    if is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _raise_if_apart(report: CheckReport, where: str) -> None:
    differences = report.named
    # Not `>`: a difference that is nan is too large as well.
    too_large = [name for name, size in differences.items() if not size <= report.tolerance]
    if not too_large:
        return
    too_large.sort(key=lambda name: -differences[name])
    raise CallError(
        "The sharded region and global view do not agree.",
        where=[f"{where}: {name}  {differences[name]:.1e}" for name in too_large],
        why=f"differences relative to the largest element; {report.tolerance:.0e} is allowed. In bfloat16, or near"
        " a norm of few values, rounding can be that large. A function declared with js.per_example that"
        " combines examples also causes such differences.",
        do="js.check(model, x, tolerance=1e-2)  # for bfloat16\n"
        "with js.global_view(): step(model, batch)  # computes the numbers of one device",
    )
