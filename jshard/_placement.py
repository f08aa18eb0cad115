"""Which dim of a parameter is sharded, and what its copies cost. Knows shapes only, no model and no device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jshard._errors import AnnotationError
from jshard._mesh import FSDP
from jshard._policies import MixedPrecision

Entry = str | tuple[str, ...] | None
ShardDim = int | Callable[[str, tuple[int, ...]], int | None] | None


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one parameter is stored, gathered and reduced; the same value for equal layers.

    Args:
        shape: logical shape.
        dtype: stored dtype.
        spec: mesh axes per dim of the stored array, as in `PartitionSpec`.
        dim: the dim sharded over `fsdp`; None if the parameter is replicated over it.
        degree: pieces over `fsdp`; 1 if replicated.
        shards: pieces over all axes of `spec`.
        gathered_dtype: dtype of the all-gather, and of the copy that the model computes with.
        reduce_dtype: dtype of the gradient's reduction.
        because: why the parameter is replicated; empty if it is sharded.
        layers: layers stacked in the leading dims; a scan gathers them one at a time.
        offload: what of it lies in host memory: "optimizer", its optimizer state; "params", the parameter too.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Entry, ...]
    dim: int | None
    degree: int
    shards: int
    gathered_dtype: str
    reduce_dtype: str
    because: str = ""
    layers: int = 1
    offload: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def logical_bytes(self) -> int:
        """Bytes of the whole parameter as stored."""
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored parameter on one device."""
        return self.logical_bytes // self.shards

    @property
    def gathered_bytes(self) -> int:
        """Bytes on one device of the copy gathered over `fsdp`."""
        return self.size * self.degree // self.shards * jnp.dtype(self.gathered_dtype).itemsize

    @property
    def dim_from_end(self) -> int | None:
        """The sharded dim counted from the end: right also when a scan took leading dims away."""
        return None if self.dim is None else self.dim - len(self.shape)

    @property
    def on_host(self) -> bool:
        """Whether the stored parameter lies in host memory."""
        return self.offload == "params"

    @property
    def partition_spec(self) -> PartitionSpec:
        return PartitionSpec(*self.spec)


@dataclasses.dataclass(frozen=True)
class PlacementRule:
    """What decides a parameter's placement, besides its shape.

    Args:
        degrees: size of every mesh axis.
        mixed_precision: dtypes of the unit.
        shard_dim: the dim asked for: a number, for parameters that have that dim, or a function of (path, shape);
            None chooses.
        stacked: leading dims that index layers (a scan or vmap over layers): never sharded.
        min_size: parameters with fewer elements stay replicated, and on the device.
        offload: what of larger ones lies in host memory.
    """

    degrees: tuple[tuple[str, int], ...]
    mixed_precision: MixedPrecision
    shard_dim: ShardDim = None
    stacked: int = 0
    min_size: int = 1024
    offload: str | None = None


def place(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    given: tuple[Entry, ...],
    rule: PlacementRule,
    *,
    ignored: bool = False,
) -> Placement:
    """Places one parameter.

    Args:
        path: its path, for messages and for `shard_dim`.
        shape: logical shape.
        dtype: stored dtype.
        given: mesh axes that the model itself asked for (a tensor axis), one entry a dim.
        rule: the rest of what decides.
        ignored: the annotation leaves this parameter out.
    """
    degrees = dict(rule.degrees)
    degree = degrees[FSDP]
    _check_given(path, given, degrees)
    free = [d for d in range(rule.stacked, len(shape)) if d >= len(given) or given[d] is None]
    dim, because = _choose(path, shape, free, degree, rule, ignored)
    entries: list[Entry] = [*given, *[None] * (len(shape) - len(given))]
    if dim is not None:
        entries[dim] = FSDP
    shards = math.prod(degrees.get(n, 1) for e in entries for n in (e if isinstance(e, tuple) else (e,)) if n)
    precision = rule.mixed_precision
    gathered = precision.param or jnp.dtype(dtype).name
    return Placement(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype).name,
        spec=tuple(entries),
        dim=dim,
        degree=1 if dim is None else degree,
        shards=shards,
        gathered_dtype=gathered,
        reduce_dtype=precision.reduce or gathered,
        because=because,
        layers=math.prod(shape[: rule.stacked]),
        offload=rule.offload if math.prod(shape[rule.stacked :]) >= rule.min_size else None,
    )


def _check_given(path: str, given: tuple[Entry, ...], degrees: dict[str, int]) -> None:
    """Raises for a model's own annotation that names no mesh axis, or the one that is jshard's to give."""
    names = [n for e in given for n in (e if isinstance(e, tuple) else (e,)) if n is not None]
    wrong = [n for n in names if n not in degrees or n == FSDP]
    if wrong:
        others = ", ".join(a for a in degrees if a != FSDP)
        raise AnnotationError(
            "The model's own sharding of a parameter cannot be kept.",
            where=f"{path}  out_sharding={given}",
            why=f"{', '.join(map(repr, wrong))}: a model may name {others}; {FSDP!r} is given by fully_shard.",
            do="translate logical axes, or leave them out: variable.set_metadata(out_sharding=(None, 'tensor')).",
        )


IGNORED = "ignored by the annotation"
DEGREE_ONE = "the fsdp axis has degree 1"
SMALL = "smaller than min_size"
INDIVISIBLE = "no dim divides by"


def _choose(
    path: str, shape: tuple[int, ...], free: list[int], degree: int, rule: PlacementRule, ignored: bool
) -> tuple[int | None, str]:
    if ignored:
        return None, IGNORED
    asked = rule.shard_dim(path, shape) if callable(rule.shard_dim) else rule.shard_dim
    if asked is not None and (callable(rule.shard_dim) or -len(shape) <= asked < len(shape)):
        return _asked_dim(path, shape, asked, free, degree), ""
    if degree == 1:
        return None, DEGREE_ONE
    size = math.prod(shape[rule.stacked :])
    if size < rule.min_size:
        return None, f"{SMALL} ({size} < {rule.min_size} elements)"
    fits = [d for d in free if shape[d] % degree == 0 and shape[d]]
    if not fits:
        return None, f"{INDIVISIBLE} {degree} (shape {tuple(shape)})"
    return max(fits, key=lambda d: (shape[d], -d)), ""


def _asked_dim(path: str, shape: tuple[int, ...], asked: int, free: list[int], degree: int) -> int:
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise AnnotationError(
            "shard_dim gave something that is not a dim.",
            where=f"{path}  shape {tuple(shape)}",
            why=f"it gave {asked!r}; a dim is a number, or None to choose as usual.",
            do="js.fully_shard(m, mesh=mesh, shard_dim=lambda path, shape: None)",
        )
    dim = asked + len(shape) if asked < 0 else asked
    if dim in free and shape[dim] % degree == 0:
        return dim
    possible = [d for d in free if shape[d] % degree == 0]
    raise AnnotationError(
        f"A parameter cannot be sharded along dim {asked}.",
        where=f"{path}  shape {tuple(shape)}, possible dims {possible}",
        why=f"a dim must divide by the degree of the fsdp axis, {degree}, and be free of other axes and of layers.",
        do="leave shard_dim out, or return None for this path: js.fully_shard(m, mesh=mesh,"
        " shard_dim=lambda path, shape: None)",
    )
