"""Where a compiled program communicates differently from its plan."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jshard._text import folded_names, human_bytes
from jshard.inspect.communication.attribution import (
    CollectivePart,
    gathered_anyway,
    split_by_plan,
    summed_over_copies,
    without_mixing,
)
from jshard.inspect.communication.joined_gathers import JoinedGathers
from jshard.inspect.communication.of_parameter import BACKWARD, FORWARD, GRADIENTS
from jshard.inspect.communication.planned import CollectiveKind, in_mesh_order, traffic_of
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import KINDS, group_along, ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.plans.mesh import CONTEXT, FSDP, INNER_AXES, REGION_AXES
from jshard.plans.plan import ShardPlan
from jshard.plans.staged_loops import ACTIVATIONS

ElementsByDtype = dict[str, float]
"""Elements that a program sends, by the name of their dtype in HLO."""

TOLERANCE = 0.02
"""The allowed difference in elements, as a share of the gathered parameters.

Second gathers that backward does not need (most biases), and scalars are below it.
"""

# Smaller all-reduces are the model's own, such as BatchNorm statistics: they only cost the time to start one.
_MODELS_OWN_ELEMENTS = 16 * 2**10

CPU = "cpu"
TPU = "tpu"

_JOINED = "XLA:CPU gathers once for forward and backward; a compiler for GPUs keeps both gathers"
_WIDENED = "XLA:CPU sends narrower floats as f32"
_SENT_BY_CPU = {"f32": r"b?f(8e\w+|16)", "f16": r"f(4|8)e\w+", "s8": "[su][24]", "u8": "u[24]"}
"""Dtypes that XLA:CPU sends instead of narrower ones, with patterns of those."""

_AS_ALL_REDUCE = "the TPU compiler has no {} for these groups or shapes"
_NARROWED = "the TPU compiler casts before it gathers"
_PERMUTED = "the TPU compiler permutes the parts of an all-reduce in the place of a reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between the compiled program and the plan."""

    words: str  # what differs, in a sentence
    planned: str | None  # the kind of collective that the plan has and the program lacks; None if it only has more
    compiled: str | None  # the kind that the program has instead, or more of; None if it only has less
    axes: tuple[str, ...]  # the mesh axes
    units: tuple[str, ...] = ()  # of the compiled collectives, as far as the program names them
    by_compiler: str = ""  # why the compiler of the platform compiles this way; empty if it need not

    def __str__(self) -> str:
        return f"{self.words} ({self.by_compiler})" if self.by_compiler else self.words


def differences(
    windows: Iterable[Window],
    plan: ShardPlan,
    *,
    accumulate: int = 1,
    sync: str = "each",
    platform: str = "",
    num_slices: int = 1,
) -> tuple[Difference, ...]:
    """Compares the collectives of a program with those of its plan.

    On several TPU slices, a collective in two stages, within slices and between them, counts as one. The compilers of
    some platforms, `CPU` and `TPU`, are known to compile otherwise than written.

    Counted in elements, because a compiler may widen a dtype; that is a separate difference. Collectives over `tensor`,
    the exchanges with experts and in attention, and those of lines that mix examples are the model's own, and not
    compared, except for the bytes that such a line requests. Those of units that are never gathered are not compared
    either, unless they contain whole parameters of such a unit, or gradients.
    """
    without, mixing = without_mixing(windows)
    over_data = _over_data(without)
    if num_slices > 1:
        over_data = _without_stages(over_data, plan, num_slices)
    of_plan, of_model = split_by_plan(over_data, plan)
    comparison = _Comparison(of_plan, plan, _amounts(of_plan, plan, accumulate, sync), platform)
    missing = comparison.missing()
    extra = comparison.extra()

    joined_kinds: list[CollectiveKind] = []
    of_no_parameter: list[CollectivePart] = []
    if platform == CPU:
        num_gathers = accumulate if sync == "each" else 1
        for kind in _kinds_of_gathers(plan):
            if kind in extra:
                continue  # more is gathered than planned: then none can have been joined
            gathers = JoinedGathers(plan, kind, num_gathers)
            if not comparison.plans_others(kind):
                of_no_parameter += gathers.of_no_parameter(of_plan)
            if kind in missing and gathers.unexplained_elements(of_plan) <= comparison.tolerated_elements:
                del missing[kind]
                joined_kinds.append(kind)
        for kind in comparison.joined_exchanges(missing):
            del missing[kind]
            joined_kinds.append(kind)

    # Joined gathers are no longer in `missing`: no other collective has replaced those.
    tolerated = comparison.tolerated_elements
    replacements, left_over = _pair(missing, extra, tolerated)
    permuted = comparison.permuted(replacements, left_over)
    return (
        *map(comparison.replaced, replacements),
        *comparison.less_or_more(left_over - permuted),
        *comparison.less_or_more(permuted, by_compiler=_PERMUTED),
        *comparison.less_or_more(joined_kinds, by_compiler=_JOINED),
        *comparison.other_dtypes(extra),
        *_large_parts(of_no_parameter, "no parameter", tolerated),
        *_large_parts(gathered_anyway(of_model, plan), "parameters that are never gathered", tolerated),
        *_larger_than_requested(mixing, platform),
    )


def _over_data(windows: Iterable[Window]) -> list[Window]:
    """Returns the collectives over axes of parameters, without exchanges with experts and in attention."""
    chosen = []
    for window in windows:
        is_over_data = bool(window.axes) and set(window.axes) <= set(REGION_AXES)
        if is_over_data and window.kind in KINDS and not _is_exchange(window):
            chosen.append(window)
    return chosen


def _is_exchange(window: Window) -> bool:
    """Returns whether a collective exchanges tokens with experts, or sequences in attention."""
    if window.axes is None or len(window.axes) != 1:
        return False
    axis = window.axes[0]
    if window.kind == "collective-permute":
        return axis == CONTEXT  # ring attention
    return window.kind == "all-to-all" and axis in INNER_AXES


def _kinds_of_gathers(plan: ShardPlan) -> list[CollectiveKind]:
    """Returns the kinds of the gathers of parameters; without parameters those over `fsdp`."""
    kinds = {CollectiveKind("all-gather", (FSDP,), dict(plan.mesh)[FSDP])}
    for leaf in plan.gathered_part.leaves:
        placement = leaf.placement
        if placement.dim is not None:
            axes = in_mesh_order(placement.axes, dict(plan.mesh))
            kinds.add(CollectiveKind("all-gather", axes, placement.degree))
    return sorted(kinds)


# ---- several TPU slices


def _without_stages(windows: Iterable[Window], plan: ShardPlan, num_slices: int) -> list[Window]:
    """Returns collectives with those in two stages as one: the stage within a slice, as if over all slices.

    That stage has the whole array: a gather gathers within a slice last, and a reduction reduces there first. The stage
    between slices has a part of it, and is left out.
    """
    degrees = dict(plan.mesh)
    devices_per_slice = math.prod(degrees.values()) // num_slices
    planned_kinds = {CollectiveKind.planned(traffic) for traffic in traffic_of(plan)}
    merged = []
    for window in windows:
        whole_group = group_along(degrees, window.axes or ())
        is_stage = len(window.group) < len(whole_group) and CollectiveKind.of(window) not in planned_kinds
        if not is_stage or not _spans_slices(whole_group, devices_per_slice):
            merged.append(window)
        elif not _spans_slices(window.group, devices_per_slice):
            merged.append(dataclasses.replace(window, group=whole_group))
    return merged


def _spans_slices(group: Iterable[int], devices_per_slice: int) -> bool:
    """Returns whether the devices of a group are in several slices, which are outermost in a mesh."""
    return len({position // devices_per_slice for position in group}) > 1


# ---- amounts


@dataclasses.dataclass(frozen=True)
class _Amounts:
    """The elements sent by the collectives of one kind."""

    planned: ElementsByDtype = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    compiled: ElementsByDtype = dataclasses.field(default_factory=lambda: collections.defaultdict(float))

    @property
    def num_planned(self) -> float:
        return sum(self.planned.values())

    @property
    def num_compiled(self) -> float:
        return sum(self.compiled.values())

    @property
    def excess(self) -> float:
        """How many more elements the program sends than planned; negative if it sends fewer."""
        return self.num_compiled - self.num_planned


def _amounts(windows: Iterable[Window], plan: ShardPlan, accumulate: int, sync: str) -> dict[CollectiveKind, _Amounts]:
    """Counts the elements of a program and of its plan by kind, in the order of kinds."""
    amounts: dict[CollectiveKind, _Amounts] = collections.defaultdict(_Amounts)
    for window in windows:
        compiled = amounts[CollectiveKind.of(window)].compiled
        for dtype, size in window.sizes:
            compiled[dtype] += size / item_bytes(dtype) * window.executions
    num_passes = accumulate if sync == "each" else 1  # else there is one gather and at most one reduction for all
    if sync != "each":
        plan = plan.of_sums()
    for traffic in traffic_of(plan):
        is_of_activations = traffic.purpose.startswith(ACTIVATIONS)
        if sync != "each" and traffic.purpose.startswith(BACKWARD):
            continue  # gathered once, for all microbatches
        if sync == "none" and traffic.purpose.startswith(GRADIENTS):
            continue  # reduced by `js.reduce_gradients`, in another program
        times = accumulate if is_of_activations else num_passes
        planned = amounts[CollectiveKind.planned(traffic)].planned
        planned[hlo_dtype(traffic.dtype)] += traffic.elements * times
    return {kind: amounts[kind] for kind in sorted(amounts)}


def _mean_item_bytes(elements: ElementsByDtype) -> float:
    """Returns the mean bytes of an element."""
    total_bytes = sum(item_bytes(dtype) * count for dtype, count in elements.items())
    return total_bytes / sum(elements.values())


@dataclasses.dataclass(frozen=True)
class _Replacement:
    """A kind of collective that the program has in the place of a planned one."""

    planned: CollectiveKind
    compiled: CollectiveKind
    elements: float  # that are sent by the one instead of the other


def _pair(
    missing: Mapping[CollectiveKind, float], extra: Mapping[CollectiveKind, float], tolerated_elements: float
) -> tuple[list[_Replacement], set[CollectiveKind]]:
    """Pairs kinds of which elements are missing with kinds of which there are more than planned.

    Returns the pairs, and the kinds that still differ after the elements of each pair are taken from both, by more than
    is tolerated of a kind.
    """
    missing_left = dict(missing)
    extra_left = dict(extra)
    replacements = []
    for planned in missing:
        candidates = []
        for kind in extra_left:
            # What runs over fewer axes cannot do the work of the planned one.
            if kind.kind != planned.kind and set(planned.axes) <= set(kind.axes):
                candidates.append(kind)
        if not candidates:
            continue
        # Rather the one over the same groups: a reduce-scatter that became an all-reduce, for instance.
        compiled = max(candidates, key=lambda kind: (kind.has_groups_of(planned), extra_left[kind]))
        elements = min(missing_left[planned], extra_left[compiled])
        replacements.append(_Replacement(planned, compiled, elements))
        _take(missing_left, planned, elements, tolerated_elements)
        _take(extra_left, compiled, elements, tolerated_elements)
    return replacements, {*missing_left, *extra_left}


def _take(
    amounts: dict[CollectiveKind, float], kind: CollectiveKind, elements: float, tolerated_elements: float
) -> None:
    """Subtracts elements of a kind, which is removed when no more than the tolerated ones are left."""
    amounts[kind] -= elements
    if amounts[kind] <= tolerated_elements:
        del amounts[kind]


# ---- differences


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A program's communication for the gathered units of a plan, compared with the plan, in elements."""

    windows: list[Window]
    plan: ShardPlan
    amounts: dict[CollectiveKind, _Amounts]  # in the order of kinds, which is that of the differences
    platform: str

    @property
    def tolerated_elements(self) -> float:
        """How many elements do not count as a difference."""
        return TOLERANCE * self.plan.gathered_part.num_parameters

    def plans_others(self, kind: CollectiveKind) -> bool:
        """Returns whether a kind of collective is also planned for other arrays than parameters: on stages."""
        for traffic in traffic_of(self.plan):
            is_of_parameters = traffic.purpose.startswith((FORWARD, BACKWARD))
            if CollectiveKind.planned(traffic) == kind and not is_of_parameters:
                return True
        return False

    def joined_exchanges(self, missing: Mapping[CollectiveKind, float]) -> list[CollectiveKind]:
        """Returns the kinds by which no more is missing than backward exchanges again of parameters on stages."""
        again: dict[CollectiveKind, float] = collections.defaultdict(float)
        for traffic in traffic_of(self.plan):
            if traffic.kind == "all-to-all" and traffic.purpose.startswith(BACKWARD):
                again[CollectiveKind.planned(traffic)] += traffic.elements
        joined = []
        for kind, elements in again.items():
            if missing.get(kind, math.inf) <= elements + self.tolerated_elements:
                joined.append(kind)
        return joined

    def missing(self) -> dict[CollectiveKind, float]:
        """Returns the kinds of which elements are missing, and how many."""
        missing: dict[CollectiveKind, float] = {}
        for kind, amounts in self.amounts.items():
            if amounts.excess < -self.tolerated_elements:
                missing[kind] = -amounts.excess
        return missing

    def extra(self) -> dict[CollectiveKind, float]:
        """Returns the kinds of which there are more elements than planned, and how many."""
        gradients_of_ungathered = summed_over_copies(self.plan)
        extra: dict[CollectiveKind, float] = {}
        for kind, amounts in self.amounts.items():
            tolerated = self.tolerated_elements
            if kind.kind == "all-reduce":
                # A compiler may sum such gradients by a collective of its own, which the plan does not have.
                tolerated = max(tolerated, _MODELS_OWN_ELEMENTS) + gradients_of_ungathered.get(kind.axes, 0)
            if amounts.excess > tolerated:
                extra[kind] = amounts.excess
        return extra

    def replaced(self, replacement: _Replacement) -> Difference:
        """Describes a kind of collective in the place of another."""
        planned = replacement.planned
        compiled = replacement.compiled
        planned_elements = self.amounts[planned].planned
        compiled_elements = self.amounts[compiled].compiled
        if planned_elements.keys() <= compiled_elements.keys():
            # Others may have been replaced by the same kind, in their dtypes.
            compiled_elements = planned_elements
        compiled_bytes = replacement.elements * _mean_item_bytes(compiled_elements)
        planned_bytes = replacement.elements * _mean_item_bytes(planned_elements)
        sent = ring_bytes(compiled.kind, compiled_bytes, compiled.group_size)
        planned_to_be_sent = ring_bytes(planned.kind, planned_bytes, planned.group_size)
        units = _units_of(self.windows, compiled)
        axes = _axes(planned.axes)
        if planned.axes != compiled.axes:
            axes = f"{axes} and {_axes(compiled.axes)}"
        kinds = f"{planned.kind} written, {compiled.kind} compiled"
        words = f"{kinds}: {_unit_names(units)}, {axes}, {sent / planned_to_be_sent:.1f}x the bytes"
        by_compiler = ""
        if self._is_all_reduce_of_tpu(replacement):
            by_compiler = _AS_ALL_REDUCE.format(planned.kind)
        return Difference(words, planned.kind, compiled.kind, compiled.axes, units, by_compiler)

    def _is_all_reduce_of_tpu(self, replacement: _Replacement) -> bool:
        """Returns whether the TPU compiler wrote a gather or a reduce-scatter as an all-reduce over the same groups."""
        planned = replacement.planned
        compiled = replacement.compiled
        if self.platform != TPU or not compiled.has_groups_of(planned):
            return False
        if compiled.kind != "all-reduce" or planned.kind not in ("all-gather", "reduce-scatter"):
            return False
        # A sum that the program asks for is no form of the compiler.
        elements = 0.0
        for window in self.windows:
            if CollectiveKind.of(window) == compiled and not window.is_sum:
                elements += CollectivePart(window, list(window.arrays)).elements
        return elements + self.tolerated_elements >= replacement.elements

    def permuted(
        self, replacements: Iterable[_Replacement], left_over: Iterable[CollectiveKind]
    ) -> set[CollectiveKind]:
        """Returns the permutes that bring the parts of an all-reduce to where a reduce-scatter would have left them."""
        axes = set()
        for replacement in replacements:
            if replacement.planned.kind == "reduce-scatter" and self._is_all_reduce_of_tpu(replacement):
                axes.add(replacement.planned.axes)
        return {kind for kind in left_over if kind.kind == "collective-permute" and kind.axes in axes}

    def less_or_more(self, kinds: Iterable[CollectiveKind], by_compiler: str = "") -> Iterator[Difference]:
        """Describes kinds with fewer or more elements than planned."""
        num_parameters = self.plan.gathered_part.num_parameters
        for kind in sorted(kinds):
            planned = self.amounts[kind].num_planned
            compiled = self.amounts[kind].num_compiled
            units = _units_of(self.windows, kind)
            ratios = (
                f"{planned / num_parameters:.2f} x the parameters planned, {compiled / num_parameters:.2f} x compiled"
            )
            description = f"{kind.kind} than planned: {_unit_names(units)}, {_axes(kind.axes)}, {ratios}"
            if compiled < planned:
                yield Difference(f"less {description}", kind.kind, None, kind.axes, units, by_compiler)
            else:
                yield Difference(f"more {description}", None, kind.kind, kind.axes, units, by_compiler)

    def other_dtypes(self, extra: Collection[CollectiveKind]) -> Iterator[Difference]:
        """Describes the dtypes that are not planned, of planned kinds except those with extra elements."""
        for kind, amounts in self.amounts.items():
            if kind in extra or not amounts.planned:
                continue
            for dtype, count in amounts.compiled.items():
                if dtype not in amounts.planned and count > self.tolerated_elements:
                    yield self._other_dtype(kind, dtype, amounts.planned)

    def _other_dtype(self, kind: CollectiveKind, dtype: str, planned: ElementsByDtype) -> Difference:
        windows = [window for window in self.windows if dtype in dict(window.sizes)]
        units = _units_of(windows, kind)
        dtypes = f"{kind.kind} of {'+'.join(sorted(planned))} written, of {dtype} compiled"
        ratio = item_bytes(dtype) / _mean_item_bytes(planned)
        words = f"{dtypes}: {_unit_names(units)}, {_axes(kind.axes)}, {ratio:.1f}x the bytes"
        by_compiler = ""
        if self.platform == CPU and _is_widened_by_cpu(dtype, planned):
            by_compiler = _WIDENED.replace("f32", dtype)
        if self.platform == TPU and kind.kind == "all-gather" and ratio < 1:
            by_compiler = _NARROWED
        return Difference(words, kind.kind, kind.kind, kind.axes, units, by_compiler)


def _is_widened_by_cpu(dtype: str, planned: Iterable[str]) -> bool:
    """Returns whether XLA:CPU sends a dtype in the place of a planned one."""
    narrower = _SENT_BY_CPU.get(dtype)
    return narrower is not None and any(re.fullmatch(narrower, name) for name in planned)


def _large_parts(parts: Iterable[CollectivePart], contents: str, tolerated_elements: float) -> list[Difference]:
    """Describes collectives of arrays that should not be gathered or reduced, such as those never gathered."""
    parts_of_kind: dict[CollectiveKind, list[CollectivePart]] = collections.defaultdict(list)
    for part in parts:
        parts_of_kind[CollectiveKind.of(part.window)].append(part)
    descriptions = []
    for kind, of_kind in sorted(parts_of_kind.items()):
        if sum(part.elements for part in of_kind) <= tolerated_elements:
            continue
        windows = [part.window for part in of_kind]
        units = _units_of(windows, kind)
        words = f"{kind.kind} of {contents}: {_unit_names(units)}, {_axes(kind.axes)}, {_shapes_text(of_kind)}"
        descriptions.append(Difference(words, None, kind.kind, kind.axes, units))
    return descriptions


def _shapes_text(parts: Iterable[CollectivePart]) -> str:
    """Returns the different shapes of some arrays: `f32[8,4] bf16[8]`."""
    shapes: dict[str, None] = {}  # a set that keeps the order
    for part in parts:
        for array in part.arrays:
            dims = ",".join(map(str, array.dims))
            shapes[f"{array.dtype}[{dims}]"] = None
    return " ".join(shapes)


def _larger_than_requested(windows: Iterable[Window], platform: str) -> list[Difference]:
    """Describes collectives of lines that mix examples that are larger than the lines request."""
    descriptions = []
    for window in windows:
        requested = [mixing.bytes for mixing in window.mixing]
        requested_bytes = sum(requested)
        is_as_requested = all(array.bytes in requested for array in window.arrays)
        if window.result_bytes <= requested_bytes or is_as_requested:
            continue
        kind = CollectiveKind.of(window)
        lines = ", ".join(dict.fromkeys(mixing.line for mixing in window.mixing))
        needed = human_bytes(requested_bytes)
        words = f"{kind.kind} of {human_bytes(window.result_bytes)} compiled for {lines}, which needs {needed}"
        # Twice the bytes at most, as from bfloat16 to float32; more than that is not explained by the dtype.
        is_widened = window.dtype == "f32" and window.result_bytes <= 2 * requested_bytes
        by_compiler = ""
        if platform == CPU and is_widened:
            by_compiler = _WIDENED
        descriptions.append(Difference(words, kind.kind, kind.kind, kind.axes, window.units, by_compiler))
    return descriptions


# ---- words


def _units_of(windows: Iterable[Window], kind: CollectiveKind) -> tuple[str, ...]:
    """Returns the units of the collectives of a kind, equal ones of a list folded."""
    names: set[str] = set()
    for window in windows:
        if CollectiveKind.of(window) == kind:
            names.update(window.units)
    return tuple(folded_names(sorted(names)))


def _unit_names(units: Sequence[str]) -> str:
    """Returns `unit blocks/0..11`, or `units ...` of several."""
    if not units:
        return "unit unknown"
    noun = "unit"
    if len(units) > 1:
        noun = "units"
    return f"{noun} {', '.join(units)}"


def _axes(axes: Sequence[str]) -> str:
    """Returns `axis fsdp`, or `axes ...` of several."""
    noun = "axis"
    if len(axes) > 1:
        noun = "axes"
    return f"{noun} {', '.join(axes)}"


def hlo_dtype(name: str) -> str:
    """Returns `bf16` for `bfloat16`, `f8e4m3fn` for `float8_e4m3fn`, `c64` for `complex64`, `pred` for `bool`."""
    if name == "bool":
        return "pred"
    short = name.replace("complex", "c").replace("float", "f").replace("int", "s")
    return short.replace("us", "u").replace("_", "")  # of `uint8` there is `us8` by now
