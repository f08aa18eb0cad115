"""One unit inside the region: gather its parameters, compute, let them go, gather again for backward."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import NESTED, OWN, Member, Unit, detach
from jshard._placement import Placement
from jshard._plan import resharded
from jshard._policies import MixedPrecision, checkpoint_policy
from jshard.engine import collectives
from jshard.engine.call import Before, Call, Kept, Live, is_array, is_float, raw
from jshard.engine.context import Region, region_scope
from jshard.engine.reads import hold_full

Compute = Callable[[list, list, list], list]


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
    mine = [] if region.gathered else [i for i, m in _members(call, unit) if _gathers(m, outermost)]
    members = dict(_members(call, unit))
    placements = [members[i].placement for i in mine]
    box = _Box(call, mine, unit.policy.mixed_precision, region)
    floats, fixed = box.split(call)
    shards = [raw(call.params[i][1]) for i in mine]
    outs = _run(unit, region.mesh, box.compute, placements, shards, floats, fixed, outermost)
    return box.finish(outs)


def _members(call: Call, unit: Unit) -> list[tuple[int, Member]]:
    """The unit's record of each parameter in the call, by position; arguments may bring others."""
    found = ((i, unit.by_path.get(path[1:])) for i, (path, _) in enumerate(call.params) if path[0] == 0)
    return [(i, m) for i, m in found if m is not None]


def _gathers(member: Member, outermost: bool) -> bool:
    return member.owner == OWN or (outermost and member.owner != NESTED)


@dataclasses.dataclass
class _Box:
    """The call as a function of arrays, and what is not an array of its result."""

    call: Call
    mine: Sequence[int]
    precision: MixedPrecision
    region: Region
    layout: Any = None

    def split(self, call: Call) -> tuple[list, list]:
        """The inputs besides this unit's own parameters: floating ones, which have gradients, and the rest."""
        params, state, arrays = call.values()
        others = [x for i, x in enumerate(params) if i not in self.mine]
        leaves, self.tree = jax.tree.flatten((others, state, arrays))
        self.is_float = [is_float(x) for x in leaves]
        floats = [x for x, f in zip(leaves, self.is_float, strict=True) if f]
        return floats, [x for x, f in zip(leaves, self.is_float, strict=True) if not f]

    def compute(self, full: list, floats: list, fixed: list) -> list:
        """Runs the method; returns the arrays of its result, then those of the changed state."""
        float_it, fixed_it = iter(floats), iter(fixed)
        others, state, arrays = jax.tree.unflatten(
            self.tree, [next(float_it if f else fixed_it) for f in self.is_float]
        )
        full_at, rest = dict(zip(self.mine, full, strict=True)), iter(others)
        params = [full_at[i] if i in full_at else next(rest) for i in range(len(self.call.params))]
        live = self.call.put_together(params, state, self._cast(arrays, self._input_dtype))
        self._open(live)
        before = Before.of(live)
        with region_scope(self.region), _loops_explained(self.call.where):
            out = self.call.method(live.module, *live.args, **live.kwargs)
        changes = before.changes(live, self.call.where)
        leaves, tree = jax.tree.flatten(out)
        arrays_out = self._cast([x for x in leaves if is_array(x)], self.precision.output)
        values, values_tree = jax.tree.flatten([raw(v) for _, v in changes])
        self.layout = (tree, [None if is_array(x) else x for x in leaves], [is_array(x) for x in leaves])
        self.changed: Kept = changes
        self.values_tree = values_tree
        return [*arrays_out, *values]

    def finish(self, outs: list) -> Any:
        """The result as the method gave it; changed state goes back to the caller's module."""
        tree, static, dynamic = self.layout
        it = iter(outs)
        leaves = [next(it) if d else s for d, s in zip(dynamic, static, strict=True)]
        values = jax.tree.unflatten(self.values_tree, list(it))
        self.call.write_back([(p, v.replace(x)) for (p, v), x in zip(self.changed, values, strict=True)])
        return jax.tree.unflatten(tree, leaves)

    def _open(self, live: Live) -> None:
        """The copy of the module computes: its class is plain again, and its own parameters are whole."""
        detach(live.module)
        own_paths = {self.call.params[i][0] for i in self.mine}
        for path, variable in live.variables(nnx.Param):
            if path in own_paths:
                hold_full(variable)

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


def _run(
    unit: Unit,
    mesh: Mesh,
    compute: Compute,
    placements: list[Placement],
    shards: list,
    floats: list,
    fixed: list,
    outermost: bool,
) -> list:
    reshard = resharded(unit, is_root=outermost)
    remat = unit.policy.remat
    if reshard and shards:
        pieces = None if reshard is True else int(reshard)
        return _resharded(compute, placements, mesh, pieces, checkpoint_policy(remat), shards, floats, fixed)
    full = [collectives.gather(x, p, mesh) for x, p in zip(shards, placements, strict=True)]
    if remat == "none":
        return compute(full, floats, fixed)
    policy = remat if callable(remat) else checkpoint_policy(remat)
    return jax.checkpoint(compute, policy=policy)(full, floats, fixed)


def _resharded(
    compute: Compute,
    placements: list[Placement],
    mesh: Mesh,
    pieces: int | None,
    policy: Callable | None,
    shards: list,
    floats: list,
    fixed: list,
) -> list:
    """The unit as a function of its shards whose backward gathers them again.

    Forward saves what the checkpoint policy allows, and for each gathered parameter the shard in its place
    (or the piece of it, with `pieces`). Backward waits for the incoming gradient before it gathers, so that the
    copy of one unit is not brought in while another's is still needed.
    """

    @jax.custom_vjp
    def run(shards: list, floats: list, fixed: list) -> list:
        return compute(gather_all(shards), floats, fixed)

    def gather_all(shards: list) -> list:
        return [collectives.all_gather(x, p, mesh) for x, p in zip(shards, placements, strict=True)]

    def forward(shards: list, floats: list, fixed: list) -> tuple[list, tuple]:
        full = gather_all(shards)
        step = jax.checkpoint(compute, policy=policy)
        outs, pull = jax.vjp(lambda full, floats: step(full, floats, fixed), full, floats)
        kept = shards
        if pieces is not None:
            kept = [collectives.keep_piece(x, p, pieces) for x, p in zip(full, placements, strict=True)]
        residuals, tree = jax.tree.flatten(pull)
        slots = tuple(next((i for i, w in enumerate(full) if r is w), None) for r in residuals)
        saved = [r for r, slot in zip(residuals, slots, strict=True) if slot is None]
        return outs, (shards, kept, saved, _Pull(tree, slots))

    def backward(residuals: tuple, gradients: list) -> tuple[list, list, None]:
        shards, kept, saved, pull = residuals
        kept, gradients = _after(kept, gradients)
        if pieces is None:
            full = gather_all(kept)
        else:
            full = [collectives.gather_pieces(x, p, pieces) for x, p in zip(kept, placements, strict=True)]
        of_full, of_floats = pull.restore(full, saved)(gradients)
        parts = zip(of_full, placements, shards, strict=True)
        return [collectives.reduce_scatter(g, p, mesh, x) for g, p, x in parts], of_floats, None

    run.defvjp(forward, backward)
    return run(shards, floats, fixed)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Pull:
    """The structure of a backward function whose gathered parameters were taken out."""

    tree: Any
    slots: tuple[int | None, ...]

    def restore(self, full: list, saved: list) -> Callable:
        it = iter(saved)
        return jax.tree.unflatten(self.tree, [next(it) if s is None else full[s] for s in self.slots])


def _after(values: list, gradients: list) -> tuple[list, list]:
    """Makes values available only once the gradients that differ between data shards are.

    The barrier would count the others (of synchronised state, say) as different too, so they stay out of it.
    """
    at = [i for i, g in enumerate(gradients) if g.dtype != jax.dtypes.float0 and _compat.varying_axes(g)]
    if not at:
        return values, gradients
    values, waited = lax.optimization_barrier((values, [gradients[i] for i in at]))
    out = list(gradients)
    for i, g in zip(at, waited, strict=True):
        out[i] = g
    return values, out
