"""Compiled programs; here the schedule as values: the steps of one device, and what runs concurrently.

Modules, from the bottom up:

    module           the text of a program as values: computations and their instructions
    collectives      how compilers write collectives: arrays, groups of devices, names of units
    forms            the instructions that start and end a collective, or carry it
    readers          the units that read the result of a collective that names none
    work             matrix products and bytes of memory, as values
    memory_traffic   the bytes of memory that an instruction reads and writes
    worker           the work of an instruction
    walk             the walk through a program in execution order, which makes the schedule
"""

import dataclasses

from jshard._text import counted, folded_names
from jshard.engine.mixing import Mixing
from jshard.inspect.hlo.collectives import ring_bytes
from jshard.inspect.hlo.module import HloArray
from jshard.inspect.hlo.work import OpWork

_FORMS = {"mosaic": "on Mosaic GPU", "interpret": "step by step", "xla": "as plain XLA", "cudnn": "with cuDNN"}


@dataclasses.dataclass(frozen=True)
class Window:
    """One collective of a schedule, and the computation between its start and its end."""

    name: str  # the instruction's name in the text
    kind: str  # `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`
    # Bytes of the whole arrays by dtype, of one execution: the result of an all-gather, the input of a reduce-scatter,
    # the array of an all-reduce, one device's array of the others.
    sizes: tuple[tuple[str, int], ...]
    group: tuple[int, ...]  # positions, in the mesh's order, of the devices of the first group
    axes: tuple[str, ...] | None = None  # the mesh axes that it runs over; None if no mesh was given
    # Paths of the units that it gathers or reduces; several if the compiler joined theirs; empty if the program does
    # not name them.
    units: tuple[str, ...] = ()
    # If it does not, and the data sent was computed: the units whose operations read the result first.
    read_by: tuple[str, ...] = ()
    # `forward`, `backward`, or `both` if the compiler joined them; None if unknown
    phase: str | None = None
    loop: str = ""  # name of the innermost loop around it; empty if there is none
    executions: int = 1  # how often it runs in one run of the program
    per_iteration: bool = False  # a loop of unknown length is around it: `executions` are those of one iteration
    is_async: bool = False  # the computation continues while it runs
    operations: int = 0  # instructions that compute between start and end
    matmuls: int = 0  # matrix products among these, those in fusions and loops counted
    flops: float = 0.0  # floating-point operations of these
    conditional: bool = False  # it is in a branch, and might not run at all
    arrays: tuple[HloArray, ...] = ()  # of its result
    # The lines of the model that mix examples by it; several if the compiler joined theirs.
    mixing: tuple[Mixing, ...] = ()
    is_mixing: bool = False  # it serves only those
    is_sum: bool = False  # the program asks for a sum on every device; unknown where a compiler keeps no name of it
    links: int = 0  # of a TPU: the links of a chip that carry it at once; 0 if the program does not say

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole arrays, of one execution."""
        return sum(size for _, size in self.sizes)

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays of its result on one device, of one execution."""
        return sum(array.bytes for array in self.arrays)

    @property
    def total_bytes(self) -> int:
        """The same over all executions."""
        return self.full_bytes * self.executions

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, over all executions, by the ring algorithm."""
        return self.executions * ring_bytes(self.kind, self.full_bytes, len(self.group))

    @property
    def dtype(self) -> str:
        """The dtype, or several joined by `+`."""
        return "+".join(dtype for dtype, _ in self.sizes)

    @property
    def unit(self) -> str | None:
        """The unit, or several joined by `+`, those of a list folded: `blocks/0..3`; None if not known."""
        return "+".join(folded_names(self.units)) or None

    @property
    def is_overlapped(self) -> bool:
        """Whether matrix products run beside it. How much of it they hide is a matter of estimates."""
        return self.is_async and self.matmuls > 0


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction that computes."""

    name: str
    work: OpWork


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective begins; the computation continues. `window` is its index in `Schedule.windows`."""

    window: int
    token: str


@dataclasses.dataclass(frozen=True)
class Wait:
    """The computation waits for a collective that began under this token."""

    token: str


@dataclasses.dataclass(frozen=True)
class Blocking:
    """A collective during which the computation stops."""

    window: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that run repeatedly."""

    name: str  # of the `while` in the text
    rounds: int  # how often
    steps: tuple["Step", ...]  # of one round
    enters: tuple[tuple[str, str], ...] = ()  # tokens outside and inside, of collectives under way when the loop begins
    turns: tuple[tuple[str, str], ...] = ()  # tokens at the end of a round and at the beginning of the next
    leaves: tuple[tuple[str, str], ...] = ()  # tokens inside and outside, at the end of the last round


Step = Compute | Start | Wait | Blocking | Loop


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """One kernel in one form."""

    kernel: str  # such as `matmul`
    form: str  # "mosaic", "cudnn", "interpret" or "xla"
    calls: int  # instructions that call it, those of backward with them; 0 for plain XLA, whose operations are fused

    def __str__(self) -> str:
        text = f"{self.kernel} {_FORMS.get(self.form, self.form)}"
        if self.calls:
            text += f" ({counted(self.calls, 'call')})"
        return text


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A scheduled program of one device."""

    windows: tuple[Window, ...]  # its collectives, in the order of their starts; groups of one device are omitted
    steps: tuple[Step, ...]  # the device's steps, in order
    num_devices: int  # devices that run it together
    flops: float  # floating-point operations of one run, over all loop iterations, with those recomputed for backward
    notes: tuple[str, ...] = ()  # descriptions of uncounted operations
    kernels: tuple[KernelUse, ...] = ()  # the kernels of `jshard.kernels` in it, with their forms
    num_slices: int = 1  # TPU slices that run it together, each an equal part of the devices

    @property
    def num_async(self) -> int:
        """The number of collectives during which the computation continues."""
        return sum(window.is_async for window in self.windows)

    @property
    def num_overlapped(self) -> int:
        """The number of collectives with matrix products between start and end."""
        return sum(window.is_overlapped for window in self.windows)

    @property
    def in_loops(self) -> tuple[Window, ...]:
        """The collectives inside loops."""
        return tuple(window for window in self.windows if window.loop)

    def not_overlapped(self, *, in_loops: bool = True, at_least_bytes: int = 0) -> tuple[Window, ...]:
        """Returns the collectives that block, or during which no matrix product runs; as in `Audit.not_overlapped`."""
        chosen = self.in_loops if in_loops else self.windows
        return tuple(window for window in chosen if not window.is_overlapped and window.full_bytes >= at_least_bytes)
