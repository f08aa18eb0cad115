"""A backward function taken apart, so that what it needs can be kept elsewhere, or gathered again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Pull:
    """A backward function without the arrays that it has in common with the inputs of forward.

    Args:
        tree: its structure.
        slots: for each array in it, the position among those inputs; None if it is saved.
        keys: which of the saved are random keys, by their implementation.
    """

    tree: Any
    slots: tuple[int | None, ...]
    keys: tuple[Any, ...]

    @classmethod
    def apart(cls, pull: Callable, known: Any) -> "tuple[Pull, list]":
        """Takes a backward function apart, given those inputs; the second is what has to be saved, as arrays."""
        residuals, tree = jax.tree.flatten(pull)
        inputs = jax.tree.leaves(known)
        slots = tuple(next((i for i, x in enumerate(inputs) if r is x), None) for r in residuals)
        saved = [r for r, slot in zip(residuals, slots, strict=True) if slot is None]
        keys = tuple(jax.random.key_impl(r) if _is_key(r) else None for r in saved)
        return cls(tree, slots, keys), [jax.random.key_data(r) if _is_key(r) else r for r in saved]

    def together(self, known: Any, saved: list) -> Callable:
        """The backward function again."""
        found = (jax.random.wrap_key_data(r, impl=k) if k else r for r, k in zip(saved, self.keys, strict=True))
        inputs = jax.tree.leaves(known)
        return jax.tree.unflatten(self.tree, [next(found) if s is None else inputs[s] for s in self.slots])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
