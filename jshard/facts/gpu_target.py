"""The description of a GPU for XLA's compiler, as data: `jshard.cluster.target_config` writes it as text.

Without a GPU the compiler knows only what this description says. It schedules by it: a wrong clock rate or bandwidth
changes which collectives overlap with which computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# XLA's numbers of the dtypes (xla_data.proto, PrimitiveType).
_S32 = 4
_U32 = 8
_F16 = 10
_F32 = 11
_F64 = 12
_BF16 = 16
_EIGHT_BITS = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)  # s8, u8 and the fp8 types


HOPPER = 9
"""The compute capability of Hopper."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Operations of one kind of unit. The fields have the proto's names and order, in which they are written."""

    clock_rate_ghz: float
    units_per_core: int
    ops_per_clock: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of the scalar and the matrix units, by XLA's number of the dtype."""

    scalar: Mapping[int, Rate]
    matrix: Mapping[int, Rate]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """The description of a GPU for the compiler, in the proto's own names where they differ by device."""

    description: str  # the driver's name for it
    core_count: int
    clock_rate_ghz: float
    memory_bandwidth: int
    l2_cache_size: int
    device_memory_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NvidiaTarget(GpuTarget):
    """The description of an NVIDIA GPU."""

    major: int  # of its compute capability; the minor is 0
    fpus_per_core: int = 128
    shared_memory_per_core: int = 228 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    pcie_bandwidth: int = 32 * 2**30
    rates: Rates | None = None  # None if no published description has them
    links: int = 0  # NVLinks


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmdTarget(GpuTarget):
    """The description of an AMD GPU, or of one of the two dies that a card has."""

    gfx: str  # LLVM's name of the architecture, such as "gfx942"

    @property
    def shared_memory_per_core(self) -> int:
        """The local memory of a compute unit, as in XLA's files: 64 KiB, and 160 since MI350."""
        return 160 * 1024 if self.gfx == "gfx950" else 64 * 1024


def rates(*, clock: float, matrix_clock: float, f32_ops: int, f16: int, f64: int) -> Rates:
    """Returns the rates of a GPU since Hopper.

    Args:
        clock: of the scalar units, in GHz.
        matrix_clock: of the matrix units, in GHz. Only their float64 runs at `clock`.
        f32_ops: half-precision operations per float32 lane and clock.
        f16: multiply-adds of 16-bit numbers per matrix unit and clock; of 8-bit types there are twice as many, of TF32
            half as many.
        f64: multiply-adds of float64 per matrix unit and clock.
    """
    half_precision = Rate(clock, 128, f32_ops)
    scalar = {
        _S32: Rate(clock, 64, 1),
        _U32: Rate(clock, 64, 1),
        _F16: half_precision,
        _F32: Rate(clock, 128, 1),
        _F64: Rate(clock, 64, 1),
        _BF16: half_precision,
    }
    matrix = {
        _F16: Rate(matrix_clock, 4, f16),
        _BF16: Rate(matrix_clock, 4, f16),
        _F32: Rate(matrix_clock, 4, f16 // 2),
        _F64: Rate(clock, 4, f64),
    }
    for dtype in _EIGHT_BITS:
        matrix[dtype] = Rate(matrix_clock, 4, 2 * f16)
    # Sorted by key, as protobuf prints maps: so the text can be compared with a published description.
    return Rates(dict(sorted(scalar.items())), dict(sorted(matrix.items())))
