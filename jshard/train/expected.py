"""Compares the step of a run with a plan before the first step: `jshard train --expect plan.json`."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypedDict, cast

import jax
from jax.sharding import Mesh

from jshard._files import read_named
from jshard._parsing import checked, parse_json
from jshard._text import human_bytes
from jshard.errors import ShardingError, UnsafeFileError
from jshard.inspect.audit import Audit
from jshard.inspect.communication import traffic_of
from jshard.recipes.recipe import Recipe

_SAVED = "jshard plan MODEL --topology DEVICE:SHAPE --json > plan.json"
_STEP_SETTINGS = ("batch_size", "sequence_length", "accumulate", "sync")
_EARLIER = {"sync": "each"}  # of plans of earlier versions, which do not say it


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
    sync: str  # absent in plans of earlier versions
    communication_by_reduce_scatters: list[_PlannedTraffic]  # absent in plans of earlier versions
    train_command: str
    compiler: str  # absent in plans of earlier versions
    device: str


Figures = collections.defaultdict[str, float]
"""The figures of a step by name. An absent one is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """The planned step, and how far the compiled one may differ from it.

    If the run has devices of the planned platform, the number of collectives of each kind, their bytes and the peak
    memory are compared. Another platform's compiler, as that of another vendor's GPUs, combines collectives and lays
    out memory differently: there the bytes of the collectives required by the annotations are compared, and the step
    must communicate accordingly.

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
        plan = _read_plan(path)
        if not within >= 0:  # not `< 0`: this refuses NaN, too
            raise ShardingError(
                "The tolerance is not valid.",
                where=f"--expect-within {within:g}",
                why="it is the fraction by which figures may differ, 0 or more.",
                do="--expect-within 0.05",
            )
        return cls(path=path, plan=plan, within=within)

    def check_request(self, recipe: Recipe, mesh: Mesh) -> None:
        """Raises a `ShardingError` if the run has another mesh or batch than the plan."""
        requested: dict[str, object] = {"mesh": dict(mesh.shape)}
        for name in _STEP_SETTINGS:
            requested[name] = getattr(recipe, name)
        differences = []
        for name, value in requested.items():
            planned = self.plan.get(name, _EARLIER.get(name))
            if not _is_same(value, planned):
                differences.append(f"{name} {_setting_text(value)}, planned {_setting_text(planned)}")
        if differences:
            self._refuse(
                "The run is not the one that was planned.", differences, "a plan is for one mesh and one batch."
            )

    def check(self, compiled: Audit, *, platform: str, compiler: str = "") -> str:
        """Compares a compiled step.

        Args:
            compiled: the audit of the step, with its plan and memory.
            platform: that of its devices, "gpu", "tpu" or "cpu".
            compiler: "cuda" or "rocm" for GPUs, from `compiler_of`; "" if it does not matter.

        Returns:
            One line with the figures that agree.

        Raises:
            ShardingError: a figure differs by more than is allowed.
        """
        assert compiled.plan is not None
        planned_compiler = self.plan.get("compiler", compiler)
        is_same_platform = platform == self.plan["platform"] and compiler in ("", planned_compiler)
        # Between processes on CPUs all-to-alls take the place of reduce-scatters. A topology of CPUs has no processes,
        # so no plan has them. On GPUs the plan has made the same choice.
        has_planned_sums = platform != "cpu" or not compiled.plan.replaces_reduce_scatters
        if is_same_platform and has_planned_sums:
            planned = _compiled_figures(self.plan["compiled"]["audit"])
            actual = _compiled_figures(json.loads(compiled.to_json()))
        else:
            # The plan's own figures of the other compiler do not apply here.
            annotated = traffic_of(compiled.plan.with_reduce_scatters())
            traffic = [cast(_PlannedTraffic, dataclasses.asdict(each)) for each in annotated]
            planned_traffic = self.plan.get("communication_by_reduce_scatters", self.plan["communication_per_step"])
            planned = _annotated_figures(planned_traffic)
            actual = _annotated_figures(traffic)
            # Not planned, so any difference is one more than 0.
            actual["differences from the annotations"] = len(compiled.differences)
        self._check_figures(actual, planned)
        figures = ", ".join(f"{name} {_figure_text(name, value)}" for name, value in actual.items() if value)
        line = f"as in {self.path}, within {self.within:.1%}: {figures}"
        if not is_same_platform:
            of_plan = self.plan["platform"]
            if platform == of_plan:  # the GPUs of another vendor
                of_plan = self.plan.get("device", of_plan)
            line += f"; of the step for a {of_plan}, not of the program compiled here"
        elif not has_planned_sums:
            line += "; of the step for one process, not of the program compiled here"
        return line

    def _check_figures(self, actual: Figures, planned: Figures) -> None:
        """Raises an error that lists the figures which differ by more than is allowed."""
        differences = []
        # Of both: a collective that was planned may be missing, and another one be there.
        for name in {**planned, **actual}:
            # A figure that was not planned is compared with 0: any value of it differs.
            if abs(actual[name] - planned[name]) > self.within * planned[name]:
                figure = _figure_text(name, actual[name])
                differences.append(f"{name}: {figure}, planned {_figure_text(name, planned[name])}")
        if not differences:
            return
        jax_version = self.plan["compiled"].get("versions", {}).get("jax")
        self._refuse(
            "The compiled step is not the one that was planned.",
            differences,
            f"more than {self.within:.1%} apart; planned by jax {jax_version} for {self.plan['topology']}.",
            do="\n--expect-within 0.2  # allows more",
        )

    def _refuse(self, what: str, differences: Sequence[str], why: str, do: str = "") -> NoReturn:
        command = self.plan.get("train_command")
        remedy = f"{_SAVED}  # plans the run as it is now"
        # The plan knows the command of the run that it is for.
        if command:
            remedy = f"{command} --expect {self.path}"
        raise ShardingError(what, where=[f"--expect {self.path}", *differences], why=why, do=remedy + do)


def compiler_of(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the compiler of a device's programs, "cuda" or "rocm"; for others than GPUs, their platform."""
    if device.platform != "gpu":
        return device.platform
    # The name of the platform is the same for both. The version is text, such as "rocm 70014".
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _read_plan(path: Path) -> _PlannedStep:
    try:
        # May be a pipe: --expect <(jshard plan ... --json).
        return checked(parse_json(read_named(path)), _PlannedStep)
    except UnsafeFileError:
        raise
    except (OSError, ValueError) as error:
        why = f"it is not a plan of a compiled step: {error}."
        if isinstance(error, OSError):
            why = f"{(error.strerror or repr(error)).lower()}."
        raise ShardingError(
            "There is no plan to compare with.", where=f"--expect {path}", why=why, do=_SAVED
        ) from error


def _compiled_figures(audit: _PlannedAudit) -> Figures:
    """Returns the figures of a compiled step."""
    figures: Figures = collections.defaultdict(int)
    for row in audit["collectives"]:
        # A kind may have several rows.
        figures[f"{row['kind']}s"] += row["executions"]
        figures[f"bytes of {row['kind']}"] += row["total_bytes"]
    for row in audit["mixing"]:
        figures["bytes of the model's own mixing"] += row["total_bytes"]
    memory = audit["memory_per_device"]
    # A plan of a compiler that does not report memory has none: then 0 is compared with 0, or differs.
    figures["peak bytes"] = 0 if memory is None else memory.get("peak_bytes", 0)
    return figures


def _annotated_figures(traffic: Iterable[_PlannedTraffic]) -> Figures:
    """Returns the bytes of the collectives required by the annotations."""
    figures: Figures = collections.defaultdict(int)
    for row in traffic:
        figures[f"bytes of {row['kind']} over {', '.join(row['axes'])} in {row['dtype']}"] += row["full_bytes"]
    return figures


def _figure_text(name: str, value: float) -> str:
    if "bytes" in name:
        return human_bytes(value)
    return f"{value:,}"


def _is_same(requested: object, planned: object) -> bool:
    """Returns whether a setting is as planned. The degrees of a mesh are compared without the axes of degree 1."""
    if isinstance(requested, dict) and isinstance(planned, dict):
        return _split_axes(requested) == _split_axes(planned)
    return requested == planned


def _split_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    # An axis of degree 1 splits nothing, whether it is named or not.
    return {axis: degree for axis, degree in mesh.items() if degree > 1}


def _setting_text(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{axis}={degree}" for axis, degree in value.items())
    return str(value)
