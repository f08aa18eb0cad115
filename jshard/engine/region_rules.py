"""The rules of the primitive of regions, also for equations that have lost what nothing uses; and its lowering."""

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad, batching, mlir

from jshard import _compat
from jshard.engine.program_call import Tangent, batch_rule, jvp_rule, mapped_size, transpose_rule, zero_tangents
from jshard.engine.region_call import RegionCall, region_p
from jshard.engine.rules import type_of
from jshard.engine.selections import merged, others, picked

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Used:
    """Which operands and results of a call an equation has; the types are those of all operands."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    avals: tuple[ShapedArray, ...]

    def __repr__(self) -> str:
        """Returns what a printed jaxpr shows of it."""
        return f"<{sum(self.operands)} of {len(self.operands)} operands>"

    @classmethod
    def all_of(cls, eqn: JaxprEqn) -> "Used":
        """Returns all of an equation."""
        return cls((True,) * len(eqn.invars), (True,) * len(eqn.outvars), tuple(type_of(v) for v in eqn.invars))

    def without(self, operands: Sequence[bool], results: Sequence[bool]) -> "Used":
        """Returns what is left where only some of the operands and results of the equation are used."""
        # The new marks are of the operands that the equation still has; what it has lost before stays lost.
        operands_left = merged(self.operands, operands, [False] * self.operands.count(False))
        results_left = merged(self.results, results, [False] * self.results.count(False))
        return Used(tuple(operands_left), tuple(results_left), self.avals)

    def all_operands(self, operands: Sequence[T], missing: Callable[[ShapedArray], T]) -> list[T]:
        """Returns the operands of the call; no result that is used depends on those that are made up."""
        absent = [missing(aval) for aval in others(self.operands, self.avals)]
        return merged(self.operands, operands, absent)


def _without_unused(results_used: list[bool], eqn: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """Removes what an equation computes and nothing uses, with the gathers and residuals that were only for that."""
    # JAX's own rule for an unknown primitive keeps all or nothing. A region's program is at hand, so a loss that reads
    # one output of a model does not compute the others, nor save residuals that nothing takes.
    jaxpr: ClosedJaxpr | None = eqn.params["jaxpr"]
    if not any(results_used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    if jaxpr is None:
        return [True] * len(eqn.invars), eqn
    is_key = [jnp.issubdtype(type_of(v).dtype, jax.dtypes.extended) for v in eqn.invars]  # cannot be made up
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


_compat.remove_unused(region_p, _without_unused)


# ---- the rules of the primitive; those of every call are in `program_call`


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    *,
    call: RegionCall,
    jaxpr: ClosedJaxpr | None,
    used: Used | None,
) -> tuple[list[jax.Array], list[Tangent]]:
    # Of an equation that has lost some, the rule is that of the whole call: its derivative is found by its operands,
    # and what was made up flows to results that nothing uses. The results are cut to those of the equation.
    if used is None:
        return jvp_rule(primals, tangents, call=call, jaxpr=jaxpr)
    all_primals = used.all_operands(primals, _zeros)
    all_tangents = used.all_operands(tangents, lambda aval: ad.Zero(aval.to_tangent_aval()))
    results, result_tangents = jvp_rule(all_primals, all_tangents, call=call, jaxpr=None)
    num_results = len(call.program.jaxpr.out_avals)
    is_used = used.results[:num_results]
    remaining = picked(is_used, results[:num_results])
    tangents_left = picked(is_used, result_tangents[:num_results])
    if any(used.results[num_results:]):
        # Copies are those of this program: the derivative's forward, which was made for all operands, may have others.
        copies = region_p.bind(*primals, call=call, jaxpr=jaxpr, used=used)[len(remaining) :]
        remaining += copies
        tangents_left += zero_tangents(copies)
    return remaining, tangents_left


def _transpose(
    cotangents: Sequence[Tangent], *operands: Any, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> list[jax.Array | None]:
    if used is None:
        return transpose_rule(cotangents, *operands, call=call, jaxpr=jaxpr)
    num_results = len(call.program.jaxpr.out_avals)
    is_used = used.results[:num_results]
    zeros = [ad.Zero(aval.to_ct_aval()) for aval in others(is_used, call.result_avals)]
    all_cotangents = merged(is_used, cotangents[: sum(is_used)], zeros)
    gradients = transpose_rule(all_cotangents, *used.all_operands(operands, _zeros), call=call, jaxpr=None)
    return picked(used.operands, gradients)


def _batch(
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    call: RegionCall,
    jaxpr: ClosedJaxpr | None,
    used: Used | None,
) -> tuple[list[jax.Array], list[int | None]]:
    if used is None:
        return batch_rule(operands, dims, call=call, jaxpr=jaxpr)
    all_dims = used.all_operands(dims, lambda aval: None)
    num_results = len(call.program.jaxpr.out_avals)
    results, result_dims = batch_rule(used.all_operands(operands, _zeros), all_dims, call=call, jaxpr=None)
    is_used = used.results[:num_results]
    remaining = picked(is_used, results[:num_results])
    dims_left = picked(is_used, result_dims[:num_results])
    size = mapped_size(operands, dims)
    for aval in jaxpr.out_avals[len(remaining) :] if jaxpr is not None else []:
        remaining.append(jnp.zeros((size, *aval.shape), aval.dtype))  # mapped, it is not taken for a copy
        dims_left.append(0)
    return remaining, dims_left


def _zeros(aval: ShapedArray) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


region_p.multiple_results = True
ad.primitive_jvps[region_p] = _jvp
ad.primitive_transposes[region_p] = _transpose
batching.primitive_batchers[region_p] = _batch


@region_p.def_effectful_abstract_eval
def _types(
    *avals: ShapedArray, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> tuple[Sequence[ShapedArray], Set[object]]:
    del used  # then there is a program
    # How many copies there are, and of which types, only the partitioned program says. Others need not be partitioned
    # to know their types: most linear maps never are.
    if jaxpr is None and call.returns_copies:
        jaxpr = call.partitioned(avals).jaxpr
    if jaxpr is None:
        return call.result_avals, call.program.jaxpr.effects
    return jaxpr.out_avals, jaxpr.effects


def _staged_params(
    avals: Sequence[ShapedArray], *, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> dict[str, object]:
    """Returns the parameters of an equation that is staged: the program on data shards is traced here."""
    # A linear map of a derivative is staged without one. In reverse mode it is transposed, and never runs.
    if jaxpr is None and call.adjoint is None:
        jaxpr = call.partitioned(avals).jaxpr
    return {"call": call, "jaxpr": jaxpr, "used": used}


_compat.stage_with_params(region_p, _staged_params)


# Outside of `jax.jit`, too, a region is one compiled program: its schedule is a matter of the compiler's.
@region_p.def_impl
def _run_now(*arrays: jax.Array, **params: object) -> list[jax.Array]:
    return jax.jit(functools.partial(region_p.bind, **params))(*arrays)


def _program(
    avals: Sequence[ShapedArray], *, call: RegionCall, jaxpr: ClosedJaxpr | None, used: Used | None
) -> ClosedJaxpr:
    """Returns the program on data shards of an equation."""
    del used  # then the equation has a program
    return call.partitioned(avals).jaxpr if jaxpr is None else jaxpr


def _lowered(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _compat.lower_jaxpr(ctx, _program(ctx.avals_in, **params), operands)


mlir.register_lowering(region_p, _lowered)
_compat.check_inside(region_p, _program)
