"""What is known of XLA's options for communication schedules: one row for each, with what we measured.

"Est." are estimates: a replay of the compiled schedule at 42 GB/s by network adapter and 60 % efficiency. Everything
else in a row was read off a compiled program. Two programs come up again and again:

    175B   GPT-175B on 512 H100, fsdp=512, 96 layers in one scan
    G64    12 layers of width 4096 on 64 H100, one sequence of 2048 by GPU
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

GPU, TPU = "gpu", "tpu"
_0102, _OLD, _NEW = ("0.10.2", "0.11.2", "0.12.0.1"), ("0.10.2",), ("0.11.2", "0.12.0.1")
_LIBTPU = ("0.0.42.1",)
_PREFIX = re.compile("^xla_(gpu_|tpu_)?")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the compiler.

    Args:
        name: as `jax.jit(compiler_options=...)` takes it.
        kind: `bool`, `int`, `str`, or a tuple of the words that it takes.
        platform: "gpu" or "tpu".
        known_to: versions that were seen to know it: of jax for a GPU, of libtpu for a TPU.
        meaning: what it does.
        measured: what came of it; "not measured" where nothing did.
    """

    name: str
    kind: type | tuple[str, ...]
    platform: str
    known_to: tuple[str, ...]
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


def _gpu(name: str, kind: Any, meaning: str, measured: str = "not measured", known_to: Any = _0102) -> Option:
    return Option(f"xla_gpu_{name}", kind, GPU, known_to, meaning, measured)


def _tpu(name: str, meaning: str, measured: str, kind: Any = bool) -> Option:
    return Option(name, kind, TPU, _LIBTPU, meaning, measured)


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
    _gpu("enable_pipelined_all_gather", bool, "moves gathers into the round of the loop before", _PIPED, _OLD),
    _gpu("enable_pipelined_reduce_scatter", bool, "the same for reduce-scatters, a round later", _PIPED, _OLD),
    _gpu("enable_pipelined_all_reduce", bool, "the same for all-reduces", known_to=_OLD),
    _gpu("pipeline_all_gather", _PIPELINING, "moves gathers into the round of the loop before", _PIPED, _NEW),
    _gpu("pipeline_reduce_scatter", _PIPELINING, "the same for reduce-scatters, a round later", _PIPED, _NEW),
    _gpu("pipeline_all_reduce", _PIPELINING, "the same for all-reduces", known_to=_NEW),
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
