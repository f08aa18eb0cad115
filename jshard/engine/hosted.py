"""Parameters in host memory, where a model runs as plain Flax."""

import contextlib
from collections.abc import Iterator

from flax import nnx

from jshard import _compat
from jshard._nnx import Unit, walk
from jshard._offload import fetched


@contextlib.contextmanager
def on_device(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """Inside, the parameters of a unit's module are on the device: products do not take arrays of both memories."""
    moves = any(member.placement.on_host for member in unit.members)
    with all_on_device(module) if moves else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def all_on_device(module: nnx.Module) -> Iterator[None]:
    """The same of all parameters of a module."""
    moved = []
    for _, variable in walk(module):
        if isinstance(variable, nnx.Param) and _compat.on_host(stored := variable.get_raw_value()):
            variable.set_raw_value(there := fetched(stored))
            moved.append((variable, stored, there))
    try:
        yield
    finally:
        for variable, stored, there in moved:
            if variable.get_raw_value() is there:
                variable.set_raw_value(stored)
