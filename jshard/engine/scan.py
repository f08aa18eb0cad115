"""`scan_layers`: a deep stack of equal layers as one loop, whose compile time does not grow with depth."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard._errors import CallError
from jshard._nnx import Member, Unit, dotted, plain_class, unit_of
from jshard._policies import Prefetch
from jshard._shard_plan import resharded
from jshard.engine.body import Body
from jshard.engine.call import Before, Call, Kept, is_float, raw
from jshard.engine.chain import Chain
from jshard.engine.collectives import all_gather, vary
from jshard.engine.context import Region, current_region, in_global_view, in_shapes_only
from jshard.engine.pipeline import Arrays, Schedule, pipelined
from jshard.engine.reshard import Saving
from jshard.engine.unit import checkpointed, gathered_here


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
    """`for layer in layers: x = layer(x, *args, **kwargs)`, as one scan over all layers.

    Inside a sharded model the weights of the next layer are gathered while a layer computes, forward and backward,
    and a layer's gradients are reduced while the one below it computes. Elsewhere it is the plain loop. Dropout and
    other state of the layers work as in the loop.

    Args:
        layers: equal layers: a list of modules; or one module whose variables have a leading dim of layers, made by
            `nnx.vmap` and annotated with `stacked=1`.
        x: what goes from layer to layer: an array, or a pytree of arrays. Its shapes and dtypes stay the same.
        *args: further arguments, the same for every layer.
        xs: arguments of each layer's own, such as caches: a pytree of arrays with a leading dim of layers. A layer
            is then called with `(x, its part of xs, *args)`.
        collect: layers return `(x, output)`, and the outputs come back stacked: `(x, outputs)`.
        method: the method to call.
        prefetch: as in `js.fully_shard`, in layers or bytes; None: as the layers were annotated.
        delay_reduce: reduce a layer's gradients while the next layer of backward computes, at the price of one
            layer's full gradients in memory. None: with prefetch, yes.
        **kwargs: further arguments, the same for every layer.

    Returns:
        What the last layer returned; with `collect`, `(x, outputs)`.

    Raises:
        CallError: the layers are not equal, share parameters, or change the type of `x`.

    Example:
        >>> x = js.scan_layers(model.blocks, x)
    """
    stack = _Stack(layers, method, _arrays(x), _arrays(xs), args, kwargs, collect=collect)
    region, unit = current_region(), unit_of(stack.first)
    if region is None or region.gathered or in_global_view() or unit is None or not unit.policy.gathered:
        return _plain_loop(stack) if stack.is_list and not in_shapes_only() else _plain_scan(stack)
    mine = gathered_here(stack.call, unit, False)
    ahead = unit.policy.prefetch if prefetch is None else Prefetch.parse(prefetch)
    if ahead is None or not any(m.placement.dim is not None for m in mine.values()):
        return _plain_scan(stack)
    return _Scan(stack, region, unit, mine).run(ahead, delay_reduce)


class _Stack:
    """Equal layers, to be taken apart into arrays with a row per layer.

    Attributes:
        modules, calls: the layers; or the one module that holds all of them.
        is_list: which of the two.
    """

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
        self.calls = [Call(module, run, (x, *own, *args), kwargs) for module in self.modules]
        _check_equal(self.calls)

    @property
    def first(self) -> nnx.Module:
        return self.modules[0]

    @property
    def call(self) -> Call:
        return self.calls[0]

    @functools.cached_property
    def rows(self) -> tuple[list, list]:
        """The parameters and the other variables, with a row per layer."""
        values = [call.values()[:2] for call in self.calls]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *values) if self.is_list else values[0]

    @functools.cached_property
    def length(self) -> int:
        """The number of layers."""
        shapes = [x.shape for x in jax.tree.leaves((self.rows, self.xs))]
        length = len(self.modules) if self.is_list else next((s[0] for s in shapes if s), 0)
        bad = [str(tuple(s)) for s in shapes if not s or s[0] != length]
        if bad:
            raise CallError(
                "Not everything has a row per layer.",
                where=f"scan_layers: {self.call.where}",
                why=f"{length} layers, and arrays of shapes {', '.join(dict.fromkeys(bad))}.",
                do="stack xs along a new first dim; build stacked layers with random state under nnx.split_rngs.",
            )
        return length

    def run(self, module: nnx.Module, x: Any, own: Any) -> tuple[Any, Any]:
        """One layer as it stands: its carry and its output."""
        own = () if self.xs is None else (own,)
        return self.parts(getattr(module, self.call.method.__name__)(x, *own, *self.args, **self.kwargs))

    def parts(self, out: Any) -> tuple[Any, Any]:
        """The carry and the output in what a layer returned."""
        if not self.collect:
            return out, None
        if isinstance(out, tuple) and len(out) == 2:
            return out
        raise CallError(
            "A layer gives no output to collect.",
            where=f"scan_layers: {self.call.where}",
            why=f"with collect=True it returns (x, output), and not {type(out).__name__}.",
            do="js.scan_layers(layers, x)",
        )

    def write_back(self, changes: Kept) -> None:
        """Carries changed state, with a row per layer, over to the layers."""
        for i, call in enumerate(self.calls):
            pick = (lambda value, i=i: _row(value, i)) if self.is_list else lambda value: value
            call.write_back([(path, v.replace(pick(v.get_raw_value()))) for path, v in changes])


def _plain_loop(stack: _Stack) -> Any:
    """The loop that `scan_layers` stands for."""
    x, outputs = stack.x, []
    for i, module in enumerate(stack.modules):
        x, output = stack.run(module, x, _row(stack.xs, i))
        outputs.append(output)
    return (x, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)) if stack.collect else x


def _plain_scan(stack: _Stack) -> Any:
    """The loop as a scan that calls the layers as they stand: each unit in them gathers for itself."""
    call, changed = stack.call, []

    def layer(x: Any, rows: tuple) -> tuple[Any, tuple]:
        params, state, own = rows
        live = call.put_together(params, state, call.arrays)
        before = Before.of(live)
        x, output = stack.run(live.module, x, own)
        changed[:] = before.changes(live, call.where)
        return x, (output, [raw(v) for _, v in changed])

    def step(x: Any, rows: tuple) -> tuple[Any, tuple]:
        after, outputs = layer(x, rows)
        _check_carry(stack, x, after)
        return after, outputs

    rows = (*stack.rows, stack.xs)
    x = _as_returned(stack, lambda x: layer(x, _row(rows, 0))[0])
    x, (outputs, values) = lax.scan(step, x, rows, length=stack.length)
    stack.write_back([(path, v.replace(value)) for (path, v), value in zip(changed, values, strict=True)])
    return (x, outputs) if stack.collect else x


def _as_returned(stack: _Stack, layer: Callable[[Any], Any]) -> Any:
    """What goes into the first layer, in the dtypes that a layer gives it: a unit that casts its inputs takes both."""
    unit = unit_of(stack.first)
    if unit is None or not (unit.policy.mixed_precision.param and unit.policy.mixed_precision.cast_inputs):
        return stack.x
    after = jax.eval_shape(layer, stack.x)
    if jax.tree.structure(after) != jax.tree.structure(stack.x):
        return stack.x
    return jax.tree.map(lambda x, y: x.astype(y.dtype) if is_float(x) and is_float(y) else x, stack.x, after)


class _Scan:
    """A stack of units inside the region: gathers ahead of their use."""

    def __init__(self, stack: _Stack, region: Region, unit: Unit, mine: dict[int, Member]) -> None:
        self.stack, self.region, self.unit = stack, region, unit
        name = region.names.get(id(stack.first), plain_class(stack.first).__name__)
        self.name = name.rpartition("/")[0] + "/*" if stack.is_list and "/" in name else name
        inner = dataclasses.replace(region, unit=self.name)
        self.body = Body(stack.call, tuple(mine), unit.policy.mixed_precision, inner)
        self.placements = [m.placement for m in mine.values()]
        params, state = stack.rows
        self.shards = [params[i] for i in mine]
        others = [x for i, x in enumerate(params) if i not in mine]
        is_own = lambda position: stack.xs is not None and position == 1
        self.places = ["carry" if p == 0 else "own" if is_own(p) else "shared" for p in stack.call.positions()]
        pick = lambda group: [x for x, g in zip(stack.call.arrays, self.places, strict=True) if g == group]
        own, self.own_tree = jax.tree.flatten((others, state, jax.tree.leaves(stack.xs)))
        count = len(jax.tree.leaves(stack.xs))
        self.own = [*own[: len(own) - count], *self._vary(own[len(own) - count :])]
        self.carry, self.shared = self._vary(pick("carry")), self._vary(pick("shared"))

    def run(self, ahead: Prefetch, delay_reduce: bool | None) -> Any:
        """Runs the layers."""
        unit_bytes = sum(p.gathered_bytes // p.layers for p in self.placements if p.dim is not None)
        units = ahead.units if ahead.units is not None else int(ahead.budget_bytes or 0) // unit_bytes
        depth = min(units, self.stack.length - 1)
        reshard = resharded(self.unit, is_root=False)
        schedule = Schedule(self.stack.length, depth, depth > 0 if delay_reduce is None else delay_reduce)
        saving = Saving(reshard, lambda layer: checkpointed(layer, self.unit, kept=reshard is False))
        place = self.region.chain.here().next(unit_bytes, ahead)
        self.carry = self._as_results(self.carry)
        self.kinds = [is_float(x) for x in self.own], [is_float(x) for x in self.carry], [*map(is_float, self.shared)]
        run = pipelined(
            self._layer,
            self.placements,
            self.region.mesh,
            schedule=schedule,
            saving=saving,
            place=place,
            name=self.name,
        )
        groups = [_apart(x, k) for x, k in zip((self.own, self.carry, self.shared), self.kinds, strict=True)]
        (carry, outs), tokens = run(place.tokens, self.shards, *groups)
        place.called(unit_bytes, tokens)
        out, changes = self.body.result([*_together(carry, self.kinds[1]), *_together(outs, self.of_outs)])
        self.stack.write_back(changes)
        return out

    def _layer(self, full: list, own: Arrays, carry: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
        """One layer as a function of arrays."""
        groups = [_together(x, k) for x, k in zip((own, carry, shared), self.kinds, strict=True)]
        outs = self._apply(full, *groups)
        width = len(self.carry)
        x = self.body.result(outs)[0]
        _check_carry(
            self.stack, jax.tree.unflatten(jax.tree.structure(self.stack.x), self.carry), self.stack.parts(x)[0]
        )
        self.of_outs = [is_float(x) for x in outs[width:]]
        return _apart(self._vary(outs[:width]), self.kinds[1]), _apart(outs[width:], self.of_outs)

    def _apply(self, full: list, own: list, carry: list, shared: list) -> list:
        others, state, mine = jax.tree.unflatten(self.own_tree, own)
        values = {"own": iter(mine), "carry": iter(carry), "shared": iter(shared)}
        return self.body.apply(full, others, state, [next(values[g]) for g in self.places], Chain(self.region.axes))

    def _as_results(self, carry: list) -> list:
        """The carry in the dtypes that a layer gives it: a unit that casts its inputs takes both."""
        if not self.body.casts_inputs:
            return carry
        first = lambda rows: [_row(x, 0) for x in rows]

        def one(shards: list, own: list, carry: list, shared: list) -> list:
            full = [all_gather(x, p, self.region.mesh) for x, p in zip(shards, self.placements, strict=True)]
            return self._apply(full, own, carry, shared)[: len(carry)]

        outs = jax.eval_shape(one, first(self.shards), first(self.own), carry, self.shared)
        if len(outs) < len(carry):
            return carry
        return [x.astype(o.dtype) if is_float(x) and is_float(o) else x for x, o in zip(carry, outs, strict=True)]

    def _vary(self, arrays: list) -> list:
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return [x if is_key(x) else vary(jnp.asarray(x), self.region.axes) for x in arrays]


def _apart(arrays: list, kinds: list[bool]) -> Arrays:
    found = list(zip(arrays, kinds, strict=True))
    return [x for x, f in found if f], [x for x, f in found if not f]


def _together(arrays: Arrays, kinds: list[bool]) -> list:
    floats, rest = map(iter, arrays)
    return [next(floats if f else rest) for f in kinds]


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _row(rows: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], rows)


def _check_carry(stack: _Stack, before: Any, after: Any) -> None:
    """Raises unless a layer returned what it was given: the same structure, shapes and dtypes."""
    told = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    given, got = told(_arrays(before)), told(_arrays(after))
    if given == got:
        return
    raise CallError(
        "A layer changes the type of what goes from layer to layer.",
        where=f"scan_layers: {stack.call.where}",
        why=f"it was given {given} and returned {got}; a scan needs them equal.",
        do="return x in its own dtype and shape; layers that return (x, output) need collect=True.",
    )


def _refuse_linen(layers: Any) -> None:
    first = next(iter(layers), None) if isinstance(layers, (list, tuple)) else layers
    if isinstance(first, nn.Module):
        raise CallError(
            "scan_layers is for nnx modules.",
            where=f"scan_layers({type(first).__name__})",
            why="layers of a Linen model are bound to their scopes, and Flax's own scan stacks them.",
            do='nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)',
        )


def _check_equal(calls: list[Call]) -> None:
    """Raises unless all layers are built alike and share nothing."""
    first, seen = calls[0], {}
    if first.has_objects:
        raise CallError(
            "A module or Rngs among the arguments of scan_layers.",
            where=f"scan_layers: {first.where}",
            why="the layers run in one loop, so that its changes could not pass from layer to layer.",
            do="give it to the layers when they are built, or pass arrays (a random key, one per layer, in xs).",
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
                    why="a scan gives each layer a row of its own.",
                    do="for layer in layers: x = layer(x)",
                )
