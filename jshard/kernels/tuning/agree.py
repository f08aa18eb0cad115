"""Of several processes the first one decides: all must trace the same program."""

from __future__ import annotations

import json
from collections.abc import Callable

from jshard._errors import FourPartError, RunError
from jshard._processes import gather_texts, is_primary


def of_first(work: Callable[[], str], *, where: str) -> str:
    """What the first process makes; the others do nothing and receive it. All of them must call this.

    Args:
        work: makes a text.
        where: what is at work, for the others' error.

    Raises:
        RunError: in the other processes, where the work of the first one failed.
    """
    made, failed = "", None
    if is_primary():
        try:
            made = work()
        except Exception as error:  # the others wait, and are told
            failed = error
    told = {"text": made, "failed": None if failed is None else _first_line(failed)}
    first = json.loads(gather_texts(json.dumps(told))[0])
    if failed is not None:
        raise failed
    if first["failed"] is not None:
        raise RunError(
            "The first process could not do it.",
            where=where,
            why=first["failed"],
            do="see what process 0 says.",
        )
    return str(first["text"])


def _first_line(error: Exception) -> str:
    what = error.what if isinstance(error, FourPartError) else str(error)
    return f"{type(error).__name__}: {next(iter(what.splitlines()), '')}"
