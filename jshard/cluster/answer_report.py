"""The answer to a target or a budget as a person reads it: a line, a command, and tables."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import clock_text, counted, duration, three_digits
from jshard.cluster.answer import Answer
from jshard.cluster.cases import Cases
from jshard.cluster.goals import DAY_S, HOUR_S, Target, TimeBudget, per_s
from jshard.cluster.outlook import SLOWER, FewerHosts, Outlook, limiting_link
from jshard.cluster.report import percent, varied_assumptions
from jshard.cluster.sizing import Size, Sizing
from jshard.inspect.tables import FittedTable, Printed, add_row, broken_line, made_table

_MILLION = 1e6
_BEFORE_COMPILING = "Estimated before compiling, to choose what to compile: the command compiles it."
_BOUNDS_ONLY = "No source for what its matrix products sustain: stated is the middle of the bounds."


@dataclasses.dataclass(frozen=True, repr=False)
class AnswerReport(Printed):
    """The text of an answer, and its form for JSON."""

    answer: Answer

    def to_json(self) -> str:
        """Returns everything as JSON text."""
        return json.dumps(self.answer.to_dict(), indent=1)

    def __rich__(self) -> Group:
        answer = self.answer
        parts: list[RenderableType] = [Text(f"{answer.name}: {self._headline()}", style="bold")]
        if answer.command:
            parts.append(Text(broken_line(answer.command)))
        if answer.target is not None or answer.outlook is None:
            parts.append(Text())
            parts.append(_sizes_table(answer.sizing))
        if answer.outlook is not None:
            parts += self._expected(answer.outlook)
        return Group(*parts)

    # ---- the answer in a line

    def _headline(self) -> str:
        answer = self.answer
        if answer.outlook is None:
            question = answer.target or answer.budget
            assert question is not None
            return f"no configuration fits by the estimate, for {question.text}"
        if answer.budget is not None:
            return self._bought(answer.budget, answer.outlook)
        assert answer.target is not None
        return self._reached(answer.target, answer.outlook)

    def _bought(self, budget: TimeBudget, outlook: Outlook) -> str:
        """Returns what a budget buys."""
        tokens_per_step = outlook.workload.tokens_per_step
        steps = Cases.of(math.floor, self.answer.bought_steps)
        tokens = Cases.of(lambda count: count * tokens_per_step, steps)
        devices = outlook.cluster.topology.describe()
        bought = f"{tokens.text(_large)} tokens, {steps.text(_whole)} steps"
        return f"{budget.text} trains {bought}, estimated, on {devices}"

    def _reached(self, target: Target, outlook: Outlook) -> str:
        """Returns which cluster reaches a target, or is the nearest to it."""
        figure = target.figure
        devices = outlook.cluster.topology.describe()
        value = outlook.figure(figure.value_of).text(figure.written)
        if self.answer.is_reached:
            return f"{target.text} is reached by {devices}: {value}, estimated"
        return f"{target.text} is not reached; the nearest is {value}, estimated, on {devices}"

    # ---- what is expected of the run

    def _expected(self, outlook: Outlook) -> Iterator[RenderableType]:
        """Yields the table of a run, and what it rests on."""
        title = f"On {outlook.cluster.topology.describe()}"
        table = made_table(title, "", "estimated", caption=_BEFORE_COMPILING)
        for name, value in self._rows(outlook):
            add_row(table, name, value)
        yield Text()
        yield table
        yield Text(_assumed(outlook))
        if outlook.cluster.has_bounds_only:
            yield Text(_BOUNDS_ONLY)
        for text in outlook.cost.left_out:
            yield Text(f"not in the estimate: {text}")

    def _rows(self, outlook: Outlook) -> Iterator[tuple[str, str | Sequence[str]]]:
        """Yields names and values of what is expected."""
        answer = self.answer
        peak_gib = outlook.cost.memory.step_bytes / 2**30
        num_hosts = outlook.cluster.topology.num_hosts
        yield "step", outlook.step_s.text(duration)
        yield "tokens/s", outlook.tokens_per_s.text(per_s)
        yield "memory", f"{peak_gib:.1f} GiB"
        yield "whole run", _run_line(outlook)
        if answer.price is not None:
            yield "price", self._price_lines(outlook, answer.price)
        if answer.slower is not None:
            yield _slower_name(outlook), f"step {answer.slower.text(_change)}"
        yield "failures", _failure_lines(outlook)
        if num_hosts > 1:
            yield f"one of {num_hosts} nodes lost", _lost_lines(outlook, answer.fewer)

    def _price_lines(self, outlook: Outlook, price: float) -> list[str]:
        num_tokens = outlook.workload.num_steps * outlook.workload.tokens_per_step
        run_price = self.answer.price_of_run(outlook)
        for_tokens = Cases.of(lambda of_run: of_run / num_tokens * _MILLION, run_price)
        return [
            f"{for_tokens.text(_short)} for a million tokens, at {price:g} a device-hour",
            f"{run_price.text(_whole)} for the whole run",
        ]


def _run_line(outlook: Outlook) -> str:
    num_steps = outlook.workload.num_steps
    tokens = _large(num_steps * outlook.workload.tokens_per_step)
    steps = counted(num_steps, "step")
    return f"{outlook.run_s.text(_long_time)} for {tokens} tokens, {steps}, with failures"


def _slower_name(outlook: Outlook) -> str:
    """Returns the name of the row of a slower network."""
    link = "within a host"
    if limiting_link(outlook.cluster) == "slow_bytes_per_s":
        link = "between hosts"
    return f"links {link} {1 - SLOWER:.0%} slower"


def _failure_lines(outlook: Outlook) -> list[str]:
    failures = outlook.failures
    every = counted(failures.steps, "step")
    recipe_every = counted(outlook.costs.recipe.checkpoint_every, "step")
    ettr = failures.ettr.text(percent)
    between = failures.mtbf_s.text(_long_time)
    return [
        f"ETTR {ettr}: one in {between}, a checkpoint every {every}",
        f"with the recipe's checkpoint every {recipe_every}: {failures.recipe_ettr.text(percent)}",
        f"a save takes {failures.save_s.text(duration)} and blocks {failures.stall_s.text(duration)}",
    ]


def _lost_lines(outlook: Outlook, fewer: FewerHosts | None) -> list[str]:
    lost = outlook.failures.lost_s.text(clock_text)
    lines = [f"{lost} of training, if another node replaces it"]
    if fewer is None:
        lines.append("without one it waits: the batch does not divide, or the step does not fit on fewer")
        return lines
    share = outlook.cost.step_s / fewer.step_s
    hosts = counted(fewer.num_hosts, "node")
    lines.append(f"without one it continues on {hosts}, at {share:.0%} of the pace: step {duration(fewer.step_s)}")
    return lines


def _assumed(outlook: Outlook) -> str:
    """Returns the assumptions, those that vary, and those about failures."""
    of_failures = []
    for name, cases in outlook.failures.assumed.items():
        of_failures.append(f"{name} {cases.text(_short)}")
    lines = (
        f"stated: {outlook.cluster.assumptions}",
        f"ranges: {varied_assumptions(outlook.cluster) or 'none, as all assumptions are known'}",
        f"failures: {', '.join(of_failures)}",
    )
    return "\n".join(lines)


# ---- the clusters


def _sizes_table(sizing: Sizing) -> FittedTable:
    """Returns the clusters that were considered, the smallest first."""
    caption = (
        "The best configuration by the estimate on each, with the recipe's batch. Larger clusters than the first that"
        " reaches the target were not considered."
    )
    columns = ("cluster", "way", "mesh", "GiB>", "step>", "tokens/s>", "")
    table = made_table("Clusters, by the estimate", *columns, caption=caption)
    for size in sizing.considered:
        is_answer = sizing.is_reached and size is sizing.nearest
        add_row(table, size.cluster.topology.text, *_size_cells(size, is_answer=is_answer))
    return table


def _size_cells(size: Size, *, is_answer: bool) -> list[str]:
    best = size.best
    if best is None:
        return ["", "", "-", "-", "-", size.why_not]
    mesh = [f"{axis}={degree}" for axis, degree in best.variant.mesh.items() if degree > 1]
    peak_gib = best.memory.step_bytes / 2**30
    verdict = "reached" if is_answer else "not reached"
    return [
        best.variant.name,
        " ".join(mesh),
        f"{peak_gib:.1f}",
        duration(best.step_s),
        per_s(size.tokens_per_s),
        verdict,
    ]


# ---- numbers as text


def _long_time(seconds: float) -> str:
    """Returns the time of a run, or between failures."""
    if seconds < 2 * DAY_S:
        return f"{three_digits(seconds / HOUR_S)} hours"
    return f"{three_digits(seconds / DAY_S)} days"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _large(value: float) -> str:
    """Returns a number of tokens."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= limit:
            return f"{three_digits(value / limit)}{unit}"
    return f"{value:,.0f}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _change(factor: float) -> str:
    return f"+{factor - 1:.1%}"
