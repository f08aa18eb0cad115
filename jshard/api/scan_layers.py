"""`scan_layers`: a deep stack of equal layers as one loop, so that compile time does not grow with depth."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard._types import PyTree
from jshard.engine.method_call import MethodCall, Snapshot, Variables
from jshard.engine.units import in_region_trace
from jshard.engine.values import raw
from jshard.errors import CallError
from jshard.plans.policies import is_real_float
from jshard.plans.units import Path, dotted, plain_class, unit_of

Rows = tuple[PyTree, PyTree, PyTree]
"""Parameters, other variables and per-layer arguments: of all layers, with a row for each, or one layer's."""


def scan_layers(
    layers: Sequence[nnx.Module] | nnx.Module,
    x: PyTree,
    *args: PyTree,
    xs: PyTree = None,
    collect: bool = False,
    method: str = "__call__",
    **kwargs: PyTree,
) -> PyTree:
    """Runs `for layer in layers: x = layer(x, *args, **kwargs)` as one `jax.lax.scan` over all layers.

    A convenience: a list of layers is stacked, their state is written back, and layers that cannot be scanned raise.
    Any other scan over stacked layers, such as `nnx.scan`, has the same schedule in a sharded model. Outside a sharded
    model's call, a list runs as the plain loop.

    Args:
        layers: equal layers: a list of modules; or one module whose variables have a leading dim of layers, made by
            `nnx.vmap` and annotated with `js.PlacementPolicy(stacked=1)`.
        x: the value passed from layer to layer: an array, or a pytree of arrays. Its shapes and dtypes stay the same.
        *args: further arguments, the same for every layer.
        xs: per-layer arguments, such as caches: a pytree of arrays with a leading dim of layers. A layer is then
            called with `(x, its part of xs, *args)`.
        collect: layers return `(x, output)`, and the outputs are returned stacked: `(x, outputs)`.
        method: the method to call.
        **kwargs: further arguments, the same for every layer.

    Returns:
        The result of the last layer; with `collect`, `(x, outputs)`.

    Raises:
        CallError: the layers are not equal, share variables, or change the type of `x`.

    Examples:
        >>> x = js.scan_layers(model.blocks, x)
    """
    stack = _Stack(layers, method, _as_arrays(x), _as_arrays(xs), args, kwargs, collect=collect)
    # Outside there is no schedule that a loop would keep.
    if stack.is_list and not in_region_trace():
        return _run_in_python(stack)
    return _run_in_scan(stack)


class _Stack:
    """Equal layers, a list or one module that holds all, as arrays with a row per layer."""

    def __init__(
        self,
        layers: Any,
        method: str,
        x: PyTree,
        xs: PyTree,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        *,
        collect: bool,
    ) -> None:
        _refuse_linen(layers)
        is_container = isinstance(layers, (nnx.List, nnx.Sequential))  # modules, too, but not layers
        self.is_list = is_container or not isinstance(layers, nnx.Module)
        self.modules = _modules_of(layers) if self.is_list else [layers]
        if not self.modules:
            raise CallError(
                "There are no layers to scan.",
                where="scan_layers",
                why="the list is empty.",
                do="js.scan_layers(model.blocks, x)",
            )
        self.x = x
        self.xs = xs
        self.args = args
        self.kwargs = kwargs
        self.collect = collect
        function = getattr(plain_class(self.modules[0]), method)
        # The first row stands for all: only its types matter.
        inputs = (x, *self._layer_inputs(_row(xs, 0)), *args)
        # The call of each layer with the same inputs: they are compared, and one of them is traced.
        self.calls = [MethodCall(module, function, inputs, kwargs) for module in self.modules]
        _check_equal(self.calls)
        self.call = self.calls[0]  # represents all

    # Cached: the length and the scan read it, and the layers are stacked once.
    @functools.cached_property
    def rows(self) -> tuple[list[PyTree], list[PyTree]]:
        """The parameters and the other variables, with a row per layer."""
        values = [call.values()[:2] for call in self.calls]
        if not self.is_list:
            return values[0]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *values)

    @property
    def length(self) -> int:
        """The number of layers."""
        shapes = [tuple(x.shape) for x in jax.tree.leaves((self.rows, self.xs))]
        length = len(self.modules)
        if not self.is_list:
            # A stack shows its length only in its arrays.
            length = next((shape[0] for shape in shapes if shape), 0)
        other_shapes = [str(shape) for shape in shapes if not shape or shape[0] != length]
        if other_shapes:
            raise CallError(
                "Some arrays do not have one row per layer.",
                where=f"scan_layers: {self.call.where}",
                why=f"{length} layers, and arrays of shapes {', '.join(dict.fromkeys(other_shapes))}.",
                do="stack xs along a new leading dim; build stacked layers with random state under nnx.split_rngs.",
            )
        return length

    def run_layer(self, module: nnx.Module, x: PyTree, layer_row: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the carry and the output of one layer; `layer_row` is its row of `xs`."""
        method = getattr(module, self.call.method.__name__)  # by name, so that a unit's class routes the call
        result = method(x, *self._layer_inputs(layer_row), *self.args, **self.kwargs)
        if not self.collect:
            return result, None
        if isinstance(result, tuple) and len(result) == 2:
            return result
        raise CallError(
            "A layer returns no output to collect.",
            where=f"scan_layers: {self.call.where}",
            why=f"with collect=True it must return (x, output), not {type(result).__name__}.",
            do="js.scan_layers(layers, x)",
        )

    def _layer_inputs(self, layer_row: PyTree) -> tuple[PyTree, ...]:
        """Returns the arguments that a layer has for itself: its row of `xs`, if there are any."""
        return () if self.xs is None else (layer_row,)

    def write_back(self, changes: Variables) -> None:
        """Writes changed state, with a row per layer, back to the layers."""
        for layer, call in enumerate(self.calls):
            state = []
            for path, variable in changes:
                value = variable.get_raw_value()
                state.append((path, variable.replace(_row(value, layer) if self.is_list else value)))
            call.write_back(state)


def _modules_of(layers: Any) -> list[nnx.Module]:
    modules: Any = layers.layers if isinstance(layers, nnx.Sequential) else layers
    return list(modules)


def _run_in_python(stack: _Stack) -> PyTree:
    """Runs the loop that `scan_layers` is equivalent to."""
    x = stack.x
    outputs = []
    for layer, module in enumerate(stack.modules):
        x, output = stack.run_layer(module, x, _row(stack.xs, layer))
        outputs.append(output)
    if not stack.collect:
        return x
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)


def _run_in_scan(stack: _Stack) -> PyTree:
    """Runs the layers in one scan, and writes changed state back to them."""
    call = stack.call
    changed_state: Variables = []

    def layer(x: PyTree, rows: Rows) -> tuple[PyTree, tuple[PyTree, list[jax.Array]]]:
        params, state, layer_row = rows
        live = call.put_together(params, state, call.arrays)
        before = Snapshot.of(live)
        x, output = stack.run_layer(live.module, x, layer_row)
        # Replaced and not extended: the body is traced more than once, and each trace finds the same variables.
        changed_state[:] = before.changed_state(live, call.where)
        return x, (output, [raw(variable) for _, variable in changed_state])

    def step(x: PyTree, rows: Rows) -> tuple[PyTree, tuple[PyTree, list[jax.Array]]]:
        x_after, outputs = layer(x, rows)
        # Before the scan's own check.
        _check_carry(stack, x, x_after)
        return x_after, outputs

    rows = (*stack.rows, stack.xs)
    length = stack.length
    row_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    # A scan needs the carry in one dtype, from the first layer on.
    first_x = _in_returned_dtypes(stack, lambda x, row: layer(x, row)[0], row_shapes)
    x, (outputs, values) = lax.scan(step, first_x, rows, length=length)
    changes = []
    for (path, variable), value in zip(changed_state, values, strict=True):
        changes.append((path, variable.replace(value)))
    stack.write_back(changes)
    return (x, outputs) if stack.collect else x


def _in_returned_dtypes(stack: _Stack, layer: Callable[[PyTree, Rows], PyTree], row: Rows) -> PyTree:
    """Returns the first layer's input, in the dtypes that a layer returns: a unit that casts its inputs accepts both.

    Args:
        stack: the layers.
        layer: returns the carry of a layer.
        row: the shapes of one layer's arrays.
    """
    unit = unit_of(stack.modules[0])
    if unit is None:
        return stack.x
    precision = unit.policy.mixed_precision
    if not precision.param_dtype or not precision.cast_inputs:
        return stack.x
    returned = jax.eval_shape(layer, stack.x, row)
    if jax.tree.structure(returned) != jax.tree.structure(stack.x):
        return stack.x  # the scan itself raises, and names the difference

    def in_returned_dtype(x: jax.Array, y: jax.ShapeDtypeStruct) -> jax.Array:
        if is_real_float(x.dtype) and is_real_float(y.dtype):
            return x.astype(y.dtype)
        return x

    return jax.tree.map(in_returned_dtype, stack.x, returned)


def _as_arrays(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.asarray, tree)


def _row(rows: PyTree, i: int) -> PyTree:
    """Returns one layer's row of each array in a tree."""
    return jax.tree.map(lambda x: x[i], rows)


def _check_carry(stack: _Stack, before: PyTree, after: PyTree) -> None:
    """Raises unless a layer's result has the structure, shapes and dtypes of its input."""
    types_before = _types_of(_as_arrays(before))
    types_after = _types_of(_as_arrays(after))
    if types_before == types_after:
        return
    raise CallError(
        "A layer changes the type of the value passed from layer to layer.",
        where=f"scan_layers: {stack.call.where}",
        why=f"it received {types_before} and returned {types_after}; a scan needs them equal.",
        do="return x in its own dtype and shape; layers that return (x, output) need collect=True.",
    )


def _types_of(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def _refuse_linen(layers: object) -> None:
    """Raises for layers of a Linen model."""
    first = next(iter(layers), None) if isinstance(layers, (list, tuple)) else layers
    if isinstance(first, nn.Module):
        raise CallError(
            "scan_layers needs nnx modules.",
            where=f"scan_layers({type(first).__name__})",
            why="layers of a Linen model are bound to their scopes; Flax's own scan stacks them.",
            do='nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)',
        )


def _check_equal(calls: list[MethodCall]) -> None:
    """Raises unless all layers have the same structure and share nothing."""
    first = calls[0]
    if first.has_objects:
        raise CallError(
            "The arguments of scan_layers contain a module or Rngs.",
            where=f"scan_layers: {first.where}",
            why="the layers run in one loop, so its changes could not pass from layer to layer.",
            do="pass it to the layers when they are built, or pass arrays (a random key, one per layer, in xs).",
        )
    first_uses: dict[int, int] = {}  # of each variable: the layer that has it
    for layer, call in enumerate(calls):
        difference = first.difference(call)
        if difference:
            raise CallError(
                "The layers to scan are not equal.",
                where=f"scan_layers: {first.where}, layers 0 and {layer}",
                why=difference,
                do="for layer in layers: x = layer(x)",
            )
        for path, variable in (*call.params, *call.state):
            first_layer = first_uses.setdefault(id(variable), layer)
            if first_layer != layer:
                raise _shared_variable(first, first_layer, layer, path)


def _shared_variable(call: MethodCall, first_layer: int, layer: int, path: Path) -> CallError:
    return CallError(
        "Layers to scan share a variable.",
        where=f"scan_layers: {call.where}, layers {first_layer} and {layer}: {dotted(path[1:])}",
        why="in a scan each layer has its own row of the variable.",
        do="for layer in layers: x = layer(x)",
    )
