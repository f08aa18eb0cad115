"""The border of a call: its arguments and results as arrays, and as objects for the caller.

A call runs as a program, and only arrays enter and leave a program. An object that JAX does not know would keep the
traced arrays of the program, which are gone afterwards. So it is taken apart at the border (`jshard.engine.objects`).
What Python cannot take apart is refused if it would carry a traced array out.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.context import region_mesh
from jshard.engine.objects import (
    LIBRARIES,
    Again,
    Apart,
    Constant,
    Form,
    IsLeaf,
    assign,
    attributes,
    held,
    holds,
    is_any_array,
    is_jax_array,
    is_record,
    is_traced,
    or_iterator,
    take_apart,
)
from jshard.engine.selections import merged, others, picked
from jshard.engine.values import AnyArray, Leaf, type_text
from jshard.errors import CallError

Callers = tuple[tuple, Mapping[str, object]]

# ---- trees of values


def opens_result(x: object) -> bool:
    """Returns whether a result is taken apart: a record with traced arrays."""
    return is_record(x) and holds(x, is_traced)


def arrays_of(tree: PyTree) -> dict[str, Any]:
    """Returns the arrays of a tree, also of the records among its leaves, by their paths as Python writes them."""
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if is_any_array(leaf) or is_record(leaf):
            prefix = jax.tree_util.keystr(path)
            for access, array in held(leaf, is_any_array, in_functions=False):
                arrays[prefix + access] = array
    return arrays


def opened(tree: PyTree) -> tuple[list[Leaf], Callable[[Sequence[object]], PyTree]]:
    """Returns the arrays among the leaves of a tree and of its objects, and a function that puts them together again.

    Without objects among its leaves, all of them count as arrays.
    """

    def has_arrays(x: object) -> bool:
        return holds(x, is_any_array)

    apart = take_apart(tree, has_arrays, numpy_enters=True)
    if not apart.objects:

        def with_leaves(leaves: Sequence[object]) -> PyTree:
            return apart.form.together(leaves, [])

        return apart.leaves, with_leaves

    is_array = [is_any_array(x) for x in apart.leaves]
    static = others(is_array, apart.leaves)

    def together(arrays: Sequence[object]) -> PyTree:
        return apart.form.together(merged(is_array, arrays, static), [])

    return picked(is_array, apart.leaves), together


# ---- the arguments and results of a call


@dataclasses.dataclass(frozen=True)
class Given:
    """Stands for a leaf of the arguments that the method left as it was."""

    number: int


@dataclasses.dataclass(frozen=True)
class LiveArguments:
    """Arguments put together for one run of the method, and what they are before it.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        before: both, taken apart.
        opaque_ids: ids of the traced arrays that opaque arguments refer to.
    """

    args: tuple
    kwargs: dict[str, object]
    before: Apart
    opaque_ids: frozenset[int]


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
        kwargs: Mapping[str, object],
        callers: Callers,
        *,
        is_leaf: IsLeaf = None,
    ) -> None:
        self._is_leaf = is_leaf
        self._callers = callers
        tree = args, dict(kwargs)
        visible = jax.tree.leaves(tree, is_leaf=or_iterator(is_leaf))
        has_visible_batch = any(is_any_array(x) and x.ndim for x in visible)
        # Without one the batch must be in the objects, where NumPy arrays would else stay constants, whole on each
        # device.
        self._numpy_enters = region_mesh() is None and not has_visible_batch
        apart = self._apart(tree)
        self.leaves = apart.leaves
        self.form = apart.form

    def live(self, args: tuple, kwargs: dict[str, object]) -> LiveArguments:
        """Returns the arguments that the method is about to get, put together by `form` and bound by the adapter."""
        before = self._apart((args, kwargs))
        # An argument may hold traced arrays of a trace around the call. Only what the method adds to it is refused, or
        # what it returns in an object of its own.
        arrays = _opaque_arrays(before.leaves)
        return LiveArguments(args, kwargs, before, frozenset(id(opaque.array) for opaque in arrays))

    def changes(self, live: LiveArguments, where: str) -> Apart | None:
        """Returns the arguments after the method ran, if it changed lists, dicts or objects among them; else None."""
        # First: an opaque argument is the same leaf, whatever the method has stored in it.
        _refuse_filled(live, where)
        before = live.before
        after = self._apart((live.args, live.kwargs))
        if _are_same(after.leaves, before.leaves) and _are_equal(after.form, before.form):
            return None
        # A leaf that was there before is the caller's own, and not an array of the trace: it is left out of the
        # results.
        numbers = {id(x): number for number, x in enumerate(before.leaves)}
        leaves = [Given(numbers[id(x)]) if id(x) in numbers else x for x in after.leaves]
        return dataclasses.replace(after, leaves=leaves)

    def write(self, form: Form, leaves: Iterable[object]) -> None:
        """Gives the caller's lists, dicts and objects the contents that the method gave to its own."""
        # The method's arguments were put together in the form of the caller's, so a `Given` counts the same leaves in
        # both.
        callers_leaves = self._apart(self._callers).leaves
        new_leaves = [callers_leaves[x.number] if isinstance(x, Given) else x for x in leaves]
        assign(self._callers, form.together(new_leaves, []))

    def result(self, form: Form, leaves: Iterable[object]) -> PyTree:
        """Returns a result of the method; an argument in it is the caller's."""
        leaves = list(leaves)
        callers_objects: Sequence[object] = ()
        if any(isinstance(x, Again) for x in leaves):
            callers_objects = self._apart(self._callers).objects
        return form.together(leaves, [], callers_objects)

    def _apart(self, tree: PyTree) -> Apart:
        is_searched = is_any_array if self._numpy_enters else is_jax_array

        def has_arrays(x: object) -> bool:
            return holds(x, is_searched)

        return take_apart(tree, has_arrays, is_leaf=self._is_leaf, numpy_enters=self._numpy_enters)


def results(out: PyTree, live: LiveArguments, where: str) -> Apart:
    """Returns the results of a method, taken apart.

    Raises:
        CallError: an object that cannot be taken apart would carry traced arrays out of the program.
    """
    apart = take_apart(out, opens_result, arguments=live.before.objects)
    # Outside of a region's trace nothing is carried out of a program. And an argument that the method returns may hold
    # traced arrays already, of a trace around the call.
    for opaque in _opaque_arrays(apart.leaves):
        if region_mesh() is not None and id(opaque.array) not in live.opaque_ids:
            raise _opaque_result(opaque, where)
    return apart


def _are_same(new_leaves: Sequence[object], old_leaves: Sequence[object]) -> bool:
    if len(new_leaves) != len(old_leaves):
        return False
    return all(_is_same(new, old) for new, old in zip(new_leaves, old_leaves, strict=True))


def _is_same(new: object, old: object) -> bool:
    return new is old or (isinstance(new, (Again, Constant)) and new == old)


def _are_equal(new_form: Form, old_form: Form) -> bool:
    try:
        return new_form == old_form
    except ValueError:  # a pytree of the user that holds NumPy arrays in its structure
        return True


@dataclasses.dataclass(frozen=True)
class _OpaqueArray:
    """A traced array that a leaf refers to which is not an array."""

    leaf: object
    access: str  # the Python text that leads to it
    array: AnyArray


def _opaque_arrays(leaves: Sequence[object]) -> Iterator[_OpaqueArray]:
    for leaf in leaves:
        is_module = isinstance(leaf, (nnx.Pytree, nnx.Variable)) or _compat.is_linen_module(leaf)
        if is_any_array(leaf) or is_module:
            continue
        for access, array in held(leaf, is_traced, in_functions=True):
            yield _OpaqueArray(leaf, access, array)


def _refuse_filled(live: LiveArguments, where: str) -> None:
    """Raises if the method stored traced arrays in an argument that was not taken apart."""
    for opaque in _opaque_arrays(live.before.leaves):
        if region_mesh() is not None and id(opaque.array) not in live.opaque_ids:
            raise CallError(
                "A method stored an array in an argument that JAX does not know.",
                where=f"{where}: a {type(opaque.leaf).__qualname__}, {_described(opaque)}",
                why="the call is traced once and runs as a program: the array in the argument is not a number.",
                do=f"return the array from the method, and store it outside.\n{_GLOBAL_VIEW}",
            )


# ---- what cannot be taken apart

_GLOBAL_VIEW = "or with js.global_view(): y = model(x)  # around the outermost call"


def _opaque_result(opaque: _OpaqueArray, where: str) -> CallError:
    kind = type(opaque.leaf).__qualname__.rpartition("<locals>.")[2]
    return CallError(
        "A method returned an object that JAX does not know, with an array of the model in it.",
        where=f"{where}: a {kind}, {_described(opaque)}",
        why="the call is traced once and runs as a program. Only arrays leave it, in containers that JAX knows and in"
        f" dataclasses; a {kind} would keep a traced array, which is not a number.",
        do=f"{_registration(opaque.leaf, kind)}\n{_GLOBAL_VIEW}",
    )


def _described(opaque: _OpaqueArray) -> str:
    return f"{opaque.access.strip()}: {type_text(opaque.array)}"


def _registration(x: object, kind: str) -> str:
    """Returns the lines that make a class known to JAX, or advice for a result that has no class of its own."""
    is_of_library = type(x).__module__.partition(".")[0] in LIBRARIES
    if is_of_library or isinstance(x, types.FunctionType):
        return "return the arrays, and make the object from them outside the call"
    arrays: list[str] = []
    settings: list[str] = []
    for name, value in attributes(x).items():
        if holds(value, is_any_array, in_functions=True):
            arrays.append(name)
        else:
            settings.append(name)
    array_values = ", ".join(f"x.{name}" for name in arrays)
    setting_items = "".join(f"({name!r}, x.{name}), " for name in settings)
    return "\n".join(
        [  # `__init__` would compute with the values a second time
            "def together(others, arrays):",
            f"    new = object.__new__({kind})",
            f"    for name, value in (*others, *zip({arrays}, arrays)): object.__setattr__(new, name, value)",
            "    return new",
            f"def apart(x): return ({array_values},), ({setting_items.rstrip()})",
            f"jax.tree_util.register_pytree_node({kind}, apart, together)  # once",
        ]
    )
