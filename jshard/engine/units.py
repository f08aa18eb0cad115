"""Units as equations of a region's global trace, and units that are never gathered."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.interpreters import batching
from jax.sharding import Mesh, NamedSharding

from jshard import _compat
from jshard.engine.call import is_float
from jshard.engine.context import traced_for
from jshard.engine.stored import without_padding
from jshard.engine.trace import (
    Call,
    Program,
    Static,
    abstract,
    are_equal,
    evaluate_jaxpr,
    picked,
    trace,
    without_key_data,
)
from jshard.errors import CallError
from jshard.plans.mesh import data_degree
from jshard.plans.placement import Placement
from jshard.plans.policies import MixedPrecision, Prefetch, Remat
from jshard.plans.units import NESTED, OWN, Unit

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class UnitSettings:
    """How a unit's equation is run on a data shard.

    Args:
        name: path of the unit, for the names of its operations.
        reshard: True: gathered again in backward. False: what forward gathered is kept. A number: in so many pieces.
        prefetch: how early it is gathered; None leaves it to the compiler.
    """

    name: str
    reshard: bool | int
    prefetch: Prefetch | None


unit_p = jex.Primitive("unit")
"""A unit's program. Its first operands are the unit's parameters, in their stored dtypes.

Params:
    jaxpr: the program, closed, which takes the parameters in the dtypes that they are gathered in.
    phase: forward or backward.
    owners: of each parameter operand: who gathers it.
    settings: `UnitSettings`.
    out_dtypes: dtypes of the results: gradients leave in the stored dtype of their parameter.
    wrt: in backward, for each parameter, whether its gradient is among the first results.
    num_kept: how many gathered parameters are the last results of forward, and the last operands of backward, which
        then takes nothing but the types from its first operands.
"""
unit_p.multiple_results = True


def _run(*operands: Any, jaxpr: Any, out_dtypes: tuple, settings: "UnitSettings") -> list[Any]:
    """A unit where one data shard has the whole batch: an ordinary function, for whatever transforms the program."""
    cast = [x if x.dtype == v.dtype else x.astype(v.dtype) for x, v in zip(operands, jaxpr.in_avals, strict=True)]
    with jax.named_scope(f"jshard[{settings.name}]"):
        outs = evaluate_jaxpr(jaxpr, cast)
    return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(outs, out_dtypes, strict=True)]


@unit_p.def_effectful_abstract_eval
def _types(*_: Any, jaxpr: Any, out_dtypes: tuple, **__: Any) -> tuple[list[Any], Any]:
    avals = [
        a.update(dtype=dtype, weak_type=a.weak_type and a.dtype == dtype)
        for a, dtype in zip(jaxpr.out_avals, out_dtypes, strict=True)
    ]
    return avals, jaxpr.effects


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, **params: Any) -> tuple[list[Any], list[int]]:
    """Under the user's vmap the unit's program is one over all rows; it stays a unit."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    axes = [None if d is None else 0 for d in dims]
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    rows = [
        jax.ShapeDtypeStruct(v.shape if axis is None else (size, *v.shape), v.dtype)
        for v, axis in zip(jaxpr.in_avals, axes, strict=True)
    ]
    run = jax.vmap(lambda *xs: evaluate_jaxpr(jaxpr, xs), in_axes=axes, axis_size=size)
    over_rows = jax.make_jaxpr(run)(*rows)
    return unit_p.bind(*operands, jaxpr=over_rows, **params), [0] * len(over_rows.out_avals)


batching.primitive_batchers[unit_p] = _batched


class Traces:
    """The units of one region's trace.

    Args:
        are_equations: False where one data shard has the whole batch, and the program runs as it is.
    """

    def __init__(self, *, are_equations: bool) -> None:
        self.are_equations = are_equations
        self.programs: dict[Any, tuple[Program, list[Any], Any]] = {}  # with more operands, and what `finish` needs
        self.functions: dict[tuple[Program, UnitSettings], Callable[..., list[Any]]] = {}
        self._distinct: dict[Hashable, list[Program]] = {}

    def shared(self, program: Program, kind: Hashable) -> tuple[Program, list[Any]]:
        """A program that is equal to this one, traced before if there is such, and further operands for it.

        Args:
            program: the program.
            kind: what equal ones have in common besides: the user's function, and how it is called.
        """
        jaxpr, numbers = without_key_data(program.jaxpr)
        alike = self._distinct.setdefault((kind, len(jaxpr.jaxpr.eqns)), [])
        found = next((p for p in alike if p.remat == program.remat and are_equal(p.jaxpr, jaxpr)), None)
        if found is None:
            alike.append(found := Program(jaxpr, program.num_params, remat=program.remat))
        return found, numbers


_traces: contextvars.ContextVar[Traces | None] = contextvars.ContextVar("traces", default=None)


def in_region_trace() -> bool:
    """Whether a region's global program is being traced, so that units become equations."""
    return _traces.get() is not None


@contextlib.contextmanager
def region_trace(mesh: Mesh) -> Iterator[None]:
    """Inside, the global program of a region over a mesh is traced."""
    token = _traces.set(Traces(are_equations=data_degree(mesh) > 1))
    try:
        with traced_for(mesh):
            yield
    finally:
        _traces.reset(token)


def call_unit(call: Call, settings: UnitSettings, precision: MixedPrecision, remat: Remat) -> Any:
    """The call of a unit inside a region's trace."""
    traces = _traces.get()
    assert traces is not None
    like = [
        jax.ShapeDtypeStruct(x.shape, p.gathered_dtype) if p is not None and owner == OWN and is_float(x) else x
        for x, p, owner in zip(map(abstract, call.params), call.placements, call.owners, strict=True)
    ]
    inputs = list(map(abstract, call.inputs))
    avals = tuple((x.shape, str(x.dtype), x.weak_type) for x in (*like, *inputs))
    own_name = settings.name if NESTED in call.owners else ""  # units inside are named after it
    key = call.key, own_name, precision, remat, avals, tuple(call.owners), _compat.trace_context()
    is_shared = _is_hashable(key)
    found = traces.programs.get(key) if is_shared else None
    consts: list[Any] = []
    if found is None:
        program, consts = trace(call, computes_in(call, precision), like, inputs, remat=remat)
        program, numbers = traces.shared(program, (call.where, own_name, tuple(call.owners)))
        found = program, numbers, call.result
        if is_shared and not consts:
            traces.programs[key] = found
    program, numbers, result = found
    run = traces.functions.get((program, settings))
    if run is None:
        run = _differentiable(program, tuple(call.owners), settings, call.where, as_equations=traces.are_equations)
        traces.functions[program, settings] = run
    return call.finish(run(*call.params, *call.inputs, *consts, *numbers), result)


def _is_hashable(key: Any) -> bool:
    """False for a module with a list or a dict among its plain attributes: its calls are traced one by one."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


def computes_in(call: Call, precision: MixedPrecision) -> Callable[[list[Any], list[Any]], list[Any]]:
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
    program: Program, owners: tuple[str, ...], settings: UnitSettings, where: str, *, as_equations: bool
) -> Callable[..., list[Any]]:
    """The program as a function whose derivative is a unit's, too."""
    n, own = program.num_params, [owner == OWN for owner in owners]
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

    @jax.custom_vjp
    def run(*operands: Any) -> list[Any]:
        return bind(program.jaxpr, operands, _dtypes(program.jaxpr), phase=FORWARD, wrt=(), num_kept=0)

    def forward(*operands: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values = [x.value for x in operands]
        gradient = program.gradient(tuple(x.perturbed and is_float(x.value) for x in operands))
        jaxpr = gradient.forward_keeping(own) if num_kept else gradient.forward
        outs = bind(jaxpr, values, _dtypes(jaxpr), phase=FORWARD, wrt=(), num_kept=num_kept)
        num_outs = len(gradient.is_float)
        return outs[:num_outs], (values[:n], outs[num_outs:], Static(gradient))

    def backward(saved: tuple[Any, ...], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        params, kept, gradient = saved[0], saved[1], saved[2].value
        live = tuple(not isinstance(ct, SymbolicZero) and is_float(ct) for ct in cotangents)
        jaxpr = gradient.backward_given(live, own) if num_kept else gradient.backward(live)
        at, wrt = len(kept) - num_kept, gradient.wrt[:n]
        operands = [*params, *kept[:at], *picked(live, cotangents), *kept[at:]]
        dtypes = [*(x.dtype for x in picked(wrt, params)), *_dtypes(jaxpr)[sum(wrt) :]]
        grads = iter(bind(jaxpr, operands, dtypes, phase=BACKWARD, wrt=wrt, num_kept=num_kept))
        return tuple(next(grads) if is_wanted else None for is_wanted in gradient.wrt)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _dtypes(jaxpr: Any) -> list[Any]:
    return [a.dtype for a in jaxpr.out_avals]


# A unit that is never gathered: its call runs as written, in global view, on parameters that stay where they are.


def run_ungathered(call: Call, unit: Unit) -> Any:
    """Calls a method of a unit that is never gathered. The compiler places what its operations communicate."""
    params = [
        x if p is None else without_padding(_held(x, p, unit), p).astype(p.gathered_dtype)
        for x, p in zip(call.guarded(call.params), call.placements, strict=True)
    ]
    with jax.named_scope(f"jshard[{unit.name or '(root)'}]"):
        outs = computes_in(call, unit.policy.mixed_precision)(params, call.inputs)
    return call.finish(outs, call.result)


def _held(stored: jax.Array, placement: Placement, unit: Unit) -> jax.Array:
    """The parameter, held to its place; so is its gradient, which the compiler would else put anywhere."""
    if not isinstance(unit.mesh, Mesh) or stored.ndim != len(placement.spec):  # shapes only, or a layer in a scan
        return stored
    return lax.with_sharding_constraint(stored, NamedSharding(unit.mesh, placement.partition_spec))


def called_inside(where: str) -> CallError:
    """The error for a call from inside the region."""
    return CallError(
        "A unit that is never gathered was called inside the sharded region.",
        where=where,
        why="inside, a device has its shards of the parameters, and gathering them is what the annotation rules out.",
        do="call it before the model, and pass what it returns: rows = model.tables(ids); model(rows, x)",
    )


def read_inside(name: str, placement: Placement, place: str) -> CallError:
    """The error for a parameter that an operation inside the region reads."""
    return CallError(
        "A parameter that is never gathered was read inside the sharded region.",
        where=f"{name}  {placement.dtype}{list(placement.shape)}, read at {place or 'a line that is not known'}",
        why=f"inside, a device has {placement.bytes_per_device} of its {placement.logical_bytes} bytes, and gathering"
        " the rest is what the annotation rules out.",
        do="read it before the model, and pass what comes of it: rows = model.tables(ids); model(rows, x)",
    )
