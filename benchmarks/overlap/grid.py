"""What is measured: the sizes, the kernels and the ways to shape them, for a GPU and a collective. No GPU is needed."""

from __future__ import annotations

import dataclasses

from jshard.kernels.knobs import Occupancy
from jshard.occupancy import (
    CommFootprint,
    GpuFacts,
    ShippedKernel,
    drain,
    paddings,
    reserved_for,
    resident,
    room_beside,
    shipped_kernels,
)

DOT = "XLA's dot"
PLACEMENTS = ("even", "pooled")
COLLECTIVE_BYTES = 896 * 10**6
_KERNEL = "matmul_nn"
_WHOLE_KERNEL = "kernel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A product of (m, k) and (k, n)."""

    name: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


SIZES = (Size(name="cube", m=8192, n=8192, k=8192), Size(name="wide", m=8192, n=57344, k=8192))
QUICK_SIZES = (Size(name="cube", m=1024, n=1024, k=1024), Size(name="wide", m=1024, n=4096, k=1024))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A product by one kernel, with room left in one way.

    Attributes:
        form: `DOT`, or form and tiles of the kernel.
        knobs: of the kernel; None for XLA's own.
        blocks_per_sm: blocks at once on a multiprocessor; 0 where that is not known.
        drains: by the rule of `GpuFacts.placement` the blocks that must end on a multiprocessor before one of the
            collective begins there, in words: "kernel" if all must, "unknown" of XLA's own.
    """

    form: str
    knobs: Occupancy | None = None
    blocks_per_sm: int = 0
    drains: tuple[str, ...] = ("unknown",) * len(PLACEMENTS)

    @property
    def pad_bytes(self) -> int:
        """Padding of shared memory."""
        return self.knobs.smem_pad_bytes if self.knobs else 0

    @property
    def reserved_sms(self) -> int:
        """Multiprocessors that are left alone."""
        return self.knobs.reserved_sms if self.knobs else 0

    @property
    def is_shaped(self) -> bool:
        """Whether it leaves more room than the kernel does by itself."""
        return bool(self.pad_bytes or self.reserved_sms)

    @property
    def described(self) -> str:
        """In words."""
        if self.reserved_sms:
            return f"{self.form}, {self.reserved_sms} SMs reserved"
        return f"{self.form}, pad {self.pad_bytes:,}" if self.pad_bytes else self.form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that are measured side by side: XLA's own first, then one form of the kernel, unshaped first."""

    size: Size
    form: str
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.size.name}/{self.form}"


def groups(gpu: GpuFacts, comm: CommFootprint, sizes: tuple[Size, ...] = SIZES) -> tuple[Group, ...]:
    """The grid.

    Args:
        gpu: it is measured on; where jshard's kernels do not run, XLA's own alone is there.
        comm: what runs beside the products.
        sizes: of the products.

    Raises:
        OccupancyError: the collective would take every multiprocessor.
    """
    dot = Setting(form=DOT)
    forms = [kernel for kernel in shipped_kernels(gpu) if kernel.name.startswith(_KERNEL) and gpu.arch == "sm_90"]
    shaped = {_form(kernel): _settings(gpu, comm, kernel) for kernel in forms} or {DOT: ()}
    return tuple(
        Group(size=size, form=form, settings=(dot, *settings)) for size in sizes for form, settings in shaped.items()
    )


def _form(kernel: ShippedKernel) -> str:
    return f"{'persistent' if kernel.persistent else 'tiled'} {kernel.tiles}"


def _settings(gpu: GpuFacts, comm: CommFootprint, kernel: ShippedKernel) -> tuple[Setting, ...]:
    """As it is, and every distinct padding; of a persistent kernel some numbers of reserved multiprocessors."""
    knobs, form = _knobs(kernel), _form(kernel)
    if not kernel.persistent:
        return tuple(
            Setting(
                form=form,
                knobs=dataclasses.replace(knobs, smem_pad_bytes=pad),
                blocks_per_sm=blocks,
                drains=tuple(_drain(gpu, kernel, comm, placement, pad) for placement in PLACEMENTS),
            )
            for blocks, pad in paddings(gpu, kernel.block)
        )
    needed = reserved_for(gpu, comm)
    counts = [count for count in sorted({0, needed // 2, needed, 2 * needed}) if count < gpu.num_sms]
    return tuple(
        Setting(
            form=form,
            knobs=dataclasses.replace(knobs, reserved_sms=count),
            blocks_per_sm=resident(gpu, kernel.block),
            drains=tuple(
                "0" if count >= needed else _drain(gpu, kernel, comm, placement, 0) for placement in PLACEMENTS
            ),
        )
        for count in counts
    )


def _drain(gpu: GpuFacts, kernel: ShippedKernel, comm: CommFootprint, placement: str, pad: int) -> str:
    beside = comm.block
    if beside is None:
        return "0"
    ruled = dataclasses.replace(gpu, placement=placement)  # pyright: ignore[reportArgumentType]
    block = kernel.block.padded(pad)
    if kernel.persistent:
        return "0" if room_beside(ruled, block, beside) == resident(ruled, block) else _WHOLE_KERNEL
    return str(drain(ruled, block, beside))


def _knobs(kernel: ShippedKernel) -> Occupancy:
    tiles, stages = kernel.tiles.split("/")
    tile_m, tile_n, tile_k = map(int, tiles.split("x"))
    return Occupancy(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, stages=int(stages), persistent=kernel.persistent)
