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
from jax.sharding import Sharding

from jshard import _compat
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, device_of
from jshard.facts.gpu_target import AmdTarget, NvidiaTarget

GPU = "gpu"
TPU = "tpu"
CPU = "cpu"
_PLATFORMS = {"gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU, "cpu": CPU}  # by JAX's names of its backends

Value = bool | int | str
Options = dict[str, Any]  # a `Value` each; jax accepts integers, too, but its own type does not say so

Entry = Mapping[str, Value]
"""An entry of a profile: one option under its successive names, of which the compiler knows one."""

# ---- what was shown to help

# The number of a unit's matrices, whose gathers start together, plus one reduce-scatter: seven and one in Llama.
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
_AMPERE: tuple[Entry, ...] = (
    {"xla_gpu_enable_latency_hiding_scheduler": True},
    _ESTIMATOR if _compat.ESTIMATES_AMPERE else _EARLY,
)
_HOPPER = 9  # its compute capability
# For AMD GPUs, too. XLA has no model of MI250X either. It has one of MI300X, but starts collectives late by it: of the
# communication on 64 of them, "fastest" without these hides 73 % for gpt2_xl and 36 % for mixtral_8x7b, with them 82 %
# and 97 %, by the stated estimates. The price is memory: 2 % and 13 % more at the peak.

_TPU_GATHERS: tuple[Entry, ...] = (
    {"xla_tpu_enable_async_collective_fusion": True},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True},
    {"xla_tpu_enable_async_collective_fusion_multiple_steps": True},
    {"xla_tpu_overlap_compute_collective_tc": True},
    {"xla_enable_async_all_gather": True},
    {"xla_tpu_megacore_fusion_allow_ags": False},
)
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

# By profile, and by platform or device. No entry: no option was shown to help.
PROFILES: Mapping[str, Mapping[str, tuple[Entry, ...]]] = {
    "fastest": {GPU: (_LIMIT, _DOUBLE_BUFFER), "v5p": _TPU_GATHERS, "v6e": _TPU_SPARSE_CORES},
    "memory": {GPU: (_LIMIT, *_PIPELINED)},
}


class OptionError(ShardingError):
    """An unknown profile or platform, or an invalid value of an option."""


def compiler_options(
    profile: Literal["fastest", "memory"] | None = "fastest", *, platform: str | None = None, **overrides: Value | None
) -> Options:
    """Returns compiler options for one program, as far as the installed version knows them.

    A profile contains only options that were shown to help: on a GPU "fastest" lets eight collectives overlap and
    double-buffers loops; "memory" overlaps without the second buffer, and pipelines the collectives of loops instead.
    On a TPU "fastest" has options for v5p and v6e. On an A100 both enable the latency-hiding scheduler, which XLA
    enables by itself only for Hopper and Blackwell. Elsewhere a profile is empty. Options that the installed version
    does not know are left out, with one warning for all of them.

    Args:
        profile: "fastest", "memory", or None for the overrides alone.
        platform: "gpu", "tpu" or "cpu", or a device as in a topology ("h100", "v6e"); that of `jax.devices()` by
            default.
        **overrides: options by their XLA names, replacing the profile's or added to them; None removes one.

    Returns:
        A dict for `jax.jit(compiler_options=...)`.

    Raises:
        OptionError: the profile or platform is unknown, or an option has an invalid value.

    Example:
        >>> options = js.compiler_options("fastest", platform="gpu")
        >>> step = jax.jit(lambda x: x + 1, compiler_options=options)
    """
    return options_for(profile, platform=_platform_of(platform), overrides=overrides)


def options_for(
    profile: str | None,
    *,
    platform: str,
    overrides: Mapping[str, Value | None],
    try_compile: Callable[[Options], object] | None = None,
) -> Options:
    """Returns the options for a known platform or device, like `compiler_options`.

    Args:
        profile: as in `compiler_options`.
        platform: "gpu", "tpu" or "cpu", or a device.
        overrides: as in `compiler_options`.
        try_compile: compiles something with some options, to learn which of them the compiler knows; the present one
            by default.

    Raises:
        OptionError: the profile or platform is unknown, or an option has an invalid value.
    """
    _check(profile, platform)
    entries = [entry for entry in _entries(profile, platform) if overrides.keys().isdisjoint(entry)]
    entries += [{name: value} for name, value in overrides.items() if value is not None]
    return _known_options(entries, _refused_names(platform, entries, try_compile))


def _family(platform: str) -> str:
    """Returns the platform of a device; a platform unchanged."""
    return DEVICES[platform].platform if platform in DEVICES else platform


def _entries(profile: str | None, platform: str) -> tuple[Entry, ...]:
    """Returns the entries of a profile for a platform or a device."""
    if profile is None:
        return ()
    by_platform = PROFILES[profile]
    entries = by_platform.get(platform, by_platform.get(_family(platform), ()))
    device = DEVICES.get(platform)
    if not entries or device is None or device.target is None:
        return entries
    if isinstance(device.target, AmdTarget):
        return (*entries, *_AMPERE)
    assert isinstance(device.target, NvidiaTarget)
    if device.target.major < _HOPPER:
        return (*entries, *_AMPERE)
    if device.hosts_share_links:
        return (*entries, _NCCL_ALONE)
    return entries


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


def _platform_of(name: str | None) -> str:
    """Returns a platform or a device by its name; of the present one the device, if it is in the table."""
    if name is not None:
        return _PLATFORMS.get(name, name)
    platform = _PLATFORMS.get(jax.default_backend(), CPU)
    if platform == CPU:
        return platform
    facts = device_of(jax.devices()[0].device_kind)
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
