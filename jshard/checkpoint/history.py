"""The history of a series: a line per save and restore, `history.jsonl`, written by the first process.

    {"kind": "save" or "restore", "step", "began_at", "error": null or its text, "blocked_s",
     "mesh": {"axes": {name: degree}, "processes": [process of each device, in the order of the mesh]},
     "processes": [{"process", "host", "began_at", "bytes", "phases": [[name, from_s, to_s], ...]}, ...]}

A restore is noted with the next save: who only reads leaves the folder alone. Phases count from the `began_at` of
their process. Bytes are those that count as written or read by it: of a shard that several processes hold, a save
counts the first copy alone, though they may write it in parts. What cannot be written is no reason to end a run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

NAME = "history.jsonl"


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to the history of a series."""
    line = json.dumps(record) + "\n"
    with contextlib.suppress(OSError), (folder / NAME).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"  # a crash cut the last one off
        file.write(line.encode())


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
