"""Compiles the train step of a model file for a cluster you do not have, in a separate process."""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jshard.cluster.child_process import child_environment, run_child
from jshard.cluster.options import Options
from jshard.cluster.topology import Topology, parse_topology
from jshard.errors import RunError
from jshard.inspect.audit import CompiledMemory
from jshard.plans.mesh import REPLICA
from jshard.plans.plan import ShardPlan

# ---- the program to compile

UnitSettings = Mapping[str, bool | int | str | None]
"""Arguments of `js.fully_shard`, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A request to compile a step."""

    model: str
    topology: str
    recipe: str | None = None  # the first of the model file by default
    settings: tuple[str, ...] = ()  # in the form of `--set`
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    profile: str | None = None  # of `js.compiler_options`
    units: UnitSettings = dataclasses.field(default_factory=dict)  # settings that differ from the annotation's
    shard_replicated: bool = False
    plain_flax: bool = False  # the model in global view, where the compiler places the communication
    xla_flags: str = ""  # XLA_FLAGS of a run; "auto" for `latency_flag`, which needs the whole mesh
    unit_bytes: int = 0  # gathered bytes of the largest unit, for `latency_flag`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A configuration of a recipe, as an alternative to the requested one."""

    name: str
    mesh: Mapping[str, int]
    accumulate: int | None = None  # microbatches; None for the requested number
    units: UnitSettings = dataclasses.field(default_factory=dict)
    shard_replicated: bool = False
    plain_flax: bool = False
    stage_microbatches: int | None = None  # in flight on pipeline stages; None for the requested number

    @property
    def settings(self) -> tuple[str, ...]:
        """Returns its changes to the recipe, in the form of `--set`."""
        settings = []
        if self.accumulate is not None:
            settings.append(f"accumulate={self.accumulate}")
        if self.stage_microbatches is not None:
            settings.append(f"stages.microbatches={self.stage_microbatches}")
        return tuple(settings)

    def of(self, requested: CompileRequest) -> CompileRequest:
        """Returns the request to compile for it, given the original request."""
        changed = {_name_of(setting) for setting in self.settings}
        unchanged = [setting for setting in requested.settings if _name_of(setting) not in changed]
        return dataclasses.replace(
            requested,
            mesh=dict(self.mesh),
            settings=(*unchanged, *self.settings),
            units={**requested.units, **self.units},
            shard_replicated=self.shard_replicated,
            plain_flax=self.plain_flax,
        )

    @property
    def mesh_text(self) -> str:
        """Returns the mesh in the form of `--mesh`."""
        return _mesh_text(self.mesh)

    @property
    def command(self) -> str:
        """Returns the options that select this configuration, to be added to the requested ones."""
        return shlex.join(_configuration_words(self.mesh, self.settings, self.units))


def _name_of(setting: str) -> str:
    name, _, _ = setting.partition("=")
    return name.strip()


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={degree}" for axis, degree in mesh.items())


# ---- command lines


def command_line(request: CompileRequest, *, assume: Sequence[str]) -> str:
    """Returns the command line for what is compiled; "" for configurations that only `--compare` has.

    Args:
        request: what is compiled.
        assume: known values of the cluster, in the form of `--assume`.
    """
    if request.plain_flax or request.shard_replicated:
        return ""
    words = ["jshard", "plan", request.model]
    words += _recipe_words(request)
    words += ["--topology", request.topology]
    words += _configuration_words(request.mesh, request.settings, request.units)
    words += _profile_words(request)
    if request.xla_flags:
        words.append(f"--xla-flags={request.xla_flags}")
    for text in assume:
        words += ["--assume", text]
    return shlex.join(words)


def train_command(request: CompileRequest) -> str:
    """Returns the command line that trains the compiled configuration."""
    words = ["jshard", "train", request.model]
    words += _recipe_words(request)
    words += _configuration_words(request.mesh, request.settings, request.units)
    words += _profile_words(request)
    return shlex.join(words)


def _recipe_words(request: CompileRequest) -> list[str]:
    return [] if request.recipe is None else ["--recipe", request.recipe]


def _profile_words(request: CompileRequest) -> list[str]:
    if request.profile == "fastest":  # the default
        return []
    return ["--options", request.profile or "none"]


def _configuration_words(mesh: Mapping[str, int], settings: Sequence[str], units: UnitSettings) -> list[str]:
    words = ["--mesh", _mesh_text(mesh)]
    for setting in settings:
        words += ["--set", setting]
    for name, value in units.items():
        words += ["--unit", f"{name}={as_text(value)}"]
    return words


def as_text(value: bool | int | str | None) -> str:
    """Returns a setting's value in the form of `--unit`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


# ---- flags of the compiler

FLAG = "--xla_gpu_analytical_latency_estimator_options"
_LEAST_LAUNCH_US = 100
_CPU_FLAGS = ("--xla_cpu_", "--xla_force_host_platform_device_count")  # not flags of an accelerator


def latency_flag(topology: Topology, mesh: Mapping[str, int], unit_bytes: int) -> str | None:
    """Returns the flag that describes a cluster to the scheduler.

    Args:
        topology: the cluster.
        mesh: degrees of the mesh.
        unit_bytes: gathered bytes of the largest unit.

    Returns:
        None without network adapters to wait for, as on a TPU.
    """
    if topology.device.platform != "gpu" or topology.num_devices <= topology.fast_group:
        return None
    host_bytes_per_s = topology.device.slow.bytes_per_s * topology.fast_group
    # The gathers of a unit start together and share the adapters, so each may end when all have ended. XLA estimates
    # each as if it were alone, and without this ends them too early for all but the first.
    queue_us = round(unit_bytes / host_bytes_per_s * 1e6)
    options = {"nccl_op_launch_us": max(_LEAST_LAUNCH_US, queue_us)}
    num_groups = mesh.get(REPLICA, 1)
    if num_groups > 1:
        # XLA's estimate divides the GPUs of a host by the number of groups: with as many groups as GPUs, each
        # group has one GPU, and its rate is that of all adapters of a host.
        options["gpus_per_node"] = num_groups
        options["nic_speed_gbps"] = round(host_bytes_per_s / 1e9)
        options["rtt_us"] = 1
    return f"{FLAG}={','.join(f'{name}={value}' for name, value in options.items())}"


def flags_of(request: CompileRequest) -> str:
    """Returns the flags passed to the process."""
    if request.xla_flags != "auto":
        return request.xla_flags
    return latency_flag(parse_topology(request.topology), request.mesh, request.unit_bytes) or ""


def unused_flags(environ: Mapping[str, str]) -> str | None:
    """Returns a line about XLA flags of the shell that the child does not get; None if there are none."""
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(_CPU_FLAGS)]
    flags += environ.get("LIBTPU_INIT_ARGS", "").split()
    if not flags:
        return None
    return f"not used: {' '.join(flags)} of the environment; a plan is compiled only with --options."


# ---- the result


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A train step as compiled for a cluster; nothing was run."""

    text: str = dataclasses.field(repr=False)  # the scheduled program
    memory: CompiledMemory
    plan: ShardPlan = dataclasses.field(repr=False)
    options: Options  # passed to the compiler
    batch_size: int
    sequence_length: int
    accumulate: int
    sync: str
    flops: float  # arithmetic of a step over all devices, as for the MFU
    flops_formula: str
    trace_s: float
    compile_s: float
    cpu_s: float  # total of the child
    rss_bytes: int  # peak memory of the child
    versions: Mapping[str, str | None]
    notes: tuple[str, ...] = ()  # warnings from the child


class TooLargeError(RunError):
    """The compiler refused a program that does not fit into a device's memory."""


def compile_step(request: CompileRequest, *, timeout_s: float = 3600) -> CompiledStep:
    """Compiles the train step of a model file for a cluster, without creating any array of the model.

    Raises:
        ShardingError: the request cannot be met.
        TooLargeError: the compiler reports that the program does not fit. GPU compilers do not report it.
        CompileError: the child crashed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="jshard-plan-") as folder:
        return run_child(
            "jshard.cluster.compile_process",
            dataclasses.asdict(request),
            Path(folder),
            subject=f"{request.model} for {request.topology}",
            timeout_s=timeout_s,
            environ=child_environment(os.environ, flags_of(request)),
            more_time="allow more seconds, --timeout N; or use fewer layers, as deep unrolled models take longest:"
            " --set model.n_layer=4 shows most of the schedule.",
            do="--debug shows all its output; correct errors in the model file there.",
        )
