"""A note on errors that pass through the trace of a call: which module raised them, where, and a way out if one is.

An annotated call is traced even where plain Flax would run on concrete values, and a unit is traced apart from the
call around it. The error itself, its type and its text, stays as JAX or the user's code raised it.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from jshard import _compat
from jshard.engine.context import during
from jshard.errors import FourPartError

if TYPE_CHECKING:
    from jshard.engine.trace import Call

_HEAD = "Raised inside the call of an annotated module: "
_OF_TRACING = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
"""What JAX raises where code needs the numbers of a traced array, or an array that has outlived its trace."""

_runs_as_written: contextvars.ContextVar[bool | None] = contextvars.ContextVar("runs_as_written", default=None)
"""Whether plain Flax would run the outermost call on concrete values; None outside of a call."""


@contextlib.contextmanager
def inside_annotated_call(call: "Call") -> Iterator[None]:
    """A context in which a call is traced: an error gets the note of the innermost call that it passes through."""
    # Asked of the outermost call alone: for those inside, all arrays are traced.
    is_eager = _runs_as_written.get()
    if is_eager is None:
        operands = (*call.params, *call.inputs)
        is_eager = all(map(_compat.is_concrete, operands)) and not _compat.in_trace()
    try:
        with during(_runs_as_written, is_eager):
            yield
    except FourPartError:  # it names its place
        raise
    except Exception as error:
        # The innermost call has noted itself; those around it are passed without a note.
        if not any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
            error.add_note(_note(error, call, is_eager=is_eager))
        raise


def _note(error: Exception, call: "Call", *, is_eager: bool) -> str:
    line = _compat.failed_line(error)
    place = f", at {line}" if line else ""
    head = f"{_HEAD}{call.location}{place}."
    if not isinstance(error, _OF_TRACING):
        return head
    if is_eager:
        return (
            f"{head} The call is traced, as by jax.jit. As plain Flax it has concrete values:\n"
            "  with js.global_view(): y = model(x)  # around the outermost call"
        )
    return f"{head} Under jax.jit, or another transformation around it, plain Flax is traced, too."
