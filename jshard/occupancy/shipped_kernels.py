"""The kernels of jshard as compiled: the resources of a block of each."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from jshard.facts.gpus import GpuFacts
from jshard.occupancy.blocks import Block


@dataclasses.dataclass(frozen=True)
class ShippedKernel:
    """A kernel in one form."""

    name: str  # of the kernel as in profiles, without "jshard_", e.g. "matmul_nn_tiled"
    tiles: str  # its tiles and pipeline stages, e.g. "64x128x64/3"; for a norm the width of its rows
    threads: int  # of a block
    registers: int  # of a thread, as the assembler reports them
    smem_bytes: int  # of a block, without padding
    persistent: bool  # whether its blocks stay until the kernel ends

    @property
    def label(self) -> str:
        """Returns name and tiles, which identify a form."""
        return f"{self.name}:{self.tiles}" if self.tiles else self.name

    @property
    def block(self) -> Block:
        """Returns the resources of one of its blocks."""
        return Block(self.threads, self.registers, self.smem_bytes)

    def is_called(self, name: str) -> bool:
        """Returns whether a name matches it: its own, that of its form, or a prefix such as "matmul"."""
        return name in (self.name, self.label) or self.name.startswith(f"{name}_")


@dataclasses.dataclass(frozen=True)
class ShippedKernels:
    """The kernels of one generation."""

    source: str  # what they were compiled for, and by what
    kernels: tuple[ShippedKernel, ...]


# From `python -m benchmarks.kernels.table`; a test compiles them again. The other products of an MLP are those of
# matmul. On Hopper products of transposed operands (nt, tn) need the same resources; on Ampere they have rows.
# Name, tiles/stages, threads, registers, bytes of shared memory, persistent.
_OF_HOPPER = ShippedKernels(
    "compiled for sm_90a by ptxas 12.9.86 with jax 0.10.2",
    (
        ShippedKernel("matmul_nn_persistent", "256x128x64/4", 384, 168, 229_441, True),
        ShippedKernel("matmul_nn_tiled", "128x128x64/4", 128, 154, 163_873, False),
        ShippedKernel("matmul_nn_tiled", "64x128x64/3", 128, 90, 90_137, False),
        ShippedKernel("matmul_nn_tiled", "64x64x64/2", 128, 58, 40_977, False),
        ShippedKernel("mlp_gelu_persistent", "256x128x64/4", 384, 168, 229_441, True),
        ShippedKernel("mlp_gelu_tiled", "128x128x64/4", 128, 194, 163_873, False),
        ShippedKernel("mlp_silu_persistent", "128x128x64/4", 384, 168, 229_441, True),
        ShippedKernel("mlp_silu_tiled", "64x128x64/4", 128, 255, 180_257, False),
        ShippedKernel("rms_norm", "1024", 128, 40, 2_049, False),
        ShippedKernel("rms_norm_backward", "1024", 128, 56, 2_049, False),
        ShippedKernel("layer_norm", "1024", 128, 55, 2_049, False),
        ShippedKernel("layer_norm_backward", "1024", 128, 72, 2_049, False),
        ShippedKernel("rms_norm", "4096", 128, 96, 2_049, False),
        ShippedKernel("rms_norm_backward", "4096", 128, 206, 2_049, False),
        ShippedKernel("layer_norm", "4096", 128, 167, 2_049, False),
        ShippedKernel("layer_norm_backward", "4096", 128, 254, 2_049, False),
    ),
)
_OF_AMPERE = ShippedKernels(
    "compiled for sm_80 by ptxas 12.9.86 with jax 0.12.0.1",
    (
        ShippedKernel("matmul_nn_persistent", "128x64x64/3", 128, 196, 90_113, True),
        ShippedKernel("matmul_nt_persistent", "128x64x64/3", 128, 182, 90_113, True),
        ShippedKernel("matmul_tn_persistent", "128x64x64/3", 128, 202, 90_113, True),
        ShippedKernel("matmul_nn_tiled", "128x64x64/3", 128, 170, 90_113, False),
        ShippedKernel("matmul_nt_tiled", "128x64x64/3", 128, 162, 90_113, False),
        ShippedKernel("matmul_tn_tiled", "128x64x64/3", 128, 184, 90_113, False),
        ShippedKernel("matmul_nn_tiled", "128x64x64/2", 128, 170, 65_537, False),
        ShippedKernel("matmul_nt_tiled", "128x64x64/2", 128, 160, 65_537, False),
        ShippedKernel("matmul_tn_tiled", "128x64x64/2", 128, 182, 65_537, False),
        ShippedKernel("matmul_nn_tiled", "64x128x64/3", 128, 202, 90_113, False),
        ShippedKernel("matmul_nt_tiled", "64x128x64/3", 128, 198, 90_113, False),
        ShippedKernel("matmul_tn_tiled", "64x128x64/3", 128, 200, 90_113, False),
        ShippedKernel("matmul_nn_tiled", "64x64x64/2", 128, 122, 40_961, False),
        ShippedKernel("matmul_nt_tiled", "64x64x64/2", 128, 114, 40_961, False),
        ShippedKernel("matmul_tn_tiled", "64x64x64/2", 128, 116, 40_961, False),
        ShippedKernel("mlp_gelu_persistent", "128x64x64/3", 128, 216, 90_113, True),
        ShippedKernel("mlp_gelu_tiled", "128x64x64/3", 128, 194, 90_113, False),
        ShippedKernel("mlp_silu_persistent", "64x64x64/3", 128, 218, 81_921, True),
        ShippedKernel("mlp_silu_tiled", "64x64x64/3", 128, 202, 81_921, False),
        ShippedKernel("rms_norm", "1024", 128, 40, 2_049, False),
        ShippedKernel("rms_norm_backward", "1024", 128, 64, 2_049, False),
        ShippedKernel("layer_norm", "1024", 128, 56, 2_049, False),
        ShippedKernel("layer_norm_backward", "1024", 128, 78, 2_049, False),
        ShippedKernel("rms_norm", "4096", 128, 96, 2_049, False),
        ShippedKernel("rms_norm_backward", "4096", 128, 208, 2_049, False),
        ShippedKernel("layer_norm", "4096", 128, 165, 2_049, False),
        ShippedKernel("layer_norm_backward", "4096", 128, 254, 2_049, False),
    ),
)
SHIPPED: Mapping[int, ShippedKernels] = types.MappingProxyType({9: _OF_HOPPER, 8: _OF_AMPERE})
"""The kernels, by the major compute capability that they are for."""


def shipped_for(gpu: GpuFacts) -> ShippedKernels:
    """Returns the kernels for a GPU; those for Hopper if there are none for its generation."""
    return SHIPPED.get(gpu.major, _OF_HOPPER)
