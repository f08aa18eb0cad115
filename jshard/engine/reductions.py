"""A reduction over the batch inside a model: each data shard would do it over its own part. Found, and warned of."""

import warnings
from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex

from jshard import _compat
from jshard._policies import UnitPolicy
from jshard.engine.call import Call
from jshard.engine.inputs import BatchSplit, GlobalTrace, trace_globally
from jshard.engine.outputs import BATCH_MEAN

_AXES = ("axes", "axis", "dimension", "dimensions")
_MIXING = frozenset(
    "argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min reduce_or"
    " reduce_prod reduce_sum reduce_xor reduce rev sort top_k".split()
)
_BATCH_NORM = "nnx/nn/normalization.py", "flax/linen/normalization.py"


def warn_of_batch_reductions(call: Call, split: BatchSplit, policy: UnitPolicy, traced: GlobalTrace) -> None:
    """Warns of reductions along a dim that grows with the batch, if a split output depends on them.

    Two traces, with the batch and with twice the batch, show which dims grow. What `js.batch_mean` declares, and
    synchronised BatchNorm, are combined over the data shards and so are right.
    """
    try:
        doubled = trace_globally(call, split, policy.batch_dim, factor=2)
    except Exception:  # the model insists on the size of its batch; js.check compares results
        return
    pairs = zip(traced.shapes, doubled.shapes, strict=True)
    grows = [a != b for a, b in pairs]
    grows += [False] * (len(traced.jaxpr.jaxpr.outvars) - len(grows))  # state is looked at when it leaves
    found = sorted(set(_mixing(traced.jaxpr.jaxpr, doubled.jaxpr.jaxpr, grows, policy.sync_batch_norm)))
    if found:
        places = "".join(f"\n  {place}" for place in found)
        warnings.warn(
            f"{call.where} combines examples of the batch; each of {split.shards} data shards does so over its own"
            f" {split.size // split.shards} of {split.size}:{places}\n"
            "  Compute it outside the model, or declare it: js.batch_mean(x). js.check(model, x) compares the results.",
            stacklevel=2,
        )


def _mixing(small: Any, large: Any, live_outputs: list[bool], batch_norm_is_right: bool) -> Iterator[str]:
    """Places in a program where examples are combined and a live output sees it, from its two traces."""
    if len(small.eqns) != len(large.eqns):
        yield "operations whose number depends on the batch"
        return
    counted = any(
        a.primitive.name == "iota" and a.params != b.params for a, b in zip(small.eqns, large.eqns, strict=True)
    )
    live = {v for v, is_live in zip(small.outvars, live_outputs, strict=True) if is_live and isinstance(v, jex.Var)}
    for a, b in zip(reversed(small.eqns), reversed(large.eqns), strict=True):
        if not any(v in live for v in a.outvars):
            continue
        if a.primitive.name == "name" and a.params["name"] == BATCH_MEAN:
            continue
        live |= {v for v in a.invars if isinstance(v, jex.Var)}
        inner = list(zip(jex.jaxprs_in_params(a.params), jex.jaxprs_in_params(b.params), strict=False))
        for one, two in inner:
            flags = [v in live for v in a.outvars]
            flags = flags if len(flags) == len(one.outvars) else [True] * len(one.outvars)
            yield from _mixing(one, two, flags, batch_norm_is_right)
        is_norm = batch_norm_is_right and any(file in _compat.frame_files(a) for file in _BATCH_NORM)
        if _combines(a, b, counted) and not is_norm:
            yield f"{a.primitive.name} at {_compat.user_frame(a)}"


def _combines(a: Any, b: Any, counted: bool) -> bool:
    """Whether an equation mixes elements along a dim that differs between its two traces."""
    name = a.primitive.name
    if name == "scan":
        return a.params["length"] != b.params["length"]
    if not a.invars or not hasattr(a.invars[0].aval, "shape"):
        return False
    grown = [d for d, (n, m) in enumerate(zip(a.invars[0].aval.shape, b.invars[0].aval.shape, strict=True)) if n != m]
    if name in ("slice", "dynamic_slice"):
        return any(a.outvars[0].aval.shape[d] != a.invars[0].aval.shape[d] for d in grown)
    if name == "gather":  # x[arange(batch), y] picks within examples; other indices along the batch mix them
        return not counted and any(d in a.params["dimension_numbers"].start_index_map for d in grown)
    if name.startswith("scatter"):
        return not grown and a.invars[2].aval.shape != b.invars[2].aval.shape
    return any(d in grown for d in _combined_dims(a))


def _combined_dims(eqn: Any) -> tuple[int, ...]:
    """Dims of the first operand along which an operation mixes elements."""
    if eqn.primitive.name == "dot_general":
        return eqn.params["dimension_numbers"][0][0]
    if eqn.primitive.name not in _MIXING:
        return ()
    for name in _AXES:
        if name in eqn.params:
            dims = eqn.params[name]
            return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    return ()
