"""What code from before says: settings that moved into `js.ShardPlacement`, and settings and functions that are gone.

Old code runs for one more release, with a warning that says what to write instead.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from jshard.errors import AnnotationError
from jshard.plans.mesh import FSDP, REPLICA, AnyMesh, degree
from jshard.plans.placement import OPTIMIZER, ShardDim, ShardPlacement
from jshard.plans.policies import Strategy, strategies

T = TypeVar("T")

_FIELDS = tuple(field.name for field in dataclasses.fields(ShardPlacement))
OF_A_UNIT = ("shard_dim", "min_size", "offload", "gathered")
"""The fields of a placement that a unit of a Linen model sets for itself."""

_BY_TRACE = "how arrays are split follows from the trace of the call"
GONE = {
    "outputs": "a call returns what one device returns",
    "batch_arg": _BY_TRACE,
    "replicated_args": _BY_TRACE,
    "batch_dim": f"{_BY_TRACE}; js.value_and_grad cuts microbatches along dim 0",
    "sync_batch_norm": "statistics are always those of the whole batch",
}
"""Settings that a trace has made needless, and what holds without them."""


class MovedSettings(TypedDict, total=False):
    """Arguments of `js.fully_shard` from before."""

    shard_dim: ShardDim
    stacked: int
    ignored: Any
    allow_replicated: Sequence[str]
    min_size: int
    offload: str | None
    gathered: bool
    strategy: str | Strategy | None
    outputs: str | None
    batch_arg: str | Sequence[str] | None
    replicated_args: Sequence[str]
    batch_dim: int
    sync_batch_norm: bool


def placement_of(placement: ShardPlacement | None, moved: Mapping[str, Any]) -> ShardPlacement:
    """The placement that was asked for; what came as arguments of `fully_shard` itself counts, with a warning.

    Args:
        placement: as it was given.
        moved: the arguments of `fully_shard` that it does not name.
    """
    found = check_placement(placement)
    if unknown := [name for name in moved if name not in (*_FIELDS, *GONE, "strategy")]:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    if gone := [name for name in moved if name in GONE]:
        reasons = "".join(f"\n  {name}: {GONE[name]}." for name in gone)
        warnings.warn(
            f"{', '.join(gone)}: these settings of fully_shard are gone. They change nothing, and are an error in the"
            f" next release. Delete them:{reasons}",
            FutureWarning,
            stacklevel=3,
        )
    fields = {name: value for name, value in moved.items() if name in _FIELDS}
    if fields:
        found = dataclasses.replace(found, **fields)
        warnings.warn(
            f"{', '.join(fields)}: these settings of fully_shard have moved, and go with the next release. The new"
            f" line:\n  js.fully_shard(..., placement={_line(found)})",
            FutureWarning,
            stacklevel=3,
        )
    return found


def layers_of(strategy: Any, mesh: AnyMesh) -> tuple[dict[str, Any], str] | None:
    """The settings that a strategy gives the layers, and its name; with a warning that has them as arguments.

    Args:
        strategy: as `fully_shard` was given it; None gives None.
        mesh: of the root.

    Raises:
        AnnotationError: there is no such strategy, or it is for another mesh.
    """
    if strategy is None:
        return None
    found = _strategy(strategy)
    if (found.fsdp == 1 and degree(mesh, FSDP) > 1) or (found.replica > 1 and degree(mesh, REPLICA) == 1):
        given = ", ".join(f"{axis}={degree(mesh, axis)}" for axis in found.mesh)
        raise AnnotationError(
            "The strategy is for another mesh.",
            where=f"fully_shard(strategy={found.name!r}), mesh {given}",
            why=f"{found.summary}: the mesh says where the parameters are, and a strategy does not change it.",
            do=f"mesh=js.mesh({', '.join(f'{axis}={size}' for axis, size in found.mesh.items())})",
        )
    reshard = True if found.reshard_after_forward is None else found.reshard_after_forward
    warnings.warn(
        "strategy: this setting of fully_shard goes with the next release. The new line, for each layer:\n"
        f"  js.fully_shard(layer, mesh=mesh, reshard_after_forward={reshard!r})",
        FutureWarning,
        stacklevel=3,
    )
    return {"reshard_after_forward": reshard}, found.name


def refuse_strategy(strategy: Any) -> None:
    """Raises if a strategy was named for a Linen model, whose layers are only known when it is called."""
    if strategy is not None:
        raise AnnotationError(
            "A strategy is for nnx models only.",
            where=f"fully_shard(strategy={strategy!r})",
            why="the layers of a Linen model are not known before it is called.",
            do="js.fully_shard(model, mesh=mesh, units=Block, reshard_after_forward=False)  # zero2",
        )


def _strategy(strategy: Any) -> Strategy:
    if isinstance(strategy, Strategy) or strategy in strategies:
        return strategies[strategy] if isinstance(strategy, str) else strategy
    if strategy == "auto":
        raise AnnotationError(
            "fully_shard does not choose a strategy.",
            where='fully_shard(strategy="auto")',
            why="it chose by a file in the home folder and by the memory of the devices: the same script could shard"
            " differently on two machines.",
            do="jshard train MODEL --auto  # measures here; or jshard plan MODEL --topology h100:64x8 --auto\n"
            "js.fully_shard(model, mesh=mesh, units=Block, reshard_after_forward=False)  # as either prints",
        )
    raise AnnotationError(
        "The strategy is not known.",
        where=f"fully_shard(strategy={strategy!r})",
        why=f"it is one of {', '.join(strategies)}, or a value of jshard.plans.policies.strategies.",
        do="js.fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # zero2, for each layer",
    )


def units_of(units: Any, common: ShardPlacement) -> Any:
    """The choices of units; where the settings of one name fields of a placement, as one value.

    Args:
        units: as `fully_shard` was given them.
        common: the placement of the call, which holds where a field is not named.
    """
    if not isinstance(units, Mapping):
        return units
    return {choice: _settings(settings, common) for choice, settings in units.items()}


def _settings(settings: Mapping[str, Any], common: ShardPlacement) -> Mapping[str, Any]:
    fields = {name: value for name, value in settings.items() if name in OF_A_UNIT}
    if not fields:
        return settings
    inherited = {name: getattr(common, name) for name in OF_A_UNIT}
    if not fields.get("gathered", True):  # its parameters are used where they are
        inherited["offload"] = common.offload and OPTIMIZER
    placement = settings.get("placement") or ShardPlacement(**inherited)
    placement = dataclasses.replace(placement, **fields)
    warnings.warn(
        f"{', '.join(fields)}: these settings of fully_shard have moved, and go with the next release. The new settings"
        f' of the unit:\n  {{"placement": {_line(placement)}}}',
        FutureWarning,
        stacklevel=5,
    )
    return {name: value for name, value in settings.items() if name not in fields} | {"placement": placement}


def check_placement(placement: Any) -> ShardPlacement:
    """The placement; the usual one for None. Raises for what is none."""
    if placement is None or isinstance(placement, ShardPlacement):
        return placement or ShardPlacement()
    raise AnnotationError(
        "The placement is no js.ShardPlacement.",
        where=f"fully_shard(placement={placement!r})",
        why="it is a js.ShardPlacement.",
        do="js.fully_shard(block, mesh=mesh, placement=js.ShardPlacement(shard_dim=0))",
    )


def _line(placement: ShardPlacement) -> str:
    """A placement as it is written."""
    text = lambda value: (
        getattr(value, "__name__", "...").replace("<lambda>", "...") if callable(value) else repr(value)
    )
    given = [(name, getattr(placement, name)) for name in _FIELDS]
    plain = ShardPlacement()
    named = ", ".join(f"{name}={text(value)}" for name, value in given if value != getattr(plain, name))
    return f"js.ShardPlacement({named})"


def batch_mean(x: T) -> T:
    """Returns `x`, with a warning: the model sees the whole batch, so its mean is that of all. For one release."""
    return _as_it_is("batch_mean", x)


def per_shard(x: T) -> T:
    """Returns `x`, with a warning: the model sees the whole batch, and no data shard. For one release."""
    return _as_it_is("per_shard", x)


def _as_it_is(name: str, x: T) -> T:
    warnings.warn(
        f"js.{name}(x) is gone. It returns x, and is an error in the next release. Write x: the model sees the whole"
        " batch, and gives the numbers of one device.",
        FutureWarning,
        stacklevel=3,
    )
    return x
