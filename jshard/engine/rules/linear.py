"""What may act on partial values: equations that are linear in them.

A wrong entry here is silent: the sum over the shards of f(x_i) would be taken for f of the sum. So an entry needs a
proof that f(x + y) = f(x) + f(y) for all x and y, with the other operands whole (the same on every shard):

* Numbers of floating point are taken for real numbers: rounding differs as it does between any two orders of a sum.
  Where one device has an infinity, the sum may have NaN.
* Integers are taken modulo 2**bits, as sums of them wrap on one device, too. A conversion to fewer bits keeps that; one
  to more bits, to floating point or to bool does not.
* A constant term is not linear: a `gather` that fills what is out of bounds is, for a fill of 0 (or of NaN) only.
"""

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jshard.engine import rules
from jshard.engine.rules import PARTIAL, Eqn, Partitioner, Value, same

MOVES = frozenset(
    """
    broadcast_in_dim copy name over_expert reshape rev slice split squeeze stop_gradient tile transpose unstack
    all_gather all_to_all psum reduce_scatter
    """.split()
)
"""Each element of the result is an element of the operand; of collectives over other axes, or a sum of elements."""

SUMS = frozenset("conj cumsum imag neg real reduce_sum reduce_window_sum".split())
"""Each element of the result is a sum of elements, or of their parts, with signs. Windows are padded with zeros."""

JOINED = dict.fromkeys("add add_any complex concatenate pad stack sub".split(), slice(0, None)) | {
    "dynamic_update_slice": slice(0, 2),
    "scatter-add": slice(0, None, 2),
    "scatter-sub": slice(0, None, 2),
    "select_n": slice(1, None),
}
"""Linear in several operands together, those of the slice: whole ones among them are made partial. The others (indices,
a predicate) must be whole."""

BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
"""Linear in each of two operands, while the other is whole."""

TAKES = frozenset("dynamic_slice gather".split())
"""Linear in the first operand; the indices must be whole."""

NAMES = MOVES | SUMS | JOINED.keys() | BILINEAR | TAKES | {"div", "convert_element_type"}


def apply(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The equation on partial values, if it is linear in them; None: they are to be summed before."""
    if not eqn.outvars or any(v.is_split for v in values) or not _is_sound(eqn, values):
        return None
    name, partial = eqn.primitive.name, [k for k, v in enumerate(values) if v.is_partial]
    grows = math.prod(eqn.outvars[0].aval.shape) > sum(math.prod(values[k].shape) for k in partial)
    if name in JOINED:
        joined = range(len(values))[JOINED[name]]
        is_linear = all(k in joined for k in partial)
    elif name in BILINEAR:
        is_linear = len(partial) == 1
    elif name in TAKES or name == "div":
        is_linear = partial == [0]
    else:
        is_linear = name in MOVES or name in SUMS or name == "convert_element_type"
    if not is_linear:
        return None
    if name in JOINED:
        values = [p.partial(v) if k in joined else v for k, v in enumerate(values)]
    if grows and not p.is_for_gradients(eqn.outvars[0]):  # sum before it grows
        return None
    return same(p, eqn, values, PARTIAL)


def _is_sound(eqn: Eqn, values: list[Value]) -> bool:
    """Whether dtypes and fills keep an equation linear."""
    name, new = eqn.primitive.name, eqn.outvars[0].aval.dtype
    bits = lambda dtype: np.dtype(dtype).itemsize
    for old in (v.x.dtype for v in values if v.is_partial):
        if jnp.issubdtype(old, jnp.inexact):
            sound = jnp.issubdtype(new, jnp.inexact) and bits(new) > 1  # a float of 8 bits is a quantisation
        else:
            sound = jnp.issubdtype(new, jnp.integer) and bits(new) <= bits(old) and name != "div"
        if not sound:
            return False
    if name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        fill = eqn.params["fill_value"]
        return jnp.issubdtype(new, jnp.inexact) if fill is None else bool(fill == 0 or math.isnan(fill))
    return True


def needed_elsewhere(jaxpr: Any, gradients: Collection[int]) -> set[Any]:
    """Variables of a program that do not flow to its gradients (outputs, by number) alone, by linear equations alone.

    The others may stay partial even where they grow: they are summed once, as gradients.
    """
    elsewhere = {a for k, a in enumerate(jaxpr.outvars) if k not in gradients and not isinstance(a, jex.Literal)}
    for eqn in reversed(jaxpr.eqns):
        free = [k for k, a in enumerate(eqn.outvars) if a not in elsewhere]
        if eqn.primitive.name in rules.CALLS:
            inner, _ = rules.program(eqn)
            held = needed_elsewhere(inner, free)
            given = rules.operands(eqn, eqn.invars)
            used = [a for a, inside in zip(given, inner.invars, strict=True) if inside in held]
        elif eqn.primitive.name in NAMES and len(free) == len(eqn.outvars):
            used = []
        else:
            used = eqn.invars
        elsewhere.update(a for a in used if not isinstance(a, jex.Literal))
    return elsewhere
