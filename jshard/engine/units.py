"""Units as equations of a region's global trace; and units that run in global view, as written."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core as jex
from jax.interpreters import batching
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine import trace
from jshard.engine.call import NnxCall, is_array, is_float, is_nnx
from jshard.engine.context import attention_again, during, traced_for
from jshard.engine.stored import without_padding
from jshard.plans.memories import fetched
from jshard.plans.mesh import data_axes, data_degree, region_degree
from jshard.plans.placement import Placement
from jshard.plans.policies import ATTENTION_AGAIN, MixedPrecision, Prefetch, Remat
from jshard.plans.units import NESTED, OWN, Unit

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class UnitSettings:
    """How a unit's equation is run on a data shard."""

    name: str  # path of the unit, for the names of its operations
    reshard: bool | int  # True: gathered again in backward. False: forward's copy is kept. Or the number of its pieces
    prefetch: Prefetch | None  # how early it is gathered; None leaves it to the compiler


unit_p = jex.Primitive("unit")
"""A unit's program. Its first operands are the unit's parameters, in their stored dtypes.

Params:
    jaxpr: the program, closed, which takes the parameters in the dtypes that they are gathered in.
    owners: of each parameter operand: who gathers it.
    out_dtypes: dtypes of the results: gradients leave in the stored dtype of their parameter.
    wrt: in backward, for each parameter, whether its gradient is among the first results.
    num_kept: how many gathered parameters are the last results of forward, and the last operands of backward, which
        then uses only the types of its first operands.
    phase, settings, where: forward or backward, `UnitSettings`, the class and method.
"""
unit_p.multiple_results = True


def _run(*operands: Any, jaxpr: Any, out_dtypes: tuple, settings: "UnitSettings") -> list[Any]:
    """A unit where one data shard has the whole batch: an ordinary function for any transformation of the program."""
    cast = [x if x.dtype == v.dtype else x.astype(v.dtype) for x, v in zip(operands, jaxpr.in_avals, strict=True)]
    with jax.named_scope(f"jshard[{settings.name}]"):
        outs = trace.evaluate_jaxpr(jaxpr, cast)
    return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(outs, out_dtypes, strict=True)]


@unit_p.def_effectful_abstract_eval
def _types(*_: Any, jaxpr: Any, out_dtypes: tuple, **__: Any) -> tuple[list[Any], Any]:
    avals = [
        a.update(dtype=dtype, weak_type=a.weak_type and a.dtype == dtype)
        for a, dtype in zip(jaxpr.out_avals, out_dtypes, strict=True)
    ]
    return avals, jaxpr.effects


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, **params: Any) -> tuple[list[Any], list[int]]:
    """Under the user's vmap the unit's program runs over all rows; it stays a unit."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    axes = [None if d is None else 0 for d in dims]
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    rows = [
        jax.ShapeDtypeStruct(v.shape if axis is None else (size, *v.shape), v.dtype)
        for v, axis in zip(jaxpr.in_avals, axes, strict=True)
    ]
    run = jax.vmap(lambda *xs: trace.evaluate_jaxpr(jaxpr, xs), in_axes=axes, axis_size=size)
    over_rows = jax.make_jaxpr(run)(*rows)
    return unit_p.bind(*operands, jaxpr=over_rows, **params), [0] * len(over_rows.out_avals)


batching.primitive_batchers[unit_p] = _batched


class Traces:
    """The units of one region's trace.

    They are not equations if one data shard has the whole batch, and the program runs unchanged.
    """

    def __init__(self, *, are_equations: bool) -> None:
        self.are_equations = are_equations
        self.programs: dict[Any, tuple[trace.Program, list, Any]] = {}  # with more operands, and values for `finish`
        self.functions: dict[tuple[trace.Program, UnitSettings], Callable[..., list[Any]]] = {}
        self.distinct: dict[Hashable, list[trace.Program]] = {}  # by the properties that equal ones share


_traces: contextvars.ContextVar[Traces | None] = contextvars.ContextVar("traces", default=None)


def in_region_trace() -> bool:
    """Whether a region's global program is being traced, so that units become equations."""
    return _traces.get() is not None


@contextlib.contextmanager
def region_trace(mesh: Mesh) -> Iterator[None]:
    """A context in which the global program of a region over a mesh is traced."""
    with during(_traces, Traces(are_equations=region_degree(mesh) > 1)), traced_for(mesh):
        yield


def call_unit(call: trace.Call, settings: UnitSettings, precision: MixedPrecision, remat: Remat) -> Any:
    """The call of a unit inside a region's trace."""
    traces = _traces.get()
    assert traces is not None
    like = [
        jax.ShapeDtypeStruct(x.shape, p.gathered_dtype) if p is not None and owner == OWN and is_float(x) else x
        for x, p, owner in zip(map(trace.abstract, call.params), call.placements, call.owners, strict=True)
    ]
    inputs, owners = list(map(trace.abstract, call.inputs)), tuple(call.owners)
    avals = tuple((x.shape, str(x.dtype), x.weak_type) for x in (*like, *inputs))
    own_name = settings.name if NESTED in owners else ""  # units inside are named after it
    key: Any = call.key, own_name, precision, remat, avals, owners, _compat.trace_context()
    try:
        hash(key)
    except TypeError:  # a module with a list or a dict among its plain attributes: its calls are traced one by one
        key = object()
    consts: list[Any] = []
    found = traces.programs.get(key)
    if found is None:
        program, consts = trace.trace_call(call, computes_in(call, precision), like, inputs, remat=remat)
        kind = call.where, own_name, owners, len(program.jaxpr.jaxpr.eqns)
        found = *trace.shared(program, traces.distinct.setdefault(kind, [])), call.result
        if not consts:
            traces.programs[key] = found
    program, numbers, result = found
    run = traces.functions.get((program, settings))
    if run is None:
        run = _differentiable(program, owners, settings, call.where, traces.are_equations)
        traces.functions[program, settings] = run
    return call.finish(run(*call.params, *call.inputs, *consts, *numbers), result)


def computes_in(call: trace.Call, precision: MixedPrecision) -> Callable[[list[Any], list[Any]], list[Any]]:
    """The body of a call, with its arguments and results in the dtypes of a policy."""

    def body(params: list[Any], inputs: list[Any]) -> list[Any]:
        dtype = precision.param if precision.cast_inputs else None
        arguments = [_cast(x, dtype) for x in inputs[call.num_state :]]
        outs, state = call.body(params, [*inputs[: call.num_state], *arguments])
        return [*(_cast(x, precision.output) for x in outs), *state]

    return body


def _cast(x: Any, dtype: str | None) -> Any:
    return x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x


def _differentiable(
    program: trace.Program, owners: tuple, settings: UnitSettings, where: str, as_equations: bool
) -> Callable:
    """The program as a function whose derivative is also a unit's."""
    own = [owner == OWN for owner in owners]
    dtypes_of = lambda jaxpr: [a.dtype for a in jaxpr.out_avals]
    num_kept = 0 if settings.reshard is True else sum(own)

    @functools.cache
    def function(jaxpr: Any, dtypes: tuple[Any, ...]) -> Callable[..., list[Any]]:
        return jax.jit(functools.partial(_run, jaxpr=jaxpr, out_dtypes=dtypes, settings=settings))

    def bind(jaxpr: Any, operands: Sequence[Any], dtypes: Sequence[Any], **phase: Any) -> list[Any]:
        if not as_equations:
            return function(jaxpr, tuple(dtypes))(*operands)
        return unit_p.bind(
            *operands, jaxpr=jaxpr, out_dtypes=tuple(dtypes), owners=owners, settings=settings, where=where, **phase
        )

    def plain(*operands: Any) -> list[Any]:
        return bind(program.jaxpr, operands, dtypes_of(program.jaxpr), phase=FORWARD, wrt=(), num_kept=0)

    def forward(gradient: trace.Gradient, operands: list[Any]) -> tuple[list[Any], None]:
        jaxpr = gradient.forward_keeping(own) if num_kept else gradient.forward
        return bind(jaxpr, operands, dtypes_of(jaxpr), phase=FORWARD, wrt=(), num_kept=num_kept), None

    def backward(gradient: trace.Gradient, _: None, live: tuple, params: list, kept: list, cts: list) -> list[Any]:
        jaxpr = gradient.backward_given(live, own) if num_kept else gradient.backward(live)
        at, wrt = len(kept) - num_kept, gradient.wrt[: program.num_params]
        dtypes = [*(x.dtype for x in trace.picked(wrt, params)), *dtypes_of(jaxpr)[sum(wrt) :]]
        operands = [*params, *kept[:at], *cts, *kept[at:]]
        return bind(jaxpr, operands, dtypes, phase=BACKWARD, wrt=wrt, num_kept=num_kept)

    return trace.differentiable(program, plain, forward, backward)


# ---- in global view: as a Flax user would write it, the baseline for jshard; and units that are never gathered


def run_as_flax(module: nnx.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any], unit: Unit) -> Any:
    """Calls a method of a unit's module as a Flax user would write it: cast, and under `jax.checkpoint`."""
    call = NnxCall(module, method, *_split_along_batch((args, kwargs), unit))
    gathers = (OWN,) if unit.nested else {*call.owners} - {NESTED}
    params = [
        x if p is None else without_padding(fetched(x), p).astype(p.gathered_dtype if owner in gathers else x.dtype)
        for x, p, owner in zip(call.params, call.placements, call.owners, strict=True)
    ]
    with attention_again(unit.policy.remat == ATTENTION_AGAIN):
        run = trace.checkpointed(computes_in(call, unit.policy.mixed_precision), unit.policy.remat)
        outs = run(params, call.inputs)
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


def run_ungathered(call: trace.Call, unit: Unit) -> Any:
    """Calls a method of a unit on parameters that stay in place; the compiler places the communication."""

    def held(stored: jax.Array, placement: Placement) -> jax.Array:
        """The parameter, constrained to its placement, like its gradient, which the compiler would place anywhere."""
        if not isinstance(unit.mesh, Mesh) or stored.ndim != len(placement.spec):  # shapes only, or a layer in a scan
            return stored
        return lax.with_sharding_constraint(stored, NamedSharding(unit.mesh, placement.partition_spec))

    params = [
        x if p is None else without_padding(held(x, p), p).astype(p.gathered_dtype)
        for x, p in zip(call.guarded(call.params), call.placements, strict=True)
    ]
    with jax.named_scope(f"jshard[{unit.name or '(root)'}]"):
        outs = computes_in(call, unit.policy.mixed_precision)(params, call.inputs)
    outs = call.without_passed(outs)
    return call.finish(outs, call.result)
