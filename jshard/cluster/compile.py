"""Compiles the train step of a model file for a cluster you do not have, in a separate process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard._children import module_command
from jshard.cluster.topology import Topology, parse_topology
from jshard.errors import AnnotationError, FourPartError, RunError, ShardingError
from jshard.inspect.audit import CompiledMemory
from jshard.plans.mesh import FSDP, REPLICA
from jshard.plans.plan import ShardPlan

FLAG = "--xla_gpu_analytical_latency_estimator_options"
_QUEUE = 0.28  # share of a unit's transfer time that one of its gathers waits for others


def latency_flag(topology: Topology, mesh: Mapping[str, int], unit_bytes: int) -> str | None:
    """The flag that describes a cluster to the scheduler; None without network adapters to wait for, as on a TPU."""
    if topology.device.platform != "gpu" or topology.num_devices <= topology.fast_group:
        return None
    host_bytes_per_s = topology.device.slow.bytes_per_s * topology.fast_group
    given = {"nccl_op_launch_us": max(100, round(_QUEUE * unit_bytes / host_bytes_per_s * 1e6))}
    groups = math.prod(degree for axis, degree in mesh.items() if axis == REPLICA)
    if groups > 1:
        # XLA's estimate divides the GPUs of a host by the number of groups: with as many groups as GPUs, each
        # group has one GPU, and its rate is that of all adapters of a host.
        given |= {"gpus_per_node": groups, "nic_speed_gbps": round(host_bytes_per_s / 1e9), "rtt_us": 1}
    return f"{FLAG}={','.join(f'{key}={value}' for key, value in given.items())}"


# The program to compile.

_OURS = ("--xla_cpu_", "--xla_force_host_platform_device_count")  # not flags of an accelerator


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A request to compile a step."""

    model: str
    topology: str
    recipe: str | None = None  # the first of the model file by default
    settings: tuple[str, ...] = ()  # in the form of `--set`
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    profile: str | None = None  # of `js.compiler_options`
    units: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings that differ from the annotation's
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
    units: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shard_replicated: bool = False
    plain_flax: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Its changes to the recipe, in the form of `--set`."""
        return () if self.accumulate is None else (f"accumulate={self.accumulate}",)

    def of(self, asked: CompileRequest) -> CompileRequest:
        """The request to compile for it, given the original request."""
        changed = set(map(_key, self.settings))
        return dataclasses.replace(
            asked,
            mesh=dict(self.mesh),
            settings=(*(text for text in asked.settings if _key(text) not in changed), *self.settings),
            units={**asked.units, **self.units},
            shard_replicated=self.shard_replicated,
            plain_flax=self.plain_flax,
        )

    @property
    def mesh_text(self) -> str:
        """The mesh in the form of `--mesh`."""
        return ",".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def command(self) -> str:
        """The options that select this configuration, to be added to the requested ones."""
        return shlex.join(_way_words(self.mesh, self.settings, self.units))


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def command_line(request: CompileRequest, *, assume: Sequence[str]) -> str:
    """The command line for what is compiled; "" for configurations that only `--compare` has."""
    if request.plain_flax or request.shard_replicated:
        return ""
    words = ["jshard", "plan", request.model]
    words += [] if request.recipe is None else ["--recipe", request.recipe]
    words += ["--topology", request.topology, *_way_words(request.mesh, request.settings, request.units)]
    words += [] if request.profile == "fastest" else ["--options", request.profile or "none"]
    words += [f"--xla-flags={request.xla_flags}"] if request.xla_flags else []
    words += [word for text in assume for word in ("--assume", text)]
    return shlex.join(words)


def train_command(request: CompileRequest) -> str:
    """The command line that trains the compiled configuration."""
    words = ["jshard", "train", request.model]
    words += [] if request.recipe is None else ["--recipe", request.recipe]
    words += _way_words(request.mesh, request.settings, request.units)
    return shlex.join(words + ([] if request.profile == "fastest" else ["--options", request.profile or "none"]))


def _way_words(mesh: Mapping[str, int], settings: Sequence[str], units: Mapping[str, Any]) -> list[str]:
    words = ["--mesh", ",".join(f"{axis}={degree}" for axis, degree in mesh.items())]
    words += [word for text in settings for word in ("--set", text)]
    return words + [word for name, value in units.items() for word in ("--unit", f"{name}={as_text(value)}")]


def as_text(value: Any) -> str:
    """A setting's value in the form of `--unit`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# The strategies as configurations.

GSPMD = "gspmd"
"""The model as plain Flax under `jax.jit`, its parameters sharded as for zero3; the compiler does the rest."""

COMPARED = "replicate", "zero2", "zero3", "hsdp", GSPMD


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A sharding strategy as keywords; docs/strategies.md has its memory and communication."""

    replica: int = 1
    fsdp: int = -1
    reshard_after_forward: bool | int | None = None
    shard_replicated: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Keywords for `js.mesh`."""
        return {"replica": self.replica, "fsdp": self.fsdp}

    @property
    def annotation(self) -> dict[str, Any]:
        """Keywords for `js.fully_shard`."""
        return {"reshard_after_forward": self.reshard_after_forward}

    @property
    def optimizer(self) -> dict[str, Any]:
        """Keywords for `js.shard_optimizer`."""
        return {"shard_replicated": self.shard_replicated}


strategies = {
    "replicate": Strategy(replica=-1, fsdp=1),
    "zero1": Strategy(replica=-1, fsdp=1, shard_replicated=True),
    "zero2": Strategy(reshard_after_forward=False),
    "zero3": Strategy(),
    "hsdp": Strategy(replica=2),
    "hsdp_zero2": Strategy(replica=2, reshard_after_forward=False),
    "hpz": Strategy(reshard_after_forward=8),
}
"""The strategies by name."""


def variants_for(
    names: Sequence[str],
    mesh: Mapping[str, int],
    *,
    near: int,
    capacity_bytes: int,
    held_bytes: Callable[[Mapping[str, int]], int],
) -> tuple[Variant, ...]:
    """The strategies to compare, on the number of devices of a mesh.

    Strategies with replicas use the groups of the mesh if it has replicas itself, otherwise `near` devices, or a
    multiple of them that can hold the state: `held_bytes` gives the minimum memory of a device of a mesh.
    """
    unknown = [name for name in names if name not in (*strategies, GSPMD)]
    if unknown:
        raise ShardingError(
            f"There is no strategy {unknown[0]!r}.",
            where=f"--compare {','.join(names)}",
            why=f"the strategies are {', '.join(strategies)}, and {GSPMD}, which is plain Flax under jax.jit.",
            do=f"--compare {','.join(COMPARED)}",
        )
    devices = mesh.get(REPLICA, 1) * mesh[FSDP]
    group = mesh[FSDP]
    if mesh.get(REPLICA, 1) == 1 and any(n in strategies and strategies[n].replica > 1 for n in names):

        def fits(size: int) -> bool:
            try:
                return held_bytes(dict(mesh) | {REPLICA: devices // size, FSDP: size}) <= capacity_bytes / 2
            except AnnotationError:  # a large parameter does not divide
                return False

        group = _group(devices, near, fits)
    return tuple(_compared(name, dict(mesh), devices, group, near) for name in dict.fromkeys(names))


def _group(devices: int, near: int, fits: Callable[[int], bool]) -> int:
    """The smallest groups of whole hosts that can hold the state, else the largest; within a host, half of it."""
    fewer = [n for n in range(1, devices) if devices % n == 0] or [1]
    whole = [n for n in fewer if n % near == 0] or fewer[-1:]
    return next(filter(fits, whole), whole[-1])


def _compared(name: str, mesh: dict[str, int], devices: int, group: int, near: int) -> Variant:
    strategy = strategies["zero3" if name == GSPMD else name]
    fsdp = devices if strategy.replica == 1 else 1 if strategy.fsdp == 1 else group
    mesh |= {REPLICA: devices // fsdp, FSDP: fsdp}
    reshard = {"hpz": near}.get(name, strategy.reshard_after_forward)
    units = {} if name == GSPMD else {"reshard_after_forward": True if reshard is None else reshard}
    return Variant(
        name=name,
        mesh=mesh,
        units=units,
        shard_replicated=strategy.shard_replicated,
        plain_flax=name == GSPMD,
    )


# The results of compiling.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A train step as compiled for a cluster; nothing was run."""

    text: str = dataclasses.field(repr=False)  # the scheduled program
    memory: CompiledMemory
    plan: ShardPlan = dataclasses.field(repr=False)
    options: Mapping[str, Any]  # passed to the compiler
    batch_size: int
    sequence_length: int
    accumulate: int
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


class CompileError(RunError):
    """The compiler, or its process, failed."""


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


def flags_of(request: CompileRequest) -> str:
    """The flags passed to the process."""
    if request.xla_flags != "auto":
        return request.xla_flags
    return latency_flag(parse_topology(request.topology), request.mesh, request.unit_bytes) or ""


def unused_flags(environ: Mapping[str, str]) -> str | None:
    """A line about XLA flags of the shell that the child does not get; None if there are none."""
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OURS)]
    flags += environ.get("LIBTPU_INIT_ARGS", "").split()
    if not flags:
        return None
    return f"not used: {' '.join(flags)} of the environment; a plan is compiled only with --options."


# The compiling process: it is started with a request, and writes a result or an error to a folder.

_RESULT, _OUTPUT = "result.pickle", "output.txt"  # files of the child: its result and its output
_LAST_LINES = 8


def child_environment(environ: Mapping[str, str], xla_flags: str = "") -> dict[str, str]:
    """The environment of the child: no accelerator is used, and XLA only gets the requested flags."""
    dropped = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")
    kept = {name: value for name, value in environ.items() if name not in dropped}
    kept |= {"XLA_FLAGS": xla_flags} if xla_flags else {}
    return kept | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_LOG": "0"}


def run_child(
    module: str,
    request: Mapping[str, Any],
    folder: Path,
    *,
    subject: str,
    timeout_s: float,
    environ: Mapping[str, str],
    more_time: str,
    do: str,
) -> Any:
    """Runs a module with the arguments REQUEST FOLDER, whose `main` calls `answer`, and returns its result.

    An error of the child is raised here; `more_time` and `do` are the advice if it takes too long or crashes.
    """
    command = module_command(module, json.dumps(request), str(folder))
    with (folder / _OUTPUT).open("wb") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                "Compiling took too long.",
                where=subject,
                why=f"it was stopped after {timeout_s:g} s.",
                do=more_time,
            ) from error
    if done.returncode < 0 or not (folder / _RESULT).exists():
        raise _crashed(subject, done.returncode, folder, do)
    result = pickle.loads((folder / _RESULT).read_bytes())
    if isinstance(result, FourPartError):
        raise result
    return result


def answer(argv: Sequence[str], work: Callable[[Any, Path], Any]) -> int:
    """The child's side of `run_child`; returns the exit code."""
    folder = Path(argv[1])
    try:
        result = work(json.loads(argv[0]), folder)
    except FourPartError as error:
        result = _portable(error)
    (folder / _RESULT).write_bytes(pickle.dumps(result))
    return int(isinstance(result, FourPartError))


def _portable(error: FourPartError) -> FourPartError:
    """An error of a class that the parent can also import, not one defined in a model file."""
    cls = next(cls for cls in type(error).__mro__ if cls.__module__.startswith("jshard."))
    return cls(error.what, where=error.where, why=error.why, do=error.do)


def _crashed(subject: str, code: int, folder: Path, do: str) -> CompileError:
    """The error for a child that ended without a result or an error."""
    output = (folder / _OUTPUT).read_text(errors="replace").splitlines()
    last = [line for line in output if line.strip()][-_LAST_LINES:]
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    error = CompileError(
        "The compiling process failed.",
        where=subject,
        why="\n".join([f"{ending}; its last lines:" if last else f"{ending}, without output.", *last]),
        do="give it more memory: the system kills processes with signal 9 when it runs out." if code == -9 else do,
    )
    if os.environ.get("JSHARD_DEBUG", "0") not in ("", "0"):
        error.add_note("\n".join(["its whole output:", *output]))
    return error
