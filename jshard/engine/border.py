"""Objects that JAX does not know, at the border of a call: taken apart into values, and put together again.

A call runs as a program, and only arrays enter and leave a program. A dataclass that is no pytree would keep the traced
arrays of the program, which are gone afterwards. So it is taken apart at the border, and a new object of its class gets
the values: `__init__` and `__post_init__` do not run again. What Python cannot take apart is refused if it would carry
a traced array out.
"""

import collections
import contextlib
import dataclasses
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.engine.context import region_mesh
from jshard.errors import CallError

IsLeaf = Callable[[Any], bool] | None
Callers = tuple[tuple, Mapping[str, Any]]

_MOST_OBJECTS = 10_000  # visited in search of arrays: a model's settings may refer to half of the program
_LIBRARIES = sys.stdlib_module_names | {"jax", "jaxlib", "flax", "numpy", "jshard"}
_VALUES = (str, bytes, int, float, complex, type, types.ModuleType, np.generic, np.dtype)


# ---- what an object holds


def is_traced(x: Any) -> bool:
    """Whether a value is an array of a trace."""
    return _compat.is_tracer(x)


def _is_jax_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _is_any_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def held(x: Any, is_wanted: Callable[[Any], bool], *, in_functions: bool) -> Iterator[tuple[str, Any]]:
    """Arrays that a value refers to, each with the Python text that leads to it, such as `.mean` or `[0].mean`.

    Args:
        x: any value.
        is_wanted: which arrays.
        in_functions: whether to look into closures, bound methods and iterators, too.
    """
    visited: set[int] = set()
    queue = collections.deque([("", x)])
    while queue and len(visited) < _MOST_OBJECTS:
        text, value = queue.popleft()
        if _is_any_array(value):
            if is_wanted(value):
                yield text, value
            continue
        if value is None or isinstance(value, _VALUES) or id(value) in visited:
            continue
        if _compat.is_linen_module(value) and not in_functions:
            continue  # bound to variables of its own, which Flax passes
        visited.add(id(value))
        parts = _parts(value)
        if in_functions:
            parts = itertools.chain(parts, _parts_of_function(value))
        queue.extend((text + name, part) for name, part in parts)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """The items and attributes of a value, as Python writes their access."""
    if isinstance(x, dict):
        yield from ((f"[{key!r}]", item) for key, item in dict.items(x))
    elif isinstance(x, (list, tuple, set, frozenset, collections.deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(x))
    if not isinstance(x, types.FunctionType):
        yield from ((f".{name}", value) for name, value in attributes(x).items())


def _parts_of_function(x: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a method or an iterator refers to."""
    if isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            yield from ((f" closure over {name}", content) for content in gc.get_referents(cell))
        yield " default", (x.__defaults__, x.__kwdefaults__)
    elif isinstance(x, (types.MethodType, types.BuiltinMethodType)):
        yield f".{x.__name__} of", x.__self__
    elif isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        yield from ((f" generator over {name}", value) for name, value in (frame.f_locals if frame else {}).items())
    elif _is_iterator(x):
        yield from ((" iterator over", value) for value in gc.get_referents(x))


def _is_iterator(x: Any) -> bool:
    """Whether a value is an iterator or a view of Python's own, which JAX warns of unless it is named a leaf."""
    return isinstance(x, (Iterator, ValuesView)) and type(x).__module__ in ("builtins", "itertools")


def attributes(x: Any) -> dict[str, Any]:
    """The attributes stored in an object, in its dict and its slots."""
    found = dict(getattr(x, "__dict__", {}))
    for kind in type(x).__mro__:
        if kind.__module__ == "builtins":
            continue
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                with contextlib.suppress(AttributeError):  # never set
                    found[name] = member.__get__(x)
    return found


def _set(x: Any, name: str, value: Any) -> None:
    """Stores an attribute as `attributes` returns it, in an object that may be frozen."""
    member = inspect.getattr_static(type(x), name, None)
    if isinstance(member, types.MemberDescriptorType):
        member.__set__(x, value)
    else:
        vars(x)[name] = value


# ---- taking apart, and together


@dataclasses.dataclass(frozen=True)
class ObjectForm:
    """How an object consists of values."""

    kind: type
    names: tuple[str, ...]  # of its attributes
    keys: tuple[Any, ...]  # of its items, if it is a dict or a list
    values: "Form"  # attributes, then items


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure of a tree, of which some leaves are objects that were taken apart. Equal for equal structures."""

    tree: Any
    objects: tuple[ObjectForm | None, ...]  # for each leaf of the tree; empty if no leaf is such an object

    def together(self, leaves: Iterable[Any], made: list[Any], arguments: Sequence[Any] = ()) -> Any:
        """The tree that has these leaves.

        Args:
            leaves: its leaves in order, with those of the objects.
            made: receives the new objects, outer before inner.
            arguments: the objects that `Again` refers to as arguments.
        """
        rest = iter(leaves)

        def value(form: ObjectForm | None) -> Any:
            if form is None:
                return _value_of(next(rest), made, arguments)
            return _made(form, rest, made, arguments)

        forms = self.objects or (None,) * self.tree.num_leaves
        return jax.tree.unflatten(self.tree, [value(form) for form in forms])


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands for an object that was met before: in the same tree, or as an argument of the call."""

    number: int
    is_argument: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A NumPy array in an object: it stays one, because the code that reads it may need its numbers while traced."""

    value: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _value_of(leaf: Any, made: list[Any], arguments: Sequence[Any]) -> Any:
    if isinstance(leaf, Again):
        return (arguments if leaf.is_argument else made)[leaf.number]
    return leaf.value if isinstance(leaf, Constant) else leaf


def _made(form: ObjectForm, leaves: Iterator[Any], made: list[Any], arguments: Sequence[Any]) -> Any:
    """A new object: it exists before its values, which may refer to it."""
    make: Any = form.kind.__new__
    new = make(form.kind)
    made.append(new)
    values = form.values.together(leaves, made, arguments)
    _fill(new, dict(zip(form.names, values, strict=False)), form.keys, values[len(form.names) :])
    return new


def _fill(x: Any, named: Mapping[str, Any], keys: Sequence[Any], items: Sequence[Any]) -> None:
    """Sets the contents of an object without its own `__setattr__` and `__setitem__`: it may be frozen."""
    for name, value in named.items():
        _set(x, name, value)
    if isinstance(x, dict):
        dict.update(x, zip(keys, items, strict=True))
    elif isinstance(x, list):
        list.extend(x, items)


@dataclasses.dataclass(frozen=True)
class Apart:
    """A tree taken apart."""

    leaves: list[Any]
    form: Form
    objects: list[Any]  # that were taken apart, outer before inner


def take_apart(
    tree: Any,
    opens: Callable[[Any], bool],
    *,
    is_leaf: IsLeaf = None,
    numpy_enters: bool = False,
    arguments: Sequence[Any] = (),
) -> Apart:
    """Flattens a tree like `jax.tree.flatten`, with the objects among its leaves.

    Args:
        tree: any pytree.
        opens: which of its leaves are objects to take apart.
        is_leaf: as for `jax.tree.flatten`.
        numpy_enters: whether NumPy arrays in objects are leaves like other arrays; else they are constants.
        arguments: objects that are not taken apart: `Again` stands for them.
    """
    leaves: list[Any] = []
    objects: list[Any] = []
    known = {id(x): Again(i, is_argument=True) for i, x in enumerate(arguments)}

    def form_of(tree: Any, *, is_inside: bool) -> Form:
        flat, structure = jax.tree.flatten(tree, is_leaf=_or_iterator(is_leaf))
        forms = [form_of_leaf(x, is_inside=is_inside) for x in flat]
        return Form(structure, tuple(forms) if any(forms) else ())

    def form_of_leaf(x: Any, *, is_inside: bool) -> ObjectForm | None:
        if id(x) in known:
            leaves.append(known[id(x)])
            return None
        if _is_any_array(x) or not _is_simple(x) or (is_leaf is not None and is_leaf(x)) or not opens(x):
            is_constant = is_inside and not numpy_enters and isinstance(x, np.ndarray)
            leaves.append(Constant(x) if is_constant else x)
            return None
        known[id(x)] = Again(len(objects))
        objects.append(x)
        named = attributes(x)
        keys, items = _items(x)
        return ObjectForm(type(x), tuple(named), keys, form_of([*named.values(), *items], is_inside=True))

    return Apart(leaves, form_of(tree, is_inside=False), objects)


def _or_iterator(is_leaf: IsLeaf) -> Callable[[Any], bool]:
    return _is_iterator if is_leaf is None else lambda x: is_leaf(x) or _is_iterator(x)


def _items(x: Any) -> tuple[tuple[Any, ...], list[Any]]:
    if isinstance(x, dict):
        return tuple(dict.keys(x)), list(dict.values(x))
    if isinstance(x, list):
        return tuple(range(len(x))), list(list.__iter__(x))
    return (), []


def _is_simple(x: Any) -> bool:
    """Whether an object consists of its attributes and items: Python made it, and copies it by them."""
    kind = type(x)
    if kind in _compat.SETTINGS or isinstance(x, _VALUES) or _compat.is_linen_module(x):
        return False
    if kind is types.SimpleNamespace:
        return True
    makers = (object.__new__, dict.__new__, list.__new__)
    return kind.__new__ in makers and kind.__module__.partition(".")[0] not in _LIBRARIES


def _is_record(x: Any) -> bool:
    """Whether an object is a record of values by its class: a dataclass, one of attrs, a dict or a list."""
    is_attrs = hasattr(type(x), "__attrs_attrs__")
    return dataclasses.is_dataclass(x) or is_attrs or isinstance(x, (types.SimpleNamespace, dict, list))


def opens_result(x: Any) -> bool:
    """Whether a result is taken apart: a record with traced arrays."""
    return _is_record(x) and any(True for _ in held(x, is_traced, in_functions=False))


def arrays_of(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, also of the records among its leaves, by their paths as Python writes them."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if _is_any_array(leaf) or _is_record(leaf):
            text = jax.tree_util.keystr(path)
            found |= {text + way: array for way, array in held(leaf, _is_any_array, in_functions=False)}
    return found


def opened(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a tree that are arrays, also those of objects, and how they are put together again.

    Without objects among its leaves, all of them count as arrays.
    """
    apart = take_apart(tree, lambda x: any(True for _ in held(x, _is_any_array, in_functions=False)), numpy_enters=True)
    is_array = [not apart.objects or _is_any_array(x) for x in apart.leaves]

    def together(arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if is_one else x for x, is_one in zip(apart.leaves, is_array, strict=True)]
        return apart.form.together(leaves, [])

    return [x for x, is_one in zip(apart.leaves, is_array, strict=True) if is_one], together


# ---- the arguments and results of a call


@dataclasses.dataclass(frozen=True)
class Given:
    """Stands for a leaf of the arguments that the method left as it was."""

    number: int


@dataclasses.dataclass(frozen=True)
class LiveArguments:
    """Arguments put together for one run of the method, and what they are before it."""

    args: tuple
    kwargs: dict[str, Any]
    before: Apart
    held: frozenset[int]  # ids of the traced arrays that opaque arguments refer to


class Arguments:
    """The arguments of a call as leaves, and the objects among them.

    Args:
        args: positional arguments, in the form in which an adapter passes them to the program.
        kwargs: keyword arguments.
        callers: the caller's own arguments, which receive what the method changes in lists, dicts and objects.
        is_leaf: as for `jax.tree.flatten`.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        callers: tuple[tuple, Mapping[str, Any]],
        *,
        is_leaf: IsLeaf = None,
    ) -> None:
        self._is_leaf = is_leaf
        tree = args, dict(kwargs)
        visible = [x for x in jax.tree.leaves(tree, is_leaf=_or_iterator(is_leaf)) if _is_any_array(x) and x.ndim]
        self._numpy_enters = region_mesh() is None and not visible  # then the batch must be in the objects
        apart = self._apart(tree)
        self.leaves, self.form = apart.leaves, apart.form
        self._callers = callers

    def live(self, args: tuple, kwargs: dict[str, Any]) -> LiveArguments:
        """Arguments that the method is about to get, put together by `form` and bound by the adapter."""
        before = self._apart((args, kwargs))
        return LiveArguments(args, kwargs, before, frozenset(id(x) for _, _, x in _opaque_arrays(before.leaves)))

    def changes(self, live: LiveArguments, where: str) -> Apart | None:
        """The arguments after the method ran, if it changed lists, dicts or objects among them; else None."""
        _refuse_filled(live, where)
        before, after = live.before, self._apart((live.args, live.kwargs))
        is_same = len(after.leaves) == len(before.leaves)
        is_same = is_same and all(_is_same(new, old) for new, old in zip(after.leaves, before.leaves, strict=True))
        if is_same and _are_equal(after.form, before.form):
            return None
        numbers = {id(x): i for i, x in enumerate(before.leaves)}
        leaves = [Given(numbers[id(x)]) if id(x) in numbers else x for x in after.leaves]
        return dataclasses.replace(after, leaves=leaves)

    def write(self, form: Form, leaves: Iterable[Any]) -> None:
        """Gives the caller's lists, dicts and objects the contents that the method gave to its own."""
        mine = self._apart(self._callers).leaves
        new = form.together([mine[x.number] if isinstance(x, Given) else x for x in leaves], [])
        _assign(self._callers, new)

    def result(self, form: Form, leaves: Iterable[Any]) -> Any:
        """A result of the method; an argument in it is the caller's."""
        objects = self._apart(self._callers).objects if any(isinstance(x, Again) for x in leaves) else []
        return form.together(leaves, [], objects)

    def _apart(self, tree: Any) -> Apart:
        is_wanted = _is_any_array if self._numpy_enters else _is_jax_array
        opens = lambda x: any(True for _ in held(x, is_wanted, in_functions=False))
        return take_apart(tree, opens, is_leaf=self._is_leaf, numpy_enters=self._numpy_enters)


def _are_equal(one: Form, other: Form) -> bool:
    try:
        return one == other
    except ValueError:  # a pytree of the user that holds NumPy arrays in its structure
        return True


def results(out: Any, live: LiveArguments, where: str) -> Apart:
    """The results of a method, taken apart.

    Raises:
        CallError: an object that cannot be taken apart would carry traced arrays out of the program.
    """
    apart = take_apart(out, opens_result, arguments=live.before.objects)
    for i, text, array in _opaque_arrays(apart.leaves):
        if region_mesh() is not None and id(array) not in live.held:
            raise _opaque_result(apart.leaves[i], text, array, where)
    return apart


def _is_same(new: Any, old: Any) -> bool:
    return new is old or (isinstance(new, (Again, Constant)) and new == old)


def _opaque_arrays(leaves: Sequence[Any]) -> Iterator[tuple[int, str, Any]]:
    """The traced arrays that leaves refer to which are not arrays: the number of the leaf, the way, the array."""
    for i, x in enumerate(leaves):
        is_module = isinstance(x, (nnx.Pytree, nnx.Variable)) or _compat.is_linen_module(x)
        if not _is_any_array(x) and not is_module:
            yield from ((i, text, array) for text, array in held(x, is_traced, in_functions=True))


def _refuse_filled(live: LiveArguments, where: str) -> None:
    """Raises if the method stored traced arrays in an argument that was not taken apart."""
    leaves = live.before.leaves
    for i, text, array in _opaque_arrays(leaves):
        if region_mesh() is not None and id(array) not in live.held:
            x = leaves[i]
            raise CallError(
                "A method stored an array in an argument that JAX does not know.",
                where=f"{where}: a {type(x).__qualname__}, {_described(text, array)}",
                why="the call is traced once and runs as a program: the array in the argument is not a number.",
                do=f"return the array from the method, and store it outside.\n{_GLOBAL_VIEW}",
            )


def _assign(old: Any, new: Any) -> Any:
    """Gives a list, dict or object the contents of another one of its kind; returns which of the two to use."""
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, tuple):
        values = [_assign(a, b) for a, b in itertools.zip_longest(old[: len(new)], new)]
        is_same = len(old) == len(new) and all(a is b for a, b in zip(old, values, strict=True))
        return old if is_same else _tuple_like(new, values)
    if not (isinstance(old, (dict, list)) or _is_simple(old)):
        return new
    named = attributes(old)
    for name in named.keys() - attributes(new).keys():
        object.__delattr__(old, name)
    for name, value in attributes(new).items():
        _set(old, name, _assign(named.get(name), value))
    if isinstance(old, dict):
        values = {key: _assign(old.get(key), value) for key, value in new.items()}
        dict.clear(old)
        dict.update(old, values)
    elif isinstance(old, list):
        old[:] = [_assign(a, b) for a, b in zip([*old, *[None] * len(new)], new, strict=False)]
    return old


def _tuple_like(x: tuple, values: list[Any]) -> tuple:
    return type(x)(*values) if hasattr(x, "_fields") else tuple(values)


# ---- what cannot be taken apart

_GLOBAL_VIEW = "or with js.global_view(): y = model(x)  # around the outermost call"


def _opaque_result(x: Any, text: str, array: Any, where: str) -> CallError:
    kind = type(x).__qualname__.rpartition("<locals>.")[2]
    return CallError(
        "A method returned an object that JAX does not know, with an array of the model in it.",
        where=f"{where}: a {kind}, {_described(text, array)}",
        why="the call is traced once and runs as a program. Only arrays leave it, in containers that JAX knows and in"
        f" dataclasses; a {kind} would keep a traced array, which is not a number.",
        do=f"{_registration(x, kind)}\n{_GLOBAL_VIEW}",
    )


def _described(text: str, array: Any) -> str:
    return f"{text.strip()}: {array.dtype}{list(array.shape)}"


def _registration(x: Any, kind: str) -> str:
    """The line that makes a class known to JAX, or the other form of a result that has no class of its own."""
    is_users = type(x).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(x, types.FunctionType)
    if not is_users:
        return "return the arrays, and make the object from them outside the call"
    named = attributes(x)
    data = [name for name, value in named.items() if any(True for _ in held(value, _is_any_array, in_functions=True))]
    arrays = ", ".join(f"x.{name}" for name in data)
    others = "".join(f"({name!r}, x.{name}), " for name in named if name not in data)
    return "\n".join(
        [  # `__init__` would compute with the values a second time
            "def together(others, arrays):",
            f"    new = object.__new__({kind})",
            f"    for name, value in (*others, *zip({data}, arrays)): object.__setattr__(new, name, value)",
            "    return new",
            f"def apart(x): return ({arrays},), ({others.rstrip()})",
            f"jax.tree_util.register_pytree_node({kind}, apart, together)  # once",
        ]
    )
