"""`compiler_options`: the options of XLA that were shown to help, for one program at a time; and what is known of each.

They go to `jax.jit(..., compiler_options=...)` or `lowered.compile(compiler_options=...)` and never into XLA_FLAGS,
where they would hold for every program of the process, and where a name that a version does not know ends it.

In the table "est." are estimates: a replay of the compiled schedule at 42 GB/s by network adapter and 60 % efficiency.
Everything else in a row was read off a compiled program. Two programs come up again and again:

    175B   GPT-175B on 512 H100, fsdp=512, 96 layers in one scan
    G64    12 layers of width 4096 on 64 H100, one sequence of 2048 by GPU
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, device_of

GPU, TPU = "gpu", "tpu"
_PREFIX = re.compile("^xla_(gpu_|tpu_)?")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the compiler.

    Args:
        name: as `jax.jit(compiler_options=...)` takes it.
        kind: `bool`, `int`, `str`, or a tuple of the words that it takes.
        platform: "gpu" or "tpu".
        meaning: what it does.
        measured: what came of it; "not measured" where nothing did.
    """

    name: str
    kind: type | tuple[str, ...]
    platform: str
    meaning: str
    measured: str = "not measured"

    @property
    def takes(self) -> str:
        """The values that it takes, in words."""
        if isinstance(self.kind, tuple):
            return " or ".join(map(repr, self.kind))
        return {bool: "True or False", int: "a whole number", str: "a text"}[self.kind]

    def fits(self, value: Any) -> bool:
        """Whether a value is one of those."""
        if isinstance(self.kind, tuple):
            return value in self.kind
        return isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))


def _gpu(name: str, kind: Any, meaning: str, measured: str = "not measured") -> Option:
    return Option(f"xla_gpu_{name}", kind, GPU, meaning, measured)


def _tpu(name: str, meaning: str, measured: str, kind: Any = bool) -> Option:
    return Option(name, kind, TPU, meaning, measured)


_PIPELINING = tuple(f"COLLECTIVE_PIPELINING_MODE_{mode}" for mode in ("DEFAULT", "OFF", "ON", "EXPLICIT"))
_UNROLLING = tuple(
    f"WHILE_LOOP_UNROLLING_{mode}" for mode in ("NO_UNROLL", "DOUBLE_BUFFER", "FULL_UNROLL", "AUTO_UNROLL")
)
_PIPED = (
    "both, with overlap limit 4: 175B scanned without prefetch, est. hidden 74 -> 91 %, peak 17.9 GiB as before; "
    "12 layers of width 4096 in the model's own nnx.scan, 64 H100: est. hidden 2 -> 24 %, est. step 181 -> 170 ms, "
    "peak 4.00 GB as before; a prototype of G64: temporaries 3.31 -> 4.06 GB against no option at all"
)
_COMBINED = (
    "1 GiB without prefetch ruins the schedule (12 layers, 64 H100: est. hidden 78 -> 35 %); 0 with a token chain is "
    "worse than the default (G64: est. step 115.8 -> 125.0 ms): more and smaller collectives"
)
_AG = "with its group on v5p 8x8x8, 175B: 0 -> 8 of 13 loop collectives async, est. step 11.47 -> 10.37 s"
_SC = "with its group on v6e 16x16, 12.9B: 0 -> 12 of 13 loop collectives async, est. step 1.17 -> 0.89 s"
_RS = "with the group for gathers on v5p: does not compile (CompileTimeScopedVmemOom)"
_RS_LAYOUT = "v5e 4x4: nothing changes, the reduce-scatter still becomes an all-reduce"

_GPU_OPTIONS = (
    _gpu(
        "experimental_parallel_collective_overlap_limit",
        int,
        "collectives in flight at once; 1 by default, so that a window closes when the next one opens",
        "4: 175B with prefetch in the scan, loop collectives over matrix products 3 of 10 -> 10 of 10, est. hidden "
        "55 -> 99 %; G64 unrolled on a token chain: est. step 122.4 -> 115.8 ms, peak 4.22 -> 3.96 GB. Unrolled "
        "without the chain it costs memory: 7.18 -> 11.62 GB. 8 for 4, six layers on h100:8x8 on the "
        "chain: with jax 0.12 0.62 -> 0.87 of the bytes beside products, peak 5.7 -> 7.0 units; with jax 0.10.2 0.87 "
        "with both, 5.9 -> 6.0",
    ),
    _gpu("experimental_parallel_async_compute_limit", int, "computations on streams of their own at once"),
    _gpu(
        "enable_while_loop_unrolling",
        _UNROLLING,
        "DOUBLE_BUFFER runs two rounds of a loop in one, so that the carry is not copied; nothing without a loop",
        "with overlap limit 4 and prefetch, 175B: est. step 6.65 -> 5.64 s, peak 26.7 -> 24.9 GiB; G64: est. step "
        "131.5 -> 122.2 ms, peak 4.61 -> 4.99 GB. Alone, without prefetch: nothing changes",
    ),
    _gpu("enable_while_loop_double_buffering", bool, "the older switch for the same"),
    _gpu("enable_pipelined_all_gather", bool, "moves gathers into the round of the loop before", _PIPED),  # jax 0.10
    _gpu("enable_pipelined_reduce_scatter", bool, "the same for reduce-scatters, a round later", _PIPED),
    _gpu("enable_pipelined_all_reduce", bool, "the same for all-reduces"),
    _gpu("pipeline_all_gather", _PIPELINING, "the same for gathers, since jax 0.11", _PIPED),
    _gpu("pipeline_reduce_scatter", _PIPELINING, "the same for reduce-scatters, a round later", _PIPED),
    _gpu("pipeline_all_reduce", _PIPELINING, "the same for all-reduces"),
    _gpu("all_gather_combine_threshold_bytes", int, "gathers are merged up to so many bytes", _COMBINED),
    _gpu("reduce_scatter_combine_threshold_bytes", int, "the same for reduce-scatters", _COMBINED),
    _gpu("all_reduce_combine_threshold_bytes", int, "the same for all-reduces"),
    _gpu(
        "memory_limit_slop_factor",
        int,
        "percent of the memory that the scheduler may plan with; 95 by default",
        "20: 175B with prefetch and overlap limit 4, peak 26.7 -> 20.1 GiB, and est. hidden 99 -> 22 % without a word",
    ),
    _gpu(
        "enable_latency_hiding_scheduler",
        bool,
        "the older switch for overlap",
        "nothing changes while the speed-of-light estimator is on, which it is by default",
    ),
    _gpu(
        "enable_analytical_sol_latency_estimator",
        bool,
        "estimates how long collectives take; overlap comes with it; on by default",
        "off: 175B, no collective async, est. step 8.22 -> 9.45 s",
    ),
    _gpu("enable_analytical_latency_estimator", bool, "another estimator", "nothing changes"),
    _gpu(
        "disable_async_collectives",
        str,
        'kinds that must not overlap, as "ALLGATHER,REDUCESCATTER,ALLREDUCE"',
        "all three: 0 % hidden: a baseline to compare with",
    ),
    _gpu(
        "enable_highest_priority_async_stream",
        bool,
        "collectives run on a stream of the highest priority; on by default",
        "leaves no trace in a compiled program",
    ),
    _gpu("experimental_collective_start_as_early_as_possible", bool, "starts collectives early", "did not help"),
    _gpu("enable_triton_gemm", bool, "matrix products by Triton kernels; off: cuBLAS", "schedules stay as they are"),
    _gpu("enable_command_buffer", str, 'what is launched as a CUDA graph; "" for nothing'),
    _gpu("nccl_collective_max_nchannels", int, "channels of a collective, and so the multiprocessors that it takes"),
    _gpu("nccl_p2p_max_nchannels", int, "the same for sends"),
    _gpu("enable_nccl_user_buffers", bool, "NCCL works in the program's own buffers"),
    _gpu("experimental_enable_nccl_symmetric_buffers", bool, "NCCL's symmetric memory"),
)

_TPU_OPTIONS = (
    _tpu("xla_tpu_enable_async_collective_fusion", "collectives run beside what they are fused with", _AG),
    _tpu("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "the same for gathers", _AG),
    _tpu("xla_tpu_enable_async_collective_fusion_multiple_steps", "over several operations", _AG),
    _tpu("xla_tpu_overlap_compute_collective_tc", "overlap on the tensor core", _AG),
    _tpu("xla_enable_async_all_gather", "gathers may be async", _AG),
    _tpu("xla_tpu_megacore_fusion_allow_ags", "gathers may be split over the two cores of a chip", _AG),
    _tpu("xla_enable_async_reduce_scatter_fusion", "reduce-scatters may be async", _RS),
    _tpu("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "fused all-reduces", _SC),
    _tpu("xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter", "fused reduce-scatters", f"{_RS}; off: {_SC}"),
    _tpu("xla_tpu_enable_sparse_core_collective_offload_all_gather", "gathers on the SparseCores", _SC),
    _tpu("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", "reduce-scatters there", _SC),
    _tpu("xla_tpu_enable_sparse_core_collective_offload_all_reduce", "all-reduces there", _SC),
    _tpu("xla_tpu_enable_all_gather_offload_tracing", "needed with the offload of gathers", _SC),
    _tpu("xla_tpu_enable_reduce_scatter_offload_tracing", "of reduce-scatters", _SC),
    _tpu("xla_tpu_enable_all_reduce_offload_tracing", "of all-reduces", _SC),
    _tpu("xla_tpu_use_tc_device_shape_on_sc", "SparseCores take the tensor core's shapes", _SC),
    _tpu("xla_tpu_use_minor_sharding_for_major_trivial_input", "layout for reduce-scatters", _RS_LAYOUT),
    _tpu("xla_tpu_relayout_group_size_threshold_for_reduce_scatter", "layout for reduce-scatters", _RS_LAYOUT, int),
    _tpu("xla_tpu_assign_all_reduce_scatter_layout", "layout for reduce-scatters", _RS_LAYOUT),
)

OPTIONS: Mapping[str, Option] = {option.name: option for option in (*_GPU_OPTIONS, *_TPU_OPTIONS)}


def nearest(name: str) -> str | None:
    """The known option whose name comes closest; the prefix may be left out."""
    short = {_PREFIX.sub("", known): known for known in OPTIONS}
    found = difflib.get_close_matches(_PREFIX.sub("", name), short, n=1)
    return short[found[0]] if found else None


# Profiles of them.

Value = bool | int | str
Options = dict[str, Any]  # as jax takes them, which names no int
# An entry of a profile: one thing under the names that it has had, of which the compiler knows one.
Entry = Mapping[str, Value]

# As many as a unit has matrices, whose gathers begin together, and one reduce-scatter: seven and one in Llama.
IN_FLIGHT = 8
_LIMIT: Entry = {"xla_gpu_experimental_parallel_collective_overlap_limit": IN_FLIGHT}
_DOUBLE_BUFFER: Entry = {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"}
_PIPELINED: tuple[Entry, ...] = tuple(
    {f"xla_gpu_enable_pipelined_{kind}": True, f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}
    for kind in ("all_gather", "reduce_scatter")
)
_TPU_GATHERS: tuple[Entry, ...] = tuple(
    {name: name != "xla_tpu_megacore_fusion_allow_ags"}
    for name in (
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_gather",
        "xla_tpu_megacore_fusion_allow_ags",
    )
)
_TPU_SPARSE_CORES: tuple[Entry, ...] = tuple(
    {f"xla_tpu_enable_{what}": on}
    for on, names in (
        (False, "async_collective_fusion_fuse_{}"),
        (True, "sparse_core_collective_offload_{}"),
        (True, "{}_offload_tracing"),
    )
    for what in map(names.format, ("all_gather", "reduce_scatter", "all_reduce"))
) + ({"xla_tpu_use_tc_device_shape_on_sc": True},)

# What each profile holds and why is in the column `measured` of the table. No entry: nothing was shown to help.
PROFILES: Mapping[str, Mapping[str, tuple[Entry, ...]]] = {
    "fastest": {GPU: (_LIMIT, _DOUBLE_BUFFER), "v5p": _TPU_GATHERS, "v6e": _TPU_SPARSE_CORES},
    "memory": {GPU: (_LIMIT, *_PIPELINED)},
}
_PLATFORMS = {"gpu": GPU, "cuda": GPU, "rocm": GPU, "tpu": TPU, "cpu": "cpu"}


class OptionError(ShardingError):
    """An option, a profile or a platform that is not known, or a value of the wrong type."""


def compiler_options(
    profile: str | None = "fastest", *, platform: str | None = None, **overrides: Value | None
) -> Options:
    """Options of the compiler for one program, as far as the installed version knows them.

    A profile holds only what was shown to help: on a GPU "fastest" lets eight collectives overlap and double-buffers
    loops; "memory" overlaps without the second buffer, and pipelines the collectives of loops instead. On a TPU
    "fastest" has options for v5p and v6e. Elsewhere a profile is empty. An option that the installed version does
    not know is left out, with one warning for all of them.

    Args:
        profile: "fastest", "memory", or None for the overrides alone.
        platform: "gpu", "tpu" or "cpu", or a device as in a topology ("h100", "v6e"); that of `jax.devices()` by
            default.
        **overrides: options by their names in XLA, instead of the profile's or besides them; None takes one out.

    Returns:
        What `jax.jit(compiler_options=...)` takes.

    Raises:
        OptionError: an option, the profile or the platform is not known, or a value has another type.

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
    """`compiler_options` for a platform or device that is known, with another way to ask the compiler."""
    _check(profile, platform, overrides)
    family = DEVICES[platform].platform if platform in DEVICES else platform
    profiled = [entry for entry in _entries(profile, platform, family) if not overrides.keys() & entry.keys()]
    entries = [*profiled, *({name: value} for name, value in overrides.items() if value is not None)]
    return _chosen(entries, _refused_names(family, entries, try_compile))


def _entries(profile: str | None, platform: str, family: str) -> tuple[Entry, ...]:
    by_device = PROFILES[profile] if profile is not None else {}
    if platform == TPU and TPU not in by_device and len(by_device) > 1:
        warnings.warn(
            f"The profile {profile!r} has options for {', '.join(name for name in by_device if name != GPU)} and none "
            'for any TPU; platform="v5p" says which it is.',
            stacklevel=4,
        )
    return by_device.get(platform, by_device.get(family, ()))


def _chosen(entries: Sequence[Entry], refused: frozenset[str]) -> Options:
    """Of each entry the first name that is not refused; where all are, one warning names them."""
    chosen: Options = {}
    dropped = []
    for entry in entries:
        name = next((name for name in entry if name not in refused), None)
        if name is None:
            dropped.append(" or ".join(entry))
        else:
            chosen[name] = entry[name]
    if dropped:
        warnings.warn(
            f"This version of the compiler does not know these options, and runs without them: {', '.join(dropped)}.",
            stacklevel=4,
        )
    return chosen


def _refused_names(family: str, entries: Sequence[Entry], try_compile: Callable | None) -> frozenset[str]:
    """Names that the compiler does not know."""
    asked = tuple((name, value) for entry in entries for name, value in entry.items())
    if try_compile is not None:
        return _refused(asked, try_compile)
    # The options of a TPU are known to its own compiler alone; where that is not running, the table has to do.
    is_here = family != TPU or jax.default_backend() == "tpu"
    return _refused_here(asked) if is_here and asked else frozenset()


@functools.cache
def _refused_here(asked: tuple[tuple[str, Value], ...]) -> frozenset[str]:
    return _refused(asked, compile_nothing())


def compile_nothing(sharding: Any = None) -> Callable[[Options], Any]:
    """A function that compiles a program of one scalar with some options: the cheapest way to have them judged."""
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))
    return lambda options: lowered.compile(compiler_options=options)


def _refused(asked: Sequence[tuple[str, Value]], try_compile: Callable[[Options], Any]) -> frozenset[str]:
    """Asks with all options, and again without the one that the compiler names as long as it names one."""
    left, refused = dict(asked), set[str]()
    while left:
        try:
            try_compile(dict(left))
        except Exception as error:
            name = _named(str(error), left)
            if name is None:
                raise
            refused.add(name)
            del left[name]
        else:
            break
    return frozenset(refused)


def _named(message: str, names: Mapping[str, Any]) -> str | None:
    unknown = re.search(r"No such compile option: '(\w+)'", message)
    # A word that an older version does not have: what it stands for is missing as well.
    unknown = unknown or re.search(r"While setting option (\w+), .* is not a valid enum value", message)
    return unknown[1] if unknown and unknown[1] in names else None


def _device(platform: str | None) -> str:
    if platform is not None:
        return _PLATFORMS.get(platform, platform)
    if jax.default_backend() != "tpu":
        return _PLATFORMS.get(jax.default_backend(), "cpu")
    facts = device_of(jax.devices()[0].device_kind)
    return facts.name if facts is not None else TPU


def _check(profile: str | None, platform: str, overrides: Mapping[str, Value | None]) -> None:
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
            why=f"it is one of gpu, tpu, cpu, or a device: {', '.join(DEVICES)}.",
            do='js.compiler_options(platform="gpu")',
        )
    problems = [(name, value, *wrong) for name, value in overrides.items() if (wrong := _wrong(name, value))]
    if problems:
        raise OptionError(
            f"{len(problems)} options cannot be used." if len(problems) > 1 else "An option cannot be used.",
            where=[f"js.compiler_options({name}={value!r})" for name, value, _, _ in problems],
            why="\n".join(why for _, _, why, _ in problems),
            do="\n".join(do for *_, do in problems),
        )


def _wrong(name: str, value: Any) -> tuple[str, str] | None:
    """Why an override cannot be used, and what to write; None where it can."""
    option = OPTIONS.get(name)
    if option is None:
        near = nearest(name)
        add = f"{{**js.compiler_options(), {name!r}: {value!r}}} passes it to XLA unseen."
        return f"the table has no option {name!r}.", f"{near}={value!r}, or {add}" if near else add
    if value is None or option.fits(value):
        return None
    example = {bool: True, int: 4, str: "..."}[option.kind] if isinstance(option.kind, type) else option.kind[0]
    return f"{name} takes {option.takes}, not {value!r}.", f"{name}={example!r}"
