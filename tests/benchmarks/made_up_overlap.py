"""Made-up times of the benchmark of overlap, and what makes them up."""

import dataclasses

from benchmarks.overlap.bench import Beside
from benchmarks.overlap.grid import DOT
from benchmarks.overlap.records import KernelTime, Record, Row
from jshard.kernels import KernelError, Occupancy
from jshard.occupancy import footprint, gpu

H200 = gpu("h200")
RING = footprint("ring", gpu=H200, version="2.28.9", ctas=16)

CONDITIONS = {
    "device": "NVIDIA H200",
    "devices": 1,
    "footprint": dataclasses.asdict(RING),
    "quick": False,
    "versions": {"jax": "0.12"},
}


def record(**known):
    return Record(date="2026-12-01 10:00 UTC", conditions=CONDITIONS, **known)


def row(both_ms, *, form=DOT, mode="baseline", comp_ms=2.0, **other):
    """A row beside a load of 1 ms: one after the other is 3 ms, perfect is 2."""
    settings = {
        "group": "cube/a",
        "load": "copies half",
        "load_bytes": 300_000_000,
        "comm_ms": 1.0,
        "least_ms": both_ms,
        "most_ms": both_ms,
        "relative_error": 2e-3,
    }
    return Row(form=form, mode=mode, comp_ms=comp_ms, both_ms=both_ms, **(settings | other))


def small(both_ms, mode, *, blocks=5, drain="5", **other):
    pad = {5: 0, 2: 35_840, 1: 74_752}[blocks]
    knobs = Occupancy(persistent=False, tile_m=64, tile_n=64, stages=2, smem_pad_bytes=pad)
    how = {"drain": drain, "blocks_per_sm": blocks, "knobs": knobs}
    return row(both_ms, form="tiled 64x64x64/2", mode=mode, **(how | other))


def kernel(ratio, shape="8192 x 8192 x 8192", **other):
    settings = {"kernel": "matmul", "direction": "forward", "plain_ms": 1.0, "relative_error": 2e-3}
    return KernelTime(shape=shape, ours_ms=ratio, **(settings | other))


class MadeUp:
    """XLA's dot takes 2 ms, a load 1 ms by 100 MB; shaped kernels hide it."""

    kinds, priorities = ("copies",), ("default", "high")

    def __init__(self):
        self.asked = []

    def prepare(self, size, setting):
        if setting.reserved_sms == 8:
            raise KernelError("The GPU cannot run it.", where="here", why="so it is.", do="nothing.")
        return float("nan") if setting.reserved_sms == 32 else 2e-3

    def compute_ms(self, setting):
        self.asked.append(setting.described)
        return 2.0

    def load_ms(self, load):
        return load.num_bytes / 1e8

    def sequential_ms(self, setting, load):
        return 2.0 + self.load_ms(load)

    def both(self, setting, load, priority):
        hides = setting.is_shaped or priority == "high"
        return Beside(max(2.0, self.load_ms(load)) if hides else self.sequential_ms(setting, load), 0.5, 0.25, 16)
