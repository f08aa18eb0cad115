"""The ledger of a series, `series.json`: the steps whose checkpoints it wrote, or began to. Nothing else is deleted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

_NAME = "series.json"


def begun(folder: Path) -> list[int]:
    """Steps whose checkpoints a series wrote, or began to; what cannot be read claims nothing."""
    try:
        return [int(step) for step in json.loads((folder / _NAME).read_text())["begun"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write(folder: Path, steps: Iterable[int]) -> None:
    """Writes the ledger of a series, and returns when it is on the disk."""
    draft = folder / f"{_NAME}.tmp"
    with draft.open("w") as file:
        json.dump({"begun": list(steps)}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / _NAME)
