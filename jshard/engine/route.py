"""Where a call into an annotated module goes."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jshard import _compat
from jshard._errors import CallError
from jshard._mesh import AnyMesh
from jshard._nnx import Unit, dotted, nested_units, unit_of
from jshard._nnx_call import NnxCall
from jshard._plan import resharded
from jshard.engine.context import in_global_view, in_plain_flax, in_shapes_only
from jshard.engine.hosted import on_device
from jshard.engine.padded_gradients import guarded_inside
from jshard.engine.plain import run_as_flax
from jshard.engine.region import open_region, remat_of
from jshard.engine.trace import Call
from jshard.engine.ungathered import called_inside, run_ungathered
from jshard.engine.units import UnitSettings, call_unit, in_region_trace


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
        if not unit.policy.gathered:
            raise called_inside(f"{name}: {call.where}")
        settings = UnitSettings(name, resharded(unit, is_root=False), unit.policy.prefetch)
        return call_unit(call, settings, unit.policy.mixed_precision, remat_of(unit))
    refuse_manual(unit.mesh, call.where)
    refuse_absent(unit, call.where)
    return open_region(call, unit) if unit.policy.gathered else run_ungathered(call, unit)


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
