"""Compares the step of a run with a plan before the first step: `jshard train --expect plan.json`."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from jax.sharding import Mesh

from jshard._files import read_named
from jshard._parsing import checked, parse_json
from jshard._text import human_bytes
from jshard.errors import ShardingError, UnsafeFileError
from jshard.inspect.audit import Audit
from jshard.inspect.communication import traffic_of
from jshard.recipes.recipe import Recipe

_SAVED = "jshard plan MODEL --topology DEVICE:SHAPE --json > plan.json"


# The parts of a plan that are compared, as `jshard plan --topology ... --json` prints them.


class _PlannedCollective(TypedDict):
    kind: str
    executions: int
    total_bytes: float


class _PlannedMixing(TypedDict):
    total_bytes: float


class _PlannedMemory(TypedDict):
    peak_bytes: float


class _PlannedAudit(TypedDict):
    collectives: list[_PlannedCollective]
    mixing: list[_PlannedMixing]
    memory_per_device: _PlannedMemory | None


class _CompiledAudit(TypedDict):
    audit: _PlannedAudit


class _CompiledStep(_CompiledAudit, total=False):
    versions: dict[str, str | None]


class _PlannedTraffic(TypedDict):
    kind: str
    axes: list[str]
    dtype: str
    full_bytes: float


class _NeededOfAPlan(TypedDict):
    compiled: _CompiledStep
    communication_per_step: list[_PlannedTraffic]
    platform: str
    topology: str
    mesh: dict[str, int]
    batch_size: int


class _PlannedStep(_NeededOfAPlan, total=False):
    sequence_length: int | None
    accumulate: int
    train_command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """The planned step, and how far the compiled one may differ from it.

    If the run has devices of the planned platform, the number of collectives of each kind, their bytes and the peak
    memory are compared. Another platform's compiler combines collectives and lays out memory differently: there the
    bytes of the collectives required by the annotations are compared, and the step must communicate accordingly.

    Attributes:
        path: the plan, as `jshard plan --topology ... --json` prints it.
        plan: its contents.
        within: the fraction by which each figure may differ, 0 or more.
    """

    path: Path
    plan: _PlannedStep = dataclasses.field(repr=False)
    within: float

    @classmethod
    def read(cls, path: Path, *, within: float) -> ExpectedStep:
        """Reads a plan.

        Raises:
            ShardingError: there is no such file, it is not a plan of a compiled step, or `within` is below 0.
        """
        try:
            plan = checked(parse_json(read_named(path)), _PlannedStep)
        except UnsafeFileError:
            raise
        except (OSError, ValueError) as error:
            why = f"it is not a plan of a compiled step: {error}."
            if isinstance(error, OSError):
                why = f"{(error.strerror or repr(error)).lower()}."
            raise ShardingError(
                "There is no plan to compare with.", where=f"--expect {path}", why=why, do=_SAVED
            ) from error
        if not within >= 0:
            why, do = "it is the fraction by which figures may differ, 0 or more.", "--expect-within 0.05"
            raise ShardingError("The tolerance is not valid.", where=f"--expect-within {within:g}", why=why, do=do)
        return cls(path=path, plan=plan, within=within)

    def check_request(self, recipe: Recipe, mesh: Mesh) -> None:
        """Raises a `ShardingError` if the run has another mesh or batch than the plan."""
        asked = {"mesh": dict(mesh.shape)}
        asked |= {name: getattr(recipe, name) for name in ("batch_size", "sequence_length", "accumulate")}
        planned = {name: self.plan.get(name) for name in asked}
        other = [
            f"{name} {_shown(asked[name])}, planned {_shown(planned[name])}"
            for name in asked
            if not _same(asked[name], planned[name])
        ]
        if other:
            self._refuse("The run is not the one that was planned.", other, "a plan is for one mesh and one batch.")

    def check(self, found: Audit, *, platform: str) -> str:
        """Compares a compiled step.

        Args:
            found: the audit of the step, with its plan and memory.
            platform: that of its devices, "gpu", "tpu" or "cpu".

        Returns:
            One line with the figures that agree.

        Raises:
            ShardingError: a figure differs by more than is allowed.
        """
        is_alike = platform == self.plan["platform"]
        if is_alike:
            wanted, there = _compiled(self.plan["compiled"]["audit"]), _compiled(json.loads(found.to_json()))
        else:
            assert found.plan is not None
            ours = [dataclasses.asdict(one) for one in traffic_of(found.plan)]
            wanted, there = _asked(self.plan["communication_per_step"]), _asked(ours)
            there["differences from the annotations"] = len(found.differences)
        apart = [
            f"{name}: {_written(name, there[name])}, planned {_written(name, wanted[name])}"
            for name in {**wanted, **there}
            if abs(there[name] - wanted[name]) > self.within * wanted[name]
        ]
        if apart:
            versions = self.plan["compiled"].get("versions", {})
            why = (
                f"more than {self.within:.1%} apart; planned by jax {versions.get('jax')} for {self.plan['topology']}."
            )
            more = "\n--expect-within 0.2  # allows more"
            self._refuse("The compiled step is not the one that was planned.", apart, why, do=more)
        figures = ", ".join(f"{name} {_written(name, value)}" for name, value in there.items() if value)
        but = "" if is_alike else f"; of the step for a {self.plan['platform']}, not of the program compiled here"
        return f"as in {self.path}, within {self.within:.1%}: {figures}{but}"

    def _refuse(self, what: str, where: list[str], why: str, do: str = "") -> None:
        command = self.plan.get("train_command")
        again = f"{command} --expect {self.path}" if command else f"{_SAVED}  # plans the run as it is now"
        raise ShardingError(what, where=[f"--expect {self.path}", *where], why=why, do=again + do)


def _compiled(audit: Mapping[str, Any]) -> collections.Counter[str]:
    """The figures of a compiled step by name. An absent one is 0."""
    found: collections.Counter[str] = collections.Counter()
    for row in audit["collectives"]:
        found[f"{row['kind']}s"] += row["executions"]
        found[f"bytes of {row['kind']}"] += row["total_bytes"]
    for row in audit["mixing"]:
        found["bytes of the model's own mixing"] += row["total_bytes"]
    found["peak bytes"] = (audit["memory_per_device"] or {}).get("peak_bytes", 0)
    return found


def _asked(traffic: Iterable[Mapping[str, Any]]) -> collections.Counter[str]:
    """The same for the collectives required by the annotations."""
    found: collections.Counter[str] = collections.Counter()
    for one in traffic:
        found[f"bytes of {one['kind']} over {', '.join(one['axes'])} in {one['dtype']}"] += one["full_bytes"]
    return found


def _written(name: str, value: float) -> str:
    return human_bytes(value) if "bytes" in name else f"{value:,}"


def _same(asked: Any, planned: Any) -> bool:
    """The degrees without the axes of degree 1."""
    if isinstance(asked, dict) and isinstance(planned, dict):
        wide = lambda sizes: {axis: degree for axis, degree in sizes.items() if degree > 1}
        return wide(asked) == wide(planned)
    return asked == planned


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{axis}={degree}" for axis, degree in value.items())
    return str(value)
