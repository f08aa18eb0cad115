"""What a model's own mixing of examples sends, and what is not split: recorded per line of the user's, or warned of.

A model that looks at its whole batch (statistics, in-batch negatives, sorts) needs the other shards' examples. That is
right as it is, and it costs collectives that are neither a parameter's gather nor a gradient's reduction.
"""

import collections
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard.engine.context import in_shapes_only
from jshard.engine.values import LocalProduct, Mixing
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

_OPAQUE = ("pallas_call", "ffi_call", "custom_partitioning", "tpu_custom_call")
_SCOPE = re.compile(r"mixing\[([^\]|]*)\|([^\]|]*)\|([^\]|]*)\|(\d+)\|([^\]|]*)\|(\d+)\]")


def scope_of(one: Mixing, size: int) -> str:
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


def note(unit: Unit, call: str, part: str, moved: Sequence[Mixing]) -> None:
    """Records what a program sends, and warns of what is large, once for each line of a model.

    Args:
        unit: record of the root.
        call: the model and its method: `GPT.__call__`.
        part: of the call: what was traced before of the same is replaced.
        moved: the collectives.

    Raises:
        CallError: an operation is computed whole, and the annotation says fallback="error".
    """
    found = _together(moved)
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


# The batch of a call: which of its arguments are split over the data shards, and a warning where work is not. The
# numbers are those of one device either way: what has no batch is whole on every device, which computes what follows.

WARNED_FLOPS = 1e9
WARNED_PART = 0.1
"""Of the products of one device, in forward."""

_SHOWN = 4
_warned_whole: set[tuple[str, bool, tuple[str, ...]]] = set()


def batch_size(arrays: Sequence[Any], degree: int) -> int:
    """The size of the batch: the leading size that most of the arguments have, by count, then by elements.

    A size that is another dim of an array beside it comes last, but for that of the first argument: a mask (tokens,
    tokens) or positions (tokens, ...) beside ids (examples, tokens). It is only a matter of speed: an array that is
    split and has no batch, or has one and is whole, gives the same numbers.
    """
    votes: dict[int, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for x in arrays:
        if x.ndim and x.shape[0] and x.shape[0] % degree == 0:
            count, size = votes[x.shape[0]]
            votes[x.shape[0]] = count + 1, size + x.size
    first = next(iter(votes), 0)
    is_inner = lambda n: n != first and any(n in x.shape[1:] and x.shape[0] != n for x in arrays if x.ndim)
    return max(votes, key=lambda n: (not is_inner(n), *votes[n]), default=0)


def warn_of_whole(
    call: str, arguments: Sequence[Any], batch: int, degree: int, products: Sequence[LocalProduct]
) -> None:
    """Warns of large products that every device computes for all examples; once for each call and their lines.

    A single example is computed so on any number of devices.

    Args:
        call: the model and its method: `GPT.__call__`.
        arguments: shapes of the arguments.
        batch: their `batch_size`.
        degree: the number of data shards.
        products: of the forward program.
    """
    lines: dict[str, float] = collections.defaultdict(float)
    for one in products:
        if one.is_whole:
            lines[one.where or "the model"] += one.flops
    total, whole = sum(one.flops for one in products), sum(lines.values())
    rows = [x for x in arguments if x.ndim and x.shape[0] > 1 and not _is_key(x)]
    others = [x for x in rows if x.shape[0] != batch]
    if not others or whole < max(WARNED_FLOPS, WARNED_PART * total) or in_shapes_only():
        return
    listed = sorted(lines, key=lambda line: -lines[line])
    if (key := (call, bool(batch), tuple(listed))) in _warned_whole:
        return
    _warned_whole.add(key)
    why, do = _beside(others, batch, degree) if batch else _no_batch(rows, degree)
    where = [f"{line}: {lines[line] / 1e9:,.1f} GFLOP" for line in listed[:_SHOWN]]
    more = [f"and {len(listed) - _SHOWN} more lines"] if len(listed) > _SHOWN else []
    what = f"{call}: every device computes products for all examples, {whole / total:.0%} of what it multiplies:"
    _compat.warn_user("\n  ".join([what, *where, *more, why, do]))


def _no_batch(rows: Sequence[Any], degree: int) -> tuple[str, str]:
    size = max(rows, key=lambda x: x.size).shape[0]
    fewer = size // degree * degree
    line = f" To leave out the last of {size}: x = x[:{fewer}]" if fewer else ""
    return (
        f"No argument has a leading dim that divides by {degree}, the number of data shards: {_shapes(rows)}.",
        f"A batch of a multiple of {degree} is split.{line}",
    )


def _beside(others: Sequence[Any], batch: int, degree: int) -> tuple[str, str]:
    largest = max(others, key=lambda x: x.size)
    why = f"Of the arguments those with a leading dim of {batch} are split, and these are whole: {_shapes(others)}."
    if batch in largest.shape[1:-1]:
        dim = largest.shape.index(batch, 1)
        return why, (
            f"If dim {dim} is that of the examples, give it first: x = jnp.moveaxis(x, {dim}, 0)"
            f"; in the model: x = jnp.moveaxis(x, 0, {dim})"
        )
    return why, f"If their rows are examples, too: a number of them that all arguments have, a multiple of {degree}."


def _shapes(rows: Sequence[Any]) -> str:
    more = [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return ", ".join([*(f"{x.dtype}{list(x.shape)}" for x in rows[:_SHOWN]), *more])


def _is_key(x: Any) -> bool:
    """Whether an array is a random key, typed or of the old kind."""
    old = x.dtype == jnp.uint32 and x.ndim == 1 and x.size in (2, 4)
    return old or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
