"""Matches stored leaves with those of a state; everything that does not fit is found before any value is read."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jshard._text import is_layer
from jshard.checkpoint.manifest import StoredLeaf


@dataclasses.dataclass(frozen=True)
class Pick:
    """Where a leaf of the state comes from: the path of the stored leaf, or of each layer to be stacked.

    "layer" is one layer of a stored stack, by number; "stack" combines layers that are stored one by one.
    """

    stored: tuple[str, ...]
    form: Literal["same", "layer", "stack"] = "same"
    layer: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """A leaf, or a stored stack, that cannot be restored."""

    path: str
    why: str

    @property
    def line(self) -> str:
        """Both, for a message."""
        return f"{self.path}  {self.why}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The result of matching stored leaves with those of a state; lines are for messages."""

    picks: Mapping[str, Pick]  # by path of the state
    missing: tuple[str, ...]  # paths of the state that are not stored
    extra: tuple[str, ...]  # stored paths that the state has no place for
    casts: tuple[str, ...]  # leaves whose dtype changes, a line each
    problems: tuple[Problem, ...]  # leaves that cannot be restored
    cut: tuple[str, ...] = ()  # stored stacks of which the last layers are skipped, a line each

    @property
    def used(self) -> set[str]:
        """The stored paths that are read."""
        return _stored_paths(self.picks)


def match(
    stored: Mapping[str, StoredLeaf],
    targets: Mapping[str, StoredLeaf],
    *,
    names: Collection[str],
    rename: Mapping[str, str],
    part: str | None = None,
    ignored: Collection[str] = (),
    skip_layers: bool = False,
) -> Match:
    """Finds the stored counterpart of every leaf to restore, and everything that does not fit.

    Args:
        stored: the stored leaves, by path.
        targets: the leaves to restore, by path.
        names: the paths of the state below which stored leaves without a place are extra; without any, all are.
        rename: from path prefixes of the state to the stored ones.
        part: the path prefix of the state that alone is restored, if one is.
        ignored: stored paths that are never extra.
        skip_layers: whether the last layers of a stack may have no place in the state.
    """
    # Nothing is raised here: one message is to list all that does not fit.
    picks: dict[str, Pick] = {}
    missing: list[str] = []
    casts: list[str] = []
    problems: list[Problem] = []
    for path, target in targets.items():
        pick = _pick(renamed(path, rename), target, stored, skip_layers=skip_layers)
        if pick is None:
            missing.append(path)
            continue
        # Also of a leaf that turns out not to fit: it is reported once, and its stored leaf is not extra besides.
        picks[path] = pick
        comparison = _compare_picked(pick, stored, target)
        if comparison.problem is not None:
            problems.append(Problem(path, comparison.problem))
        elif comparison.is_cast:
            casts.append(f"{path}  {stored[pick.stored[0]].kind} -> {target.kind}")
    cut: list[str] = []
    for depth in _wrong_depths(picks, stored, part):
        if skip_layers and depth.is_beginning:
            cut.append(f"{depth.stack}  {depth.count} of {depth.stored_count} layers are restored")
        else:
            problems.append(Problem(depth.stack, f"stored {depth.stored_count} layers  wanted {depth.count}"))
    roots = {renamed(name, rename) for name in names}
    skipped = _stored_paths(picks) | set(ignored)
    extra: list[str] = []
    for path in stored:
        if path not in skipped and _is_below_any(roots, path):
            extra.append(path)
    return Match(
        picks=picks,
        missing=tuple(missing),
        extra=tuple(extra),
        casts=tuple(casts),
        problems=tuple(problems),
        cut=tuple(cut),
    )


def _stored_paths(picks: Mapping[str, Pick]) -> set[str]:
    paths: set[str] = set()
    for pick in picks.values():
        paths.update(pick.stored)
    return paths


def _is_below_any(roots: Collection[str], path: str) -> bool:
    """Returns whether a path is below a root; without roots, each is."""
    return not roots or any(is_in(root, path) for root in roots)


def is_in(root: str, path: str) -> bool:
    """Returns whether a path is another one, or below it; everything is below the empty path."""
    if root == "":
        return True
    return f"{path}/".startswith(f"{root}/")


def first_keys(paths: Iterable[str]) -> set[str]:
    """Returns the first keys of some paths: the names of the parts of a state."""
    return {path.partition("/")[0] for path in paths}


def renamed(path: str, rename: Mapping[str, str]) -> str:
    """Returns the stored path for one of the state: its longest prefix in `rename` is replaced."""
    # The empty prefix, which every path has, comes last.
    for prefix in sorted(rename, key=len, reverse=True):
        if is_in(prefix, path):
            rest = path[len(prefix) :].lstrip("/")
            # Either may be empty: a rename to "" removes a name, one from "" adds one.
            return "/".join(part for part in (rename[prefix], rest) if part)
    return path


def _pick(path: str, target: StoredLeaf, stored: Mapping[str, StoredLeaf], *, skip_layers: bool) -> Pick | None:
    """Returns where a leaf comes from, as it is, as a layer of a stack, or layer by layer; None if it is not stored."""
    if path in stored:
        return Pick((path,))
    # By shape, too: a number in a path need not be that of a layer, as in a list.
    for stack, layer in stacks(path):
        if stack in stored and stored[stack].shape and stored[stack].shape[1:] == target.shape:
            return Pick((stack,), "layer", layer)
    if not target.shape:
        return None
    keys = path.split("/")
    for position in range(len(keys), 0, -1):  # where the number of the layer would be
        layers = tuple(layers_of(keys[:position], keys[position:], stored))
        if layers and stored[layers[0]].shape == target.shape[1:]:
            if skip_layers:
                layers = layers[: target.shape[0]]
            return Pick(layers, "stack")
    return None


def stacks(path: str) -> Iterator[tuple[str, int]]:
    """Yields the paths of stacks that a path may be a layer of, and the number of the layer."""
    keys = path.split("/")
    for position, key in enumerate(keys):
        if is_layer(key):
            yield "/".join(keys[:position] + keys[position + 1 :]), int(key)


def layers_of(begin: list[str], end: list[str], stored: Mapping[str, StoredLeaf]) -> Iterator[str]:
    """Yields the stored paths of the layers 0, 1, ... whose numbers are between these keys."""
    number = 0
    while (path := "/".join([*begin, str(number), *end])) in stored:
        yield path
        number += 1


@dataclasses.dataclass(frozen=True)
class _LeafComparison:
    """Whether a stored leaf can be restored as another one."""

    problem: str | None = None  # why it cannot
    is_cast: bool = False  # whether its dtype changes


_EQUAL = _LeafComparison()
_CAST = _LeafComparison(is_cast=True)


def _compare_picked(pick: Pick, stored: Mapping[str, StoredLeaf], target: StoredLeaf) -> _LeafComparison:
    """Compares what a pick makes of stored leaves with a leaf to restore."""
    first = stored[pick.stored[0]]
    shape = first.shape
    if pick.form == "layer":
        shape = first.shape[1:]
    elif pick.form == "stack":
        shape = (len(pick.stored), *first.shape)
    comparison = _compare(dataclasses.replace(first, shape=shape), target)
    shapes = {stored[path].shape for path in pick.stored}
    if comparison.problem is None and len(shapes) > 1:
        return _LeafComparison(f"stored layers of shapes {', '.join(map(str, sorted(shapes)))}  wanted a stack")
    return comparison


def _compare(stored: StoredLeaf, target: StoredLeaf) -> _LeafComparison:
    if stored.shape != target.shape:
        return _LeafComparison(_shapes_differ(stored, target))
    if not stored.is_array or not target.is_array:
        return _EQUAL if _values_fit(stored.dtype, target.dtype) else _dtypes_differ(stored, target)
    if stored.key != target.key:
        # An old-style key is a plain array of numbers, and Orbax cannot distinguish a new-style key from it.
        has_same_numbers = stored.dtype == target.dtype and None in (stored.key, target.key)
        return _CAST if has_same_numbers else _LeafComparison(f"stored {stored.kind}  wanted {target.kind}")
    return _compare_dtypes(stored, target)


def _compare_dtypes(stored: StoredLeaf, target: StoredLeaf) -> _LeafComparison:
    """Compares the dtypes of two arrays of one shape; integers become no floats, which would not hold all of them."""
    if stored.dtype == target.dtype:
        return _EQUAL
    for kind in (jnp.floating, jnp.complexfloating):
        if _are(kind, stored, target):
            return _CAST
    if _are(jnp.integer, stored, target) and np.can_cast(stored.dtype, target.dtype, "safe"):
        return _CAST
    return _dtypes_differ(stored, target)


def _shapes_differ(stored: StoredLeaf, target: StoredLeaf) -> str:
    if stored.key or target.key:  # the shapes are those of the keys' numbers, which the kind explains
        return f"stored {stored.shape} {stored.kind}  wanted {target.shape} {target.kind}"
    return f"stored {stored.shape}  wanted {target.shape}"


def _dtypes_differ(stored: StoredLeaf, target: StoredLeaf) -> _LeafComparison:
    return _LeafComparison(f"stored {stored.dtype}  wanted {target.dtype}")


def _are(kind: type, first: StoredLeaf, second: StoredLeaf) -> bool:
    """Returns whether the dtypes of two arrays are of a kind."""
    return jnp.issubdtype(jnp.dtype(first.dtype), kind) and jnp.issubdtype(jnp.dtype(second.dtype), kind)


def _values_fit(stored: str, target: str) -> bool:
    """Returns whether a Python value and a scalar array may be converted into each other, if its value fits.

    As between arrays, kinds only change from whole numbers to real ones, and from these to complex ones.
    """
    if "str" in (stored, target) or "value" in (stored, target):
        return stored == target
    if stored == "int":  # it may be a bool, and any kind may hold it
        return True
    if "bool" in (stored, target):
        return stored == target
    kinds = ("whole", "real", "complex")
    return kinds.index(_number_kind(stored)) <= kinds.index(_number_kind(target))


def _number_kind(name: str) -> Literal["whole", "real", "complex"]:
    if name == "int":
        return "whole"
    if name == "float":
        return "real"
    if jnp.issubdtype(name, jnp.integer):
        return "whole"
    if jnp.issubdtype(name, jnp.complexfloating):
        return "complex"
    return "real"


@dataclasses.dataclass(frozen=True)
class _WrongDepth:
    """A stored stack that has another number of layers than the state."""

    stack: str
    stored_count: int
    count: int  # up to the last layer of the state
    is_beginning: bool  # whether the layers of the state are all of the stored ones up to its last


def _wrong_depths(picks: Mapping[str, Pick], stored: Mapping[str, StoredLeaf], part: str | None) -> list[_WrongDepth]:
    """Returns the stacks of which the state has a place for some layers only, or has more layers."""
    layers: dict[str, set[int]] = collections.defaultdict(set)
    for path, pick in picks.items():
        if pick.form != "layer":
            continue
        (stack,) = pick.stored
        layers[stack].add(pick.layer)
        # The request names this layer, if the part after the number ends both paths: then the others may be left out.
        is_named = part is not None and stack.endswith(path[len(part) :])
        if is_named:
            layers[stack].update(range(stored[stack].shape[0]))
    wrong = []
    for stack, numbers in layers.items():
        stored_count = stored[stack].shape[0]
        count = max(numbers) + 1
        if numbers != set(range(stored_count)):
            is_beginning = count < stored_count and numbers == set(range(count))
            wrong.append(_WrongDepth(stack, stored_count, count, is_beginning))
    return wrong
