"""One report of several sessions: each has measured its own processes of the same run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

_SAME = ("case", "quick", "sizes", "device", "processes", "rounds", "steps", "alive", "worker_versions")


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report of all processes."""
    whole = copy.deepcopy(reports[0])
    for other in reports[1:]:
        unlike = [name for name in _SAME if other.get(name) != whole.get(name)]
        if unlike:
            sys.exit(f"merge: these reports are not of one run: they differ in {', '.join(unlike)}")
        twice = set(whole["measured_processes"]) & set(other["measured_processes"])
        if twice:
            sys.exit(f"merge: process {min(twice)} is in two of the files")
        _add(whole, other)
    missing = sorted(set(range(whole["processes"])) - set(whole["measured_processes"]))
    if missing:
        sys.exit(f"merge: no file has the processes {', '.join(map(str, missing))} of {whole['processes']}")
    whole["measured_processes"].sort()
    return whole


def _add(whole: dict[str, Any], other: dict[str, Any]) -> None:
    """What is left out anywhere is left out: its other processes had no one to train with."""
    whole["measured_processes"] += other["measured_processes"]
    whole["devices"] = sorted({*whole["devices"], *other["devices"]})
    whole["left_out"] |= other["left_out"]
    whole["load_per_core_before"] = max(whole["load_per_core_before"], other["load_per_core_before"])
    for name in [*whole["candidates"]]:
        if name in whole["left_out"]:
            del whole["candidates"][name]
        else:
            whole["candidates"][name]["processes"] |= other["candidates"][name]["processes"]
