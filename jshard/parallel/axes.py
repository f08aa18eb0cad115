"""How a model uses its own mesh axes: `tensor`, which splits its layers, `expert`, and `pipe`.

    js.parallel.split(model, {"blocks/*/up/kernel": (None, "tensor"), "blocks/*/down/kernel": ("tensor", None)})
    x_BTD = js.parallel.hold(x_BTD, None, "tensor", None)     # inside the model: activations split along the sequence
    y_EBCD = js.parallel.from_experts(experts(js.parallel.to_experts(x_EBCD)))

    model = js.parallel.stages(model, microbatches=16)      # an annotated model: how its loops run on pipeline stages

All of them are no-ops if the mesh lacks the axis, and in global view: the model stays correct on one device.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import flax.linen as nn
import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard._types import PyTree
from jshard.api.revise import revise
from jshard.engine.context import region_mesh
from jshard.engine.inner import exchanged
from jshard.engine.per_example import per_example, sum_of_parts
from jshard.errors import AnnotationError, CallError
from jshard.plans.checks import check_not_placed
from jshard.plans.mesh import AXES, EXPERT, REGION_AXES, AnyMesh, degree, splitting_axes
from jshard.plans.model_axes import Entry, axes_in, axes_of, spec_over
from jshard.plans.stages import Stages
from jshard.plans.units import dotted, plain_class, walk

M = TypeVar("M", bound=nnx.Module | nn.Module)


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

    Examples:
        >>> js.parallel.split(model, {"*/up/kernel": (None, "tensor"), "*/down/kernel": ("tensor", None)})
    """
    if not isinstance(model, nnx.Module):
        raise AnnotationError(
            "js.parallel.split needs an nnx module.",
            where=f"js.parallel.split({type(model).__name__}, ...)",
            why="it names axes of the parameters that a module holds, and init creates those of a Linen module.",
            do='nn.Dense(64, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor")))',
        )
    where = f"js.parallel.split({plain_class(model).__name__}, ...)"
    params = []
    for path, variable in walk(model):
        if isinstance(variable, nnx.Param):
            params.append((dotted(path), variable))
    assignments, faults = _assign_axes(params, table)
    if faults:
        raise _table_does_not_fit(where, faults, [path for path, _ in params])
    check_not_placed(model, where)
    # Only now: a table with a fault changes no parameter.
    for assignment in assignments:
        assignment.variable.set_metadata(out_sharding=assignment.entries)


@dataclasses.dataclass(frozen=True)
class _AxisAssignment:
    """The mesh axes of a parameter's dims."""

    variable: nnx.Param
    entries: tuple[Entry, ...]


def _assign_axes(
    params: Sequence[tuple[str, nnx.Param]], table: Mapping[str, Sequence[Entry]]
) -> tuple[list[_AxisAssignment], list[str]]:
    """Returns the axes of each parameter that a pattern matches, and what is wrong with the table."""
    assignments: list[_AxisAssignment] = []
    faults = []
    # Patterns without a parameter are an error: a typing error would leave a parameter whole, silently.
    unused = dict.fromkeys(table)  # a set that keeps its order
    for path, variable in params:
        pattern = _first_match(path, table)
        if pattern is None:
            continue
        unused.pop(pattern, None)
        # Of the last dims: a stacked layer has a dim of layers before them.
        entries = tuple(table[pattern])
        ndim = len(variable.get_raw_value().shape)
        if len(entries) > ndim:
            faults.append(f"{pattern!r}: {entries}, and {path} has {ndim} dims")
        num_leading_dims = ndim - len(entries)
        assignments.append(_AxisAssignment(variable, (None,) * num_leading_dims + entries))
    for pattern in unused:
        faults.append(f"{pattern!r} matches no parameter")
    return assignments, faults


def _table_does_not_fit(where: str, faults: Sequence[str], param_paths: Sequence[str]) -> AnnotationError:
    listed = ", ".join(param_paths[:4])
    if len(param_paths) > 4:
        listed += ", ..."
    return AnnotationError(
        "A row of the table matches no parameter.",
        where=[f"{where}: {fault}" for fault in faults],
        why=f"each entry is for one of the last dims; the parameters are {listed}.",
        do='js.parallel.split(model, {"*/up/kernel": (None, "tensor")})  # * matches anything',
    )


def _first_match(path: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        # A `*` matches slashes, too: `*/up/kernel` is at any depth.
        if fnmatch.fnmatch(path, pattern):
            return pattern
    return None


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

    Examples:
        >>> x_BTD = js.parallel.hold(x_BTD + self.mlp(x_BTD), None, "tensor")
    """
    where = f"js.parallel.hold({x.dtype}{list(x.shape)}, {', '.join(map(repr, entries))})"
    _check_axes_of_model(entries, where)
    mesh = region_mesh()
    degrees = _degrees_of_model(mesh)
    # Before the check of the dims: where nothing is split, any length is fine.
    if not splitting_axes(degrees, degrees):
        return x
    _check_divisible(x, entries, degrees, where)
    spec = spec_over(tuple(degrees), entries)
    if mesh is None:
        # Inside a `shard_map`: JAX's context has the mesh.
        return lax.with_sharding_constraint(x, spec)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _degrees_of_model(mesh: AnyMesh | None) -> dict[str, int]:
    """Returns the axes over which the compiler splits activations of a model, and their degrees.

    Args:
        mesh: the one for which the model is traced in global view; None inside a `shard_map`, or in no model.
    """
    if mesh is not None:
        return {axis: size for axis, size in mesh.shape.items() if axis not in REGION_AXES}
    if not _compat.manual_axes():
        return {}  # in global view, or in no model: no constraint
    return _compat.automatic_axes()


def _check_axes_of_model(entries: Sequence[Entry], where: str) -> None:
    """Raises for axes over which a model cannot split its activations."""
    not_of_model = [axis for axis in axes_in(entries) if axis not in AXES or axis in REGION_AXES]
    if not_of_model:
        raise CallError(
            "An activation cannot be split over this axis.",
            where=where,
            why=f"{', '.join(map(repr, not_of_model))}: only 'tensor' is the model's; others split the batch and"
            " sequences.",
            do='js.parallel.hold(x, None, "tensor")',
        )


def _check_divisible(x: jax.Array, entries: Sequence[Entry], degrees: Mapping[str, int], where: str) -> None:
    """Raises for dims that do not divide by the degree of their axis."""
    uneven = []
    for dim, entry in enumerate(entries):
        for axis in axes_of(entry):
            if x.shape[dim] % degrees.get(axis, 1):
                uneven.append(dim)
    if uneven:
        noun = "dim" if len(uneven) == 1 else "dims"
        raise CallError(
            "An activation cannot be split over an axis.",
            where=where,
            why=f"{noun} {', '.join(map(str, uneven))} does not divide by its degree: {degrees}.",
            do="choose a length that divides, or omit the axis.",
        )


def to_experts(x: jax.Array) -> jax.Array:
    """Moves inputs of experts to where their experts are: one all-to-all over `expert`, and one in backward.

    Args:
        x: (experts, batch, ...): for every expert, its inputs from the batch.

    Returns:
        x, now split along the experts instead of the batch.

    Examples:
        >>> h_EBCD = self.experts(js.parallel.to_experts(x_EBCD))
    """
    return _exchanged(x, 1, 0)


def from_experts(x: jax.Array) -> jax.Array:
    """Returns the experts' outputs to their data shards: the inverse of `to_experts`.

    Args:
        x: (experts, batch, ...), split along the experts.

    Returns:
        x, now split along the batch.

    Examples:
        >>> y_EBCD = js.parallel.from_experts(h_EBCD)
    """
    return _exchanged(x, 0, 1)


def by_experts(fn: Callable[[PyTree, PyTree], jax.Array]) -> Callable[[PyTree, PyTree], jax.Array]:
    """Declares a function of the examples of a batch and of experts, whose result is a sum over these experts.

    The function is called with the examples of a data shard and all experts. On an `expert` axis it is called with the
    experts of one place and the examples of all places along the axis: the examples are gathered, and the results are
    reduce-scattered. So no token is dropped, however uneven the load; backward recomputes forward.

    Args:
        fn: takes a tree of arrays whose dim 0 is the examples, and one whose dim 0 is the experts; returns an array
            with a row for each example.

    Returns:
        The function, declared.

    Examples:
        >>> linear = js.parallel.by_experts(lambda rows, w_EDF: jnp.einsum("be,bd,edf->bf", *rows, w_EDF))
    """
    split_over_experts = functools.wraps(fn)(functools.partial(sum_of_parts, fn))

    @functools.wraps(fn)
    def call(examples: PyTree, experts: PyTree) -> jax.Array:
        mesh = region_mesh()
        has_expert_axis = mesh is not None and degree(mesh, EXPERT) > 1
        # The axis is looked up at each call: one function may be traced for several meshes.
        run = split_over_experts if has_expert_axis else fn
        return per_example(run, in_axes=(0, None))(examples, experts)

    return call


def _exchanged(x: jax.Array, source: int, target: int) -> jax.Array:
    """Returns the array split along a different dim over `expert`."""
    mesh = region_mesh()
    if mesh is not None:
        if degree(mesh, EXPERT) == 1:
            return x
        # Inside a model, which is in global view: the shape stays, only the split dim changes.
        return exchanged(x, EXPERT, source, target)
    if EXPERT not in _compat.manual_axes():
        return x
    # Inside a `shard_map` of the caller, where `x` is this device's part.
    # It is split along `source`: that dim is completed, and `target` is divided.
    return lax.all_to_all(x, EXPERT, split_axis=target, concat_axis=source, tiled=True)


def stages(
    model: M,
    *,
    microbatches: int | None = None,
    late: bool = False,
    rounds: int | None = None,
    sum_dtype: str | None = None,
) -> M:
    """Sets how the loops over units of an annotated model run on the stages of a mesh with an axis `pipe`.

    Without it they run on stages, too: as few microbatches as keep all places busy go around them, once for each layer
    of a place. On a mesh without `pipe` it has no effect, so that a script is the same on any mesh.

    Args:
        model: the root of an annotated nnx model, which is changed in place; or an annotated Linen model.
        microbatches: into how many parts the examples of a data shard go through the stages; at least the degree of
            `pipe`, with `late` twice that, and a divisor of the examples of a data shard. None: as few as that.
        late: whether a place sends a result while it computes the next microbatch, and not before that: what is sent
            between the places is then hidden.
        rounds: how often a microbatch goes around the places. None: once for each layer of a place, which makes the
            smallest bubble. 1: each place has neighbouring layers ("GPipe").
        sum_dtype: the dtype in which a place adds the gradients of its microbatches: "float32", "bfloat16" or
            "float16". None: that of the parameters.

    Returns:
        The same object; for a Linen model, a copy.

    Raises:
        AnnotationError: the model is not annotated, or a value is not valid.

    Examples:
        >>> model = js.parallel.stages(model, microbatches=16, late=True)
    """
    return revise(model, stages=Stages(microbatches, late, rounds, sum_dtype))
