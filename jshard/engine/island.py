"""The sharded region: the outermost call into an annotated model as one `jax.shard_map` over the data axes.

Parameters enter as their shards, arguments with a batch enter split along it, results leave the same way. All
around it the user's program stays in global view, so penalties, metrics and optimizers see whole parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard._errors import CallError
from jshard._mesh import data_axes, manual_axes
from jshard._nnx import Member, Unit, dotted, plain_class, unit_of, walk
from jshard._padded import padding_of, store
from jshard._placement import Placement, spec_over
from jshard._replicated import check_replicated, others_in, warn_of_others, warn_of_unplanned
from jshard.engine.call import Before, Call, Live, is_array, raw
from jshard.engine.chain import Chain
from jshard.engine.context import Copies, Region, gathered_copies, global_view, in_shapes_only, is_unchecked
from jshard.engine.hosted import on_device
from jshard.engine.inputs import BatchSplit, split_batch, trace_globally
from jshard.engine.outputs import Exit, changed_state
from jshard.engine.overwritten import largest_over_shards
from jshard.engine.padded_gradients import guarded, guarded_inside
from jshard.engine.reads import guard, hold_shard
from jshard.engine.reductions import look_for_mixing
from jshard.engine.unit import check_scanned, refuse_late, run_unit


def open_region(module: nnx.Module, unit: Unit, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs the outermost call into an annotated model.

    A call without an array that could carry a batch runs in global view.
    """
    call = Call(module, method, args, kwargs)
    refuse_absent(unit, call.where)
    if not unit.nested:
        check_replicated(unit, plain_class(module).__name__)
        others = (other for path, x in call.state if path[0] == 0 for other in others_in(path[1:], x))
        warn_of_others(unit, plain_class(module).__name__, tuple(others))
    refuse_late(module, call.where)
    split = split_batch(call, unit)
    if split is None:
        with global_view(), on_device(module, unit), guarded_inside(module, unit):
            return method(module, *args, **kwargs)
    return _Island(call, unit, cast(Mesh, unit.mesh), split).run()


def refuse_absent(unit: Unit, where: str) -> None:
    """Raises for a call on devices that are not here, unless only shapes are asked for."""
    if not isinstance(unit.mesh, Mesh) and not in_shapes_only():
        raise CallError(
            "The model was annotated for devices that are not here.",
            where=where,
            why="its mesh is abstract (js.mesh(devices=<number>)): good for plans, not for calls.",
            do="mesh = js.mesh(fsdp=-1)",
        )


@dataclasses.dataclass
class _Island:
    call: Call
    unit: Unit
    mesh: Mesh
    split: BatchSplit

    def __post_init__(self) -> None:
        self.axes = data_axes(self.mesh)
        policy = self.unit.policy
        where, batch = self.call.where, self.split.size
        self.exit = Exit(
            where,
            self.axes,
            self.split.shards,
            batch,
            policy.batch_dim,
            policy.outputs,
            own_statistics=not policy.sync_batch_norm,
        )
        self.members = [_member(self.call, path) for path, _ in self.call.params]
        unplanned = [p[1:] for (p, _), m in zip(self.call.params, self.members, strict=True) if m is None and not p[0]]
        warn_of_unplanned([dotted(p) for p in unplanned], where)
        self.copies = _copies_of(self.call, self.members, gathered_copies())
        self.region = Region(self.mesh, self.axes, Chain(self.axes), gathered=self.copies is not None)

    @property
    def is_alone(self) -> bool:
        """Whether one data shard has the whole batch: nothing is gathered or summed.

        XLA refuses a reduction over axes of degree 1 beside an automatic axis. So everything counts as different over
        them, and a scalar enters and leaves as an array of one row.
        """
        return self.split.shards == 1

    def run(self) -> Any:
        params, state, arrays = self.call.values()
        self.traced = None
        if self.split.shards > 1:
            self.traced = trace_globally(self.call, self.split, self.exit.batch_dim)
            if not is_unchecked():
                mixing = look_for_mixing(self.call, self.split, self.unit.policy, self.traced)
                self.exit = dataclasses.replace(self.exit, mixing=mixing)
                if mixing is not None:
                    mixing.refuse()
        specs = self._input_specs()
        if self.copies is not None:
            params = [x if copy is None else copy for x, copy in zip(params, self.copies, strict=True)]
        params = guarded(self.call, params)
        # shard_map reads out_specs after it has traced the body, which fills the list: one trace instead of two.
        self.out_specs: list[PartitionSpec] = []
        region = jax.shard_map(
            self._body, mesh=self.mesh, in_specs=specs, out_specs=self.out_specs, axis_names=manual_axes(self.mesh)
        )
        if self.is_alone:
            params, state, arrays = _as_rows((params, state, arrays))
        eager = not any(_compat.is_tracer(x) for x in jax.tree.leaves((params, state, arrays)))
        outs = (jax.jit(region) if eager else region)(params, state, arrays)
        return self._finish(outs)

    @property
    def _copied(self) -> list[bool]:
        """For each parameter, whether it enters as a copy that was gathered beforehand."""
        return [copy is not None for copy in self.copies or [None] * len(self.members)]

    def _input_specs(self) -> tuple[list, list, list]:
        if self.is_alone:  # what counts as the same on all shards has a gradient that is summed over them
            params, state, arrays = ([PartitionSpec(self.axes)] * len(group) for group in self.call.values())
            return params, state, arrays
        along = PartitionSpec(*[None] * self.exit.batch_dim, self.axes)
        params = [
            PartitionSpec(self.axes) if copied else self._param_spec(member, raw(variable).ndim)
            for copied, member, (_, variable) in zip(self._copied, self.members, self.call.params, strict=True)
        ]
        state = [along if is_batch else PartitionSpec() for is_batch in self.split.state]
        arrays = [along if is_batch else PartitionSpec() for is_batch in self.split.arrays]
        return params, state, arrays

    def _param_spec(self, member: Member | None, ndim: int) -> PartitionSpec:
        if member is None:
            return PartitionSpec()
        placement = member.placement
        check_scanned(member, ndim, self.call.where)
        entries = placement.spec[len(placement.spec) - ndim :]
        return spec_over(self.axes, entries)

    def _body(self, params: list, state: list, arrays: list) -> list:
        params = [x[0] if copied else x for x, copied in zip(params, self._copied, strict=True)]  # a rank's own copy
        if self.is_alone:
            like = self.call.values()
            params, state, arrays = jax.tree.map(lambda x, like: x.reshape(like.shape), (params, state, arrays), like)
        shards = {
            i: dotted(member.path)
            for i, member in enumerate(self.members)
            if member is not None and member.placement.dim is not None and not self._copied[i]
        }
        return guard(self._trace, {} if is_unchecked() else shards, self.call.where, (params, state, arrays))

    def _trace(self, params: list, state: list, arrays: list) -> list:
        """The call on this data shard; returns its arrays and notes how each leaves the region."""
        live = self.call.put_together(params, state, self._fold_keys(arrays))
        self._prepare(live)
        before = Before.of(live)
        out = run_unit(live.module, self.unit, self.region, self.call.method, live.args, live.kwargs, outermost=True)
        changes = [c for c in before.changes(live, self.call.where) if not isinstance(c[1], nnx.RngKey)]
        flat, self.tree = jax.tree_util.tree_flatten_with_path(out)
        self.static = [None if is_array(x) else x for _, x in flat]
        self.dynamic = [is_array(x) for _, x in flat]
        found = [(jax.tree_util.keystr(p), x) for p, x in flat if is_array(x)]
        shapes = [x.shape for _, x in found] if self.traced is None else self.traced.shapes
        ways = [
            self.exit.output(x, shape, name, i) for i, ((name, x), shape) in enumerate(zip(found, shapes, strict=True))
        ]
        state_arrays, state_specs = changed_state(changes, live, self.traced, self.exit)
        self.changes = [(p, v, jax.tree.structure(raw(v))) for p, v in changes]
        self.out_specs[:] = [spec for _, spec in ways] + state_specs
        outs = [x for x, _ in ways] + state_arrays
        self.scalars = [x.ndim == 0 for x in outs]
        return _as_rows(outs) if self.is_alone else outs

    def _finish(self, outs: list) -> Any:
        if self.is_alone:
            outs = [x[0] if is_scalar else x for x, is_scalar in zip(outs, self.scalars, strict=True)]
        it = iter(outs)
        leaves = [next(it) if d else s for d, s in zip(self.dynamic, self.static, strict=True)]
        take = lambda tree: jax.tree.unflatten(tree, [next(it) for _ in range(tree.num_leaves)])
        self.call.write_back([(path, variable.replace(take(tree))) for path, variable, tree in self.changes])
        return jax.tree.unflatten(self.tree, leaves)

    def _prepare(self, live: Live) -> None:
        """What the in-region copy has that the user's module has not."""
        if not self.is_alone:
            largest_over_shards(live, self.axes)
        by_path = dict(zip((p for p, _ in self.call.params), self.members, strict=True))
        syncs = self.unit.policy.sync_batch_norm and not self.is_alone
        for path, node in walk(live.graph):
            member = by_path.get(path) if isinstance(node, nnx.Param) else None
            copied = self.region.gathered and member is not None and member.placement.gathered
            if member is not None and _comes_and_goes(member.placement) and not copied:
                hold_shard(node, member.placement, self.mesh)
            if copied and (padding := padding_of(node)) is not None:
                store(node, None, padding.cut(node.get_raw_value()))  # a copy is whole, and a scan may hand it back
            if isinstance(node, nnx.RngKey) and self.split.shards > 1:
                node.set_raw_value(self._fold(node.get_raw_value()))
            if syncs and isinstance(node, nnx.BatchNorm) and node.axis_name is None:
                node.axis_name = self.axes  # pyright: ignore[reportAttributeAccessIssue]  (lax.pmean takes several)

    def _fold_keys(self, arrays: list) -> list:
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return [self._fold(x) if is_key(x) and self.split.shards > 1 else x for x in arrays]

    def _fold(self, key: jax.Array) -> jax.Array:
        """A key of this data shard's own, so that dropout masks differ between shards."""
        fold = lambda k: jax.random.fold_in(k, lax.axis_index(self.axes))
        for _ in range(key.ndim):
            fold = jax.vmap(fold)
        return fold(key)


def _as_rows(tree: Any) -> Any:
    """Scalars as arrays of one row, which a spec can name an axis for."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else jnp.expand_dims(x, 0), tree)


def _comes_and_goes(placement: Placement) -> bool:
    return placement.dim is not None or placement.on_host


def _member(call: Call, path: tuple) -> Member | None:
    """The record of a parameter in the call: of the module's own, or of an annotated module among the arguments."""
    if path[0] == 0:
        module, relative = call.graph[0], path[1:]
    else:
        module, relative = call.graph[1][path[1]], path[2:]
    unit = unit_of(module)
    return None if unit is None else unit.by_path.get(relative)


def _copies_of(call: Call, members: list[Member | None], copies: Copies | None) -> list | None:
    """The copies gathered beforehand for the parameters of this call, if all that are ever gathered are there."""
    if copies is None:
        return None
    stored = [raw(variable) for _, variable in call.params]
    found = [copies.of(x) for x in stored]
    wanted = [member is None or member.placement.gathered for member in members]
    if any(x is None and wants for x, wants in zip(found, wanted, strict=True)):
        copies.missed = True
        return None
    copies.take(stored)
    return found
