"""Gradients of padded parameters: refused where the optimizer that they are for would see the padding.

Outside of the model a gradient is a plain tree of stored arrays, and an optimizer maps over it. What
`js.shard_optimizer` makes cuts the padding off; any other takes its means over the zeros too, which nothing shows. So
the stored arrays pass through an identity on their way into a call, which raises when it is differentiated. How that
comes about makes no difference: `jax.grad`, `nnx.grad`, `js.value_and_grad`, inside of `jit`, `scan` or `checkpoint`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from jshard import _compat
from jshard._errors import AnnotationError
from jshard._nnx import LogicalOptimizer, Unit, dotted, plain_class, unit_of, walk
from jshard._padded import logical_shape, padding_of
from jshard.engine.call import Call
from jshard.engine.context import is_without_update

Refuse = Callable[[Sequence[bool]], None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(refuse: Refuse, arrays: list[Any]) -> list[Any]:
    return arrays


@functools.partial(_guarded.defjvp, symbolic_zeros=True)
def _differentiated(
    refuse: Refuse, arrays: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[list[Any], list[Any]]:
    refuse([not isinstance(tangent, SymbolicZero) for tangent in tangents[0]])
    return arrays[0], tangents[0]


def guarded(call: Call, values: Sequence[Any]) -> list[Any]:
    """The parameters of a call; to differentiate with respect to a padded one is refused as long as it would be wrong.

    Args:
        call: the call.
        values: what its parameters enter as.
    """
    guards = {}
    for i, (path, variable) in enumerate(call.params):
        optimizer = _optimizer(call, path)
        if padding_of(variable) is not None and optimizer is not None and _refuses(optimizer):
            guards[i] = path, variable, optimizer
    name = call.where.split(".")[0]
    return _all_guarded(
        values, {i: (_text(name, path[1:], one), optimizer) for i, (path, one, optimizer) in guards.items()}
    )


def guard(values: Sequence[Any], padded: Mapping[int, str], optimizer: LogicalOptimizer | None) -> list[Any]:
    """The same of stored arrays, given the positions of the padded ones, each with its name for messages."""
    refuses = optimizer is not None and _refuses(optimizer)
    return _all_guarded(values, {i: (text, optimizer) for i, text in padded.items()} if refuses else {})


def _all_guarded(values: Sequence[Any], guards: Mapping[int, tuple[str, Any]]) -> list[Any]:
    if not guards:
        return list(values)
    refuse = _refusal(list(guards.values()))
    after = dict(zip(guards, _guarded(refuse, [values[i] for i in guards]), strict=True))
    return [after.get(i, x) for i, x in enumerate(values)]


@contextlib.contextmanager
def guarded_inside(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """Inside, the same of the parameters that a unit's module holds, which runs in global view."""
    name, optimizer = plain_class(module).__name__, unit.optimizer
    found = [(path, one) for path, one in walk(module) if padding_of(one) is not None and isinstance(one, nnx.Param)]
    found = [(path, one) for path, one in found if _compat.is_tracer(one.get_raw_value())]
    if not found or optimizer is None or not _refuses(optimizer):
        yield
        return
    refuse = _refusal([(_text(name, path, one), optimizer) for path, one in found])
    before = [one.get_raw_value() for _, one in found]
    after = _guarded(refuse, before)
    for (_, one), x in zip(found, after, strict=True):
        one.set_raw_value(x, _unsafe_bypass_check=True)
    try:
        yield
    finally:
        for (_, one), stored, x in zip(found, before, after, strict=True):
            if one.get_raw_value() is x:
                one.set_raw_value(stored, _unsafe_bypass_check=True)


def _optimizer(call: Call, path: tuple) -> LogicalOptimizer | None:
    """That of the model that a parameter of a call belongs to: the called one, or one among the arguments."""
    unit = unit_of(call.graph[0] if path[0] == 0 else call.graph[1][path[1]])
    return None if unit is None else unit.optimizer


def _refuses(optimizer: LogicalOptimizer) -> bool:
    return not optimizer.exists and not is_without_update()


def _refusal(arrays: Sequence[tuple[str, LogicalOptimizer]]) -> Refuse:
    """What raises if one of some arrays is differentiated: late, as a trace may be older than the optimizer."""

    def refuse(perturbed: Sequence[bool]) -> None:
        bad = [one for one, is_bad in zip(arrays, perturbed, strict=True) if is_bad and not one[1].exists]
        if bad:
            raise AnnotationError(
                "A padded parameter was differentiated, and js.shard_optimizer was not called for its model.",
                where=[text for text, _ in bad],
                why="the stored array ends in zeros. An optimizer that js.shard_optimizer did not make counts them in"
                " its means over the parameter, and its updates would be wrong.",
                do=bad[0][1].do,
            )

    return refuse


def _text(model: str, path: tuple, variable: nnx.Variable) -> str:
    shape, stored = logical_shape(variable), variable.get_raw_value()
    return f"{model}: {dotted(path)}  {stored.dtype}{list(shape)}, stored {list(stored.shape)}"
