"""How a model uses its own mesh axes: `tensor`, which splits its layers, and `expert`.

    js.parallel.split(model, {"blocks/*/up/kernel": (None, "tensor"), "blocks/*/down/kernel": ("tensor", None)})
    x_BTD = js.parallel.hold(x_BTD, None, "tensor", None)     # inside the model: activations split along the sequence
    y_EBCD = js.parallel.from_experts(experts(js.parallel.to_experts(x_EBCD)))

All of them are no-ops if the mesh lacks the axis, and in global view: the model stays correct on one device.
"""

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard.engine.context import region_mesh
from jshard.engine.inner import exchanged
from jshard.engine.per_example import per_example, sum_of_parts
from jshard.errors import AnnotationError, CallError
from jshard.plans.checks import check_not_placed
from jshard.plans.mesh import AXES, EXPERT, REGION_AXES, degree
from jshard.plans.model_axes import Entry, axes_of, spec_over
from jshard.plans.units import dotted, plain_class, walk


def split(model: nnx.Module, table: Mapping[str, Sequence[Entry]]) -> None:
    """Assigns dims of a model's parameters to axes of the mesh.

    Call it before `js.fully_shard`, which shards another dim of them over `fsdp`; afterwards it is an error. For a
    single variable, `variable.set_metadata(out_sharding=...)` is equivalent.

    Args:
        model: the model, or a part of it.
        table: from path patterns to the mesh axis, or None, of each dim. Entries apply to the last dims: leading
            dims of stacked layers need none. The first pattern that matches a parameter is used.

    Raises:
        AnnotationError: a pattern matches no parameter, or has more entries than a parameter has dims; or the model is
            annotated, so that its parameters are placed already.

    Example:
        >>> js.parallel.split(model, {"*/up/kernel": (None, "tensor"), "*/down/kernel": ("tensor", None)})
    """
    if not isinstance(model, nnx.Module):
        raise AnnotationError(
            "js.parallel.split needs an nnx module.",
            where=f"js.parallel.split({type(model).__name__}, ...)",
            why="it names axes of the parameters that a module holds, and init creates those of a Linen module.",
            do='nn.Dense(64, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor")))',
        )
    unused, deep = dict.fromkeys(table), []
    params = [(dotted(path), v) for path, v in walk(model) if isinstance(v, nnx.Param)]
    named: list[tuple[nnx.Param, tuple[Entry, ...]]] = []
    for path, variable in params:
        pattern = next((p for p in table if fnmatch.fnmatch(path, p)), None)
        if pattern is None:
            continue
        unused.pop(pattern, None)
        entries, ndim = tuple(table[pattern]), len(variable.get_raw_value().shape)
        deep += [f"{pattern!r}: {entries}, and {path} has {ndim} dims"] if len(entries) > ndim else []
        named.append((variable, (None,) * (ndim - len(entries)) + entries))
    if wrong := [*deep, *(f"{pattern!r} matches no parameter" for pattern in unused)]:
        listed = f"{', '.join(path for path, _ in params[:4])}{', ...' if len(params) > 4 else ''}"
        raise AnnotationError(
            "A row of the table matches no parameter.",
            where=[f"js.parallel.split({plain_class(model).__name__}, ...): {row}" for row in wrong],
            why=f"each entry is for one of the last dims; the parameters are {listed}.",
            do='js.parallel.split(model, {"*/up/kernel": (None, "tensor")})  # * matches anything',
        )
    check_not_placed(model, f"js.parallel.split({plain_class(model).__name__}, ...)")
    for variable, entries in named:
        variable.set_metadata(out_sharding=entries)


def hold(x: jax.Array, *entries: Entry) -> jax.Array:
    """Constrains how an activation inside the model is split over the `tensor` axis; else the compiler chooses.

    Between the products of a layer that is split over `tensor`, also splitting the sequence saves memory at no extra
    communication: `hold(x_BTD, None, "tensor", None)`. Without axes, `hold(k_BTHK)`, the array is whole on each device
    of the axis. The batch is always split over the data axes; its entry is None here.

    Args:
        x: an array that has a batch dim.
        *entries: the mesh axis of each dim, or None; omitted entries are None.

    Raises:
        CallError: the model cannot assign an axis, or a dim is not divisible by its degree.

    Example:
        >>> x_BTD = js.parallel.hold(x_BTD + self.mlp(x_BTD), None, "tensor")
    """
    named = [n for entry in entries for n in axes_of(entry)]
    where = f"js.parallel.hold({x.dtype}{list(x.shape)}, {', '.join(map(repr, entries))})"
    if wrong := [n for n in named if n not in AXES or n in REGION_AXES]:
        raise CallError(
            "An activation cannot be split over this axis.",
            where=where,
            why=f"{', '.join(map(repr, wrong))}: only 'tensor' is the model's; others split the batch and sequences.",
            do='js.parallel.hold(x, None, "tensor")',
        )
    mesh = region_mesh()
    own = {} if mesh is None else {a: n for a, n in mesh.shape.items() if a not in REGION_AXES}
    degrees = _compat.automatic_axes() if mesh is None else own
    if not any(n > 1 for n in degrees.values()) or (mesh is None and not _compat.manual_axes()):
        return x
    uneven = [d for d, entry in enumerate(entries) for n in axes_of(entry) if x.shape[d] % degrees.get(n, 1)]
    if uneven:
        raise CallError(
            "An activation cannot be split over an axis.",
            where=where,
            why=f"dim{'s'[: len(uneven) > 1]} {', '.join(map(str, uneven))} does not divide by its degree: {degrees}.",
            do="choose a length that divides, or omit the axis.",
        )
    spec = spec_over(tuple(degrees), entries)
    return lax.with_sharding_constraint(x, spec if mesh is None else NamedSharding(mesh, spec))


def to_experts(x: jax.Array) -> jax.Array:
    """Moves inputs of experts to where their experts are: one all-to-all over `expert`, and one in backward.

    Args:
        x: (experts, batch, ...): for every expert, its inputs from the batch.

    Returns:
        x, now split along the experts instead of the batch.

    Example:
        >>> h_EBCD = self.experts(js.parallel.to_experts(x_EBCD))
    """
    return _exchanged(x, 1, 0)


def from_experts(x: jax.Array) -> jax.Array:
    """The inverse of `to_experts`: returns the experts' outputs to their data shards.

    Args:
        x: (experts, batch, ...), split along the experts.

    Returns:
        x, now split along the batch.

    Example:
        >>> y_EBCD = js.parallel.from_experts(h_EBCD)
    """
    return _exchanged(x, 0, 1)


def by_experts(fn: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """Declares a function of the examples of a batch and of experts, whose result is a sum over these experts.

    The function is called with the examples of a data shard and all experts. On an `expert` axis it is called with the
    experts of one place and the examples of all places along the axis: the examples are gathered, and the results are
    reduce-scattered. So no token is dropped, however uneven the load; backward recomputes forward.

    Args:
        fn: takes a tree of arrays whose dim 0 is the examples, and one whose dim 0 is the experts; returns an array
            with a row for each example.

    Returns:
        The function, declared.

    Example:
        >>> linear = js.parallel.by_experts(lambda rows, w_EDF: jnp.einsum("be,bd,edf->bf", *rows, w_EDF))
    """
    apart = functools.wraps(fn)(functools.partial(sum_of_parts, fn))

    @functools.wraps(fn)
    def call(examples: Any, experts: Any) -> jax.Array:
        mesh = region_mesh()
        are_apart = mesh is not None and degree(mesh, EXPERT) > 1
        return per_example(apart if are_apart else fn, in_axes=(0, None))(examples, experts)

    return call


def _exchanged(x: jax.Array, source: int, target: int) -> jax.Array:
    """The array, split along a different dim over `expert`."""
    if (mesh := region_mesh()) is not None:
        return exchanged(x, EXPERT, source, target) if degree(mesh, EXPERT) > 1 else x
    has_experts = EXPERT in _compat.manual_axes()
    return lax.all_to_all(x, EXPERT, split_axis=target, concat_axis=source, tiled=True) if has_experts else x
