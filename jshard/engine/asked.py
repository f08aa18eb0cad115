"""Which inputs of a unit somebody wants gradients of: a frozen parameter is gathered, and has none.

Differentiation itself knows: what has no tangent is not asked for. So a parameter is frozen by whatever the user's own
step does about it (`nnx.DiffState`, `jax.lax.stop_gradient`), and costs no product, no reduction, nothing saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jshard.engine.collectives import vary


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Asked:
    """For each of some lists of arrays, which of them gradients are asked for.

    Args:
        groups: a flag for each array, list by list.
    """

    groups: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, *groups: Sequence[Any]) -> Asked:
        """What is asked of the arguments of a forward rule with `symbolic_zeros`."""
        return cls(tuple(tuple(x.perturbed for x in group) for group in groups))

    def __bool__(self) -> bool:
        return any(map(any, self.groups))

    def wholly(self, group: int) -> Asked:
        """The same, with gradients asked for of all of one list."""
        groups = ((True,) * len(flags) if i == group else flags for i, flags in enumerate(self.groups))
        return Asked(tuple(groups))

    def vjp(self, call: Callable, *groups: list, has_aux: bool = False) -> tuple:
        """`jax.vjp` of a function of lists of arrays, with respect to those that are asked for."""

        def of_asked(*asked: list) -> Any:
            its = map(iter, asked)
            zipped = zip(its, groups, self.groups, strict=True)
            return call(
                *([next(it) if f else x for x, f in zip(group, flags, strict=True)] for it, group, flags in zipped)
            )

        picked = [
            [x for x, f in zip(group, flags, strict=True) if f]
            for group, flags in zip(groups, self.groups, strict=True)
        ]
        return jax.vjp(of_asked, *picked, has_aux=has_aux)

    def spread(self, gradients: Iterable[list]) -> list[list]:
        """The gradients list by list, None for what was not asked for."""
        found = zip(map(iter, gradients), self.groups, strict=True)
        return [[next(it) if f else None for f in flags] for it, flags in found]


def values(tree: Any) -> Any:
    """The arguments of a forward rule with `symbolic_zeros`, as they were given."""
    return jax.tree.map(lambda x: x.value, tree)


def is_nothing(gradients: Any) -> bool:
    """Whether what comes back to a unit is known to be zero, as behind `jax.lax.stop_gradient`."""
    return all(isinstance(x, SymbolicZero) or x.dtype == jax.dtypes.float0 for x in jax.tree.leaves(gradients))


def filled(gradients: Any) -> Any:
    """Incoming gradients with zeros for those that are known to be zero."""
    return jax.tree.map(_filled, gradients)


def _filled(x: Any) -> Any:
    if not isinstance(x, SymbolicZero):
        return x
    of: Any = x.aval
    if of.dtype == jax.dtypes.float0:
        return np.zeros(of.shape, of.dtype)
    return vary(jnp.zeros(of.shape, of.dtype), tuple(of.manual_axis_type.varying))
