"""What every kernel's call has in common: which form runs, on what device, and under what name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax

from jshard._kernel_names import scope
from jshard.kernels.knobs import KernelError, Occupancy
from jshard.kernels.where import Backend, Place, choose, place

DEFAULT = Occupancy()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel, as decided while the program is traced; hashable, a static argument of its gradient.

    Attributes:
        name: of the kernel.
        form: "mosaic", "interpret" or "xla".
        knobs: how much of the device it may hold.
        here: the device.
    """

    name: str
    form: str
    knobs: Occupancy
    here: Place

    @property
    def is_plain(self) -> bool:
        """Whether XLA compiles the twin."""
        return self.form == "xla"

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs step by step on a CPU."""
        return self.form == "interpret"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Inside, operations carry the name of the kernel and its form: the audit reads them from the program."""
        with jax.named_scope(scope(self.name, self.form)):
            yield


def decide(
    name: str,
    backend: Backend,
    occupancy: Occupancy | None,
    arrays: Collection[jax.Array],
    *,
    default: Occupancy = DEFAULT,
    reasons: Collection[str] = (),
) -> Call:
    """Decides how a kernel runs.

    Args:
        name: of the kernel.
        backend: what was asked for.
        occupancy: what was asked for; `default` if nothing was.
        arrays: what it computes with.
        default: knobs that suit this kernel.
        reasons: why the arrays' sizes are not for it, if they are not.

    Raises:
        KernelError: there is no such backend, or it cannot be had here.
    """
    here = place()
    empty = ["one of the arrays is empty"] if any(0 in x.shape for x in arrays) else []
    form = choose(name, backend, arrays, here, [*reasons, *empty])
    return Call(name, form, occupancy or default, here)


def check_sizes(name: str, arrays: Mapping[str, jax.Array], wrong: Sequence[str], do: str) -> None:
    """Refuses arrays whose sizes do not go together.

    Raises:
        KernelError: `wrong` is not empty.
    """
    if wrong:
        raise KernelError(
            f"{name} cannot take these arrays.",
            where=[f"{argument}: {array.shape}" for argument, array in arrays.items()],
            why="\n".join(wrong),
            do=do,
        )
