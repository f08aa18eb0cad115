"""Gradients of stacked layers that a loop reads outside of units: which of its results are stored row by row.

A loop in backward stacks what its trips return. A sum over the shards that is left open until the end would need the
gradient of all layers whole on each device, so each trip stores the shard of its row.
"""

import collections
from collections.abc import Mapping
from typing import Any

from jax.extend import core as jex

from jshard import _compat
from jshard.engine.rules import calls
from jshard.engine.values import Shard

_PASSED_ON = ("convert_element_type", "copy", "copy_p")


def stored_rows(jaxpr: Any, gradients: Mapping[Any, Shard]) -> dict[Any, Shard]:
    """The stacked results of loops that become gradients, and nothing else, with how those are stored.

    Where a program is called more than once, a row may be stored that is none: whoever reads it gathers it again.

    Args:
        jaxpr: a program, which may hold others.
        gradients: the results of it that are gradients of stored parameters.
    """
    uses = collections.Counter(a for e in jaxpr.eqns for a in e.invars if isinstance(a, jex.Var))
    uses.update(a for a in jaxpr.outvars if isinstance(a, jex.Var))
    wanted = {v: s for v, s in gradients.items() if uses[v] == 1}
    found: dict[Any, Shard] = {}
    for e in reversed(jaxpr.eqns):
        mine = {k: wanted[v] for k, v in enumerate(e.outvars) if v in wanted}
        if not mine:
            continue
        if e.primitive.name in _PASSED_ON and uses[e.invars[0]] == 1:
            wanted[e.invars[0]] = mine[0]
        elif e.primitive.name in calls.CALLS:
            inner, _ = calls.program(e)
            found |= stored_rows(inner, {inner.outvars[k]: s for k, s in mine.items()})
        elif e.primitive.name == "scan":
            _, num_carried = _compat.scan_arguments(e)
            body, _ = calls.opened(e.params["jaxpr"])
            stacked = {k: s for k, s in mine.items() if k >= num_carried and not _is_of_unit(body, body.outvars[k])}
            found |= {e.outvars[k]: s for k, s in stacked.items()}
    return found


def _is_of_unit(jaxpr: Any, variable: Any) -> bool:
    """Whether a unit has made a value, and so has reduced it, or will."""
    for e in jaxpr.eqns:
        if variable in e.outvars:
            if e.primitive.name in calls.CALLS:
                inner, _ = calls.program(e)
                return _is_of_unit(inner, inner.outvars[e.outvars.index(variable)])
            return e.primitive.name == "unit"
    return False
