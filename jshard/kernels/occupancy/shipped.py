"""The kernels of jshard as they were compiled: what a block of each takes."""

from __future__ import annotations

import dataclasses

from jshard.kernels.occupancy.blocks import Block
from jshard.kernels.occupancy.gpus import GpuFacts

# By `python -m jshard.kernels.assembled`, as is the table below; a test compiles them again.
_SOURCE = "compiled for sm_90a by ptxas 12.9.86 with jax 0.10.2"


@dataclasses.dataclass(frozen=True)
class ShippedKernel:
    """A kernel in one form.

    Attributes:
        name: of the kernel as profiles show it, less "jshard_", e.g. "matmul_nn_tiled".
        tiles: its tiles and pipeline stages, e.g. "64x128x64/3"; of a norm the width of its rows.
        threads: of a block.
        registers: of a thread, as the assembler reports them.
        smem_bytes: of a block, without padding.
        persistent: whether its blocks stay until the kernel ends.
        source: where the numbers are from.
    """

    name: str
    tiles: str
    threads: int
    registers: int
    smem_bytes: int
    persistent: bool
    source: str = _SOURCE

    @property
    def label(self) -> str:
        """Name and tiles: one form."""
        return f"{self.name}:{self.tiles}" if self.tiles else self.name

    @property
    def block(self) -> Block:
        """What a block of it takes."""
        return Block(self.threads, self.registers, self.smem_bytes)

    def is_called(self, name: str) -> bool:
        """Whether it goes by a name: its own, that of its form, or how they begin, as "matmul" does."""
        return name in (self.name, self.label) or self.name.startswith(f"{name}_")


_KERNELS = (
    ShippedKernel("matmul_nn_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_nt_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_tn_persistent", "256x128x64/4", 384, 168, 229_441, True),
    ShippedKernel("matmul_nn_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_nt_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_tn_tiled", "128x128x64/4", 128, 154, 163_873, False),
    ShippedKernel("matmul_nn_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_nt_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_tn_tiled", "64x128x64/3", 128, 90, 90_137, False),
    ShippedKernel("matmul_nn_tiled", "64x64x64/2", 128, 58, 40_977, False),
    ShippedKernel("matmul_nt_tiled", "64x64x64/2", 128, 58, 40_977, False),
    ShippedKernel("matmul_tn_tiled", "64x64x64/2", 128, 58, 40_977, False),
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
# The other products of an MLP are those of matmul.


def shipped_kernels(gpu: GpuFacts) -> tuple[ShippedKernel, ...]:
    """The kernels, as compiled for a GPU; for one that they were not compiled for, as for sm_90a.

    Args:
        gpu: the GPU.
    """
    if gpu.arch == "sm_90":
        return _KERNELS
    source = f"{_SOURCE}; not compiled for {gpu.arch}"
    return tuple(dataclasses.replace(kernel, source=source) for kernel in _KERNELS)
