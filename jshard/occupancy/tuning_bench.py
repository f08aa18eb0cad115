"""Times of a product's settings, alone and beside a load: how they are taken, and what the model says instead."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from jshard.kernels.backend import Occupancy, product_ns
from jshard.occupancy import CommFootprint, GpuFacts, Plan, reserved_for
from jshard.occupancy.products import MatrixProduct
from jshard.occupancy.timings import Timing

ROUNDS = 7  # odd, so that the median is one of the times


class Bench(Protocol):
    """Times one product. A setting of None is XLA's own product."""

    def prepare(self, setting: Occupancy | None) -> str:
        """Gets a setting ready; returns why it cannot run, or an empty text."""
        ...

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """Returns the time of one call: alone, or until it and the load beside it have ended."""
        ...


def measure(
    bench: Bench, settings: Sequence[Occupancy], *, rounds: int = ROUNDS
) -> tuple[tuple[Timing, ...], list[tuple[Occupancy, str]]]:
    """Times settings: medians over rounds, each of which times everything once.

    So changes of the GPU's clock affect all alike.

    Args:
        bench: a `GpuBench`, or a replacement.
        settings: settings to time, in addition to XLA's own.
        rounds: number of times per setting.

    Returns:
        The times, XLA's own first; and the settings that did not run, with the reason.
    """
    running: list[Occupancy | None] = []
    failed: list[tuple[Occupancy, str]] = []
    for setting in dict.fromkeys([None, *settings]):
        problem = bench.prepare(setting)
        if not problem:
            running.append(setting)
        elif setting is not None:
            failed.append((setting, problem))

    alone_ns: dict[Occupancy | None, list[float]] = {setting: [] for setting in running}
    both_ns: dict[Occupancy | None, list[float]] = {setting: [] for setting in running}
    for _ in range(rounds):
        for setting in running:
            alone_ns[setting].append(bench.time_ns(setting, beside=False))
            both_ns[setting].append(bench.time_ns(setting, beside=True))

    timings = []
    for setting in running:
        timing = Timing(
            setting=setting,
            alone_ns=round(statistics.median(alone_ns[setting])),
            both_ns=round(statistics.median(both_ns[setting])),
        )
        timings.append(timing)
    return tuple(timings), failed


class ModelBench:
    """The expectations of the occupancy model, in place of a `GpuBench`.

    It assumes that all tiles reach the same share of the peak, which is not so: it ranks settings by room only.

    Args:
        gpu: the GPU.
        comm: the collective beside the product.
        product: the product.
        load_ns: estimated time of the collectives beside one call.
        plans: the way in which each setting leaves room.
    """

    def __init__(
        self,
        gpu: GpuFacts,
        comm: CommFootprint,
        product: MatrixProduct,
        load_ns: float,
        plans: Mapping[Occupancy, Plan],
    ) -> None:
        self._gpu = gpu
        self._comm = comm
        self._product = product
        self._load_ns = load_ns
        self._plans = plans
        self._plain_ns = product_ns(product.m, product.n, product.k, kind=gpu.name)

    def prepare(self, setting: Occupancy | None) -> str:
        """Returns an empty text: everything can run."""
        return ""

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """Returns the time of one call: alone, or until the collective has also ended."""
        load_ns = self._load_ns if beside else 0.0
        if setting is None:
            if self._comm.ctas:  # XLA's own is assumed to make the collective wait
                return self._plain_ns + load_ns
            return max(self._plain_ns, load_ns)

        plan = self._plans[setting]
        sms = self._gpu.num_sms
        at_once = 1 if setting.persistent else plan.blocks_per_sm  # tiles that a multiprocessor computes at once
        tiles = self._num_tiles(setting)
        # On all multiprocessors the tiles take as long as XLA's product: that is the assumption.
        round_ns = self._plain_ns * sms * at_once / tiles
        alone_ns = round_ns * math.ceil(tiles / ((sms - setting.reserved_sms) * at_once))
        unused_sms = sms - math.ceil(tiles / at_once)
        has_room = (
            setting.reserved_sms > 0
            or not self._comm.ctas
            or unused_sms >= reserved_for(self._gpu, self._comm)  # so few tiles that there is room
        )
        if not beside or has_room:
            # Alone, the load takes no time.
            return max(alone_ns, load_ns)
        if plan.drain is None or plan.drain > 1:  # at worst the collective waits for the whole kernel
            return alone_ns + load_ns
        # Its blocks take places of the kernel's, which then has fewer until it ends.
        taken_places = plan.drain * min(self._comm.ctas, sms)
        # Below 1, as the time is divided by what is left.
        lost = min(0.99, taken_places / (sms * plan.blocks_per_sm))
        return max(alone_ns / (1 - lost), load_ns + plan.drain * round_ns)

    def _num_tiles(self, setting: Occupancy) -> int:
        product = self._product
        return math.ceil(product.m / setting.tile_m) * math.ceil(product.n / setting.tile_n)
