"""The call of a region: a program over global arrays, with its derivatives, transposes and maps in the same region."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive

from jshard import _compat
from jshard.engine import stored
from jshard.engine.chosen_remat import choose_remats
from jshard.engine.crossing import AnyCrossing, Crossing, Region, of_tangents, resolved, results_of
from jshard.engine.on_shards import Partition, partition
from jshard.engine.program import Gradient, Program, SummingProgram
from jshard.engine.program_call import (
    Adjoint,
    Derivative,
    MappedCall,
    ProgramCall,
    Pushforward,
    mapped_program,
    pushforward_program,
    tangent_program,
    transposed_program,
)
from jshard.engine.schedule.stored_values import stacked_by_loop
from jshard.engine.selections import (
    at_positions,
    counted_from,
    merged,
    others,
    picked,
    positions_of,
    shifted,
    unmarked_at,
)
from jshard.engine.unit_call import BACKWARD, FORWARD, copies_among
from jshard.engine.values import have_gradients
from jshard.plans.memories import fetched
from jshard.plans.mesh import CONTEXT, EXPERT, PIPE, data_degree, degree

region_p = Primitive("region")
"""A region.

Params:
    call: a `RegionCall`.
    jaxpr: its program on data shards, a closed jaxpr with one `jax.shard_map`. None until the equation is staged, and
        for the linear map of a derivative until it is lowered: of most only the transpose is run.
    used: `Used`, where an equation has lost operands and results of the call of which nothing was used; else None.
"""


# Compared by identity, as jaxprs are: equations that share a call share its derivatives and its program on shards. Held
# weakly by JAX's caches, which have the parameters of equations as keys: a call holds programs, and the latest
# thousands of them would stay in memory.
@_compat.hold_weakly
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
        residuals: which results are read by backward alone, by position: they may leave on the stages of a pipeline.
        cotangents: which operands are cotangents, by position. The others of backward are parameters, and what forward
            has saved. Empty where that is not known.
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
    residuals: range = range(0)
    cotangents: range = range(0)
    constants: frozenset[int] = frozenset()
    constant_results: frozenset[int] = frozenset()
    adjoint: Adjoint | None = None
    _derivatives: dict[tuple[bool, ...], Derivative] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _partitions: dict[tuple[ShapedArray, ...], Partition] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def __repr__(self) -> str:
        """Returns what a printed jaxpr shows of it."""
        return f"<{self.part} of {self.region.name}>"

    def bind(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Calls the program."""
        return region_p.bind(*operands, call=self, jaxpr=None, used=None)

    def leaving(self) -> Sequence[Crossing]:
        """Returns how the results leave."""
        # Any of them: a copy that enters is the same parameter, gathered before, so results leave in the same way.
        partition = next(iter(self._partitions.values()), None)
        if partition is None:  # another call runs in its place: one over more dims, or that of a derivative
            partition = self.partitioned(self.avals)
        return partition.results

    def partitioned(self, avals: Sequence[ShapedArray]) -> Partition:
        """Returns the program on data shards; the types are those of all operands."""
        # Partitioning traces the program once more, so it is done once for each list of types: copies among the
        # operands make another program of the same call.
        key = tuple(avals)
        if key not in self._partitions:
            self._partitions[key] = partition(self, avals)
        return self._partitions[key]

    @functools.cached_property
    def result_avals(self) -> tuple[ShapedArray, ...]:
        """The types of the results, without copies."""
        return (*self.target_avals, *self.program.jaxpr.out_avals[len(self.target_avals) :])

    def derivative(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> Derivative:
        """Returns the derivative, whose programs run in the same region."""
        # Kept, because to differentiate is to trace the program: equations that share a call share its derivatives.
        if wrt not in self._derivatives:
            self._derivatives[wrt] = self._new_derivative(wrt, tuple(avals[: len(wrt)]))
        return self._derivatives[wrt]

    def _new_derivative(self, wrt: tuple[bool, ...], avals: tuple[ShapedArray, ...]) -> Derivative:
        choose_remats(self.program, self.region, self.operands, wrt)
        gradient = self.program.gradient(wrt)
        # Parameters that units inside have kept are among the results of forward, as residuals. A tangent of theirs
        # would be one more of the parameter.
        copied_results = self.constant_results | copies_among(gradient.forward.jaxpr)
        has_tangent = unmarked_at(copied_results, gradient.is_float)
        forward = self._forward_of(gradient, avals, copied_results)
        linear = self._linear_map_of(gradient, has_tangent, forward)
        return Derivative(forward, linear, len(gradient.kept), has_tangent)

    def _forward_of(
        self, gradient: Gradient, avals: tuple[ShapedArray, ...], copied_results: frozenset[int]
    ) -> "RegionCall":
        """Returns the forward of a derivative: it returns the results, the residuals, then copies."""
        # Under the name of the call itself: in a step, forward is run in its place, and a record of what the program
        # sends replaces the earlier one of that name.
        part = self.part
        if part not in (FORWARD, BACKWARD):
            part = f"forward of {part}"
        num_results = len(gradient.is_float)
        return dataclasses.replace(
            self,
            residuals=range(num_results, num_results + len(gradient.kept)),
            program=Program(gradient.forward, self.program.num_params, remat=self.program.remat),
            avals=avals,
            returns_copies=True,
            constant_results=copied_results,
            adjoint=None,
            part=part,
        )

    def _linear_map_of(self, gradient: Gradient, has_tangent: tuple[bool, ...], forward: "RegionCall") -> "RegionCall":
        """Returns the linear map of a derivative: it takes the parameters, the residuals, then tangents."""
        num_params = self.program.num_params
        num_results = len(has_tangent)
        num_residuals = len(gradient.kept)
        # How residuals leave is known when forward is partitioned, which is when its equation is staged: later than
        # now.
        residuals = results_of(forward.leaving, range(num_results, num_results + num_residuals))
        residual_avals = gradient.forward.out_avals[num_results:]  # those of pieces of parameters are not needed
        residual_operands = range(num_params, num_params + num_residuals)
        tangents = of_tangents(picked(gradient.wrt, self.operands))
        tangent_avals = picked(gradient.wrt, forward.avals)
        has_target_tangent = has_tangent[: len(self.targets)]
        adjoint = RegionAdjoint(self, gradient, has_tangent, forward, tangent_avals)
        program = tangent_program(gradient, has_tangent)
        params = self.operands[:num_params]
        param_avals = forward.avals[:num_params]
        return dataclasses.replace(
            self._for_another_program(),
            program=Program(program, num_params),
            avals=(*param_avals, *residual_avals, *tangent_avals),
            operands=(*params, *residuals, *tangents),
            examples=frozenset(residual_operands),
            targets=tuple(picked(has_target_tangent, self.targets)),
            target_avals=tuple(picked(has_target_tangent, self.target_avals)),
            part=f"tangents of {self.part}",
            constants=adjoint.copied_residuals,
            adjoint=adjoint,
        )

    def _for_another_program(self) -> "RegionCall":
        """Returns the call without what holds for the operands and results of its own program alone."""
        return dataclasses.replace(
            self,
            residuals=range(0),
            cotangents=range(0),
            returns_copies=False,
            constant_results=frozenset(),
            adjoint=None,
        )

    def pushforward(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> Pushforward:
        """Returns results and tangents as one region."""
        jaxpr = self.program.jaxpr
        has_tangent = unmarked_at(self.constant_results, have_gradients(jaxpr.out_avals))
        num_operands = len(wrt)
        differentiated = positions_of(wrt)
        tangent_operands = of_tangents(at_positions(self.operands, differentiated))
        # Tangents are the operands behind the others.
        tangents_of_examples = _positions_among(differentiated, self.examples, first=num_operands)
        num_targets = len(self.targets)
        order = Pushforward.order_of(has_tangent, num_targets)
        program = pushforward_program(jaxpr, wrt, has_tangent, order)
        operand_avals = avals[:num_operands]
        tangent_avals = picked(wrt, operand_avals)
        with_tangent = has_tangent[:num_targets]
        target_tangents = picked(with_tangent, self.targets)
        target_tangent_avals = picked(with_tangent, self.target_avals)
        call = dataclasses.replace(
            self._for_another_program(),
            program=Program(program, self.program.num_params),
            avals=(*operand_avals, *tangent_avals),
            operands=(*self.operands, *tangent_operands),
            examples=self.examples | tangents_of_examples,
            targets=(*self.targets, *target_tangents),
            target_avals=(*self.target_avals, *target_tangent_avals),
            part=f"pushforward of {self.part}",
        )
        return Pushforward(call, has_tangent, order)

    def transposed(self, linear: tuple[bool, ...], live: tuple[bool, ...]) -> ProgramCall:
        """Returns the backward of a derivative, or the transpose of any other program."""
        if self.adjoint is not None and self.adjoint.takes(linear):
            return self.adjoint.backward(live)
        known = others(linear, range(len(linear)))  # the operands that stay operands
        known_operands = others(linear, self.operands)
        known_avals = others(linear, self.avals)
        num_params = sum(i < self.program.num_params for i in known)
        cotangents = [self._result_crossing(i) for i in positions_of(live)]
        cotangent_avals = picked(live, self.result_avals)
        num_operands = len(known) + len(cotangents)
        program = transposed_program(self.program.jaxpr, linear, live)
        return dataclasses.replace(
            self._for_another_program(),
            program=Program(program, num_params),
            avals=(*known_avals, *cotangent_avals),
            operands=(*known_operands, *cotangents),
            examples=_positions_among(known, self.examples),
            targets=tuple(picked(linear, self.operands)),
            target_avals=tuple(picked(linear, self.avals)),
            phase=BACKWARD,
            part=f"transpose of {self.part}",
            cotangents=range(len(known), num_operands),
            constants=_positions_among(known, self.constants),
        )

    def adds_in_place(self, position: int) -> bool:
        """Returns whether backward can add a gradient to a running sum by rows: where a loop over layers stacks it."""
        if self.phase != BACKWARD or position >= len(self.targets):
            return False
        # On stages each place adds the rows of its own layers, in another order.
        if self.region.degree == 1 or degree(self.region.mesh, PIPE) > 1:
            return False
        shard = resolved(self.targets[position]).shard
        if shard is None or shard.pieces or shard.placement.on_host:
            return False
        return stacked_by_loop(self.program.jaxpr.jaxpr, position) is not None

    def with_sums(self, sums: Mapping[int, ShapedArray]) -> "RegionCall":
        """Returns the call that adds some of its gradients to running sums, which are its last operands.

        Args:
            sums: the types of the sums, by the position of the gradient.
        """
        target_avals = list(self.target_avals)
        for position, aval in sums.items():
            target_avals[position] = aval
        entering = of_tangents(at_positions(self.targets, sums))
        return dataclasses.replace(
            self,
            program=SummingProgram(self.program, sums),
            avals=(*self.avals, *sums.values()),
            operands=(*self.operands, *entering),
            target_avals=tuple(target_avals),
        )

    def copies_of(
        self, outs: Sequence[jax.Array], primals: Sequence[jax.Array], staged: ClosedJaxpr | None
    ) -> Sequence[jax.Array]:
        """Returns the copies that an equation returns, which may be others than those of its derivative's forward.

        An equation that is staged has a fixed number of results; of the rest of its program nothing is used.
        """
        if staged is None:
            return outs
        return region_p.bind(*primals, call=self, jaxpr=staged, used=None)[len(self.program.jaxpr.out_avals) :]

    def _result_crossing(self, position: int) -> AnyCrossing:
        if position < len(self.targets):
            return self.targets[position]
        # How another result leaves is known once this call is partitioned, which a call that is transposed need not be.
        aval = self.program.jaxpr.out_avals[position]
        return _guessed(self.region, aval.shape)

    def mapped(self, size: int, is_mapped: tuple[bool, ...], *, takes_copies: bool) -> "MappedRegionCall":
        """Returns the call over one more dim.

        The dim is the batch if it splits over the data shards and examples have it: a model of one example, mapped, is
        split like a batched one. Otherwise, as for the rows of a Jacobian, the batch is the one that it was.
        """
        del takes_copies  # the program has none: copies among the operands are a matter of its partition
        region = self.region
        # Parameters alone may be mapped, as in an ensemble; their number is no batch beside that of the examples.
        divides = size % data_degree(region.mesh) == 0
        maps_examples = any(is_mapped[i] for i in self.examples)
        is_batch = divides and (maps_examples or not region.batch)
        over = region.over(size, is_batch=is_batch)

        operands = self._operands_over(over, is_mapped, is_batch=is_batch)
        jaxpr, is_mapped_result = mapped_program(self.program.jaxpr, size, is_mapped)
        # An operand that is not mapped stays as it is stored, which may be padded. A mapped one enters without padding.
        mapped_avals = picked(is_mapped, jaxpr.in_avals)
        other_avals = others(is_mapped, self.avals)
        avals = merged(is_mapped, mapped_avals, other_avals)
        # A gradient for each row is not stored like its parameter.
        has_target = not any(is_mapped_result[: len(self.targets)])
        targets: tuple[AnyCrossing, ...] = ()
        target_avals: tuple[ShapedArray, ...] = ()
        if has_target:
            targets = self.targets
            target_avals = self.target_avals
        call = dataclasses.replace(
            self,
            region=over,
            program=Program(jaxpr, self.program.num_params, remat=self.program.remat),
            avals=tuple(avals),
            operands=tuple(operands),
            targets=targets,
            target_avals=target_avals,
            residuals=range(0),
            adjoint=None,  # it is that of the program before it was mapped
        )
        return MappedRegionCall(call, is_mapped_result, self, is_mapped, has_target)

    def _operands_over(self, over: Region, is_mapped: tuple[bool, ...], *, is_batch: bool) -> list[AnyCrossing]:
        """Returns how operands enter the region of the mapped call."""
        num_params = self.program.num_params
        operands: list[AnyCrossing] = []
        for i, crossing in enumerate(self.operands):
            is_param = i < num_params
            if is_mapped[i]:
                shape = self.program.jaxpr.in_avals[i].shape
                operands.append(_mapped_crossing(over, crossing, shape, is_batch=is_batch, is_param=is_param))
            elif is_batch and not is_param and i not in self.constants:
                operands.append(Crossing(None))  # it has no row for each example, so every data shard has all of it
            else:
                operands.append(crossing)
        return operands


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

    def enter(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the operands; mapped parameters lose their padding."""
        entered = []
        for x, crossing, is_mapped in zip(operands, self.before.operands, self.is_mapped_operand, strict=True):
            shard = crossing.shard if isinstance(crossing, Crossing) else None
            if is_mapped and shard is not None:
                cut = functools.partial(stored.without_padding, placement=shard.placement)
                x = jax.vmap(cut)(fetched(x))
            entered.append(x)
        return entered

    def leave(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results; gradients get the padding of their parameter."""
        if self.has_targets:
            return list(results)
        padded = list(results)
        targets = zip(self.before.targets, self.before.target_avals, self.is_mapped, strict=False)
        for i, (target, aval, is_mapped) in enumerate(targets):
            # In a map a gradient is with respect to a parameter, never to a copy gathered for all microbatches: the
            # copies are found by the arrays that they are of, and to differentiate an array makes another one.
            assert not resolved(target).is_own, "each device has its own gradient of a copy"
            shape = (*results[i].shape[:1], *aval.shape) if is_mapped else aval.shape
            padded[i] = _padded(results[i], shape)
        return padded


def _positions_among(operands: Sequence[int], chosen: Collection[int], *, first: int = 0) -> frozenset[int]:
    """Returns where the chosen ones are in a list of operands, counted from a number."""
    positions = set()
    for position, operand in enumerate(operands, first):
        if operand in chosen:
            positions.add(position)
    return frozenset(positions)


def _padded(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    if x.shape == tuple(shape):
        return x
    widths = [(0, padded_size - size) for size, padded_size in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths)


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
    before = _guessed(region, shape)
    if isinstance(crossing, Crossing) and not is_param:
        before = crossing
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
        num_params = self.call.program.num_params
        num_results = len(self.has_tangent)
        # Of forward's results, the residuals stand behind the results of the call; of backward's operands, behind the
        # parameters.
        residuals = counted_from(num_results, self.forward.constant_results)
        return shifted(residuals, num_params)

    def backward(self, live: tuple[bool, ...]) -> RegionCall:
        """Returns the call that computes gradients."""
        if live not in self._backwards:
            self._backwards[live] = self._new_backward(live)
        return self._backwards[live]

    def _new_backward(self, live: tuple[bool, ...]) -> RegionCall:
        call = self.call
        gradient = self.gradient
        num_params = call.program.num_params
        num_results = len(self.has_tangent)
        # Cotangents enter as the results have left: split where these are, so that nothing moves between the two.
        live_results = self.live_results(live)
        results = results_of(self.forward.leaving, range(num_results))
        residuals = results_of(self.forward.leaving, range(num_results, num_results + len(gradient.kept)))
        residual_avals = gradient.forward.out_avals[num_results:]
        cotangents = picked(live_results, results)
        cotangent_avals = picked(live_results, call.result_avals)
        num_saved = num_params + len(residuals)
        program = gradient.backward(live_results)
        params = call.operands[:num_params]
        param_avals = self.forward.avals[:num_params]
        return RegionCall(
            call.region,
            Program(program, num_params),
            avals=(*param_avals, *residual_avals, *cotangent_avals),
            operands=(*params, *residuals, *cotangents),
            examples=frozenset(range(num_params, num_saved)),
            targets=tuple(picked(gradient.wrt, call.operands)),
            target_avals=tuple(self.diff_avals),
            phase=BACKWARD,
            part=BACKWARD if call.part == FORWARD else f"backward of {call.part}",
            cotangents=range(num_saved, num_saved + len(cotangents)),
            constants=self.copied_residuals,
        )
