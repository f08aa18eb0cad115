"""The context in which a model is called: in global view, for shapes only, without an update."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh

from jshard.engine.selections import at_positions
from jshard.errors import AnnotationError
from jshard.plans.units import LogicalOptimizer

V = TypeVar("V")

# Two kinds of context. Those of JAX are part of the key of its caches: a function that was jitted in one is traced
# again in the other. That matters for what the user sets around a jitted step. Those of Python are set by the engine,
# inside a trace of its own.
_region_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("region_mesh", default=None)
_shapes_only: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_only", default=False)
_parameters_fixed: contextvars.ContextVar[bool] = contextvars.ContextVar("parameters_fixed", default=False)
_global_view = jax.make_user_context(default_value="")
_no_update = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def during(variable: contextvars.ContextVar[V], value: V) -> Iterator[None]:
    """Sets a context variable inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def region_mesh() -> Mesh | None:
    """The mesh of `traced_for`."""
    return _region_mesh.get()


def traced_for(mesh: Mesh) -> AbstractContextManager[None]:
    """A context in which a model that will run on the data shards of a mesh is traced in global view.

    A call declared as per example decides here how it will run on a shard, such as the form of a kernel.
    """
    return during(_region_mesh, mesh)


def in_shapes_only() -> bool:
    """Whether calls are traced for their shapes alone, so that an abstract mesh is enough."""
    return _shapes_only.get()


def shapes_only() -> AbstractContextManager[None]:
    """A context in which a model with an abstract mesh can be called, in a trace that is never compiled."""
    return during(_shapes_only, True)


def parameters_are_fixed() -> bool:
    """Whether no call may change a parameter."""
    return _parameters_fixed.get()


def parameters_fixed() -> AbstractContextManager[None]:
    """A context for one of several microbatches, which all start from the same parameters."""
    return during(_parameters_fixed, True)


def without_update() -> AbstractContextManager[None]:
    """A context without updates, so that gradients of padded parameters need no optimizer that sees logical arrays."""
    return _no_update(True)


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedParameter:
    """A parameter that is stored padded: its name for messages, and the optimizer of its model."""

    text: str
    optimizer: LogicalOptimizer


def guard(values: Sequence[jax.Array], padded: Mapping[int, PaddedParameter]) -> list[jax.Array]:
    """Stored parameters; differentiating a padded one raises while an optimizer would see the padding.

    `padded` has those by position.
    """
    if _no_update.value:
        return list(values)
    without_optimizer = {i: param for i, param in padded.items() if not param.optimizer.exists}
    if not without_optimizer:
        return list(values)

    # An identity whose derivative raises. Only differentiation says that a gradient is asked for: to look at who calls
    # is to guess.
    @jax.custom_jvp
    def guarded(arrays: list[jax.Array]) -> list[jax.Array]:
        return arrays

    # Symbolic zeros: by them the rule sees which parameters are differentiated, and which only beside others.
    @functools.partial(guarded.defjvp, symbolic_zeros=True)
    def differentiated(
        arrays: tuple[list[jax.Array]], tangents: tuple[list[jax.Array | SymbolicZero]]
    ) -> tuple[list[jax.Array], list[Any]]:
        refused: list[PaddedParameter] = []
        for param, tangent in zip(without_optimizer.values(), tangents[0], strict=True):
            is_differentiated = not isinstance(tangent, SymbolicZero)
            if is_differentiated and not param.optimizer.exists:  # asked again: a trace may be older than the optimizer
                refused.append(param)
        if refused:
            raise AnnotationError(
                "A padded parameter was differentiated, and js.shard_optimizer was not called for its model.",
                where=[param.text for param in refused],
                why="the stored array ends in zeros. Any other optimizer would count them in its means over the"
                " parameter, and its updates would be wrong.",
                do=refused[0].optimizer.do,
            )
        return arrays[0], tangents[0]

    values_guarded = list(values)
    for i, x in zip(without_optimizer, guarded(at_positions(values, without_optimizer)), strict=True):
        values_guarded[i] = x
    return values_guarded


# Attention called while a unit is traced: whether backward runs it again, and how often it was called.
_attention: contextvars.ContextVar[tuple[bool, list[None]] | None] = contextvars.ContextVar("attention", default=None)


@contextlib.contextmanager
def attention_again(is_rerun: bool) -> Iterator[list[None]]:
    """A context to trace a unit whose backward reruns attention, or not; yields one entry per attention call."""
    calls: list[None] = []
    with during(_attention, (is_rerun, calls)):
        yield calls


def note_attention() -> bool:
    """Records a call of attention; returns whether backward runs it again."""
    is_rerun, calls = _attention.get() or (False, [])
    calls.append(None)
    return is_rerun


def in_global_view() -> bool:
    """Whether annotated modules run as plain ones."""
    return bool(_global_view.value)


def in_plain_flax() -> bool:
    """Whether annotated modules run as plain ones that follow their unit's dtypes and remat policy."""
    return _global_view.value == "flax"


@contextlib.contextmanager
def global_view() -> Iterator[None]:
    """Context in which annotated modules run as plain Flax on sharded arrays; the compiler places communication.

    For sampling one text. As outside, the results equal those on one device; the compiler decides memory and
    communication. It can wrap a jitted step.

    Examples:
        >>> with js.global_view():
        ...     logits = model(x[:1])
    """
    with _global_view("plain"):
        yield


def plain_flax() -> AbstractContextManager[None]:
    """Global view as a Flax user would write the model; the baseline for comparisons with jshard.

    Parameters are cast to the compute dtype, blocks run under `jax.checkpoint`, and the compiler places the
    communication.
    """
    return _global_view("flax")
