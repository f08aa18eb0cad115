"""One unit inside the region: its call as a function of arrays, run on gathered parameters."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import OUTER, OWN, Member, Unit, detach, dotted
from jshard._plan import resharded
from jshard._policies import MixedPrecision, checkpoint_policy
from jshard.engine.call import Before, Call, Live, is_array, is_float, raw
from jshard.engine.collectives import gather
from jshard.engine.context import Region, region_scope
from jshard.engine.reads import hold_full
from jshard.engine.reshard import resharding


def run_unit(
    module: nnx.Module, unit: Unit, region: Region, method: Callable, args: tuple, kwargs: dict, *, outermost: bool
) -> Any:
    """Calls a method of a unit's module inside the region.

    Args:
        module: the unit's module; its parameters hold shards.
        unit: its record.
        region: the region.
        method: the plain method.
        args: positional arguments after self.
        kwargs: keyword arguments.
        outermost: this call opened the region. It then gathers what an enclosing unit would have.
    """
    call = Call(module, method, args, kwargs)
    if not outermost and not unit.nested:
        raise _annotated_late(call)
    mine = {} if region.gathered else _gathered_here(call, unit, outermost)
    body = _Body(call, tuple(mine), unit.policy.mixed_precision, region)
    placements = [member.placement for member in mine.values()]
    shards = [raw(call.params[i][1]) for i in mine]
    reshard = resharded(unit, is_root=outermost) if any(p.dim is not None for p in placements) else False
    policy = checkpoint_policy(unit.policy.remat)
    if reshard is not False:
        pieces = None if reshard is True else int(reshard)
        run = resharding(body.compute, placements, region.mesh, pieces=pieces, policy=policy)
        return body.finish(run(shards, body.floats, body.fixed))
    full = [gather(x, p, region.mesh) for x, p in zip(shards, placements, strict=True)]
    compute = body.compute if unit.policy.remat == "none" else jax.checkpoint(body.compute, policy=policy)
    return body.finish(compute(full, body.floats, body.fixed))


def _gathered_here(call: Call, unit: Unit, outermost: bool) -> dict[int, Member]:
    """The parameters that this call gathers, by position: the unit's own, and what no inner unit will gather."""
    found = {i: unit.by_path.get(path[1:]) for i, (path, _) in enumerate(call.params) if path[0] == 0}
    owners = (OWN, OUTER) if outermost else (OWN,)
    mine = {i: m for i, m in found.items() if m is not None and m.owner in owners}
    for i, member in mine.items():
        check_scanned(member, raw(call.params[i][1]).ndim, call.where)
    return mine


def check_scanned(member: Member, ndim: int, where: str) -> None:
    """Raises if the dim along which a parameter is sharded is gone, because a loop runs over it."""
    placement = member.placement
    from_end = placement.dim_from_end
    if from_end is not None and -from_end > ndim:
        raise CallError(
            "A parameter is sharded along the dim that a scan runs over.",
            where=f"{where}: {dotted(member.path)}  {placement.dtype}{list(placement.shape)}",
            why=f"dim {placement.dim} is gone inside the scan.",
            do="js.fully_shard(layers, mesh=mesh, stacked=1)",
        )


def _annotated_late(call: Call) -> CallError:
    return CallError(
        "A unit was annotated after the module around it.",
        where=call.where,
        why="the module around it took its parameters as its own, and would gather them a second time.",
        do="annotate submodules first: js.fully_shard(model.inner, mesh=mesh), then js.fully_shard(model, mesh=mesh).",
    )


class _Body:
    """The call as a function of arrays.

    Attributes:
        floats: the inputs besides this unit's own parameters that have gradients.
        fixed: the other inputs.
    """

    def __init__(self, call: Call, mine: tuple[int, ...], precision: MixedPrecision, region: Region) -> None:
        self.call, self.mine, self.precision, self.region = call, mine, precision, region
        params, state, arrays = call.values()
        others = [x for i, x in enumerate(params) if i not in mine]
        leaves, self._tree = jax.tree.flatten((others, state, arrays))
        self._is_float = [is_float(x) for x in leaves]
        self.floats = [x for x, f in zip(leaves, self._is_float, strict=True) if f]
        self.fixed = [x for x, f in zip(leaves, self._is_float, strict=True) if not f]

    def compute(self, full: list, floats: list, fixed: list) -> list:
        """Runs the method; returns the arrays of its result, then those of the changed state."""
        live = self._live(full, floats, fixed)
        before = Before.of(live)
        with region_scope(self.region), _loops_explained(self.call.where):
            out = self.call.method(live.module, *live.args, **live.kwargs)
        self._changes = before.changes(live, self.call.where)
        leaves, self._out_tree = jax.tree.flatten(out)
        self._static = [None if is_array(x) else x for x in leaves]
        self._dynamic = [is_array(x) for x in leaves]
        values, self._state_tree = jax.tree.flatten([raw(v) for _, v in self._changes])
        return [*self._cast([x for x in leaves if is_array(x)], self.precision.output), *values]

    def finish(self, outs: list) -> Any:
        """The result as the method gave it; changed state goes back to the caller's module."""
        it = iter(outs)
        leaves = [next(it) if d else s for d, s in zip(self._dynamic, self._static, strict=True)]
        values = jax.tree.unflatten(self._state_tree, list(it))
        self.call.write_back([(p, v.replace(x)) for (p, v), x in zip(self._changes, values, strict=True)])
        return jax.tree.unflatten(self._out_tree, leaves)

    def _live(self, full: list, floats: list, fixed: list) -> Live:
        """A copy of the module that computes: its class is plain, and its own parameters are whole."""
        float_it, fixed_it = iter(floats), iter(fixed)
        leaves = [next(float_it if f else fixed_it) for f in self._is_float]
        others, state, arrays = jax.tree.unflatten(self._tree, leaves)
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
    def _input_dtype(self) -> str | None:
        return self.precision.param if self.precision.cast_inputs else None

    @staticmethod
    def _cast(arrays: Sequence, dtype: str | None) -> list:
        return [x.astype(dtype) if dtype and jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x for x in arrays]


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
