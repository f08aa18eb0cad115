"""The effective training time ratio (ETTR) by formula: what saves, loads and failures leave of a run's time."""

import math

FORMULA = "ETTR = I / (I + B) * (1 - (L + S + (I + B) / 2) / M)"
"""What `ettr` computes, as reports print it."""


def ettr(*, interval_s: float, stall_s: float, save_s: float, load_s: float, mtbf_s: float) -> float:
    """Returns the effective training time ratio: the share of a run's time that makes progress which stays; at least 0.

    In every interval, I seconds train and B are blocked by the save. A failure, every M seconds on average, costs the
    load L, the work since the last save (half of I + B on average, as it may come at any time), and the time S in
    which that save was not yet complete: until then the previous one is used. The job's start after a failure is not
    included; add it to `load_s` if you know it.

    Args:
        interval_s: I, training between two saves.
        stall_s: B, how long a save blocks the step.
        save_s: S, from the start of a save until it is complete.
        load_s: L, a restore.
        mtbf_s: M, time between failures of the whole job.

    Examples:
        >>> round(ettr(interval_s=600, stall_s=0.5, save_s=40, load_s=130, mtbf_s=3 * 3600), 3)
        0.956
    """
    # One interval, with the save that ends it.
    period_s = interval_s + stall_s
    if period_s <= 0:
        return 0.0
    lost_s = load_s + save_s + period_s / 2
    return max(0.0, interval_s / period_s * (1 - lost_s / mtbf_s))


def best_interval_s(*, stall_s: float, save_s: float, mtbf_s: float) -> float:
    """Returns the training time between two saves that loses the least, to first order.

    It is the square root of 2 B M (Young 1974, Daly 2006), where what a save costs is B, the time in which it blocks
    the step. It is at least S: a save begins after the previous one is complete.

    Args:
        stall_s: B, as in `ettr`.
        save_s: S.
        mtbf_s: M.

    Examples:
        >>> best_interval_s(stall_s=2, save_s=30, mtbf_s=10_000)
        200.0
    """
    return max(math.sqrt(2 * stall_s * mtbf_s), save_s)
