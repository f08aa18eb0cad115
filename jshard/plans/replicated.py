"""What every device holds whole: parameters that could not be sharded, and arrays that are no parameters."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, degree
from jshard.plans.placement import INDIVISIBLE, PADDED_FROM_BYTES, Placement
from jshard.plans.policies import MixedPrecision
from jshard.plans.units import Path, Unit, dotted, numberless, walk

_LARGE_SHARE = 0.01
_LISTED = 10

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
ARRAY = "array"
"""The kind of one that is a plain attribute."""

# State that nobody takes for parameters: statistics, caches, what is collected, random numbers.
_ORDINARY_STATE = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)


@dataclasses.dataclass(frozen=True)
class Other:
    """A float array of a model that is no parameter, so that it is not sharded.

    Args:
        path: from the root.
        kind: class of its variable, or `array` of a plain attribute.
        form: dtype and dims, as text.
        bytes: its size.
    """

    path: Path
    kind: str
    form: str
    bytes: int

    def __str__(self) -> str:
        return f"{dotted(self.path)}  {self.kind} {self.form}"


def others_in(path: Path, x: Any) -> Iterator[Other]:
    """The float arrays of a variable that is no parameter, or of a plain attribute."""
    if isinstance(x, (nnx.Param, *_ORDINARY_STATE)):
        return
    kind = type(x).__name__ if isinstance(x, nnx.Variable) else ARRAY
    for leaf in jax.tree.leaves(x.get_raw_value() if isinstance(x, nnx.Variable) else x):
        if isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            yield Other(path, kind, f"{leaf.dtype}{list(leaf.shape)}", math.prod(leaf.shape) * leaf.dtype.itemsize)


def others_of(module: nnx.Module) -> tuple[Other, ...]:
    """The float arrays of a model that are no parameters, but for the state of Flax's own classes."""
    held = ((p, x) for p, x in walk(module) if isinstance(x, (nnx.Variable, *_ARRAYS)))
    return tuple(other for path, x in held for other in others_in(path, x))


def warn_of_others(root: Unit, name: str, others: tuple[Other, ...]) -> None:
    """Warns of arrays that are no parameters and large beside those, once per model and process.

    Constants may be that large. They are in `allow_replicated`, or it is a warning only.
    """
    others = tuple(other for other in others if not is_named(dotted(other.path), root.placement.allow_replicated))
    held, total = sum(other.bytes for other in others), sum(placement.logical_bytes for _, placement in _placed(root))
    if held > max(PADDED_FROM_BYTES, _LARGE_SHARE * total):
        _warn_of_others(name, others, held, total)


@functools.cache
def _warn_of_others(name: str, others: tuple[Other, ...], held: int, total: int) -> None:
    listed = "".join(f"\n  {other}" for other in sorted(others, key=lambda other: -other.bytes)[:_LISTED])
    listed += f"\n  ... and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
    _compat.warn_user(
        f"{len(others)} float array(s) of {name} are not parameters, and each device holds them whole: {held} bytes,"
        f" beside {total} bytes of parameters:{listed}\n"
        "  If they are trained, make them parameters: nnx.Param(...), in Linen self.param(...). If not, accept it:"
        f" {_accepted(dotted(other.path) for other in others)}",
    )


def check_replicated(root: Unit, name: str) -> None:
    """Looks at the parameters of a model that no dim divides, and for patterns; once per model and process.

    Called when the root is known: by `shard_init`, and by the first call into a model.

    Raises:
        AnnotationError: one of them has 64 KiB or more, is over one percent of the model, and not in
            `allow_replicated`; or a pattern of the root's `MixedPrecision(keep=...)` matches nothing.
    """
    _check_once(
        name, _placed(root), root.placement.allow_replicated, root.policy.mixed_precision, degree(root.mesh, FSDP)
    )


_Placed = tuple[tuple[str, Placement], ...]


def _placed(root: Unit) -> _Placed:
    """The parameters of the plan, by path."""
    return tuple((dotted(member.path), member.placement) for member in root.members)


@functools.cache
def _check_once(name: str, placed: _Placed, allowed: tuple[str, ...], precision: MixedPrecision, degree: int) -> None:
    _check_kept(name, placed, precision)
    odd = {path: p for path, p in placed if p.because.startswith(INDIVISIBLE) and not is_named(path, allowed)}
    held, total = (sum(p.logical_bytes for p in some) for some in (odd.values(), dict(placed).values()))
    large = {path: p for path, p in odd.items() if p.logical_bytes >= max(PADDED_FROM_BYTES, _LARGE_SHARE * total)}
    axis = f"{FSDP}={degree}"
    if large:
        raise AnnotationError(
            f"{len(large)} large parameter(s) of {name} would be replicated.",
            where=[_describe(*one) for one in large.items()],
            why=f"no dim divides by {axis}, every dim is smaller, and each parameter is over {_LARGE_SHARE:.0%} of the"
            f" model's {total} bytes.",
            do=f"accept it: {_accepted(large)},\nor have it padded: placement=js.ShardPlacement(shard_dim=0).",
        )
    if odd:
        listed = [f"\n  {_describe(*one)}" for one in list(odd.items())[:_LISTED]]
        listed += [f"\n  ... and {len(odd) - _LISTED} more"] * (len(odd) > _LISTED)
        _compat.warn_user(
            f"{len(odd)} parameter(s) of {name} are replicated, as no dim divides by {axis}. Each device holds all"
            f" {held} bytes of them, {held / total:.1%} of the model:{''.join(listed)}\n  To accept it:"
            f" {_accepted(odd)}. To pad them: placement=js.ShardPlacement(shard_dim=0).",
        )


def _accepted(named: Iterable[str]) -> str:
    """The line that accepts replicated arrays: by their paths, or with `*` for the numbers of many layers."""
    paths = list(named)
    paths = paths if len(paths) <= _LISTED else list(dict.fromkeys(numberless(path) for path in paths))
    return f"js.fully_shard(model, mesh=mesh, placement=js.ShardPlacement(allow_replicated={paths!r}))"


def _check_kept(name: str, placed: _Placed, precision: MixedPrecision) -> None:
    paths = [path for path, _ in placed]
    unused = [p for p in precision.keep if not any(map(dataclasses.replace(precision, keep=(p,)).keeps, paths))]
    if unused:
        raise AnnotationError(
            "No parameter matches what should keep its dtype.",
            where=f"{name}: MixedPrecision(keep={precision.keep!r})",
            why=f"{', '.join(map(repr, unused))}; paths are {', '.join(paths[:4])}{' ...' if paths[4:] else ''}.",
            do='js.MixedPrecision(param="bfloat16", keep=("norm/*",))',
        )


def warn_of_unplanned(paths: list[str], where: str) -> None:
    """Warns of parameters that the annotation never saw: they are right, but whole on every device."""
    if paths:
        listed = "".join(f"\n  {path}" for path in paths)
        _compat.warn_user(
            f"{where}: {len(paths)} parameter(s) came after the annotation and stay replicated:{listed}\n"
            "  Change the model first, then js.fully_shard it.",
        )


def is_named(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a path."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _describe(path: str, placement: Placement) -> str:
    return f"{path}  {placement.dtype}{list(placement.shape)}  {placement.logical_bytes} bytes"
