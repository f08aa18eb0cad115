"""What a model's own mixing of examples sends: noted per line of the user's, shown, warned of, or refused.

A model that looks at its whole batch (statistics, in-batch negatives, sorts) needs the other shards' examples. That is
right as it is, and it costs collectives that are neither a parameter's gather nor a gradient's reduction.
"""

import dataclasses
import warnings
from collections.abc import Sequence

from jshard._errors import CallError
from jshard._nnx import Unit
from jshard.engine.values import Moved

WARNED_BYTES = 2**20
WARNED_SHARE = 0.01
"""Of the bytes that the parameters' own collectives send."""

_LISTED = 8

COMPUTED_WHOLE = ("whole", "made whole")
"""Kinds of an operation that has no rule for its operands: each device computes it for the whole batch."""


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What one line of a model sends in a step.

    Args:
        kind: as of `Moved`.
        operation: the primitive.
        where: "file:line (function)".
        times: how many collectives.
        bytes: of their results on one device.
    """

    kind: str
    operation: str
    where: str
    times: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.where or 'the model'}: {self.operation}, {_HOW[self.kind]}, {self.bytes:,} bytes a call"


_HOW = {
    "whole": "computed whole from gathered operands",
    "made whole": "a constant made whole",
    "sum": "summed over the data shards",
    "max": "reduced over the data shards",
    "move": "moved to another dim or shard",
}

_seen: dict[Unit, tuple[Mixing, ...]] = {}
_MAX_SEEN = 64


def mixing_of(unit: Unit) -> tuple[Mixing, ...]:
    """What the last traced call of a model sends of its own; empty if none was traced."""
    return _seen.get(unit, ())


def note(unit: Unit, name: str, moved: Sequence[Moved], fallback: str) -> None:
    """Keeps what a program sends, and warns of what is large, once for each line.

    Args:
        unit: record of the root.
        name: of the model.
        moved: the collectives.
        fallback: "warn" or "error": what an operation that is computed whole is.

    Raises:
        CallError: an operation is computed whole, and `fallback` is "error".
    """
    found = _joined(moved)
    if fallback == "error" and (bad := [one for one in found if one.kind in COMPUTED_WHOLE]):
        raise CallError(
            "Operations of the model are computed for the whole batch on every device.",
            where=[str(one) for one in bad[:_LISTED]],
            why='they have no form on one data shard, and the annotation says fallback="error".',
            do='js.fully_shard(model, mesh=mesh, fallback="warn"), or js.per_example(function) around what treats each'
            " example on its own.",
        )
    if len(_seen) >= _MAX_SEEN:
        _seen.pop(next(iter(_seen)))
    before = {(one.kind, one.operation, one.where): one for one in _seen.get(unit, ())}
    _seen[unit] = tuple((before | {(one.kind, one.operation, one.where): one for one in found}).values())
    limit = max(WARNED_BYTES, WARNED_SHARE * _parameter_bytes(unit))
    if large := tuple(one for one in found if one.bytes >= limit):
        listed = "".join(f"\n  {one}" for one in large[:_LISTED])
        more = f"\n  and {len(large) - _LISTED} more" if len(large) > _LISTED else ""
        text = f"{name} sends more than its parameters and gradients, as it mixes the examples of its batch:"
        warnings.warn(f"{text}{listed}{more}", stacklevel=2)


def _joined(moved: Sequence[Moved]) -> list[Mixing]:
    together: dict[tuple[str, str, str], list[Moved]] = {}
    for one in moved:
        together.setdefault((one.kind, one.operation, one.where), []).append(one)
    return [Mixing(*key, times=len(ones), bytes=sum(one.bytes for one in ones)) for key, ones in together.items()]


def _parameter_bytes(unit: Unit) -> int:
    """Bytes that the collectives of the parameters send in a step: two gathers and a reduce-scatter of each."""
    return 3 * sum(m.placement.gathered_bytes for m in unit.members if m.placement.dim is not None)
