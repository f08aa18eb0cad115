"""Updates of Linen parameters that are no arrays: of one that is frozen, and of one that lies in host memory.

A `TrainState` calls `optax.apply_updates`, which adds to each array of the parameters what it finds at its place. Where
that is no array, it says itself what comes of the sum.
"""

from typing import Any

import jax
import optax

from jshard._offload import fetched, placed_like

_VALUE = jax.tree_util.GetAttrKey("value")


class Frozen(optax.MaskedNode):
    """The gradient and the update of a parameter that is frozen: none. The parameter stays as it is.

    Maps over trees pass it by, as they do what Optax has masked.
    """

    __slots__ = ()
    __array_ufunc__ = None  # an array of numpy leaves the sum to it, too

    def __radd__(self, parameter: Any) -> Any:
        return parameter


def is_masked(x: Any) -> bool:
    """Whether something stands for an array that is left out, of jshard's or of Optax."""
    return isinstance(x, optax.MaskedNode)


@jax.tree_util.register_pytree_with_keys_class
class HostUpdate:
    """The update of a parameter in host memory: the sum lies there, too.

    The update streams such sums, so it has this one already. It holds for that very array only, and is lost where the
    update is changed: then the parameter is fetched, and the sum made anew.

    Args:
        value: the update, on the device.
        made: the parameter and the sum.
    """

    __array_ufunc__ = None

    def __init__(self, value: Any, made: tuple[Any, Any] | None = None) -> None:
        self.value, self._made = value, made

    def __radd__(self, parameter: Any) -> Any:
        if self._made is not None and self._made[0] is parameter:
            return self._made[1]
        return placed_like((fetched(parameter) + self.value).astype(parameter.dtype), parameter)

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        return ((_VALUE, self.value),), None

    def tree_flatten(self) -> tuple[tuple, None]:
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> "HostUpdate":
        return cls(children[0])
