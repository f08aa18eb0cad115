"""The text that XLA's GPU compiler takes for a GPU that is not there (a `GpuTargetConfigProto`), made from facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

CUDNN = 9, 10
"""The version that a GPU which is not there has."""

# What XLA calls the dtypes (xla_data.proto, PrimitiveType).
_F16, _F32, _F64, _BF16 = 10, 11, 12, 16
_S32, _U32 = 4, 8
_EIGHT_BITS = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)  # s8, u8 and the kinds of fp8


@dataclasses.dataclass(frozen=True)
class Rate:
    """Operations of one kind of unit: GHz, units by core, operations by unit and clock."""

    clock_rate_ghz: float
    units_per_core: int
    ops_per_clock: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of the scalar and the matrix units, by the number that XLA gives a dtype."""

    scalar: Mapping[int, Rate]
    matrix: Mapping[int, Rate]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The description of a GPU for the compiler, in the proto's own names where they differ by device."""

    description: str  # the name that the driver gives it
    major: int  # of its compute capability; the minor is 0
    core_count: int
    clock_rate_ghz: float
    memory_bandwidth: int
    l2_cache_size: int
    device_memory_size: int
    fpus_per_core: int = 128
    shared_memory_per_core: int = 228 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    pcie_bandwidth: int = 32 * 2**30
    rates: Rates | None = None  # None where no published description has them
    links: int = 0  # NVLinks


def rates(*, clock: float, matrix_clock: float, f32_ops: int, f16: int, f64: int) -> Rates:
    """The units of a GPU since Hopper: scalar ones at `clock` GHz, and matrix ones.

    `f32_ops` are half-precision operations of a float32 lane and clock, `f16` and `f64` multiply-adds of a matrix unit
    and clock; on 8 bits there are twice as many as on 16, on TF32 half as many.
    """
    scalar = {kind: Rate(clock, 64, 1) for kind in (_S32, _U32, _F64)}
    scalar |= {_F16: Rate(clock, 128, f32_ops), _F32: Rate(clock, 128, 1), _BF16: Rate(clock, 128, f32_ops)}
    matrix = {kind: Rate(matrix_clock, 4, 2 * f16) for kind in _EIGHT_BITS}
    matrix |= {kind: Rate(matrix_clock, 4, f16) for kind in (_F16, _BF16)}
    matrix |= {_F32: Rate(matrix_clock, 4, f16 // 2), _F64: Rate(clock, 4, f64)}
    return Rates(dict(sorted(scalar.items())), dict(sorted(matrix.items())))


# In a run XLA schedules for what JAX's allocator has, and here, where there is none, for 80 % of the memory described
# (GetSchedulerMemoryLimit). Described is so much that it schedules as with XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
_ALLOCATED, _UNSTATED = 0.95, 0.80

_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_size}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {described}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  cuda_compute_capability {{
    major: {major}
{feature}  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.0{extension}"
  device_address_bits: 64
  pcie_bandwidth: {pcie_bandwidth}
  ecc_enabled: true
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{dnn[0]}.{dnn[1]}.0"
{units}}}
platform_name: "CUDA"
dnn_version_info {{
  major: {dnn[0]}
  minor: {dnn[1]}
  patch: 0
}}
runtime_version {{
  major: 12
  minor: 9
  patch: 0
}}
device_description_str: "{description}"
"""


def target_config_text(target: GpuTarget) -> str:
    """The text proto of a GPU, for `topologies.get_topology_desc(target_config=...)`."""
    is_hopper = target.major >= 9
    units = ""
    if target.rates is not None:
        units += _units("scalar", target.rates.scalar) + _units("matrix", target.rates.matrix)
    if target.links:
        units += f"  device_interconnect_info {{\n    active_links: {target.links}\n  }}\n"
    return _TEXT.format(
        **vars(target),
        described=round(target.device_memory_size * _ALLOCATED / _UNSTATED),
        feature="    feature_extension: ACCELERATED_FEATURES\n" if is_hopper else "",
        extension="a" if is_hopper else "",
        units=units,
        dnn=CUDNN,
    )


def _units(kind: str, found: Mapping[int, Rate]) -> str:
    lines = [f"  {kind}_unit_description {{"]
    for dtype, rate in found.items():
        fields = [f"        {name}: {value}" for name, value in vars(rate).items()]
        lines += ["    rate_infos {", f"      key: {dtype}", "      value {", *fields, "      }", "    }"]
    return "\n".join([*lines, "  }", ""])
