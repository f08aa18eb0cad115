"""What a model's own mixing of examples sends: recorded per line of the user's, shown, warned of, or refused.

A model that looks at its whole batch (statistics, in-batch negatives, sorts) needs the other shards' examples. That is
right as it is, and it costs collectives that are neither a parameter's gather nor a gradient's reduction.
"""

import collections
import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence

from jshard import _compat
from jshard.engine.values import Moved
from jshard.errors import CallError
from jshard.plans.placement import Placement
from jshard.plans.plan import ShardPlan
from jshard.plans.units import Unit

WARNED_BYTES = 2**20
WARNED_SHARE = 0.01
"""Of the bytes that the parameters' own collectives send."""

_LISTED = 8

COMPUTED_WHOLE = ("whole", "made whole")
"""Kinds of an operation that has no rule for its operands: each device computes it for the whole batch."""

_HOW = {
    "whole": "gathered from all data shards",
    "made whole": "a constant that every device makes whole",
    "sum": "summed over the data shards",
    "max": "reduced over the data shards",
    "move": "exchanged between data shards",
}

_OPAQUE = ("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call")
_SCOPE = re.compile(r"mixing\[([^\]|]*)\|([^\]|]*)\|([^\]|]*)\|(\d+)\|([^\]|]*)\|(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What one line of a model sends in a step.

    Args:
        kind: as of `Moved`.
        operation: the primitive.
        where: "file:line (function)"; empty for what the model returns.
        times: how many collectives.
        bytes: of their results on one device.
    """

    kind: str
    operation: str
    where: str
    times: int
    bytes: int

    @property
    def how(self) -> str:
        """What is sent, in words."""
        return _HOW[self.kind]

    @property
    def line(self) -> str:
        """The line, or what stands for it."""
        return self.where or "results and state of the model"

    def __str__(self) -> str:
        return f"{self.line}: {self.operation}, {self.how}, {self.bytes:,} bytes per step"


def scope_of(one: Moved, size: int) -> str:
    """The name under which a collective stands in the compiled program: `mixing[sum|reduce_sum|vae.py|35|encode|64]`.

    Args:
        one: the record.
        size: bytes of its result, of one execution.
    """
    place = re.fullmatch(r"(.*):(\d+) \((.*)\)", one.where)
    file, line, function = place.groups() if place else ("", "0", "")
    return f"mixing[{one.kind}|{one.operation}|{file}|{line}|{function}|{size}]"


def named_in(name: str) -> tuple[Mixing, ...]:
    """The collectives that a name in a compiled program stands for: the innermost, of each name that was joined."""
    found = [
        Mixing(kind, operation, f"{file}:{line} ({function})" if file else "", 1, int(size))
        for kind, operation, file, line, function, size in _SCOPE.findall(name)
    ]
    return tuple(found[-1:])


Key = tuple[str, tuple[tuple[str, int], ...], frozenset[tuple[Placement, int]]]
_seen: dict[Key, dict[Hashable, list[Mixing]]] = {}
_MAX_SEEN = 64
_warned: set[tuple[Key, str]] = set()


def key_of(kind: str, mesh: Iterable[tuple[str, int]], placements: Iterable[Placement]) -> Key:
    """Of a model, whose record has other paths in its plan than in a call: its class and where its parameters are."""
    return kind, tuple(mesh), frozenset(collections.Counter(placements).items())


def mixing_of(plan: ShardPlan) -> tuple[Mixing, ...]:
    """What the last traced calls of a model send of its own; empty if none was traced."""
    keys = {}
    for i, unit in enumerate(plan.units):
        inside = [
            leaf.placement
            for leaf in plan.leaves
            if i == 0 or any(f"{leaf.path}/".startswith(f"{name}/") for name in unit.name.split("+"))
        ]
        keys[key_of(unit.kind, plan.mesh, inside)] = None
    return tuple(_together(one for key in keys for found in _seen.get(key, {}).values() for one in found))


def note(unit: Unit, call: str, part: str, moved: Sequence[Moved]) -> None:
    """Records what a program sends, and warns of what is large, once for each line of a model.

    Args:
        unit: record of the root.
        call: the model and its method: `GPT.__call__`.
        part: of the call: what was traced before of the same is replaced.
        moved: the collectives.

    Raises:
        CallError: an operation is computed whole, and the annotation says fallback="error".
    """
    found = _together(Mixing(one.kind, one.operation, one.where, 1, one.bytes) for one in moved)
    if unit.policy.fallback == "error" and (bad := [one for one in found if one.kind in COMPUTED_WHOLE]):
        raise _refused(bad)
    key = key_of(unit.kind, unit.mesh.shape.items(), (m.placement for m in unit.members))
    if len(_seen) >= _MAX_SEEN and key not in _seen:
        _seen.pop(next(iter(_seen)))
    _seen.setdefault(key, {})[call, part] = found
    limit = max(WARNED_BYTES, WARNED_SHARE * _parameter_bytes(unit))
    large = [one for one in found if one.bytes >= limit and (key, one.where) not in _warned]
    if large:
        _warned.update((key, one.where) for one in large)
        text = f"{call.split('.')[0]} mixes the examples of its batch, which sends data between the data shards:"
        _compat.warn_user("\n  ".join([text, *_listed(large), *_advice(large)]))


def _refused(bad: Sequence[Mixing]) -> CallError:
    return CallError(
        "The model has operations that every device computes for the whole batch.",
        where=_listed(bad),
        why='each needs more of the batch than a data shard has, and the annotation says fallback="error".',
        do="f = js.per_example(f)  # if f treats each example on its own; else\n"
        'js.fully_shard(model, mesh=mesh, fallback="warn")',
    )


def _listed(found: Sequence[Mixing]) -> list[str]:
    more = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return [*map(str, found[:_LISTED]), *more]


def _advice(found: Sequence[Mixing]) -> list[str]:
    """What helps where the engine cannot look into an operation."""
    opaque = [one.operation for one in found if one.kind in COMPUTED_WHOLE and one.operation in _OPAQUE]
    if not opaque:
        return []
    return [f"js.per_example(f) around a function f with a {opaque[0]} says that it treats each example on its own."]


def _together(found: Iterable[Mixing]) -> list[Mixing]:
    """One record for each line, operation and kind, the largest first."""
    alike: dict[tuple[str, str, str], list[Mixing]] = {}
    for one in found:
        alike.setdefault((one.kind, one.operation, one.where), []).append(one)
    summed = [
        Mixing(*key, sum(one.times for one in ones), sum(one.bytes for one in ones)) for key, ones in alike.items()
    ]
    return sorted(summed, key=lambda one: -one.bytes)


def _parameter_bytes(unit: Unit) -> int:
    """Bytes that the collectives of the parameters send in a step: two gathers and a reduce-scatter of each."""
    return 3 * sum(m.placement.gathered_bytes for m in unit.members if m.placement.dim is not None)
