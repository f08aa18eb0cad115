"""Which stored leaf goes where: everything that does not fit is found before a byte of an array is read.

A wanted leaf is found under its own path, under the path that `rename` gives it, as one layer of a leaf that was
saved stacked, or as a stack of layers that were saved one by one:

    wanted  blocks/3/mlp/kernel (64, 256)     stored  blocks/mlp/kernel (12, 64, 256)
    wanted  blocks/mlp/kernel (12, 64, 256)   stored  blocks/0/mlp/kernel ... blocks/11/mlp/kernel
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.seal import StoredLeaf


@dataclasses.dataclass(frozen=True)
class Pick:
    """Where a wanted leaf comes from.

    Attributes:
        stored: path of the stored leaf, or of each layer to be stacked.
        form: "same", "layer" for one layer of a stored stack, "stack" for layers that are stored one by one.
        layer: number of the layer.
    """

    stored: tuple[str, ...]
    form: Literal["same", "layer", "stack"] = "same"
    layer: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What a comparison of stored with wanted leaves came to; lines are for people.

    Attributes:
        picks: by wanted path.
        missing: wanted paths with nothing stored for them.
        extra: stored paths that nobody wants.
        casts: leaves whose dtype changes, a line each.
        problems: leaves that cannot be restored, a line each.
    """

    picks: Mapping[str, Pick]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    casts: tuple[str, ...]
    problems: tuple[str, ...]


def match(
    stored: Mapping[str, StoredLeaf],
    wanted: Mapping[str, StoredLeaf],
    *,
    names: Collection[str],
    rename: Mapping[str, str],
    part: str | None = None,
) -> Match:
    """Finds the stored counterpart of every wanted leaf.

    Args:
        stored: what the checkpoint holds, by path.
        wanted: what is asked for, by path.
        names: the parts of the state that are asked for; what lies under others is not extra. Empty for all.
        rename: beginnings of wanted paths, and the beginnings of the stored paths they stand for.
        part: the beginning of all wanted paths, where only a part was asked for: a layer that it names is taken out of
            a stack without the others.

    Returns:
        The picks, and everything that does not fit.
    """
    picks, missing, casts, problems = {}, [], [], []
    for path, leaf in wanted.items():
        pick = _find(renamed(path, rename), leaf, stored)
        if pick is None:
            missing.append(path)
            continue
        picks[path] = pick
        found = _as_wanted(pick, stored)
        verdict = _compare(found, leaf) or _unequal_layers(pick, stored)
        if verdict == "cast":
            casts.append(f"{path}  {_kind(found)} -> {_kind(leaf)}")
        elif verdict is not None:
            problems.append(f"{path}  {verdict}")
    problems += _wrong_depths(picks, stored, part)
    used = {name for pick in picks.values() for name in pick.stored}
    below = {renamed(name, rename) for name in names}
    extra = [path for path in stored if path not in used and (not below or _is_below(path, below))]
    return Match(picks=picks, missing=tuple(missing), extra=tuple(extra), casts=tuple(casts), problems=tuple(problems))


def renamed(path: str, rename: Mapping[str, str]) -> str:
    """The stored path that a wanted one stands for: its longest beginning in `rename` is replaced."""
    for begin in sorted(rename, key=len, reverse=True):
        if begin == "" or path == begin or path.startswith(f"{begin}/"):
            rest = path[len(begin) :].lstrip("/")
            return "/".join(part for part in (rename[begin], rest) if part)
    return path


def _is_below(path: str, begins: Collection[str]) -> bool:
    return any(begin in ("", path) or path.startswith(f"{begin}/") for begin in begins)


def _find(path: str, wanted: StoredLeaf, stored: Mapping[str, StoredLeaf]) -> Pick | None:
    if path in stored:
        return Pick((path,))
    keys = path.split("/")
    for place, key in enumerate(keys):
        stack = "/".join(keys[:place] + keys[place + 1 :])
        if key.isdecimal() and stack in stored and stored[stack].shape[1:] == wanted.shape and stored[stack].shape:
            return Pick((stack,), "layer", int(key))
    for place in range(len(keys), 0, -1) if wanted.shape else ():
        layers = tuple(_layers(keys[:place], keys[place:], stored))
        if layers and stored[layers[0]].shape == wanted.shape[1:]:
            return Pick(layers, "stack")
    return None


def _layers(begin: list[str], end: list[str], stored: Mapping[str, StoredLeaf]) -> Iterator[str]:
    number = 0
    while (path := "/".join([*begin, str(number), *end])) in stored:
        yield path
        number += 1


def _as_wanted(pick: Pick, stored: Mapping[str, StoredLeaf]) -> StoredLeaf:
    """A stored leaf in the form in which it is wanted."""
    leaf = stored[pick.stored[0]]
    shape = {"same": leaf.shape, "layer": leaf.shape[1:], "stack": (len(pick.stored), *leaf.shape)}[pick.form]
    return dataclasses.replace(leaf, shape=shape)


def _compare(stored: StoredLeaf, wanted: StoredLeaf) -> str | None:
    """What is wrong with a leaf; None for nothing, "cast" where its dtype changes."""
    if stored.shape != wanted.shape:
        kinds = [f" {_kind(leaf)}" if stored.key or wanted.key else "" for leaf in (stored, wanted)]
        return f"stored {stored.shape}{kinds[0]}  wanted {wanted.shape}{kinds[1]}"
    if not (stored.is_array and wanted.is_array):
        return None if _values_fit(stored.dtype, wanted.dtype) else f"stored {stored.dtype}  wanted {wanted.dtype}"
    if stored.key != wanted.key:
        # A key of the old kind is its numbers, and Orbax does not tell the new one from them.
        is_same = stored.dtype == wanted.dtype and None in (stored.key, wanted.key)
        return "cast" if is_same else f"stored {_kind(stored)}  wanted {_kind(wanted)}"
    if stored.dtype == wanted.dtype:
        return None
    if _both(jnp.floating, stored, wanted) or _both(jnp.complexfloating, stored, wanted):
        return "cast"
    if _both(jnp.integer, stored, wanted) and np.can_cast(stored.dtype, wanted.dtype, "safe"):
        return "cast"
    return f"stored {stored.dtype}  wanted {wanted.dtype}"


def _unequal_layers(pick: Pick, stored: Mapping[str, StoredLeaf]) -> str | None:
    shapes = {stored[path].shape for path in pick.stored}
    return f"stored layers of shapes {', '.join(map(str, sorted(shapes)))}  wanted a stack" if len(shapes) > 1 else None


def _values_fit(stored: str, wanted: str) -> bool:
    """Whether a value of Python or a scalar array may become the other."""
    if "str" in (stored, wanted):
        return stored == wanted
    is_whole = [name == "int" or (name != "float" and jnp.issubdtype(name, jnp.integer)) for name in (stored, wanted)]
    return is_whole[0] or not is_whole[1]


def _kind(leaf: StoredLeaf) -> str:
    return leaf.dtype if leaf.key is None else f"key<{leaf.key}>"


def _both(kind: type, first: StoredLeaf, second: StoredLeaf) -> bool:
    return all(jnp.issubdtype(jnp.dtype(leaf.dtype), kind) for leaf in (first, second))


def _wrong_depths(picks: Mapping[str, Pick], stored: Mapping[str, StoredLeaf], part: str | None) -> list[str]:
    """Stacks of which not every layer is wanted, or more than there are."""
    layers = collections.defaultdict(set)
    for path, pick in picks.items():
        if pick.form == "layer":
            stack = pick.stored[0]
            # What follows the number is the end of both paths.
            is_named = part is not None and stack.endswith(path[len(part) :])
            depth = stored[stack].shape[0]
            layers[stack] |= set(range(depth)) | {pick.layer} if is_named else {pick.layer}
    return [
        f"{path}  stored {stored[path].shape[0]} layers  wanted {max(found) + 1}"
        for path, found in layers.items()
        if found != set(range(stored[path].shape[0]))
    ]
