"""The `--mesh` option: the degrees that it names, and how many devices they ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jshard._errors import MeshError

_SIMULATED = 8


def parse_mesh(text: str) -> dict[str, int]:
    """The degrees in `"replica=2,fsdp=4"`; none for an empty text.

    Raises:
        MeshError: the text is not a list of axis=degree.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.partition("=")
        if not degree.removeprefix("-").isdecimal() or axis in sizes:
            raise MeshError(
                "The mesh cannot be read.",
                where=f"--mesh {text}",
                why=f"{part!r} is not axis=degree, or its axis was named before.",
                do="--mesh fsdp=-1  # all devices; of several axes as in replica=2,fsdp=4",
            )
        sizes[axis] = int(degree)
    return sizes


def as_option(sizes: Mapping[str, int]) -> str:
    """Degrees as `--mesh` takes them."""
    return ",".join(f"{axis}={degree}" for axis, degree in sizes.items())


def num_devices(sizes: Mapping[str, int]) -> int:
    """Devices that a mesh of these degrees asks for; an axis of -1, or an open `fsdp`, makes it at least 8."""
    fixed = math.prod(degree for degree in sizes.values() if degree > 0)
    is_open = -1 in sizes.values() or "fsdp" not in sizes
    return fixed * math.ceil(_SIMULATED / fixed) if is_open else fixed
