"""Pairs of published configurations, and how many of them a plan orders as they were measured. Arithmetic alone.

Two configurations of one group are a pair. A plan orders it as measured if the one that is planned to be faster is the
one that was. Beside it stands a rule of thumb, which knows no cluster and no model: less remat, then smaller tensor,
then smaller pipe, then larger microbatches. It is the bar where it decides. Where the knobs of a pair pull against each
other, such as less remat against a smaller tensor, it has nothing but the order of its words.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Sequence

APART = 0.10  # pairs whose rates differ by less are counted apart: runs vary from day to day

REMATS = ("none", "selective", "full")  # the least of it first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knobs:
    """The settings that the rule of thumb looks at."""

    remat: str  # of `REMATS`
    tensor: int
    pipe: int
    microbatch: int  # sequences

    @property
    def preference(self) -> tuple[int, int, int, int]:
        """Each knob as a number, in the rule's order: the smaller, the faster by the rule."""
        return REMATS.index(self.remat), self.tensor, self.pipe, -self.microbatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What was published of a configuration, and what is planned. Rates are tokens a second and device."""

    id: str
    group: str
    knobs: Knobs
    published: float | None  # None: it ran out of memory
    planned: float
    planned_to_fit: bool

    @property
    def source(self) -> str:
        """Its publisher: the first word of the group's name."""
        return self.group.partition("_")[0]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two configurations of a group that were both measured."""

    faster: Configuration  # as published
    slower: Configuration

    @property
    def gap(self) -> float:
        """How much faster the faster one was."""
        return _ratio(self.faster.published, self.slower.published) - 1

    @property
    def planned_gap(self) -> float:
        """How much faster it is planned to be; negative if the plan orders the pair the other way around."""
        return self.faster.planned / self.slower.planned - 1


def _ratio(rate: float | None, other_rate: float | None) -> float:
    assert rate is not None and other_rate is not None
    return rate / other_rate


def pairs_of(configurations: Iterable[Configuration]) -> list[Pair]:
    """Returns all pairs within groups whose configurations both ran."""
    pairs = []
    for members in _by_group(configurations):
        ran = [member for member in members if member.published is not None]
        for first, second in itertools.combinations(ran, 2):
            is_faster = _ratio(first.published, second.published) >= 1
            pairs.append(Pair(first, second) if is_faster else Pair(second, first))
    return pairs


def _by_group(configurations: Iterable[Configuration]) -> Iterable[list[Configuration]]:
    groups: dict[str, list[Configuration]] = {}
    for configuration in configurations:
        groups.setdefault(configuration.group, []).append(configuration)
    return groups.values()


def apart(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns the pairs whose rates differ by more than a tenth."""
    return [pair for pair in pairs if pair.gap > APART]


# ---- who orders them


class Verdict(enum.Enum):
    """How an order of a pair compares with the measured one."""

    RIGHT = "right"
    TIED = "tied"
    WRONG = "wrong"


Judge = Callable[[Pair], Verdict]


def by_plan(pair: Pair) -> Verdict:
    """Compares the planned rates."""
    return _verdict(pair.slower.planned < pair.faster.planned, pair.slower.planned > pair.faster.planned)


def by_rule(pair: Pair) -> Verdict:
    """Compares by the rule of thumb, whose first knob that differs decides."""
    faster, slower = pair.faster.knobs.preference, pair.slower.knobs.preference
    return _verdict(faster < slower, faster > slower)


def _verdict(is_right: bool, is_wrong: bool) -> Verdict:
    if is_right:
        return Verdict.RIGHT
    return Verdict.WRONG if is_wrong else Verdict.TIED


def is_conflicting(pair: Pair) -> bool:
    """Returns whether some knobs prefer the one configuration, and others the other one."""
    differences = [
        mine - other
        for mine, other in zip(pair.faster.knobs.preference, pair.slower.knobs.preference, strict=True)
        if mine != other
    ]
    return min(differences, default=0) < 0 < max(differences, default=0)


@dataclasses.dataclass(frozen=True)
class Score:
    """How many pairs are ordered as measured."""

    right: int
    tied: int
    wrong: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.right + self.tied + self.wrong

    @property
    def share(self) -> float:
        """The share that is ordered as measured; of ties half, as a coin would. NaN without pairs."""
        if not self.total:
            return float("nan")
        return (self.right + self.tied / 2) / self.total


def score(pairs: Iterable[Pair], judge: Judge) -> Score:
    """Counts how an order compares with the measured one."""
    verdicts = [judge(pair) for pair in pairs]
    return Score(*(verdicts.count(verdict) for verdict in (Verdict.RIGHT, Verdict.TIED, Verdict.WRONG)))


def worst(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """Returns the wrongly ordered pairs, those first whose measured and planned ratio are the furthest apart."""
    wrong = [pair for pair in pairs if by_plan(pair) is Verdict.WRONG]
    wrong.sort(key=lambda pair: (1 + pair.gap) / (1 + pair.planned_gap), reverse=True)
    return wrong[:count]


# ---- what fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fits:
    """Configurations that ran and that ran out of memory, and how many of each are planned so."""

    ran: int
    ran_as_planned: int
    out_of_memory: int
    out_of_memory_as_planned: int

    @property
    def share(self) -> float:
        """The share of all that is planned as it was. NaN without any."""
        total = self.ran + self.out_of_memory
        if not total:
            return float("nan")
        return (self.ran_as_planned + self.out_of_memory_as_planned) / total


def fits(configurations: Sequence[Configuration]) -> Fits:
    """Counts what is planned to fit, of what did and of what did not."""
    ran = [each for each in configurations if each.published is not None]
    out_of_memory = [each for each in configurations if each.published is None]
    return Fits(
        ran=len(ran),
        ran_as_planned=sum(each.planned_to_fit for each in ran),
        out_of_memory=len(out_of_memory),
        out_of_memory_as_planned=sum(not each.planned_to_fit for each in out_of_memory),
    )


def separated(configurations: Iterable[Configuration]) -> tuple[int, int]:
    """Returns the number of pairs of which one ran out of memory, and how many of them the plan separates.

    It does if it says of the one that it fits, and of the other that it does not.
    """
    total = 0
    right = 0
    for members in _by_group(configurations):
        ran = [member for member in members if member.published is not None]
        failed = [member for member in members if member.published is None]
        total += len(ran) * len(failed)
        right += sum(member.planned_to_fit for member in ran) * sum(not member.planned_to_fit for member in failed)
    return total, right
