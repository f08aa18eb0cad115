"""What a step cost: time, rate, MFU and memory, as scalars for the trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jshard.train.metrics.mfu import Mfu
from jshard.train.metrics.speed import Speed


class Meter:
    """Measures from step to step; see `Speed`.

    Args:
        tokens_per_step: tokens that a step trains on; or
        samples_per_step: samples, where the data are no tokens.
        mfu: how the share of the devices' peak is computed; None leaves it out.
        peak_bytes: bytes per device that were needed at most; None leaves them out.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        samples_per_step: int | None = None,
        mfu: Mfu | None = None,
        peak_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._per_step = {"tokens_per_s": tokens_per_step, "samples_per_s": samples_per_step}
        self._mfu, self._peak_bytes = mfu, peak_bytes
        self._speed = Speed()

    def done(self, step: int) -> Mapping[str, float]:
        """Notes that a step is done, and returns what is known: nothing before the second step."""
        self._speed.done(step)
        step_s = self._speed.step_s
        if step_s is None:
            return {}
        scalars = {"step_s": step_s}
        if self._speed.last_s is not None:
            scalars["last_step_s"] = self._speed.last_s
        scalars |= {name: number / step_s for name, number in self._per_step.items() if number is not None}
        if self._mfu is not None:
            scalars["mfu"] = self._mfu.of(step_s)
        if self._peak_bytes is not None:
            scalars["peak_bytes"] = self._peak_bytes()
        return scalars

    def pause(self) -> None:
        """Leaves the time since the last step out: something else than a step was done."""
        self._speed.pause()
