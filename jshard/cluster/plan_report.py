"""All that `jshard plan --topology` tells: the step asked for, others beside it, what to try, what was chosen."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard.cluster.choose import Chosen
from jshard.cluster.compare import Compared, Comparison
from jshard.cluster.report import ClusterPlan
from jshard.inspect.tables import broken_line, printed


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport:
    """The answer to one command.

    Attributes:
        plan: the step that was asked for.
        comparison: strategies beside it.
        tried: ways to make it fit, the last of which does if any does; None if none was needed.
        chosen: the outcome of a search.
    """

    plan: ClusterPlan
    comparison: Comparison | None = None
    tried: tuple[Compared, ...] | None = None
    chosen: Chosen | None = None

    @property
    def fits(self) -> bool:
        """Whether the step asked for fits; after a search, whether the chosen one does."""
        return self.plan.fits if self.chosen is None else self.chosen.fits

    def __rich__(self) -> Group:
        parts: list[Any] = [self.plan]
        if self.tried is not None:
            parts += [Text(), Text(self._advice(), style="bold")]
        for more in (self.comparison, self.chosen):
            parts += [] if more is None else [Text(), more]
        return Group(*parts)

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

    def to_json(self) -> str:
        """Everything as JSON text."""
        whole = self.plan.to_dict()
        if self.tried is not None:
            whole["suggestions"] = [row.to_dict() for row in self.tried if row.fits]
        if self.comparison is not None:
            whole["comparison"] = self.comparison.to_dicts()
        if self.chosen is not None:
            whole["chosen"] = self.chosen.to_dict()
        return json.dumps(whole, indent=1)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        return self.plan.to_html(str(self))

    def _advice(self) -> str:
        assert self.tried is not None
        found = [row for row in self.tried if row.fits]
        if found:
            row = found[-1]
            assert row.plan is not None
            return f"try, as it compiles and {row.plan.verdict}:\n{broken_line(row.command)}"
        ways = f"{len(self.tried)} ways that hold less were compiled, and none fits"
        ways = ways if self.tried else "no way to compute or to keep less would fit, by the estimate"
        return f"{ways}: it needs more devices, or a smaller --set batch_size=N."
