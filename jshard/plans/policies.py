"""Policies of a unit as frozen values, and the sharding strategies that are combinations of them."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jshard._errors import AnnotationError
from jshard._kernel_names import PRODUCT

Remat = str | Callable[..., Any]
"""`"none"`, `"dots"`, `"offload"`, `"full"`, or a policy from `jax.checkpoint_policies`."""

OFFLOADED = "offload"

# A gathered parameter must not be kept for backward under another name: these primitives only rename or recast.
_FREE = frozenset(
    "all_gather broadcast_in_dim convert_element_type copy expand_dims name pcast pvary reshape reshard"
    " sharding_constraint slice split squeeze transpose".split()
)


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
                "There is no such prefetch.",
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

    `gathered` is False for a unit whose call runs as written, in global view, on shards that stay where they are: of
    the rest only `group` is set then. `strategy` is of the root: what was chosen for its layers, and why. `group` is
    shared by modules that were given in one list; None for a module on its own.
    """

    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecision = MixedPrecision()
    remat: Remat = "none"
    prefetch: Prefetch | None = Prefetch(units=1)
    strategy: str = ""
    group: int | None = None
    gathered: bool = True
    fallback: str = "warn"


def checkpoint_policy(remat: Remat) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy for a unit whose gathered parameters are not kept; None keeps nothing."""
    if remat == "full":
        return None
    inner = {
        "none": jax.checkpoint_policies.everything_saveable,
        "dots": jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(PRODUCT)
        ),
        OFFLOADED: _products_offloaded,
    }.get(remat, remat)  # type: ignore[arg-type]

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        is_free = prim.name in _FREE and params.get("name") != PRODUCT and not _by_name(inner, prim, args, params)
        return False if is_free else inner(prim, *args, **params)

    return policy


def offloads(remat: Remat) -> bool:
    """Whether a policy keeps something in host memory; one of the user's may."""
    return remat == OFFLOADED or callable(remat)


_PRODUCTS_BY_NAME = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[PRODUCT], offload_src="device", offload_dst="pinned_host"
)
_DOTS_OFFLOADED = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _products_offloaded(prim: Any, *args: Any, **params: Any) -> Any:
    """Results of matrix products go to host memory; those of our kernels are known by their name."""
    return (_PRODUCTS_BY_NAME if prim.name == "name" else _DOTS_OFFLOADED)(prim, *args, **params)


def _by_name(inner: Callable[..., Any], prim: Any, args: tuple, params: dict[str, Any]) -> bool:
    """Whether a policy treats a named value by its name: one that keeps any would keep gathered parameters, too."""
    if prim.name != "name":
        return False
    return inner(prim, *args, **params) != inner(prim, *args, **params | {"name": "a name that nothing has"})


def check_remat(remat: Remat) -> None:
    """Raises for a remat policy that does not exist."""
    if callable(remat) or remat in ("none", "dots", OFFLOADED, "full"):
        return
    raise AnnotationError(
        "There is no such remat policy.",
        where=f"fully_shard(remat={remat!r})",
        why='it is "none" (keep activations), "dots" (keep the results of matrix products), "offload" (keep them'
        ' in host memory), "full" (recompute the unit), or a function from jax.checkpoint_policies.',
        do='js.fully_shard(block, mesh=mesh, remat="full")',
    )


# Sharding strategies as values: what each passes to the API, and what it costs by formula.


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a strategy holds on one device and sends in one step, in units of P.

    P is the bytes of all parameters. Parameters and gradients count in their own dtypes; the largest gathered unit and
    small replicated parameters come on top.

    Args:
        parameters: stored parameters, held between steps.
        gradients: gradients as the optimizer gets them.
        optimizer: optimizer state, in units of the state of the whole model.
        gathered: gathered copies kept from forward to backward.
        all_gather: bytes gathered, counted as whole arrays.
        reduce_scatter: likewise reduced and scattered.
        all_reduce: likewise all-reduced.
        wire: bytes that each device sends, by the ring algorithm.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    wire: float


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard a model, as keywords for `js.mesh`, `js.fully_shard` and `js.shard_optimizer`.

    Take one of `js.strategies`, and `dataclasses.replace` what should differ.

    Args:
        name: its key in `js.strategies`.
        summary: one line.
        replica: degree of the replica axis; -1 takes the rest.
        fsdp: degree of the sharding axis; -1 takes the rest.
        reshard_after_forward: as in `js.fully_shard`; None keeps only the root's parameters gathered.
        shard_replicated: as in `js.shard_optimizer`.

    Example:
        >>> strategy = dataclasses.replace(js.strategies["hsdp"], replica=2)
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

    def costs(self, *, replica: int = 1, fsdp: int = 1) -> Costs:
        """The formulas, for a mesh of these degrees.

        Args:
            replica: degree of the replica axis.
            fsdp: degree of the sharding axis.
        """
        held = 1 / fsdp
        kept, again = self._backward(fsdp)
        gathers = 1 if fsdp > 1 else 0
        all_gather = gathers * (1 + (again > 1))
        wire = gathers * (2 * _around(fsdp) + _around(again))
        all_reduce = held if replica > 1 else 0.0
        wire += 2 * all_reduce * _around(replica)
        if self.shard_replicated and replica > 1:  # the optimizer's new values, gathered over the replicas
            all_gather += held
            wire += held * _around(replica)
        return Costs(
            parameters=held,
            gradients=held,
            optimizer=held / (replica if self.shard_replicated else 1),
            gathered=gathers * kept,
            all_gather=all_gather,
            reduce_scatter=float(gathers),
            all_reduce=all_reduce,
            wire=wire,
        )

    def _backward(self, fsdp: int) -> tuple[float, int]:
        """The part of the gathered parameters that each device keeps for backward, and the group that gathers them."""
        reshard = self.reshard_after_forward
        if reshard is None or reshard is True:
            return 0.0, fsdp
        return (1.0, 1) if reshard is False else (1 / int(reshard), int(reshard))


def _around(size: int) -> float:
    """Part of an array that each of `size` devices sends once around a ring."""
    return (size - 1) / size


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
