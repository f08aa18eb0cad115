"""`compiler_options`: the XLA options that were shown to help, for one program at a time.

Pass them to `jax.jit(..., compiler_options=...)` or `lowered.compile(compiler_options=...)`, never in XLA_FLAGS, where
they would apply to every program of the process, and where a name that the version does not know aborts it.
docs/schedules.md has the findings in compiled programs for each of them, and for others.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jshard import _compat
from jshard.errors import ShardingError
from jshard.facts.device_facts import DeviceFacts
from jshard.facts.devices import DEVICES, device_of
from jshard.facts.gpu_target import HOPPER, AmdTarget, NvidiaTarget
from jshard.plans.mesh import Device, num_hosts

GPU = "gpu"
TPU = "tpu"
CPU = "cpu"
_PLATFORMS = {"gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU, "cpu": CPU}  # by JAX's names of its backends

Value = bool | int | str
Options = dict[str, Any]  # a `Value` each; jax accepts integers, too, but its own type does not say so

Entry = Mapping[str, Value]
"""An entry of a profile: one option under its successive names, of which the compiler knows one."""

# ---- what was shown to help

# The number of a unit's matrices, whose gathers start together, plus one reduce-scatter: seven and one in Llama. Within
# a host, and on Ampere, they run one after another, which is XLA's own limit: it assumes that collectives in flight do
# not slow each other down, and waits for all of them too early. docs/schedules.md has what that cost.
IN_FLIGHT = 8
_LIMIT: Entry = {"xla_gpu_experimental_parallel_collective_overlap_limit": IN_FLIGHT}
_DOUBLE_BUFFER: Entry = {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"}
_PIPELINED: tuple[Entry, ...] = (
    {
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    },
    {
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    },
)

# If more than 8 GPUs share links, XLA of jaxlib 0.12 compiles an all-reduce of one number, such as a loss, to its own
# kernel, and aborts: "size mismatch when packing elements for LLVM struct". So NCCL's is used.
_NCCL_ALONE: Entry = {"xla_gpu_experimental_use_collective_kernels": ""}
_NOT_MISSED = frozenset(_NCCL_ALONE)  # if the name is unknown, there are no such kernels

# XLA's latency model of kernels and collectives supports only Hopper and Blackwell (SolLatencyEstimator::
# IsSupportedForModule), and without one XLA disables its latency-hiding scheduler. An older one serves Ampere; that of
# jaxlib 0.12 aborts ("Check failed: buffer != nullptr" in AnalyticalLatencyEstimator::NodeCost), and without a model
# collectives start as early as possible.
_ESTIMATOR: Entry = {"xla_gpu_enable_analytical_latency_estimator": True}
_EARLY: Entry = {"xla_gpu_experimental_collective_start_as_early_as_possible": True}
_SCHEDULER: Entry = {"xla_gpu_enable_latency_hiding_scheduler": True}
_AMPERE: tuple[Entry, ...] = (_SCHEDULER, _ESTIMATOR if _compat.ESTIMATES_AMPERE else _EARLY)
# XLA has no model of MI250X either. Since jaxlib 0.12 it has one of MI300X, but starts collectives late by it: of the
# communication on 64 of them, "fastest" without these hides 73 % for gpt2_xl and 36 % for mixtral_8x7b, with them 82 %
# and 97 %, by the stated estimates. The price is memory: 2 % and 13 % more at the peak. With the estimator for Ampere,
# XLA of jaxlib 0.10 starts all of them late: it hides 10 % for gpt2_xl, and so 82 %.
_AMD: tuple[Entry, ...] = (_SCHEDULER, _EARLY)

# Collectives on the SparseCores of a TPU, beside the products on its TensorCores. A v5e has none. Its gathers are fused
# with products by default, which libtpu 0.0.50 and later refuse on any other TPU: results could be wrong.
_TPU_SPARSE_CORES: tuple[Entry, ...] = (
    {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False},
    {"xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False},
    {"xla_tpu_enable_sparse_core_collective_offload_all_gather": True},
    {"xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True},
    {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": True},
    {"xla_tpu_enable_all_gather_offload_tracing": True},
    {"xla_tpu_enable_reduce_scatter_offload_tracing": True},
    {"xla_tpu_enable_all_reduce_offload_tracing": True},
    {"xla_tpu_use_tc_device_shape_on_sc": True},
)
# By default small all-reduces stay on the TensorCores, where they block. Gathers of biases and norms are such.
_TPU_SMALL_ALL_REDUCES: Entry = {"xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes": 0}
# Without these, a gather or a reduce-scatter over more than one dimension of the torus is an all-reduce, which sends
# twice the bytes. Of several in a loop, XLA then runs some on the TensorCores, where they block.
_TPU_PREFERS_GATHERS: Entry = {"xla_tpu_prefer_async_allgather_to_allreduce": True}
_TPU_MANY_DIMS: tuple[Entry, ...] = (
    _TPU_PREFERS_GATHERS,
    {"xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True},
    {"xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True},
    {"xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True},
)
# Without these, a reduce-scatter of rows whose width is no multiple of the tile is an all-reduce and a permute, which
# send twice the bytes. Over several dimensions it is an all-reduce with them, too, but on the SparseCores.
_TPU_REDUCE_SCATTERS: tuple[Entry, ...] = (
    {"xla_tpu_use_minor_sharding_for_major_trivial_input": True},
    {"xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1},
)

# By profile, and by platform or device. No entry: no option was shown to help.
PROFILES: Mapping[str, Mapping[str, tuple[Entry, ...]]] = {
    "fastest": {
        GPU: (_LIMIT, _DOUBLE_BUFFER),
        "v4": (_TPU_PREFERS_GATHERS, {"xla_enable_async_all_gather": True}),
        "v5e": _TPU_REDUCE_SCATTERS,
        "v5p": (*_TPU_SPARSE_CORES, _TPU_SMALL_ALL_REDUCES, *_TPU_MANY_DIMS, *_TPU_REDUCE_SCATTERS),
        "v6e": (*_TPU_SPARSE_CORES, _TPU_SMALL_ALL_REDUCES, *_TPU_MANY_DIMS, *_TPU_REDUCE_SCATTERS),
        # The other options of a v5p are its defaults.
        "tpu7x": (_TPU_SMALL_ALL_REDUCES, _TPU_PREFERS_GATHERS, *_TPU_REDUCE_SCATTERS),
    },
    "memory": {GPU: (_LIMIT, *_PIPELINED)},
}


class OptionError(ShardingError):
    """An unknown profile or platform, or an invalid value of an option."""


def compiler_options(
    profile: Literal["fastest", "memory"] | None = "fastest",
    *,
    platform: str | None = None,
    mesh: Mesh | None = None,
    **overrides: Value | None,
) -> Options:
    """Returns compiler options for one program, as far as the installed version knows them.

    A profile contains only options that were shown to help: on a GPU "fastest" double-buffers loops, and between hosts
    lets eight collectives overlap, but not on an A100; "memory" overlaps without the second buffer, and pipelines the
    collectives of loops instead. On a TPU "fastest" has options for each generation. On an A100 and on AMD GPUs both
    enable the latency-hiding scheduler, which XLA enables by itself only for the GPUs that it has a model of. Elsewhere
    a profile is empty. Options that the installed version does not know are left out, with one warning for all of them;
    a profile that the compiler refuses as a whole is left out with a warning, too.

    Args:
        profile: "fastest", "memory", or None for the overrides alone.
        platform: "gpu", "tpu" or "cpu", or a device as in a topology ("h100", "v6e"); that of the mesh by default.
        mesh: the devices of the program. By default those of `jax.devices()`; with a platform, devices of several
            hosts.
        **overrides: options by their XLA names, replacing the profile's or added to them; None removes one.

    Returns:
        A dict for `jax.jit(compiler_options=...)`.

    Raises:
        OptionError: the profile or platform is unknown, or an option has an invalid value.

    Examples:
        >>> options = js.compiler_options("fastest", platform="gpu")
        >>> step = jax.jit(lambda x: x + 1, compiler_options=options)
    """
    if mesh is None and platform is None:
        mesh = Mesh(np.array(jax.devices()), ("device",))
    if platform is None:
        assert mesh is not None
        platform = _platform_of_device(mesh.devices.flat[0])
    in_one_host = mesh is not None and num_hosts(mesh) == 1
    platform = _PLATFORMS.get(platform, platform)
    return options_for(profile, platform=platform, overrides=overrides, in_one_host=in_one_host)


def options_for(
    profile: str | None,
    *,
    platform: str,
    overrides: Mapping[str, Value | None],
    in_one_host: bool = False,
    try_compile: Callable[[Options], object] | None = None,
) -> Options:
    """Returns the options for a known platform or device, like `compiler_options`.

    Args:
        profile: as in `compiler_options`.
        platform: "gpu", "tpu" or "cpu", or a device.
        overrides: as in `compiler_options`.
        in_one_host: whether all devices are in one host.
        try_compile: compiles something with some options, to learn which of them the compiler knows; the present one
            by default.

    Raises:
        OptionError: the profile or platform is unknown, or an option has an invalid value.
    """
    _check(profile, platform)
    entries = []
    for entry in _entries(profile, platform, in_one_host=in_one_host):
        if overrides.keys().isdisjoint(entry):
            entries.append(entry)
    requested = [{name: value} for name, value in overrides.items() if value is not None]
    try:
        refused = _refused_names(platform, [*entries, *requested], try_compile)
    except _RefusedTogether as error:
        if not entries:
            raise _error_of_combination(error, overrides) from error
        _warn_of_refused_profile(profile, platform, error)
        return options_for(None, platform=platform, overrides=overrides, try_compile=try_compile)
    return _known_options([*entries, *requested], refused)


def _family(platform: str) -> str:
    """Returns the platform of a device; a platform unchanged."""
    return DEVICES[platform].platform if platform in DEVICES else platform


def _entries(profile: str | None, platform: str, *, in_one_host: bool) -> tuple[Entry, ...]:
    """Returns the entries of a profile for a platform or a device."""
    if profile is None:
        return ()
    by_platform = PROFILES[profile]
    entries = by_platform.get(platform, by_platform.get(_family(platform), ()))
    if not entries:
        return ()
    device = DEVICES.get(platform)
    if profile == "fastest" and _runs_in_turn(device, in_one_host=in_one_host):
        entries = tuple(entry for entry in entries if entry is not _LIMIT)
    if device is None:
        return entries
    return (*entries, *_entries_of_generation(device))


def _runs_in_turn(device: DeviceFacts | None, *, in_one_host: bool) -> bool:
    """Returns whether programs are faster that run their collectives one after another."""
    target = None if device is None else device.target
    if isinstance(target, AmdTarget):
        return False
    is_estimated_as_ampere = isinstance(target, NvidiaTarget) and target.major < HOPPER and _compat.ESTIMATES_AMPERE
    return in_one_host or is_estimated_as_ampere


def _entries_of_generation(device: DeviceFacts) -> tuple[Entry, ...]:
    """Returns the entries that every profile has in addition on a GPU of this generation."""
    target = device.target
    if target is None:
        return ()
    if isinstance(target, AmdTarget):
        return _AMD
    assert isinstance(target, NvidiaTarget)
    if target.major < HOPPER:
        return _AMPERE
    if device.hosts_share_links:
        return (_NCCL_ALONE,)
    return ()


def _known_options(entries: Sequence[Entry], refused: frozenset[str]) -> Options:
    """Returns the first name of each entry that is not refused; one warning lists the entries that have none."""
    options: Options = {}
    dropped = []
    for entry in entries:
        known_names = [name for name in entry if name not in refused]
        if known_names:
            name = known_names[0]
            options[name] = entry[name]
        elif _NOT_MISSED.isdisjoint(entry):
            dropped.append(" or ".join(entry))
    if dropped:
        warnings.warn(
            f"This version of the compiler does not know these options and runs without them: {', '.join(dropped)}.",
            stacklevel=4,  # the caller of `compiler_options`
        )
    return options


# ---- which names the compiler knows


def _refused_names(
    platform: str, entries: Sequence[Entry], try_compile: Callable[[Options], object] | None
) -> frozenset[str]:
    """Returns the names that the compiler does not know."""
    settings = tuple((name, value) for entry in entries for name, value in entry.items())
    if try_compile is not None:
        return _refused(settings, try_compile)
    if _family(platform) == TPU and jax.default_backend() != "tpu":
        return frozenset()  # only the TPU's own compiler knows its options; where it is not running, the table is used
    if not settings:
        return frozenset()
    return _refused_here(settings)


@functools.cache
def _refused_here(settings: tuple[tuple[str, Value], ...]) -> frozenset[str]:
    return _refused(settings, compile_nothing())


def compile_nothing(sharding: Sharding | None = None) -> Callable[[Options], object]:
    """Returns a function that compiles a program of one scalar with some options: the cheapest check of them."""
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))
    return lambda options: lowered.compile(compiler_options=options)


_REFUSED_TOGETHER = "FAILED_PRECONDITION"


class _RefusedTogether(Exception):
    """A compiler knows all options, but refuses to compile with them, even a program of one scalar."""

    @property
    def reason(self) -> str:
        """The compiler's words, on one line."""
        return " ".join(str(self).split())


def _warn_of_refused_profile(profile: str | None, platform: str, error: _RefusedTogether) -> None:
    warnings.warn(
        f"The compiler refuses the options of the profile {profile!r} for {platform}, and runs without them."
        f" It says: {error.reason}",
        stacklevel=4,  # the caller of `compiler_options`
    )


def _error_of_combination(error: _RefusedTogether, overrides: Mapping[str, Value | None]) -> OptionError:
    """Returns the error for options of the caller that the compiler refuses."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
    return OptionError(
        "The compiler refuses these options.",
        where=f"js.compiler_options({arguments})",
        why=f"the compiler says: {error.reason}",
        do="js.compiler_options()  # the profile alone",
    )


def _refused(settings: Sequence[tuple[str, Value]], try_compile: Callable[[Options], object]) -> frozenset[str]:
    """Tries all options, and again without the one that the compiler rejects, until it rejects none."""
    remaining = dict(settings)
    refused: set[str] = set()
    while remaining:
        try:
            try_compile(dict(remaining))
            break
        except Exception as error:
            name = _rejected_name(str(error))
            if name is None and _REFUSED_TOGETHER in str(error):
                raise _RefusedTogether(str(error)) from error
            # A message about an option that was not tried is an error of its own.
            if name is None or name not in remaining:
                raise _error_of_value(error, remaining) from error
            refused.add(name)
            del remaining[name]
    return frozenset(refused)


def _rejected_name(message: str) -> str | None:
    """Returns the option that a compiler says it does not know."""
    match = re.search(r"No such compile option: '(\w+)'", message)
    if match is None:
        # A value that an older version does not have is treated like an unknown name.
        match = re.search(r"While setting option (\w+), .* is not a valid enum value", message)
    return None if match is None else match[1]


def _error_of_value(error: Exception, options: Mapping[str, Value]) -> Exception:
    """Returns the error for an invalid value of an option; any other error unchanged."""
    match = re.search(r"While setting option (\w+), .*", str(error))
    if match is None or match[1] not in options:
        return error
    name = match[1]
    return OptionError(
        "An option cannot have this value.",
        where=f"js.compiler_options({name}={options[name]!r})",
        why=f"the compiler says: {match[0]}",
        do=f"js.compiler_options({name}=None)  # leaves it out",
    )


# ---- platforms


def _platform_of_device(device: Device) -> str:
    """Returns the name of a device in the table; of another one its platform."""
    platform = _PLATFORMS.get(device.platform, CPU)
    if platform == CPU:
        return platform
    facts = device_of(device.device_kind)
    return platform if facts is None else facts.name


def _check(profile: str | None, platform: str) -> None:
    """Refuses an unknown profile or platform."""
    if profile is not None and profile not in PROFILES:
        raise OptionError(
            f"There is no profile {profile!r}.",
            where=f"js.compiler_options({profile!r})",
            why=f"the profiles are {', '.join(map(repr, PROFILES))}, or None.",
            do='js.compiler_options("fastest")',
        )
    if platform not in (GPU, TPU, CPU, *DEVICES):
        raise OptionError(
            f"There is no platform {platform!r}.",
            where=f"js.compiler_options(platform={platform!r})",
            why=f"it must be gpu, tpu, cpu, or a device: {', '.join(DEVICES)}.",
            do='js.compiler_options(platform="gpu")',
        )
