"""Where the values of a placed variable belong: what is written to it is placed as planned, from wherever it comes.

A state of host arrays, or of arrays on one device, would else make a parameter whole on one device, and the next step
would compute with it: right numbers, and nothing sharded.
"""

import dataclasses

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.plans.numeric import Value

_ARRAYS = (jax.Array, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Home:
    """The sharding of a variable's stored array, and the shape for which it was planned."""

    sharding: NamedSharding
    shape: tuple[int, ...]

    def arriving(self, value: Value) -> Value:
        """Returns a value, or a part of one, on the devices of this home.

        JAX does not compute with arrays on other devices.
        """
        if not isinstance(value, jax.Array) or _compat.is_tracer(value):
            return value
        # JAX moves an uncommitted array itself.
        if not value.committed or value.sharding.device_set == self.sharding.device_set:
            return value
        if value.shape == self.shape:
            return _put(value, self.sharding)
        # A part, such as a row: the sharding of the whole need not divide it.
        return _put(value, NamedSharding(self.sharding.mesh, PartitionSpec()))

    def settled(self, value: Value) -> Value:
        """Returns a value that was written, placed as planned; others, such as a traced row of a stack, as they are."""
        if self.is_elsewhere(value):
            return _put(value, self.sharding)
        return value

    def is_elsewhere(self, value: object) -> bool:
        """Returns whether a value belongs here and is not here."""
        # Another shape is another array, such as a layer's row in a loop: it has no place by this plan.
        if not isinstance(value, _ARRAYS) or _compat.is_tracer(value) or value.shape != self.shape:
            return False
        if not isinstance(value, jax.Array):
            return True
        current = value.sharding
        # Equality first: the quicker test.
        return current != self.sharding and not current.is_equivalent_to(self.sharding, value.ndim)


def settle_in(variable: nnx.Variable, home: Home | None) -> None:
    """Gives a variable its home, and moves its value there; None, on a mesh without devices, changes nothing."""
    if home is None:
        return
    if _compat.home_of(variable) != home:
        _compat.give_home(variable, home)
    _compat.settle(variable)


def place_of(value: object) -> str:
    """Returns where an array is, as text."""
    if not isinstance(value, jax.Array):
        return "an array of the host"
    if len(value.sharding.device_set) == 1:
        return "whole on one device"
    return f"{list(value.sharding.shard_shape(value.shape))} on each device"


def _put(value: Value, sharding: NamedSharding) -> jax.Array:
    with jax.ensure_compile_time_eval():  # else, in a trace, the variable would hold a value of the trace
        return jax.device_put(value, sharding)
