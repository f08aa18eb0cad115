"""What is said where a checkpoint and what it is to be restored into do not fit: everything, in one message."""

from __future__ import annotations

import collections
import json
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import Match, renamed
from jshard.errors import printable

_TOGETHER = 3  # so many leaves below one path are shown by that path
# Fields of Optax's states that have the tree of the parameters: they fit, and are never meant.
_MOMENTS = frozenset("acc_grads m momentum mu nu nu_max sum_of_squares trace v".split())


def check_fits(
    path: Place,
    found: Match,
    stored: Mapping[str, StoredLeaf],
    wanted: Mapping[str, Any],
    *,
    abstract: Collection[str],
    rename: Mapping[str, str],
    missing: str,
    extra: str,
    items: Collection[str] = (),
) -> None:
    """Raises a `CheckpointError` that names everything that does not fit, and leaves that do not divide.

    Args:
        path: the checkpoint.
        found: the match.
        stored: its leaves.
        wanted: what is asked for, with shardings where it is on devices.
        abstract: wanted leaves that have no values in `like`.
        rename: as `restore` was given it, as those below.
        missing: "error" or "init".
        extra: "error" or "ignore".
        items: names of the trees of a checkpoint that holds several: `like` has to name one.
    """
    if items and not any(_is_in(item, renamed(key, rename)) for key in wanted for item in items):
        raise _names_no_tree(path, found, stored, wanted, items)
    lost = found.missing if missing == "error" else [key for key in found.missing if key in abstract]
    unwanted = found.extra if extra == "error" else ()
    uneven = [line for key, leaf in wanted.items() if key in found.picks and (line := _uneven(key, leaf))]
    nothing = "stored nothing" if missing == "error" else "abstract, and stored nothing"
    lines = [
        *found.problems,
        *_summed_up(lost, wanted, stored, lambda key, what: f"{key}  {nothing}  wanted {what}"),
        *_summed_up(unwanted, stored, wanted, lambda key, what: f"{key}  stored {what}  wanted nothing"),
        *uneven,
    ]
    if not lines:
        return
    count = len(found.problems) + len(lost) + len(unwanted) + len(uneven)
    if count == len(uneven):
        what = "The leaves cannot be cut like this."
        why = "a sharded dim divides by the degrees of the mesh axes that it is sharded over."
        do = "let the plan choose the shardings: like=js.abstract_init(build, annotate);\nor leave that dim whole."
    else:
        what = f"The checkpoint does not fit: {count} leaves differ."
        why, do = _advice(found, stored, wanted, rename, path)
    raise CheckpointError(what, where=[str(path), *sorted(lines)], why=why, do=do)


def _names_no_tree(
    path: Place, found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any], items: Collection[str]
) -> CheckpointError:
    """The error for a `like` that fits into several trees, or into none: which one is meant is not guessed."""
    sizes = {item: sum(_is_in(item, key) for key in stored) for item in items}
    begins = sorted({printable(key.split("/")[0]) for key in wanted})
    calls = [
        f"restore({str(path)!r}, {{{theirs!r}: like}})[{theirs!r}]"
        if ours == ""
        else f"restore({str(path)!r}, like, rename={{{ours!r}: {theirs!r}}})"
        for ours, theirs in _moved(found, stored, wanted)
    ]
    return CheckpointError(
        "The checkpoint holds several trees, and `like` names none of them.",
        where=[
            str(path),
            *(f"{printable(item)}  {sizes[item]} {'leaf' if sizes[item] == 1 else 'leaves'}" for item in items),
        ],
        why=f"Orbax saved {len(items)} items, and each is a name in the state; paths of `like` begin with "
        f"{', '.join(begins) or 'nothing'}.",
        do="\n".join(f"js.checkpoint.{call}" for call in calls) or f"jshard ckpt inspect {shlex.quote(str(path))}",
    )


def _is_in(item: str, key: str) -> bool:
    return f"{key}/".startswith(f"{item}/")


def _uneven(key: str, leaf: Any) -> str | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(sharding, NamedSharding):
        return None
    for dim, (size, entry) in enumerate(zip(leaf.shape, sharding.spec, strict=False)):
        axes = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        degree = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if size % degree:
            return f"{key}  wanted {leaf.shape}: dim {dim} does not divide by {degree}, mesh axis {'*'.join(axes)}"
    return None


def _summed_up(
    keys: Iterable[str], leaves: Mapping[str, Any], others: Iterable[str], line: Callable[[str, str], str]
) -> list[str]:
    """A line per leaf, or per highest path below which all leaves are among the keys and the other side has none."""
    keys = set(keys)
    below, among, across = (
        collections.Counter(p for key in group for p in _above(key)) for group in (leaves, keys, others)
    )
    lines = {}
    for key in sorted(keys):
        tops = [p for p in _above(key) if among[p] == below[p] >= _TOGETHER and not across[p]]
        if tops:
            lines[tops[0]] = line(f"{tops[0]}/...", f"{among[tops[0]]} leaves")
        else:
            lines[key] = line(key, str(tuple(getattr(leaves[key], "shape", ()))))
    return list(lines.values())


def _above(key: str) -> list[str]:
    """The paths that a path is below, the highest first; a name of the state alone is none."""
    keys = key.split("/")
    return ["/".join(keys[:count]) for count in range(2, len(keys))]


def _advice(
    found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any], rename: Mapping[str, str], path: Place
) -> tuple[str, str]:
    """Why, and what to do."""
    why = "it was saved from another model, or from another optimizer."
    moved = _moved(found, stored, wanted) if not found.problems and not rename else []
    if len(moved) == 1:
        ours, theirs = moved[0]
        if ours == "" and "/" not in theirs:
            return (
                why,
                f"the leaves are stored under {json.dumps(theirs)}: restore(path, like={{{json.dumps(theirs)}: ...}}).",
            )
        return why, f"they are stored elsewhere: restore(path, like, rename={json.dumps({ours: theirs})})."
    if moved:
        lines = [f"restore(path, like, rename={json.dumps({ours: theirs})})" for ours, theirs in moved]
        return f"{why}\nSeveral stored trees have these leaves.", "\n".join(["say which one is meant:", *lines])
    if any("key<" in line for line in found.problems):
        why = (
            "a random key is of another kind than the one that is stored, and numbers of one are no numbers of another."
        )
        return (
            why,
            'give `like` a key of the stored kind (fry is "threefry2x32"): jax.random.key(0, impl="threefry2x32").',
        )
    if _differ_in_dtype(found, stored, wanted):
        why = "dtypes change by themselves among floating ones, and from integers to wider ones."
        return why, "give `like` the dtypes that are stored, and change what comes back: x.astype(jnp.int32)."
    do = f"build `like` with the settings of the saved run. What it holds: jshard ckpt inspect {path}"
    if not found.problems and found.missing:
        do += '\nmissing="init" leaves what is not stored as `like` has it.'
        if not rename and (tied := _tied(found, stored, wanted)):
            do += f"\nIf they were tied when it was saved: restore(path, like, rename={json.dumps(tied)})."
    if not found.problems and found.extra:
        do += '\nextra="ignore" leaves out what is stored and not wanted.'
    return why, do


def _differ_in_dtype(found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any]) -> bool:
    """Whether the leaves that clash do so by their dtypes alone."""
    picks = [(found.picks.get(line.split("  ")[0]), wanted.get(line.split("  ")[0])) for line in found.problems]
    return bool(picks) and all(
        pick is not None and pick.form == "same" and stored[pick.stored[0]].shape == getattr(leaf, "shape", ())
        for pick, leaf in picks
    )


def _moved(found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Beginnings of wanted and stored paths that, if one is put for the other, leave nothing missing."""
    used = {path for pick in found.picks.values() for path in pick.stored}
    fitting = []
    for key in dict.fromkeys([*found.extra, *stored]) if found.missing else ():
        begins = _without_common_end(found.missing[0], key)
        if begins[0] == found.missing[0] or begins in fitting or _leads_to_moments(*begins):
            continue
        there = {path: renamed(path, dict([begins])) for path in found.missing}
        shapes = {path: tuple(getattr(wanted[path], "shape", ())) for path in there}
        fits = all(at in stored and at not in used and stored[at].shape == shapes[path] for path, at in there.items())
        if fits and (begins[0] == "" or {*there.values()} >= set(found.extra)):
            fitting.append(begins)
    return fitting


def _leads_to_moments(ours: str, theirs: str) -> bool:
    """Whether parameters would be read from what an optimizer keeps of them."""
    return bool(_MOMENTS.intersection(theirs.split("/")) - set(ours.split("/")))


def _tied(found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any]) -> dict[str, str]:
    """A `rename` to leaves that are used already: parameters with two paths are stored under one."""
    if found.extra:
        return {}
    for key in stored:
        ends = _without_common_end(found.missing[0], key)
        if _leads_to_moments(*ends):
            continue
        begins = {path: _elsewhere(path, *ends) for path in found.missing}
        there = {path: renamed(path, dict([begin])) for path, begin in begins.items() if begin is not None}
        shapes = {path: getattr(wanted[path], "shape", ()) for path in there}
        if len(there) == len(begins) and all(
            path != at and at in stored and stored[at].shape == shapes[path] for path, at in there.items()
        ):
            return dict(begin for begin in begins.values() if begin is not None)
    return {}


def _elsewhere(path: str, ours: str, theirs: str) -> tuple[str, str] | None:
    """Where in a path the keys are in which two others differ: its beginning up to them, and with the other's keys."""
    old, new = ours.split("/"), theirs.split("/")
    while len(old) > 1 and len(new) > 1 and old[0] == new[0]:
        old, new = old[1:], new[1:]
    keys = path.split("/")
    for place in range(1, len(keys) - len(old)):  # below the names of the state, and above the leaves
        if keys[place : place + len(old)] == old and not new[-1].isdecimal():  # layers are alike, and not tied
            return "/".join(keys[: place + len(old)]), "/".join([*keys[:place], *new])
    return None


def _without_common_end(first: str, second: str) -> tuple[str, str]:
    ours, theirs = first.split("/"), second.split("/")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return "/".join(ours), "/".join(theirs)
