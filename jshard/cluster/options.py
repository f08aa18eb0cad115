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

from jshard import _compat
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, device_of

GPU, TPU = "gpu", "tpu"
Value = bool | int | str
Options = dict[str, Any]  # as jax accepts them
# An entry of a profile: one option under its successive names, of which the compiler knows one.
Entry = Mapping[str, Value]

# The number of a unit's matrices, whose gathers start together, plus one reduce-scatter: seven and one in Llama.
IN_FLIGHT = 8
_LIMIT: Entry = {"xla_gpu_experimental_parallel_collective_overlap_limit": IN_FLIGHT}
_COLLECTIVES = "all_gather", "reduce_scatter", "all_reduce"
# If more than 8 GPUs share links, XLA of jaxlib 0.12 compiles an all-reduce of one number, such as a loss, to its own
# kernel, and aborts: "size mismatch when packing elements for LLVM struct". So NCCL's is used.
_NCCL_ALONE: Entry = {"xla_gpu_experimental_use_collective_kernels": ""}
_NOT_MISSED = frozenset(_NCCL_ALONE)  # if the name is unknown, there are no such kernels
_DOUBLE_BUFFER: Entry = {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"}
_PIPELINED: tuple[Entry, ...] = tuple(
    {f"xla_gpu_enable_pipelined_{kind}": True, f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}
    for kind in _COLLECTIVES[:2]
)
_TPU_GATHERS: tuple[Entry, ...] = (
    {"xla_tpu_enable_async_collective_fusion": True},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True},
    {"xla_tpu_enable_async_collective_fusion_multiple_steps": True},
    {"xla_tpu_overlap_compute_collective_tc": True},
    {"xla_enable_async_all_gather": True},
    {"xla_tpu_megacore_fusion_allow_ags": False},
)
_TPU_SPARSE_CORES: tuple[Entry, ...] = (
    *({f"xla_tpu_enable_async_collective_fusion_fuse_{kind}": False} for kind in _COLLECTIVES),
    *({f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True} for kind in _COLLECTIVES),
    *({f"xla_tpu_enable_{kind}_offload_tracing": True} for kind in _COLLECTIVES),
    {"xla_tpu_use_tc_device_shape_on_sc": True},
)

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

# No entry: no option was shown to help.
PROFILES: Mapping[str, Mapping[str, tuple[Entry, ...]]] = {
    "fastest": {GPU: (_LIMIT, _DOUBLE_BUFFER), "v5p": _TPU_GATHERS, "v6e": _TPU_SPARSE_CORES},
    "memory": {GPU: (_LIMIT, *_PIPELINED)},
}
_PLATFORMS = {"gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU, "cpu": "cpu"}


class OptionError(ShardingError):
    """An unknown profile or platform, or an invalid value of an option."""


def compiler_options(
    profile: Literal["fastest", "memory"] | None = "fastest", *, platform: str | None = None, **overrides: Value | None
) -> Options:
    """Compiler options for one program, as far as the installed version knows them.

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
    return options_for(profile, platform=_device(platform), overrides=overrides)


def options_for(
    profile: str | None,
    *,
    platform: str,
    overrides: Mapping[str, Value | None],
    try_compile: Callable[[Options], Any] | None = None,
) -> Options:
    """`compiler_options` for a known platform or device, with another function to query the compiler."""
    _check(profile, platform)
    family = DEVICES[platform].platform if platform in DEVICES else platform
    profiled = [entry for entry in _entries(profile, platform, family) if not overrides.keys() & entry.keys()]
    entries = [*profiled, *({name: value} for name, value in overrides.items() if value is not None)]
    return _chosen(entries, _refused_names(family, entries, try_compile))


def _entries(profile: str | None, platform: str, family: str) -> tuple[Entry, ...]:
    by_device = PROFILES[profile] if profile is not None else {}
    entries = by_device.get(platform, by_device.get(family, ()))
    device = DEVICES.get(platform)
    if not entries or device is None or device.target is None:
        return entries
    more = _AMPERE if device.target.major < _HOPPER else (_NCCL_ALONE,) if device.hosts_share_links else ()
    return (*entries, *more)


def _chosen(entries: Sequence[Entry], refused: frozenset[str]) -> Options:
    """The first name of each entry that is not refused; one warning lists entries whose names are all refused."""
    chosen: Options = {}
    dropped = []
    for entry in entries:
        name = next((name for name in entry if name not in refused), None)
        if name is None and not _NOT_MISSED & entry.keys():
            dropped.append(" or ".join(entry))
        elif name is not None:
            chosen[name] = entry[name]
    if dropped:
        warnings.warn(
            f"This version of the compiler does not know these options and runs without them: {', '.join(dropped)}.",
            stacklevel=4,
        )
    return chosen


def _refused_names(family: str, entries: Sequence[Entry], try_compile: Callable | None) -> frozenset[str]:
    """The names that the compiler does not know."""
    asked = tuple((name, value) for entry in entries for name, value in entry.items())
    if try_compile is not None:
        return _refused(asked, try_compile)
    # Only the TPU's own compiler knows its options; where it is not running, the table is used.
    is_here = family != TPU or jax.default_backend() == "tpu"
    return _refused_here(asked) if is_here and asked else frozenset()


@functools.cache
def _refused_here(asked: tuple[tuple[str, Value], ...]) -> frozenset[str]:
    return _refused(asked, compile_nothing())


def compile_nothing(sharding: Any = None) -> Callable[[Options], Any]:
    """A function that compiles a program of one scalar with some options: the cheapest check of them."""
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))
    return lambda options: lowered.compile(compiler_options=options)


def _refused(asked: Sequence[tuple[str, Value]], try_compile: Callable[[Options], Any]) -> frozenset[str]:
    """Tries all options, and again without the one that the compiler rejects, until it rejects none."""
    left, refused = dict(asked), set[str]()
    while left:
        try:
            try_compile(dict(left))
            break
        except Exception as error:
            # A value that an older version does not have is treated like an unknown name.
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            unknown = unknown or re.search(r"While setting option (\w+), .* is not a valid enum value", str(error))
            if unknown is None or unknown[1] not in left:
                raise _of_value(error, left) from error
            refused.add(unknown[1])
            del left[unknown[1]]
    return frozenset(refused)


def _of_value(error: Exception, options: Mapping[str, Any]) -> Exception:
    """The error for an invalid value of an option; any other error unchanged."""
    found = re.search(r"While setting option (\w+), .*", str(error))
    if found is None or found[1] not in options:
        return error
    return OptionError(
        "An option cannot have this value.",
        where=f"js.compiler_options({found[1]}={options[found[1]]!r})",
        why=f"the compiler says: {found[0]}",
        do=f"js.compiler_options({found[1]}=None)  # leaves it out",
    )


def _device(platform: str | None) -> str:
    if platform is not None:
        return _PLATFORMS.get(platform, platform)
    family = _PLATFORMS.get(jax.default_backend(), "cpu")
    facts = device_of(jax.devices()[0].device_kind) if family in (GPU, TPU) else None
    return facts.name if facts is not None else family


def _check(profile: str | None, platform: str) -> None:
    if profile is not None and profile not in PROFILES:
        raise OptionError(
            f"There is no profile {profile!r}.",
            where=f"js.compiler_options({profile!r})",
            why=f"the profiles are {', '.join(map(repr, PROFILES))}, or None.",
            do='js.compiler_options("fastest")',
        )
    if platform not in (GPU, TPU, "cpu", *DEVICES):
        raise OptionError(
            f"There is no platform {platform!r}.",
            where=f"js.compiler_options(platform={platform!r})",
            why=f"it must be gpu, tpu, cpu, or a device: {', '.join(DEVICES)}.",
            do='js.compiler_options(platform="gpu")',
        )
