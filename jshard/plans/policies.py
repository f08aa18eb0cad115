"""Policies of a unit as frozen values: dtypes, prefetch, and remat by name."""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import checkpoint_policies as jax_policies

from jshard._text import ATTENTION, CONTEXT, PRODUCT
from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, AnyMesh, degree

Remat = str | Callable[..., Any]
"""A name of `KEEPS`, `"names:NAME,..."`, or a policy from `jax.checkpoint_policies`."""

Fallback = Literal["warn", "error"]
NONE, FULL, OFFLOADED, ATTENTION_AGAIN, SELECTIVE = "none", "full", "offload", "attention", "torchtitan_selective"
_GATHERED_BY_SCALE = ("float8_e4m3fn", "float8_e5m2")


def is_real_float(dtype: Any) -> bool:
    """Returns whether a policy of dtypes applies to arrays of a dtype: real floats of 16 bits or more.

    A cast would drop the imaginary part of complex numbers, round integers and indices, and change floats of 8 bits or
    less without the scale that belongs to them. So these are stored, sent and computed with as they are. Whether an
    array has a gradient is another question: `jshard.engine.values.has_gradient`.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype to sum or compare values of a dtype in: of real floats at least float32, else its own.

    Unlike `jnp.promote_types`, also for floats of 8 bits or less, which have no common dtype with others.
    """
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a unit's computation and communication; the stored shard keeps its own dtype.

    They apply to real floats of 16 bits or more. Complex numbers, integers, booleans and floats of 8 bits are stored,
    gathered and computed with in their own dtype.

    Args:
        param: dtype of the gathered copy, and so of the all-gather; None keeps the stored dtype.
        reduce: dtype of the gradient's reduce-scatter and all-reduce; None uses the dtype of `param`.
        output: dtype to which the unit's outputs are cast; None leaves them.
        cast_inputs: cast the unit's inputs to `param` before the call.
        keep: path patterns of parameters that are gathered, and so computed with, in their stored dtype, such as
            `("norm/*", "router/*")`; matched against the end of the path from the unit.
        gather: an 8-bit dtype, "float8_e4m3fn" or "float8_e5m2", in which matrices are sent when they are gathered:
            each row of the sharded dim is divided by a scale (its largest value over the dtype's largest), which is
            sent along in float32. The copy used for computation has the dtype of `param`. Gradients ignore the
            rounding. Vectors, parameters in `keep` and those that are not sharded are not rounded.
        wire: a narrower dtype than that of `reduce`, such as "bfloat16", in which the parts of gradients are sent: by
            an all-to-all, summed on arrival in the dtype of `reduce`. Each part is rounded once. The sum over replicas,
            which involves only the shards, is unchanged.

    Raises:
        AnnotationError: a dtype is not of the kind that its field needs.

    Example:
        >>> half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", gather_dtype="float8_e4m3fn", wire_dtype="bfloat16")
        >>> half.gather, half.wire
        ('float8_e4m3fn', 'bfloat16')
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True
    keep: tuple[str, ...] = ()
    gather: str | None = None
    wire: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        for field in ("param", "reduce", "output", "gather", "wire"):
            if (value := getattr(self, field)) is not None:
                object.__setattr__(self, field, self._dtype(field, value))
        reduce = self.reduce or self.param
        if self.wire is not None and reduce is not None and jnp.dtype(self.wire).itemsize >= jnp.dtype(reduce).itemsize:
            raise AnnotationError(
                "The wire dtype of gradients is not narrower than their reduce dtype.",
                where=f"MixedPrecision(reduce_dtype={self.reduce!r}, wire_dtype={self.wire!r})",
                why=f"they are summed in {reduce}: an exchange would send as much as a reduce-scatter.",
                do='js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", wire_dtype="bfloat16")',
            )

    def _dtype(self, field: str, value: Any) -> str:
        """The name of a dtype that is valid for a field."""
        try:
            dtype = jnp.dtype(value)
        except TypeError:
            dtype = jnp.dtype(bool)
        bits = 8 * dtype.itemsize if jnp.issubdtype(dtype, jnp.floating) else 0
        if dtype.name in _GATHERED_BY_SCALE if field == "gather" else bits >= 16:
            return dtype.name
        if field == "gather":
            raise AnnotationError(
                "Parameters cannot be gathered with scales in this dtype.",
                where=f"MixedPrecision(gather_dtype={value!r})",
                why=f"it must be one of {', '.join(_GATHERED_BY_SCALE)}; for a gather in 16 bits use `param`.",
                do='js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", gather_dtype="float8_e4m3fn")',
            )
        in_8_bits = f', gather="{dtype.name}"' if field == "param" and dtype.name in _GATHERED_BY_SCALE else ""
        raise AnnotationError(
            "A mixed-precision dtype is not floating point, or too narrow for a plain cast.",
            where=f"MixedPrecision({field}={value!r})",
            why="it must be a floating dtype of 16 bits or more: a cast has no scale, which fp8 needs.",
            do=f'js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"{in_8_bits})',
        )

    def keeps(self, path: str) -> bool:
        """Whether the parameter at a path stays in its stored dtype."""
        return any(fnmatch.fnmatch(f"/{path}", f"*/{pattern}") for pattern in self.keep)


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """How far ahead of its use a unit is gathered: a number of units, or as many as fit a budget on one device."""

    units: int | None = None
    budget_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.units}" if self.units is not None else f"{self.budget_bytes} bytes"

    @property
    def is_on_demand(self) -> bool:
        """Whether a unit is gathered when it is needed, and none ahead of its use."""
        return self.units == 0

    def allows(self, *, distance: int, in_flight_bytes: int) -> bool:
        """Returns whether a unit may be gathered now.

        Args:
            distance: how many units run before it, counted from the one that runs now.
            in_flight_bytes: bytes of all units that are gathered ahead of their use, this one included.
        """
        if self.budget_bytes is not None:
            return in_flight_bytes <= self.budget_bytes
        return distance <= (self.units or 0)

    @classmethod
    def parse(cls, value: int | str | None) -> "Prefetch | None":
        """Reads `1`, `"512MiB"` or None, which leaves the order to the compiler."""
        if value is None:
            return None
        if type(value) is int and value >= 0:
            return cls(units=value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)", value) if isinstance(value, str) else None
        if found is None or found.group(2) not in _BYTES:
            raise AnnotationError(
                "The prefetch setting is not valid.",
                where=f"prefetch={value!r}",
                why="it must be a number of units (0: gather a unit when it is needed), a budget in bytes such as"
                ' "512MiB", or None (the compiler chooses).',
                do="js.fully_shard(block, mesh=mesh, prefetch=1)",
            )
        return cls(budget_bytes=int(float(found.group(1)) * _BYTES[found.group(2)]))


_BYTES = {"B": 1} | {
    f"{k}{end}": base ** (i + 1) for i, k in enumerate("KMGT") for end, base in (("iB", 1024), ("B", 1000))
}


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """The settings of one unit. `group` is shared by modules that were given in one list."""

    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecision = MixedPrecision()
    remat: Remat = "none"
    prefetch: Prefetch | None = Prefetch(units=1)
    group: int | None = None
    fallback: Fallback = "warn"

    def changed(self, mesh: AnyMesh, **settings: Any) -> "UnitPolicy":
        """The policy with other settings, each in the form of `js.fully_shard`, and checked."""
        if "prefetch" in settings:
            settings["prefetch"] = Prefetch.parse(settings["prefetch"])
        if "mixed_precision" in settings:
            settings["mixed_precision"] = settings["mixed_precision"] or MixedPrecision()
        made = dataclasses.replace(self, **settings)
        check_remat(made.remat)
        _check_reshard(made.reshard_after_forward, degree(mesh, FSDP))
        check_setting(
            isinstance(made.mixed_precision, MixedPrecision),
            f"fully_shard(mixed_precision={made.mixed_precision!r})",
            "a js.MixedPrecision",
            'js.fully_shard(block, mesh=mesh, mixed_precision=js.MixedPrecision(param_dtype="bfloat16"))',
        )
        check_setting(
            made.fallback in get_args(Fallback),
            f"fully_shard(fallback={made.fallback!r})",
            "'warn' or 'error'",
            'js.fully_shard(model, mesh=mesh, fallback="error")',
        )
        return made


def check_setting(good: bool, where: str, wanted: str, do: str) -> None:
    """Raises unless a setting, given as `where`, is valid; `wanted` describes valid values; `do` is a correct line."""
    if not good:
        raise AnnotationError("The value of a setting is not valid.", where=where, why=f"it must be {wanted}.", do=do)


def _check_reshard(value: bool | int | None, size: int) -> None:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value >= 1 and size % value == 0):
        return
    raise AnnotationError(
        "The parameters cannot be resharded to this group size after forward.",
        where=f"fully_shard(reshard_after_forward={value!r}), fsdp={size}",
        why=f"it must be True, False, or a number that divides the degree of the fsdp axis, {size}.",
        do="js.fully_shard(block, mesh=mesh, reshard_after_forward=True)",
    )


# Remat policies by name: which values of a unit's forward are kept for backward, and which are recomputed.

_QKV = "query_proj", "key_proj", "value_proj", "qkv_proj"
_PROJECTIONS = (*_QKV, "out_proj")
_PRODUCTS = (*_PROJECTIONS, "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")

NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "minimal": _PRODUCTS,
        "minimal_flash": (*_PRODUCTS, CONTEXT),
        "minimal_with_context": (*_PRODUCTS, CONTEXT),
        "save_dot_with_context_except_mlp": (*_PROJECTIONS, CONTEXT),
        "save_dot_except_mlpwi": (*_PROJECTIONS, "mlpwo"),
        "save_dot_except_mlp": _PROJECTIONS,
        "save_qkv_proj": _QKV,
        "save_out_proj": ("out_proj",),
    }
)
"""MaxText's policies, with the names that each keeps."""

KEEPS: Mapping[str, str] = MappingProxyType(
    {
        NONE: "everything",
        "dots": "the results of matrix products, and of cuDNN attention",
        "dots_with_no_batch_dims": "the results of products with weights",
        ATTENTION_AGAIN: "everything but what js.kernels.attention computes",
        SELECTIVE: "every second product with weights, and the result of attention",
        OFFLOADED: "the results of products with weights, in host memory",
        FULL: "nothing",
    }
)
"""Descriptions of what the other policies keep."""

KEPT_PRODUCT = "jshard kept product"
"""The name of a product that `SELECTIVE` keeps: see `jshard.engine.program.checkpointed`."""

# A gathered parameter must not be kept for backward under another name: these primitives only rename or recast.
_FREE = frozenset(
    "all_gather broadcast_in_dim convert_element_type copy expand_dims name pcast pvary reshape reshard"
    " sharding_constraint slice split squeeze transpose".split()
)


def check_remat(remat: Remat) -> None:
    """Raises for an unknown remat policy."""
    if callable(remat) or (isinstance(remat, str) and (remat in KEEPS or remat in NAMED or kept_names(remat))):
        return
    keeps = "; ".join(f'"{name}" keeps {what}' for name, what in KEEPS.items())
    raise AnnotationError(
        "The remat policy is unknown.",
        where=f"fully_shard(remat={remat!r})",
        why=f"{keeps}. Of MaxText: {', '.join(NAMED)}. "
        '"names:NAME,..." keeps the values with these names from jax.ad_checkpoint.checkpoint_name.'
        " A function from jax.checkpoint_policies also works.",
        do='js.fully_shard(block, mesh=mesh, remat="full")',
    )


def kept_names(remat: Remat) -> tuple[str, ...]:
    """The names that a policy keeps; empty for a policy that does not use names."""
    if not isinstance(remat, str):
        return ()
    head, _, rest = remat.partition(":")
    return tuple(filter(None, map(str.strip, rest.split(",")))) if head == "names" else NAMED.get(remat, ())


@functools.cache  # one object for all units of a policy
def checkpoint_policy(remat: Remat) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy for a unit whose gathered parameters are not kept; None keeps nothing."""
    if remat == FULL:
        return None
    inner = _inner(remat)

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        is_free = prim.name in _FREE and params.get("name") != PRODUCT and not _by_name(inner, prim, args, params)
        return False if is_free else inner(prim, *args, **params)

    return policy


def _inner(remat: Remat) -> Callable[..., Any]:
    if callable(remat):
        return remat
    by_name = jax_policies.save_only_these_names
    match remat:
        case "none" | "attention":
            return jax_policies.everything_saveable
        case "dots":
            kept = _with_context(by_name(PRODUCT, CONTEXT))
            return jax_policies.save_from_both_policies(jax_policies.dots_saveable, kept)
        case "dots_with_no_batch_dims":
            dots = jax_policies.dots_with_no_batch_dims_saveable
            return jax_policies.save_from_both_policies(dots, by_name(PRODUCT))
        case "torchtitan_selective":
            return _with_context(by_name(KEPT_PRODUCT, CONTEXT))
        case "offload":
            return _products_offloaded
    names = kept_names(remat)
    return _with_context(by_name(*names)) if CONTEXT in names else by_name(*names)


def _with_context(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy that also keeps the results of cuDNN attention, so that backward does not run it again."""
    return lambda prim, *args, **params: prim.name == ATTENTION or policy(prim, *args, **params)


_PRODUCTS_BY_NAME = jax_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[PRODUCT], offload_src="device", offload_dst="pinned_host"
)
_DOTS_OFFLOADED = jax_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _products_offloaded(prim: Any, *args: Any, **params: Any) -> Any:
    """Offloads results of matrix products to host memory; those of our kernels are recognised by name."""
    return (_PRODUCTS_BY_NAME if prim.name == "name" else _DOTS_OFFLOADED)(prim, *args, **params)


def _by_name(inner: Callable[..., Any], prim: Any, args: tuple, params: dict[str, Any]) -> bool:
    """Whether a policy uses a value's name: a policy that keeps any value would also keep gathered parameters."""
    if prim.name != "name":
        return False
    return inner(prim, *args, **params) != inner(prim, *args, **params | {"name": "a name that nothing has"})
