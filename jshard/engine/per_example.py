"""`js.per_example`: a declared function is one equation, which runs only on the examples of a shard."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.example_call import Body
from jshard.engine.example_derivative import differentiable
from jshard.engine.rules import PARTIAL
from jshard.engine.selections import merged, others, picked
from jshard.engine.values import type_texts
from jshard.errors import CallError

Function = TypeVar("Function", bound=Callable)
Axes = int | None | tuple[int | None, ...]


def per_example(fn: Function, in_axes: Axes = 0) -> Function:
    """Declares that a function acts on each example independently; for kernels and other opaque calls.

    Operations that the engine knows are split over the data shards without a declaration. An opaque call (Pallas, FFI,
    your own `custom_partitioning`) is computed for the whole batch on every device, unless it is declared. The function
    is then called with the examples of one shard, forward and backward. Outside a sharded model it is called unchanged.

    Args:
        fn: a function of arrays and static values. All results have the examples as dim 0. It must not close over
            traced values.
        in_axes: as in `jax.vmap`: 0 for an argument whose dim 0 is the examples, None for one that is the same for
            all examples, such as weights; a tuple has one entry per argument. Keyword arrays have axis 0. The
            gradient of an argument with None is summed over the shards.

    Returns:
        The function, declared.

    Raises:
        CallError: on a call whose arrays are not as declared.

    Examples:
        >>> normalize = js.per_example(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))  # a kernel of yours
        >>> project = js.per_example(lambda x, w: x @ w, in_axes=(0, None))  # also takes weights
        >>> project(normalize(x), jnp.ones((64, 8))).shape
        (32, 8)
    """
    name = _place(fn)

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> PyTree:
        arguments = _arguments_of(args, kwargs, in_axes, name)
        num_examples = _num_examples(arguments, name)
        trees = []  # the structure of the results, from each trace of `run`; all are equal

        def run(*arrays: jax.Array) -> list[jax.Array]:
            args, kwargs = arguments.rebuild(arrays)
            outs, tree = jax.tree.flatten(fn(*args, **kwargs))
            trees.append(tree)
            return outs

        # Traced for the whole batch, although only shards run it: so mistakes are found where the function is called,
        # and the structure of its results is known.
        program = jax.make_jaxpr(run)(*arguments.arrays)
        _refuse_closed_over(program, name)
        body = Body(run, arguments.dims, (0,) * len(program.out_avals), name)
        _refuse_missing_rows(body, program, num_examples)
        outs = differentiable(body)(*arguments.arrays)
        return jax.tree.unflatten(trees[0], outs)

    return call  # type: ignore[return-value]


def sum_of_parts(fn: Callable[[PyTree, PyTree], jax.Array], whole: PyTree, parts: PyTree) -> jax.Array:
    """Calls a function on each shard and returns the sum of its results over the shards.

    Args:
        fn: takes `whole` and a shard's part of `parts`.
        whole: arrays that each shard has whole.
        parts: arrays of which each shard has a part along dim 0.
    """
    arrays, tree = jax.tree.flatten((whole, parts))
    num_whole = len(jax.tree.leaves(whole))
    num_parts = len(arrays) - num_whole
    dims = (None,) * num_whole + (0,) * num_parts

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return [fn(*jax.tree.unflatten(tree, arrays))]

    (result,) = differentiable(Body(run, dims, (PARTIAL,), _place(fn)))(*arrays)
    return result


def _refuse_closed_over(program: ClosedJaxpr, name: str) -> None:
    """Raises if the function uses a traced array that it was not passed."""
    traced = [jax.typeof(x).str_short() for x in program.consts if _compat.is_tracer(x)]
    if not traced:
        return
    raise CallError(
        "A function declared with js.per_example closes over a traced array.",
        where=name,
        why=f"{', '.join(traced)}: it is unknown whether a shard has all of it.",
        do="pass it as an argument: js.per_example(fn, in_axes=(0, None))(x, w)",
    )


def _refuse_missing_rows(body: Body, program: ClosedJaxpr, num_examples: int) -> None:
    """Raises if a result does not have a row for each example."""
    wrong = []
    for aval in program.out_avals:
        if aval.ndim == 0 or aval.shape[0] != num_examples:
            wrong.append(aval.str_short())
    if wrong:
        raise body.without_rows(f"{', '.join(wrong)} for {num_examples} examples.")


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arrays among the arguments of a call.

    Attributes:
        arrays: the arrays.
        dims: the dim of the examples of each; None for an array that all examples share.
        rebuild: returns the arguments and keyword arguments with other arrays in their place.
    """

    arrays: list[jax.Array]
    dims: tuple[int | None, ...]
    rebuild: Callable[[Sequence[jax.Array]], tuple[tuple, dict]]


def _arguments_of(args: tuple, kwargs: dict, in_axes: Axes, name: str) -> _Arguments:
    axis_per_argument = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    if len(axis_per_argument) != len(args) or any(axis not in (0, None) for axis in axis_per_argument):
        raise CallError(
            "js.per_example cannot match in_axes with the arguments.",
            where=name,
            why=f"in_axes={in_axes!r} for {len(args)} arguments; each must be 0 or None.",
            do=f"js.per_example(fn, in_axes={(0,) * len(args)})",
        )
    # `in_axes` has one entry for each argument, which may be a tree; each of its arrays has that axis.
    leaves, tree = jax.tree.flatten((args, kwargs))
    axes: list[int | None] = []
    for axis, argument in zip(axis_per_argument, args, strict=True):
        axes += [axis] * len(jax.tree.leaves(argument))
    axes += [0] * (len(leaves) - len(axes))  # keyword arguments come last

    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    static = others(is_array, leaves)

    def rebuild(arrays: Sequence[jax.Array]) -> tuple[tuple, dict]:
        return jax.tree.unflatten(tree, merged(is_array, arrays, static))

    return _Arguments(picked(is_array, leaves), tuple(picked(is_array, axes)), rebuild)


def _num_examples(arguments: _Arguments, name: str) -> int:
    """Returns the number of examples; raises if the arrays disagree, and for one key for all examples."""
    sizes = set()
    for x, dim in zip(arguments.arrays, arguments.dims, strict=True):
        if dim == 0:
            sizes.add(x.shape[0] if x.ndim else None)
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise CallError(
                "A function declared with js.per_example got one random key for all examples.",
                where=name,
                why="every data shard would draw the same numbers, which differ from those of one device.",
                do="keys = jax.random.split(key, x.shape[0])  # and in_axes 0 for them",
            )
    if len(sizes) != 1 or None in sizes:
        raise _different_sizes(arguments, name)
    (num_examples,) = sizes
    return num_examples


def _different_sizes(arguments: _Arguments, name: str) -> CallError:
    shapes = ", ".join(type_texts(arguments.arrays))
    declared = [x for x, dim in zip(arguments.arrays, arguments.dims, strict=True) if dim == 0]
    first_size = next((x.shape[0] for x in declared if x.ndim), None)
    likely_axes = []  # for the advice: what has as many rows as the first array is taken for examples
    for x in arguments.arrays:
        has_examples = x.ndim > 0 and x.shape[0] == first_size
        likely_axes.append(0 if has_examples else None)
    return CallError(
        "The arguments of a function declared with js.per_example do not have the same number of examples.",
        where=name,
        why=f"dim 0 of each array along in_axes 0 are the examples; these are {shapes}.",
        do=f"js.per_example(fn, in_axes={tuple(likely_axes)})  # None for arguments shared by all examples",
    )


def _place(fn: Callable) -> str:
    """Returns the name of a function, with its file and line."""
    function = inspect.unwrap(fn)
    while isinstance(function, functools.partial):  # which has neither a name nor a file
        function = inspect.unwrap(function.func)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    file = code.co_filename.rsplit("/", 1)[-1]
    return f"{name} ({file}:{code.co_firstlineno})"
