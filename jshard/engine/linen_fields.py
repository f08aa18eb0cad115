"""Arrays that a Linen module was given as fields: a unit takes them as it takes arguments, so that gradients pass."""

import contextlib
import dataclasses
from collections.abc import Iterator

import flax.linen as nn
import jax

from jshard.engine.call import is_array


class Fields:
    """The fields of a module that hold arrays.

    Attributes:
        arrays: these arrays.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        names = [f.name for f in dataclasses.fields(module) if f.init and f.name not in ("parent", "name")]
        values = {name: getattr(module, name) for name in names}
        self._values = {k: v for k, v in values.items() if any(map(is_array, jax.tree.leaves(v)))}
        self._leaves, self._tree = jax.tree.flatten(self._values)
        self.arrays = [x for x in self._leaves if is_array(x)]

    @contextlib.contextmanager
    def hold(self, arrays: list[jax.Array]) -> Iterator[None]:
        """Inside, the module has these arrays instead: Flax's lifting makes its copies of the module from it."""
        it = iter(arrays)
        self._set(jax.tree.unflatten(self._tree, [next(it) if is_array(x) else x for x in self._leaves]))
        try:
            yield
        finally:
            self._set(self._values)

    def _set(self, values: dict) -> None:
        for name, value in values.items():
            object.__setattr__(self._module, name, value)
