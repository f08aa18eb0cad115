"""One unit inside the region: its call, run on gathered parameters at its place among the units."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import CallError
from jshard._mesh import data_axes, data_degree
from jshard._nnx import OUTER, OWN, Member, Unit, dotted, nested_units, plain_class, unit_of
from jshard._offload import fetched
from jshard._placement import Placement
from jshard._policies import checkpoint_policy, offloads
from jshard._shard_plan import resharded
from jshard.engine.body import Body
from jshard.engine.call import Call, is_array, is_nnx, raw
from jshard.engine.chain import Place
from jshard.engine.collectives import gather, scope
from jshard.engine.context import Region
from jshard.engine.reshard import Saving, sharded


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
        raise _annotated_late(call.where)
    mine = {} if region.gathered else gathered_here(call, unit, outermost)
    name = dotted(()) if outermost else region.names.get(id(module), plain_class(module).__name__)
    region = dataclasses.replace(region, unit=name)
    body = Body(call, tuple(mine), unit.policy.mixed_precision, region)
    placements = [member.placement for member in mine.values()]
    shards = [raw(call.params[i][1]) for i in mine]
    comes_and_goes = any(p.dim is not None or p.on_host for p in placements)
    reshard = resharded(unit, is_root=outermost) if comes_and_goes else False
    in_place = comes_and_goes or (bool(placements) and offloads(unit.policy.remat))
    if not in_place or (outermost and reshard is False):
        return _run_plainly(body, region, unit, shards, placements)
    return _run_in_place(body, region, unit, shards, placements, reshard)


def run_as_flax(module: nnx.Module, unit: Unit, method: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a method of a unit's module in global view, as plain Flax would: cast, and under `jax.checkpoint`.

    What goes in and out is held to be split along the batch, as models that leave sharding to the compiler do: without
    it, it may split anything along anything.
    """
    args, kwargs = _split_along_batch((args, kwargs), unit)
    call = Call(module, method, args, kwargs)
    mine = gathered_here(call, unit, not unit.nested)
    body = Body(call, tuple(mine), unit.policy.mixed_precision, None)
    values = [fetched(raw(call.params[i][1])).astype(member.placement.gathered_dtype) for i, member in mine.items()]
    compute = checkpointed(body.compute, unit, kept=True)
    return _split_along_batch(body.finish(compute(values, body.others, body.inputs, body.fixed, None)), unit)


def _split_along_batch(tree: Any, unit: Unit) -> Any:
    axes, shards = data_axes(unit.mesh), data_degree(unit.mesh)
    dim = unit.policy.batch_dim

    def split(x: Any) -> Any:
        if not is_array(x) or x.ndim < dim + 2 or x.shape[dim] % shards or not isinstance(unit.mesh, Mesh):
            return x
        entries = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[dim] = axes
        return lax.with_sharding_constraint(x, NamedSharding(unit.mesh, PartitionSpec(*entries)))

    return jax.tree.map(split, tree, is_leaf=is_nnx)


def _run_plainly(body: Body, region: Region, unit: Unit, shards: list, placements: list[Placement]) -> Any:
    """Gathers at once and keeps the copies: the root, whose parameters are needed first and last."""
    with jax.named_scope(scope(region.unit)):
        full = [gather(x, p, region.mesh, region.unit) for x, p in zip(shards, placements, strict=True)]
        compute = checkpointed(functools.partial(body.compute, chain=region.chain), unit, kept=True)
        return body.finish(compute(full, body.others, body.inputs, body.fixed, None))


def _run_in_place(
    body: Body, region: Region, unit: Unit, shards: list, placements: list[Placement], reshard: bool | int
) -> Any:
    """Runs a unit at its place in the order of units, and notes it there."""
    prefetch = unit.policy.prefetch
    gathered_bytes = sum(p.gathered_bytes // p.layers for p in placements if p.dim is not None)
    place = Place(region.axes) if prefetch is None else region.chain.here().next(gathered_bytes, prefetch)
    saving = Saving(reshard, lambda compute: checkpointed(compute, unit, kept=reshard is False))
    run = sharded(body.compute, placements, region.mesh, saving=saving, place=place, name=region.unit)
    outs, tokens = run(place.tokens, shards, body.others, body.inputs, body.fixed)
    place.called(gathered_bytes, tokens)
    return body.finish(outs)


def checkpointed(compute: Callable, unit: Unit, *, kept: bool) -> Callable:
    """The computation under the unit's remat policy; without one it still keeps no gathered copy by another name."""
    if kept and unit.policy.remat == "none":
        return compute
    return jax.checkpoint(compute, policy=checkpoint_policy(unit.policy.remat))


def gathered_here(call: Call, unit: Unit, outermost: bool) -> dict[int, Member]:
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


def refuse_late(module: nnx.Module, where: str) -> None:
    """Raises for units inside that the annotation of the module around them never saw."""
    units = [(path, unit_of(inner)) for path, inner in nested_units(module)]
    if late := [f"{where}: {dotted(path)}" for path, unit in units if path and unit is not None and not unit.nested]:
        raise _annotated_late(late)


def _annotated_late(where: str | list[str]) -> CallError:
    return CallError(
        "A unit was annotated after the module around it.",
        where=where,
        why="the module around it took its parameters as its own, and would gather them a second time.",
        do="annotate submodules first: js.fully_shard(model.inner, mesh=mesh), then js.fully_shard(model, mesh=mesh).",
    )
