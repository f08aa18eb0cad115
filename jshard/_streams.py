"""The standard streams of a program: open, and able to write any text.

It only imports the standard library, so that it is available before jax.
"""

import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # in the order of their file descriptors


def open_standard_streams() -> None:
    """Opens those that the caller has closed (`<&- >&-`, as some daemons do) on the null device.

    Otherwise the next files and pipes would get their numbers: a child would find its parent's pipe where it expects
    its stdout, and native code would print into a checkpoint.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if _is_open(number):
            continue
        # The system gives the lowest free number, which is this one, as those before it are open.
        opened = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(opened, True)
        stream = open(opened, mode, encoding="utf-8", closefd=False)  # noqa: SIM115, for the life of the process
        assert opened == number
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def escape_what_cannot_be_written() -> None:
    r"""Writes a character that stdout or stderr cannot encode as its escape, such as `\u2026`.

    An ASCII stream (`PYTHONIOENCODING=ascii`) has no ellipsis, and no stream has half of a surrogate pair, as a file
    name may contain. A run must not end because of a line that it prints.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
