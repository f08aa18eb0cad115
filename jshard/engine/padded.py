"""Padded parameters outside the sharded region: refused gradients, and modules that run as plain Flax.

A padded parameter is stored with zeros behind its last row. `js.shard_optimizer` hides them. Any other optimizer would
count them, so a gradient for one is refused.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.context import PaddedParameter, guard
from jshard.engine.selections import at_positions
from jshard.plans.memories import fetched
from jshard.plans.padding import logical_shape, padding_of
from jshard.plans.units import Path, Unit, dotted, plain_class, walk


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedCandidate:
    """A parameter that may be padded, and the value to use for it.

    Attributes:
        variable: its variable.
        unit: the annotation of the module that has it.
        path: its path from that module.
        value: the array that enters the model.
    """

    variable: nnx.Variable
    unit: Unit | None
    path: Path
    value: PyTree


def guarded(model: str, candidates: Sequence[PaddedCandidate]) -> list[jax.Array]:
    """Returns the values; differentiating a padded one raises while an optimizer would see the padding.

    Args:
        model: the model's class, for messages.
        candidates: the parameters.
    """
    padded = {}
    for i, param in enumerate(candidates):
        if param.unit is None or param.unit.optimizer is None or padding_of(param.variable) is None:
            continue
        x = param.variable.get_raw_value()
        logical = f"{x.dtype}{list(logical_shape(param.variable))}"
        text = f"{model}: {dotted(param.path)}  {logical}, stored {list(x.shape)}"
        padded[i] = PaddedParameter(text, param.unit.optimizer)
    return guard([param.value for param in candidates], padded)


@dataclasses.dataclass(frozen=True, eq=False)
class _Replaced:
    """A variable that holds another value for the time of a call."""

    variable: nnx.Variable
    before: object
    during: object


@contextlib.contextmanager
def as_plain(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """Makes a unit's module usable in global view inside the block; variables that it does not write are restored.

    Its parameters are on the device: products do not accept arrays of both memories. Differentiating a padded one
    raises while an optimizer would see the padding.
    """
    is_offloaded = any(member.placement.on_host for member in unit.members)
    replaced = []
    for candidate in _plain_parameters(module, unit, is_offloaded=is_offloaded):
        before = candidate.variable.get_raw_value()
        if candidate.value is not before:
            replaced.append(_Replaced(candidate.variable, before, candidate.value))
    # Past the home of the variable, which would place what is written as planned: padded, or on the host again.
    for entry in replaced:
        _compat.write_past_home(entry.variable, entry.during)
    try:
        yield
    finally:
        for entry in replaced:
            is_written = entry.variable.get_raw_value() is not entry.during
            if not is_written:  # else the variable has a new value, which stays
                _compat.write_past_home(entry.variable, entry.before)


def _plain_parameters(module: nnx.Module, unit: Unit, *, is_offloaded: bool) -> list[PaddedCandidate]:
    """Returns the parameters with the values that they have in global view."""
    params = []
    for path, variable in walk(module):
        if not isinstance(variable, nnx.Param):
            continue
        x = variable.get_raw_value()
        if is_offloaded and _compat.on_host(x):
            x = fetched(x)
        params.append(PaddedCandidate(variable, unit, path, x))
    # Only a traced array can be differentiated, and to guard an array is to make another one.
    positions = []
    for i, param in enumerate(params):
        if padding_of(param.variable) is not None and _compat.is_tracer(param.value):
            positions.append(i)
    values = guarded(plain_class(module).__name__, at_positions(params, positions))
    for i, value in zip(positions, values, strict=True):
        params[i] = dataclasses.replace(params[i], value=value)
    return params
