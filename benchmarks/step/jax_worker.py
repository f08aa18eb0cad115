"""A worker with JAX: jshard's step, or that of plain Flax under `jax.jit`, over the model of models/gpt.py."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.step.serve import Task, main


class JaxTrainer:
    """A step with its state on the devices. What makes it is described apart by the engine: jshard or plain Flax."""

    def __init__(self, task: Task) -> None:
        _start_jax(task)
        begin = time.perf_counter()
        self._task = task
        self._made = _made(task)
        self._batches: dict[int, Any] = {}
        self._scalars: list[Any] = []
        self._ready_s = time.perf_counter() - begin

    def load(self, steps: range) -> None:
        """See `Trainer`."""
        import jax

        from benchmarks.step.inputs import tokens

        task = self._task
        for step in steps:
            rows = dict(zip(("inputs", "targets"), tokens(task.sizes, step=step, process=task.process), strict=True))
            sharding = self._made.batch_sharding
            self._batches[step] = {
                name: jax.make_array_from_process_local_data(sharding, array) for name, array in rows.items()
            }
        jax.block_until_ready(self._batches)

    def start(self, step: int) -> None:
        """See `Trainer`."""
        self._scalars.append(self._made.step(self._batches.pop(step)))

    def wait(self) -> None:
        """See `Trainer`."""
        import jax

        jax.block_until_ready(self._scalars)

    def scalars(self) -> tuple[list[float], list[float]]:
        """See `Trainer`."""
        found, self._scalars = self._scalars, []
        return [float(one["loss"]) for one in found], [float(one["grad_norm"]) for one in found]

    def facts(self) -> dict[str, Any]:
        """See `Trainer`."""
        import jax

        return {
            "device": jax.local_devices()[0].device_kind,
            "ready_s": self._ready_s,
            "compiled_bytes": self._made.compiled_bytes,
            "collectives": self._made.collectives,
            "versions": _versions(),
        }

    def peak_bytes(self) -> int | None:
        """See `Trainer`."""
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _start_jax(task: Task) -> None:
    import jax

    if task.address:
        if task.device == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(task.address, num_processes=task.processes, process_id=task.process)


def _made(task: Task) -> Any:
    if task.options["engine"] == "jshard":
        from benchmarks.step.with_jshard import made
    else:
        from benchmarks.step.with_flax import made
    return made(task.sizes, scan=task.options["scan"])


def _versions() -> dict[str, str]:
    import flax
    import jax
    import jaxlib
    import optax

    return {module.__name__: module.__version__ for module in (jax, jaxlib, flax, optax)}


if __name__ == "__main__":
    main(JaxTrainer)
