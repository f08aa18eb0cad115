"""The dispatch of a call into an annotated model: the outermost is a sharded region, an inner one a unit's equation.

The call is traced once, in global view, and differentiated there. Forward and backward are each a `jax.shard_map` over
the data axes, automatic over the others, in which the program is interpreted on a shard. Parameters enter as their
shards; everything else enters split along the batch, where it has one, or whole. Around the region the user's
program stays in global view, so penalties, metrics and optimizers see whole parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard.engine import mixing, stored, units
from jshard.engine.accumulate import gathered_copies
from jshard.engine.blame import inside_annotated_call
from jshard.engine.call import NnxCall, as_plain, is_float
from jshard.engine.context import in_global_view, in_plain_flax, in_shapes_only
from jshard.engine.inner import over_axis
from jshard.engine.mixing import batch_size, note_layers, warn_of_whole
from jshard.engine.rules import PARTIAL, Shard, State, Value
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.prefetch import shards_gathered_by
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.trace import Call, Gradient, Program, abstract, differentiable, evaluate_jaxpr, picked, trace_call
from jshard.errors import CallError
from jshard.plans.memories import fetched, placed_like, to_host
from jshard.plans.mesh import CONTEXT, EXPERT, batch_axes, data_degree, degree, inner_axes, manual_axes, region_degree
from jshard.plans.placement import axes_of, spec_over
from jshard.plans.plan import resharded
from jshard.plans.units import NESTED, Unit, dotted, nested_units, unit_of


def route(module: nnx.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a method of a unit: as the region itself, as a unit inside it, or in global view."""
    unit = unit_of(module)
    assert unit is not None
    if in_plain_flax():
        return units.run_as_flax(module, method, args, kwargs, unit)
    if in_global_view():
        with as_plain(module, unit):
            return method(module, *args, **kwargs)
    call = NnxCall(module, method, args, kwargs)
    if not units.in_region_trace():
        inside = [(path, unit_of(inner)) for path, inner in nested_units(module) if path]
        if late := [dotted(path) for path, one in inside if one is not None and not one.nested]:
            raise CallError(
                "A unit was annotated after the module around it.",
                where=[f"{call.where}: {path}" for path in late],
                why="the enclosing module already owns its parameters, and would gather them a second time.",
                do="annotate submodules first: js.fully_shard(model.inner, mesh=mesh), then js.fully_shard(model,"
                " mesh=mesh).",
            )
        call.warn(unit)
    return run_call(call, call.name, unit)


def run_call(call: Call, name: str, unit: Unit) -> Any:
    """Runs a call that an adapter has split: as the region itself, or as a unit inside it."""
    if units.in_region_trace():
        if not unit.placement.gathered:
            raise CallError(
                "A unit that is never gathered was called inside the sharded region.",
                where=f"{name}: {call.where}",
                why="inside, a device has only its shards of the parameters; the annotation forbids gathering them.",
                do="rows = model.tables(ids); model(rows, x)  # call it before the model, and pass its result",
            )
        settings = units.UnitSettings(name, resharded(unit, is_root=False), unit.policy.prefetch)
        return units.call_unit(call, settings, unit.policy.mixed_precision, unit.policy.remat)
    if manual := _compat.manual_axes() & set(unit.mesh.axis_names):
        raise CallError(
            "An annotated module was called inside a shard_map that is not jshard's.",
            where=f"{call.where}, manual axes {sorted(manual)}",
            why="the call opens a sharded region over the data axes, which are already manual.",
            do="call it outside the shard_map, or remove the data axes from its axis_names.",
        )
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
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
    return _open_region(call, unit) if unit.placement.gathered else units.run_ungathered(call, unit)


def _open_region(call: Call, unit: Unit) -> Any:
    policy = unit.policy
    copies = _copies_of(call)
    params = call.guarded([x if copy is None else copy for x, copy in zip(call.params, copies, strict=True)])
    body = units.computes_in(call, policy.mixed_precision)

    def cast_own(params: list[Any], inputs: list[Any]) -> list[Any]:
        gathered = [
            x.astype(p.gathered_dtype) if p is not None and owner != NESTED and is_float(x) else x
            for x, p, owner in zip(params, call.placements, call.owners, strict=True)
        ]
        return body(gathered, inputs)

    rows = [
        f"{call.where}: {name}  {p.dtype}{list(p.shape)}, stored {list(p.stored_shape)}"
        for name, x, p in zip(call.names, call.params, call.placements, strict=True)
        if p is not None and p.padding and p.dim is not None and x.ndim + p.dim - len(p.shape) < 0
    ]
    if rows:
        raise CallError(
            "A loop outside the sharded region runs over layers that are stored padded.",
            where=rows,
            why="the padding consists of layers of zeros, and the loop would also run them.",
            do="js.fully_shard(layers, mesh=mesh, placement=js.ShardPlacement(stacked=1))",
        )
    logical = [
        x if p is None else jax.ShapeDtypeStruct(stored.without_padding(abstract(of_call), p).shape, x.dtype)
        for x, of_call, p in zip(map(abstract, params), call.params, call.placements, strict=True)
    ]
    with units.region_trace(cast(Mesh, unit.mesh)):
        program, consts = trace_call(call, cast_own, logical, list(map(abstract, call.inputs)), remat=policy.remat)
    operands = [*params, *call.inputs, *consts]
    run = _differentiable(Region(unit, call, program, consts, [copy is not None for copy in copies]))
    eager = not any(_compat.is_tracer(x) for x in operands)
    with inside_annotated_call(call):  # of an array that has leaked from an earlier trace
        outs = (jax.jit(run) if eager else run)(*operands)
    return call.finish(outs, call.result)


def _copies_of(call: Call) -> list[Any]:
    """The copies gathered beforehand for the parameters of this call, if all gathered parameters have one."""
    copies, none = gathered_copies.get(), [None] * len(call.params)
    if copies is None:
        return none
    found = [copies.by_id.get(id(x)) for x in call.params]
    if any(x is None and (p is None or p.gathered) for x, p in zip(found, call.placements, strict=True)):
        copies.missed = True
        return none
    copies.taken |= {*map(id, call.params)}
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """How a value leaves a program, and enters the next one; `counted` and `parameter` are those of `Value`.

    Args:
        state: its state.
        is_own: each device has its own value, not a part of an array: it crosses with a dim for the devices.
        inner: the dims along which it is split over inner axes.
    """

    state: State
    is_own: bool = False
    counted: dict[int, int] = dataclasses.field(default_factory=dict)
    parameter: str = ""
    inner: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy that each device gathered for itself, or the gradient of one."""
        return self.is_own and not isinstance(self.state, Shard)

    @classmethod
    def of(cls, value: Value, *, is_own: bool = False) -> "Crossing":
        """How a value leaves; each device has its own piece of a parameter."""
        is_own = is_own or (value.is_stored and value.shard.pieces > 0)
        return cls(value.state, is_own, value.counted, value.parameter)

    def leave(self, value: Value) -> Any:
        """The array as which a value leaves."""
        return value.x[None] if self.is_own else value.x

    def enter(self, x: Any) -> Value:
        """The value of an array that has entered."""
        return Value(x[0] if self.is_own else x, self.state, counted=self.counted, parameter=self.parameter)


class Region:
    """One call's region: where its program runs, and how the arrays of the call (`operands`) enter.

    `copied` states for each parameter whether it enters as a copy that each device gathered beforehand.
    """

    def __init__(self, unit: Unit, call: Call, program: Program, consts: Sequence[Any], copied: Sequence[bool]) -> None:
        self.unit, self.name, self.program = unit, call.where, program
        mesh = self.mesh = cast(Mesh, unit.mesh)
        self.axes, self.degree, self.inner = batch_axes(mesh), region_degree(mesh), inner_axes(mesh)
        self.arguments = list(map(abstract, call.inputs[call.num_state :] or consts))  # or a function closes over them
        self.batch = batch_size(self.arguments or call.inputs, data_degree(mesh))
        length = self._length(degree(mesh, CONTEXT))
        self.operands: list[Crossing] = []
        for p, name, is_copy, x in zip(call.placements, call.names, copied, call.params, strict=True):
            inner = {} if p is None else stored.inner_dims(p, x.ndim + is_copy, gathered=is_copy)
            state = None if p is None or is_copy else Shard(p)
            self.operands.append(Crossing(state, is_copy, parameter=name, inner=inner))
        for x in (*call.inputs, *consts):
            is_split = bool(self.batch and x.ndim and x.shape[0] == self.batch)
            inner = {EXPERT: 0} if is_split and EXPERT in self.inner else {}
            if length and (is_split or not self.batch) and x.ndim > 1 and x.shape[1] == length:
                inner[CONTEXT] = 1
            self.operands.append(Crossing(0 if is_split else None, inner=inner))

    def _length(self, over: int) -> int:
        """The length of the sequences of the arguments, which `context` splits; 0 where the mesh lacks it."""
        if over == 1:
            return 0
        found = [x for x in self.arguments if x.ndim > 1 and self.batch in (0, x.shape[0])]
        if length := batch_size([jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in found], over):
            return length
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.arguments)
        raise CallError(
            "The arguments of a call have no sequence that splits over the context axis.",
            where=[f"{self.name}: {shapes}", f"mesh axis {CONTEXT!r} of degree {over}"],
            why=f"the sequence is dim 1 of arguments with a batch, and none divides by {over}.",
            do="with js.global_view(): y = model(x)  # as one program\n"
            f"or pad the sequences to a multiple of {over}, or js.mesh() without {CONTEXT!r}.",
        )

    def kept(self, p: ShardedPartitioner) -> dict[Any, Value]:
        """The parameters gathered outside units that forward keeps for backward, whole or in pieces."""
        pieces = resharded(self.unit, is_root=not self.unit.nested)
        found = {key: v for key, v in p.kept_whole.items() if isinstance(key, tuple)}
        if isinstance(pieces, bool):
            return {} if pieces else found
        placements = {one.parameter: one.state.placement for one in self.operands if isinstance(one.state, Shard)}
        shards = {key: Shard(placements[key[0]], pieces) for key in found}
        return {key: Value(stored.cut(v.x, shards[key].placement, pieces), shards[key]) for key, v in found.items()}

    def spec(self, one: Crossing, ndim: int) -> PartitionSpec:
        """The spec of an array that crosses, over the region's axes; inner axes are innermost along their dims."""
        if one.is_own:
            spec = PartitionSpec(self.axes)
        elif isinstance(one.state, Shard):
            entries = one.state.placement.spec
            stacked = ndim - len(entries)  # by a loop; a row of a stack has fewer dims
            spec = spec_over(self.axes, (None,) * stacked + entries if stacked > 0 else entries[-stacked:])
        else:
            spec = PartitionSpec() if one.state is None else PartitionSpec(*[None] * cast(int, one.state), self.axes)
        entries = [*spec, *[None] * (ndim - len(spec))]
        for axis in self.inner:
            if (dim := 0 if one.is_copy else one.inner.get(axis)) is not None:
                entries[dim] = (*axes_of(entries[dim]), axis)
        return PartitionSpec(*entries)


@dataclasses.dataclass(eq=False)
class OnShards:
    """A program (a closed jaxpr) of a region as a function of global arrays, and how its operands enter."""

    region: Region
    jaxpr: Any
    operands: Sequence[Crossing]
    phase: str = units.FORWARD
    gradients_of: Sequence[Crossing] = ()  # of backward, the operands whose gradients its results are
    given: Mapping[Any, Crossing] = dataclasses.field(default_factory=dict)
    """Parameters that forward gathered outside of units and kept, the last operands."""

    def __post_init__(self) -> None:
        self.found = [Crossing(None)] * len(self.jaxpr.out_avals)  # how its results leave, once it has run
        self.keeps: dict[Any, Crossing] = {}  # and how the kept values leave: the last results
        self._out_specs: list[PartitionSpec] = []

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs it. If one device has the whole batch, nothing is gathered or summed: it runs unchanged."""
        region, entering = self.region, [*self.operands, *self.given.values()]
        if region.degree == 1:
            return evaluate_jaxpr(self.jaxpr, [fetched(x) for x in arrays])
        run = jax.shard_map(
            functools.partial(self._on_part, region.inner),
            mesh=region.mesh,
            in_specs=tuple(region.spec(one, x.ndim) for one, x in zip(entering, arrays, strict=True)),
            out_specs=self._out_specs,  # read after the body is traced, which fills the list
            axis_names=manual_axes(region.mesh),
            check_vma=False,
        )
        return run(*arrays)

    def _on_shard(self, *xs: Any) -> list[Any]:
        """The program on one data shard: from its parts of the operands to its parts of the results."""
        region, num = self.region, len(self.operands)
        values = [one.enter(x) for x, one in zip(xs[:num], self.operands, strict=True)]
        whole = {key: one.enter(x) for x, (key, one) in zip(xs[num:], self.given.items(), strict=True)}
        p = ShardedPartitioner(region.mesh, [region.batch] if region.batch else [], whole, region.unit.name or "(root)")
        outs, more = self._run(p, values), {}
        mixing.note(region.unit, region.name, self.phase, p.moved)
        if self.phase == units.FORWARD:
            note_layers(region.unit, p.layers_read)
            warn_of_whole(region.name, region.arguments, region.batch, data_degree(region.mesh), p.noted)
            more = region.kept(p)
        own = [one.is_own for one in self.gradients_of] or [False] * len(outs)
        leaving = [Crossing.of(v, is_own=is_own) for v, is_own in zip(outs, own, strict=True)]
        leaving += map(Crossing.of, more.values())
        self.keeps = dict.fromkeys(more, Crossing(None))
        values = [*outs, *more.values()]
        self._leave(leaving, [v.ndim for v in values])
        return [one.leave(v) for one, v in zip(leaving, values, strict=True)]

    def _run(self, p: ShardedPartitioner, values: list[Value]) -> list[Value]:
        """Its results; gradients are stored like their parameters, those of copies as each device's own part."""
        if self.phase == units.BACKWARD:
            gathered = shards_gathered_by(self.jaxpr.jaxpr, values, {name for name, *_ in self.given})
            shards = [v for v in gathered if not v.shard.pieces and not _compat.on_host(v.x)]
            others = [v for v in values if not v.is_stored]
            if shards:  # nothing is gathered before the other operands are available
                first, last = available_together([v.x for v in shards], [v.x for v in others])
                for v, x in zip([*shards, *others], [*first, *last], strict=True):
                    v.x = x
        wanted = [PARTIAL if one.is_own else one.state for one in self.gradients_of]
        stored_as = {i: s for i, s in enumerate(wanted) if isinstance(s, Shard)}
        outs = p.run_root(self.jaxpr.jaxpr, self.jaxpr.consts, values, stored_as)
        if self.phase == units.FORWARD:
            return [p.land(p.settle(v)) for v in outs]
        with jax.named_scope(f"jshard[{p.name}]/{units.BACKWARD}"):
            found = p.reduce_to_shards([outs[i] for i in stored_as], [*stored_as.values()])
            found = dict(zip(stored_as, found, strict=True))
            found = {i: v.with_array(to_host(v.x) if v.shard.placement.on_host else v.x) for i, v in found.items()}
            return [found[i] if i in found else p.in_state(v, wanted[i]) for i, v in enumerate(outs)]

    def _on_part(self, inner: tuple[str, ...], *xs: Any) -> list[Any]:
        """The same on one place along inner axes of a data shard."""
        if not inner:
            return self._on_shard(*xs)
        *others, axis = inner
        dims = [one.inner.get(axis) for one in (*self.operands, *self.given.values())]
        asked = [PARTIAL if one.is_copy and axis not in one.inner else one.inner.get(axis) for one in self.gradients_of]
        program, over = functools.partial(self._on_part, tuple(others)), degree(self.region.mesh, axis)
        outs, dims, more = over_axis(axis, over, program, xs, dims, asked, is_last=inner == self.region.inner)
        mixing.note(self.region.unit, self.region.name, self.phase, more, over=axis)
        leaving = [
            one if dim is None else dataclasses.replace(one, inner={**one.inner, axis: dim})
            for one, dim in zip((*self.found, *self.keeps.values()), dims, strict=True)
        ]
        self._leave(leaving, [x.ndim for x in outs])
        return outs

    def _leave(self, leaving: list[Crossing], ndims: Sequence[int]) -> None:
        """Notes how results leave, and the kept values after them."""
        num = len(leaving) - len(self.keeps)
        self.found, self.keeps = leaving[:num], dict(zip(self.keeps, leaving[num:], strict=True))
        self._out_specs[:] = map(self.region.spec, leaving, ndims)


def _differentiable(region: Region) -> Callable[..., list[Any]]:
    """The region as a function of global arrays whose derivative is also a region."""
    program, entering, n = region.program, region.operands, region.program.num_params

    def plain(*operands: Any) -> list[Any]:
        return OnShards(region, program.jaxpr, entering)(*operands)[: len(program.jaxpr.out_avals)]

    def forward(gradient: Gradient, operands: list[Any]) -> tuple[list[Any], OnShards]:
        on_shards = OnShards(region, gradient.forward, entering)
        return on_shards(*operands), on_shards

    def backward(gradient: Gradient, before: OnShards, live: tuple, params: list, kept: list, cts: list) -> list[Any]:
        num_outs, at = len(live), len(kept) - len(before.keeps)
        of_operands = [*entering[:n], *before.found[num_outs:], *picked(live, before.found[:num_outs])]
        wanted = picked(gradient.wrt, entering)
        on_shards = OnShards(region, gradient.backward(live), of_operands, units.BACKWARD, wanted, before.keeps)
        grads = on_shards(*params, *kept[:at], *cts, *kept[at:])
        if region.degree == 1:
            like = picked(gradient.wrt, [*params, *[None] * (len(gradient.wrt) - n)])
            grads = [g if x is None else placed_like(g, x) for g, x in zip(grads, like, strict=True)]
        return grads

    return differentiable(program, plain, forward, backward)
