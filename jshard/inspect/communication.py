"""The communication of a plan in a step, and descriptions of how a compiled program differs from it."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jshard._text import folded_names, human_bytes
from jshard.inspect.hlo import Window
from jshard.inspect.hlo.collectives import KINDS, ring_bytes
from jshard.inspect.hlo.module import item_bytes
from jshard.plans.mesh import CONTEXT, FSDP, INNER_AXES, REGION_AXES
from jshard.plans.placement import Placement, axes_of
from jshard.plans.plan import LeafPlan, ShardPlan

FORWARD, BACKWARD = "parameters for forward", "parameters for backward"  # prefixes of these purposes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step."""

    kind: str  # `all-gather`, `reduce-scatter`, `all-reduce`, or `all-to-all` of gradients summed on arrival
    axes: tuple[str, ...]  # the mesh axes that it runs over
    group_size: int  # devices of a group
    dtype: str  # dtype on the wire
    full_bytes: int  # bytes of the whole arrays, before they are split over the group
    purpose: str  # what it is for
    apart: int = 1  # how far apart the devices of a group are on the axes

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, by the ring algorithm."""
        return ring_bytes(self.kind, self.full_bytes, self.group_size)


def traffic_of(plan: ShardPlan) -> tuple[Traffic, ...]:
    """The collectives of one forward and backward pass according to the plan.

    A compiler omits the second gather of a parameter that backward does not need, such as most biases. Units that are
    never gathered have no collectives here.
    """
    sums: dict[Traffic, int] = collections.defaultdict(int)
    reshard = {unit.name: unit.reshard_after_forward for unit in plan.units}
    for leaf in plan.leaves:
        for one in _of_leaf(leaf, leaf.by_layer or reshard[leaf.unit], dict(plan.mesh)):
            sums[dataclasses.replace(one, full_bytes=0)] += one.full_bytes
    found = [dataclasses.replace(one, full_bytes=total) for one, total in sums.items()]
    return tuple(sorted(found, key=lambda one: (KINDS.index(one.kind), len(one.axes))))


def _of_leaf(leaf: LeafPlan, reshard: bool | int, degrees: dict[str, int]) -> Iterator[Traffic]:
    placement = leaf.placement
    if not placement.gathered:
        return  # its communication is the model's own
    same, axes = copied_over(placement, degrees), placement.axes
    num_same = math.prod(degrees[a] for a in same)
    reduce, gather = placement.reduce_dtype, placement.gathered_dtype
    full = placement.gathered_bytes
    reduced = full // jnp.dtype(gather).itemsize * jnp.dtype(reduce).itemsize
    if placement.dim is None:
        if same and leaf.trained:
            yield Traffic("all-reduce", same, num_same, reduce, reduced, "gradients of the replicated")
        return
    yield from _gather(placement, axes, placement.degree, FORWARD)
    if reshard is True:
        yield from _gather(placement, axes, placement.degree, BACKWARD)
    elif reshard is not False:  # the kept copy is no longer in 8 bits
        yield Traffic("all-gather", (FSDP,), int(reshard), gather, full, BACKWARD)
    if not leaf.trained:
        return
    if placement.reduce_wire:
        wire = placement.reduce_wire
        sent = full // jnp.dtype(gather).itemsize * jnp.dtype(wire).itemsize
        for size, apart in placement.exchanges(degrees[FSDP]):
            yield Traffic("all-to-all", (FSDP,), size, wire, sent, "gradients, summed on arrival", apart)
            sent //= size
        inner, reduced = tuple(a for a in axes if a != FSDP), reduced // degrees[FSDP]
        for axis in inner:
            yield Traffic("reduce-scatter", (axis,), degrees[axis], reduce, reduced, "gradients, over inner axes")
            reduced //= degrees[axis]
    else:
        yield Traffic("reduce-scatter", axes, placement.degree, reduce, reduced, "gradients")
    if same:
        left = full // jnp.dtype(gather).itemsize * jnp.dtype(reduce).itemsize // placement.degree
        yield Traffic("all-reduce", same, num_same, reduce, left, "gradients, over replicas")


def _gather(placement: Placement, axes: tuple[str, ...], degree: int, purpose: str) -> Iterator[Traffic]:
    full, item = placement.gathered_bytes, jnp.dtype(placement.gathered_dtype).itemsize
    if placement.gather_wire:
        yield Traffic("all-gather", axes, degree, "float32", placement.scales_bytes, purpose + ", scales")
        yield Traffic("all-gather", axes, degree, "uint8", full // item, f"{purpose}, {placement.gather_wire}")
    else:
        yield Traffic("all-gather", axes, degree, placement.gathered_dtype, full, purpose)


def copied_over(placement: Placement, degrees: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a region along which the stored shard is the same."""
    on = {name for entry in placement.spec for name in axes_of(entry)}
    return tuple(axis for axis in REGION_AXES if degrees.get(axis, 1) > 1 and axis not in on)


# Communication of units that are never gathered, and of lines that mix examples, is the model's own.

Array = tuple[str, tuple[int, ...]]


def split_by_plan(windows: Iterable[Window], plan: ShardPlan) -> tuple[list[Window], list[Window]]:
    """The collectives that the plan is about, and those of units that are never gathered.

    If a program does not name a collective's unit, the units that read it decide, if the data sent was computed. A
    compiler also joins collectives: then arrays are distinguished by their shapes. For gathered units all arrays count
    except those with the shape of a parameter that is never gathered; for joined ones, and those without a unit, arrays
    with the shape of a gathered parameter count. All-reduces count as the former: small arrays are reduced as one, so
    no shape is left.
    """
    names = {part for unit in plan.units if not unit.gathered for part in unit.name.split("+")}
    if not names:
        return list(windows), []
    known, theirs = _shapes_of(plan, gathered=True), _shapes_of(plan, gathered=False)
    planned, own = [], []
    for window in windows:
        whose = window.units or window.read_by
        if whose and names.issuperset(whose):
            own.append(window)
            continue
        is_known = window.kind == "all-reduce" or (bool(window.units) and names.isdisjoint(window.units))
        is_ours = lambda dims, is_known=is_known: dims in known or (is_known and dims not in theirs)
        ours = [array for array in window.arrays if is_ours(comparable(array[1]))]
        rest = [array for array in window.arrays if array not in ours]
        planned += [with_arrays(window, ours) if rest else window] if ours or not rest else []
        own += [with_arrays(window, rest)] if rest else []
    return planned, own


def gathered_anyway(windows: Iterable[Window], plan: ShardPlan) -> list[tuple[Window, list[Array]]]:
    """The collectives of units that are never gathered that hold a whole parameter or gradient, with these arrays."""
    wholes, shards = set(), set()
    for placement in (leaf.placement for leaf in plan.leaves):
        if not placement.gathered and placement.dim is not None:
            whole, shard = shapes_on_device(placement, plan)
            wholes |= {comparable(whole), comparable(placement.shape)}
            shards.add(comparable(shard))
    of_kind = lambda kind: shards if kind == "reduce-scatter" else wholes
    found = [(w, [a for a in w.arrays if comparable(a[1]) in of_kind(w.kind)]) for w in windows]
    return [(window, arrays) for window, arrays in found if arrays]


def summed_over_copies(plan: ShardPlan) -> dict[tuple[str, ...], int]:
    """Elements that a compiler may all-reduce over the axes along which never gathered parameters are replicated.

    Those are the gradients of their shards.
    """
    sums: dict[tuple[str, ...], int] = collections.defaultdict(int)
    for leaf in plan.leaves:
        placement = leaf.placement
        if leaf.trained and not placement.gathered and (axes := copied_over(placement, dict(plan.mesh))):
            sums[axes] += placement.stored_size // placement.shards
    return sums


def _shapes_of(plan: ShardPlan, *, gathered: bool) -> set[tuple[int, ...]]:
    """Shapes of the gathered, or of the never gathered, parameters: whole, shards, and layers of a stack."""
    placements = [leaf.placement for leaf in plan.leaves if leaf.placement.gathered == gathered]
    shapes = {shape for p in placements for shape in (p.shape, *shapes_on_device(p, plan))}
    return {comparable(shape[i:]) for shape in shapes for i in range(len(shape))}


def comparable(dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape in a form for comparison: a compiler transposes the arrays that it gathers."""
    return tuple(sorted(n for n in dims if n != 1))


def shapes_on_device(placement: Placement, plan: ShardPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes on one device: of the gathered parameter, and of its shard."""
    degrees = dict(plan.mesh)
    cut = lambda axes: math.prod(degrees[axis] for axis in axes)
    dims = [(n, axes_of(entry)) for n, entry in zip(placement.stored_shape, placement.spec, strict=True)]
    whole = tuple(n if i == placement.dim else n // cut(axes) for i, (n, axes) in enumerate(dims))
    return whole, tuple(n // cut(axes) for n, axes in dims)


def with_arrays(window: Window, arrays: Sequence[Array]) -> Window:
    """A collective with some of its arrays; one that scatters has parts of them in its result."""
    parts = window.full_bytes // sum(map(array_bytes, window.arrays))
    sizes: dict[str, int] = collections.defaultdict(int)
    for array in arrays:
        sizes[array[0]] += array_bytes(array) * parts
    return dataclasses.replace(window, arrays=tuple(arrays), sizes=tuple(sizes.items()))


def array_bytes(array: Array) -> int:
    """Bytes of an array of a collective's result."""
    dtype, dims = array
    return math.prod(dims) * math.ceil(item_bytes(dtype))


def without_mixing(windows: Iterable[Window]) -> tuple[list[Window], list[Window]]:
    """The collectives of parameters and everything else, and those of the model's own mixing.

    A compiler joins small ones of both. In these, arrays are the model's own if they have the bytes that it requested.
    """
    others, own = [], []
    for window in windows:
        if not window.mixing or window.is_mixing:
            (own if window.mixing else others).append(window)
            continue
        sizes = {m.bytes for m in window.mixing}
        mine = [array for array in window.arrays if array_bytes(array) in sizes]
        rest = [array for array in window.arrays if array_bytes(array) not in sizes]
        own += [dataclasses.replace(with_arrays(window, mine), is_mixing=True)] if mine else []
        others += [dataclasses.replace(with_arrays(window, rest), mixing=())] if rest else []
    return others, own


# Where a compiled program communicates differently from its plan.

# As a share of the gathered parameters. Second gathers that backward does not need (most biases), and scalars are
# below it.
TOLERANCE = 0.02

# Smaller all-reduces are the model's own, such as BatchNorm statistics: they only cost the time to start one.
_OWN_SUMS = 16 * 2**10

_JOINED = "XLA:CPU gathers once for forward and backward; a compiler for GPUs keeps both gathers"
_WIDENED = "XLA:CPU sends narrower floats as f32"


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveKind:
    """A kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]
    group_size: int

    def __str__(self) -> str:
        return f"{self.kind} over {_axes(self.axes)} ({self.group_size})"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between the compiled program and the plan."""

    words: str  # what differs, in a sentence
    planned: str | None  # the kind of collective that the plan has and the program lacks; None if it only has more
    compiled: str | None  # the kind that the program has instead, or more of; None if it only has less
    axes: tuple[str, ...]  # the mesh axes
    units: tuple[str, ...] = ()  # of the compiled collectives, as far as the program names them
    by_cpu: str = ""  # why only XLA:CPU compiles this way; empty if other compilers would, too

    def __str__(self) -> str:
        return f"{self.words} ({self.by_cpu})" if self.by_cpu else self.words


def differences(
    windows: Iterable[Window], plan: ShardPlan, *, accumulate: int = 1, sync: str = "each", on_cpu: bool = False
) -> tuple[Difference, ...]:
    """Compares the collectives of a program with those of its plan.

    Counted in elements, because a compiler may widen a dtype; that is a separate difference. Collectives over `tensor`,
    the exchanges with experts and in attention, and those of lines that mix examples are the model's own, and not
    compared, except for the bytes that such a line requests. Those of units that are never gathered are not compared
    either, unless they contain whole parameters of such a unit, or gradients.
    """
    windows, mixing = without_mixing(windows)
    exchanges = [*(("all-to-all", (axis,)) for axis in INNER_AXES), ("collective-permute", (CONTEXT,))]
    data = [w for w in windows if w.axes and set(w.axes) <= set(REGION_AXES) and w.kind in KINDS]
    ours, apart = split_by_plan([w for w in data if (w.kind, w.axes) not in exchanges], plan)
    found = _Comparison(ours, plan, _planned(plan, accumulate, sync), _compiled(ours), on_cpu)
    beside, large = summed_over_copies(plan), max(found.least, _OWN_SUMS)
    delta = {k: found.compiled[k].total() - found.planned[k].total() for k in {*found.compiled, *found.planned}}
    less: dict[CollectiveKind, float] = {kind: -d for kind, d in sorted(delta.items()) if d < -found.least}
    limit = lambda k: large + beside.get(k.axes, 0) if k.kind == "all-reduce" else found.least
    more: dict[CollectiveKind, float] = {kind: d for kind, d in sorted(delta.items()) if d > limit(kind)}
    kept = [kind for kind in sorted(delta) if found.compiled[kind] and found.planned[kind] and kind not in more]
    joined, strange = {}, []
    for place in _gathers(plan) if on_cpu else ():
        if place not in more:
            once, others = _gathered_once(ours, less, plan, accumulate if sync == "each" else 1, place)
            joined, strange = joined | once, strange + others
    return (
        *found.replaced(less, more),
        *found.amounts({*less, *more}),
        *found.amounts(joined, by_cpu=_JOINED),
        *found.dtypes(kept),
        *_named_whole(strange, "no parameter", found.least),
        *_named_whole(gathered_anyway(apart, plan), "parameters that are never gathered", found.least),
        *_resized(mixing, on_cpu),
    )


_Elements = collections.defaultdict[CollectiveKind, collections.Counter[str]]  # by dtype


def _compiled(windows: Iterable[Window]) -> _Elements:
    sums: Any = collections.defaultdict(collections.Counter)
    for w in windows:
        for dtype, size in w.sizes:
            sums[_kind(w)][dtype] += size / item_bytes(dtype) * w.executions
    return sums


def _planned(plan: ShardPlan, accumulate: int, sync: str) -> _Elements:
    sums: Any = collections.defaultdict(collections.Counter)
    for t in traffic_of(plan):
        if sync == "last" and t.purpose.startswith(BACKWARD):
            continue  # gathered once, for all microbatches
        dtype, times = hlo_dtype(t.dtype), accumulate if sync == "each" else 1
        sums[CollectiveKind(t.kind, t.axes, t.group_size)][dtype] += t.full_bytes / item_bytes(dtype) * times
    return sums


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """A program's communication for the gathered units of a plan, compared with the plan, in elements."""

    windows: list[Window]
    plan: ShardPlan
    planned: _Elements
    compiled: _Elements
    on_cpu: bool

    @property
    def least(self) -> float:
        """The least number of elements that counts as a difference."""
        return TOLERANCE * self.plan.gathered_part.num_parameters

    def replaced(self, less: dict[CollectiveKind, float], more: dict[CollectiveKind, float]) -> Iterator[Difference]:
        """Pairs missing collectives with those present instead, and subtracts them from both."""
        for lost in list(less):
            others = [kind for kind in more if kind.kind != lost.kind and set(lost.axes) <= set(kind.axes)]
            if not others:
                continue
            instead = max(others, key=lambda k: ((k.axes, k.group_size) == (lost.axes, lost.group_size), more[k]))
            amount = min(less[lost], more[instead])
            sent = ring_bytes(instead.kind, amount * _item(self.compiled[instead]), instead.group_size)
            asked = ring_bytes(lost.kind, amount * _item(self.planned[lost]), lost.group_size)
            what, units = f"{lost.kind} written, {instead.kind} compiled", _units(self.windows, instead)
            axes = _axes(lost.axes) if lost.axes == instead.axes else f"{_axes(lost.axes)} and {_axes(instead.axes)}"
            words = f"{what}: {_named(units)}, {axes}, {sent / asked:.1f}x the bytes"
            yield Difference(words, lost.kind, instead.kind, instead.axes, units)
            for rest, kind in ((less, lost), (more, instead)):
                rest[kind] -= amount
                if rest[kind] <= 0:
                    del rest[kind]

    def amounts(self, among: Iterable[CollectiveKind], by_cpu: str = "") -> Iterator[Difference]:
        """Kinds with less or more communication than planned."""
        for kind in sorted(among):
            planned, compiled = self.planned[kind].total(), self.compiled[kind].total()
            units, all_elements = _units(self.windows, kind), self.plan.gathered_part.num_parameters
            word, lacks, has = ("less", kind.kind, None) if compiled < planned else ("more", None, kind.kind)
            words = f"{word} {kind.kind} than planned: {_named(units)}, {_axes(kind.axes)},"
            words += f" {planned / all_elements:.2f} x the parameters planned, {compiled / all_elements:.2f} x compiled"
            yield Difference(words, lacks, has, kind.axes, units, by_cpu)

    def dtypes(self, kinds: Iterable[CollectiveKind]) -> Iterator[Difference]:
        """Kinds with a dtype that is not planned."""
        for kind in kinds:
            compiled, planned = self.compiled[kind], self.planned[kind]
            for dtype in [dtype for dtype, n in compiled.items() if dtype not in planned and n > self.least]:
                units = _units([w for w in self.windows if dtype in dict(w.sizes)], kind)
                what = f"{kind.kind} of {'+'.join(sorted(planned))} written, of {dtype} compiled"
                ratio = item_bytes(dtype) / _item(planned)
                words = f"{what}: {_named(units)}, {_axes(kind.axes)}, {ratio:.1f}x the bytes"
                by_cpu = _WIDENED if self.on_cpu and dtype == "f32" else ""
                yield Difference(words, kind.kind, kind.kind, kind.axes, units, by_cpu)


def _gathered_once(
    windows: list[Window], less: dict[CollectiveKind, float], plan: ShardPlan, times: int, place: CollectiveKind
) -> tuple[dict[CollectiveKind, float], list[tuple[Window, list[Array]]]]:
    """Subtracts collectives that are missing because gathers before forward and before backward were joined.

    Each parameter is then gathered at least once, and not more often than planned. Returns the subtracted part, and
    other gathers whose shape is not that of a parameter.
    """
    fewest, most = collections.Counter(), collections.Counter()
    layer_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    pieces: dict[tuple[int, ...], tuple[int, ...]] = {}  # of an all-to-all in place of a gather
    scales: dict[tuple[int, ...], tuple[int, ...]] = {}  # of parameters sent in 8 bits: of no layer
    again = {unit.name: unit.reshard_after_forward is True for unit in plan.units}
    for leaf in plan.gathered_part.leaves:
        if leaf.placement.axes != place.axes:
            continue
        whole, shard = shapes_on_device(leaf.placement, plan)
        stacked = next(i for i in range(len(whole)) if math.prod(whole[:i]) >= leaf.placement.layers)
        layer = comparable(whole[stacked:])
        layer_of |= {comparable(whole[i:]): layer for i in range(stacked + 1)}
        pieces |= {comparable(shard[i:]): layer for i in range(stacked + 1)}
        if leaf.placement.gather_wire and leaf.placement.dim is not None:
            scales |= {comparable((*whole[i:stacked], whole[leaf.placement.dim])): () for i in range(stacked + 1)}
        fewest[layer] += math.prod(whole) * times
        most[layer] += math.prod(whole) * times * (1 + (leaf.by_layer or again[leaf.unit]))
    layer_of = scales | pieces | layer_of
    compiled, strange = collections.Counter(), []
    for window in (w for w in windows if _kind(w) == place):
        for _, dims in window.arrays:
            compiled[layer_of.get(comparable(dims), ())] += math.prod(dims) * window.executions
        strange.append((window, [array for array in window.arrays if comparable(array[1]) not in layer_of]))
    missing, besides = fewest - compiled, compiled - most
    wrong = missing.total() + besides.total() - besides[()]
    joined = place in less and wrong <= TOLERANCE * plan.gathered_part.num_parameters
    taken_off = {place: less.pop(place)} if joined else {}
    return taken_off, [(window, arrays) for window, arrays in strange if arrays]


def _named_whole(among: Iterable[tuple[Window, Sequence[Array]]], what: str, least: float) -> list[Difference]:
    """Collectives of arrays that should not be gathered or reduced, such as parameters that are never gathered."""
    found: dict[CollectiveKind, list[tuple[Window, Sequence[Array]]]] = collections.defaultdict(list)
    for window, arrays in among:
        found[_kind(window)].append((window, arrays))
    differences = []
    for place, among in sorted(found.items()):
        units = _units([window for window, _ in among], place)
        if sum(math.prod(dims) * w.executions for w, arrays in among for _, dims in arrays) > least:
            shapes = dict.fromkeys(f"{d}[{','.join(map(str, dims))}]" for _, arrays in among for d, dims in arrays)
            words = f"{place.kind} of {what}: {_named(units)}, {_axes(place.axes)}, {' '.join(shapes)}"
            differences.append(Difference(words, None, place.kind, place.axes, units))
    return differences


def _resized(windows: Iterable[Window], on_cpu: bool) -> list[Difference]:
    """Collectives of lines that mix examples that are larger than the lines request."""
    found = []
    for window in windows:
        sizes = [m.bytes for m in window.mixing]
        compiled, asked = sum(map(array_bytes, window.arrays)), sum(sizes)
        if compiled <= asked or all(array_bytes(array) in sizes for array in window.arrays):
            continue
        place, lines = _kind(window), ", ".join(dict.fromkeys(m.line for m in window.mixing))
        words = f"{place.kind} of {human_bytes(compiled)} compiled for {lines}, which needs {human_bytes(asked)}"
        by_cpu = _WIDENED if on_cpu and set(dict(window.sizes)) == {"f32"} and compiled <= 2 * asked else ""
        found.append(Difference(words, place.kind, place.kind, place.axes, window.units, by_cpu))
    return found


def _gathers(plan: ShardPlan) -> list[CollectiveKind]:
    """Where parameters are gathered."""
    found = {(p.axes, p.degree) for leaf in plan.gathered_part.leaves if (p := leaf.placement).dim is not None}
    return sorted(CollectiveKind("all-gather", *one) for one in found | {((FSDP,), dict(plan.mesh)[FSDP])})


def _kind(window: Window) -> CollectiveKind:
    return CollectiveKind(window.kind, window.axes or (), len(window.group))


def _item(elements: Mapping[str, float]) -> float:
    """Mean bytes of an element."""
    return sum(item_bytes(dtype) * n for dtype, n in elements.items()) / sum(elements.values())


def _units(windows: Iterable[Window], place: CollectiveKind) -> tuple[str, ...]:
    names = {unit for w in windows if _kind(w) == place for unit in w.units}
    return tuple(folded_names(sorted(names)))


def _named(units: tuple[str, ...]) -> str:
    """`unit blocks/0..11`, or `units ...` of several."""
    if not units:
        return "unit unknown"
    return f"unit{'s'[: len(units) > 1]} {', '.join(units)}"


def _axes(axes: tuple[str, ...]) -> str:
    return f"ax{'es' if len(axes) > 1 else 'is'} {', '.join(axes)}"


def hlo_dtype(name: str) -> str:
    """`bf16` for `bfloat16`, `f8e4m3fn` for `float8_e4m3fn`."""
    return name.replace("float", "f").replace("int", "s").replace("us", "u").replace("_", "")
