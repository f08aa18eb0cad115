"""Which form of the kernels in `jshard.kernels` a compiled program runs: their calls carry both in their names."""

from __future__ import annotations

import collections
import dataclasses

from jshard._kernel_names import kernels_of
from jshard.inspect.module import Module
from jshard.inspect.work import MOSAIC

_FORMS = {"mosaic": "on Mosaic GPU", "interpret": "step by step", "xla": "as plain XLA"}


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


def kernels_in(module: Module) -> tuple[KernelUse, ...]:
    """The kernels of a program, by name."""
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for found in set(kernels_of(instruction.op_name)):
                calls[found] += f'custom_call_target="{MOSAIC}' in instruction.attributes
    return tuple(KernelUse(*found, count) for found, count in sorted(calls.items()))
