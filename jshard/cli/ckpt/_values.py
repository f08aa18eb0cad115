"""Values of checkpoints as text."""

from collections.abc import Mapping
from datetime import datetime


def moment(seconds: float | None) -> str:
    """Returns seconds since 1970 in local time; nothing for None."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Returns the axes of a mesh that split something; nothing if the mesh is not known."""
    if not mesh:
        return ""
    axes = [f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1]
    return ", ".join(axes) or "1 device"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape without the comma of Python's short tuples."""
    return f"({', '.join(map(str, shape))})"
