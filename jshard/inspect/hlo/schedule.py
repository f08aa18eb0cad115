"""The schedule of a compiled program as values: the steps of one device, and what runs beside each collective."""

import dataclasses

from jshard._text import folded_names
from jshard.engine.moved import Mixing
from jshard.inspect.hlo.work import OpWork

_FORMS = {"mosaic": "on Mosaic GPU", "interpret": "step by step", "xla": "as plain XLA"}


@dataclasses.dataclass(frozen=True)
class Window:
    """One collective of a schedule, and the computation between its start and its end.

    Args:
        name: the instruction's name in the text.
        kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
        sizes: bytes of the whole arrays by dtype, of one execution; as of `Collective.full_bytes`.
        group: positions, in the mesh's order, of the devices of the first group.
        axes: the mesh axes that it runs over; None if no mesh was given.
        units: paths of the units that it gathers or reduces; several if the compiler joined theirs; empty if the
            program does not say.
        read_by: where it does not, and what is sent was computed: the units whose operations read that first.
        phase: `forward`, `backward`, or `both` if the compiler joined them; None if the program does not say.
        loop: name of the innermost loop around it; empty if there is none.
        executions: how often it runs in one run of the program.
        is_async: the computation goes on while it runs.
        operations: instructions that compute between start and end.
        matmuls: matrix products among these, those in fusions and loops counted.
        flops: floating-point operations of these.
        conditional: it is in a branch, and may not run at all.
        arrays: of its result: dtype and dims of each.
        mixing: the lines of the model that mix examples by it; several if the compiler joined theirs.
        is_mixing: it is for those alone.
    """

    name: str
    kind: str
    sizes: tuple[tuple[str, int], ...]
    group: tuple[int, ...]
    axes: tuple[str, ...] | None = None
    units: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    phase: str | None = None
    loop: str = ""
    executions: int = 1
    is_async: bool = False
    operations: int = 0
    matmuls: int = 0
    flops: float = 0.0
    conditional: bool = False
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    mixing: tuple[Mixing, ...] = ()
    is_mixing: bool = False

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole arrays, of one execution."""
        return sum(size for _, size in self.sizes)

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
        """Whether matrix products run beside it. How much of it they hide is for an estimate to say."""
        return self.is_async and self.matmuls > 0


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction that computes."""

    name: str
    work: OpWork


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective begins; the computation goes on. `window` is its place in `Schedule.windows`."""

    window: int
    token: str


@dataclasses.dataclass(frozen=True)
class Wait:
    """The computation waits for a collective that began under this token."""

    token: str


@dataclasses.dataclass(frozen=True)
class Blocking:
    """A collective during which the computation stands still."""

    window: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that run again and again.

    Args:
        name: of the `while` in the text.
        rounds: how often.
        steps: of one round.
        enters: tokens outside and inside, of collectives under way when the loop begins.
        turns: tokens at the end of a round and at the beginning of the next.
        leaves: tokens inside and outside, at the end of the last round.
    """

    name: str
    rounds: int
    steps: tuple["Step", ...]
    enters: tuple[tuple[str, str], ...] = ()
    turns: tuple[tuple[str, str], ...] = ()
    leaves: tuple[tuple[str, str], ...] = ()


Step = Compute | Start | Wait | Blocking | Loop


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """One kernel in one form.

    Args:
        kernel: such as `matmul`.
        form: "mosaic", "interpret" or "xla".
        calls: instructions that call it, those of backward with them; 0 for plain XLA, whose operations are fused.
    """

    kernel: str
    form: str
    calls: int

    def __str__(self) -> str:
        calls = f" ({self.calls} call{'' if self.calls == 1 else 's'})" if self.calls else ""
        return f"{self.kernel} {_FORMS.get(self.form, self.form)}{calls}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A scheduled program of one device.

    Args:
        windows: its collectives, in the order of their starts; groups of one device are left out.
        steps: what the device does, in order.
        num_devices: devices that run it together.
        flops: floating-point operations of one run, loops counted; with those that are computed again for backward.
        notes: what could not be counted, in words.
        kernels: those of `jshard.kernels` in it, and which form of each.
    """

    windows: tuple[Window, ...]
    steps: tuple[Step, ...]
    num_devices: int
    flops: float
    notes: tuple[str, ...] = ()
    kernels: tuple[KernelUse, ...] = ()

    @property
    def in_loops(self) -> tuple[Window, ...]:
        """The collectives inside loops."""
        return tuple(w for w in self.windows if w.loop)

    def not_overlapped(self, *, in_loops: bool = True, at_least_bytes: int = 0) -> tuple[Window, ...]:
        """The collectives that block, or during which nothing is multiplied; as `Audit.not_overlapped`."""
        chosen = self.in_loops if in_loops else self.windows
        return tuple(w for w in chosen if not w.is_overlapped and w.full_bytes >= at_least_bytes)
