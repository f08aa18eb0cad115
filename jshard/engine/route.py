"""Where a call into an annotated module goes."""

import os
from collections.abc import Callable
from typing import Any

from flax import nnx

from jshard import _compat
from jshard._errors import CallError
from jshard._mesh import AnyMesh
from jshard._nnx import Unit, plain_class, unit_of
from jshard._nnx_call import NnxCall
from jshard._plan import resharded
from jshard.engine.context import current_region, in_global_view, in_plain_flax
from jshard.engine.hosted import on_device
from jshard.engine.island import open_region as open_island
from jshard.engine.island import refuse_absent
from jshard.engine.padded_gradients import guarded_inside
from jshard.engine.region import open_region, remat_of
from jshard.engine.trace import Call
from jshard.engine.ungathered import called_inside, run_ungathered
from jshard.engine.unit import refuse_late, run_as_flax, run_unit
from jshard.engine.units import UnitSettings, call_unit, in_region_trace


def route(module: nnx.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a method of a unit: as the region itself, as a unit inside it, or in global view."""
    unit = unit_of(module)
    assert unit is not None
    region = current_region()
    if in_plain_flax():
        return run_as_flax(module, unit, method, args, kwargs)
    if not unit.policy.gathered and region is not None and not is_new():
        raise called_inside(f"{plain_class(module).__name__}.{method.__name__}", region.unit)
    if in_global_view():
        with on_device(module, unit), guarded_inside(module, unit):
            return method(module, *args, **kwargs)
    if is_new():
        return _by_partition(module, unit, method, args, kwargs)
    if region is not None:
        return run_unit(module, unit, region, method, args, kwargs, outermost=False)
    refuse_manual(unit.mesh, f"{plain_class(module).__name__}.{method.__name__}")
    return open_island(module, unit, method, args, kwargs)


def refuse_manual(mesh: AnyMesh, where: str) -> None:
    """Raises if a region cannot be opened here, because a `shard_map` of the user's has the axes of the mesh."""
    if manual := _compat.manual_axes() & set(mesh.axis_names):
        raise CallError(
            "An annotated module was called inside a shard_map that is not jshard's.",
            where=f"{where}, manual axes {sorted(manual)}",
            why="the call opens a sharded region over the data axes, which are manual already.",
            do="call it outside the shard_map, or leave the data axes out of its axis_names.",
        )


def is_new() -> bool:
    """Whether the engine that partitions a global trace runs the call."""
    return os.environ.get("JSHARD_ENGINE") == "partition"


def _by_partition(module: nnx.Module, unit: Unit, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    call = NnxCall(module, method, args, kwargs)
    if not in_region_trace():
        refuse_late(module, call.where)
        call.warn(unit)
    return run_call(call, call.name, unit)


def run_call(call: Call, name: str, unit: Unit) -> Any:
    """Runs a call that an adapter has taken apart: as the region itself, or as a unit inside it."""
    if in_region_trace():
        if not unit.policy.gathered:
            raise called_inside(call.where, "the model")
        settings = UnitSettings(name, resharded(unit, is_root=False), unit.policy.prefetch)
        return call_unit(call, settings, unit.policy.mixed_precision, remat_of(unit))
    refuse_manual(unit.mesh, call.where)
    refuse_absent(unit, call.where)
    return open_region(call, unit) if unit.policy.gathered else run_ungathered(call, unit)
