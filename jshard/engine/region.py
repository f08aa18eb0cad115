"""The dispatch of a call into an annotated model: the outermost is a sharded region, an inner one a unit's equation.

The call is traced once, in global view, and differentiated there. Forward and backward are each a `jax.shard_map` over
the data axes, automatic over the others, in which the program is interpreted on a shard. Parameters enter as their
shards; everything else enters split along the batch, where it has one, or whole. Around the region the user's
program stays in global view, so penalties, metrics and optimizers see whole parameters.
"""

from collections.abc import Callable, Sequence
from typing import cast

import jax
from flax import nnx
from jax.sharding import Mesh

from jshard import _compat
from jshard.engine import region_rules as region_rules  # enters the rules of the primitive
from jshard.engine import stored, units
from jshard.engine.accumulate import gathered_copies
from jshard.engine.blame import inside_annotated_call
from jshard.engine.context import in_global_view, in_plain_flax, in_shapes_only
from jshard.engine.crossing import Crossing, Region
from jshard.engine.nnx_call import NnxCall
from jshard.engine.padded import as_plain
from jshard.engine.program import Program, abstract, abstract_all, types_of
from jshard.engine.region_call import RegionCall
from jshard.engine.rules import Shard
from jshard.engine.trace import Call, trace_call
from jshard.engine.unit_call import UnitSettings
from jshard.engine.unrolled_layers import as_loops
from jshard.engine.unsplit import batch_size
from jshard.engine.values import MethodResult, type_texts
from jshard.errors import CallError
from jshard.plans.mesh import CONTEXT, EXPERT, PIPE, data_degree, degree
from jshard.plans.plan import resharded
from jshard.plans.units import NESTED, Unit, dotted, nested_units, unit_of


def route(
    module: nnx.Module, method: Callable[..., MethodResult], args: tuple, kwargs: dict[str, object]
) -> MethodResult:
    """Runs a method of a unit: as the region itself, as a unit inside it, or in global view."""
    unit = unit_of(module)
    assert unit is not None
    # Asked first, because plain Flax is a global view, too.
    if in_plain_flax():
        return units.run_as_flax(module, method, args, kwargs, unit)
    if in_global_view():
        with as_plain(module, unit):
            return method(module, *args, **kwargs)
    call = NnxCall(module, method, args, kwargs)
    # Looked at once, from the outermost call: it walks over all of the model.
    if not units.in_region_trace():
        _refuse_late_annotations(module, call)
        call.warn(unit)
    return run_call(call, call.name, unit)


def _refuse_late_annotations(module: nnx.Module, call: NnxCall) -> None:
    late = []
    for path, inner in nested_units(module):
        unit = unit_of(inner)
        if path and unit is not None and not unit.nested:
            late.append(dotted(path))
    if late:
        raise CallError(
            "A unit was annotated after the module around it.",
            where=[f"{call.where}: {path}" for path in late],
            why="the enclosing module already owns its parameters, and would gather them a second time.",
            do="annotate submodules first: js.fully_shard(model.inner, mesh=mesh), then js.fully_shard(model,"
            " mesh=mesh).",
        )


def run_call(call: Call, name: str, unit: Unit) -> MethodResult:
    """Runs a call that an adapter has split: as the region itself, or as a unit inside it."""
    # The outermost call traces the whole model, in which a call of an inner unit only becomes an equation. So there is
    # one `shard_map` for a model, whatever is annotated inside.
    if units.in_region_trace():
        return _call_unit(call, name, unit)
    _check_surroundings(call, unit)
    if not unit.placement.gathered:
        return units.run_ungathered(call, unit)
    return _open_region(call, unit)


def _call_unit(call: Call, name: str, unit: Unit) -> MethodResult:
    if not unit.placement.gathered:
        raise CallError(
            "A unit that is never gathered was called inside the sharded region.",
            where=f"{name}: {call.where}",
            why="inside, a device has only its shards of the parameters; the annotation forbids gathering them.",
            do="rows = model.tables(ids); model(rows, x)  # call it before the model, and pass its result",
        )
    settings = UnitSettings(name, resharded(unit, is_root=False), unit.policy.prefetch)
    return units.call_unit(call, settings, unit.policy.mixed_precision, unit.policy.remat)


def _check_surroundings(call: Call, unit: Unit) -> None:
    """Raises where a region cannot be opened."""
    manual = _compat.manual_axes() & set(unit.mesh.axis_names)
    if manual:
        raise CallError(
            "An annotated module was called inside a shard_map that is not jshard's.",
            where=f"{call.where}, manual axes {sorted(manual)}",
            why="the call opens a sharded region over the data axes, which are already manual.",
            do="call it outside the shard_map, or remove the data axes from its axis_names.",
        )
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        raise CallError(
            "An annotated module was called under a mesh with Explicit axes.",
            where=f"{call.where}, jax.set_mesh with {', '.join(map(repr, explicit))}",
            why="under it every array type has a sharding, and the arrays that the model computes have none.",
            do="with jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names)): ...  # or without set_mesh",
        )
    if not isinstance(unit.mesh, Mesh) and not in_shapes_only():
        raise CallError(
            "The model was annotated for devices that are not here.",
            where=call.where,
            why="its mesh is abstract (js.mesh(devices=<number>)): usable for plans, not for calls.",
            do="mesh = js.mesh(fsdp=-1)",
        )


def _open_region(call: Call, unit: Unit) -> MethodResult:
    _refuse_padded_stacks(call)
    copies = _copies_of(call)
    entering = [x if copy is None else copy for x, copy in zip(call.params, copies, strict=True)]
    params = call.guarded(entering)
    with units.region_trace(cast(Mesh, unit.mesh)):
        program, consts = _trace(call, unit, params)
    if degree(unit.mesh, PIPE) > 1:
        program = as_loops(program)  # layers called one after another run on stages, too
    # Constants of the trace are operands: as constants of the program, arrays would be whole on every device.
    operands = [*params, *call.inputs, *consts]
    region = _region_of(unit, call, consts)
    region_call = RegionCall(
        region,
        program,
        avals=tuple(types_of(operands)),
        operands=(*_params_entering(call, copies), *_inputs_entering(region, [*call.inputs, *consts])),
        # Constants as well: a function without arguments closes over its examples.
        examples=frozenset(range(len(params) + call.num_state, len(operands))),
    )
    with inside_annotated_call(call):  # of an array that has leaked from an earlier trace
        outs = region_call.bind(operands)
    return call.finish(outs, call.result)


def _refuse_padded_stacks(call: Call) -> None:
    """Raises for rows of a stack that is stored padded along its layers."""
    rows = []
    for name, x, placement in zip(call.names, call.params, call.placements, strict=True):
        if placement is None or not placement.padding or placement.dim is None:
            continue
        is_row = x.ndim < len(placement.shape)
        padded_dim_in_row = x.ndim + placement.dim - len(placement.shape)
        if is_row and padded_dim_in_row < 0:
            logical = f"{placement.dtype}{list(placement.shape)}"
            rows.append(f"{call.where}: {name}  {logical}, stored {list(placement.stored_shape)}")
    if rows:
        raise CallError(
            "A loop outside the sharded region runs over layers that are stored padded.",
            where=rows,
            why="the padding consists of layers of zeros, and the loop would also run them.",
            do="js.fully_shard(layers, mesh=mesh, placement=js.PlacementPolicy(stacked=1))",
        )


def _trace(call: Call, unit: Unit, params: Sequence[jax.Array]) -> tuple[Program, list[jax.Array]]:
    """Traces the body of a call in global view: on logical parameters, cast to the dtypes that they are gathered in."""
    policy = unit.policy
    body = units.computes_in(call, policy.mixed_precision)

    def run(params: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        gathered = []
        for x, placement, owner in zip(params, call.placements, call.owners, strict=True):
            # In the program, so that its transpose casts the gradient to the stored dtype again. Inner units cast what
            # is theirs.
            if placement is not None and owner != NESTED:
                x = x.astype(placement.gathered_dtype)
            gathered.append(x)
        return body(gathered, inputs)

    logical = []
    for x, of_call, placement in zip(params, call.params, call.placements, strict=True):
        aval = abstract(x)
        if placement is not None:  # the user's program sees parameters without padding
            shape = stored.without_padding(abstract(of_call), placement).shape
            aval = jax.ShapeDtypeStruct(shape, aval.dtype)
        logical.append(aval)
    return trace_call(call, run, logical, abstract_all(call.inputs), remat=policy.remat)


def _region_of(unit: Unit, call: Call, consts: Sequence[jax.Array]) -> Region:
    mesh = cast(Mesh, unit.mesh)
    arrays = call.inputs[call.num_state :] or consts  # without arguments, a function closes over them
    arguments = abstract_all(arrays)
    candidates = arguments or abstract_all(call.inputs)
    return Region(unit, call.where, tuple(arguments), batch_size(candidates, data_degree(mesh)))


def _params_entering(call: Call, copies: Sequence[jax.Array | None]) -> list[Crossing]:
    """Returns how parameters enter: as they are stored, or as copies that each device gathered beforehand."""
    entering = []
    for x, placement, name, copy in zip(call.params, call.placements, call.names, copies, strict=True):
        is_copy = copy is not None
        inner = {}
        if placement is not None:
            ndim = x.ndim + 1 if is_copy else x.ndim  # a copy has a dim for the devices
            inner = stored.inner_dims(placement, ndim, gathered=is_copy)
        state = None if placement is None or is_copy else Shard(placement)
        entering.append(Crossing(state, is_copy, parameter=name, inner=inner))
    return entering


def _inputs_entering(region: Region, inputs: Sequence[jax.Array]) -> list[Crossing]:
    """Returns how other operands enter: split along the batch, and over `context` along the sequence; or whole."""
    length = _sequence_length(region)
    entering = []
    for x in inputs:
        is_split = bool(region.batch) and x.ndim > 0 and x.shape[0] == region.batch
        # Over `expert` examples are split, too: its devices have different experts, and share the rest of the work.
        inner = {EXPERT: 0} if is_split and EXPERT in region.inner else {}
        may_have_sequence = is_split or not region.batch
        if length and may_have_sequence and x.ndim > 1 and x.shape[1] == length:
            inner[CONTEXT] = 1
        entering.append(Crossing(0 if is_split else None, inner=inner))
    return entering


def _sequence_length(region: Region) -> int:
    """Returns the length of the sequences of the arguments, which `context` splits; 0 where the mesh lacks it."""
    context_degree = degree(region.mesh, CONTEXT)
    if context_degree == 1:
        return 0
    sequences = []
    for x in region.arguments:
        if x.ndim > 1 and region.batch in (0, x.shape[0]):
            sequences.append(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
    length = batch_size(sequences, context_degree)
    if length:
        return length
    shapes = ", ".join(type_texts(region.arguments))
    raise CallError(
        "The arguments of a call have no sequence that splits over the context axis.",
        where=[f"{region.name}: {shapes}", f"mesh axis {CONTEXT!r} of degree {context_degree}"],
        why=f"the sequence is dim 1 of arguments with a batch, and none divides by {context_degree}.",
        do="with js.global_view(): y = model(x)  # as one program\n"
        f"or pad the sequences to a multiple of {context_degree}, or js.mesh() without {CONTEXT!r}.",
    )


def _copies_of(call: Call) -> list[jax.Array | None]:
    """Returns the copies gathered beforehand for the parameters of this call, if all gathered parameters have one."""
    # All or none: a program either gathers its parameters or has them.
    copies = gathered_copies.get()
    none: list[jax.Array | None] = [None] * len(call.params)
    if copies is None:
        return none
    of_params = [copies.by_id.get(id(x)) for x in call.params]
    for copy, placement in zip(of_params, call.placements, strict=True):
        if copy is None and placement is not None and placement.gathered:
            copies.missed = True  # this call gathers on its own, which is worth a warning
            return none
    copies.taken.update(id(x) for x in call.params)
    return of_params
