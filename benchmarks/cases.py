"""The cases that can be measured, and their modules."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType


@dataclasses.dataclass(frozen=True)
class Case:
    """A module with `TITLE`, `MEASURES_TIME`, `run(quick=...)` and `table(result)`.

    It may have `arguments(parser)`, whose options `run` takes as keywords, `pictures(result, folder, stem)`, and
    `merged(reports)`, for processes that are measured separately. `run` may be an iterator of results that grow: the
    report is written after each.
    """

    module: str
    what: str

    def load(self) -> ModuleType:
        """The module."""
        return importlib.import_module(f"benchmarks.{self.module}")


CASES = {
    "step": Case("step.case", "a training step beside raw Flax and PyTorch's FSDP2, on the CPU or on GPUs"),
    "init": Case("init", "seconds and memory to create a sharded model"),
    "compile": Case("compile", "seconds to trace and to compile a step, by depth, beside plain Flax"),
    "dispatch": Case("dispatch", "host work per step, beside nnx.jit and nnx.cached_partial"),
    "scale": Case("scale", "a step compiled for 8 to 16,384 GPUs; needs the extra plan-gpu, and no GPU"),
    "strategies": Case("strategies", "strategies over model sizes, compiled for 64 GPUs; needs plan-gpu, and no GPU"),
    "limiter": Case("limiter", "budgets of prefetching, compiled for GPUs; needs plan-gpu, and no GPU"),
    "memory": Case("memory", "memory of a step, estimated and compiled for GPU clusters; needs plan-gpu, and no GPU"),
    "published": Case("published", "published step times beside planned ones; needs plan-gpu, and no GPU"),
    "experts": Case("experts", "what experts chose for large published runs, and what --auto chooses; estimated"),
    "grid": Case("grid.case", "models on clusters, compiled by jshard and by GSPMD; needs plan-gpu, and no GPU"),
    "optimizers": Case("optimizers", "how far each Optax optimizer is from one device on sharded state"),
    "checkpoint": Case("checkpoint", "saving and restoring, beside Orbax as it is, PyTorch's DCP, and plain files"),
    "reshard": Case("reshard", "a model moved to another mesh in memory, beside a checkpoint that is restored there"),
    "sampling": Case("sampling", "tokens per second of jshard sample, with and without what is kept of those before"),
    "first_gpu": Case("first_gpu.case", "the day a GPU is there: all that one GPU can say, in some minutes"),
    "copies": Case("copies", "what copies in memory cost beside none, and beside checkpoints as often"),
}
