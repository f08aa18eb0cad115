"""An engine that shards nothing: it traces each call of a Linen model once, as the engine does, and evaluates that."""

import itertools
from typing import Any

import jax
from jax.extend import core

from jshard.plans.padding import Padding


class StandIn:
    """Stands in for `jshard.engine.route.run_call`.

    Attributes:
        calls: where each call was, in order.
        traced: where each was that ran the user's Python.
        units: the record that each call came with.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.traced: list[str] = []
        self.units: list[Any] = []
        self._kept: dict[Any, Any] = {}

    def __call__(self, call: Any, name: str, unit: Any) -> Any:
        self.calls.append("/".join(call.path))
        self.units.append(unit)
        paddings = [p and Padding.of(p) for p in call.placements]
        params = [
            x if padding is None or call.path != () else padding.cut(x)
            for x, padding in zip(call.params, paddings, strict=True)
        ]
        avals = tuple((x.shape, str(x.dtype), x.weak_type) for x in map(jax.typeof, (*params, *call.inputs)))
        key = call.key, avals
        if key not in self._kept:
            self.traced.append("/".join(call.path))
            closed = jax.make_jaxpr(lambda *xs, call=call: list(itertools.chain(*call.body(*xs))))(params, call.inputs)
            self._kept[key] = closed, call.result
            if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
                del self._kept[key]
                return call.finish(core.jaxpr_as_fun(closed)(*params, *call.inputs), call.result)
        closed, result = self._kept[key]
        return call.finish(core.jaxpr_as_fun(closed)(*params, *call.inputs), result)
