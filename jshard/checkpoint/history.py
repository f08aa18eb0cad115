"""The history of a series: a line per save and restore, `history.jsonl`, written by the first process.

    {"kind": "save" or "restore", "step", "began_at", "error": null or its text, "blocked_s",
     "mesh": {"axes": {name: degree}, "processes": [process of each device, in the order of the mesh]},
     "processes": [{"process", "host", "began_at", "bytes", "phases": [[name, from_s, to_s], ...]}, ...]}

A restore is noted with the next save: who only reads leaves the folder alone. Phases count from the `began_at` of
their process. What cannot be written is no reason to end a run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

NAME = "history.jsonl"


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to the history of a series."""
    with contextlib.suppress(OSError), (folder / NAME).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The history of a series, oldest first; lines that were cut off by a crash are left out."""
    return list(_lines(folder / NAME))


def mesh_layout(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh of a state as the history tells it."""
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            return {
                "axes": dict(mesh.shape),
                "processes": [device.process_index for device in np.asarray(mesh.devices).flat],
            }
    return {"axes": {}, "processes": []}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
