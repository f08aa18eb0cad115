"""What is measured: the sizes, the kernels and the ways to shape them, for a GPU and a collective. No GPU is needed."""

from __future__ import annotations

import dataclasses

from benchmarks.overlap.target import Comm, Gpu, has_kernels
from jshard.kernels.backend import Occupancy
from jshard.occupancy import (
    CommFootprint,
    GpuFacts,
    ShippedKernel,
    drain,
    paddings,
    reserved_for,
    resident,
    room_beside,
    shipped_for,
)
from jshard.occupancy.tune import knobs_of

DOT = "XLA's dot"
TRITON = "XLA's Triton product"  # which XLA compiles itself: its dot may be a kernel of the vendor's library
COLLECTIVE_BYTES = 896 * 10**6
_KERNEL = "matmul_nn"


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
        drain: blocks that must end on a multiprocessor before one of the collective begins there, in words: "kernel"
            if all must, "unknown" of XLA's own.
    """

    form: str
    knobs: Occupancy | None = None
    blocks_per_sm: int = 0
    drain: str = "unknown"

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


def groups(gpu: Gpu, comm: Comm, sizes: tuple[Size, ...] = SIZES) -> tuple[Group, ...]:
    """Returns the grid: for each size the products that the GPU supports, each beside XLA's dot.

    These are jshard's kernels where they run. Elsewhere it is XLA's Triton product, which cannot be shaped, but whose
    blocks differ from those of the vendor's library.

    Raises:
        OccupancyError: the collective would take every multiprocessor.
    """
    settings_by_form = {TRITON: (Setting(form=TRITON),)}
    if has_kernels(gpu):
        assert isinstance(comm, CommFootprint)
        settings_by_form = _shaped(gpu, comm)
    dot = Setting(form=DOT)
    grid = []
    for size in sizes:
        for form, settings in settings_by_form.items():
            grid.append(Group(size=size, form=form, settings=(dot, *settings)))
    return tuple(grid)


def _shaped(gpu: GpuFacts, comm: CommFootprint) -> dict[str, tuple[Setting, ...]]:
    """Returns the settings of each form of jshard's product."""
    kernels = [kernel for kernel in shipped_for(gpu).kernels if kernel.name.startswith(_KERNEL)]
    return {_form(kernel): _settings(gpu, comm, kernel) for kernel in kernels}


def _form(kernel: ShippedKernel) -> str:
    return f"{'persistent' if kernel.persistent else 'tiled'} {kernel.tiles}"


def _settings(gpu: GpuFacts, comm: CommFootprint, kernel: ShippedKernel) -> tuple[Setting, ...]:
    """As it is, and every distinct padding; of a persistent kernel some numbers of reserved multiprocessors."""
    knobs, form, beside = knobs_of(kernel), _form(kernel), comm.block
    if not kernel.persistent:
        return tuple(
            Setting(
                form=form,
                knobs=dataclasses.replace(knobs, smem_pad_bytes=pad),
                blocks_per_sm=blocks,
                drain=str(drain(gpu, kernel.block.padded(pad), beside)) if beside else "0",
            )
            for blocks, pad in paddings(gpu, kernel.block)
        )
    needed = reserved_for(gpu, comm)
    has_room = beside is None or room_beside(gpu, kernel.block, beside) > 0
    return tuple(
        Setting(
            form=form,
            knobs=dataclasses.replace(knobs, reserved_sms=count),
            blocks_per_sm=resident(gpu, kernel.block),
            drain="0" if has_room or count >= needed else "kernel",
        )
        for count in sorted({0, needed // 2, needed, 2 * needed})
        if count < gpu.num_sms
    )
