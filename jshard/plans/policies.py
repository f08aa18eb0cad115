"""Policies of a unit as frozen values, and the sharding strategies that are combinations of them."""

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, AnyMesh, degree
from jshard.plans.remat import Remat, check_remat


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a unit's computation and communication; the stored shard keeps its own dtype.

    Args:
        param: dtype of the gathered copy, and so of the all-gather; None keeps the stored dtype.
        reduce: dtype of the gradient's reduce-scatter and all-reduce; None takes the dtype of `param`.
        output: dtype to which the unit's floating outputs are cast; None leaves them.
        cast_inputs: cast the unit's floating inputs to `param` before the call.
        keep: path patterns of parameters that are gathered, and so computed with, in their stored dtype, such as
            `("norm/*", "router/*")`; held against the end of the path from the unit.

    Example:
        >>> js.MixedPrecision(param="bfloat16", reduce="float32")
        MixedPrecision(param='bfloat16', reduce='float32', output=None, cast_inputs=True, keep=())
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        for field in ("param", "reduce", "output"):
            value = getattr(self, field)
            if value is None:
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise AnnotationError(
                    "A mixed-precision dtype is not floating point.",
                    where=f"MixedPrecision({field}={value!r})",
                    why=f"{value!r} is not the name of a floating dtype.",
                    do='js.MixedPrecision(param="bfloat16", reduce="float32")',
                )
            if dtype.itemsize < 2:
                raise AnnotationError(
                    "A mixed-precision dtype has too few bits for a plain cast.",
                    where=f"MixedPrecision({field}={value!r})",
                    why=f"a cast has no scale, and {dtype.name} ends at {float(jnp.finfo(dtype).max):g}.",
                    do='js.MixedPrecision(param="bfloat16", reduce="float32"), and products in fp8 by Flax or qwix:'
                    " docs/numerics.md.",
                )
            object.__setattr__(self, field, dtype.name)

    def keeps(self, path: str) -> bool:
        """Whether the parameter at a path stays in its stored dtype."""
        return any(fnmatch.fnmatch(f"/{path}", f"*/{pattern}") for pattern in self.keep)


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """How far ahead of its use a unit is gathered: so many units, or as many as fit a budget.

    What counts is what is gathered on one device and not yet used, besides the unit that computes.
    """

    units: int | None = None
    budget_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.units}" if self.units is not None else f"{self.budget_bytes} bytes"

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
                "The prefetch cannot work.",
                where=f"prefetch={value!r}",
                why="it is a number of units (0: gather a unit when it is needed), a budget in bytes such as"
                ' "512MiB", or None (the compiler chooses).',
                do="js.fully_shard(block, mesh=mesh, prefetch=1)",
            )
        return cls(budget_bytes=int(float(found.group(1)) * _BYTES[found.group(2)]))


_BYTES = {"B": 1} | {
    f"{k}{end}": base ** (i + 1) for i, k in enumerate("KMGT") for end, base in (("iB", 1024), ("B", 1000))
}


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """The settings of one unit.

    `strategy` is of the root: what was chosen for its layers, and why. `group` is shared by modules that were given in
    one list; None for a module on its own.
    """

    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecision = MixedPrecision()
    remat: Remat = "none"
    prefetch: Prefetch | None = Prefetch(units=1)
    strategy: str = ""
    group: int | None = None
    fallback: str = "warn"

    def changed(self, mesh: AnyMesh, **settings: Any) -> "UnitPolicy":
        """The policy with other settings, each as `js.fully_shard` takes it.

        Raises:
            AnnotationError: a setting has no such value.
        """
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
            'js.fully_shard(block, mesh=mesh, mixed_precision=js.MixedPrecision(param="bfloat16"))',
        )
        check_setting(
            made.fallback in ("warn", "error"),
            f"fully_shard(fallback={made.fallback!r})",
            "'warn' or 'error'",
            'js.fully_shard(model, mesh=mesh, fallback="error")',
        )
        return made


def check_setting(good: bool, where: str, wanted: str, do: str) -> None:
    """Raises for a setting of another type, or another value, than the annotation takes.

    Args:
        good: whether it is one.
        where: how it was given: `fully_shard(stacked=-1)`.
        wanted: what it is instead.
        do: the line that is right.
    """
    if not good:
        raise AnnotationError("The value of a setting is not allowed.", where=where, why=f"it is {wanted}.", do=do)


def _check_reshard(value: bool | int | None, size: int) -> None:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value >= 1 and size % value == 0):
        return
    raise AnnotationError(
        "The parameters cannot be resharded to such a group after forward.",
        where=f"fully_shard(reshard_after_forward={value!r}), fsdp={size}",
        why=f"it is True, False, or a number that divides the degree of the fsdp axis, {size}.",
        do="js.fully_shard(block, mesh=mesh, reshard_after_forward=True)",
    )


# Sharding strategies as values: what each passes to the API.


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard a model, as keywords for `js.mesh`, `js.fully_shard` and `js.shard_optimizer`.

    Take one of `strategies`, and `dataclasses.replace` what should differ.

    Args:
        name: its key in `strategies`.
        summary: one line.
        replica: degree of the replica axis; -1 takes the rest.
        fsdp: degree of the sharding axis; -1 takes the rest.
        reshard_after_forward: as in `js.fully_shard`; None keeps only the root's parameters gathered.
        shard_replicated: as in `js.shard_optimizer`.

    Example:
        >>> from jshard.plans.policies import strategies
        >>> strategy = dataclasses.replace(strategies["hsdp"], replica=2)
        >>> mesh = js.mesh(**strategy.mesh)
        >>> model = js.fully_shard(model, units=Block, mesh=mesh, **strategy.annotation)
    """

    name: str
    summary: str
    replica: int = 1
    fsdp: int = -1
    reshard_after_forward: bool | int | None = None
    shard_replicated: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Keywords for `js.mesh`."""
        return {"replica": self.replica, "fsdp": self.fsdp}

    @property
    def annotation(self) -> dict[str, Any]:
        """Keywords for `js.fully_shard`."""
        return {"reshard_after_forward": self.reshard_after_forward}

    @property
    def optimizer(self) -> dict[str, Any]:
        """Keywords for `js.shard_optimizer`."""
        return {"shard_replicated": self.shard_replicated}


_ALL = (
    Strategy("replicate", "every device holds the model; gradients are all-reduced (DDP)", replica=-1, fsdp=1),
    Strategy("zero1", "replicate, with sharded optimizer state", replica=-1, fsdp=1, shard_replicated=True),
    Strategy("zero2", "sharded; gathered once, kept until backward", reshard_after_forward=False),
    Strategy("zero3", "sharded; gathered for forward and again for backward (FSDP)"),
    Strategy("hsdp", "zero3 within a group of devices, replicated across groups", replica=2),
    Strategy("hsdp_zero2", "zero2 within a group, replicated across groups", replica=2, reshard_after_forward=False),
    Strategy("hpz", "zero3, but backward gathers from neighbours (ZeRO++ hpZ)", reshard_after_forward=8),
)

strategies: Mapping[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in _ALL})
"""The strategies by name."""
