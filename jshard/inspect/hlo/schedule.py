"""The schedule of a compiled program: its collectives, and what is computed while each is under way."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jshard._kernel_names import kernels_of
from jshard.inspect.hlo.module import Module, ProgramError, parse_module
from jshard.inspect.hlo.steps import Step, Window
from jshard.inspect.hlo.walk import Walk
from jshard.inspect.hlo.work import MOSAIC

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


# The schedule of a compiled program: its collectives, and what is computed while each is under way.


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
        """The collectives that block, or during which nothing is multiplied.

        Args:
            in_loops: only those inside loops.
            at_least_bytes: only those whose whole arrays are as large.
        """
        chosen = self.in_loops if in_loops else self.windows
        return tuple(w for w in chosen if not w.is_overlapped and w.full_bytes >= at_least_bytes)


def read_schedule(
    program: Any, *, mesh: Mesh | AbstractMesh | None = None, expect_collectives: bool = False
) -> Schedule:
    """Reads the schedule of a compiled program for GPU, TPU or CPU.

    Args:
        program: a `jax.stages.Compiled`, or its text.
        mesh: for the axes of groups.
        expect_collectives: a program of several devices without any is an error, as communication that was
            overlooked would look like communication that is hidden.

    Raises:
        ProgramError: the text has no schedule, or it holds communication that is not understood.

    Example:
        >>> read_schedule(jax.jit(step).lower(state, batch).compile()).not_overlapped()
        ()
    """
    module = parse_module(program if isinstance(program, str) else program.as_text())
    if not module.is_scheduled:
        raise ProgramError(
            "The program has no schedule.",
            where=f"computation {module.entry}",
            why="its text does not say is_scheduled=true, so its order says nothing.",
            do="give what compile() returned: js.audit(jax.jit(step).lower(...).compile())",
        )
    if mesh is not None and math.prod(mesh.axis_sizes) != module.num_devices:
        sizes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        raise ProgramError(
            "The program was not compiled for this mesh.",
            where=f"mesh ({sizes})",
            why=f"the program runs on {module.num_devices} devices, the mesh has {math.prod(mesh.axis_sizes)}.",
            do="give the mesh or the model that the program was compiled with.",
        )
    walk = Walk(module, mesh)
    steps, flops = walk.run()
    if expect_collectives and module.num_devices > 1 and not walk.windows:
        raise ProgramError(
            "A program of several devices without a single collective.",
            where=f"computation {module.entry}, {module.num_devices} devices",
            why="nothing sent would read as everything hidden.",
            do="see whether the arrays are sharded at all: print(js.explain(model))",
        )
    return Schedule(
        tuple(walk.windows), steps, module.num_devices, flops, tuple(walk.notes), kernels=kernels_in(module)
    )
