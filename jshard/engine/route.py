"""Where a call into an annotated module goes: into a region, into the trace of one around it, or to plain Flax."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.call import NnxCall, is_array, is_nnx, stored_text
from jshard.engine.context import attention_again, guard, in_global_view, in_plain_flax, in_shapes_only
from jshard.engine.region import open_region
from jshard.engine.stored import without_padding
from jshard.engine.trace import Call, checkpointed
from jshard.engine.units import UnitSettings, call_unit, called_inside, computes_in, in_region_trace, run_ungathered
from jshard.errors import CallError
from jshard.plans.memories import fetched
from jshard.plans.mesh import AnyMesh, data_axes, data_degree
from jshard.plans.padding import padding_of
from jshard.plans.plan import resharded
from jshard.plans.policies import ATTENTION_AGAIN
from jshard.plans.units import NESTED, OWN, Unit, dotted, nested_units, plain_class, unit_of, walk


def on_device(module: nnx.Module, unit: Unit) -> AbstractContextManager[None]:
    """Inside, the parameters of a unit's module are on the device: products do not take arrays of both memories."""
    if not any(member.placement.on_host for member in unit.members):
        return contextlib.nullcontext()
    params = [v for _, v in walk(module) if isinstance(v, nnx.Param) and _compat.on_host(v.get_raw_value())]
    return _holding(params, [fetched(v.get_raw_value()) for v in params])


def guarded_inside(module: nnx.Module, unit: Unit) -> AbstractContextManager[None]:
    """Inside, to differentiate a padded parameter raises as long as an optimizer would see the padding."""
    found = [(path, v) for path, v in walk(module) if isinstance(v, nnx.Param) and padding_of(v) is not None]
    found = [(path, v) for path, v in found if _compat.is_tracer(v.get_raw_value())]
    if unit.optimizer is None or not found:
        return contextlib.nullcontext()
    name = plain_class(module).__name__
    padded = {i: (stored_text(name, path, v), unit.optimizer) for i, (path, v) in enumerate(found)}
    params = [v for _, v in found]
    return _holding(params, guard([v.get_raw_value() for v in params], padded))


@contextlib.contextmanager
def _holding(variables: Sequence[nnx.Variable], arrays: Sequence[Any]) -> Iterator[None]:
    """Inside, variables hold these arrays; those that nobody wrote hold what they held again."""
    before = [v.get_raw_value() for v in variables]
    for v, x in zip(variables, arrays, strict=True):
        v.set_raw_value(x, _unsafe_bypass_check=True)
    try:
        yield
    finally:
        for v, old, x in zip(variables, before, arrays, strict=True):
            if v.get_raw_value() is x:
                v.set_raw_value(old, _unsafe_bypass_check=True)


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
    with attention_again(unit.policy.remat == ATTENTION_AGAIN):
        outs = checkpointed(computes_in(call, unit.policy.mixed_precision), unit.policy.remat)(params, call.inputs)
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
        return call_unit(call, settings, unit.policy.mixed_precision, unit.policy.remat)
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
