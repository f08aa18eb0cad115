"""Which dim of a parameter is sharded, and the size of its copies. Uses shapes only, no model and no device.

Deprecated settings and functions are at the end: they work for one more release, with a warning that has the new line.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.mesh import AXES, EXPERT, FSDP, INNER_AXES, TENSOR
from jshard.plans.policies import MixedPrecision, check_setting

Entry = str | tuple[str, ...] | None
ShardDim = int | Callable[[str, tuple[int, ...]], int | None] | None
Offload = Literal["optimizer", "params"]  # in host memory: the optimizer's state, or also the parameter
OPTIMIZER, PARAMS = get_args(Offload)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one parameter is stored, gathered and reduced; equal layers have equal values."""

    shape: tuple[int, ...]  # logical
    dtype: str  # stored
    spec: tuple[Entry, ...]  # mesh axes per dim of the stored array, as in `PartitionSpec`
    dim: int | None  # sharded over `axes`; None if the parameter is replicated
    degree: int  # pieces along it; 1 if replicated
    shards: int  # pieces over all axes of `spec`
    gathered_dtype: str  # of the all-gather, and of the copy that the model computes with
    reduce_dtype: str  # of the gradient's reduction
    because: str = ""  # why the parameter is replicated
    layers: int = 1  # stacked in the leading dims; a scan gathers them one at a time
    padding: int = 0  # rows of zeros at the end of `dim` in the stored array, without which it would not divide
    offload: Offload | None = None  # in host memory: `OPTIMIZER`: its state; `PARAMS`: also the parameter
    gathered: bool = True  # by its unit; False: its uses work on the shards
    gather_wire: str = ""  # the dtype in which it is sent when it is gathered, with scales; empty: `gathered_dtype`
    reduce_wire: str = ""  # dtype in which parts of its gradient are sent, summed on arrival; empty: `reduce_dtype`
    hosts: int = 1  # along `fsdp`, for `reduce_wire`: the gradient is summed within each host, then between them

    def exchanges(self, degree: int) -> tuple[tuple[int, int], ...]:
        """The exchanges of its gradient over `fsdp`, of that degree: the devices of a group, and their distance."""
        each = degree // self.hosts
        return tuple((size, apart) for size, apart in ((each, 1), (self.hosts, each)) if size > 1)

    @property
    def layer_dims(self) -> int:
        """How many leading dims are layers."""
        return next(i for i in range(len(self.shape) + 1) if math.prod(self.shape[:i]) >= self.layers)

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of all layers, gathered; 0 if it is sent without scales."""
        return 4 * self.layers * self.stored_shape[self.dim] if self.gather_wire and self.dim is not None else 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of its sharding and gathers: `fsdp`, and `expert` unless it has experts along that axis."""
        return () if self.dim is None else axes_of(self.spec[self.dim])

    @property
    def size(self) -> int:
        """Elements of the logical parameter."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored array, with its padding."""
        return tuple(n + self.padding * (d == self.dim) for d, n in enumerate(self.shape))

    @property
    def stored_size(self) -> int:
        """Elements as stored."""
        return math.prod(self.stored_shape)

    @property
    def logical_bytes(self) -> int:
        """Bytes of the whole parameter in its stored dtype, without padding."""
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored parameter on one device."""
        return self.stored_size * jnp.dtype(self.dtype).itemsize // self.shards

    @property
    def gathered_bytes(self) -> int:
        """Bytes on one device of the copy gathered over `axes`, with its padding; 0 if it is never gathered."""
        if not self.gathered:
            return 0
        return self.stored_size * self.degree // self.shards * jnp.dtype(self.gathered_dtype).itemsize

    @property
    def dim_from_end(self) -> int | None:
        """The sharded dim counted from the end: also correct after a scan has removed leading dims."""
        return None if self.dim is None else self.dim - len(self.shape)

    @property
    def on_host(self) -> bool:
        """Whether the stored parameter is in host memory."""
        return self.offload == PARAMS

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as a `jax.sharding.PartitionSpec`."""
        return PartitionSpec(*self.spec)


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes in an entry of a spec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def spec_over(axes: Sequence[str], entries: Sequence[Entry]) -> PartitionSpec:
    """A spec restricted to some axes, for a region that is manual over them."""
    return PartitionSpec(*[tuple(n for n in axes_of(entry) if n in axes) or None for entry in entries])


@dataclasses.dataclass(frozen=True)
class ShardPlacement:
    """Where the parameters of a unit are placed: the `placement` of `js.fully_shard`.

    Args:
        shard_dim: which dim to shard: a number, for parameters that have that dim; or a function of (path, shape)
            that returns a number, or None for the default choice.
        stacked: the number of leading dims that index layers, if `nnx.vmap` or `nnx.scan` stacked them.
        ignored: parameters to leave replicated: an nnx filter, a path pattern, or a list of these. A pattern is
            matched against the path from the module and from the unit.
        allow_replicated: path patterns of parameters that are replicated rather than padded if no dim divides,
            whatever their size and without a warning; and of large arrays that are not parameters.
        min_size: parameters with fewer elements stay replicated.
        offload: data in host memory. `"optimizer"`: the state that `js.shard_optimizer` creates for the parameters.
            `"params"`: also the parameters and their gradients: each is copied to the device before it is gathered.
            Parameters below `min_size` stay on the device.
        gathered: False: parameters, gradients and optimizer state are sharded as in any unit, but never gathered. The
            unit's call runs as written, in global view, where each parameter is one logical array: for tables of
            which a step reads little. Call it outside the root's call, and pass its result in; a Linen model needs no
            change for this, because the code around it also runs in global view. Its communication is the model's
            own; `js.fully_shard` accepts only this setting for it, with `offload` at most `"optimizer"`.
        axis_rules: mesh axes for the dim names in the model's own annotations: an axis, a tuple of axes, or None for
            a name that splits nothing. `fsdp` needs no rule: the dim that it shards is decided here.

    Example:
        >>> placement = js.ShardPlacement(shard_dim=0, offload="optimizer")
        >>> model = js.fully_shard(MLP(nnx.Rngs(0)), mesh=mesh, placement=placement)
    """

    shard_dim: ShardDim = None
    stacked: int = 0
    ignored: Any = None
    allow_replicated: Sequence[str] = ()
    min_size: int = 1024
    offload: Offload | None = None
    gathered: bool = True
    axis_rules: Mapping[str, Entry] | Sequence[tuple[str, Entry]] = ()

    def __post_init__(self) -> None:
        named = self.allow_replicated
        rules = self.axis_rules.items() if isinstance(self.axis_rules, Mapping) else self.axis_rules
        object.__setattr__(self, "axis_rules", tuple(rules))
        known_axes = all(axis in AXES for _, entry in self.axis_rules for axis in axes_of(entry))
        wanted = f"a dict from the model's names to axes ({', '.join(AXES)}) or None"
        _check_field(known_axes, "axis_rules", dict(self.axis_rules), wanted, {"tp": TENSOR})
        object.__setattr__(self, "allow_replicated", (named,) if isinstance(named, str) else tuple(named))
        dim = self.shard_dim is None or callable(self.shard_dim) or type(self.shard_dim) is int
        _check_field(dim, "shard_dim", self.shard_dim, "a number or a function of (path, shape)", 0)
        _check_field(_is_size(self.stacked), "stacked", self.stacked, "a number of leading dims, 0 or more", 1)
        _check_field(_is_size(self.min_size), "min_size", self.min_size, "a number of elements", 1024)
        known = '"optimizer" (its state is in host memory), "params" (also parameters and their gradients) or None'
        _check_field(self.offload in (None, OPTIMIZER, PARAMS), "offload", self.offload, known, OPTIMIZER)
        _check_field(self.gathered in (True, False), "gathered", self.gathered, "True or False", False)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_field(good: bool, name: str, value: Any, wanted: str, example: Any) -> None:
    line = f"js.fully_shard(block, mesh=mesh, placement=js.ShardPlacement({name}={example!r}))"
    check_setting(good, f"js.ShardPlacement({name}={value!r})", wanted, line)


def place(
    path: str,
    shape: tuple[int, ...],
    dtype: Any,
    given: tuple[Entry, ...],
    degrees: Mapping[str, int],
    asked: ShardPlacement,
    precision: MixedPrecision,
    *,
    pads: bool = True,
    ignored: bool = False,
    hosts: int = 1,
) -> Placement:
    """Places one parameter of a logical shape, at a path from its unit.

    `given` are the mesh axes requested by the model itself, one entry per dim. A dim that does not divide is stored
    padded if `pads`, else the parameter is replicated, as if the annotation excluded it (`ignored`). `hosts` is the
    number of groups of neighbours along `fsdp`.
    """
    named, rules = given, dict(asked.axis_rules)
    given = tuple(_kept(_ruled(entry, rules), degrees) for entry in given)
    unknown = [n for entry in named for n in axes_of(entry) if n not in rules and n not in {*degrees, *AXES}]
    _check_given(path, shape, named, unknown, given, degrees)
    free = [d for d in range(asked.stacked, len(shape)) if d >= len(given) or given[d] is None]
    taken = {n for entry in given for n in axes_of(entry)}
    axes = [a for a in (FSDP, *INNER_AXES) if degrees.get(a, 1) > 1 and a not in taken] or [FSDP]
    degree = math.prod(degrees[a] for a in axes)
    dim, because = (None, IGNORED) if ignored else _choose(path, shape, dtype, free, degree, asked, pads)
    entries: list[Entry] = [*given, *[None] * (len(shape) - len(given))]
    if dim is not None:
        entries[dim] = tuple(axes) if len(axes) > 1 else axes[0]
    shards = math.prod(degrees[n] for entry in entries for n in axes_of(entry))
    stored = jnp.dtype(dtype).name
    keeps, is_matrix = precision.keeps(path), len(shape) - asked.stacked > 1
    gathered = stored if keeps else precision.param or stored
    scaled = precision.gather if is_matrix and not keeps and jnp.dtype(gathered).itemsize > 1 else None
    reduced = precision.reduce or gathered
    narrower = precision.wire is not None and jnp.dtype(precision.wire).itemsize < jnp.dtype(reduced).itemsize
    return Placement(
        shape=tuple(shape),
        dtype=stored,
        spec=tuple(entries),
        dim=dim,
        degree=1 if dim is None else degree,
        shards=shards,
        gathered_dtype=gathered,
        reduce_dtype=reduced,
        because=because,
        layers=math.prod(shape[: asked.stacked]),
        padding=0 if dim is None else -shape[dim] % degree,
        offload=asked.offload if math.prod(shape[asked.stacked :]) >= asked.min_size else None,
        gathered=asked.gathered,
        gather_wire=scaled or "" if dim is not None else "",
        reduce_wire=precision.wire or "" if dim is not None and narrower else "",
        hosts=hosts if dim is not None and narrower else 1,
    )


def _ruled(entry: Entry, rules: Mapping[str, Entry]) -> Entry:
    """A model's own annotation of a dim, as axes of the mesh."""
    if not any(n in rules for n in axes_of(entry)):
        return entry
    found = tuple(axis for n in axes_of(entry) for axis in axes_of(rules.get(n, n)))
    return found[0] if len(found) == 1 else found or None


def _kept(entry: Entry, degrees: Mapping[str, int]) -> Entry:
    """A model's own annotation for a dim, without axes that split nothing here.

    `fsdp`, which public models name, is also removed: the dim that it shards is decided here.
    """
    left = tuple(n for n in axes_of(entry) if degrees.get(n, 1) != 1 and n != FSDP)
    return entry if left == axes_of(entry) else left or None


def _check_given(
    path: str,
    shape: tuple[int, ...],
    named: tuple[Entry, ...],
    unknown: Sequence[str],
    given: tuple[Entry, ...],
    degrees: Mapping[str, int],
) -> None:
    """Raises for a model's own annotation whose split would be lost, or does not divide."""
    others = [a for a in (TENSOR, EXPERT) if degrees.get(a, 1) > 1]
    if unknown and others:  # the intended axis is unknown; without other axes there is nothing to split over
        raise AnnotationError(
            "The model's own sharding of a parameter cannot be kept.",
            where=f"{path}  out_sharding={named}",
            why=f"{', '.join(map(repr, unknown))}: the mesh has {', '.join(degrees)}.",
            do="map each name to an axis, or None: js.fully_shard(model, mesh=mesh, placement=js.ShardPlacement("
            f"axis_rules={dict.fromkeys(unknown[:-1]) | {unknown[-1]: others[0]}}))",
        )
    split = [n for entry in given for n in axes_of(entry)]
    if twice := next((n for n in split if split.count(n) > 1), None):
        last = next(name for name, to in zip(reversed(named), reversed(given), strict=True) if twice in axes_of(to))
        ruled = {n: to for name, to in zip(named, given, strict=True) for n in axes_of(name) if n not in degrees}
        raise AnnotationError(
            "Two dims of a parameter cannot be split over one axis.",
            where=f"{path}  shape {tuple(shape)}  out_sharding={named}",
            why=f"{twice!r} would be on {split.count(twice)} dims.",
            do="keep it for one of the names: js.fully_shard(model, mesh=mesh, placement=js.ShardPlacement("
            f"axis_rules={ruled | dict.fromkeys(axes_of(last))}))",
        )
    pieces = [math.prod(degrees[n] for n in axes_of(entry)) for entry in given]
    uneven = [d for d, (size, n) in enumerate(zip(shape, pieces, strict=False)) if size % n]
    if uneven:
        listed = "; ".join(f"dim {d} over {', '.join(axes_of(given[d]))} ({pieces[d]})" for d in uneven)
        raise AnnotationError(
            "A dim does not divide by the axis that the model's own sharding assigns to it.",
            where=f"{path}  shape {tuple(shape)}  out_sharding={given}",
            why=f"{listed}: every device must hold an equal part.",
            do="choose a degree that divides it, or omit the axis for this parameter.",
        )


IGNORED = "ignored by the annotation"
DEGREE_ONE = "the fsdp axis has degree 1"
SMALL = "smaller than min_size"
INDIVISIBLE = "no dim divides by"

PADDED_FROM_BYTES = 64 * 2**10  # smaller ones are not worth their own gather


def _choose(
    path: str, shape: tuple[int, ...], dtype: Any, free: list[int], degree: int, asked: ShardPlacement, pads: bool
) -> tuple[int | None, str]:
    """The dim to shard, among the free ones; or None, and the reason."""
    chosen = asked.shard_dim(path, shape) if callable(asked.shard_dim) else asked.shard_dim
    if chosen is not None and (callable(asked.shard_dim) or -len(shape) <= chosen < len(shape)):
        return _asked_dim(path, shape, chosen, free, degree, pads), ""
    if degree == 1:
        return None, DEGREE_ONE
    size = math.prod(shape[asked.stacked :])
    if size < asked.min_size:
        return None, f"{SMALL} ({size} < {asked.min_size} elements)"
    fits = [d for d in free if shape[d] % degree == 0 and shape[d]]
    if fits:
        return max(fits, key=lambda d: (shape[d], -d)), ""
    padded = _padded_dim(shape, free, degree) if pads else None
    if padded is None or math.prod(shape) * jnp.dtype(dtype).itemsize < PADDED_FROM_BYTES:
        return None, f"{INDIVISIBLE} {degree} (shape {tuple(shape)})"
    return padded, ""


def _padded_dim(shape: tuple[int, ...], free: list[int], degree: int) -> int | None:
    """The dim that needs the least padding; None if shards would be mostly padding."""
    found = min((d for d in free if shape[d]), key=lambda d: (-shape[d] % degree / shape[d], d), default=None)
    return None if found is None or shape[found] < degree else found


def _asked_dim(path: str, shape: tuple[int, ...], asked: int, free: list[int], degree: int, pads: bool) -> int:
    possible = [d for d in free if shape[d] % degree == 0 or pads]
    dim = asked + len(shape) if type(asked) is int and asked < 0 else asked
    if type(dim) is int and dim in possible:
        return dim
    even = f", and divide by {degree}, the number of pieces: it is in allow_replicated, and not padded."
    raise AnnotationError(
        f"A parameter cannot be sharded along dim {asked!r}.",
        where=f"{path}  shape {tuple(shape)}, possible dims {possible}",
        why="shard_dim must be or return a number; that dim must be free of other axes and of layers"
        + ("." if pads else even),
        do="omit shard_dim, or return None for this path: js.fully_shard(m, mesh=mesh,"
        " placement=js.ShardPlacement(shard_dim=lambda path, shape: None))",
    )


T = TypeVar("T")

_FIELDS = tuple(field.name for field in dataclasses.fields(ShardPlacement) if field.name != "axis_rules")

_BY_TRACE = "how arrays are split follows from the trace of the call"
GONE = {
    "outputs": "a call returns what one device returns",
    "batch_arg": _BY_TRACE,
    "replicated_args": _BY_TRACE,
    "batch_dim": f"{_BY_TRACE}; js.value_and_grad cuts microbatches along dim 0",
    "sync_batch_norm": "statistics are always those of the whole batch",
}
"""Settings that tracing made unnecessary, and the behaviour without them."""


def placement_of(
    placement: ShardPlacement, old: Mapping[str, Any], line: str = "js.fully_shard(..., placement={})"
) -> ShardPlacement:
    """A placement with the given fields added; `line` shows how to write it."""
    if unknown := [name for name in old if name not in (*_FIELDS, *GONE)]:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    if gone := [name for name in old if name in GONE]:
        reasons = "".join(f"\n  {name}: {GONE[name]}." for name in gone)
        _warn(f"{', '.join(gone)}: these settings of fully_shard no longer have an effect. Delete them:{reasons}")
    fields = {name: value for name, value in old.items() if name in _FIELDS}
    if not fields:
        return placement
    found = dataclasses.replace(placement, **fields)
    _warn(
        f"{', '.join(fields)}: these settings of fully_shard have moved. The new line:\n  {line.format(_text(found))}"
    )
    return found


_RESHARD: dict[str, bool | int] = {"replicate": True, "zero1": True, "zero3": True, "hsdp": True}
_RESHARD |= {"zero2": False, "hsdp_zero2": False, "hpz": 8}


def reshard_of(strategy: Any) -> bool | int:
    """The `reshard_after_forward` of each layer for a strategy, given by name or as a value."""
    if strategy not in _RESHARD and not hasattr(strategy, "reshard_after_forward"):
        raise AnnotationError(
            "The strategy is unknown.",
            where=f"fully_shard(strategy={strategy!r})",
            why=f"it must be one of {', '.join(_RESHARD)}.",
            do="js.fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # zero2, for each layer",
        )
    asked = getattr(strategy, "reshard_after_forward", _RESHARD.get(strategy))
    reshard = True if asked is None else asked
    line = f"js.fully_shard(layer, mesh=mesh, reshard_after_forward={reshard!r})"
    _warn(f"strategy: this setting of fully_shard has moved. The new line, for each layer:\n  {line}")
    return reshard


def batch_mean(x: T) -> T:
    """Returns `x`: the model sees the whole batch, so its mean is already global."""
    return _as_it_is("batch_mean", x)


def per_shard(x: T) -> T:
    """Returns `x`: the model sees the whole batch, not a data shard."""
    return _as_it_is("per_shard", x)


def _as_it_is(name: str, x: T) -> T:
    _warn(f"js.{name}(x) is deprecated, and returns x. Write x: the model sees the whole batch, as on one device.")
    return x


def _text(placement: ShardPlacement) -> str:
    given = {name: getattr(placement, name) for name in _FIELDS}
    given = {name: value for name, value in given.items() if value != getattr(ShardPlacement(), name)}
    texts = (f"{name}={'...' if callable(value) else repr(value)}" for name, value in given.items())
    return f"js.ShardPlacement({', '.join(texts)})"


def _warn(text: str) -> None:
    _compat.warn_user(f"{text}\n  The old form is an error in the next release.", FutureWarning)
