"""What a run is asked for: a speed or a time (`tokens/s >= 2e6`), or the most of a budget (`512xh100:24h`)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

from jshard._parsing import shown
from jshard._text import duration, three_digits
from jshard.cluster.topology import Topology, TopologyError, whole_hosts
from jshard.errors import ShardingError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

_UNITS_S = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": HOUR_S, "d": DAY_S}
_EXAMPLE = '--target "tokens/s >= 2e6"'
_TARGET = re.compile(r"\s*([a-z/]+)\s*(>=|<=)\s*([0-9.e+-]+)\s*([a-z]*)\s*")
_BUDGET = re.compile(r"\s*(?:([0-9]{1,7})x(\S+):)?([0-9.e+-]+)(h|d)\s*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a run is on a cluster.

    Attributes:
        step_s: time of a step.
        num_devices: of the cluster.
        tokens_per_step: tokens that a step trains on.
        num_steps: of the whole run.
        ettr: the share of the time that trains.
    """

    step_s: float
    num_devices: int
    tokens_per_step: int
    num_steps: int
    ettr: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens per second while it trains."""
        return self.tokens_per_step / self.step_s

    @property
    def run_s(self) -> float:
        """Returns the time of the whole run, with what failures take."""
        if not self.ettr:
            return math.inf
        return self.num_steps * self.step_s / self.ettr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that can be asked for.

    Attributes:
        name: as in `--target`.
        is_rate: whether more is better.
        value_of: its value at a pace.
        written: writes a value.
    """

    name: str
    is_rate: bool
    value_of: Callable[[Pace], float]
    written: Callable[[float], str]


def per_s(value: float) -> str:
    """Returns tokens per second as text."""
    return f"{value:,.0f}" if value < 1e6 else f"{three_digits(value / 1e6)}M"


def _tokens_per_s_of_device(pace: Pace) -> float:
    return pace.tokens_per_s / pace.num_devices


def _hours(pace: Pace) -> float:
    return pace.run_s / HOUR_S


def _days(pace: Pace) -> float:
    return pace.run_s / DAY_S


_TOKENS = Figure(name="tokens/s", is_rate=True, value_of=lambda pace: pace.tokens_per_s, written=per_s)
_FIGURES: Mapping[str, Figure] = {
    _TOKENS.name: _TOKENS,
    "tokens/s/device": Figure(name="tokens/s/device", is_rate=True, value_of=_tokens_per_s_of_device, written=per_s),
    "step": Figure(name="step", is_rate=False, value_of=lambda pace: pace.step_s, written=duration),
    "hours": Figure(name="hours", is_rate=False, value_of=_hours, written=three_digits),
    "days": Figure(name="days", is_rate=False, value_of=_days, written=three_digits),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that a cluster is to reach."""

    text: str
    figure: Figure
    limit: float

    def is_reached(self, pace: Pace) -> bool:
        """Returns whether a pace reaches it."""
        value = self.figure.value_of(pace)
        if self.figure.is_rate:
            return value >= self.limit
        return value <= self.limit

    def is_nearer(self, pace: Pace, other: Pace) -> bool:
        """Returns whether a pace is nearer to it than another one."""
        value = self.figure.value_of(pace)
        other_value = self.figure.value_of(other)
        if self.figure.is_rate:
            return value > other_value
        return value < other_value

    def by_nearness(self, paces: Mapping[int, Pace]) -> list[int]:
        """Returns the keys of paces, the nearest to it first; of equal ones in their order."""
        return sorted(paces, key=lambda key: self.figure.value_of(paces[key]), reverse=self.figure.is_rate)

    def eased_to(self, pace: Pace) -> str:
        """Returns the nearest target of two digits that a pace reaches, in the form of `--target`."""
        value = self.figure.value_of(pace)
        if not math.isfinite(value):  # a run that fails more often than it restarts: it has a rate, and no end
            return dataclasses.replace(self, figure=_TOKENS).eased_to(pace)
        magnitude = math.floor(math.log10(value))
        unit = 10.0 ** (magnitude - 1)  # of the second digit
        if self.figure.is_rate:
            limit = math.floor(value / unit) * unit
            return f"{self.figure.name} >= {limit:.2g}"
        limit = math.ceil(value / unit) * unit
        return f"{self.figure.name} <= {limit:.2g}"

    def written(self, pace: Pace) -> str:
        """Returns its figure at a pace, as text."""
        return self.figure.written(self.figure.value_of(pace))


def parse_target(text: str) -> Target:
    """Reads `FIGURE >= NUMBER` or `FIGURE <= NUMBER`.

    Raises:
        ShardingError: it is not a target.

    Examples:
        >>> parse_target("step <= 2500 ms").limit
        2.5
    """
    match = _TARGET.fullmatch(text)
    if match is None:
        raise _refused_target(text, "the form is FIGURE >= NUMBER for a rate, FIGURE <= NUMBER for a time.")
    name, comparison, number, unit = match.groups()
    figure = _FIGURES.get(name)
    if figure is None:
        raise _refused_target(text, f"the figures are {', '.join(_FIGURES)}, not {name}.")
    _check_comparison(text, figure, comparison, number=f"{number}{unit}")
    scale = _UNITS_S.get(unit)
    if unit and name != "step":  # the unit is part of the other names
        scale = None
    if scale is None:
        units = ", ".join(unit for unit in _UNITS_S if unit)
        raise _refused_target(text, f"{shown(unit)} is no unit of {name}; a step has {units}.")
    limit = _positive(number)
    if limit is None:
        raise _refused_target(text, f"{shown(number)} is not a finite number above 0.")
    return Target(text=f"{name} {comparison} {number}{unit}", figure=figure, limit=limit * scale)


def _check_comparison(text: str, figure: Figure, comparison: str, *, number: str) -> None:
    """Raises unless a target is the least of a rate, or the most of a time."""
    expected = "<="
    kind = "time, of which a target is the most"
    if figure.is_rate:
        expected = ">="
        kind = "rate, of which a target is the least"
    if comparison != expected:
        do = f'--target "{figure.name} {expected} {number}"'
        raise _refused_target(text, f"{figure.name} is a {kind}.", do)


def _positive(text: str) -> float | None:
    """Returns a finite number above 0; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _refused_target(text: str, why: str, do: str = _EXAMPLE) -> ShardingError:
    return ShardingError("The target cannot be read.", where=f"--target {shown(text)}", why=why, do=do)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """Devices for a time."""

    text: str
    topology: Topology
    seconds: float


def parse_budget(text: str, *, topology: Topology | None) -> TimeBudget:
    """Reads `DEVICESxDEVICE:TIME`, or the time alone for a cluster that is named elsewhere.

    Args:
        text: such as `512xh100:24h`, or `30d`.
        topology: the cluster, if it is named elsewhere.

    Raises:
        ShardingError: it is not a budget, or names another cluster.

    Examples:
        >>> parse_budget("512xh100:24h", topology=None).topology.text
        'h100:64x8'
    """
    match = _BUDGET.fullmatch(text)
    number = None
    if match is not None:
        number = _positive(match[3])
    if match is None or number is None:
        why = "the form is DEVICESxDEVICE:TIME, or TIME with --topology; a time is a number of h or d above 0."
        raise _refused_budget(text, why)
    seconds = number * _UNITS_S[match[4]]
    if match[1] is None:
        if topology is None:
            raise _refused_budget(text, "it names no devices, and there is no --topology.")
        return TimeBudget(text=text.strip(), topology=topology, seconds=seconds)
    if topology is not None:
        why = f"--topology {topology.text} names the devices, too."
        raise _refused_budget(text, why, f"--topology {topology.text} --budget {match[3]}{match[4]}")
    try:
        hosts = whole_hosts(int(match[1]), match[2])
    except TopologyError as error:
        do = f"--budget {match[3]}{match[4]} {error.do}"
        raise TopologyError(error.what, where=f"--budget {text}", why=error.why, do=do) from error
    return TimeBudget(text=text.strip(), topology=hosts, seconds=seconds)


def _refused_budget(text: str, why: str, do: str = "--budget 512xh100:24h") -> ShardingError:
    return ShardingError("The budget cannot be read.", where=f"--budget {shown(text)}", why=why, do=do)
