"""The stored form of a state: leaves by path, without any class of Flax, Optax or the user."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.tree_util import FlattenedIndexKey

from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.leaf_sums import box_sums
from jshard.checkpoint.position import is_data_position, position_text, set_position
from jshard.linen.layout import is_padded
from jshard.plans.padding import logical_shape, padding_of

Path = tuple[str, ...]

_ESCAPED = {"%": "%25", "/": "%2F", ".": "%2E", "\\": "%5C", "\0": "%00"}  # not allowed in a folder name
_TABLE = str.maketrans(_ESCAPED)
_STORABLE = frozenset(  # dtypes that TensorStore supports
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 "
    "complex64 complex128".split()
)


def flatten(state: Any) -> dict[Path, Any]:
    """Every leaf of a state by its path; raises `CheckpointError` if two leaves have the same path."""
    pairs = _all_leaves(state)
    count = collections.Counter(path for path, _ in pairs)
    if len(count) < len(pairs):
        raise CheckpointError(
            "The state cannot be stored by path.",
            where=sorted(text(path) for path in count if count[path] > 1),
            why="two leaves have the same path: keys are stored as text.",
            do="rename one of them.",
        )
    return dict(pairs)


def logical_shapes(state: Any) -> dict[Path, tuple[int, ...]]:
    """The stored shapes, without padding, of leaves whose arrays are padded to divide over a mesh."""
    found = {}
    for name, value in _parts(state):
        if (variables := _variables(value)) is not None:
            places = [((*name, *path), variable) for path, variable in variables]
        else:
            nodes = list(_nodes(value, name, is_leaf=lambda x: is_padded(x) or padding_of(x) is not None))
            places = [((*path, "value"), variable) for path, variable in nodes]
            found |= {path: box.shape for path, box in nodes if is_padded(box)}
        found |= {path: logical_shape(variable) for path, variable in places if padding_of(variable) is not None}
    return found


def unflatten_like(like: Any, leaves: Mapping[Path, Any]) -> Any:
    """The inverse of `flatten`: new objects of the types in `like`, with other leaves."""
    filled = {name: _filled(value, name, leaves) for name, value in _parts(like)}
    if _is_named(like):
        return {key: filled[(name,)] for key, name in _names(like).items()}
    return filled[()]


def text(path: Path) -> str:
    """A path as shown and stored: `model/blocks/0/attention/qkv/kernel`."""
    return "/".join(escape(key) for key in path)


def escape(key: str) -> str:
    """A key with the separators of keys and folders escaped."""
    return key.translate(_TABLE) or "%"


def unescape(path: str) -> str:
    """The inverse of `escape`, of a key or of a path with its slashes."""
    for letter, code in reversed(_ESCAPED.items()):
        path = path.replace(code, letter)
    return path


def check_paths(paths: Collection[str]) -> None:
    """Raises `CheckpointError` if a leaf's path is a prefix of another, because Orbax stores a tree."""
    held = set(paths)
    above = [(path, "/".join(path.split("/")[:count])) for path in paths for count in range(1, path.count("/") + 1)]
    if both := [f"{top}  and {path}" for path, top in above if top in held]:
        raise CheckpointError(
            "The state cannot be stored by path.",
            where=both,
            why="the first is an array, so the other cannot be stored below it.",
            do="rename one of them.",
        )


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by path as nested dicts, the form that other Orbax users see."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        node = tree
        for key in folders:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The inverse of `nested`; lists, which other programs store, are treated as dicts with numeric keys."""
    if isinstance(tree, list | tuple):
        tree = {str(number): leaf for number, leaf in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {} if tree is None else {path: tree}
    below = ((f"{path}/{key}" if path else str(key), leaf) for key, leaf in tree.items())
    return {p: leaf for key, value in below for p, leaf in flat(value, key).items()}


def storable(leaves: Mapping[Path, Any], *, abstract: bool = False) -> dict[str, Any]:
    """Leaves converted to the types that are stored: only arrays, ints, floats and texts.

    If only the types matter (`abstract`), an array may be given by shape and dtype, and positions are not queried. A
    `CheckpointError` names the leaves that are of other types or whose values are gone.
    """
    if not abstract:
        _refuse_gone(leaves)
    stored: dict[str, Any] = {}
    bad = []
    for path, leaf in leaves.items():
        key = text(path)
        value = _without_values(leaf) if abstract else _stored(leaf)
        if value is None:
            bad.append(f"{key}  {_kind(leaf)}")
        stored[key] = value
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: {counted(len(bad), 'leaf is', 'leaves are')} not data.",
            where=bad,
            why="a checkpoint holds arrays of numbers, numbers of up to 64 bits, strings, and objects with get_state() "
            "and set_state().",
            do="leave them out of the state, or save the arrays and numbers they contain.",
        )
    return stored


def restored(path: str, value: Any, like: Any) -> Any:
    """A stored value in the type of its counterpart in `like`; data positions are set.

    Raises:
        CheckpointError: the type of `like` has no such value, such as an enum without this member.
    """
    if is_data_position(like):
        set_position(like, value)
        return like
    if isinstance(like, enum.Enum):
        return _member(path, value, type(like))
    if isinstance(like, bool | int | float | str):
        if type(value) is type(like):
            return value
        try:
            return type(like)(value)
        except (TypeError, ValueError) as error:
            raise _not_of_type(path, value, type(like), f"{type(error).__name__}: {error}") from error
    if isinstance(like, np.generic):
        return like.dtype.type(value)
    return value


def _member(path: str, value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """The member with a stored value; earlier versions stored text enums as `Phase.MAIN`."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    try:
        return kind(value)
    except ValueError as error:
        by_name = {f"{kind.__name__}.{name}": member for name, member in kind.__members__.items()}
        if value in by_name:
            return by_name[value]
        values = ", ".join(repr(member.value) for member in kind)
        raise _not_of_type(path, value, kind, f"its members have the values {values}.") from error


def _not_of_type(path: str, value: Any, kind: type, why: str) -> CheckpointError:
    return CheckpointError(
        "A stored value cannot be given the type that `like` has there.",
        where=f"{path}  stored {value!r}  wanted a {kind.__name__}",
        why=why,
        do=f"put a plain {type(value).__name__} there in `like`, and convert the result.",
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is on devices, or would be."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def abstract(leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Shape, dtype and sharding of every array; other leaves are unchanged.

    Arrays on no mesh, such as the random state of an abstract model, are replicated over the mesh of the others.
    """
    found = (getattr(leaf, "sharding", None) for leaf in leaves.values())
    meshes = [sharding.mesh for sharding in found if isinstance(sharding, NamedSharding)]
    over_mesh = NamedSharding(meshes[0], PartitionSpec()) if meshes else None

    def one(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        own = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
        sharding = own if isinstance(own, NamedSharding) else over_mesh or own
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {path: one(leaf) for path, leaf in leaves.items()}


def _stored(leaf: Any) -> Any:
    """The stored form of a leaf; None if it cannot be stored."""
    if isinstance(leaf, enum.Enum):
        # Its `str` is "Phase.MAIN" where the value is "main", by the kind of enum and the version of Python.
        return _stored(leaf.value)
    if isinstance(leaf, str):
        return str.__str__(leaf)  # of a subclass, the text and not what its `__str__` makes of it
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        # A copy, because the caller may change the original. Byte order is not stored.
        return array.astype(array.dtype.newbyteorder("=")) if _is_storable(array.dtype) else None
    if isinstance(leaf, jax.Array):
        if not _is_storable(leaf.dtype):
            return None
        return as_one(leaf) if is_local(leaf) else leaf
    if isinstance(leaf, int):
        return int.__int__(leaf) if -(2**63) <= leaf < 2**63 else None
    if isinstance(leaf, float):
        return float.__float__(leaf)
    if is_data_position(leaf):
        return position_text(leaf)
    return None


def _refuse_gone(leaves: Mapping[Path, Any]) -> None:
    """Refuses arrays without values, and arrays of which this process holds no part, so that it cannot save them."""
    arrays = {text(path): leaf for path, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    if gone := [key for key, leaf in arrays.items() if leaf.is_deleted()]:
        raise CheckpointError(
            f"The state cannot be saved: the values of {counted(len(gone), 'leaf')} are gone.",
            where=gone,
            why="these arrays are deleted: a step that donates its arguments reuses their memory.",
            do="save what the step returns: state = step(state, batch), then save(path, state). Or save before it.",
        )
    if elsewhere := [key for key, leaf in arrays.items() if not leaf.addressable_shards]:
        arrays_elsewhere = counted(len(elsewhere), "array")
        raise CheckpointError(
            f"The state cannot be saved: process {jax.process_index()} holds no part of {arrays_elsewhere}.",
            where=elsewhere,
            why="only devices of other processes hold them, and all processes save together.",
            do="put them on a mesh of all devices: jax.device_put(x, NamedSharding(mesh, PartitionSpec()))",
        )


def _is_storable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype.name in _STORABLE


def _kind(leaf: Any) -> str:
    """A description of a leaf for messages."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return f"an array of {leaf.dtype}"
    return f"an int of {leaf.bit_length()} bits" if isinstance(leaf, int) else f"a {type(leaf).__name__}"


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return "" if is_data_position(leaf) else _stored(leaf)


def _is_named(state: Any) -> bool:
    return isinstance(state, Mapping) and not isinstance(state, nnx.State)


def _parts(state: Any) -> list[tuple[Path, Any]]:
    return [((name,), state[key]) for key, name in _names(state).items()] if _is_named(state) else [((), state)]


def _variables(value: Any, *, numbered: bool = False) -> list[tuple[Path, Any]] | None:
    """The variables of a Flax module or state; None for any other pytree."""
    if not isinstance(value, nnx.Pytree | nnx.State):
        return None
    flat = nnx.to_flat_state(value if isinstance(value, nnx.State) else nnx.state(value))
    return [(tuple(map(str, path)) if numbered else _named_path(value, path), variable) for path, variable in flat]


def _named_path(owner: Any, path: Iterable[Any]) -> Path:
    """The path of a variable in a module, with the keys of dict-like nodes that Flax numbers."""
    names: list[str] = []
    node = owner
    for key in path:
        named = _named_node(node)
        if named is not None and named.is_numbered:
            names.append(named.names[key])
            node = named.children[key]
        else:
            names.append(str(key))
            node = _child(node, key)
    return tuple(names)


def _child(node: Any, key: Any) -> Any:
    """An attribute or item of a module or container; None if it has none, as a state, which has no objects."""
    if isinstance(key, str) and key in getattr(node, "__dict__", {}):
        return vars(node)[key]
    try:
        return node[key]
    except (KeyError, IndexError, TypeError, AttributeError):
        return getattr(node, key, None) if isinstance(key, str) else None


def _all_leaves(state: Any, *, numbered: bool = False) -> list[tuple[Path, Any]]:
    return [pair for name, value in _parts(state) for pair in _leaves(value, name, numbered=numbered)]


def _leaves(value: Any, name: Path, *, numbered: bool) -> Iterator[tuple[Path, Any]]:
    if (variables := _variables(value, numbered=numbered)) is None:
        yield from _tree_leaves(value, name, numbered=numbered)
    for path, variable in variables or ():
        # Usually one; Optax may mask it out.
        yield from _tree_leaves(_raw(variable), (*name, *path), numbered=numbered)


def _tree_leaves(tree: Any, name: Path, *, numbered: bool) -> Iterator[tuple[Path, Any]]:
    for path, node in _nodes(tree, name, is_leaf=is_padded, numbered=numbered):
        yield path, node.value if is_padded(node) else node  # the same path, padded or not


def _nodes(
    tree: Any, name: Path, *, is_leaf: Callable[[Any], bool], numbered: bool = False
) -> Iterator[tuple[Path, Any]]:
    """Leaves by path; below nodes whose children JAX cannot name, by the names they have here."""
    stop = lambda x: is_leaf(x) or _named_node(x) is not None
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        path = (*name, *map(_key, keys))
        named = None if is_leaf(node) else _named_node(node)
        if named is None:
            yield path, node
            continue
        names = tuple(map(str, range(len(named.children)))) if numbered and named.is_numbered else named.names
        for inner, child in zip(names, named.children, strict=True):
            yield from _nodes(child, (*path, inner), is_leaf=is_leaf, numbered=numbered)


@dataclasses.dataclass(frozen=True)
class _NamedNode:
    """A node of a pytree whose children have names that JAX does not know."""

    names: tuple[str, ...]
    children: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]  # with other children, in the same order
    is_numbered: bool  # whether JAX numbers them


# Types that JAX flattens with keys, or not at all; the others are asked for.
_KEYED = (
    *(list, tuple, str, bytes, int, float, complex, type(None), np.ndarray, np.generic, jax.Array),
    *(jax.ShapeDtypeStruct, nnx.Variable, nnx.State, nnx.Pytree),
)


def _named_node(node: Any) -> _NamedNode | None:
    if isinstance(node, _KEYED):
        return None
    if type(node) is dict:
        if not _is_mixed(node):
            return None
        names = _names(node)
        rebuild = lambda new: dict(zip(names, new, strict=True))
        return _NamedNode(tuple(names.values()), tuple(node.values()), rebuild, is_numbered=False)
    flat, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if not flat or not all(len(path) == 1 and isinstance(path[0], FlattenedIndexKey) for path, _ in flat):
        return None
    children = tuple(child for _, child in flat)
    keys = _keys_of(node, structure.node_data(), children)
    if keys is None:
        return None
    names = tuple(_names(dict.fromkeys(keys)).values())
    return _NamedNode(names, children, structure.unflatten, is_numbered=True)


def _keys_of(node: Any, node_data: tuple[type, Any] | None, children: tuple[Any, ...]) -> list[str | int] | None:
    """The keys of the children of a dict-like class that is registered without keys; None if it has none.

    Such a class keeps its keys beside the children, in the order in which they were inserted. By number, values would
    be swapped if they are inserted in another order.
    """
    aside = node_data[1] if node_data is not None else None
    candidates = [aside, *(aside if isinstance(aside, tuple | list) else ())]
    if callable(getattr(node, "keys", None)):
        candidates.append(list(node.keys()))
    for candidate in candidates:
        if not isinstance(candidate, tuple | list) or len(candidate) != len(children):
            continue
        if not all(isinstance(key, str | int) for key in candidate) or len(set(candidate)) != len(candidate):
            continue
        if all(_has(node, key, child) for key, child in zip(candidate, children, strict=True)):
            return list(candidate)
    return None


def _has(node: Any, key: str | int, child: Any) -> bool:
    """Whether a node holds this child under this key: as an item, an attribute, or in a dict of its own."""
    if isinstance(key, str) and getattr(node, key, None) is child:
        return True
    for table in (node, *getattr(node, "__dict__", {}).values()):
        if table is not node and not isinstance(table, Mapping):
            continue
        try:
            if table[key] is child:
                return True
        except (KeyError, IndexError, TypeError):
            continue
    return False


def by_number(state: Any) -> dict[str, str]:
    """By path of leaves below dict-like nodes: the path with numbers for keys, as earlier versions stored it."""
    keyed, numbered = _all_leaves(state), _all_leaves(state, numbered=True)
    pairs = [(path, other) for (path, _), (other, _) in zip(keyed, numbered, strict=True)]
    return {text(path): text(other) for path, other in pairs if path != other}


def _is_mixed(node: Any) -> bool:
    """Whether a dict mixes strings with other keys, which JAX cannot sort."""
    return type(node) is dict and len({isinstance(key, str) for key in node}) > 1


def _names(tree: Mapping[Any, Any]) -> dict[Any, str]:
    """Names of keys in paths: unchanged, or quoted if a number with the same spelling is also a key."""
    numbers = {str(key) for key in tree if not isinstance(key, str)}
    return {key: repr(key) if isinstance(key, str) and key in numbers else str(key) for key in tree}


def _key(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _raw(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _filled(value: Any, name: Path, leaves: Mapping[Path, Any]) -> Any:
    if isinstance(value, nnx.Pytree) and not isinstance(value, nnx.State):
        graphdef, state = nnx.split(value)
        return nnx.merge(graphdef, _filled_state(state, value, name, leaves))
    if isinstance(value, nnx.State):
        return _filled_state(value, value, name, leaves)
    return _filled_tree(value, name, leaves)


def _filled_state(state: nnx.State, owner: Any, name: Path, leaves: Mapping[Path, Any]) -> nnx.State:
    """A state with other leaves; `owner` is the module that it is of, or itself."""
    filled = []
    for path, variable in nnx.to_flat_state(state):
        held = _filled_tree(_raw(variable), (*name, *_named_path(owner, path)), leaves)
        filled.append((path, variable.replace(held) if isinstance(variable, nnx.Variable) else held))
    return nnx.from_flat_state(filled)


def _filled_tree(tree: Any, name: Path, leaves: Mapping[Path, Any]) -> Any:
    stop = lambda x: is_padded(x) or _named_node(x) is not None
    found = []
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        path = (*name, *map(_key, keys))
        named = None if is_padded(node) else _named_node(node)
        if named is None:
            found.append(leaves[path])
            continue
        parts = zip(named.names, named.children, strict=True)
        found.append(named.rebuild([_filled_tree(child, (*path, inner), leaves) for inner, child in parts]))
    structure = jax.tree.structure(tree, is_leaf=lambda x: not is_padded(x) and _named_node(x) is not None)
    return jax.tree.unflatten(structure, found)


# The parameters among the leaves of a state.

_PARAMS = "params"


def parameter_paths(like: Any, paths: Mapping[str, Any]) -> set[str]:
    """The paths of a state that are parameters."""
    begins = {text(begin.path) for begin in _all_begins(like)}
    if "" in begins:
        return set(paths)
    above = lambda path: itertools.accumulate(path.split("/"), "{}/{}".format)
    return {path for path in paths if not begins.isdisjoint(above(path))}


def parameter_roots(like: Any) -> set[str]:
    """The paths of the models in a state, and of its trees `params`: what is stored below them is of a model."""
    return {text(begin.root) for begin in _all_begins(like)}


@dataclasses.dataclass(frozen=True)
class _Begin:
    """Where parameters begin in a state."""

    path: Path
    root: Path  # of the model, or of the tree `params`, that they are part of


def _all_begins(like: Any) -> Iterator[_Begin]:
    for path, value in _parts(like):
        yield from _begins(value, path)


def _begins(value: Any, path: Path, *, within: bool = False) -> Iterator[_Begin]:
    """Where parameters begin in a part of a state; `within` a named tuple, only those of modules."""
    if isinstance(value, nnx.Optimizer):
        return
    if path[-1:] == (_PARAMS,) and not within:
        yield _Begin(path, root=path)
    elif isinstance(value, nnx.Module if within else nnx.Pytree | nnx.State):
        # A part's own variables are under their names; those of a module in a pytree are one key deeper.
        for inner, variable in _variables(value) or ():
            if isinstance(variable, nnx.Param):
                yield _Begin((*path, *inner), root=path)
    else:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        for key, child in _children(value):
            yield from _begins(child, (*path, key), within=within or (is_named and key != _PARAMS))


def _children(node: Any) -> list[tuple[str, Any]]:
    """The direct children of a pytree node, by key."""
    if (named := _named_node(node)) is not None:
        return list(zip(named.names, named.children, strict=True))
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(jax.tree_util.keystr(path, simple=True), child) for path, child in found if path]


def first_devices() -> dict[int, Any]:
    """The first device of each process."""
    return {device.process_index: device for device in reversed(jax.devices())}


# Process-local arrays.


def is_local(leaf: Any) -> bool:
    """Whether this is a process-local array and there are several processes."""
    return isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable


def as_one(leaf: jax.Array) -> jax.Array:
    """The copies of all processes as replicas of one array, without communication."""
    first = first_devices()
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
    own = jax.device_put(leaf, first[jax.process_index()])
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, PartitionSpec()), [own])


def local_copies(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Shape, dtype and checksums, by path, of this process's copies."""
    found = {}
    for key, leaf in leaves.items():
        if is_local(leaf) and leaf.size:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            sums = box_sums(values, (slice(None),) * values.ndim, values.shape)
            found[key] = [list(leaf.shape), str(leaf.dtype), list(sums)]
    return found


def check_equal(heard: Sequence[Mapping[str, list[Any]]]) -> None:
    """Raises `CheckpointError` unless `local_copies` is the same on every process."""
    bad = []
    for key in sorted({key for found in heard for key in found}):
        others = [number for number, found in enumerate(heard) if found.get(key) != heard[0].get(key)]
        if others:
            bad.append(f"{key}  on process 0 and process {', '.join(map(str, others))}")
    if bad:
        raise CheckpointError(
            f"The state cannot be saved: {counted(len(bad), 'leaf differs', 'leaves differ')} between processes.",
            where=bad,
            why="an array on one device per process is stored once for all processes.",
            do="compute it from the same seed on every process, or shard it over the mesh with a row per process.",
        )
