"""Which format lies at a path."""

from __future__ import annotations

from pathlib import Path

from jshard.checkpoint.formats.dcp import METADATA, DcpSource
from jshard.checkpoint.formats.safetensors import SUFFIX, SafetensorsSource


def foreign_source(path: str | Path) -> DcpSource | SafetensorsSource | None:
    """Opens a checkpoint of another library.

    Args:
        path: a file or folder on this machine.

    Returns:
        The checkpoint; None if there is none of a format that is known here.

    Raises:
        CheckpointError: it cannot be read, or its pickle names something that is not allowed.
        RunError: it is damaged.

    Example:
        >>> source = foreign_source("gpt2/")
    """
    path = Path(path)
    if (path / METADATA).is_file():
        return DcpSource(path)
    if (path.suffix == SUFFIX) if path.is_file() else any(path.glob("*" + SUFFIX)):
        return SafetensorsSource(path)
    return None
