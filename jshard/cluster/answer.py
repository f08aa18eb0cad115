"""The answer to a target or a budget, from estimates before compiling."""

from __future__ import annotations

import dataclasses

from jshard._types import Json
from jshard.cluster.cases import Cases
from jshard.cluster.goals import HOUR_S, Pace, Target, TimeBudget
from jshard.cluster.outlook import FewerHosts, Outlook
from jshard.cluster.sizing import Size, Sizing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question.

    Attributes:
        name: of the model and the recipe.
        sizing: the clusters that were considered; of a budget the only one.
        outlook: the configuration that is the answer; None if nothing fits anywhere.
        command: plans it.
        target: the question, if it is a target.
        budget: the question, if it is a budget.
        price: of a device for an hour, in any currency.
        slower: how many times as long a step takes on a slower network.
        fewer: how the run continues without one node; None if it does not.
    """

    name: str
    sizing: Sizing
    outlook: Outlook | None = None
    command: str = ""
    target: Target | None = None
    budget: TimeBudget | None = None
    price: float | None = None
    slower: Cases | None = None
    fewer: FewerHosts | None = None

    @property
    def is_reached(self) -> bool:
        """Returns whether a cluster reaches the target, or the budget buys a step."""
        if self.budget is None:
            return self.sizing.is_reached
        return self.outlook is not None and self.bought_steps.stated >= 1

    @property
    def bought_steps(self) -> Cases:
        """Returns the steps that a budget is enough for, with what failures take."""
        assert self.outlook is not None and self.budget is not None
        seconds = self.budget.seconds

        def steps_of(pace: Pace) -> float:
            return seconds * pace.ettr / pace.step_s

        return self.outlook.figure(steps_of)

    def price_of_run(self, outlook: Outlook) -> Cases:
        """Returns the price of the whole run."""
        price = self.price
        assert price is not None

        def price_of(pace: Pace) -> float:
            device_hours = pace.num_devices * pace.run_s / HOUR_S
            return price * device_hours

        return outlook.figure(price_of)

    def to_dict(self) -> dict[str, Json]:
        """Returns everything for JSON."""
        record: dict[str, Json] = {
            "name": self.name,
            "question": self._question(),
            "reached": self.is_reached,
            "command": self.command,
        }
        if self.target is not None:
            record["considered"] = [_size_record(size) for size in self.sizing.considered]
        if self.outlook is not None:
            record["estimate"] = self._estimate_record(self.outlook)
        return record

    def _question(self) -> dict[str, Json]:
        if self.target is not None:
            return {"target": self.target.text, "figure": self.target.figure.name, "limit": self.target.limit}
        assert self.budget is not None
        return {"budget": self.budget.text, "seconds": self.budget.seconds}

    def _estimate_record(self, outlook: Outlook) -> dict[str, Json]:
        variant = outlook.variant
        workload = outlook.workload
        record: dict[str, Json] = {
            "topology": outlook.cluster.topology.text,
            "devices": outlook.num_devices,
            "mesh": dict(variant.mesh),
            "accumulate": variant.accumulate,
            "memory_bytes": outlook.cost.memory.step_bytes,
            "step_s": outlook.step_s.to_dict(),
            "tokens_per_s": outlook.tokens_per_s.to_dict(),
            "num_steps": workload.num_steps,
            "tokens_per_step": workload.tokens_per_step,
            "run_s": outlook.run_s.to_dict(),
            "failures": outlook.failures.to_dict(),
            "left_out": list(outlook.cost.left_out),
        }
        if self.budget is not None:
            record["bought_steps"] = self.bought_steps.to_dict()
        if self.price is not None:
            record["price"] = self.price_of_run(outlook).to_dict()
        if self.slower is not None:
            record["slower_network"] = self.slower.to_dict()
        if self.fewer is not None:
            record["fewer_hosts"] = dataclasses.asdict(self.fewer)
        return record


def _size_record(size: Size) -> dict[str, Json]:
    record: dict[str, Json] = {"topology": size.cluster.topology.text}
    if size.best is None:
        record["why_not"] = size.why_not
        return record
    record["options"] = size.best.variant.command
    record["memory_bytes"] = size.best.memory.step_bytes
    record["step_s"] = size.best.step_s
    record["tokens_per_s"] = size.tokens_per_s
    return record
