"""What holds where a model is called: in global view, for shapes only, with copies gathered, without an update."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh

from jshard.errors import AnnotationError
from jshard.plans.units import LogicalOptimizer

V = TypeVar("V")


class Copies:
    """Full copies of parameters, gathered beforehand: found by the arrays that they are copies of.

    A parameter that was changed since, or another model's, is another array.

    Args:
        pairs: each stored array with its copy.

    Attributes:
        missed: whether a call has gathered for itself.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = pairs
        self._by_id = {id(stored): copy for stored, copy in pairs}
        self._taken: set[int] = set()
        self.missed = False

    def of(self, stored: Any) -> Any:
        """The copy of a stored array; None if there is none."""
        return self._by_id.get(id(stored))

    def take(self, arrays: Iterable[Any]) -> None:
        """Notes that a call has taken the copies of these arrays."""
        self._taken |= set(map(id, arrays))

    @property
    def left(self) -> list[int]:
        """Positions of those that no call has taken."""
        return [i for i, (stored, _) in enumerate(self._pairs) if id(stored) not in self._taken]


_copies: contextvars.ContextVar[Copies | None] = contextvars.ContextVar("copies", default=None)
_region_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("region_mesh", default=None)
_shapes_only: contextvars.ContextVar[bool] = contextvars.ContextVar("shapes_only", default=False)
_global_view = jax.make_user_context(default_value="")
_no_update = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def _during(variable: contextvars.ContextVar[V], value: V) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def gathered_copies() -> Copies | None:
    """Copies gathered beforehand; None if each call gathers for itself."""
    return _copies.get()


def copies_scope(copies: Copies | None) -> AbstractContextManager[None]:
    """Sets the copies that calls inside find."""
    return _during(_copies, copies)


def region_mesh() -> Mesh | None:
    """The mesh of `traced_for`."""
    return _region_mesh.get()


def traced_for(mesh: Mesh) -> AbstractContextManager[None]:
    """Inside, a model is traced in global view that will run on the data shards of a mesh.

    Whoever declares a call as per example decides here what it will be on a shard, such as the form of a kernel.
    """
    return _during(_region_mesh, mesh)


def in_shapes_only() -> bool:
    """Whether calls are traced for their shapes alone, so that an abstract mesh will do."""
    return _shapes_only.get()


def shapes_only() -> AbstractContextManager[None]:
    """Inside, a model with an abstract mesh can be called in a trace that is not compiled."""
    return _during(_shapes_only, True)


def is_without_update() -> bool:
    """Whether gradients are made to be looked at: no optimizer gets them."""
    return bool(_no_update.value)


def without_update() -> AbstractContextManager[None]:
    """Inside, gradients of padded parameters need no optimizer that sees logical arrays: there is no update."""
    return _no_update(True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(refuse: Callable[[Sequence[bool]], None], arrays: list[Any]) -> list[Any]:
    return arrays


@functools.partial(_guarded.defjvp, symbolic_zeros=True)
def _differentiated(
    refuse: Callable[[Sequence[bool]], None], arrays: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[list[Any], list[Any]]:
    refuse([not isinstance(tangent, SymbolicZero) for tangent in tangents[0]])
    return arrays[0], tangents[0]


def guard(values: Sequence[Any], padded: Mapping[int, tuple[str, LogicalOptimizer]]) -> list[Any]:
    """Stored parameters; to differentiate a padded one raises as long as an optimizer would see the padding.

    Args:
        values: the parameters.
        padded: the padded ones by position, each with its name for messages and the optimizer of its model.
    """
    guards = {i: one for i, one in padded.items() if not one[1].exists and not is_without_update()}
    if not guards:
        return list(values)

    def refuse(perturbed: Sequence[bool]) -> None:  # late, as a trace may be older than the optimizer
        given = zip(guards.values(), perturbed, strict=True)
        if bad := [one for one, is_bad in given if is_bad and not one[1].exists]:
            raise AnnotationError(
                "A padded parameter was differentiated, and js.shard_optimizer was not called for its model.",
                where=[text for text, _ in bad],
                why="the stored array ends in zeros. An optimizer that js.shard_optimizer did not make counts them in"
                " its means over the parameter, and its updates would be wrong.",
                do=bad[0][1].do,
            )

    after = dict(zip(guards, _guarded(refuse, [values[i] for i in guards]), strict=True))
    return [after.get(i, x) for i, x in enumerate(values)]


# Attention that is called while a unit is traced: whether backward runs it again, and how often it was called.


@dataclasses.dataclass
class _AttentionCalls:
    again: bool
    count: int = 0


_attention: contextvars.ContextVar[_AttentionCalls | None] = contextvars.ContextVar("attention", default=None)


@contextlib.contextmanager
def attention_again(again: bool) -> Iterator[Callable[[], int]]:
    """Inside, a unit is traced whose attention backward runs again, or does not; gives the number of calls so far."""
    calls = _AttentionCalls(again)
    with _during(_attention, calls):
        yield lambda: calls.count


def note_attention() -> bool:
    """Notes a call of attention; whether backward runs it again."""
    calls = _attention.get()
    if calls is None:
        return False
    calls.count += 1
    return calls.again


def in_global_view() -> bool:
    """Whether annotated modules run as plain ones."""
    return bool(_global_view.value)


def in_plain_flax() -> bool:
    """Whether annotated modules run as plain ones that follow their unit's dtypes and remat policy."""
    return _global_view.value == "flax"


@contextlib.contextmanager
def global_view() -> Iterator[None]:
    """Inside, annotated modules run as plain Flax modules on sharded arrays; the compiler places communication.

    For a sample of one text, or a Hessian-vector product by forward mode. The numbers are those of one device, as they
    are outside; memory and communication are the compiler's choice. It may be around a jitted step.

    Example:
        >>> with js.global_view():
        ...     logits = model(x[:1])
    """
    with _global_view("plain"):
        yield


@contextlib.contextmanager
def plain_flax() -> Iterator[None]:
    """Global view as a Flax user would write the model; what jshard is compared with.

    Parameters are cast to the dtype of computation, blocks run under `jax.checkpoint`, and the compiler places the
    communication.
    """
    with _global_view("flax"):
        yield
