"""Units as equations of a region's global trace; and units that run in global view, as written."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Iterator

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.context import attention_again, during, traced_for
from jshard.engine.equality import shared
from jshard.engine.nnx_call import NnxCall
from jshard.engine.program import Program, abstract, abstract_all, checkpointed
from jshard.engine.stored import without_padding
from jshard.engine.trace import Call, trace_call
from jshard.engine.unit_call import UnitCall, UnitSettings
from jshard.engine.values import Leaf, MethodResult, is_array, is_nnx
from jshard.plans.memories import fetched
from jshard.plans.mesh import data_axes, data_degree
from jshard.plans.placement import Placement
from jshard.plans.policies import MixedPrecision, is_real_float
from jshard.plans.remat import ATTENTION_AGAIN, Remat
from jshard.plans.units import NESTED, OWN, Unit


@dataclasses.dataclass(frozen=True, eq=False)
class TracedUnit:
    """The program of a unit's call, for other calls that run the same.

    Attributes:
        program: the program.
        numbers: further operands.
        result: of the call, for `finish`.
    """

    program: Program
    numbers: list[np.generic]
    result: object


class Traces:
    """The units of one region's trace.

    Attributes:
        traced: the units of earlier calls, by what decides their program.
        calls: their calls, by program and settings: equal layers share derivatives.
        distinct: programs by the properties that equal ones share.
    """

    def __init__(self) -> None:
        self.traced: dict[Hashable, TracedUnit] = {}
        self.calls: dict[tuple[Program, UnitSettings], UnitCall] = {}
        self.distinct: dict[Hashable, list[Program]] = {}


_traces: contextvars.ContextVar[Traces | None] = contextvars.ContextVar("traces", default=None)


def in_region_trace() -> bool:
    """Whether a region's global program is being traced, so that units become equations."""
    return _traces.get() is not None


@contextlib.contextmanager
def region_trace(mesh: Mesh) -> Iterator[None]:
    """A context in which the global program of a region over a mesh is traced."""
    with during(_traces, Traces()), traced_for(mesh):
        yield


def call_unit(call: Call, settings: UnitSettings, precision: MixedPrecision, remat: Remat) -> MethodResult:
    """Calls a unit inside a region's trace."""
    traces = _traces.get()
    assert traces is not None
    gathered = _gathered_types(call)
    inputs = abstract_all(call.inputs)
    owners = tuple(call.owners)
    own_name = settings.name if NESTED in owners else ""  # units inside are named after it
    types = tuple((x.shape, str(x.dtype), x.weak_type) for x in (*gathered, *inputs))
    # All that a trace depends on, so that equal layers are traced once: the module's structure and static attributes
    # (`call.key`), the policies, the types, and JAX's own settings. Not the name of the unit, unless units inside are
    # named after it: layers of a list differ in nothing else.
    key: Hashable = call.key, own_name, precision, remat, types, owners, _compat.trace_context()
    try:
        hash(key)
    except TypeError:  # a module with a list or a dict among its plain attributes: its calls are traced one by one
        key = object()

    consts: list[jax.Array] = []
    traced = traces.traced.get(key)
    if traced is None:
        program, consts = trace_call(call, computes_in(call, precision), gathered, inputs, remat=remat)
        # Layers whose keys differ, or cannot be compared, may still have equal programs: those are found by their
        # equations, among the programs that have as many.
        kind = (call.where, own_name, owners, len(program.jaxpr.jaxpr.eqns))
        traced = TracedUnit(*shared(program, traces.distinct.setdefault(kind, [])), call.result)
        if not consts:  # constants are tracers, and those of this call
            traces.traced[key] = traced

    unit_call = traces.calls.get((traced.program, settings))
    if unit_call is None:
        unit_call = UnitCall.of(traced.program, owners, settings, call.where)
        traces.calls[traced.program, settings] = unit_call
    outs = unit_call.bind([*call.params, *call.inputs, *consts, *traced.numbers])
    return call.finish(outs, traced.result)


def _gathered_types(call: Call) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the parameters as the program takes them: its own in the dtype that they are gathered in."""
    types = []
    for x, placement, owner in zip(call.params, call.placements, call.owners, strict=True):
        type_of_param = abstract(x)
        if placement is not None and owner == OWN:
            type_of_param = jax.ShapeDtypeStruct(x.shape, placement.gathered_dtype)
        types.append(type_of_param)
    return types


def computes_in(call: Call, precision: MixedPrecision) -> Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]:
    """The body of a call, with its arguments and results in the dtypes of a policy."""

    def body(params: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        # Of the inputs the arguments alone: state, such as running means, keeps its dtype.
        dtype = precision.param_dtype if precision.cast_inputs else None
        arguments = [_cast(x, dtype) for x in inputs[call.num_state :]]
        outs, state = call.body(params, [*inputs[: call.num_state], *arguments])
        return [*(_cast(x, precision.output_dtype) for x in outs), *state]

    return body


def _cast(x: jax.Array, dtype: str | None) -> jax.Array:
    if dtype is None or not is_real_float(x.dtype):
        return x
    return x.astype(dtype)


# ---- in global view: as a Flax user would write it, the baseline for jshard; and units that are never gathered


def run_as_flax(
    module: nnx.Module, method: Callable[..., MethodResult], args: tuple, kwargs: dict[str, object], unit: Unit
) -> MethodResult:
    """Calls a method of a unit's module as a Flax user would write it: cast, and under `jax.checkpoint`."""
    call = NnxCall(module, method, *_split_along_batch((args, kwargs), unit))
    params = _logical_params(call, unit)
    with attention_again(unit.policy.remat == ATTENTION_AGAIN):
        run = checkpointed(computes_in(call, unit.policy.mixed_precision), unit.policy.remat)
        outs = run(params, call.inputs)
    assert call.result is not None, "the body has run"
    passed = 2 * len(call.written)  # parameters that a transformation wrote back
    return _split_along_batch(call.finish(outs[: len(outs) - passed], call.result), unit)


def _logical_params(call: NnxCall, unit: Unit) -> list[jax.Array]:
    """Returns the parameters on the device, without padding; those that this call would gather in their dtype."""
    # As the region would: the baseline for comparisons has the same dtypes.
    # A unit inside another gathers its own parameters alone; the outermost one also those that no unit inside has.
    gathers = {OWN} if unit.nested else {*call.owners} - {NESTED}
    params = []
    for x, placement, owner in zip(call.params, call.placements, call.owners, strict=True):
        if placement is not None:
            dtype = placement.gathered_dtype if owner in gathers else x.dtype
            x = without_padding(fetched(x), placement).astype(dtype)
        params.append(x)
    return params


def _split_along_batch(tree: PyTree, unit: Unit) -> PyTree:
    """Constrains arrays to be split over the data axes along dim 0, where that divides."""
    mesh = unit.mesh
    if not isinstance(mesh, Mesh):  # shapes only
        return tree
    num_shards = data_degree(mesh)

    def split(x: Leaf) -> Leaf:
        if not is_array(x) or x.ndim < 2 or x.shape[0] % num_shards:
            return x
        spec = PartitionSpec(data_axes(mesh), *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(split, tree, is_leaf=is_nnx)


def run_ungathered(call: Call, unit: Unit) -> MethodResult:
    """Calls a method of a unit on parameters that stay in place; the compiler places the communication."""
    params = []
    for x, placement in zip(call.guarded(call.params), call.placements, strict=True):
        if placement is not None:
            stored = _as_placed(x, placement, unit)
            x = without_padding(stored, placement).astype(placement.gathered_dtype)
        params.append(x)
    with jax.named_scope(f"jshard[{unit.name or '(root)'}]"):
        outs = computes_in(call, unit.policy.mixed_precision)(params, call.inputs)
    outs = call.without_passed(outs)
    return call.finish(outs, call.result)


def _as_placed(stored: jax.Array, placement: Placement, unit: Unit) -> jax.Array:
    """Constrains a parameter to its placement, and so its gradient, which the compiler would place anywhere."""
    # The transpose of a sharding constraint is the same constraint on the cotangent.
    if not isinstance(unit.mesh, Mesh) or stored.ndim != len(placement.spec):  # shapes only, or a layer in a scan
        return stored
    return lax.with_sharding_constraint(stored, NamedSharding(unit.mesh, placement.partition_spec))
