"""The share of the time in which a run makes progress that stays: the effective training time ratio, ETTR."""

from __future__ import annotations

import dataclasses

FORMULA = "ETTR = I / (I + B) * (1 - (L + S + (I + B) / 2) / M)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ettr:
    """What checkpoints cost a run, in lost time.

    Of every interval, I seconds train and B are blocked by the save. A failure, every M seconds on average, costs the
    load L, what was done since the last save (half of I + B on average, as it may come at any time), and the time S in
    which that save was not complete yet: until then the one before counts. The start of the job after a failure is in
    none of these; it is added to `load_s` by whoever knows it.

    Args:
        interval_s: I, training between two saves.
        stall_s: B, how long a save blocks the step.
        save_s: S, from the begin of a save until it is complete.
        load_s: L, a restore.
        mtbf_s: M, time between failures of the whole job.

    Example:
        >>> round(Ettr(interval_s=600, stall_s=0.5, save_s=40, load_s=130, mtbf_s=3 * 3600).value, 3)
        0.956
    """

    interval_s: float
    stall_s: float
    save_s: float
    load_s: float
    mtbf_s: float

    @property
    def value(self) -> float:
        """The ratio; 0 if more is lost than is done."""
        period_s = self.interval_s + self.stall_s
        lost_s = self.load_s + self.save_s + period_s / 2
        return max(0.0, self.interval_s / period_s * (1 - lost_s / self.mtbf_s)) if period_s > 0 else 0.0
