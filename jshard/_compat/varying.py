"""Programs whose types say over which manual axes a value differs, for a `shard_map` that does not check that."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core, lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

from jshard._compat.tracing import automatic_axes, running

CASTS = frozenset({"pvary", "reduced_vary_cast", "reduced_vary_cast_p"})
"""Change the type and no number."""

_OPAQUE = frozenset({"pallas_call", "core_map", "mosaic_gpu"})  # their programs are a kernel's


def without_varying(jaxpr: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    """A program as a function that binds no primitive of such types; its axes are those around the call.

    Derivatives are taken before: custom rules for them are left out.
    """

    def run(*xs: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *xs), strict=True))
        # a constant's type names the mesh of its trace, which is another one
        read = lambda atom: np.asarray(atom.val, _dtype(atom)) if isinstance(atom, jex.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            with running(eqn):
                found = _run(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return run


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _run(eqn: Any, xs: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in CASTS:
        return xs
    if name == "psum_invariant":
        return [lax.psum(x, params["axes"]) for x in xs]
    if name == "all_gather_invariant":
        given = {"axis_name": params["axis_name"], "axis": params["all_gather_dimension"], "tiled": params["tiled"]}
        return [lax.all_gather(x, **given) for x in xs]
    if name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        inner = params.get("call_jaxpr") or params["fun_jaxpr"]
        return without_varying(inner.jaxpr, inner.consts)(*xs)
    if name == "shard_map":
        run = jax.shard_map(
            without_varying(params["jaxpr"], ()),
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=False,
        )
        return list(run(*xs))
    if name in ("sharding_constraint", "reshard"):
        sharding = params["sharding" if name == "sharding_constraint" else "dst_sharding"]
        return [_constrained(x, sharding) for x in xs]
    params = {key: _plain(value, opaque=name in _OPAQUE) for key, value in params.items()}
    found = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))
    return list(found) if eqn.primitive.multiple_results else [found]


def _constrained(x: Any, sharding: Any) -> Any:
    axes = automatic_axes()
    if not axes or not isinstance(sharding, jax.sharding.NamedSharding):
        return x
    dims = [(dim,) if isinstance(dim, str) else dim for dim in sharding.spec]
    kept = [dim if dim is P.UNCONSTRAINED else tuple(a for a in dim or () if a in axes) or None for dim in dims]
    return lax.with_sharding_constraint(x, P(*kept))


def _plain(value: Any, *, opaque: bool) -> Any:
    """A parameter of an equation, of plain types."""
    if isinstance(value, jax.sharding.NamedSharding):
        return None  # over the mesh of the trace, which is another one
    if isinstance(value, core.ShapedArray):
        return core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)
    if isinstance(value, jex.ClosedJaxpr) and not opaque:
        return _traced(value.jaxpr, value.consts)
    if isinstance(value, jex.Jaxpr) and not opaque:
        closed = _traced(value, ())
        assert not closed.consts, "a program without constants got some"
        return closed.jaxpr
    if isinstance(value, tuple) and not isinstance(value, P):
        items = [_plain(item, opaque=opaque) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _traced(jaxpr: Any, consts: Sequence[Any]) -> Any:
    return jax.make_jaxpr(without_varying(jaxpr, consts))(*[_plain(v.aval, opaque=True) for v in jaxpr.invars])
