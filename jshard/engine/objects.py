"""Objects that JAX does not know: the arrays that they hold; taken apart into values, and put together again.

A dataclass that is no pytree, or an object of a user's class, is a leaf to JAX. It is taken apart into its attributes
and items, and a new object of its class gets the values: `__init__` and `__post_init__` do not run again.
"""

import collections
import contextlib
import dataclasses
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, TypeGuard

import jax
import numpy as np

from jshard import _compat
from jshard._types import PyTree, TreeDef
from jshard.engine.values import AnyArray, Leaf, are_identical

IsLeaf = Callable[[object], bool] | None
Part = tuple[str, object]
"""A value inside another one, behind the Python text of its access, such as `.mean` or `[0]`."""

_MOST_OBJECTS = 10_000  # visited in search of arrays: a model's settings may refer to half of the program
LIBRARIES = sys.stdlib_module_names | {"jax", "jaxlib", "flax", "numpy", "jshard"}
_VALUES = (str, bytes, int, float, complex, type, types.ModuleType, np.generic, np.dtype)


# ---- what an object holds


def is_traced(x: object) -> bool:
    """Returns whether a value is an array of a trace."""
    return _compat.is_tracer(x)


def is_jax_array(x: object) -> bool:
    """Returns whether a value is an array of JAX, traced or not."""
    return isinstance(x, jax.Array)


def is_any_array(x: object) -> TypeGuard[AnyArray]:
    """Returns whether a value is an array of JAX or NumPy."""
    return isinstance(x, (jax.Array, np.ndarray))


def held(x: object, is_searched: Callable[[object], bool], *, in_functions: bool) -> Iterator[tuple[str, AnyArray]]:
    """Yields the arrays that a value refers to, each with the Python text that leads to it, such as `[0].mean`.

    Args:
        x: any value.
        is_searched: which arrays.
        in_functions: whether to look into closures, bound methods and iterators, too.
    """
    # Breadth first, so that the text is a shortest one; and not by recursion, as objects may refer to each other.
    visited: set[int] = set()
    queue: collections.deque[Part] = collections.deque([("", x)])
    while queue and len(visited) < _MOST_OBJECTS:
        text, value = queue.popleft()
        if is_any_array(value):
            if is_searched(value):
                yield text, value
            continue
        if value is None or isinstance(value, _VALUES) or id(value) in visited:
            continue
        if _compat.is_linen_module(value) and not in_functions:
            continue  # bound to variables of its own, which Flax passes
        visited.add(id(value))
        for access, part in _parts(value, in_functions=in_functions):
            queue.append((text + access, part))


def holds(x: object, is_searched: Callable[[object], bool], *, in_functions: bool = False) -> bool:
    """Returns whether a value refers to such an array, by default other than through a function."""
    return any(True for _ in held(x, is_searched, in_functions=in_functions))


def _parts(x: object, *, in_functions: bool) -> Iterator[Part]:
    """Yields the items and attributes of a value; those of functions and iterators if they are searched."""
    if isinstance(x, dict):
        for key, item in dict.items(x):  # those of `dict` itself: a class of the user's may compute others
            yield f"[{key!r}]", item
    elif isinstance(x, (list, tuple, set, frozenset, collections.deque)):
        for number, item in enumerate(x):
            yield f"[{number}]", item
    if not isinstance(x, types.FunctionType):
        for name, value in attributes(x).items():
            yield f".{name}", value
    if in_functions:
        yield from _parts_of_function(x)


def _parts_of_function(x: object) -> Iterator[Part]:
    """Yields what a function, a method or an iterator refers to."""
    if isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            for content in gc.get_referents(cell):  # nothing, where the cell is still empty
                yield f" closure over {name}", content
        yield " default", (x.__defaults__, x.__kwdefaults__)
    elif isinstance(x, (types.MethodType, types.BuiltinMethodType)):
        yield f".{x.__name__} of", x.__self__
    elif isinstance(x, types.GeneratorType):
        if x.gi_frame:  # None once it has ended
            for name, value in x.gi_frame.f_locals.items():
                yield f" generator over {name}", value
    elif _is_iterator(x):
        for value in gc.get_referents(x):
            yield " iterator over", value


def _is_iterator(x: object) -> bool:
    """Returns whether a value is an iterator or a view of Python's own, which JAX warns of unless it is a leaf."""
    return isinstance(x, (Iterator, ValuesView)) and type(x).__module__ in ("builtins", "itertools")


def or_iterator(is_leaf: IsLeaf) -> Callable[[object], bool]:
    """Returns the function that says which nodes are leaves: those of `is_leaf`, and iterators."""
    if is_leaf is None:
        return _is_iterator

    def is_leaf_or_iterator(x: object) -> bool:
        return is_leaf(x) or _is_iterator(x)

    return is_leaf_or_iterator


def attributes(x: object) -> dict[str, object]:
    """Returns the attributes stored in an object, in its dict and its slots."""
    values = dict(getattr(x, "__dict__", {}))
    for kind in type(x).__mro__:  # each class may have slots of its own
        if kind.__module__ == "builtins":
            continue
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                with contextlib.suppress(AttributeError):  # never set
                    values[name] = member.__get__(x)
    return values


def _set_attribute(x: object, name: str, value: object) -> None:
    """Stores an attribute as `attributes` returns it, in an object that may be frozen."""
    # Past `__setattr__` and properties of the class, which may do more than store, or refuse.
    member = inspect.getattr_static(type(x), name, None)
    if isinstance(member, types.MemberDescriptorType):
        member.__set__(x, value)
    else:
        vars(x)[name] = value


def _is_simple(x: object) -> bool:
    """Returns whether an object consists of its attributes and items: Python made it, and copies it by them."""
    kind = type(x)
    if kind in _compat.SETTINGS or isinstance(x, _VALUES) or _compat.is_linen_module(x):
        return False
    if kind is types.SimpleNamespace:
        return True
    # A new object is made by `__new__` of the class alone; one of the user's own may need arguments, or do more.
    makers = (object.__new__, dict.__new__, list.__new__)
    return kind.__new__ in makers and kind.__module__.partition(".")[0] not in LIBRARIES


def is_record(x: object) -> bool:
    """Returns whether an object is a record of values by its class: a dataclass, one of attrs, a dict or a list."""
    is_attrs = hasattr(type(x), "__attrs_attrs__")
    return dataclasses.is_dataclass(x) or is_attrs or isinstance(x, (types.SimpleNamespace, dict, list))


# ---- structures


@dataclasses.dataclass(frozen=True)
class ObjectForm:
    """How an object consists of values.

    Attributes:
        kind: its class.
        names: of its attributes.
        keys: of its items, if it is a dict or a list.
        values: the structure of its attributes, then items.
    """

    kind: type
    names: tuple[str, ...]
    keys: tuple[Hashable, ...]
    values: "Form"


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure of a tree, of which some leaves are objects that were taken apart. Equal for equal structures.

    Attributes:
        tree: the structure that JAX sees.
        objects: for each leaf of that, its form, or None for an ordinary leaf; empty if no leaf is an object.
    """

    tree: TreeDef
    objects: tuple[ObjectForm | None, ...]

    def together(self, leaves: Iterable[object], made: list[object], arguments: Sequence[object] = ()) -> PyTree:
        """Returns the tree that has these leaves.

        Args:
            leaves: its leaves in order, with those of the objects.
            made: receives the new objects, outer before inner.
            arguments: the objects that `Again` refers to as arguments.
        """
        remaining = iter(leaves)
        values = []
        for form in self.objects or (None,) * self.tree.num_leaves:
            if form is None:
                value = _value_of(next(remaining), made, arguments)
            else:
                value = _new_object(form, remaining, made, arguments)
            values.append(value)
        return jax.tree.unflatten(self.tree, values)


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands for an object that was met before: in the same tree, or as an argument of the call."""

    number: int
    is_argument: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A NumPy array in an object: it stays one, because the code that reads it may need its numbers while traced."""

    value: np.ndarray

    # By identity: NumPy would compare the numbers one by one, and return an array.
    def __eq__(self, constant: object) -> bool:
        return isinstance(constant, Constant) and self.value is constant.value

    def __hash__(self) -> int:
        return id(self.value)


def _value_of(leaf: object, made: list[object], arguments: Sequence[object]) -> object:
    """Returns what a leaf stands for."""
    if isinstance(leaf, Again):
        objects = arguments if leaf.is_argument else made
        return objects[leaf.number]
    if isinstance(leaf, Constant):
        return leaf.value
    return leaf


def _new_object(form: ObjectForm, leaves: Iterator[object], made: list[object], arguments: Sequence[object]) -> object:
    """Returns a new object: it exists before its values, which may refer to it."""
    make: Any = form.kind.__new__  # without `__init__`, which would compute its attributes again, from other arguments
    new = make(form.kind)
    made.append(new)
    values = form.values.together(leaves, made, arguments)
    num_attributes = len(form.names)
    for name, value in zip(form.names, values[:num_attributes], strict=True):
        _set_attribute(new, name, value)
    _fill(new, form.keys, values[num_attributes:])
    return new


def _fill(x: object, keys: Sequence[Hashable], items: Sequence[object]) -> None:
    """Fills a new dict or list without a `__setitem__` or `append` of its class, which may do more than store."""
    if isinstance(x, dict):
        dict.update(x, zip(keys, items, strict=True))
    elif isinstance(x, list):
        list.extend(x, items)


# ---- taking apart


@dataclasses.dataclass(frozen=True)
class Apart:
    """A tree taken apart.

    Attributes:
        leaves: its leaves, with those of the objects.
        form: its structure.
        objects: the objects that were taken apart, outer before inner.
    """

    leaves: list[Leaf]
    form: Form
    objects: list[object]


def take_apart(
    tree: PyTree,
    opens: Callable[[object], bool],
    *,
    is_leaf: IsLeaf = None,
    numpy_enters: bool = False,
    arguments: Sequence[object] = (),
) -> Apart:
    """Flattens a tree like `jax.tree.flatten`, with the objects among its leaves.

    Args:
        tree: any pytree.
        opens: which of its leaves are objects to take apart.
        is_leaf: as for `jax.tree.flatten`.
        numpy_enters: whether NumPy arrays in objects are leaves like other arrays; else they are constants.
        arguments: objects that are not taken apart: `Again` stands for them.
    """
    flattening = _Flattening(opens, is_leaf, numpy_enters=numpy_enters, arguments=arguments)
    form = flattening.form_of(tree, is_inside=False)
    return Apart(flattening.leaves, form, flattening.objects)


class _Flattening:
    """One walk through a tree.

    Attributes:
        leaves: the leaves met so far.
        objects: the objects taken apart so far.
    """

    def __init__(
        self, opens: Callable[[object], bool], is_leaf: IsLeaf, *, numpy_enters: bool, arguments: Sequence[object]
    ) -> None:
        self._opens = opens
        self._is_leaf = is_leaf
        self._numpy_enters = numpy_enters
        # By id; the tree and the arguments keep the objects alive.
        self._known = {id(x): Again(number, is_argument=True) for number, x in enumerate(arguments)}
        self.leaves: list[Leaf] = []
        self.objects: list[object] = []

    def form_of(self, tree: PyTree, *, is_inside: bool) -> Form:
        """Returns the form of a tree: the whole one, or the values inside an object."""
        flat, structure = jax.tree.flatten(tree, is_leaf=or_iterator(self._is_leaf))
        forms = [self._form_of_leaf(x, is_inside=is_inside) for x in flat]
        if not any(forms):
            return Form(structure, ())
        return Form(structure, tuple(forms))

    def _form_of_leaf(self, x: Leaf, *, is_inside: bool) -> ObjectForm | None:
        """Takes an object apart; adds any other leaf to the leaves, and returns None."""
        if id(x) in self._known:
            self.leaves.append(self._known[id(x)])
            return None
        if not self._is_opened(x):
            is_constant = is_inside and not self._numpy_enters and isinstance(x, np.ndarray)
            self.leaves.append(Constant(x) if is_constant else x)
            return None
        # Known before its values are looked at: one of them may refer to it.
        self._known[id(x)] = Again(len(self.objects))
        self.objects.append(x)
        named = attributes(x)
        keys, items = _items(x)
        values = self.form_of([*named.values(), *items], is_inside=True)
        return ObjectForm(type(x), tuple(named), keys, values)

    def _is_opened(self, x: object) -> bool:
        """Returns whether a leaf of the structure is an object to take apart."""
        if is_any_array(x) or not _is_simple(x):
            return False
        if self._is_leaf is not None and self._is_leaf(x):
            return False
        return self._opens(x)


def _items(x: object) -> tuple[tuple[Hashable, ...], list[object]]:
    """Returns the keys and items of a dict or a list of a user's class; nothing for other objects."""
    if isinstance(x, dict):
        return tuple(dict.keys(x)), list(dict.values(x))
    if isinstance(x, list):
        return tuple(range(len(x))), list(list.__iter__(x))
    return (), []


# ---- writing back


def assign(old: Leaf, new: Leaf) -> Leaf:
    """Gives a list, dict or object the contents of another one of its kind, in place.

    Returns:
        `old` if it could be changed so that it is like `new`, else `new`.
    """
    if old is new or type(old) is not type(new):
        return new
    if isinstance(old, tuple):
        return _assigned_tuple(old, new)
    if not (isinstance(old, (dict, list)) or _is_simple(old)):
        return new
    _assign_attributes(old, attributes(new))
    if isinstance(old, dict):
        values = {key: assign(old.get(key), value) for key, value in new.items()}
        dict.clear(old)
        dict.update(old, values)
    elif isinstance(old, list):
        padded = [*old, *[None] * len(new)]  # `new` may be longer
        old[:] = [assign(old_item, new_item) for old_item, new_item in zip(padded, new, strict=False)]
    return old


def _assign_attributes(old: object, new_attributes: Mapping[str, object]) -> None:
    old_attributes = attributes(old)
    # Past `__delattr__` of the class, as `_set_attribute` stores past `__setattr__`: those of a frozen dataclass raise.
    for name in old_attributes.keys() - new_attributes.keys():
        object.__delattr__(old, name)
    for name, value in new_attributes.items():
        _set_attribute(old, name, assign(old_attributes.get(name), value))


def _assigned_tuple(old: tuple, new: tuple) -> tuple:
    """Assigns the items of a tuple; returns the old one if they are all the same objects."""
    # Of all new items: where the old tuple is shorter, there is nothing to change in place.
    values = [assign(old_item, new_item) for old_item, new_item in itertools.zip_longest(old[: len(new)], new)]
    if are_identical(old, values):
        return old
    if hasattr(new, "_fields"):  # a named tuple
        return type(new)(*values)
    return tuple(values)
