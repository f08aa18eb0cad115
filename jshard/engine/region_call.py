"""The call of a region: a program over global arrays, which lowering runs on data shards inside a `jax.shard_map`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard.engine import mixing, stored
from jshard.engine.inner import over_axis
from jshard.engine.mixing import note_layers, warn_of_whole
from jshard.engine.program import Gradient, Program, evaluate_jaxpr, merged, others, picked
from jshard.engine.program_call import (
    Adjoint,
    Derivative,
    MappedCall,
    ProgramCall,
    batch_rule,
    jvp_rule,
    mapped_program,
    tangent_program,
    transpose_rule,
    transposed_program,
)
from jshard.engine.rules import PARTIAL, Shard, State, Value
from jshard.engine.schedule.barriers import available_together
from jshard.engine.schedule.prefetch import shards_gathered_by
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.unit_call import BACKWARD, FORWARD, copies_among
from jshard.errors import CallError
from jshard.plans.memories import fetched, to_host
from jshard.plans.mesh import CONTEXT, EXPERT, batch_axes, data_degree, degree, inner_axes, manual_axes, region_degree
from jshard.plans.placement import axes_of, spec_over
from jshard.plans.plan import resharded
from jshard.plans.units import Unit

region_p = Primitive("region")
"""A region.

Params:
    call: a `RegionCall`.
    jaxpr: its program on data shards, a closed jaxpr with one `jax.shard_map`. None until the equation is staged, and
        for the linear map of a derivative until it is lowered: of most only the transpose is run.
    used: `Used`, where an equation has lost operands and results of the call of which nothing was used; else None.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """How a value enters or leaves a region; `counted` and `parameter` are those of `Value`.

    Attributes:
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

    @property
    def shard(self) -> Shard | None:
        """How a parameter, or its gradient, is stored; None for other values."""
        return self.state if isinstance(self.state, Shard) else None

    @classmethod
    def of(cls, value: Value, *, is_own: bool = False) -> "Crossing":
        """Returns how a value leaves; each device has its own piece of a parameter."""
        is_own = is_own or (value.is_stored and value.shard.pieces > 0)
        return cls(value.state, is_own, value.counted, value.parameter)

    def leave(self, value: Value) -> jax.Array:
        """Returns the array as which a value leaves."""
        return value.x[None] if self.is_own else value.x

    def enter(self, x: jax.Array) -> Value:
        """Returns the value of an array that has entered."""
        return Value(x[0] if self.is_own else x, self.state, counted=self.counted, parameter=self.parameter)

    def behind_a_mapped_dim(self) -> "Crossing":
        """Returns the crossing of the same value with one more dim, the first."""
        state = self.state + 1 if isinstance(self.state, int) else self.state
        return dataclasses.replace(self, state=state, inner={axis: dim + 1 for axis, dim in self.inner.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class ResultOf:
    """The crossing of a result of an earlier call, which is known when that is partitioned."""

    call: "RegionCall"
    position: int

    def resolved(self) -> Crossing:
        """Returns the crossing."""
        return self.call.partition.results[self.position]


AnyCrossing = Crossing | ResultOf


def _of_tangent(crossing: AnyCrossing) -> AnyCrossing:
    """Returns how a tangent enters: like its operand. It is not the parameter of that name."""
    return dataclasses.replace(crossing, parameter="") if isinstance(crossing, Crossing) else crossing


def _resolved(crossing: AnyCrossing) -> Crossing:
    return crossing.resolved() if isinstance(crossing, ResultOf) else crossing


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """The parameters that a call gathered outside of units and kept: the last results of forward."""

    avals: tuple[ShapedArray, ...]
    crossings: Mapping[Any, Crossing]
    """By the parameter's path, dtype and shape."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A call's program on data shards, how its results leave, and the copies behind them."""

    jaxpr: ClosedJaxpr
    results: tuple[Crossing, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Where the programs of one call of an annotated model run.

    Attributes:
        unit: the root.
        name: class and method, for messages.
        arguments: the types of the arguments.
        batch: the size of the batch; 0 without one.
        kept: what the calls of the region have gathered and kept. A later call finds there which parameters the copies
            among its operands are.
    """

    unit: Unit
    name: str
    arguments: tuple[Any, ...]
    batch: int
    kept: list[Gathered] = dataclasses.field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        assert isinstance(self.unit.mesh, Mesh) or self.unit.mesh is not None
        return self.unit.mesh  # type: ignore[return-value]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return batch_axes(self.mesh)

    @property
    def degree(self) -> int:
        """The number of devices that share the work."""
        return region_degree(self.mesh)

    @property
    def inner(self) -> tuple[str, ...]:
        """The inner axes of the mesh."""
        return inner_axes(self.mesh)

    def spec(self, crossing: Crossing, ndim: int) -> PartitionSpec:
        """Returns the spec of an array that crosses, over the region's axes; inner axes are innermost in their dims."""
        if crossing.is_own:
            spec = PartitionSpec(self.axes)
        elif crossing.shard is not None:
            entries = crossing.shard.placement.spec
            num_stacked = ndim - len(entries)  # by a loop; a row of a stack has fewer dims
            entries = (None,) * num_stacked + entries if num_stacked > 0 else entries[-num_stacked:]
            spec = spec_over(self.axes, entries)
        elif isinstance(crossing.state, int):
            spec = PartitionSpec(*[None] * crossing.state, self.axes)
        else:
            spec = PartitionSpec()
        dims = [*spec, *[None] * (ndim - len(spec))]
        for axis in self.inner:
            dim = 0 if crossing.is_copy else crossing.inner.get(axis)
            if dim is not None:
                dims[dim] = (*axes_of(dims[dim]), axis)
        return PartitionSpec(*dims)

    def keeps(self, p: ShardedPartitioner, operands: Sequence[Crossing]) -> dict[Any, Value]:
        """Returns the parameters gathered outside units that forward keeps for backward, whole or in pieces."""
        pieces = resharded(self.unit, is_root=not self.unit.nested)
        gathered = {key: value for key, value in p.kept_whole.items() if isinstance(key, tuple)}
        if isinstance(pieces, bool):
            return {} if pieces else gathered
        placements = {one.parameter: one.shard.placement for one in operands if one.shard is not None}
        kept = {}
        for key, value in gathered.items():
            shard = Shard(placements[key[0]], pieces)
            kept[key] = Value(stored.cut(value.x, shard.placement, pieces), shard)
        return kept

    def copies(self, avals: Sequence[ShapedArray]) -> dict[Any, Crossing] | None:
        """Returns which parameters the copies of these types are; None where that is not certain."""
        candidates = [one for one in self.kept if one.avals == tuple(avals)]
        keys = {tuple(one.crossings) for one in candidates}
        return dict(candidates[0].crossings) if len(keys) == 1 else None

    def over(self, size: int, *, is_batch: bool) -> "Region":
        """Returns the region of a call with one more dim; the dim is the batch, or the batch is the one it was."""
        arguments = tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in self.arguments)
        return dataclasses.replace(self, arguments=arguments, batch=size if is_batch else self.batch)


@dataclasses.dataclass(frozen=True, eq=False)
class RegionCall(ProgramCall):
    """The call of a program in a region.

    Attributes:
        region: where it runs.
        program: the program, without copies.
        avals: the types of its operands, as they are stored.
        operands: how they enter.
        examples: which operands have what belongs to examples, by position: arguments and residuals.
        targets: how the first results leave: those that are gradients, like what they are the gradients of; the others
            leave as they come.
        target_avals: the types of these results.
        phase: `FORWARD`, or `BACKWARD`, whose first results are gradients.
        part: the name of the program, for the records of what it sends.
        returns_copies: whether the parameters that it gathers outside of units are its last results.
    """

    region: Region
    program: Program
    avals: tuple[ShapedArray, ...]
    operands: tuple[AnyCrossing, ...]
    examples: frozenset[int]
    targets: tuple[AnyCrossing, ...] = ()
    target_avals: tuple[ShapedArray, ...] = ()
    phase: str = FORWARD
    part: str = FORWARD
    returns_copies: bool = False
    constants: frozenset[int] = frozenset()
    constant_results: frozenset[int] = frozenset()
    adjoint: Adjoint | None = None
    _derivatives: dict[Any, Derivative] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _partitions: dict[Any, Partition] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        """Calls the program."""
        return region_p.bind(*operands, call=self, jaxpr=None, used=None)

    @property
    def partition(self) -> Partition:
        """The program on data shards."""
        return next(iter(self._partitions.values()), None) or self.partitioned(self.avals)

    def partitioned(self, avals: Sequence[ShapedArray]) -> Partition:
        """Returns the program on data shards; the types are those of all operands."""
        key = tuple(avals)
        if key not in self._partitions:
            self._partitions[key] = _partition(self, avals)
        return self._partitions[key]

    @functools.cached_property
    def result_avals(self) -> tuple[ShapedArray, ...]:
        """The types of the results, without copies."""
        return (*self.target_avals, *self.program.jaxpr.out_avals[len(self.target_avals) :])

    def derivative(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> Derivative:
        """Returns the derivative, whose programs run in the same region."""
        if wrt not in self._derivatives:
            self._derivatives[wrt] = self._new_derivative(wrt, tuple(avals[: len(wrt)]))
        return self._derivatives[wrt]

    def _new_derivative(self, wrt: tuple[bool, ...], avals: tuple[ShapedArray, ...]) -> Derivative:
        gradient = self.program.gradient(wrt)
        num_params = self.program.num_params
        num_results = len(gradient.is_float)
        num_residuals = len(gradient.kept)
        copied_results = self.constant_results | copies_among(gradient.forward.jaxpr)
        has_tangent = tuple(is_float and i not in copied_results for i, is_float in enumerate(gradient.is_float))

        forward = dataclasses.replace(
            self,
            program=Program(gradient.forward, num_params, remat=self.program.remat),
            avals=avals,
            returns_copies=True,
            constant_results=copied_results,
            adjoint=None,
            part=self.part if self.part in (FORWARD, BACKWARD) else f"forward of {self.part}",
        )
        residuals = [ResultOf(forward, num_results + i) for i in range(num_residuals)]
        tangents = [_of_tangent(crossing) for crossing in picked(wrt, self.operands)]
        known = num_params + num_residuals
        adjoint = RegionAdjoint(self, gradient, has_tangent, forward, picked(wrt, avals))
        linear = dataclasses.replace(
            self,
            program=Program(tangent_program(gradient, has_tangent), num_params),
            avals=(),  # unknown, and of no use: its results are no residuals
            operands=(*self.operands[:num_params], *residuals, *tangents),
            examples=frozenset(range(num_params, known)),
            targets=tuple(picked(has_tangent[: len(self.targets)], self.targets)),
            target_avals=tuple(picked(has_tangent[: len(self.targets)], self.target_avals)),
            part=f"tangents of {self.part}",
            returns_copies=False,
            constants=adjoint.copied_residuals,
            constant_results=frozenset(),
            adjoint=adjoint,
        )
        return Derivative(forward, linear, num_residuals, has_tangent)

    def transposed(self, linear: tuple[bool, ...], live: tuple[bool, ...]) -> "RegionCall":
        """Returns the backward of a derivative, or the transpose of any other program."""
        if self.adjoint is not None and self.adjoint.takes(linear):
            return self.adjoint.backward(live)
        known = [i for i, is_linear in enumerate(linear) if not is_linear]
        moved = [i for i, is_linear in enumerate(linear) if is_linear]
        cotangents = [self._result_crossing(i) for i, is_live in enumerate(live) if is_live]
        return dataclasses.replace(
            self,
            program=Program(
                transposed_program(self.program.jaxpr, linear, live), sum(i < self.program.num_params for i in known)
            ),
            avals=(),
            operands=(*(self.operands[i] for i in known), *cotangents),
            examples=frozenset(k for k, i in enumerate(known) if i in self.examples),
            targets=tuple(self.operands[i] for i in moved),
            target_avals=tuple(self._operand_aval(i) for i in moved),
            phase=BACKWARD,
            part=f"transpose of {self.part}",
            returns_copies=False,
            constants=frozenset(k for k, i in enumerate(known) if i in self.constants),
            constant_results=frozenset(),
            adjoint=None,
        )

    def copies_of(self, outs: Sequence[Any], primals: Sequence[Any], staged: ClosedJaxpr | None) -> Sequence[Any]:
        """Returns the copies that an equation returns, which may be others than those of its derivative's forward.

        An equation that is staged has a fixed number of results; of the rest of its program nothing is used.
        """
        if staged is None:
            return outs
        return region_p.bind(*primals, call=self, jaxpr=staged, used=None)[len(self.program.jaxpr.out_avals) :]

    def _operand_aval(self, position: int) -> ShapedArray:
        return self.avals[position] if self.avals else self.program.jaxpr.in_avals[position]

    def _result_crossing(self, position: int) -> AnyCrossing:
        if position < len(self.targets):
            return self.targets[position]
        aval = self.program.jaxpr.out_avals[position]
        return _guessed(self.region, aval.shape)

    def mapped(self, size: int, is_mapped: tuple[bool, ...]) -> "MappedRegionCall":
        """Returns the call over one more dim.

        The dim is the batch if it splits over the data shards and examples have it: a model of one example, mapped, is
        split like a batched one. Otherwise, as for the rows of a Jacobian, the batch is the one that it was.
        """
        region = self.region
        divides = size % data_degree(region.mesh) == 0
        maps_examples = any(is_mapped[i] for i in self.examples)
        is_batch = divides and (maps_examples or not region.batch)
        over = region.over(size, is_batch=is_batch)

        params = range(self.program.num_params)
        operands = []
        for i, crossing in enumerate(self.operands):
            if is_mapped[i]:
                shape = self.program.jaxpr.in_avals[i].shape
                operands.append(_mapped_crossing(over, crossing, shape, is_batch=is_batch, is_param=i in params))
            elif is_batch and i not in params and i not in self.constants:
                operands.append(Crossing(None))
            else:
                operands.append(crossing)

        jaxpr, is_mapped_result = mapped_program(self.program.jaxpr, size, is_mapped)
        has_target = not any(is_mapped_result[: len(self.targets)])
        call = dataclasses.replace(
            self,
            region=over,
            program=Program(jaxpr, self.program.num_params, remat=self.program.remat),
            avals=tuple(jaxpr.in_avals),
            operands=tuple(operands),
            targets=self.targets if has_target else (),
            target_avals=self.target_avals if has_target else (),
            adjoint=None,
        )
        return MappedRegionCall(call, is_mapped_result, self, is_mapped, has_target)


@dataclasses.dataclass(frozen=True, eq=False)
class MappedRegionCall(MappedCall):
    """A region over one more dim. Mapped parameters and gradients are no stored shards: they have no padding inside.

    Attributes:
        before: the call that is mapped.
        is_mapped_operand: which of its operands are mapped.
        has_targets: whether gradients leave as stored shards.
    """

    before: RegionCall
    is_mapped_operand: tuple[bool, ...]
    has_targets: bool

    def enter(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands; mapped parameters lose their padding."""
        entered = []
        for x, crossing, is_mapped in zip(operands, self.before.operands, self.is_mapped_operand, strict=True):
            shard = crossing.shard if isinstance(crossing, Crossing) else None
            if is_mapped and shard is not None:
                x = jax.vmap(functools.partial(stored.without_padding, placement=shard.placement))(fetched(x))
            entered.append(x)
        return entered

    def leave(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results; gradients get the padding of their parameter."""
        if self.has_targets:
            return list(results)
        left = list(results)
        targets = zip(self.before.targets, self.before.target_avals, self.is_mapped, strict=False)
        for i, (target, aval, is_mapped) in enumerate(targets):
            crossing = _resolved(target)
            if crossing.is_own:
                raise CallError(
                    "Gradients of single examples were asked for, of parameters gathered once for all microbatches.",
                    where=self.before.region.name,
                    why='with sync="last" a device sums the gradients of its examples before they are reduced.',
                    do='js.value_and_grad(loss_fn, accumulate=4, sync="each")',
                )
            shape = (*results[i].shape[:1], *aval.shape) if is_mapped else aval.shape
            left[i] = _padded(results[i], shape)
        return left


def _padded(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, after - before) for before, after in zip(x.shape, shape, strict=True)])


def _guessed(region: Region, shape: Sequence[int]) -> Crossing:
    """Returns how a value of a mapped call enters: split along the batch, where it has one.

    A wrong guess is a value that is gathered or cut when it enters; the program is the same.
    """
    is_split = bool(region.batch) and len(shape) > 0 and shape[0] == region.batch
    inner = {EXPERT: 0} if is_split and EXPERT in region.inner else {}
    return Crossing(0 if is_split else None, inner=inner)


def _mapped_crossing(
    region: Region, crossing: AnyCrossing, shape: Sequence[int], *, is_batch: bool, is_param: bool
) -> Crossing:
    """Returns how an operand enters that has one more dim than `shape`, the first."""
    before = crossing if isinstance(crossing, Crossing) and not is_param else _guessed(region, shape)
    if is_batch:
        inner = {axis: dim + 1 for axis, dim in before.inner.items() if axis == CONTEXT}
        if EXPERT in region.inner:
            inner[EXPERT] = 0
        return Crossing(0, inner=inner)
    if before.shard is not None or before.is_own:  # mapped, it is no shard of a parameter any more
        return Crossing(None)
    return before.behind_a_mapped_dim()


@dataclasses.dataclass(frozen=True, eq=False)
class RegionAdjoint(Adjoint):
    """The backward of a region's derivative.

    Attributes:
        call: the call that was differentiated.
        gradient: its derivative.
        has_tangent: for each of its results, whether it can have a cotangent.
        forward: its forward.
        diff_avals: the types of the operands that the derivative is with respect to.
    """

    call: RegionCall
    gradient: Gradient
    has_tangent: tuple[bool, ...]
    forward: RegionCall
    diff_avals: list[ShapedArray]
    _backwards: dict[tuple[bool, ...], RegionCall] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def copied_residuals(self) -> frozenset[int]:
        """Which operands of backward are copies of parameters that units have kept."""
        num_params, num_results = self.call.program.num_params, len(self.has_tangent)
        copied = self.forward.constant_results
        return frozenset(num_params + i - num_results for i in copied if i >= num_results)

    def backward(self, live: tuple[bool, ...]) -> RegionCall:
        """Returns the call that computes gradients."""
        if live not in self._backwards:
            self._backwards[live] = self._new_backward(live)
        return self._backwards[live]

    def _new_backward(self, live: tuple[bool, ...]) -> RegionCall:
        call, gradient = self.call, self.gradient
        num_params, num_results = call.program.num_params, len(self.has_tangent)
        may_be_live = iter(live)
        live_results = tuple(has_tangent and next(may_be_live) for has_tangent in self.has_tangent)
        results = [ResultOf(self.forward, i) for i in range(num_results)]
        residuals = [ResultOf(self.forward, num_results + i) for i in range(len(gradient.kept))]
        return RegionCall(
            call.region,
            Program(gradient.backward(live_results), num_params),
            avals=(),
            operands=(*call.operands[:num_params], *residuals, *picked(live_results, results)),
            examples=frozenset(range(num_params, num_params + len(residuals))),
            targets=tuple(picked(gradient.wrt, call.operands)),
            target_avals=tuple(self.diff_avals),
            phase=BACKWARD,
            part=BACKWARD if call.part == FORWARD else f"backward of {call.part}",
            constants=self.copied_residuals,
        )


# ---- lowering: the program on data shards


def _partition(call: RegionCall, avals: Sequence[ShapedArray]) -> Partition:
    region = call.region
    num_operands = len(call.operands)
    copies = region.copies(avals[num_operands:]) or {}
    num_taken = num_operands + len(copies)
    execution = _Execution(call, [_resolved(one) for one in call.operands], copies)

    def run(*arrays: Any) -> list[Any]:
        return execution.run(*arrays[:num_taken])

    jaxpr = jax.make_jaxpr(run)(*avals)
    num_results = len(call.program.jaxpr.out_avals)
    if call.returns_copies and execution.kept:
        region.kept.append(Gathered(tuple(jaxpr.out_avals[num_results:]), execution.kept))
    return Partition(jaxpr, tuple(execution.leaving))


class _Execution:
    """One run of a call's program, while it is traced.

    Attributes:
        leaving: how its results leave.
        kept: how the copies leave that it returns behind them.
    """

    def __init__(self, call: RegionCall, operands: list[Crossing], copies: Mapping[Any, Crossing]) -> None:
        self._call = call
        self._region = call.region
        self._operands = operands
        self._copies = copies
        self._targets = [_resolved(target) for target in call.targets]
        self._out_specs: list[PartitionSpec] = []
        self.leaving: list[Crossing] = [Crossing(None)] * len(call.program.jaxpr.out_avals)
        self.kept: dict[Any, Crossing] = {}

    def run(self, *arrays: Any) -> list[Any]:
        """Runs it. If one device has the whole batch, nothing is gathered or summed: it runs unchanged."""
        region = self._region
        if region.degree == 1:
            return evaluate_jaxpr(self._call.program.jaxpr, [fetched(x) for x in arrays])
        entering = [*self._operands, *self._copies.values()]
        sharded = jax.shard_map(
            functools.partial(self._on_part, region.inner),
            mesh=region.mesh,
            in_specs=tuple(region.spec(one, x.ndim) for one, x in zip(entering, arrays, strict=True)),
            out_specs=self._out_specs,  # read after the body is traced, which fills the list
            axis_names=manual_axes(region.mesh),
            check_vma=False,
        )
        return sharded(*arrays)

    def _on_part(self, inner: tuple[str, ...], *xs: Any) -> list[Any]:
        """Runs the program on one place along inner axes of a data shard."""
        if not inner:
            return self._on_shard(*xs)
        *outer, axis = inner
        region = self._region
        entering = [*self._operands, *self._copies.values()]
        dims = [one.inner.get(axis) for one in entering]
        wanted: list[State] = []
        for target in self._targets:
            is_partial = target.is_copy and axis not in target.inner
            wanted.append(PARTIAL if is_partial else target.inner.get(axis))
        program = functools.partial(self._on_part, tuple(outer))
        is_last = inner == region.inner
        outs, out_dims, moved = over_axis(axis, degree(region.mesh, axis), program, xs, dims, wanted, is_last=is_last)
        mixing.note(region.unit, region.name, self._call.part, moved, over=axis)
        leaving = []
        for one, dim in zip((*self.leaving, *self.kept.values()), out_dims, strict=True):
            leaving.append(one if dim is None else dataclasses.replace(one, inner={**one.inner, axis: dim}))
        self._leave(leaving, [x.ndim for x in outs])
        return outs

    def _on_shard(self, *xs: Any) -> list[Any]:
        """Runs the program on one data shard: from its parts of the operands to its parts of the results."""
        region, call, num_operands = self._region, self._call, len(self._operands)
        values = [one.enter(x) for x, one in zip(xs[:num_operands], self._operands, strict=True)]
        copies = zip(xs[num_operands:], self._copies.items(), strict=True)
        whole = {key: one.enter(x) for x, (key, one) in copies}
        batch_sizes = [region.batch] if region.batch else []
        p = ShardedPartitioner(region.mesh, batch_sizes, whole, region.unit.name or "(root)")
        outs = self._results(p, values)

        mixing.note(region.unit, region.name, call.part, p.moved)
        if call.part == FORWARD:
            note_layers(region.unit, p.layers_read)
            warn_of_whole(region.name, list(region.arguments), region.batch, data_degree(region.mesh), p.noted)
        kept = region.keeps(p, self._operands) if call.returns_copies else {}

        is_own = [target.is_own for target in self._targets]
        is_own += [False] * (len(outs) - len(is_own))
        leaving = [Crossing.of(v, is_own=own) for v, own in zip(outs, is_own, strict=True)]
        leaving += [Crossing.of(v) for v in kept.values()]
        self.kept = dict.fromkeys(kept, Crossing(None))
        left = [*outs, *kept.values()]
        self._leave(leaving, [v.ndim for v in left])
        return [one.leave(v) for one, v in zip(leaving, left, strict=True)]

    def _results(self, p: ShardedPartitioner, values: list[Value]) -> list[Value]:
        """Returns the results; gradients are stored like their parameters, those of copies as each device's part."""
        jaxpr = self._call.program.jaxpr
        is_backward = self._call.phase == BACKWARD
        if is_backward:
            self._gather_after_cotangents(jaxpr, values)
        wanted = [PARTIAL if target.is_own else target.state for target in self._targets]
        shards = {i: state for i, state in enumerate(wanted) if isinstance(state, Shard)}
        outs = p.run_root(jaxpr.jaxpr, jaxpr.consts, values, shards)
        free = [p.land(p.settle(v)) for v in outs[len(wanted) :]]
        if not wanted:
            return free

        with jax.named_scope(f"jshard[{p.name}]/{BACKWARD}"):
            reduced = p.reduce_to_shards([outs[i] for i in shards], list(shards.values()))
            gradients = dict(zip(shards, reduced, strict=True))
            for i, value in gradients.items():
                if value.shard.placement.on_host:
                    gradients[i] = value.with_array(to_host(value.x))
            return [*(gradients[i] if i in gradients else p.in_state(outs[i], s) for i, s in enumerate(wanted)), *free]

    def _gather_after_cotangents(self, jaxpr: ClosedJaxpr, values: list[Value]) -> None:
        """Ties the shards to the other operands of backward: else they would be gathered while forward runs."""
        gathered = shards_gathered_by(jaxpr.jaxpr, values, {name for name, *_ in self._copies})
        shards = [v for v in gathered if not v.shard.pieces and not _compat.on_host(v.x)]
        inputs = [v for v in values if not v.is_stored]
        if not shards:
            return
        first, last = available_together([v.x for v in shards], [v.x for v in inputs])
        for v, x in zip([*shards, *inputs], [*first, *last], strict=True):
            v.x = x

    def _leave(self, leaving: list[Crossing], ndims: Sequence[int]) -> None:
        """Notes how results leave, and the copies after them."""
        num_results = len(leaving) - len(self.kept)
        self.leaving = leaving[:num_results]
        self.kept = dict(zip(self.kept, leaving[num_results:], strict=True))
        self._out_specs[:] = map(self._region.spec, leaving, ndims)


# ---- equations without what is not used


@dataclasses.dataclass(frozen=True)
class Used:
    """Which operands and results of a call an equation has; the types are those of all operands."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    avals: tuple[ShapedArray, ...]

    @classmethod
    def all_of(cls, eqn: JaxprEqn) -> "Used":
        """Returns all of an equation."""
        return cls((True,) * len(eqn.invars), (True,) * len(eqn.outvars), tuple(v.aval for v in eqn.invars))

    def without(self, operands: Sequence[bool], results: Sequence[bool]) -> "Used":
        """Returns what is left where only some of the operands and results of the equation are used."""
        operands_left = merged(self.operands, operands, [False] * self.operands.count(False))
        results_left = merged(self.results, results, [False] * self.results.count(False))
        return Used(tuple(operands_left), tuple(results_left), self.avals)

    def all_operands(self, operands: Sequence[Any], missing: Callable[[ShapedArray], Any]) -> list[Any]:
        """Returns the operands of the call; no result that is used depends on those that are made up."""
        absent = [missing(aval) for aval in others(self.operands, self.avals)]
        return merged(self.operands, operands, absent)


def _without_unused(results_used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """Removes what an equation computes in vain, with the gathers and residuals that were only for that."""
    jaxpr: ClosedJaxpr | None = eqn.params["jaxpr"]
    if not any(results_used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if jaxpr is None:
        return [True] * len(eqn.invars), eqn
    is_key = [jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.invars]  # cannot be made up
    smaller, operands_used = _compat.without_dead_code(jaxpr, is_key, results_used)
    used: Used | None = eqn.params["used"]
    if not all(operands_used) or not all(results_used):
        before = used or Used.all_of(eqn)
        used = before.without(operands_used, results_used)
    smaller_eqn = eqn.replace(
        invars=picked(operands_used, eqn.invars),
        outvars=picked(results_used, eqn.outvars),
        params={"call": eqn.params["call"], "jaxpr": smaller, "used": used},
        effects=smaller.effects,
    )
    return operands_used, smaller_eqn


partial_eval.dce_rules[region_p] = _without_unused


# ---- the rules of the primitive; those of every call are in `program_call`


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    call: RegionCall,
    jaxpr: ClosedJaxpr | None,
    used: Used | None,
) -> tuple[list[Any], list[Any]]:
    if used is None:
        return jvp_rule(primals, tangents, call=call, jaxpr=jaxpr)
    all_primals = used.all_operands(primals, _zeros)
    all_tangents = used.all_operands(tangents, lambda aval: ad.Zero(aval.to_tangent_aval()))
    results, result_tangents = jvp_rule(all_primals, all_tangents, call=call, jaxpr=None)
    num_results = len(call.program.jaxpr.out_avals)
    is_used = used.results[:num_results]
    left = picked(is_used, results[:num_results])
    tangents_left = picked(is_used, result_tangents[:num_results])
    if any(used.results[num_results:]):
        copies = region_p.bind(*primals, call=call, jaxpr=jaxpr, used=used)[len(left) :]
        left += copies
        tangents_left += [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in copies]
    return left, tangents_left


def _transpose(
    cotangents: Sequence[Any], *operands: Any, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> list[Any]:
    if used is None:
        return transpose_rule(cotangents, *operands, call=call, jaxpr=jaxpr)
    num_results = len(call.program.jaxpr.out_avals)
    is_used = used.results[:num_results]
    zeros = [ad.Zero(aval.to_ct_aval()) for aval in others(is_used, call.result_avals)]
    all_cotangents = merged(is_used, cotangents[: sum(is_used)], zeros)
    gradients = transpose_rule(all_cotangents, *used.all_operands(operands, _zeros), call=call, jaxpr=None)
    return picked(used.operands, gradients)


def _batch(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call: RegionCall,
    jaxpr: ClosedJaxpr | None,
    used: Used | None,
) -> tuple[list[Any], list[int | None]]:
    if used is None:
        return batch_rule(operands, dims, call=call, jaxpr=jaxpr)
    all_dims = used.all_operands(dims, lambda aval: None)
    num_results = len(call.program.jaxpr.out_avals)
    results, result_dims = batch_rule(used.all_operands(operands, _zeros), all_dims, call=call, jaxpr=None)
    is_used = used.results[:num_results]
    left = picked(is_used, results[:num_results])
    dims_left = picked(is_used, result_dims[:num_results])
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    for aval in jaxpr.out_avals[len(left) :] if jaxpr is not None else []:
        left.append(jnp.zeros((size, *aval.shape), aval.dtype))  # mapped, it is not taken for a copy
        dims_left.append(0)
    return left, dims_left


def _zeros(aval: ShapedArray) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


region_p.multiple_results = True
ad.primitive_jvps[region_p] = _jvp
ad.primitive_transposes[region_p] = _transpose
batching.primitive_batchers[region_p] = _batch


@region_p.def_effectful_abstract_eval
def _types(
    *avals: ShapedArray, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> tuple[Sequence[Any], Any]:
    del used  # then there is a program
    if jaxpr is None and call.returns_copies:
        jaxpr = call.partitioned(avals).jaxpr
    if jaxpr is None:
        return call.result_avals, call.program.jaxpr.effects
    return jaxpr.out_avals, jaxpr.effects


def _staged_params(
    avals: Sequence[ShapedArray], *, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> dict[str, Any]:
    """Returns the parameters of an equation that is staged: the program on data shards is traced here."""
    if jaxpr is None and call.adjoint is None:
        jaxpr = call.partitioned(avals).jaxpr
    return {"call": call, "jaxpr": jaxpr, "used": used}


_compat.stage_with_params(region_p, _staged_params)


@region_p.def_impl
def _run_now(*arrays: Any, **params: Any) -> list[Any]:
    return jax.jit(functools.partial(region_p.bind, **params))(*arrays)


def _lowered(ctx: Any, *operands: Any, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None) -> Any:
    del used
    return _compat.lower_jaxpr(ctx, jaxpr or call.partitioned(ctx.avals_in).jaxpr, operands)


mlir.register_lowering(region_p, _lowered)
