"""What may act on partial values: equations that are linear in them.

A wrong entry here is silent: the sum over the shards of f(x_i) would be taken for f of the sum. Every entry says why.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jshard.engine.rules.table import same
from jshard.engine.values import PARTIAL, Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

ONE = frozenset(
    """
    neg reshape transpose reduce_sum broadcast_in_dim squeeze copy copy_p expand_dims rev slice split unstack tile real
    imag reduce_window_sum cumsum
    """.split()
)
"""Linear in their one operand."""

JOINED = {
    "add": (0, None),
    "add_any": (0, None),
    "sub": (0, None),
    "concatenate": (0, None),
    "stack": (0, None),
    "pad": (0, None),
    "select_n": (1, None),
    "scatter-add": (0, 1),
    "dynamic_update_slice": (0, 2),
}
"""Linear in several operands together: a whole one among them is made partial. The slice of operands that may be."""

NEVER_GROWS = frozenset("add add_any sub mul convert_element_type".split())


def apply(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The equation on partial values, if it is linear in them; None: they are to be summed before."""
    if any(v.is_split for v in values):
        return None
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [v.with_array(x) for x, v in zip(p.bind(eqn, [v.x for v in values]), values, strict=True)]
    ready = _ready(p, eqn, values)
    if ready is None:
        return None
    size = sum(array_bytes(v.x) for v in values if v.is_partial)
    if array_bytes(eqn.outvars[0].aval) > size and name not in NEVER_GROWS:
        return None  # sum before it grows
    return same(p, eqn, ready, PARTIAL)


def _ready(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The operands, of which those are partial in which the equation is linear; None where it is not."""
    name, partial = eqn.primitive.name, [v.is_partial for v in values]
    if name in ONE:
        return values
    if name == "convert_element_type":  # to an integer it rounds
        return values if _is_inexact(eqn.outvars[0]) or not _is_inexact(eqn.invars[0]) else None
    if name in JOINED:
        first, last = JOINED[name]
        last = len(values) if last is None else last
        if name == "scatter-add":  # operand and updates; the indices between them are not
            return None if partial[1] else [p.partial(values[0]), values[1], p.partial(values[2])]
        if any(partial[:first]) or any(partial[last:]):
            return None
        return [*values[:first], *[p.partial(v) for v in values[first:last]], *values[last:]]
    if name in ("mul", "dot_general", "conv_general_dilated"):  # bilinear
        return values if sum(partial) == 1 else None
    if name == "div":  # an integer's rounds
        return values if partial == [True, False] and _is_inexact(eqn.invars[0]) else None
    if name in ("dynamic_slice", "gather"):
        return values if partial[0] and sum(partial) == 1 else None
    return None


def _is_inexact(atom: object) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)  # type: ignore[attr-defined]
