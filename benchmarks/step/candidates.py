"""Who takes part: frameworks and forms of the step, and which unsharded step each is compared with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train the model."""

    name: str  # for the report
    worker: str  # "jax" or "torch"
    options: Mapping[str, Any]  # for the worker
    sharded: bool = True  # over all processes; else each process trains a model of its own on its own batch
    alone: str = ""  # the unsharded candidate of the same framework, the divisor of the overhead


def _jax(name: str, engine: str, *, scan: bool, alone: str = "") -> Candidate:
    options = {"engine": engine, "scan": scan}
    return Candidate(name=name, worker="jax", options=options, sharded=bool(alone), alone=alone)


def _torch(name: str, *, compiled: bool, alone: str = "") -> Candidate:
    return Candidate(name=name, worker="torch", options={"compile": compiled}, sharded=bool(alone), alone=alone)


ALL = (
    _jax("jshard chain", "jshard", scan=False, alone="JAX"),
    _jax("jshard scan", "jshard", scan=True, alone="JAX scan"),
    _jax("raw Flax", "flax", scan=False, alone="JAX"),
    _jax("raw Flax scan", "flax", scan=True, alone="JAX scan"),
    _jax("JAX", "flax", scan=False),
    _jax("JAX scan", "flax", scan=True),
    _torch("FSDP2", compiled=False, alone="PyTorch"),
    _torch("FSDP2 compiled", compiled=True, alone="PyTorch compiled"),
    _torch("PyTorch", compiled=False),
    _torch("PyTorch compiled", compiled=True),
)
BY_NAME = {candidate.name: candidate for candidate in ALL}
SLOW_TO_COMPILE = ("jshard chain", "raw Flax", "JAX")  # unrolled: minutes for many layers


def chosen(names: str | None, *, deep: bool) -> list[Candidate]:
    """The candidates of a comma-separated list; all by default, but for a deep model the unrolled JAX ones."""
    if names is None:
        return [candidate for candidate in ALL if not (deep and candidate.name in SLOW_TO_COMPILE)]
    asked = [name.strip() for name in names.split(",")]
    unknown = [name for name in asked if name not in BY_NAME]
    if unknown:
        sys.exit(f"no candidates: {', '.join(unknown)}; there are: {', '.join(BY_NAME)}")
    return [candidate for candidate in ALL if candidate.name in asked]
