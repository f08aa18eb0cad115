"""Communication of models that mix the examples of a batch: what is sent besides parameters and gradients.

A model that uses its whole batch (statistics, in-batch negatives, sorts) needs the other shards' examples. The result
is correct, but needs collectives that are neither a parameter's gather nor a gradient's reduction: they are
recorded per line of the user's code, with a warning if they are large.
"""

import collections
import dataclasses
import re
from collections.abc import Hashable, Iterable, Sequence

from jshard import _compat
from jshard._text import shortened
from jshard.errors import CallError
from jshard.plans.mesh import CONTEXT
from jshard.plans.placement import Placement
from jshard.plans.plan import ShardPlan
from jshard.plans.units import Unit

WARNED_BYTES = 2**20
WARNED_SHARE = 0.01
"""A share of the bytes that the parameters' own collectives send: two gathers and a reduce-scatter of each."""

COMPUTED_WHOLE = ("whole", "made whole")
"""Kinds of operations that have no rule for their operands: each device computes them for the whole batch."""

_HOW = {
    "whole": "gathered from all data shards",
    "made whole": "a constant that every device computes whole",
    "sum": "summed over the data shards",
    "max": "reduced over the data shards",
    "move": "exchanged between data shards",
}

_OPAQUE = ("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call")


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A collective other than parameter gathers and gradient reductions, or all that a line sends in a step.

    Attributes:
        kind: what is sent: a key of `_HOW`. "made whole": no shard of a constant can be made, so that each device makes
            all of it and cuts out its own.
        operation: the primitive that needs it; "output" for the program's results.
        where: "file:line (function)" of the user's code; empty for the model's results.
        times: how many collectives.
        bytes: of their results on one device, in all trips of the loops around.
    """

    kind: str
    operation: str
    where: str
    times: int
    bytes: int

    def repeated(self, trips: float) -> "Mixing":
        """Returns the record multiplied by a loop's trips."""
        return dataclasses.replace(self, bytes=round(self.bytes * trips))

    @property
    def how(self) -> str:
        """A description of the data sent."""
        return _HOW[self.kind]

    @property
    def line(self) -> str:
        """The line, or a description if there is none."""
        return self.where or "results and state of the model"

    def __str__(self) -> str:
        return f"{self.line}: {self.operation}, {self.how}, {self.bytes:,} bytes per step"


# ---- names in compiled programs

# Reads what `scope_of` writes: a change of one needs the same change of the other.
_SCOPE = re.compile(r"mixing\[([^\]|]*)\|([^\]|]*)\|([^\]|]*)\|(\d+)\|([^\]|]*)\|(\d+)\]")


def scope_of(record: Mixing, size: int) -> str:
    """Returns the name of a collective in the compiled program: `mixing[sum|reduce_sum|vae.py|35|encode|64]`.

    The last number is the bytes of its result in one execution.
    """
    # All of the record is in the name, as an audit has nothing but the compiled program.
    place = re.fullmatch(r"(.*):(\d+) \((.*)\)", record.where)
    file, line, function = place.groups() if place else ("", "0", "")
    return f"mixing[{record.kind}|{record.operation}|{file}|{line}|{function}|{size}]"


def named_in(name: str) -> tuple[Mixing, ...]:
    """Returns the collective that a name in a compiled program stands for; empty if it stands for none.

    The compiler joins the names of nested scopes. The innermost one, which comes last, is the collective's own.
    """
    scopes = _SCOPE.findall(name)
    if not scopes:
        return ()
    kind, operation, file, line, function, size = scopes[-1]
    where = f"{file}:{line} ({function})" if file else ""
    return (Mixing(kind, operation, where, 1, int(size)),)


# ---- records of the last traced calls, for `js.explain` and `js.audit`

ModelKey = tuple[str, tuple[tuple[str, int], ...], frozenset[tuple[Hashable, int]]]
"""Identifies a model by its class, its mesh and its placements."""

_MOST_MODELS = 64

_records: dict[ModelKey, dict[Hashable, list[Mixing]]] = {}
_warned: set[tuple[ModelKey, str]] = set()


def key_of(kind: str, mesh: Iterable[tuple[str, int]], placements: Iterable[Placement]) -> ModelKey:
    """Returns the key of a model.

    It has no paths, which are others in a plan than in a call, and no dtypes, which are others after a cast.
    """
    places = collections.Counter((p.shape, p.spec, p.layers, p.gathered) for p in placements)
    return kind, tuple(mesh), frozenset(places.items())


def key_of_unit(unit: Unit) -> ModelKey:
    """Returns the key of the model whose root is this unit."""
    return key_of(unit.kind, unit.mesh.shape.items(), (member.placement for member in unit.members))


def mixing_of(plan: ShardPlan) -> tuple[Mixing, ...]:
    """Returns the mixing communication of a model's last traced calls; empty if none was traced."""
    # Units as well: one may have been called outside of the model, as a region of its own.
    keys: dict[ModelKey, None] = {}  # in order, each once: equal layers are one record
    for i, unit in enumerate(plan.units):
        is_root = i == 0
        placements = [leaf.placement for leaf in plan.leaves if is_root or _is_inside(leaf.path, unit.name)]
        keys[key_of(unit.kind, plan.mesh, placements)] = None
    records: list[Mixing] = []
    for key in keys:
        for of_part in _records.get(key, {}).values():
            records += of_part
    return tuple(_summed(records))


def _is_inside(path: str, unit_name: str) -> bool:
    """Returns whether a parameter belongs to a unit, whose name joins the paths of its modules by `+`."""
    return any(f"{path}/".startswith(f"{module}/") for module in unit_name.split("+"))


def note(unit: Unit, call: str, part: str, sent: Sequence[Mixing], over: str = "") -> None:
    """Records what a program sends, and warns of large amounts, once for each line of a model.

    Args:
        unit: the root of the model.
        call: the model and its method, such as `GPT.__call__`.
        part: which program of the call. An earlier record of the same part is replaced.
        sent: what it sends.
        over: the inner axis that it is sent over; empty for the data axes.

    Raises:
        CallError: an operation is computed whole and the annotation has fallback="error".
    """
    records = _summed(sent)
    if unit.policy.fallback == "error":
        _refuse_computed_whole(records)
    # By class, mesh and placements, not by the object: `js.explain` may be asked with a plan. Bounded, because a
    # process may make any number of models.
    key = key_of_unit(unit)
    if len(_records) >= _MOST_MODELS and key not in _records:
        oldest = next(iter(_records))
        _records.pop(oldest)
    _records.setdefault(key, {})[call, part, over] = records
    _warn_of_large(unit, call.split(".")[0], over, key, records)


def _refuse_computed_whole(records: Sequence[Mixing]) -> None:
    # Communication that has a rule, such as a mean over the batch, is no fallback, however large.
    refused = [record for record in records if record.kind in COMPUTED_WHOLE]
    if not refused:
        return
    raise CallError(
        "The model has operations that every device computes for the whole batch.",
        where=_listed(refused),
        why='each needs more of the batch than a data shard has, and the annotation has fallback="error".',
        do="f = js.per_example(f)  # if f treats each example independently; else\n"
        'js.fully_shard(model, mesh=mesh, fallback="warn")',
    )


def _warn_of_large(unit: Unit, model: str, over: str, key: ModelKey, records: Sequence[Mixing]) -> None:
    limit_bytes = _most_bytes_without_warning(unit)
    # Two records may have one line, and its warning has both: so a line counts as warned of only after the loop.
    large = []
    for record in records:
        is_new = (key, record.where) not in _warned
        if is_new and record.bytes >= limit_bytes:
            large.append(record)
    if not large:
        return
    for record in large:
        _warned.add((key, record.where))
    description = "mixes the examples of its batch, which sends data between the data shards:"
    if over == CONTEXT:
        description = "looks beyond its part of a sequence, which sends data over the context axis:"
    text = [f"{model} {description}", *_listed(large)]
    operation = _opaque_operation(large)
    if operation is not None:
        text.append(
            f"js.per_example(f) around a function f with a {operation} declares that it treats each example "
            "independently."
        )
    _compat.warn_user("\n  ".join(text))


def _most_bytes_without_warning(unit: Unit) -> float:
    """Returns the limit for one line: small beside what the model's parameters send in a step."""
    gathered_bytes = 0
    for member in unit.members:
        if member.placement.dim is not None:
            gathered_bytes += member.placement.gathered_bytes
    return max(WARNED_BYTES, WARNED_SHARE * 3 * gathered_bytes)  # gathered twice, reduced once


def _opaque_operation(records: Sequence[Mixing]) -> str | None:
    """Returns the first operation whose inside the engine does not see, if one was computed whole."""
    for record in records:
        if record.kind in COMPUTED_WHOLE and record.operation in _OPAQUE:
            return record.operation
    return None


def _listed(records: Sequence[Mixing]) -> list[str]:
    return shortened([str(record) for record in records], 8)


def _summed(records: Iterable[Mixing]) -> list[Mixing]:
    """Returns one record for each line, operation and kind, the largest first."""
    sums: dict[tuple[str, str, str], Mixing] = {}
    for record in records:
        key = (record.kind, record.operation, record.where)
        previous = sums.get(key)
        if previous is None:
            sums[key] = record
        else:
            times = previous.times + record.times
            sums[key] = dataclasses.replace(record, times=times, bytes=previous.bytes + record.bytes)
    return sorted(sums.values(), key=lambda record: -record.bytes)
