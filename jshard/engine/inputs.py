"""Which arguments carry the batch, found from what the model does with their shapes."""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard import _compat
from jshard._errors import CallError
from jshard._mesh import data_axes, data_degree, degree
from jshard._nnx import Path, Unit
from jshard.engine.call import Call, is_array
from jshard.engine.context import global_view, shapes_only


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a call is split over the data shards.

    Args:
        size: global batch size.
        shards: number of data shards.
        arrays: for each array argument, whether it is split along the batch dim.
        state: likewise for the module's other variables (a decoding cache).
    """

    size: int
    shards: int
    arrays: tuple[bool, ...]
    state: tuple[bool, ...]


def split_batch(call: Call, unit: Unit) -> BatchSplit | None:
    """Finds the batch of a call; None if it has no array argument that could carry one.

    The first array argument carries it, and those that `batch_arg` names. Whether another of the same length
    does is found by tracing abstractly with a batch of twice the size, once with this argument doubled too and once
    with it as it is: shapes clash in one of them. If they clash in neither, the model must be told.

    Raises:
        CallError: the batch does not divide over the data shards, an argument may carry it or not, or
            `batch_arg` is not an argument.
    """
    policy = unit.policy
    names = call.argument_names(list(inspect.signature(call.method).parameters)[1:])
    candidates = [
        i
        for i, (x, name) in enumerate(zip(call.arrays, names, strict=True))
        if x.ndim > policy.batch_dim and name not in policy.replicated_args and not _is_key(x, call, name)
    ]
    for wanted in reversed(policy.batch_args):
        candidates = _put_first(candidates, names, call, wanted)
    if not candidates:
        return None
    first = candidates[0]
    size, shards = call.arrays[first].shape[policy.batch_dim], data_degree(unit.mesh)
    if size % shards:
        raise _indivisible(call, unit, names[first], size, shards)
    same = [i for i in candidates if call.arrays[i].shape[policy.batch_dim] == size]
    state = tuple(_is_cache(v, policy.batch_dim, size) for _, v in call.state)
    split = set(same)
    asked = [i for i in same[1:] if names[i] not in policy.batch_args] if shards > 1 else []
    for i in asked:
        trace = lambda chosen: _try(call, BatchSplit(size, shards, _flags(call, chosen), state), policy.batch_dim)
        alone = trace(split - {i})
        if alone is None:
            continue  # it goes with the batch, or the model insists on its size
        if alone.uses(i) and trace(split) is not None:
            raise _ambiguous(call, names[first], names[i], size)
        split = split - {i}
    return BatchSplit(size, shards, _flags(call, split), state)


@dataclasses.dataclass(frozen=True)
class GlobalTrace:
    """A call traced abstractly in global view.

    Args:
        jaxpr: its program; the array results come first among the outputs.
        shapes: those of the array results.
        state: shapes of the arrays in each variable after the call, by path.
        num_arrays: how many array arguments it has; they come last among the inputs.
    """

    jaxpr: Any
    shapes: tuple[tuple[int, ...], ...]
    state: dict[Path, list[tuple[int, ...]]]
    num_arrays: int

    def numbers(self, path: Path) -> list[int]:
        """The places among the program's outputs of the arrays in a variable after the call; empty if it has none."""
        start = len(self.shapes)
        for other, shapes in self.state.items():
            if other == path:
                return list(range(start, start + len(shapes)))
            start += len(shapes)
        return []

    def line(self, output: int) -> str:
        """`file:line` of the user's code that computed an output; empty if it is not known."""
        jaxpr = self.jaxpr.jaxpr
        made = (eqn for eqn in jaxpr.eqns if any(v is jaxpr.outvars[output] for v in eqn.outvars))
        return next(map(_compat.user_frame, made), "")

    def uses(self, array: int) -> bool:
        """Whether the call looks at an array argument at all."""
        jaxpr = self.jaxpr.jaxpr
        variable = jaxpr.invars[len(jaxpr.invars) - self.num_arrays + array]
        return any(variable is v for v in [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)])


def trace_globally(call: Call, split: BatchSplit, batch_dim: int, *, factor: int = 1) -> GlobalTrace:
    """Traces the call in global view, with the batch `factor` times as large."""

    def scaled(x: Any, is_batch: bool) -> Any:
        shape = list(x.shape)
        if is_batch:
            shape[batch_dim] *= factor
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def run(params: list, state: list, arrays: list) -> tuple[list, list]:
        live = call.put_together(params, state, arrays)
        with global_view():
            out = call.method(live.module, *live.args, **live.kwargs)
        after = {p: jax.tree.leaves(v.get_raw_value()) for p, v in live.variables() if not isinstance(v, nnx.Param)}
        paths[:] = after
        return [x for x in jax.tree.leaves(out) if is_array(x)], list(after.values())

    paths: list[Path] = []

    params, state, arrays = call.values()
    state = [jax.tree.map(lambda x, f=f: scaled(x, f), s) for s, f in zip(state, split.state, strict=True)]
    arrays = [scaled(x, f) for x, f in zip(arrays, split.arrays, strict=True)]
    params = [scaled(x, False) for x in params]
    with shapes_only():
        jaxpr, (out, after) = jax.make_jaxpr(run, return_shape=True)(params, state, arrays)
    shapes = [[x.shape for x in leaves] for leaves in after]
    return GlobalTrace(jaxpr, tuple(x.shape for x in out), dict(zip(paths, shapes, strict=True)), len(arrays))


def _try(call: Call, split: BatchSplit, batch_dim: int) -> GlobalTrace | None:
    """The trace with twice the batch; None if shapes clash."""
    try:
        return trace_globally(call, split, batch_dim, factor=2)
    except Exception:  # whatever the model says to shapes that clash
        return None


def _flags(call: Call, which: Iterable[int]) -> tuple[bool, ...]:
    chosen = set(which)
    return tuple(i in chosen for i in range(len(call.arrays)))


def _put_first(candidates: list[int], names: list[str], call: Call, wanted: str) -> list[int]:
    first = [i for i in candidates if names[i] == wanted]
    possible = [names[i] for i in candidates]
    if not first:
        raise CallError(
            "The argument that should carry the batch is not there.",
            where=f"{call.where}, batch_arg={wanted!r}",
            why=f"the arguments that can carry it are {', '.join(dict.fromkeys(possible)) or 'none'}.",
            do=f"js.fully_shard(model, mesh=mesh, batch_arg={possible[0] if possible else 'x'!r})",
        )
    return first + [i for i in candidates if i not in first]


def _indivisible(call: Call, unit: Unit, name: str, size: int, shards: int) -> CallError:
    sizes = ", ".join(f"{a}={degree(unit.mesh, a)}" for a in data_axes(unit.mesh))
    return CallError(
        "The batch cannot be split over the data shards.",
        where=f"{call.where}, argument {name!r}, dim {unit.policy.batch_dim}",
        why=f"{size} examples over {shards} data shards ({sizes}).",
        do=f"use a batch that is a multiple of {shards}, or run this call whole: with js.global_view(): ...",
    )


def _ambiguous(call: Call, first: str, name: str, size: int) -> CallError:
    return CallError(
        "An argument may carry the batch or not.",
        where=f"{call.where}, argument {name!r}",
        why=f"its length is {size}, as that of {first!r}, and the model works whether they grow together or not.",
        do=f"js.fully_shard(model, mesh=mesh, batch_arg=({first!r}, {name!r})) if it does,"
        f" replicated_args=({name!r},) if it does not.",
    )


def _is_key(x: Any, call: Call, name: str) -> bool:
    if x.dtype == jnp.uint32 and x.shape == (2,):
        raise CallError(
            "A random key of the old kind was given.",
            where=f"{call.where}, argument {name!r}",
            why="uint32[2] looks like data, so that every data shard would draw the same numbers.",
            do="pass jax.random.key(0), or jax.random.wrap_key_data(key); name data in replicated_args.",
        )
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_cache(variable: Any, batch_dim: int, size: int) -> bool:
    if not isinstance(variable, nnx.Cache):
        return False
    shape = getattr(variable.get_raw_value(), "shape", ())
    return len(shape) > batch_dim and shape[batch_dim] == size
