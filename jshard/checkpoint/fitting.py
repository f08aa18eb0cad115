"""Checks that a checkpoint fits a state, before any value is read. One error has all that does not fit, and advice."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from jshard._text import counted
from jshard.checkpoint.converting import Target
from jshard.checkpoint.errors import CheckpointError, SurplusError
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import Match, is_in, renamed
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.surplus import EMBEDDING, HEAD

_SUMMED_UP = 3  # this many leaves below one path are shown as that path
# Fields of Optax states with the tree of the parameters: they would fit, but are never the intended ones.
_MOMENTS = frozenset("acc_grads m momentum mu nu nu_max sum_of_squares trace v".split())


def check_fits(
    opened: Opened,
    match: Match,
    stored: Mapping[str, StoredLeaf],
    targets: Mapping[str, Target],
    *,
    abstract: Collection[str],
    rename: Mapping[str, str],
    missing: str,
    extra: str,
) -> None:
    """Raises `CheckpointError` with everything that does not fit, including leaves that do not divide.

    Args:
        opened: the checkpoint.
        match: the result of matching.
        stored: the stored leaves, by path.
        targets: the leaves to restore, by path.
        abstract: the paths of those that have no values to keep.
        rename: from path prefixes of the state to the stored ones.
        missing: as in `restore`.
        extra: as in `restore`.
    """
    if missing == "error":
        lost = list(match.missing)
        reason = "stored nothing"
    else:  # leaves keep their values, but an abstract one has none
        lost = [key for key in match.missing if key in abstract]
        reason = "abstract, and not stored"
    surplus = match.extra if extra == "error" else ()
    uneven = _uneven_lines(match, targets)

    def lost_line(key: str, shape: str) -> str:
        return f"{key}  {reason}{_stored_names_text(key, rename, opened.absent)}  wanted {shape}"

    def surplus_line(key: str, shape: str) -> str:
        return f"{key}  stored {shape}  wanted nothing"

    lines = [problem.line for problem in match.problems]
    lines += _summed_up(lost, targets, stored, lost_line)
    lines += _summed_up(surplus, stored, targets, surplus_line)
    lines += uneven
    if not lines:
        return
    where = [str(opened.path), *sorted(lines)]
    # Of leaves, not of lines: one line may stand for many.
    count = len(match.problems) + len(lost) + len(surplus) + len(uneven)
    if count == len(uneven):
        raise CheckpointError(
            "The leaves cannot be sharded like this.",
            where=where,
            why="a sharded dim must divide by the degrees of its mesh axes.",
            do="let the plan choose the shardings: like=js.abstract_init(build, annotate);\nor leave that dim whole.",
        )
    advice = _advice(match, stored, targets, rename, opened)
    if count == len(surplus):
        why = ["without them it would be another model, or optimizer, than the saved one.", *_untied(match, stored)]
        raise SurplusError(
            f"The {opened.noun} has {counted(count, 'leaf')} that the state has no place for.",
            where=where,
            why="\n".join(why),
            do=advice.do,
        )
    raise CheckpointError(
        f"The {opened.noun} does not fit: {counted(count, 'leaf differs', 'leaves differ')}.",
        where=where,
        why=advice.why,
        do=advice.do,
    )


def _stored_names_text(key: str, rename: Mapping[str, str], absent: Mapping[str, Sequence[str]]) -> str:
    """Returns the stored names that a missing leaf would have, where they are not its path."""
    place = renamed(key, rename)
    names = absent.get(place, ())
    if names:
        return f" as {', '.join(names)}"
    is_summed_up = "..." in key
    if place in (key, "") or is_summed_up:
        return ""
    return f" as {place}"


def _untied(match: Match, stored: Mapping[str, StoredLeaf]) -> list[str]:
    """Returns a line on a stored head that a model has no place for because it ties its head to its embedding."""
    embeddings = []
    for path in match.used:
        if EMBEDDING.search(path) and len(stored[path].shape) == 2:
            embeddings.append(path)
    for path in match.extra:
        if not HEAD.search(path):
            continue
        shape = stored[path].shape
        for embedding in embeddings:
            # A head is (features, tokens) or its transpose, by the library.
            if stored[embedding].shape in (shape, shape[::-1]):
                return [f"{path} differs from {embedding}: the saved model does not tie its head, as `like` does."]
    return []


def _uneven_lines(match: Match, targets: Mapping[str, Target]) -> list[str]:
    """Returns a line for each leaf that is stored and whose sharding does not divide it."""
    lines = []
    for key, target in targets.items():
        if key in match.picks:  # the others are reported as missing
            uneven = _uneven(target)
            if uneven is not None:
                lines.append(f"{key}  {uneven}")
    return lines


def _uneven(target: Target) -> str | None:
    """Returns which dim of an array its sharding does not divide; None if there is none."""
    if not isinstance(target, jax.ShapeDtypeStruct) or not isinstance(target.sharding, NamedSharding):
        return None
    mesh = target.sharding.mesh
    # A spec may be shorter than the shape: the dims beyond it are whole.
    for dim, (size, entry) in enumerate(zip(target.shape, target.sharding.spec, strict=False)):
        axes: tuple[str, ...] = ()
        if isinstance(entry, tuple):
            axes = entry
        elif isinstance(entry, str):
            axes = (entry,)
        degree = math.prod(mesh.shape[axis] for axis in axes)
        if size % degree:
            return f"wanted {target.shape}: dim {dim} does not divide by {degree}, mesh axis {'*'.join(axes)}"
    return None


def _summed_up(
    keys: Iterable[str], leaves: Mapping[str, Target], other_side: Iterable[str], line: Callable[[str, str], str]
) -> list[str]:
    """Returns a line per leaf, or per topmost path whose leaves are all among the keys and absent on the other side."""
    keys = set(keys)
    num_leaves = _count_below(leaves)
    num_keys = _count_below(keys)
    num_others = _count_below(other_side)
    lines = {}
    for key in sorted(keys):
        # Topmost first: one line for as many leaves as possible.
        for parent in _parents(key):
            has_only_keys = num_keys[parent] == num_leaves[parent] and not num_others[parent]
            if has_only_keys and num_keys[parent] >= _SUMMED_UP:
                lines[parent] = line(f"{parent}/...", f"{num_keys[parent]} leaves")
                break
        else:
            lines[key] = line(key, _shape_text(leaves[key]))
    return list(lines.values())


def _count_below(keys: Iterable[str]) -> collections.Counter[str]:
    """Counts the keys below each of their parents."""
    counts: collections.Counter[str] = collections.Counter()
    for key in keys:
        counts.update(_parents(key))
    return counts


def _parents(key: str) -> list[str]:
    """Returns the parents of a path, topmost first, without the bare names of the state."""
    keys = key.split("/")
    return ["/".join(keys[:count]) for count in range(2, len(keys))]


def _shape_text(leaf: Target) -> str:
    if isinstance(leaf, StoredLeaf) and not leaf.is_array:
        return "a value" if leaf.dtype == "value" else f"a value ({leaf.dtype})"
    return str(_shape(leaf))


def _shape(leaf: Target) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


class _Advice(NamedTuple):
    """Two parts of an error."""

    why: str
    do: str


def _advice(
    match: Match,
    stored: Mapping[str, StoredLeaf],
    targets: Mapping[str, Target],
    rename: Mapping[str, str],
    opened: Opened,
) -> _Advice:
    why = "it was saved from another model or optimizer."
    # A move explains why leaves are missing, not why they clash. With a `rename`, the user has chosen the places.
    if not match.problems and not rename:
        moves = _moves(match, stored, targets)
        if moves:
            return _advice_to_rename(why, moves, opened)
    if any("key<" in problem.line for problem in match.problems):
        return _Advice(
            "a random key has another kind than the stored one, and the numbers of one kind do not fit another.",
            'give `like` a key of the stored kind (fry is "threefry2x32"): jax.random.key(0, impl="threefry2x32").',
        )
    if _differ_in_dtype(match, stored, targets):
        return _Advice(
            "only floating dtypes, and integers to wider ones, are converted automatically.",
            "use the stored dtypes in `like`, and convert the result: x.astype(jnp.int32).",
        )
    idle = _prefixes_without_leaf(rename, targets)
    if idle:
        why += f"\n`rename` maps paths of `like`, and no leaf of `like` has it: {', '.join(idle)}."
    lines = [f"build `like` with the settings of the saved run. Its contents: {opened.listing}"]
    if not match.problems:  # of which no policy helps
        lines += _policies_that_help(match, stored, targets)
    return _Advice(why, "\n".join(lines))


def _prefixes_without_leaf(rename: Mapping[str, str], targets: Mapping[str, Target]) -> list[str]:
    """Returns the renamed prefixes that no leaf of `like` has: they have no effect."""
    idle = []
    for prefix in rename:
        has_leaf = any(is_in(prefix, path) for path in targets)
        if not has_leaf:
            idle.append(prefix)
    return idle


def _policies_that_help(match: Match, stored: Mapping[str, StoredLeaf], targets: Mapping[str, Target]) -> list[str]:
    """Returns a line for each policy with which the restore would succeed."""
    lines = []
    if len(match.missing) == len(match.extra) == 1:
        (missing_path,) = match.missing
        (extra_path,) = match.extra
        # Of one shape, they may be one leaf under two names.
        if _shape(targets[missing_path]) == _shape(stored[extra_path]):
            lines.append(f"rename={json.dumps({missing_path: extra_path})} reads the one as the other.")
    if match.missing:
        lines.append('missing="init" keeps the values of `like` for leaves that are not stored.')
    if match.extra:
        lines.append('extra="ignore" skips stored leaves that are not wanted.')
    return lines


class _Move(NamedTuple):
    """A prefix of paths of the state, and the stored one; renaming one to the other leaves no path missing."""

    prefix: str
    stored_prefix: str

    @property
    def rename(self) -> dict[str, str]:
        """The argument of `restore`."""
        return {self.prefix: self.stored_prefix}


def _advice_to_rename(why: str, moves: Sequence[_Move], opened: Opened) -> _Advice:
    lines = []
    for move in moves:
        lines.append(opened.call.format(like="like", options=f", rename={json.dumps(move.rename)}"))
    if len(moves) > 1:
        return _Advice(
            f"{why}\nSeveral stored trees have these leaves.", "\n".join(["say which one to restore:", *lines])
        )
    move = moves[0]
    is_one_name = move.prefix == "" and "/" not in move.stored_prefix
    if is_one_name:
        name = json.dumps(move.stored_prefix)
        line = opened.call.format(like=f"like={{{name}: ...}}", options="")
        return _Advice(why, f"the leaves are stored under {name}: {line}.")
    return _Advice(why, f"they are stored elsewhere: {lines[0]}.")


def _differ_in_dtype(match: Match, stored: Mapping[str, StoredLeaf], targets: Mapping[str, Target]) -> bool:
    """Returns whether the clashing leaves differ only in dtype."""
    if not match.problems:
        return False
    for problem in match.problems:
        pick = match.picks.get(problem.path)
        if pick is None or pick.form != "same":
            return False  # it is a stack, of layers of other shapes or of the wrong depth
        if stored[pick.stored[0]].shape != getattr(targets.get(problem.path), "shape", ()):
            return False
    return True


def _moves(match: Match, stored: Mapping[str, StoredLeaf], targets: Mapping[str, Target]) -> list[_Move]:
    """Returns the prefixes under which all missing leaves are stored. Leaves that are surplus are tried first."""
    if not match.missing:
        return []
    # A move must place all missing leaves. So those that place any one of them are all that need to be tried.
    first_missing = match.missing[0]
    used = match.used
    moves: list[_Move] = []
    for path in dict.fromkeys([*match.extra, *stored]):  # each once, in this order
        move = _without_common_end(first_missing, path)
        # Otherwise the last keys differ: nothing was removed from the path.
        has_common_end = move.prefix != first_missing
        if not has_common_end or move in moves or _leads_to_moments(move):
            continue
        places = {key: renamed(key, move.rename) for key in match.missing}
        if not _are_all_stored(places, used, stored, targets):
            continue
        # It must place all surplus leaves, too. But a state without a name may be one of several stored trees.
        if move.prefix == "" or set(places.values()) >= set(match.extra):
            moves.append(move)
    return moves


def _leads_to_moments(move: _Move) -> bool:
    # A name that the path in the state has, too, is intended.
    moments = _MOMENTS.intersection(move.stored_prefix.split("/"))
    return bool(moments - set(move.prefix.split("/")))


def _are_all_stored(
    places: Mapping[str, str], used: Collection[str], stored: Mapping[str, StoredLeaf], targets: Mapping[str, Target]
) -> bool:
    """Returns whether leaves are stored at these places, in their shapes, and are not read for others."""
    for key, place in places.items():
        if place not in stored or place in used or stored[place].shape != _shape(targets[key]):
            return False
    return True


def _without_common_end(first: str, second: str) -> _Move:
    """Returns what is left of two paths without the keys at their ends that are equal."""
    first_keys = first.split("/")
    second_keys = second.split("/")
    while first_keys and second_keys and first_keys[-1] == second_keys[-1]:
        first_keys.pop()
        second_keys.pop()
    return _Move("/".join(first_keys), "/".join(second_keys))
