"""The call of a unit as a function of arrays, to run on gathered parameters."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import detach, dotted, nested_units
from jshard._policies import MixedPrecision
from jshard.engine.call import Before, Call, Kept, Live, is_array, is_float, raw
from jshard.engine.chain import Chain, Token
from jshard.engine.context import Region, region_scope
from jshard.engine.reads import hold_full


class Body:
    """The call as a function of arrays.

    Attributes:
        others: parameters of other units, and state, as far as they have gradients.
        inputs: the arguments that have gradients.
        fixed: what has none.
        region: the sharded region it runs in; None in global view.
    """

    def __init__(self, call: Call, mine: tuple[int, ...], precision: MixedPrecision, region: Region | None) -> None:
        self.call, self.mine, self.precision, self.region = call, mine, precision, region
        params, state, arrays = call.values()
        others, self._others_tree = jax.tree.flatten(([x for i, x in enumerate(params) if i not in mine], state))
        self._is_float = [is_float(x) for x in others], [is_float(x) for x in arrays]
        self.others = [x for x in others if is_float(x)]
        self.inputs = [x for x in arrays if is_float(x)]
        self.fixed = [x for x in (*others, *arrays) if not is_float(x)]

    def compute(
        self,
        full: list,
        others: list,
        inputs: list,
        fixed: list,
        started: Token | None,
        *,
        chain: Chain | None = None,
    ) -> list:
        """Runs the method; returns the arrays of its result, then those of the changed state."""
        of_others, of_arrays = self._is_float
        other_it, input_it, fixed_it = iter(others), iter(inputs), iter(fixed)
        leaves = [next(other_it if f else fixed_it) for f in of_others]
        arrays = [next(input_it if f else fixed_it) for f in of_arrays]
        others, state = jax.tree.unflatten(self._others_tree, leaves)
        axes = () if self.region is None else self.region.axes
        return self.apply(full, others, state, arrays, chain or Chain(axes, started))

    def apply(self, full: list, others: list, state: list, arrays: list, chain: Chain) -> list:
        """The same from the unit's own parameters, those of others, the state and the arguments."""
        live = self._live(full, others, state, arrays)
        before = Before.of(live)
        with region_scope(self._inner_region(live, chain)), _loops_explained(self.call.where):
            out = self.call.method(live.module, *live.args, **live.kwargs)
        self.changes = before.changes(live, self.call.where)
        leaves, self.out_tree = jax.tree.flatten(out)
        self._static = [None if is_array(x) else x for x in leaves]
        self._dynamic = [is_array(x) for x in leaves]
        values, self._state_tree = jax.tree.flatten([raw(v) for _, v in self.changes])
        return [*self._cast([x for x in leaves if is_array(x)], self.precision.output), *values]

    def _inner_region(self, live: Live, chain: Chain) -> Region | None:
        """The region as the units inside see it."""
        if self.region is None:
            return None
        return dataclasses.replace(self.region, chain=chain, names=_names(live.module, self.region.unit))

    def result(self, outs: list) -> tuple[Any, Kept]:
        """What the method returned, and the state that it changed, from the arrays that `compute` returned."""
        it = iter(outs)
        leaves = [next(it) if d else s for d, s in zip(self._dynamic, self._static, strict=True)]
        values = jax.tree.unflatten(self._state_tree, list(it))
        changes = [(path, v.replace(x)) for (path, v), x in zip(self.changes, values, strict=True)]
        return jax.tree.unflatten(self.out_tree, leaves), changes

    def finish(self, outs: list) -> Any:
        """The result as the method gave it; changed state goes back to the caller's module."""
        out, changes = self.result(outs)
        self.call.write_back(changes)
        return out

    def _live(self, full: list, others: list, state: list, arrays: list) -> Live:
        """A copy of the module that computes: its class is plain, and its own parameters are whole."""
        full_at, rest = dict(zip(self.mine, full, strict=True)), iter(others)
        params = [full_at[i] if i in full_at else next(rest) for i in range(len(self.call.params))]
        live = self.call.put_together(params, state, self._cast(arrays, self._input_dtype))
        detach(live.module)
        own = {self.call.params[i][0] for i in self.mine}
        for path, variable in live.variables(nnx.Param):
            if path in own:
                hold_full(variable)
        return live

    @property
    def casts_inputs(self) -> bool:
        """Whether floating inputs are cast before the method sees them."""
        return self._input_dtype is not None

    @property
    def _input_dtype(self) -> str | None:
        return self.precision.param if self.precision.cast_inputs else None

    @staticmethod
    def _cast(arrays: Sequence, dtype: str | None) -> list:
        return [x.astype(dtype) if dtype and jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x for x in arrays]


def _names(module: nnx.Module, name: str) -> dict[int, str]:
    """Paths from the root of the units inside, by id of their modules."""
    prefix = "" if name == dotted(()) else f"{name}/"
    return {id(unit): prefix + dotted(path) for path, unit in nested_units(module) if path}


@contextlib.contextmanager
def _loops_explained(where: str) -> Iterator[None]:
    """Tells in the model's words what jax says of a loop whose carry starts the same on all data shards."""
    try:
        yield
    except TypeError as error:
        if not _compat.is_carry_mismatch(error):
            raise
        raise CallError(
            "A loop in the model starts from a constant and ends with values of the batch.",
            where=where,
            why="the constant is the same on all data shards, the result is not, and a loop's carry keeps its type.",
            do="say that the start belongs to each shard: carry = js.per_shard(jnp.zeros(...)).",
        ) from error
