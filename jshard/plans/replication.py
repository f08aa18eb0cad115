"""Arrays that every device holds whole: parameters that could not be sharded, and arrays that are not parameters."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, INNER_AXES, PIPE, AnyMesh, degree, splitting_axes
from jshard.plans.numeric import Value
from jshard.plans.placement import INDIVISIBLE, PADDED_FROM_BYTES, Placement
from jshard.plans.policies import MixedPrecision
from jshard.plans.units import ORDINARY_STATE, Path, Unit, dotted, holds_array, is_named, numberless, walk

_LARGE_SHARE = 0.01  # of the bytes of all parameters
_LISTED = 10
_LISTED_PATHS = 4

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
ARRAY = "array"
"""The kind of an array that is a plain attribute."""


@dataclasses.dataclass(frozen=True)
class Other:
    """A float array of a model that is not a parameter, and so is not sharded."""

    path: Path
    kind: str  # class of its variable, or `ARRAY`
    form: str  # dtype and dims
    bytes: int

    def __str__(self) -> str:
        return f"{dotted(self.path)}  {self.kind} {self.form}"


def others_of(module: nnx.Module) -> Iterator[Other]:
    """Yields the float arrays of a model that are not parameters, except the state of Flax's own classes.

    Those of a parameter that holds a tree are among them: they are trained, but not sharded.
    """
    for path, node in walk(module):
        if isinstance(node, nnx.Variable):
            is_parameter = isinstance(node, nnx.Param) and holds_array(node)
            if not is_parameter and not isinstance(node, ORDINARY_STATE):
                yield from others_in(path, node.get_raw_value(), type(node).__name__)
        elif isinstance(node, _ARRAYS):
            yield from others_in(path, node, ARRAY)


def others_in(path: Path, value: Value, kind: str) -> Iterator[Other]:
    """Yields the float arrays in the value of a variable that is not a parameter."""
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            yield Other(path, kind, f"{leaf.dtype}{list(leaf.shape)}", math.prod(leaf.shape) * leaf.dtype.itemsize)


def check_replicated(root: Unit, name: str, others: Iterable[Other] = ()) -> None:
    """Raises for large parameters with no divisible dim, and warns of small ones; once per model and process.

    Also warns of other arrays that are large compared with the parameters, except those in `allow_replicated`: they
    may be constants. Called when the root is known: by `shard_init`, and by the first call into a model.
    """
    allowed = tuple(root.placement.allow_replicated)
    placements = {leaf.path: leaf.placement for leaf in root.members}
    # As tuples: they are keys of the caches below.
    parameters = tuple(placements.items())
    _check_parameters(name, parameters, allowed, root.policy.mixed_precision, _sharding_axes(root.mesh))

    arrays = tuple(array for array in others if not is_named(dotted(array.path), allowed))
    array_bytes = sum(array.bytes for array in arrays)
    parameter_bytes = _total_bytes(placements.values())
    # Together: many small arrays cost as much as one large one.
    if array_bytes > _large_from_bytes(parameter_bytes):
        _warn_of_arrays(name, arrays, array_bytes, parameter_bytes)


def _sharding_axes(mesh: AnyMesh) -> str:
    """Returns the axes that parameters are sharded over, with their degrees, as text."""
    axes = (FSDP, *splitting_axes((PIPE, *INNER_AXES), dict(mesh.shape)))
    return " x ".join(f"{axis}={degree(mesh, axis)}" for axis in axes)


def _total_bytes(placements: Iterable[Placement]) -> int:
    return sum(placement.logical_bytes for placement in placements)


def _large_from_bytes(parameter_bytes: int) -> float:
    """Returns from how many bytes on an array is too large to be replicated unless the user allows it."""
    return max(PADDED_FROM_BYTES, _LARGE_SHARE * parameter_bytes)


@functools.cache  # a warning is given once for a model, not at every call of it
def _warn_of_arrays(name: str, arrays: tuple[Other, ...], array_bytes: int, parameter_bytes: int) -> None:
    largest_first = sorted(arrays, key=lambda array: -array.bytes)
    listed = _listed(list(map(str, largest_first)))
    paths = [dotted(array.path) for array in arrays]
    _compat.warn_user(
        f"{len(arrays)} float array(s) of {name} are not parameters, and each device holds them whole: {array_bytes}"
        f" bytes, with {parameter_bytes} bytes of parameters:{listed}\n  If they are"
        " trained, make them parameters: nnx.Param(...). If not, accept it:"
        f" {_line_to_accept(paths)}",
    )


# Cached for the warning, as above. An exception is not cached: a model with an error raises it at every call.
@functools.cache
def _check_parameters(
    name: str,
    parameters: tuple[tuple[str, Placement], ...],
    allowed: tuple[str, ...],
    precision: MixedPrecision,
    axes: str,
) -> None:
    placements = dict(parameters)
    _check_keep_patterns_used(name, list(placements), precision)
    total_bytes = _total_bytes(placements.values())
    large_from = _large_from_bytes(total_bytes)
    indivisible: dict[str, Placement] = {}
    large: dict[str, Placement] = {}
    for path, placement in placements.items():
        # Those replicated for another reason are small, empty, so by request, or on a mesh that shards nothing.
        if not placement.because.startswith(INDIVISIBLE) or is_named(path, allowed):
            continue
        indivisible[path] = placement
        if placement.logical_bytes >= large_from:
            large[path] = placement
    if large:
        raise _large_parameters(name, large, axes, total_bytes)
    if indivisible:
        _warn_of_small_parameters(name, indivisible, axes, total_bytes)


def _large_parameters(name: str, large: Mapping[str, Placement], axes: str, total_bytes: int) -> AnnotationError:
    return AnnotationError(
        f"{len(large)} large parameter(s) of {name} would be replicated.",
        where=_descriptions(large),
        why=f"no dim divides by {axes}, every dim is smaller, and each parameter is over {_LARGE_SHARE:.0%} of the"
        f" model's {total_bytes} bytes.",
        do=f"accept it: {_line_to_accept(list(large))},\nor pad it: placement=js.PlacementPolicy(shard_dim=0).",
    )


def _warn_of_small_parameters(name: str, indivisible: Mapping[str, Placement], axes: str, total_bytes: int) -> None:
    replicated_bytes = _total_bytes(indivisible.values())
    share = f"{replicated_bytes / total_bytes:.1%}"
    listed = _listed(_descriptions(indivisible))
    _compat.warn_user(
        f"{len(indivisible)} parameter(s) of {name} are replicated, because no dim divides by {axes}. Each device"
        f" holds all {replicated_bytes} bytes of them, {share} of the model:{listed}"
        f"\n  To accept it: {_line_to_accept(list(indivisible))}."
        " To pad them: placement=js.PlacementPolicy(shard_dim=0).",
    )


def _check_keep_patterns_used(name: str, paths: list[str], precision: MixedPrecision) -> None:
    unused = []
    for pattern in precision.keep:
        # By the method that places parameters: a rule of its own here could differ in what a pattern matches.
        only_this_pattern = dataclasses.replace(precision, keep=(pattern,))
        if not any(map(only_this_pattern.keeps, paths)):
            unused.append(pattern)
    if unused:
        ellipsis = " ..." if len(paths) > _LISTED_PATHS else ""
        raise AnnotationError(
            "A pattern in keep matches no parameter.",
            where=f"{name}: MixedPrecision(keep={precision.keep!r})",
            why=f"{', '.join(map(repr, unused))}; paths are {', '.join(paths[:_LISTED_PATHS])}{ellipsis}.",
            do='js.MixedPrecision(param_dtype="bfloat16", keep=("norm/*",))',
        )


def _listed(texts: Sequence[str]) -> str:
    """Returns the first texts, each on a line of its own, and how many more there are."""
    lines = list(texts[:_LISTED])
    if len(texts) > _LISTED:
        lines.append(f"... and {len(texts) - _LISTED} more")
    return "".join(f"\n  {line}" for line in lines)


def _descriptions(parameters: Mapping[str, Placement]) -> list[str]:
    lines = []
    for path, placement in parameters.items():
        form = f"{placement.dtype}{list(placement.shape)}"
        lines.append(f"{path}  {form}  {placement.logical_bytes} bytes")
    return lines


def _line_to_accept(paths: list[str]) -> str:
    """Returns the line that accepts replicated arrays: by their paths, or with `*` for the indices of many layers."""
    patterns = paths
    if len(paths) > _LISTED:
        patterns = list(dict.fromkeys(numberless(path) for path in paths))
    return f"js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(allow_replicated={patterns!r}))"
