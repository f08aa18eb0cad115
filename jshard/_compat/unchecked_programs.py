"""Programs whose types record the manual axes over which a value varies, for a `shard_map` that does not check them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

from jshard._compat.tracing import automatic_axes, bind, running

Value = jax.Array | np.ndarray

CASTS = frozenset({"pvary", "reduced_vary_cast", "reduced_vary_cast_p"})
"""Primitives that change the type but no number."""

_CUSTOM_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_KERNELS = frozenset({"pallas_call", "core_map", "mosaic_gpu"})  # their programs are run by a compiler of their own
_SHARDING_PARAMS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""The parameter that has the requested sharding, by primitive."""


def without_varying(jaxpr: jex.Jaxpr, consts: Sequence[Value]) -> Callable[..., list[Any]]:
    """Returns a program as a function that binds no primitive of such types; its axes are those around the call.

    Derivatives are taken before, so custom rules for them are dropped.
    """

    def run(*args: Value) -> list[Value]:
        env: dict[jex.Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            operands = [_read(env, atom) for atom in eqn.invars]
            with running(eqn):
                results = _run(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [_read(env, atom) for atom in jaxpr.outvars]

    return run


def _read(env: Mapping[jex.Var, Value], atom: jex.Var | jex.Literal) -> Value:
    if isinstance(atom, jex.Literal):
        # A constant's type has the mesh of its trace, which is another one: an array of numpy has none.
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)
    return env[atom]


def _run(eqn: jex.JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs an equation by a primitive that has no such types."""
    name = eqn.primitive.name
    params = eqn.params
    # Under `check_vma=False` values have no varying axes, and JAX refuses to bind the primitives that change them.
    if name in CASTS:
        return operands
    if name == "psum_invariant":
        return [lax.psum(x, params["axes"]) for x in operands]
    if name == "all_gather_invariant":
        return [_all_gather(x, params) for x in operands]
    if name in _CUSTOM_DERIVATIVES:
        # `custom_vjp_call_jaxpr` has the program under the second name.
        inner = params.get("call_jaxpr") or params["fun_jaxpr"]
        return without_varying(inner.jaxpr, inner.consts)(*operands)
    if name == "shard_map":
        return _run_shard_map(params, operands)
    if name in _SHARDING_PARAMS:
        sharding = params[_SHARDING_PARAMS[name]]
        return [_constrained(x, sharding) for x in operands]
    is_kernel = name in _KERNELS
    plain_params = {key: _plain(value, is_kernel=is_kernel) for key, value in params.items()}
    return bind(eqn.replace(params=plain_params), operands)


def _all_gather(x: Value, params: Mapping[str, Any]) -> jax.Array:
    return lax.all_gather(x, axis_name=params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"])


def _run_shard_map(params: Mapping[str, Any], operands: list[Value]) -> list[Value]:
    run = jax.shard_map(
        without_varying(params["jaxpr"], ()),
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        # Only the axes of this one: those of the shard_map around it are manual already.
        axis_names=set(params["newly_manual_axes"]),
        check_vma=False,
    )
    return list(run(*operands))


def _constrained(x: Value, sharding: object) -> Value:
    """Constrains an array over the axes that are automatic here; the others are manual, or of another mesh."""
    axes = automatic_axes()
    if not axes or not isinstance(sharding, jax.sharding.NamedSharding):
        return x
    return lax.with_sharding_constraint(x, P(*[_automatic(entry, axes) for entry in sharding.spec]))


def _automatic(entry: Any, axes: dict[str, int]) -> Any:
    """Returns an entry of a spec without the axes that are not automatic."""
    if entry is P.UNCONSTRAINED:
        return entry
    if isinstance(entry, str):
        entry = (entry,)
    return tuple(axis for axis in entry or () if axis in axes) or None


def _plain(value: object, *, is_kernel: bool) -> Any:
    """Returns a parameter of an equation without such types, also inside of tuples and programs."""
    if isinstance(value, jax.sharding.NamedSharding):
        return None  # over the mesh of the trace, which is another one
    if isinstance(value, core.ShapedArray):
        return core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)
    if isinstance(value, jex.ClosedJaxpr) and not is_kernel:
        return _traced(value.jaxpr, value.consts)
    if isinstance(value, jex.Jaxpr) and not is_kernel:
        # The parameter's type is a jaxpr without constants, which has no place for any.
        closed = _traced(value, ())
        assert not closed.consts, "a program without constants has some"
        return closed.jaxpr
    if isinstance(value, tuple) and not isinstance(value, P):
        items = [_plain(item, is_kernel=is_kernel) for item in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*items) if is_named else tuple(items)
    return value


def _traced(jaxpr: jex.Jaxpr, consts: Sequence[Value]) -> jex.ClosedJaxpr:
    # An aval has no program in it, so `is_kernel` has no effect.
    types = [_plain(var.aval, is_kernel=True) for var in jaxpr.invars]
    return jax.make_jaxpr(without_varying(jaxpr, consts))(*types)
