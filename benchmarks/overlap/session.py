"""One call of the benchmark: runs tasks one after the other as long as there is time, and keeps what came of each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.overlap import bench, kernel_times
from benchmarks.overlap.conclusion import long_block
from benchmarks.overlap.cupy_load import CupyLoad, has_cupy
from benchmarks.overlap.gpu_bench import CupyBench, ProgramBench
from benchmarks.overlap.grid import COLLECTIVE_BYTES, Group
from benchmarks.overlap.kernel_times import Case
from benchmarks.overlap.records import Record
from benchmarks.overlap.target import Comm, Gpu, LoadForm, load_form, no_load, no_placement
from jshard.errors import FourPartError
from jshard.occupancy import AmdGpuFacts, CommFootprint

PLACEMENT = "placement"
_FIRST_GUESS_S = 60.0  # of a task, before any was run: most of it is compiling
_BEGUN = "it was begun, and did not end"


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of the benchmark that is measured as a whole."""

    name: str  # as `--only` takes it
    what: str | Group | Case  # `PLACEMENT`, a group of the grid, or a case of the kernels alone


class Session:
    """Runs tasks on the GPUs that are here.

    Args:
        facts: of the GPU.
        comm: what the load is like.
        bytes_per_s: of the link that it stands for.
        rounds: times of each setting.
    """

    def __init__(self, facts: Gpu, comm: Comm, *, bytes_per_s: float, rounds: int) -> None:
        self._facts, self._comm, self._rate, self._rounds = facts, comm, bytes_per_s, rounds
        self._cupy = has_cupy()
        self._form = load_form(facts, num_devices=len(jax.local_devices()), has_cupy=self._cupy)
        self._bench: Any = None
        self._load: Any = None

    @property
    def how(self) -> str:
        """How the load runs, in words."""
        return self._form.value

    def run(
        self, tasks: Sequence[Task], record: Record, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[Record]:
        """What is known before and after each task; it ends when the next might take longer than is left.

        A task that hangs is known as begun: the next call continues with those after it. So it ends, too, when a task
        leaves the GPU unable to run anything else, and those after it are for another process.
        """
        begin, longest = clock(), _FIRST_GUESS_S
        for number, task in enumerate(tasks):
            before = clock()
            if before - begin + longest > seconds and number:
                return
            print(f"{task.name} ...", flush=True)
            yield dataclasses.replace(record, failed={**record.failed, task.name: _BEGUN})
            record = self._done(task, record)
            longest = max(clock() - before, longest if number else 0)
            yield record
            if task.name in record.failed and not alive():
                print(f"{task.name} has left the GPU unable to run anything else.", flush=True)
                return

    def _done(self, task: Task, record: Record) -> Record:
        failed = {name: why for name, why in record.failed.items() if not name.startswith(task.name)}
        try:
            if isinstance(task.what, Group):
                rows, more = bench.measure(self._bench_here(), task.what, rounds=self._rounds)
                return dataclasses.replace(record, rows={**record.rows, task.name: rows}, failed={**failed, **more})
            if isinstance(task.what, Case):
                times = kernel_times.measure(task.what, rounds=self._rounds)
                return dataclasses.replace(record, kernels={**record.kernels, task.name: times}, failed=failed)
            assert not isinstance(self._facts, AmdGpuFacts)
            placement = self._load_here().placement(self._facts.num_sms, long_block(self._facts))
            return dataclasses.replace(record, placement=placement, failed=failed)
        except (FourPartError, RuntimeError, MemoryError) as error:  # of JAX and of CuPy
            why = next(iter(str(error).splitlines()), type(error).__name__)
            return dataclasses.replace(record, failed={**failed, task.name: why})

    def _bench_here(self) -> Any:
        if self._bench is None:
            self._bench = self._new_bench()
        return self._bench

    def _new_bench(self) -> Any:
        if self._form in (LoadForm.NCCL, LoadForm.RCCL):
            return ProgramBench(None)
        if self._form is LoadForm.CUPY:
            return CupyBench(self._load_here())
        if self._form is LoadForm.PALLAS:
            assert isinstance(self._comm, CommFootprint)
            return ProgramBench(self._comm)
        raise no_load(self._facts)

    def _load_here(self) -> Any:
        if not self._cupy:
            raise no_placement()
        if self._load is None:
            assert isinstance(self._comm, CommFootprint)
            block = self._comm.block
            assert block is not None
            self._load = CupyLoad(block, self._comm.ctas, self._rate, COLLECTIVE_BYTES)
        return self._load


def alive() -> bool:
    """Whether the GPU runs anything: after some errors nothing of the same process does."""
    try:
        jax.block_until_ready(jnp.zeros(1) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True
