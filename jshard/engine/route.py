"""Where a call into an annotated module goes: into a region, into the trace of one around it, or to plain Flax."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.call import guarded_inside, is_array, is_nnx
from jshard.engine.context import in_global_view, in_plain_flax, in_shapes_only
from jshard.engine.nnx_call import NnxCall
from jshard.engine.region import open_region, remat_of
from jshard.engine.stored import without_padding
from jshard.engine.trace import Call
from jshard.engine.units import UnitSettings, call_unit, called_inside, computes_in, in_region_trace, run_ungathered
from jshard.errors import CallError
from jshard.plans.memories import fetched
from jshard.plans.mesh import AnyMesh, data_axes, data_degree
from jshard.plans.plan import resharded
from jshard.plans.units import NESTED, OWN, Unit, dotted, nested_units, unit_of, walk


@contextlib.contextmanager
def on_device(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """Inside, the parameters of a unit's module are on the device: products do not take arrays of both memories."""
    moves = any(member.placement.on_host for member in unit.members)
    with all_on_device(module) if moves else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def all_on_device(module: nnx.Module) -> Iterator[None]:
    """The same of all parameters of a module."""
    moved = []
    for _, variable in walk(module):
        if isinstance(variable, nnx.Param) and _compat.on_host(stored := variable.get_raw_value()):
            variable.set_raw_value(there := fetched(stored))
            moved.append((variable, stored, there))
    try:
        yield
    finally:
        for variable, stored, there in moved:
            if variable.get_raw_value() is there:
                variable.set_raw_value(stored)


# A unit's call in global view as a Flax user would write it: what jshard is compared with.


def run_as_flax(take_apart: Callable[[tuple, dict[str, Any]], Call], unit: Unit, args: tuple, kwargs: dict) -> Any:
    """Calls a method of a unit's module in global view, cast, and under `jax.checkpoint`.

    Args:
        take_apart: makes the call of its arguments.
        unit: the unit's record.
        args: positional arguments after self.
        kwargs: keyword arguments.
    """
    call = take_apart(*_split_along_batch((args, kwargs), unit))
    gathers = (OWN,) if unit.nested else {*call.owners} - {NESTED}
    params = [
        x if p is None else without_padding(fetched(x), p).astype(p.gathered_dtype if owner in gathers else x.dtype)
        for x, p, owner in zip(call.params, call.placements, call.owners, strict=True)
    ]
    compute, remat = computes_in(call, unit.policy.mixed_precision), remat_of(unit)
    if remat != "none":
        compute = jax.checkpoint(compute, policy=None if remat == "full" else remat)
    outs = compute(params, call.inputs)
    passed = 2 * len(call.written)  # parameters that a transformation wrote back
    return _split_along_batch(call.finish(outs[: len(outs) - passed], call.result), unit)


def _split_along_batch(tree: Any, unit: Unit) -> Any:
    axes, shards = data_axes(unit.mesh), data_degree(unit.mesh)

    def split(x: Any) -> Any:
        if not is_array(x) or x.ndim < 2 or x.shape[0] % shards or not isinstance(unit.mesh, Mesh):
            return x
        entries = [axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
        return lax.with_sharding_constraint(x, NamedSharding(unit.mesh, PartitionSpec(*entries)))

    return jax.tree.map(split, tree, is_leaf=is_nnx)


# Where a call into an annotated module goes.


def route(module: nnx.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a method of a unit: as the region itself, as a unit inside it, or in global view."""
    unit = unit_of(module)
    assert unit is not None
    if in_plain_flax():
        return run_as_flax(lambda args, kwargs: NnxCall(module, method, args, kwargs), unit, args, kwargs)
    if in_global_view():
        with on_device(module, unit), guarded_inside(module, unit):
            return method(module, *args, **kwargs)
    call = NnxCall(module, method, args, kwargs)
    if not in_region_trace():
        refuse_late(module, call.where)
        call.warn(unit)
    return run_call(call, call.name, unit)


def run_call(call: Call, name: str, unit: Unit) -> Any:
    """Runs a call that an adapter has taken apart: as the region itself, or as a unit inside it."""
    if in_region_trace():
        if not unit.placement.gathered:
            raise called_inside(f"{name}: {call.where}")
        settings = UnitSettings(name, resharded(unit, is_root=False), unit.policy.prefetch)
        return call_unit(call, settings, unit.policy.mixed_precision, remat_of(unit))
    _compat.note_call()
    refuse_manual(unit.mesh, call.where)
    refuse_absent(unit, call.where)
    return open_region(call, unit) if unit.placement.gathered else run_ungathered(call, unit)


def refuse_manual(mesh: AnyMesh, where: str) -> None:
    """Raises if a region cannot be opened here, because a `shard_map` of the user's has the axes of the mesh."""
    if manual := _compat.manual_axes() & set(mesh.axis_names):
        raise CallError(
            "An annotated module was called inside a shard_map that is not jshard's.",
            where=f"{where}, manual axes {sorted(manual)}",
            why="the call opens a sharded region over the data axes, which are manual already.",
            do="call it outside the shard_map, or leave the data axes out of its axis_names.",
        )


def refuse_absent(unit: Unit, where: str) -> None:
    """Raises for a call on devices that are not here, unless only shapes are asked for."""
    if not isinstance(unit.mesh, Mesh) and not in_shapes_only():
        raise CallError(
            "The model was annotated for devices that are not here.",
            where=where,
            why="its mesh is abstract (js.mesh(devices=<number>)): good for plans, not for calls.",
            do="mesh = js.mesh(fsdp=-1)",
        )


def refuse_late(module: nnx.Module, where: str) -> None:
    """Raises for units inside that the annotation of the module around them never saw."""
    units = [(path, unit_of(inner)) for path, inner in nested_units(module)]
    if late := [f"{where}: {dotted(path)}" for path, unit in units if path and unit is not None and not unit.nested]:
        raise CallError(
            "A unit was annotated after the module around it.",
            where=late,
            why="the module around it took its parameters as its own, and would gather them a second time.",
            do="annotate submodules first: js.fully_shard(model.inner, mesh=mesh), then js.fully_shard(model,"
            " mesh=mesh).",
        )
