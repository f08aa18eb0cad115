"""`jshard plan --target` and `--budget`: questions that estimates answer before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import warnings
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from jshard._live import Work, at_work
from jshard._text import counted, duration
from jshard.cli._config import option_of
from jshard.cli._devices import open_mesh
from jshard.cli._output import answer, remark
from jshard.cli._recipe_request import RecipeRequest
from jshard.cluster.answer import Answer
from jshard.cluster.answer_report import AnswerReport
from jshard.cluster.compile import CompileRequest, command_line
from jshard.cluster.costs import Costs
from jshard.cluster.failures import FAILURE_ASSUMPTIONS
from jshard.cluster.goals import HOUR_S, Target, TimeBudget, parse_budget, parse_target
from jshard.cluster.machine import Known, PlannedCluster, parse_known
from jshard.cluster.outlook import Outlook, fewer_hosts
from jshard.cluster.sizing import Size, Sizing, Workload, growing, prepared, smallest_reaching
from jshard.cluster.topology import Topology, parse_topology, traced_for_device
from jshard.errors import RunError, ShardingError
from jshard.recipes.overrides import parse_units

if TYPE_CHECKING:
    from jshard.cli.plan import PlanArgs

_OF_COMPILED = ("auto", "compare", "html", "xla_flags")


def check_question(args: PlanArgs) -> None:
    """Checks the options of a target or a budget against the others, before the model file is read."""
    if not args.target and not args.budget:
        _check_no_details(args)
        return
    _check_one_question(args)
    _check_nothing_is_compiled(args)
    _check_is_positive("price", args.price)
    _check_is_positive("tokens", args.tokens)
    _check_one_length(args)


def _check_no_details(args: PlanArgs) -> None:
    """Refuses the details of a question where there is none."""
    given = [name for name in ("price", "tokens") if getattr(args, name) is not None]
    if given:
        raise ShardingError(
            "Nothing is asked for.",
            where=", ".join(map(option_of, given)),
            why="a price and a number of tokens are those of a target or a budget.",
            do="--budget 512xh100:24h  # or --target with --topology",
        )


def _check_one_question(args: PlanArgs) -> None:
    """Refuses two questions, and a target without a cluster."""
    if not args.target:
        return
    target = shlex.quote(args.target)
    if args.budget:
        raise ShardingError(
            "Two questions are asked at once.",
            where=f"--target {target} --budget {args.budget}",
            why="a target asks for the smallest cluster, and a budget for what one cluster trains.",
            do=f"--target {target}",
        )
    if not args.topology:
        raise ShardingError(
            "A target needs a cluster.",
            where=f"--target {target}",
            why="clusters of growing size are considered, up to that of --topology.",
            do="--topology h100:64x8",
        )


def _check_nothing_is_compiled(args: PlanArgs) -> None:
    """Refuses the options of a compiled step."""
    others = [name for name in _OF_COMPILED if getattr(args, name)]
    if others:
        raise ShardingError(
            "A target or a budget is answered without compiling.",
            where=", ".join(map(option_of, others)),
            why="these options concern a compiled step.",
            do=f"{_question_words(args)}  # its answer has a command, to which they can be added",
        )


def _check_is_positive(name: str, value: float | None) -> None:
    """Refuses a price or a number of tokens that is not above 0."""
    if value is not None and value <= 0:
        raise ShardingError(
            "The number is not positive.",
            where=f"{option_of(name)} {value:g}",
            why="a price is of a device for an hour, tokens are those of a whole run; both are more than 0.",
            do="--price 2.5 --tokens 2e12",
        )


def _check_one_length(args: PlanArgs) -> None:
    """Refuses a length of the run in tokens and in steps."""
    if args.tokens is not None and args.steps is not None:
        raise ShardingError(
            "The length of the run is given twice.",
            where=f"--tokens {args.tokens:g} --steps {args.steps}",
            why="both set the number of steps.",
            do=f"--tokens {args.tokens:g}",
        )


def _question_words(args: PlanArgs) -> str:
    """Returns the option that asks."""
    if args.target:
        return f"--target {shlex.quote(args.target)}"
    return f"--budget {args.budget}"


def answer_question(args: PlanArgs, request: RecipeRequest) -> int:
    """Prints the answer to a target or a budget.

    Raises:
        RunError: it is not reached; after the answer, which says what is.
    """
    target = parse_target(args.target) if args.target else None
    topology = parse_topology(args.topology) if args.topology else None
    budget = parse_budget(args.budget, topology=topology) if args.budget else None
    if budget is not None:
        topology = budget.topology
    assert topology is not None
    open_mesh(request.sizes, devices=topology.num_devices)  # it reports an axis that does not exist
    with traced_for_device(topology.device), warnings.catch_warnings():
        # Of parameters that a mesh leaves replicated: most meshes are only considered, and compiling warns of the rest.
        warnings.simplefilter("ignore", UserWarning)
        result = _Question(args, request, topology).answered(target, budget)
    answer(AnswerReport(result), json=args.json)
    if not result.is_reached:
        raise _unreached(result)
    return 0


def _unreached(result: Answer) -> RunError:
    """Returns the error of a target that nothing reaches, or of a budget that trains nothing."""
    if result.outlook is None:
        return _nothing_fits(result)
    if result.target is None:
        return _less_than_a_step(result, result.outlook)
    return _no_cluster_reaches(result, result.target, result.outlook)


def _nothing_fits(result: Answer) -> RunError:
    largest = result.sizing.considered[-1]
    topology = largest.cluster.topology
    return RunError(
        "No configuration fits by the estimate.",
        where=_where(result),
        why=f"on {topology.text}: {largest.why_not}.",
        do=f"--topology {_doubled(topology).text}  # or fewer sequences: --set batch_size=N",
    )


def _less_than_a_step(result: Answer, outlook: Outlook) -> RunError:
    topology = outlook.cluster.topology
    step_s = outlook.step_s.worst
    num_hours = math.ceil(step_s / HOUR_S)
    return RunError(
        "The budget is less than a step.",
        where=_where(result),
        why=f"a step takes up to {duration(step_s)} on {topology.text}, by the estimate.",
        do=f"--topology {topology.text} --budget {num_hours}h",
    )


def _no_cluster_reaches(result: Answer, target: Target, outlook: Outlook) -> RunError:
    considered = result.sizing.considered
    largest = considered[-1].cluster.topology
    nearest = outlook.cluster.topology
    figure = f"{target.figure.name} is {target.written(outlook.pace)}"
    clusters = counted(len(considered), "cluster")
    return RunError(
        "No cluster reaches the target.",
        where=_where(result),
        why=f"by the estimate, {figure} on {nearest.text}: the nearest of {clusters} up to {largest.text}.",
        do=f'--target "{target.eased_to(outlook.pace)}"  # or more devices, or another batch',
    )


def _doubled(topology: Topology) -> Topology:
    """Returns a cluster of twice as many hosts, or of twice as many TPU slices."""
    slices, *rest = topology.extents
    if slices == 1 and topology.device.platform == "gpu":
        return topology.with_extents((1, 2 * rest[0], *rest[1:]))
    return topology.with_extents((2 * slices, *rest))


def _where(result: Answer) -> str:
    if result.target is not None:
        return f"--target {shlex.quote(result.target.text)}"
    assert result.budget is not None
    return f"--budget {result.budget.text}"


class _Question:
    """A target or a budget of one request."""

    def __init__(self, args: PlanArgs, request: RecipeRequest, topology: Topology) -> None:
        self._args = args
        self._request = request
        self._topology = topology
        known = parse_known(args.assume, others=FAILURE_ASSUMPTIONS)
        self._known: dict[str, Known] = {}  # of the cluster
        self._known_of_failures: dict[str, Known] = {}
        for name, value in known.items():
            group = self._known_of_failures if name in FAILURE_ASSUMPTIONS else self._known
            group[name] = value
        costs = Costs(request.model_file, request.recipe, self._cluster(topology).machine)
        self._workload = Workload(costs=costs, sizes=request.sizes, num_steps=_num_steps(args, request))

    def answered(self, target: Target | None, budget: TimeBudget | None) -> Answer:
        """Returns the answer."""
        sizing = self._for_budget() if target is None else self._for_target(target)
        result = Answer(
            name=f"{self._args.model.stem}, recipe {self._request.name}",
            sizing=sizing,
            target=target,
            budget=budget,
            price=self._args.price,
        )
        if sizing.nearest is None:
            return result
        with self._at_work("estimating what may differ"):
            outlook = self._outlook(sizing.nearest, is_ranged=True)
            return dataclasses.replace(
                result,
                outlook=outlook,
                command=self._command(outlook),
                slower=outlook.slower_network(),
                fewer=fewer_hosts(outlook),
            )

    def _for_target(self, target: Target) -> Sizing:
        return smallest_reaching(
            self._workload,
            [self._cluster(topology) for topology in growing(self._topology)],
            target,
            pace_of=lambda size: self._outlook(size, is_ranged=False).pace,
            searched=self._searched,
        )

    def _for_budget(self) -> Sizing:
        """Returns the one cluster that is considered."""
        size = prepared(self._workload, self._cluster(self._topology))
        if size.costs is not None:
            size = self._searched(size)
        is_usable = size.best is not None
        return Sizing(considered=(size,), nearest=size if is_usable else None, is_reached=is_usable)

    def _cluster(self, topology: Topology) -> PlannedCluster:
        return PlannedCluster(topology, self._known)

    def _searched(self, size: Size) -> Size:
        with self._at_work(f"estimating every configuration on {size.cluster.topology.describe()}"):
            return size.searched(self._request.sizes)

    def _outlook(self, size: Size, *, is_ranged: bool) -> Outlook:
        return Outlook.of(self._workload, size, known_of_failures=self._known_of_failures, is_ranged=is_ranged)

    def _command(self, outlook: Outlook) -> str:
        """Returns the command that compiles the configuration."""
        request = CompileRequest(
            model=str(self._args.model),
            recipe=self._args.recipe,
            settings=self._request.settings,
            units=parse_units(self._args.unit),
            topology=outlook.cluster.topology.text,
            profile=self._args.profile,
        )
        return command_line(outlook.variant.of(request), assume=outlook.cluster.assume)

    def _at_work(self, what: str) -> AbstractContextManager[Work]:
        return at_work(what, say=remark, stream=sys.stderr)


def _num_steps(args: PlanArgs, request: RecipeRequest) -> int:
    """Returns the steps of the whole run."""
    recipe = request.recipe
    if args.tokens is None:
        return recipe.num_steps
    return math.ceil(args.tokens / (recipe.batch_size * recipe.sequence_length))
