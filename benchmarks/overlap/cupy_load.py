"""A load with exactly NCCL's blocks on one GPU, launched by CuPy: of any priority, and its blocks are recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overlap.conclusion import PROBE_REGISTERS, PROBE_THREADS
from benchmarks.overlap.records import Placement
from jshard.errors import RunError
from jshard.occupancy import Block

SOURCE = Path(__file__).with_name("comm.cu")
_OLDEST = 13
_WORD_BYTES = 16
_UNIT = 8  # registers of a thread are given out by
_PRIORITIES = {"default": 0, "high": -5}  # CUDA takes the highest there is for one beyond it
_LONG_S, _BEFORE_PROBE_S = 20e-3, 2e-3
_PACE_NS = 20_000


def has_cupy() -> bool:
    """Whether CuPy is installed."""
    return importlib.util.find_spec("cupy") is not None


def imported() -> Any:
    """CuPy.

    Raises:
        RunError: it is too old.
    """
    import cupy  # pyright: ignore[reportMissingImports]

    if int(cupy.__version__.split(".")[0]) < _OLDEST:
        raise RunError(
            "CuPy is too old.",
            where=f"cupy {cupy.__version__}",
            why=f"streams have priorities since {_OLDEST}.",
            do="pip install -U cupy-cuda12x, or cupy-cuda13x for a jax with cuda13.",
        )
    return cupy


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the blocks of a load recorded: see `records.Row`."""

    waited_ms: float
    span_ms: float
    sms: int


class CupyLoad:
    """Blocks like a collective's, which copy at the rate of a link.

    Args:
        block: of the collective.
        ctas: how many of them.
        bytes_per_s: that the link carries.
        buffer_bytes: of each of the two buffers, between which it copies again and again.
    """

    def __init__(self, block: Block, ctas: int, bytes_per_s: float, buffer_bytes: int) -> None:
        self._cp = imported()
        self._block, self._ctas, self._rate = block, ctas, bytes_per_s
        self._kernel, self._depth = self._fitted("comm_like", block.registers, "DEPTH", _near(_depth(block.registers)))
        self._kernel.max_dynamic_shared_size_bytes = block.smem_bytes
        self._streams = {
            name: self._cp.cuda.Stream(non_blocking=True, priority=value) for name, value in _PRIORITIES.items()
        }
        self._words = buffer_bytes // _WORD_BYTES
        make = lambda: self._cp.arange(buffer_bytes // 4, dtype=self._cp.uint32)
        self._from, self._to = make(), make()
        self._times, self._places = self._records(ctas)
        self._clock = self._module(1, "HELD=1").get_function("stamp")
        self.launch(chunk_bytes(self._depth, block.threads) * ctas, "default")
        self.wait()

    @property
    def registers(self) -> int:
        """Of a thread, as compiled; those of the collective, up to what they are rounded to."""
        return self._kernel.num_regs

    def launch(self, num_bytes: int, priority: str) -> int:
        """Starts the copies; the host's clock then, ns."""
        each = chunk_bytes(self._depth, self._block.threads) * self._ctas
        pace_ns = round(1e9 * each / self._rate)
        chunks = max(1, round(num_bytes / each))
        begin = time.perf_counter_ns()
        self._start(self._kernel, self._block, priority, chunks, pace_ns, self._times, self._places)
        return begin

    def wait(self) -> None:
        """Until all loads have ended."""
        for stream in self._streams.values():
            stream.synchronize()

    def trace(self, launched_ns: int, ahead_ns: int) -> Trace:
        """What the blocks of the last load recorded."""
        begins = self._times.get()[::2].astype(np.int64)
        waited = int(begins.min()) - ahead_ns - launched_ns
        return Trace(waited / 1e6, int(begins.max() - begins.min()) / 1e6, len(set(self._places.get().tolist())))

    def clock_ahead_ns(self) -> int:
        """By how much the GPU's clock is ahead of the host's; the GPU must be idle. Right within some microseconds."""
        found, stream = [], self._streams["default"]
        for _ in range(3):
            begin = time.perf_counter_ns()
            with stream:
                self._clock((1,), (1,), (self._times,))
            stream.synchronize()
            end = time.perf_counter_ns()
            found.append((end - begin, int(self._times[:1].get()[0]) - (begin + end) // 2))
        return min(found)[1]

    def placement(self, num_sms: int, block: Block) -> Placement:
        """Which blocks begin beside long ones on every multiprocessor: see `conclusion.placement_verdict`."""
        long, _ = self._fitted("comm_like", block.registers, "DEPTH", _near(_depth(block.registers)))
        # It may be the very kernel of the load.
        long.max_dynamic_shared_size_bytes = max(block.smem_bytes, self._block.smem_bytes)
        began, sms, long_ns = {}, 0, 0
        for registers in PROBE_REGISTERS:
            probe, _ = self._fitted("probe", registers, "HELD", _near(registers - 8))
            probed, held = self._records(num_sms), self._records(num_sms)
            self._probe(probe, num_sms, *probed)  # a kernel's first launch may wait for the device
            self._cp.cuda.Device().synchronize()
            self._start(long, block, "default", round(_LONG_S * 1e9 / _PACE_NS), _PACE_NS, *held)
            spin(_BEFORE_PROBE_S)
            self._probe(probe, num_sms, *probed)
            self._cp.cuda.Device().synchronize()
            begins, ends = held[0].get()[::2], held[0].get()[1::2]
            began[registers] = bool(probed[0].get()[::2].min() < ends.min())
            sms, long_ns = len(set(held[1].get().tolist())), int(ends.max() - begins.min())
        return Placement(began=began, long_sms=sms, long_ms=long_ns / 1e6)

    def _start(
        self, kernel: Any, block: Block, priority: str, chunks: int, pace_ns: int, times: Any, places: Any
    ) -> None:
        """Launches copies: as many blocks as there are records for."""
        numbers = np.uint64(self._words), np.uint64(chunks), np.uint64(pace_ns)
        with self._streams[priority]:
            kernel(
                (places.size,),
                (block.threads,),
                (self._to, self._from, *numbers, times, places),
                shared_mem=block.smem_bytes,
            )

    def _probe(self, probe: Any, blocks: int, times: Any, places: Any) -> None:
        with self._streams["high"]:
            probe((blocks,), (PROBE_THREADS,), (self._to, self._from, times, places))

    def _records(self, blocks: int) -> tuple[Any, Any]:
        made = self._cp.zeros(2 * blocks, self._cp.uint64), self._cp.zeros(blocks, self._cp.uint32)
        self._cp.cuda.Device().synchronize()  # they are written on other streams
        return made

    def _module(self, registers: int, define: str) -> Any:
        options = ("--std=c++17", *([f"--maxrregcount={registers}"] if registers > 1 else []), f"-D{define}")
        return self._cp.RawModule(code=SOURCE.read_text(), options=options)

    def _fitted(self, name: str, registers: int, define: str, numbers: Iterable[int]) -> tuple[Any, int]:
        """A kernel that takes so many registers, up to what they are rounded to, and spills none.

        Raises:
            RunError: there is none.
        """
        seen = []
        for number in numbers:
            kernel = self._module(registers, f"{define}={number}").get_function(name)
            if rounded(kernel.num_regs) == rounded(registers) and not kernel.local_size_bytes:
                return kernel, number
            seen.append(f"{define}={number}: {kernel.num_regs} registers, {kernel.local_size_bytes} bytes spilled")
        raise RunError(
            f"No {name} takes {registers} registers.",
            where=SOURCE.name,
            why="\n".join(seen),
            do="another release of CuPy or CUDA; the compiler chooses the registers.",
        )


def rounded(registers: int) -> int:
    """Registers of a thread as they are given out."""
    return -(-registers // _UNIT) * _UNIT


def chunk_bytes(depth: int, threads: int) -> int:
    """What a block copies at a time."""
    return depth * threads * _WORD_BYTES


def _depth(registers: int) -> int:
    """Words of four registers that fill so many; the others are for addresses."""
    return (registers - 28) // 4


def spin(seconds: float) -> None:
    """Waits without giving the core away: sleeping takes longer than is asked for."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _near(number: int) -> list[int]:
    """The number and those around it, the nearest first."""
    return sorted(range(max(1, number - 8), number + 9), key=lambda n: abs(n - number))
