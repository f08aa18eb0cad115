"""The text that XLA's GPU compiler takes for a GPU that is not there (a `GpuTargetConfigProto`), made from facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Field = tuple[str, Any]  # a name of the proto and its value; a list of fields is a message

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


def target_config_text(target: GpuTarget) -> str:
    """The text proto of a GPU, for `topologies.get_topology_desc(target_config=...)`."""
    whole: list[Field] = [
        ("gpu_device_info", _device_info(target)),
        ("platform_name", "CUDA"),
        ("dnn_version_info", [("major", CUDNN[0]), ("minor", CUDNN[1]), ("patch", 0)]),
        ("runtime_version", [("major", 12), ("minor", 9), ("patch", 0)]),
        ("device_description_str", target.description),
    ]
    return "\n".join(_lines(whole)) + "\n"


# In a run XLA schedules for what JAX's allocator has, and here, where there is none, for 80 % of the memory described
# (GetSchedulerMemoryLimit). Described is so much that it schedules as with XLA_PYTHON_CLIENT_MEM_FRACTION=.95.
_ALLOCATED, _UNSTATED = 0.95, 0.80


def _device_info(target: GpuTarget) -> list[Field]:
    capability: list[Field] = [("major", target.major)]
    extension = "a" if target.major >= 9 else ""
    if extension:
        capability.append(("feature_extension", _Word("ACCELERATED_FEATURES")))
    fields: list[Field] = [
        ("threads_per_block_limit", 1024),
        ("threads_per_warp", 32),
        ("shared_memory_per_block", 48 * 1024),
        ("shared_memory_per_core", target.shared_memory_per_core),
        ("threads_per_core_limit", 2048),
        ("core_count", target.core_count),
        ("fpus_per_core", target.fpus_per_core),
        ("block_dim_limit_x", 2**31 - 1),
        ("block_dim_limit_y", 2**16 - 1),
        ("block_dim_limit_z", 2**16 - 1),
        ("memory_bandwidth", target.memory_bandwidth),
        ("l2_cache_size", target.l2_cache_size),
        ("clock_rate_ghz", target.clock_rate_ghz),
        ("device_memory_size", round(target.device_memory_size * _ALLOCATED / _UNSTATED)),
        ("shared_memory_per_block_optin", target.shared_memory_per_block_optin),
        ("cuda_compute_capability", capability),
        ("registers_per_core_limit", 2**16),
        ("registers_per_block_limit", 2**16),
        ("thread_dim_limit_x", 1024),
        ("thread_dim_limit_y", 1024),
        ("thread_dim_limit_z", 64),
        ("device_vendor", "NVIDIA Corporation"),
        ("platform_version", f"Compute Capability {target.major}.0{extension}"),
        ("device_address_bits", 64),
        ("pcie_bandwidth", target.pcie_bandwidth),
        ("ecc_enabled", True),
        ("name", target.description),
        ("driver_version", "13.0.0"),
        ("runtime_version", "12.9.0"),
        ("compile_time_toolkit_version", "12.9.0"),
        ("dnn_version", f"{CUDNN[0]}.{CUDNN[1]}.0"),
    ]
    if target.rates is not None:
        fields.append(("scalar_unit_description", _rate_infos(target.rates.scalar)))
        fields.append(("matrix_unit_description", _rate_infos(target.rates.matrix)))
    if target.links:
        fields.append(("device_interconnect_info", [("active_links", target.links)]))
    return fields


def _rate_infos(found: Mapping[int, Rate]) -> list[Field]:
    return [("rate_infos", [("key", kind), ("value", list(vars(rate).items()))]) for kind, rate in found.items()]


class _Word(str):
    """A name of an enum, which is written without quotes."""


def _lines(fields: Sequence[Field], indent: str = "") -> list[str]:
    lines = []
    for name, value in fields:
        if isinstance(value, list):
            lines += [f"{indent}{name} {{", *_lines(value, indent + "  "), f"{indent}}}"]
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and not isinstance(value, _Word) else str(value)
