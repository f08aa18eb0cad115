"""Steps on the command line: `10:15` is what is done from the end of step 10 to the end of step 15."""

from __future__ import annotations

import re

from jshard._errors import ShardingError


def parse_steps(text: str, *, option: str) -> range:
    """The numbers of the steps in `A:B`: those after step A, up to step B.

    Args:
        text: as given.
        option: which takes it, such as `--profile`.

    Raises:
        ShardingError: it is not of that form, or there is no step between.
    """
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if found is None:
        raise ShardingError(
            "The steps cannot be read.",
            where=f"{option} {text}",
            why="they are given as A:B, two whole numbers: the steps after step A, up to step B.",
            do=f"{option} 10:15  # steps 11 to 15",
        )
    after, last = int(found[1]), int(found[2])
    if last <= after:
        one = max(1, last)
        meant = f"{last}:{after}" if last < after else f"{one - 1}:{one}  # step {one}"
        raise ShardingError(
            "There is no step between the two.",
            where=f"{option} {text}",
            why=f"A:B is the steps after step A, up to step B, and {last} is not after {after}.",
            do=f"{option} {meant}",
        )
    return range(after + 1, last + 1)
