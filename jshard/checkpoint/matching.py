"""Matches stored leaves with wanted ones; everything that does not fit is found before any value is read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jshard._text import counted, is_layer
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError, SurplusError
from jshard.checkpoint.manifest import StoredLeaf


@dataclasses.dataclass(frozen=True)
class Pick:
    """Where a wanted leaf comes from: the path of the stored leaf, or of each layer to be stacked.

    "layer" is one layer of a stored stack, by number; "stack" combines layers that are stored one by one.
    """

    stored: tuple[str, ...]
    form: Literal["same", "layer", "stack"] = "same"
    layer: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The result of matching stored with wanted leaves; lines are for messages."""

    picks: Mapping[str, Pick]  # by wanted path
    missing: tuple[str, ...]  # wanted paths that are not stored
    extra: tuple[str, ...]  # stored paths that are not wanted
    casts: tuple[str, ...]  # leaves whose dtype changes, a line each
    problems: tuple[str, ...]  # leaves that cannot be restored, a line each
    cut: tuple[str, ...] = ()  # stored stacks of which the last layers are skipped, a line each


def match(
    stored: Mapping[str, StoredLeaf],
    wanted: Mapping[str, StoredLeaf],
    *,
    names: Collection[str],
    rename: Mapping[str, str],
    part: str | None = None,
    ignored: Collection[str] = (),
    skip_layers: bool = False,
) -> Match:
    """Finds the stored counterpart of every wanted leaf, and everything that does not fit.

    Args:
        stored: the stored leaves, by path.
        wanted: the leaves to restore, by path.
        names: the paths of the state below which stored leaves that nothing wants are extra; without any, all are.
        rename: from path prefixes of the state to the stored ones.
        part: the path prefix of the state that alone is restored, if one is.
        ignored: stored paths that are never extra.
        skip_layers: whether the last layers of a stack may have no place in the state.
    """
    picks, missing, casts, problems = {}, [], [], []
    for path, leaf in wanted.items():
        pick = _find(renamed(path, rename), leaf, stored, skip_layers=skip_layers)
        if pick is None:
            missing.append(path)
            continue
        picks[path] = pick
        first = stored[pick.stored[0]]
        form = {"same": first.shape, "layer": first.shape[1:], "stack": (len(pick.stored), *first.shape)}[pick.form]
        found = dataclasses.replace(first, shape=form)
        verdict, shapes = _compare(found, leaf), {stored[name].shape for name in pick.stored}
        if verdict in (None, "cast") and len(shapes) > 1:
            verdict = f"stored layers of shapes {', '.join(map(str, sorted(shapes)))}  wanted a stack"
        if verdict == "cast":
            casts.append(f"{path}  {found.kind} -> {leaf.kind}")
        elif verdict is not None:
            problems.append(f"{path}  {verdict}")
    cut = []
    for depth in _wrong_depths(picks, stored, part):
        if skip_layers and depth.is_beginning:
            cut.append(f"{depth.stack}  {depth.count} of {depth.stored_count} layers are restored")
        else:
            problems.append(f"{depth.stack}  stored {depth.stored_count} layers  wanted {depth.count}")
    used = {name for pick in picks.values() for name in pick.stored}
    below = {renamed(name, rename) for name in names}
    is_asked = lambda path: not below or any(is_in(begin, path) for begin in below)
    extra = [path for path in stored if path not in used and path not in ignored and is_asked(path)]
    return Match(
        picks=picks,
        missing=tuple(missing),
        extra=tuple(extra),
        casts=tuple(casts),
        problems=tuple(problems),
        cut=tuple(cut),
    )


def renamed(path: str, rename: Mapping[str, str]) -> str:
    """The stored path for a wanted one: its longest prefix in `rename` is replaced."""
    for begin in sorted(rename, key=len, reverse=True):
        if begin == "" or path == begin or path.startswith(f"{begin}/"):
            rest = path[len(begin) :].lstrip("/")
            return "/".join(part for part in (rename[begin], rest) if part)
    return path


def _find(path: str, wanted: StoredLeaf, stored: Mapping[str, StoredLeaf], *, skip_layers: bool) -> Pick | None:
    if path in stored:
        return Pick((path,))
    for stack, layer in stacks(path):
        if stack in stored and stored[stack].shape[1:] == wanted.shape and stored[stack].shape:
            return Pick((stack,), "layer", layer)
    keys = path.split("/")
    for place in range(len(keys), 0, -1) if wanted.shape else ():
        layers = tuple(layers_of(keys[:place], keys[place:], stored))
        if layers and stored[layers[0]].shape == wanted.shape[1:]:
            if skip_layers:
                layers = layers[: wanted.shape[0]]
            return Pick(layers, "stack")
    return None


def stacks(path: str) -> Iterator[tuple[str, int]]:
    """The paths of stacks that a path may be a layer of, and the number of the layer."""
    keys = path.split("/")
    for place, key in enumerate(keys):
        if is_layer(key):
            yield "/".join(keys[:place] + keys[place + 1 :]), int(key)


def layers_of(begin: list[str], end: list[str], stored: Mapping[str, StoredLeaf]) -> Iterator[str]:
    """The stored paths of the layers 0, 1, ... whose numbers are between these keys."""
    number = 0
    while (path := "/".join([*begin, str(number), *end])) in stored:
        yield path
        number += 1


def _compare(stored: StoredLeaf, wanted: StoredLeaf) -> str | None:
    """The problem with a leaf; None if there is none, "cast" if its dtype changes."""
    if stored.shape != wanted.shape:
        kinds = [f" {leaf.kind}" if stored.key or wanted.key else "" for leaf in (stored, wanted)]
        return f"stored {stored.shape}{kinds[0]}  wanted {wanted.shape}{kinds[1]}"
    if not (stored.is_array and wanted.is_array):
        return None if _values_fit(stored.dtype, wanted.dtype) else f"stored {stored.dtype}  wanted {wanted.dtype}"
    if stored.key != wanted.key:
        # An old-style key is a plain array of numbers, and Orbax cannot distinguish a new-style key from it.
        is_same = stored.dtype == wanted.dtype and None in (stored.key, wanted.key)
        return "cast" if is_same else f"stored {stored.kind}  wanted {wanted.kind}"
    if stored.dtype == wanted.dtype:
        return None
    both = lambda kind: all(jnp.issubdtype(jnp.dtype(leaf.dtype), kind) for leaf in (stored, wanted))
    if both(jnp.floating) or both(jnp.complexfloating):
        return "cast"
    if both(jnp.integer) and np.can_cast(stored.dtype, wanted.dtype, "safe"):
        return "cast"
    return f"stored {stored.dtype}  wanted {wanted.dtype}"


def _values_fit(stored: str, wanted: str) -> bool:
    """Whether a Python value and a scalar array may be converted into each other, if its value fits.

    As between arrays, kinds only change from whole numbers to real ones, and from these to complex ones.
    """
    if "str" in (stored, wanted) or "value" in (stored, wanted):
        return stored == wanted
    if stored == "int":  # it may be a bool, and any kind may hold it
        return True
    if wanted == "bool" or stored == "bool":
        return stored == wanted
    kinds = ("whole", "real", "complex")
    return kinds.index(_number_kind(stored)) <= kinds.index(_number_kind(wanted))


def _number_kind(name: str) -> str:
    if name == "int" or (name != "float" and jnp.issubdtype(name, jnp.integer)):
        return "whole"
    return "complex" if name != "float" and jnp.issubdtype(name, jnp.complexfloating) else "real"


@dataclasses.dataclass(frozen=True)
class _WrongDepth:
    """A stored stack that has another number of layers than are wanted."""

    stack: str
    stored_count: int
    count: int  # up to the last wanted layer
    is_beginning: bool  # whether the wanted layers are all of the stored ones up to the last wanted one


def _wrong_depths(picks: Mapping[str, Pick], stored: Mapping[str, StoredLeaf], part: str | None) -> list[_WrongDepth]:
    """Stacks of which some layers are not wanted, or more than exist are wanted."""
    layers = collections.defaultdict(set)
    for path, pick in picks.items():
        if pick.form == "layer":
            stack = pick.stored[0]
            # The part after the number ends both paths.
            is_named = part is not None and stack.endswith(path[len(part) :])
            depth = stored[stack].shape[0]
            layers[stack] |= set(range(depth)) | {pick.layer} if is_named else {pick.layer}
    wrong = []
    for stack, numbers in layers.items():
        stored_count = stored[stack].shape[0]
        count = max(numbers) + 1
        if numbers != set(range(stored_count)):
            is_beginning = count < stored_count and numbers == set(range(count))
            wrong.append(_WrongDepth(stack, stored_count, count, is_beginning))
    return wrong


# The forms of a leaf: stored, read, and wanted.


def to_read(stored: StoredLeaf, pick: Pick, wanted: Any) -> Any:
    """The target of the read: the stored shape and dtype, with a sharding derived from the wanted one."""
    if not stored.is_array or not isinstance(wanted, jax.ShapeDtypeStruct):
        return stored.on_host()
    is_key = stored.key is not None and _is_key(wanted)
    dtype = wanted.dtype if is_key else jnp.dtype(stored.dtype)
    if not is_key and jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, but jax uses 32
        return stored.on_host()
    shape = stored.shape
    if is_key or not _is_key(wanted):  # sharding of the keys, not of their numbers; with the wanted padding
        shape = wanted.shape[1:] if pick.form == "stack" else wanted.shape
        shape = (stored.shape[0], *shape) if pick.form == "layer" else shape
    sharding = _as_stored(wanted.sharding, pick, len(wanted.shape))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _as_stored(sharding: Sharding, pick: Pick, ndim: int) -> Sharding:
    if not isinstance(sharding, NamedSharding) or pick.form == "same":
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*((None, *spec) if pick.form == "layer" else spec[1:])))


def own_mesh(wanted: Any) -> contextlib.AbstractContextManager[Any]:
    """Activates the mesh of a leaf: with Explicit axes, jax refuses to compute under another one."""
    mesh = getattr(getattr(wanted, "sharding", None), "mesh", None)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()


def finish(pick: Pick, found: list[Any], wanted: Any) -> Any:
    """A leaf in the wanted form, dtype and sharding."""
    if not isinstance(wanted, jax.ShapeDtypeStruct):
        return _on_host(pick, found, wanted)
    found = [_same_kind(leaf, wanted) for leaf in found]
    leaf = found[0]
    if not isinstance(leaf, jax.Array):  # a Python value, or an array read on the host
        array = _as_dtype(pick, np.asarray(_picked(pick, found)), wanted.dtype)
        if array.shape != wanted.shape:  # the wanted one is padded
            array = np.pad(array, [(0, size - own) for size, own in zip(wanted.shape, array.shape, strict=True)])
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda box: array[box])
    if pick.form == "stack":
        return _stacked(wanted.dtype, wanted.sharding)(found)
    if pick.form == "layer":
        return _layer(wanted.dtype, wanted.sharding)(leaf, pick.layer)
    if leaf.dtype != wanted.dtype or not leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim):
        return _cast(wanted.dtype, wanted.sharding)(leaf)
    return leaf


def num_overflows(pick: Pick, found: list[Any], leaf: Any) -> int:
    """The number of values that are finite as stored but not in the wanted dtype."""
    if isinstance(found[0], int | float) and hasattr(leaf, "dtype"):  # a Python value
        return int(math.isfinite(found[0])) if jnp.issubdtype(leaf.dtype, jnp.inexact) and _num_not_finite(leaf) else 0
    dtypes = [getattr(x, "dtype", int) for x in (found[0], leaf)]
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return 0
    if float(jnp.finfo(dtypes[1]).max) >= float(jnp.finfo(dtypes[0]).max) or not (lost := _num_not_finite(leaf)):
        return 0
    return lost - sum(map(_num_not_finite, found if pick.form == "stack" else [_picked(pick, found)]))


def _num_not_finite(leaf: Any) -> int:
    if isinstance(leaf, jax.Array):
        return int(_count_not_finite(leaf))
    return int(np.sum(~np.isfinite(leaf if leaf.dtype.itemsize > 2 else leaf.astype(np.float32))))


@jax.jit
def _count_not_finite(leaf: jax.Array) -> jax.Array:
    wide = leaf if leaf.dtype.itemsize > 2 else leaf.astype(jnp.float32)
    return jnp.sum(~jnp.isfinite(wide), dtype=jnp.float32)


def _on_host(pick: Pick, found: list[Any], wanted: Any) -> Any:
    """The same, for leaves that are not on devices."""
    found = [_same_kind(leaf, wanted) for leaf in found]
    if isinstance(wanted, bool):
        return bool(_as_dtype(pick, np.asarray(_picked(pick, found)), np.bool_))
    if isinstance(wanted, np.ndarray | np.generic):
        return _as_dtype(pick, np.asarray(_picked(pick, found)), wanted.dtype)
    value = np.asarray(_picked(pick, found)).item() if hasattr(found[0], "shape") else found[0]
    if isinstance(wanted, float) and isinstance(value, int):
        return _as_dtype(pick, np.asarray(value), np.dtype(np.float64)).item()
    return value


def _same_kind(leaf: Any, wanted: Any) -> Any:
    """A random key as its numbers, or numbers as a key, if the other form is wanted."""
    if not isinstance(leaf, jax.Array) or _is_key(leaf) == _is_key(wanted):
        return leaf
    return jax.random.key_data(leaf) if _is_key(leaf) else jax.random.wrap_key_data(leaf, impl=wanted.dtype)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def _as_dtype(pick: Pick, array: np.ndarray, dtype: Any) -> np.ndarray:
    """An array in another dtype; raises for integers and bools that the dtype cannot hold exactly."""
    is_whole = array.dtype == object or jnp.issubdtype(array.dtype, jnp.integer)  # object: over 64 bits
    try:
        with np.errstate(over="ignore"):  # the caller warns
            cast = array.astype(dtype)
        is_changed = (is_whole or dtype == np.bool_) and not _is_equal(cast, array)
    except OverflowError:
        cast, is_changed = array, True
    if is_changed:
        raise CheckpointError(
            "A stored number does not fit.",
            where=f"{pick.stored[0]}  {array.max() if array.size == 1 else 'up to ' + str(array.max())}",
            why=f"`like` wants it as {np.dtype(dtype).name}, which does not have this number.",
            do="put a Python int or a wider dtype there in `like`.",
        )
    return cast


def _is_equal(cast: np.ndarray, whole: np.ndarray) -> bool:
    """Whether a cast of integers or bools has changed none."""
    if not jnp.issubdtype(cast.dtype, jnp.inexact):
        return bool((cast == whole).all())
    # Python compares an int with a float exactly; NumPy would round both to float64 first.
    wide = np.complex128 if jnp.issubdtype(cast.dtype, jnp.complexfloating) else np.float64
    return bool((cast.astype(wide).astype(object) == whole.astype(object)).all())


def _picked(pick: Pick, found: list[Any]) -> Any:
    return np.stack(found) if pick.form == "stack" else found[0][pick.layer] if pick.form == "layer" else found[0]


# One program for all leaves of a shape.
@functools.lru_cache(maxsize=256)
def _layer(dtype: Any, sharding: Sharding) -> Any:
    def one(stack: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False).astype(dtype)

    return jax.jit(one, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _stacked(dtype: Any, sharding: Sharding) -> Any:
    return jax.jit(lambda layers: jnp.stack(layers).astype(dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _cast(dtype: Any, sharding: Sharding) -> Any:
    return jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=sharding)


HEAD = re.compile(r"(^|[/._])((lm_)?head|output|unembed\w*)([/.]|$)")
EMBEDDING = re.compile(r"emb|wte|tokens|shared")
_TOGETHER = 3  # this many leaves below one path are shown as that path
# Fields of Optax states with the tree of the parameters: they would fit, but are never the intended ones.
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
    absent: Mapping[str, Sequence[str]],
) -> None:
    """Raises `CheckpointError` with everything that does not fit, including leaves that do not divide.

    Args:
        path: the checkpoint.
        found: the result of matching.
        stored: the stored leaves, by path.
        wanted: the leaves to restore, by path.
        abstract: the paths of those that have no values to keep.
        rename: from path prefixes of the state to the stored ones.
        missing: as in `restore`.
        extra: as in `restore`.
        absent: the names of another library's arrays that are not stored, by the stored path that needs them.
    """
    lost = found.missing if missing == "error" else [key for key in found.missing if key in abstract]
    unwanted = found.extra if extra == "error" else ()
    uneven = [line for key, leaf in wanted.items() if key in found.picks and (line := _uneven(key, leaf))]
    nothing = "stored nothing" if missing == "error" else "abstract, and not stored"

    def lost_line(key: str, what: str) -> str:
        return f"{key}  {nothing}{_looked_for(key, rename, absent)}  wanted {what}"

    lines = [
        *found.problems,
        *_summed_up(lost, wanted, stored, lost_line),
        *_summed_up(unwanted, stored, wanted, lambda key, what: f"{key}  stored {what}  wanted nothing"),
        *uneven,
    ]
    if not lines:
        return
    count = len(found.problems) + len(lost) + len(unwanted) + len(uneven)
    if count == len(uneven):
        what = "The leaves cannot be sharded like this."
        why = "a sharded dim must divide by the degrees of its mesh axes."
        do = "let the plan choose the shardings: like=js.abstract_init(build, annotate);\nor leave that dim whole."
    else:
        what = f"The checkpoint does not fit: {counted(count, 'leaf differs', 'leaves differ')}."
        why, do = _advice(found, stored, wanted, rename, path)
    if count == len(unwanted):
        raise SurplusError(
            f"The checkpoint has {counted(count, 'leaf')} that the state has no place for.",
            where=[str(path), *sorted(lines)],
            why="\n".join(
                ["without them it would be another model, or optimizer, than the saved one.", *_untied(found, stored)]
            ),
            do=do,
        )
    raise CheckpointError(what, where=[str(path), *sorted(lines)], why=why, do=do)


def _looked_for(key: str, rename: Mapping[str, str], absent: Mapping[str, Sequence[str]]) -> str:
    """The stored names that a missing leaf would have, where they are not its path."""
    place = renamed(key, rename)
    names = absent.get(place, ())
    if names:
        return f" as {', '.join(names)}"
    return f" as {place}" if place not in (key, "") and "..." not in key else ""


def _untied(found: Match, stored: Mapping[str, StoredLeaf]) -> list[str]:
    """A line on a stored head that a model has no place for because it ties its head to its embedding."""
    used = {path for pick in found.picks.values() for path in pick.stored}
    embeddings = [path for path in used if EMBEDDING.search(path) and len(stored[path].shape) == 2]
    for path in found.extra:
        if not HEAD.search(path):
            continue
        for embedding in embeddings:
            if stored[embedding].shape in (stored[path].shape, stored[path].shape[::-1]):
                return [f"{path} differs from {embedding}: the saved model does not tie its head, as `like` does."]
    return []


def is_in(item: str, key: str) -> bool:
    """Whether a path is another one, or below it; everything is below the empty path."""
    if item == "":
        return True
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
    """A line per leaf, or per topmost path whose leaves are all among the keys and absent on the other side."""
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
            lines[key] = line(key, _shape_text(leaves[key]))
    return list(lines.values())


def _shape_text(leaf: Any) -> str:
    if isinstance(leaf, StoredLeaf) and not leaf.is_array:
        return f"a value ({leaf.dtype})" if leaf.dtype != "value" else "a value"
    return str(tuple(getattr(leaf, "shape", ())))


def _above(key: str) -> list[str]:
    """The parents of a path, topmost first, without the bare names of the state."""
    keys = key.split("/")
    return ["/".join(keys[:count]) for count in range(2, len(keys))]


def _advice(
    found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any], rename: Mapping[str, str], path: Place
) -> tuple[str, str]:
    """The `why` and the `do`."""
    why = "it was saved from another model or optimizer."
    moved = _moved(found, stored, wanted) if not found.problems and not rename else []
    if len(moved) == 1:
        ours, theirs = moved[0]
        if ours == "" and "/" not in theirs:
            name = json.dumps(theirs)
            return why, f"the leaves are stored under {name}: restore(path, like={{{name}: ...}})."
        return why, f"they are stored elsewhere: restore(path, like, rename={json.dumps({ours: theirs})})."
    if moved:
        lines = [f"restore(path, like, rename={json.dumps({ours: theirs})})" for ours, theirs in moved]
        return f"{why}\nSeveral stored trees have these leaves.", "\n".join(["say which one to restore:", *lines])
    if any("key<" in line for line in found.problems):
        why = "a random key has another kind than the stored one, and the numbers of one kind do not fit another."
        do = 'give `like` a key of the stored kind (fry is "threefry2x32"): jax.random.key(0, impl="threefry2x32").'
        return why, do
    if _differ_in_dtype(found, stored, wanted):
        why = "only floating dtypes, and integers to wider ones, are converted automatically."
        return why, "use the stored dtypes in `like`, and convert the result: x.astype(jnp.int32)."
    do = f"build `like` with the settings of the saved run. Its contents: jshard ckpt inspect {path}"
    if not found.problems and found.missing:
        do += '\nmissing="init" keeps the values of `like` for leaves that are not stored.'
    if not found.problems and found.extra:
        do += '\nextra="ignore" skips stored leaves that are not wanted.'
    return why, do


def _differ_in_dtype(found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any]) -> bool:
    """Whether the clashing leaves differ only in dtype."""
    picks = [(found.picks.get(line.split("  ")[0]), wanted.get(line.split("  ")[0])) for line in found.problems]
    return bool(picks) and all(
        pick is not None and pick.form == "same" and stored[pick.stored[0]].shape == getattr(leaf, "shape", ())
        for pick, leaf in picks
    )


def _moved(found: Match, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of wanted and stored prefixes; renaming one to the other leaves no path missing."""
    used = {path for pick in found.picks.values() for path in pick.stored}
    fitting = []
    for key in dict.fromkeys([*found.extra, *stored]) if found.missing else ():
        begins = _without_common_end(found.missing[0], key)
        are_moments = _MOMENTS.intersection(begins[1].split("/")) - {*begins[0].split("/")}
        if begins[0] == found.missing[0] or begins in fitting or are_moments:
            continue
        there = {path: renamed(path, dict([begins])) for path in found.missing}
        shapes = {path: tuple(getattr(wanted[path], "shape", ())) for path in there}
        fits = all(at in stored and at not in used and stored[at].shape == shapes[path] for path, at in there.items())
        if fits and (begins[0] == "" or {*there.values()} >= set(found.extra)):
            fitting.append(begins)
    return fitting


def _without_common_end(first: str, second: str) -> tuple[str, str]:
    ours, theirs = first.split("/"), second.split("/")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return "/".join(ours), "/".join(theirs)
