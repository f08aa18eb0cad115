"""What the saves and restores of a run cost it: their times, and the effective training time ratio (ETTR)."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Literal

from jshard._text import duration
from jshard.checkpoint.series.ettr import FORMULA, ettr
from jshard.checkpoint.series.timeline import Timeline
from jshard.inspect.tables import FittedTable, add_row, made_table


@dataclasses.dataclass(frozen=True)
class EttrTimes:
    """The arguments of `ettr`, by these names; also keys of the JSON."""

    interval_s: float
    stall_s: float
    save_s: float
    load_s: float
    mtbf_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavingCosts:
    """All saves and restores of a folder.

    Attributes:
        stalls_s: how long each save blocked the step.
        saves_s: how long each took until it was complete.
        loads_s: how long each restore took.
        num_failed: saves and restores with an error; they are in no list.
        is_interval_given: whether the user named the time between two saves.
        ettr_times: None if they are not known.
    """

    stalls_s: Sequence[float]
    saves_s: Sequence[float]
    loads_s: Sequence[float]
    num_failed: int
    is_interval_given: bool
    ettr_times: EttrTimes | None

    @classmethod
    def of(cls, history: Sequence[Timeline], *, mtbf_s: float, interval_s: float | None) -> SavingCosts:
        """Sums up a history; without an interval it is the measured one."""
        saves = _completed(history, "save")
        restores = _completed(history, "restore")
        stalls_s = [save.blocked_s for save in saves if save.blocked_s is not None]
        saves_s = [save.total_s for save in saves]
        loads_s = [restore.total_s for restore in restores]
        ettr_times = None
        period_s = _measured_interval_s(history) if interval_s is None else interval_s
        if saves_s and period_s is not None and period_s > 0:
            ettr_times = EttrTimes(
                interval_s=period_s,
                stall_s=_median(stalls_s),
                save_s=_median(saves_s),
                load_s=_median(loads_s),
                mtbf_s=mtbf_s,
            )
        return cls(
            stalls_s=stalls_s,
            saves_s=saves_s,
            loads_s=loads_s,
            num_failed=sum(timeline.error is not None for timeline in history),
            is_interval_given=interval_s is not None,
            ettr_times=ettr_times,
        )

    def table(self) -> FittedTable:
        """Returns the number, the median and the longest of each kind of time."""
        table = made_table(
            f"All saves and restores of this folder ({self.num_failed} failed)", "", "times>", "median>", "longest>"
        )
        named = {
            "stall: the step is blocked": self.stalls_s,
            "save, until it is complete": self.saves_s,
            "load": self.loads_s,
        }
        for name, times_s in named.items():
            if times_s:
                add_row(table, name, str(len(times_s)), duration(statistics.median(times_s)), duration(max(times_s)))
            else:
                add_row(table, name, "0", "", "")
        return table

    def ettr_lines(self) -> list[str]:
        """Returns the ETTR, and below it what it is computed from."""
        times = self.ettr_times
        if times is None:
            why = "one save has no interval: --interval SECONDS" if self.saves_s else "no save was measured"
            return [f"ETTR: not known, as {why}."]
        interval_from = "given" if self.is_interval_given else "measured"
        load_from = "measured" if self.loads_s else "no restore was measured: taken as 0"
        interval = f"I = {duration(times.interval_s)} between saves ({interval_from})"
        stall = f"B = {duration(times.stall_s)} stall (measured)"
        save = f"S = {duration(times.save_s)} save (measured)"
        load = f"L = {duration(times.load_s)} load ({load_from})"
        mtbf = f"M = {duration(times.mtbf_s)} between failures (assumed, --mtbf)"
        return [
            f"{FORMULA} = {ettr(**dataclasses.asdict(times)):.4f}",
            f"  {interval}, {stall}, {save},",
            f"  {load}, {mtbf}; medians",
        ]

    def ettr_dict(self) -> dict[str, object] | None:
        """Returns the ETTR with what it is computed from, as values of JSON; None if it is not known."""
        if self.ettr_times is None:
            return None
        times = dataclasses.asdict(self.ettr_times)
        return {"value": ettr(**times), "formula": FORMULA, **times}


def _completed(history: Sequence[Timeline], kind: Literal["save", "restore"]) -> list[Timeline]:
    """Returns the saves or restores without an error whose times are recorded."""
    completed: list[Timeline] = []
    for timeline in history:
        # The time of a failed one is that of the failure.
        if timeline.kind == kind and timeline.error is None and timeline.rows:
            completed.append(timeline)
    return completed


def _median(times_s: Sequence[float]) -> float:
    return statistics.median(times_s) if times_s else 0.0


def _measured_interval_s(history: Sequence[Timeline]) -> float | None:
    """Returns the training time between two saves: the median of those with no restore between them."""
    intervals_s: list[float] = []
    for first, second in itertools.pairwise(history):
        are_saves = first.kind == second.kind == "save"
        # With a restore between them, the time would include a restart.
        if are_saves and first.rows and second.rows:
            # From the start of one to the start of the next; while the first blocked the step, nothing was trained.
            intervals_s.append(second.began_at - first.began_at - (first.blocked_s or 0.0))
    return statistics.median(intervals_s) if intervals_s else None
