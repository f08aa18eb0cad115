"""A unit's call as an equation of a region's program, and its derivatives, which are units too."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import ClassVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from jshard import _compat
from jshard.engine import rules
from jshard.engine.program import Gradient, Program, abstract_all, evaluate_jaxpr
from jshard.engine.program_call import (
    Adjoint,
    Derivative,
    MappedCall,
    ProgramCall,
    Pushforward,
    batch_rule,
    jvp_rule,
    mapped_program,
    pushforward_program,
    tangent_program,
    transpose_rule,
    transposed_program,
)
from jshard.engine.selections import at_positions, counted_from, others, picked, shifted, unmarked_at
from jshard.engine.values import have_gradients
from jshard.plans.policies import Prefetch
from jshard.plans.units import OWN

FORWARD = "forward"
BACKWARD = "backward"

unit_p = Primitive("unit")
"""A unit's program. Its first operands are the unit's parameters, in their stored dtypes.

Params:
    jaxpr: the program that is run, which takes the parameters in the dtypes that they are gathered in.
    call: a `UnitCall`.
"""
unit_p.multiple_results = True
ad.primitive_jvps[unit_p] = jvp_rule
ad.primitive_transposes[unit_p] = transpose_rule
batching.primitive_batchers[unit_p] = batch_rule


@dataclasses.dataclass(frozen=True)
class UnitSettings:
    """How a unit's equation is run on a data shard."""

    name: str  # path of the unit, for the names of its operations
    reshard: bool | int  # True: gathered again in backward. False: forward's copy is kept. Or the number of its pieces
    prefetch: Prefetch | None  # how early it is gathered; None leaves it to the compiler


# By identity and weakly, for the same reasons as `RegionCall`.
@_compat.hold_weakly
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class UnitCall(ProgramCall):
    """The call of a unit, or of the forward or backward program of one.

    Attributes:
        program: the program without copies.
        jaxpr: the program that is run.
        owners: who gathers each of the parameters, which are the first operands.
        settings: how the unit is gathered and kept.
        where: its class and method, for messages.
        out_dtypes: dtypes of the results: gradients leave in the stored dtype of their parameter.
        phase: `FORWARD`, or `BACKWARD`, whose first results are gradients.
        wrt: in backward, for each parameter, whether its gradient is among the first results.
        num_kept: how many gathered parameters are copies: the last results of forward, the last operands of backward,
            which then uses only the types of its first operands.
    """

    saves_operands_themselves: ClassVar[bool] = True

    program: Program
    jaxpr: ClosedJaxpr
    owners: tuple[str, ...]
    settings: UnitSettings
    where: str
    out_dtypes: tuple[np.dtype, ...]
    phase: str = FORWARD
    wrt: tuple[bool, ...] = ()
    num_kept: int = 0
    constants: frozenset[int] = frozenset()
    constant_results: frozenset[int] = frozenset()
    adjoint: Adjoint | None = None
    _derivatives: dict[tuple[tuple[bool, ...], tuple[np.dtype, ...]], Derivative] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def __repr__(self) -> str:
        """Returns what a printed jaxpr shows of it."""
        return f"<{self.phase} of {self.where} {self.settings.name!r}>"

    @classmethod
    def of(cls, program: Program, owners: tuple[str, ...], settings: UnitSettings, where: str) -> "UnitCall":
        """Returns the call of a unit's program as it was traced."""
        return cls(program, program.jaxpr, owners, settings, where, _dtypes(program.jaxpr.out_avals))

    @property
    def returns_copies(self) -> bool:  # type: ignore[override]
        """Whether the gathered parameters that it keeps are its last results."""
        return self.phase == FORWARD and self.num_kept > 0

    def is_like(self, other: "UnitCall") -> bool:
        """Returns whether another call is equal if their programs are."""
        return self._properties() == other._properties()

    def _properties(self) -> tuple[Hashable, ...]:
        """Returns what distinguishes calls of equal programs."""
        return (
            self.owners,
            self.settings,
            self.where,
            self.out_dtypes,
            self.phase,
            self.wrt,
            self.num_kept,
            self.program.remat,
        )

    def bind(self, operands: Sequence[jax.Array | np.generic]) -> list[jax.Array]:
        """Calls the unit. Copies that its program does not take are left out: the parameters are gathered again."""
        num_operands = len(self.jaxpr.in_avals)
        return unit_p.bind(*operands[:num_operands], jaxpr=self.jaxpr, call=self)

    @functools.cached_property
    def function(self) -> Callable[..., list[jax.Array]]:
        """The unit where one data shard has the whole batch: an ordinary function; equal calls share it."""
        return jax.jit(functools.partial(_run, call=self))

    def derivative(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> Derivative:
        """Returns the derivative, whose forward and backward are units."""
        # Also by the dtypes of operands: parameters are stored in one and gathered in another, the program knows only
        # the second, and a gradient leaves in the first.
        stored_dtypes = _dtypes(avals)
        key = (wrt, stored_dtypes)
        if key not in self._derivatives:
            self._derivatives[key] = self._new_derivative(wrt, stored_dtypes)
        return self._derivatives[key]

    def _new_derivative(self, wrt: tuple[bool, ...], stored_dtypes: tuple[np.dtype, ...]) -> Derivative:
        gradient = self.program.gradient(wrt)
        has_tangent = unmarked_at(self.constant_results, gradient.is_float)
        copied_residuals = counted_from(len(has_tangent), copies_among(gradient.forward.jaxpr))
        keeps_copies = self.settings.reshard is not True and self.phase == FORWARD
        # Of its own parameters alone: a unit inside decides for its own.
        num_copies = sum(self.is_own_param) if keeps_copies else 0
        adjoint = UnitAdjoint(self, gradient, has_tangent, num_copies, stored_dtypes, copied_residuals)
        forward = self._forward_of(adjoint)
        linear = self._linear_map_of(adjoint)
        return Derivative(forward, linear, len(gradient.kept), has_tangent)

    @property
    def is_own_param(self) -> list[bool]:
        """For each parameter, whether the unit gathers it itself."""
        return [owner == OWN for owner in self.owners]

    def _forward_of(self, adjoint: "UnitAdjoint") -> "UnitCall":
        """Returns the forward of a derivative: it returns the results, the residuals, then copies."""
        gradient = adjoint.gradient
        num_results = len(adjoint.has_tangent)
        jaxpr = gradient.forward
        if adjoint.num_copies:
            jaxpr = gradient.forward_with_copies(self.is_own_param)
        return dataclasses.replace(
            self,
            program=Program(gradient.forward, len(self.owners), remat=self.program.remat),
            jaxpr=jaxpr,
            # Only results are cast. Residuals and copies are what the program has, and backward takes them so.
            out_dtypes=(*self.out_dtypes[:num_results], *_dtypes(jaxpr.out_avals)[num_results:]),
            num_kept=adjoint.num_copies,
            # Copies among the residuals have no tangent, as the parameter has it.
            constant_results=self.constant_results | shifted(adjoint.copied_residuals, num_results),
        )

    def _linear_map_of(self, adjoint: "UnitAdjoint") -> "UnitCall":
        """Returns the linear map of a derivative: it takes the parameters, the residuals, tangents, then copies."""
        gradient = adjoint.gradient
        wrt = gradient.wrt
        num_params = len(self.owners)
        num_results = len(adjoint.has_tangent)
        first_tangent = num_params + len(gradient.kept)
        tangent_dtypes = dict(enumerate(picked(wrt, adjoint.stored_dtypes[: len(wrt)]), first_tangent))
        jaxpr = _taking(tangent_program(gradient, adjoint.has_tangent), tangent_dtypes)
        # The linear map reads no copies. But its transpose, which is backward, does, and takes what this one takes.
        copied_params = []
        if adjoint.num_copies:
            copied_params = picked(self.is_own_param, self.program.jaxpr.jaxpr.invars[:num_params])
        return dataclasses.replace(
            self,
            program=Program(jaxpr, num_params),
            jaxpr=_with_unused(jaxpr, copied_params),
            out_dtypes=tuple(picked(adjoint.has_tangent, self.out_dtypes[:num_results])),
            num_kept=0,
            constants=shifted(adjoint.copied_residuals, num_params),
            constant_results=frozenset(),
            adjoint=adjoint,
        )

    def pushforward(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> Pushforward:
        """Returns results and tangents as one unit."""
        num_operands = len(wrt)
        has_tangent = tuple(have_gradients(self.program.jaxpr.out_avals))
        tangent_dtypes = dict(enumerate(picked(wrt, _dtypes(avals[:num_operands])), num_operands))
        num_gradients = sum(self.wrt)
        order = Pushforward.order_of(has_tangent, num_gradients)
        jaxpr = _taking(pushforward_program(self.program.jaxpr, wrt, has_tangent, order), tangent_dtypes)
        out_dtypes = self.out_dtypes[: len(has_tangent)]
        all_dtypes = [*out_dtypes, *picked(has_tangent, out_dtypes)]
        call = dataclasses.replace(
            self,
            program=Program(jaxpr, len(self.owners)),
            jaxpr=jaxpr,
            out_dtypes=tuple(at_positions(all_dtypes, order)),
            num_kept=0,
            constant_results=frozenset(),
            adjoint=None,
        )
        return Pushforward(call, has_tangent, order)

    def transposed(self, linear: tuple[bool, ...], live: tuple[bool, ...]) -> ProgramCall:
        """Returns the unit's backward, or the transpose of any other program."""
        if self.adjoint is not None and self.adjoint.takes(linear):
            return self.adjoint.backward(live)
        jaxpr = transposed_program(self.program.jaxpr, linear, live)
        owners = tuple(others(linear[: len(self.owners)], self.owners))
        return UnitCall(
            Program(jaxpr, len(owners)),
            jaxpr,
            owners,
            self.settings,
            self.where,
            _dtypes(jaxpr.out_avals),
            phase=BACKWARD,
            wrt=(False,) * len(owners),
        )

    def mapped(self, size: int, is_mapped: tuple[bool, ...], *, takes_copies: bool) -> MappedCall:
        """Returns the unit over all rows; it stays a unit."""
        program, is_mapped_result = mapped_program(self.program.jaxpr, size, is_mapped)
        # Both of its programs are mapped: the one that runs, with copies, and the one without, which is differentiated.
        # Without copies they are one: a program that still took or returned some would not fit its operands.
        has_copies = takes_copies and not self._maps_what_it_keeps(is_mapped)
        jaxpr = program
        if has_copies and self.jaxpr is not self.program.jaxpr:
            num_copies = len(self.jaxpr.in_avals) - len(is_mapped)
            jaxpr, _ = mapped_program(self.jaxpr, size, (*is_mapped, *[False] * num_copies))
        call = dataclasses.replace(
            self,
            program=Program(program, self.program.num_params, remat=self.program.remat),
            jaxpr=jaxpr,
            out_dtypes=self.out_dtypes[: len(jaxpr.out_avals)],
            num_kept=self.num_kept if has_copies else 0,
            adjoint=None,
        )
        return MappedCall(call, is_mapped_result)

    def _maps_what_it_keeps(self, is_mapped: Sequence[bool]) -> bool:
        """Returns whether it would return copies of mapped parameters, which are no stored shards any more."""
        own = picked(self.is_own_param, is_mapped[: len(self.owners)])
        return self.returns_copies and any(own)


@dataclasses.dataclass(frozen=True, eq=False)
class UnitAdjoint(Adjoint):
    """The backward of a unit's derivative.

    Attributes:
        call: the unit.
        gradient: its derivative.
        has_tangent: for each result of the unit, whether it can have a cotangent.
        num_copies: how many gathered parameters forward has kept.
        stored_dtypes: of the unit's operands.
        copied_residuals: which residuals are copies of parameters that units inside have kept.
    """

    call: UnitCall
    gradient: Gradient
    has_tangent: tuple[bool, ...]
    num_copies: int
    stored_dtypes: tuple[np.dtype, ...]
    copied_residuals: frozenset[int]
    _backwards: dict[tuple[bool, ...], UnitCall] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def backward(self, live: tuple[bool, ...]) -> UnitCall:
        """Returns the unit that computes gradients."""
        if live not in self._backwards:
            self._backwards[live] = self._new_backward(live)
        return self._backwards[live]

    def _new_backward(self, live: tuple[bool, ...]) -> UnitCall:
        call = self.call
        gradient = self.gradient
        num_params = len(call.owners)
        live_results = self.live_results(live)
        cotangent_dtypes = picked(live_results, call.out_dtypes[: len(live_results)])
        first_cotangent = num_params + len(gradient.kept)
        taken = dict(enumerate(cotangent_dtypes, first_cotangent))

        program = _taking(gradient.backward(live_results), taken)
        jaxpr = program
        if self.num_copies:
            jaxpr = _taking(gradient.backward_with_copies(live_results, call.is_own_param), taken)
        wrt = gradient.wrt[:num_params]
        stored = picked(wrt, self.stored_dtypes[:num_params])
        return UnitCall(
            Program(program, num_params),
            jaxpr,
            call.owners,
            call.settings,
            call.where,
            out_dtypes=(*stored, *_dtypes(jaxpr.out_avals)[len(stored) :]),
            phase=BACKWARD,
            wrt=wrt,
            num_kept=self.num_copies,
            constants=shifted(self.copied_residuals, num_params),
        )


def _run(*operands: jax.Array, call: UnitCall) -> list[jax.Array]:
    """Runs a unit's program as it is, in its dtypes and under its name."""
    inputs = _cast_to(operands, _dtypes(call.jaxpr.in_avals))
    with jax.named_scope(f"jshard[{call.settings.name}]"):
        outs = evaluate_jaxpr(call.jaxpr, inputs)
    return _cast_to(outs, call.out_dtypes)


def _cast_to(arrays: Sequence[jax.Array], dtypes: Sequence[np.dtype]) -> list[jax.Array]:
    """Returns arrays in these dtypes; without an equation for those that have them."""
    return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


# With the effects of its program: an equation without effects and without a reader is removed, and a callback with it.
@unit_p.def_effectful_abstract_eval
def _types(*_: ShapedArray, jaxpr: ClosedJaxpr, call: UnitCall) -> tuple[list[ShapedArray], Set[object]]:
    avals = []
    for aval, dtype in zip(jaxpr.out_avals, call.out_dtypes, strict=True):
        is_weak = aval.weak_type and aval.dtype == dtype  # a cast makes a strong type
        avals.append(aval.update(dtype=dtype, weak_type=is_weak))
    return avals, jaxpr.effects


def _call_function(*operands: jax.Array, jaxpr: ClosedJaxpr, call: UnitCall) -> list[jax.Array]:
    del jaxpr  # that of the call
    return call.function(*operands)


# Lowered only where one data shard has the whole batch: elsewhere the partitioner runs the program in its place.
unit_p.def_impl(_call_function)
mlir.register_lowering(unit_p, mlir.lower_fun(_call_function, multiple_results=True))


def _as_function(avals: Sequence[ShapedArray], *, jaxpr: ClosedJaxpr, call: UnitCall) -> ClosedJaxpr:
    del jaxpr  # that of the call
    return jax.make_jaxpr(functools.partial(_run, call=call))(*avals)


_compat.check_inside(unit_p, _as_function)


# ---- copies of parameters among the results of a program


def copies_among(jaxpr: Jaxpr) -> frozenset[int]:
    """Returns which results of a program are copies of gathered parameters that a unit inside has kept, by position.

    They have no derivative of their own: that of the parameter has theirs.
    """
    # Followed through loops, calls and branches, whose results are those of their programs in the same order.
    copies: set[Var] = set()
    for eqn in jaxpr.eqns:
        copies.update(at_positions(eqn.outvars, _copies_of_equation(eqn)))
    positions: set[int] = set()
    for position, atom in enumerate(jaxpr.outvars):
        if not _compat.is_literal(atom) and atom in copies:
            positions.add(position)
    return frozenset(positions)


def _copies_of_equation(eqn: JaxprEqn) -> Sequence[int]:
    name = eqn.primitive.name
    if eqn.primitive is unit_p:
        call: UnitCall = eqn.params["call"]
        num_results = len(eqn.outvars)
        num_kept = call.num_kept if call.phase == FORWARD else 0
        return [*range(num_results - num_kept, num_results), *call.constant_results]
    if name == "scan":
        inner, _ = rules.opened(eqn.params["jaxpr"])
        return sorted(copies_among(inner))
    if name in rules.CALLS:
        inner, _ = rules.program(eqn)
        return sorted(copies_among(inner))
    if name == "cond":
        # A result that is a copy in one branch only has a derivative in the other.
        of_branches = [copies_among(rules.opened(branch)[0]) for branch in eqn.params["branches"]]
        return sorted(frozenset.intersection(*of_branches))
    return ()


# ---- forms of programs


def _dtypes(avals: Sequence[ShapedArray]) -> tuple[np.dtype, ...]:
    return tuple(aval.dtype for aval in avals)


def _taking(jaxpr: ClosedJaxpr, dtypes: Mapping[int, np.dtype]) -> ClosedJaxpr:
    """Returns a program that takes some operands in other dtypes, which is itself if they are the same.

    A parameter is stored in one dtype and gathered in another. Its tangent, and its gradient, have the first.
    """
    avals = abstract_all(jaxpr.jaxpr.invars)
    changed = {i: dtype for i, dtype in dtypes.items() if avals[i].dtype != dtype}
    if not changed:
        return jaxpr

    def run(*operands: jax.Array) -> list[jax.Array]:
        cast = list(operands)
        for i in changed:
            cast[i] = operands[i].astype(avals[i].dtype)
        return evaluate_jaxpr(jaxpr, cast)

    taken = list(avals)
    for i, dtype in changed.items():
        taken[i] = jax.ShapeDtypeStruct(avals[i].shape, dtype)
    return jax.make_jaxpr(run)(*taken)


def _with_unused(jaxpr: ClosedJaxpr, variables: Sequence[Var]) -> ClosedJaxpr:
    """Returns a program with further operands that it does not use: its transpose takes them."""
    # New variables: the same one twice among the operands would be one operand.
    if not variables:
        return jaxpr
    unused = [Var(v.aval) for v in variables]
    with_unused = jaxpr.jaxpr.replace(invars=[*jaxpr.jaxpr.invars, *unused])
    return ClosedJaxpr(with_unused, jaxpr.consts)
