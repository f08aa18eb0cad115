"""Settings and functions from before: they work for one more release, with a warning that has the new line."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.placement import ShardPlacement

T = TypeVar("T")

_FIELDS = tuple(field.name for field in dataclasses.fields(ShardPlacement))

_BY_TRACE = "how arrays are split follows from the trace of the call"
GONE = {
    "outputs": "a call returns what one device returns",
    "batch_arg": _BY_TRACE,
    "replicated_args": _BY_TRACE,
    "batch_dim": f"{_BY_TRACE}; js.value_and_grad cuts microbatches along dim 0",
    "sync_batch_norm": "statistics are always those of the whole batch",
}
"""Settings that a trace has made needless, and what holds without them."""


def placement_of(
    placement: ShardPlacement, old: Mapping[str, Any], line: str = "js.fully_shard(..., placement={})"
) -> ShardPlacement:
    """A placement with the fields that were given beside it; `line` is how it is written."""
    if unknown := [name for name in old if name not in (*_FIELDS, *GONE)]:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    if gone := [name for name in old if name in GONE]:
        reasons = "".join(f"\n  {name}: {GONE[name]}." for name in gone)
        _warn(f"{', '.join(gone)}: these settings of fully_shard are gone, and change nothing. Delete them:{reasons}")
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
    """What a strategy, by name or as a value, says of `reshard_after_forward` for each layer."""
    if strategy not in _RESHARD and not hasattr(strategy, "reshard_after_forward"):
        raise AnnotationError(
            "The strategy is not known.",
            where=f"fully_shard(strategy={strategy!r})",
            why=f"it is one of {', '.join(_RESHARD)}.",
            do="js.fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # zero2, for each layer",
        )
    asked = getattr(strategy, "reshard_after_forward", _RESHARD.get(strategy))
    reshard = True if asked is None else asked
    line = f"js.fully_shard(layer, mesh=mesh, reshard_after_forward={reshard!r})"
    _warn(f"strategy: this setting of fully_shard has moved. The new line, for each layer:\n  {line}")
    return reshard


def batch_mean(x: T) -> T:
    """Returns `x`: the model sees the whole batch, so its mean is that of all."""
    return _as_it_is("batch_mean", x)


def per_shard(x: T) -> T:
    """Returns `x`: the model sees the whole batch, and no data shard."""
    return _as_it_is("per_shard", x)


def _as_it_is(name: str, x: T) -> T:
    _warn(f"js.{name}(x) is gone, and returns x. Write x: the model sees the whole batch, as one device does.")
    return x


def _text(placement: ShardPlacement) -> str:
    given = {name: getattr(placement, name) for name in _FIELDS}
    given = {name: value for name, value in given.items() if value != getattr(ShardPlacement(), name)}
    texts = (f"{name}={'...' if callable(value) else repr(value)}" for name, value in given.items())
    return f"js.ShardPlacement({', '.join(texts)})"


def _warn(text: str) -> None:
    _compat.warn_user(f"{text}\n  The old form is an error in the next release.", FutureWarning)
