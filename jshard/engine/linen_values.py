"""The values of Linen variables: arrays, boxed by Flax or, inside the region, by jshard."""

from collections.abc import Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, struct
from flax.core import meta

from jshard._padded import logical
from jshard.engine.reads import Stored, gathered_read, stored_in


@struct.dataclass
class Shard(meta.AxisMetadata[Any]):
    """A parameter in a scope inside the region that another unit gathers: reading it gathers it here."""

    value: Any
    stored: Stored = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The whole parameter."""
        return gathered_read(self.value, self.stored)

    def replace_boxed(self, val: Any) -> Any:
        """The value that is written instead."""
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Shard":
        """The same: the sharded dim is counted from the end, and layers come first."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Shard":
        """The same."""
        return self


def rules_without(axes: Collection[str]) -> list[tuple[str, Any]]:
    """The rules for logical axes without these mesh axes: inside the region an array is one shard along them."""
    found = []
    for name, entry in nn.get_logical_axis_rules():
        kept = tuple(a for a in (entry if isinstance(entry, (tuple, list)) else (entry,)) if a not in (None, *axes))
        found.append((name, kept if len(kept) > 1 else kept[0] if kept else None))
    return found


def as_arrays(raw: Any) -> Any:
    """The value of a variable, with arrays for numbers."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), raw)


def held_in(variable: nnx.Variable) -> Any:
    """The value of a variable: a box if it is a shard, else the logical array."""
    stored = stored_in(variable)
    return logical(variable).get_raw_value() if stored is None else Shard(variable.get_raw_value(), stored)
