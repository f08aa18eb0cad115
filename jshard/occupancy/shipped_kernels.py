"""The kernels of jshard as compiled: the resources of a block of each."""

from __future__ import annotations

import dataclasses

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


# From `python -m benchmarks.kernels.table`, like the table below; a test compiles them again. Products of transposed
# operands need the same resources, and the other products of an MLP are those of matmul.
SHIPPED_SOURCE = "compiled for sm_90a by ptxas 12.9.86 with jax 0.10.2"

# Name, tiles/stages, threads, registers, bytes of shared memory, persistent.
SHIPPED = (
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
)
