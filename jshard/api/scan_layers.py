"""`scan_layers`: a deep stack of equal layers as one loop, so that compile time does not grow with depth."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard import _compat
from jshard.engine.method_call import FlatState, MethodCall, Snapshot
from jshard.engine.units import in_region_trace
from jshard.engine.values import raw
from jshard.errors import CallError
from jshard.plans.policies import is_real_float
from jshard.plans.units import dotted, plain_class, unit_of


def scan_layers(
    layers: Sequence[nnx.Module] | nnx.Module,
    x: Any,
    *args: Any,
    xs: Any = None,
    collect: bool = False,
    method: str = "__call__",
    prefetch: int | str | None = None,
    delay_reduce: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`for layer in layers: x = layer(x, *args, **kwargs)`, as one `jax.lax.scan` over all layers.

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
        prefetch: no longer has an effect; set it on the layers' `js.fully_shard`.
        delay_reduce: no longer has an effect.
        **kwargs: further arguments, the same for every layer.

    Returns:
        The result of the last layer; with `collect`, `(x, outputs)`.

    Raises:
        CallError: the layers are not equal, share variables, or change the type of `x`.

    Example:
        >>> x = js.scan_layers(model.blocks, x)
    """
    if prefetch is not None or delay_reduce is not None:
        _compat.warn_user(
            "prefetch and delay_reduce of js.scan_layers have no effect, and the next release removes them. Layers"
            f" are gathered ahead as annotated:\n  js.fully_shard(block, mesh=mesh, prefetch={prefetch!r})",
            FutureWarning,
        )
    stack = _Stack(layers, method, _arrays(x), _arrays(xs), args, kwargs, collect=collect)
    return _loop(stack) if stack.is_list and not in_region_trace() else _scan(stack)


class _Stack:
    """Equal layers, a list or one module that holds all, as arrays with a row per layer."""

    def __init__(
        self, layers: Any, method: str, x: Any, xs: Any, args: tuple, kwargs: dict[str, Any], *, collect: bool
    ) -> None:
        _refuse_linen(layers)
        self.is_list = not isinstance(layers, nnx.Module) or isinstance(layers, (nnx.List, nnx.Sequential))
        found: Any = layers.layers if isinstance(layers, nnx.Sequential) else layers
        self.modules = list(found) if self.is_list else [layers]
        if not self.modules:
            raise CallError(
                "There are no layers to scan.",
                where="scan_layers",
                why="the list is empty.",
                do="js.scan_layers(model.blocks, x)",
            )
        self.x, self.xs, self.args, self.kwargs, self.collect = x, xs, args, kwargs, collect
        run = getattr(plain_class(self.modules[0]), method)
        own = () if xs is None else (_row(xs, 0),)
        self.calls = [MethodCall(module, run, (x, *own, *args), kwargs) for module in self.modules]
        _check_equal(self.calls)
        self.call = self.calls[0]  # represents all

    @functools.cached_property
    def rows(self) -> tuple[list, list]:
        """The parameters and the other variables, with a row per layer."""
        values = [call.values()[:2] for call in self.calls]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *values) if self.is_list else values[0]

    @property
    def length(self) -> int:
        """The number of layers."""
        shapes = [x.shape for x in jax.tree.leaves((self.rows, self.xs))]
        length = len(self.modules) if self.is_list else next((s[0] for s in shapes if s), 0)
        bad = [str(tuple(s)) for s in shapes if not s or s[0] != length]
        if bad:
            raise CallError(
                "Some arrays do not have one row per layer.",
                where=f"scan_layers: {self.call.where}",
                why=f"{length} layers, and arrays of shapes {', '.join(dict.fromkeys(bad))}.",
                do="stack xs along a new leading dim; build stacked layers with random state under nnx.split_rngs.",
            )
        return length

    def run(self, module: nnx.Module, x: Any, own: Any) -> tuple[Any, Any]:
        """One layer: its carry and its output."""
        of_layer = () if self.xs is None else (own,)
        out = getattr(module, self.call.method.__name__)(x, *of_layer, *self.args, **self.kwargs)
        if not self.collect:
            return out, None
        if isinstance(out, tuple) and len(out) == 2:
            return out
        raise CallError(
            "A layer returns no output to collect.",
            where=f"scan_layers: {self.call.where}",
            why=f"with collect=True it must return (x, output), not {type(out).__name__}.",
            do="js.scan_layers(layers, x)",
        )

    def write_back(self, changes: FlatState) -> None:
        """Writes changed state, with a row per layer, back to the layers."""
        for i, call in enumerate(self.calls):
            pick = (lambda value, i=i: _row(value, i)) if self.is_list else lambda value: value
            call.write_back([(path, v.replace(pick(v.get_raw_value()))) for path, v in changes])


def _loop(stack: _Stack) -> Any:
    """The loop that `scan_layers` is equivalent to."""
    x, outputs = stack.x, []
    for i, module in enumerate(stack.modules):
        x, output = stack.run(module, x, _row(stack.xs, i))
        outputs.append(output)
    return (x, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)) if stack.collect else x


def _scan(stack: _Stack) -> Any:
    call, changed = stack.call, []

    def layer(x: Any, rows: tuple) -> tuple[Any, tuple]:
        params, state, own = rows
        live = call.put_together(params, state, call.arrays)
        before = Snapshot.of(live)
        x, output = stack.run(live.module, x, own)
        changed[:] = before.changed_state(live, call.where)
        return x, (output, [raw(v) for _, v in changed])

    def step(x: Any, rows: tuple) -> tuple[Any, tuple]:
        after, outputs = layer(x, rows)
        _check_carry(stack, x, after)
        return after, outputs

    rows, length = (*stack.rows, stack.xs), stack.length
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    x = _as_returned(stack, lambda x, row: layer(x, row)[0], one)
    x, (outputs, values) = lax.scan(step, x, rows, length=length)
    stack.write_back([(path, v.replace(value)) for (path, v), value in zip(changed, values, strict=True)])
    return (x, outputs) if stack.collect else x


def _as_returned(stack: _Stack, layer: Callable[[Any, Any], Any], row: Any) -> Any:
    """The first layer's input, in the dtypes that a layer returns: a unit that casts its inputs accepts both."""
    unit = unit_of(stack.modules[0])
    if unit is None or not (unit.policy.mixed_precision.param and unit.policy.mixed_precision.cast_inputs):
        return stack.x
    after = jax.eval_shape(layer, stack.x, row)
    if jax.tree.structure(after) != jax.tree.structure(stack.x):
        return stack.x
    is_cast = lambda x, y: is_real_float(x.dtype) and is_real_float(y.dtype)
    return jax.tree.map(lambda x, y: x.astype(y.dtype) if is_cast(x, y) else x, stack.x, after)


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _row(rows: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], rows)


def _check_carry(stack: _Stack, before: Any, after: Any) -> None:
    """Raises unless a layer's result has the structure, shapes and dtypes of its input."""
    types_of = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    given, got = types_of(_arrays(before)), types_of(_arrays(after))
    if given == got:
        return
    raise CallError(
        "A layer changes the type of the value passed from layer to layer.",
        where=f"scan_layers: {stack.call.where}",
        why=f"it received {given} and returned {got}; a scan needs them equal.",
        do="return x in its own dtype and shape; layers that return (x, output) need collect=True.",
    )


def _refuse_linen(layers: Any) -> None:
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
    first, seen = calls[0], {}
    if first.has_objects:
        raise CallError(
            "The arguments of scan_layers contain a module or Rngs.",
            where=f"scan_layers: {first.where}",
            why="the layers run in one loop, so its changes could not pass from layer to layer.",
            do="pass it to the layers when they are built, or pass arrays (a random key, one per layer, in xs).",
        )
    for i, call in enumerate(calls):
        if difference := first.difference(call):
            raise CallError(
                "The layers to scan are not equal.",
                where=f"scan_layers: {first.where}, layers 0 and {i}",
                why=difference,
                do="for layer in layers: x = layer(x)",
            )
        for path, variable in (*call.params, *call.state):
            if (other := seen.setdefault(id(variable), (i, path)))[0] != i:
                raise CallError(
                    "Layers to scan share a variable.",
                    where=f"scan_layers: {first.where}, layers {other[0]} and {i}: {dotted(path[1:])}",
                    why="in a scan each layer has its own row of the variable.",
                    do="for layer in layers: x = layer(x)",
                )
