"""Policies of a unit as frozen values: dtypes, prefetch, and all settings of a unit together."""

import dataclasses
import fnmatch
import re
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, AnyMesh, degree
from jshard.plans.remat import AUTO, Remat, check_remat
from jshard.plans.stages import DEFAULT_STAGES, Stages
from jshard.plans.wires import registered_names, wire_named

Fallback = Literal["warn", "error"]


def is_real_float(dtype: DTypeLike) -> bool:
    """Returns whether a policy of dtypes applies to arrays of a dtype: real floats of 16 bits or more.

    A cast would drop the imaginary part of complex numbers, round integers and indices, and change floats of 8 bits or
    less without the scale that belongs to them. So these are stored, sent and computed with as they are. Whether an
    array has a gradient is another question: `jshard.engine.values.has_gradient`.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2


def wide_dtype(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype to sum or compare values of a dtype in: of real floats at least float32, else its own.

    Unlike `jnp.promote_types`, also for floats of 8 bits or less, which have no common dtype with others.
    """
    # Complex numbers are at least 64 bits wide, with parts in float32.
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a unit's computation and communication; the stored shard keeps its own dtype.

    They apply to real floats of 16 bits or more. Complex numbers, integers, booleans and floats of 8 bits are stored,
    gathered and computed with in their own dtype.

    Args:
        param_dtype: of the gathered copy, and so of the all-gather; None keeps the stored dtype.
        reduce_dtype: of the gradient's reduce-scatter and all-reduce; None uses `param_dtype`.
        output_dtype: to which the unit's outputs are cast; None leaves them.
        gather_dtype: the wire over which matrices are sent when they are gathered: an 8-bit dtype, "float8_e4m3fn" or
            "float8_e5m2", or a name of `js.register_wire`. In 8 bits each row of the sharded dim is divided by a scale
            (its largest value over the dtype's largest), which is sent along in float32. The copy used for computation
            has the `param_dtype`. Gradients ignore the rounding. Vectors, parameters in `keep` and those that are not
            sharded are not rounded.
        wire_dtype: a narrower dtype than `reduce_dtype`, such as "bfloat16", in which the parts of gradients are sent:
            by an all-to-all, summed on arrival in `reduce_dtype`. Each part is rounded once. Or a wire, as those of
            `gather_dtype`, for the gradients of the matrices. The sum over replicas, which involves only the shards, is
            unchanged.
        cast_inputs: cast the unit's inputs to `param_dtype` before the call.
        keep: path patterns of parameters that are gathered, and so computed with, in their stored dtype, such as
            `("norm/*", "router/*")`; matched against the end of the path from the unit.

    Raises:
        AnnotationError: a dtype is not of the kind that its field needs.

    Examples:
        >>> half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
        >>> model = js.fully_shard(MLP(nnx.Rngs(0)), mesh=mesh, mixed_precision=half)
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    gather_dtype: str | None = None
    wire_dtype: str | None = None
    cast_inputs: bool = True
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Hashable: policies are parts of cache keys.
        patterns = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        object.__setattr__(self, "keep", patterns)
        for field in _DTYPE_FIELDS:
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _checked_dtype(field, value))
        self._check_wire_is_narrower()

    def _check_wire_is_narrower(self) -> None:
        reduced = self.reduce_dtype or self.param_dtype
        # Without either, the sum is in the stored dtype, which differs by parameter: `_dtypes` then decides for each.
        if self.wire_dtype is None or reduced is None:
            return
        if self.wire_dtype in registered_names():
            return  # what it packs has no one dtype: a plan shows its bytes
        if jnp.dtype(self.wire_dtype).itemsize >= jnp.dtype(reduced).itemsize:
            raise AnnotationError(
                "The wire dtype of gradients is not narrower than their reduce dtype.",
                where=f"MixedPrecision(reduce_dtype={self.reduce_dtype!r}, wire_dtype={self.wire_dtype!r})",
                why=f"they are summed in {reduced}: an exchange would send as much as a reduce-scatter.",
                do='js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", wire_dtype="bfloat16")',
            )

    def keeps(self, path: str) -> bool:
        """Returns whether the parameter at a path stays in its stored dtype."""
        # With a slash before both, a pattern begins with a whole key: `norm/*` does not match `prenorm/scale`.
        return any(fnmatch.fnmatch(f"/{path}", f"*/{pattern}") for pattern in self.keep)


_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "gather_dtype", "wire_dtype")
_FIELDS_OF_WIRES = ("gather_dtype", "wire_dtype")


def _checked_dtype(field: str, value: DTypeLike) -> str:
    """Returns the name of a dtype or wire that is valid for a field; raises AnnotationError for others."""
    dtype = _dtype_of(value)
    if field in _FIELDS_OF_WIRES:
        wire = _wire_of(value, dtype)
        if wire is not None:
            return wire
    if field == "gather_dtype":
        raise _no_wire_to_gather(value)
    if dtype is not None and is_real_float(dtype):
        return dtype.name
    raise _too_narrow(field, value, dtype)


def _dtype_of(value: DTypeLike) -> np.dtype | None:
    """Returns the dtype that a value stands for; None if it stands for none."""
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


def _wire_of(value: DTypeLike, dtype: np.dtype | None) -> str | None:
    """Returns the name of the wire that a value stands for; None for a dtype that is no wire.

    Args:
        value: as the user has given it: the name of a wire, or a dtype.
        dtype: the dtype that it stands for, if it stands for one.
    """
    wires = registered_names()
    # First by name: a wire of the user's own may be called as a dtype is.
    if isinstance(value, str) and value in wires:
        return value
    if dtype is not None:
        return dtype.name if dtype.name in wires else None
    if isinstance(value, str):
        return wire_named(value).name  # raises: there is none
    return None


def _no_wire_to_gather(value: DTypeLike) -> AnnotationError:
    return AnnotationError(
        "Parameters cannot be gathered in this dtype, and there is no wire of this name.",
        where=f"MixedPrecision(gather_dtype={value!r})",
        why=f"it must be a registered wire: {', '.join(registered_names())}; for a gather in 16 bits use"
        " `param_dtype`.",
        do='js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", gather_dtype="float8_e4m3fn")',
    )


def _too_narrow(field: str, value: DTypeLike, dtype: np.dtype | None) -> AnnotationError:
    """Returns the error for a dtype that no plain cast can be to, or for what is no dtype."""
    wires = registered_names()
    in_8_bits = ""
    if field == "param_dtype" and dtype is not None and dtype.name in wires:
        in_8_bits = f', gather_dtype="{dtype.name}"'
    or_wire = ""
    if field == "wire_dtype":
        or_wire = f" Or a registered wire: {', '.join(wires)}."
    return AnnotationError(
        "A mixed-precision dtype is not floating point, or too narrow for a plain cast.",
        where=f"MixedPrecision({field}={value!r})",
        why="it must be a floating dtype of 16 bits or more: a cast has no scale, which fp8 needs." + or_wire,
        do=f'js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"{in_8_bits})',
    )


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
        # A unit's distance is 1 if it runs next.
        return distance <= (self.units or 0)

    @classmethod
    def parse(cls, value: int | str) -> "Prefetch | None":
        """Reads `1`, `"512MiB"` or `"compiler"`; None stands for the last, which leaves the order to the compiler."""
        if value == COMPILER:
            return None
        # True is an int, too, but no number of units.
        if type(value) is int and value >= 0:
            return cls(units=value)
        budget = re.fullmatch(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[KMGT]?i?B)", str(value))
        if not isinstance(value, str) or budget is None or budget["unit"] not in _BYTES:
            raise AnnotationError(
                "The prefetch setting is not valid.",
                where=f"prefetch={value!r}",
                why="it must be a number of units (0: gather a unit when it is needed), a budget in bytes such as"
                f' "512MiB", or "{COMPILER}", which leaves the order to it.',
                do="js.fully_shard(block, mesh=mesh, prefetch=1)",
            )
        return cls(budget_bytes=int(float(budget["number"]) * _BYTES[budget["unit"]]))


COMPILER = "compiler"
"""The setting of `prefetch` that leaves the order of gathers to the compiler, without a bound."""


def _byte_units() -> dict[str, int]:
    """Returns the bytes of each unit: B, and kB to TB by powers of 1000, KiB to TiB by powers of 1024."""
    units = {"B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[f"{letter}iB"] = 1024**power
        units[f"{letter}B"] = 1000**power
    return units


_BYTES = _byte_units()


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """The settings of one unit. `group` is shared by modules that were given in one list."""

    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecision = MixedPrecision()
    remat: Remat = AUTO
    prefetch: Prefetch | None = Prefetch(units=1)  # None: the compiler's order
    group: int | None = None
    fallback: Fallback = "warn"
    stages: Stages = DEFAULT_STAGES  # of the loops of a root, on a mesh with `pipe`

    def changed(self, mesh: AnyMesh, **settings: Any) -> "UnitPolicy":
        """Returns the policy with other settings, each in the form of `js.fully_shard`; raises if one is not valid."""
        if "prefetch" in settings:
            settings["prefetch"] = Prefetch.parse(settings["prefetch"])
        if "mixed_precision" in settings:
            # The user's None is the default policy, which changes no dtype.
            settings["mixed_precision"] = settings["mixed_precision"] or MixedPrecision()
        policy = dataclasses.replace(self, **settings)
        check_remat(policy.remat)
        _check_reshard(policy.reshard_after_forward, degree(mesh, FSDP))
        check_setting(
            isinstance(policy.mixed_precision, MixedPrecision),
            f"fully_shard(mixed_precision={policy.mixed_precision!r})",
            "a js.MixedPrecision",
            'js.fully_shard(block, mesh=mesh, mixed_precision=js.MixedPrecision(param_dtype="bfloat16"))',
        )
        check_setting(
            policy.fallback in get_args(Fallback),
            f"fully_shard(fallback={policy.fallback!r})",
            "'warn' or 'error'",
            'js.fully_shard(model, mesh=mesh, fallback="error")',
        )
        check_setting(
            isinstance(policy.stages, Stages),
            f"revise(stages={policy.stages!r})",
            "a js.parallel.Stages",
            "js.parallel.stages(model, microbatches=16)",
        )
        return policy


def check_setting(is_valid: bool, where: str, valid_values: str, do: str) -> None:
    """Raises unless a setting is valid.

    Args:
        is_valid: whether it is.
        where: the setting, with its value.
        valid_values: a description of these.
        do: a correct line.
    """
    if not is_valid:
        raise AnnotationError(
            "The value of a setting is not valid.", where=where, why=f"it must be {valid_values}.", do=do
        )


def _check_reshard(value: bool | int | None, fsdp_degree: int) -> None:
    """Raises unless `reshard_after_forward` is a flag, or the size of groups that the mesh can form."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int) and value >= 1 and fsdp_degree % value == 0:
        return
    raise AnnotationError(
        "The parameters cannot be resharded to this group size after forward.",
        where=f"fully_shard(reshard_after_forward={value!r}), fsdp={fsdp_degree}",
        why=f"it must be True, False, or a number that divides the degree of the fsdp axis, {fsdp_degree}.",
        do="js.fully_shard(block, mesh=mesh, reshard_after_forward=True)",
    )
