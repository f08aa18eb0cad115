"""Programs that XLA cannot compile for AMD GPUs on a machine without one: they are refused before it tries.

It would take as long as compiling, and end in a message about its own state, or in the end of its process.
"""

from __future__ import annotations

import collections
import re

import jax

from jshard import _compat
from jshard._text import counted
from jshard.errors import ShardingError

_CONVOLUTION = re.compile(r"\bstablehlo\.convolution\b")
# Calls of a library: JAX registers what they call where its ROCm plugin finds a GPU, and nowhere else.
_LIBRARY_CALL = re.compile(r"\bstablehlo\.custom_call @(hip\w+)")


def check_rocm(lowered: jax.stages.Lowered, *, where: str) -> None:
    """Refuses a program that cannot be compiled for AMD GPUs here; does nothing on a machine with such a GPU.

    Args:
        lowered: the program, lowered for AMD GPUs.
        where: what is compiled, for the error.

    Raises:
        ShardingError: the program has operations that need a GPU while they are compiled.
    """
    if not _compat.ROCM.are_useless({}):
        return
    reasons = _reasons(lowered.as_text())
    if reasons:
        raise ShardingError(
            "The step cannot be compiled for AMD GPUs on a machine without one.",
            where=where,
            why="\n".join(reasons),
            do="jshard plan without --topology estimates its memory and communication, and compiles nothing.",
        )


def _reasons(program: str) -> list[str]:
    """Returns why a program cannot be compiled, a line for each kind of operation."""
    reasons = []
    num_convolutions = len(_CONVOLUTION.findall(program))
    if num_convolutions:
        reasons.append(
            f"it has {counted(num_convolutions, 'convolution', 'convolutions')}:"
            " XLA takes their kernels from MIOpen, which finds no GPU."
        )
    calls = collections.Counter(_LIBRARY_CALL.findall(program))
    if calls:
        names = ", ".join(calls)
        reasons.append(
            f"it calls {names}, for decompositions such as Cholesky's:"
            " JAX registers these for its ROCm plugin only where that finds a GPU."
        )
    return reasons
