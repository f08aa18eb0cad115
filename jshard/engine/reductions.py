"""What mixes the examples of a batch, or counts them, inside a model: each data shard would do it over its own part.

Found by comparing two traces in global view, with the batch and with twice the batch.
"""

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex

from jshard import _compat
from jshard._errors import CallError
from jshard._policies import UnitPolicy
from jshard.engine.call import Call, is_array
from jshard.engine.context import noted_mixing
from jshard.engine.inputs import BatchSplit, GlobalTrace, trace_globally

DECLARED = "jshard_declared"
"""Marks, in a program traced in global view, what `js.batch_mean` and `js.per_shard` declare."""

_AXES = ("axes", "axis", "dimension", "dimensions")
_MIXING = frozenset(
    "argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min reduce_or"
    " reduce_prod reduce_sum reduce_xor reduce rev sort split top_k".split()
)
_BATCH_NORM = frozenset(str(inspect.getsourcefile(kind)) for kind in (nnx.BatchNorm, nn.BatchNorm))


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A call traced with its batch, and with twice the batch.

    Args:
        call: the call.
        split: how it is split over the data shards.
        policy: of its unit.
        once: the trace with the batch.
        twice: the trace with twice the batch.
    """

    call: Call
    split: BatchSplit
    policy: UnitPolicy
    once: GlobalTrace
    twice: GlobalTrace

    def refuse(self) -> None:
        """Raises if what leaves split along the batch depends on several examples, or on how many there are.

        What `js.batch_mean` and `js.per_shard` declare is left out, and so is BatchNorm: its statistics are those of
        the whole batch, unless `sync_batch_norm=False` asks for others.
        """
        once, twice = ([v.aval.shape for v in trace.jaxpr.jaxpr.outvars] for trace in (self.once, self.twice))
        if len(once) != len(twice):
            return self._raise({"": "results whose number the size of the batch decides"})
        seen = list(self._seen([a != b for a, b in zip(once, twice, strict=True)]))
        self._raise(self._counted(seen) | self._combined(seen))  # one line is listed once

    def refuse_counted(self, output: int) -> None:
        """Raises if an output that is the same on all data shards depends on how many examples there are."""
        self._raise(self._counted(self._seen([i == output for i in range(self._num_outputs)])))

    @property
    def _num_outputs(self) -> int:
        return len(self.once.jaxpr.jaxpr.outvars)

    def _seen(self, outputs: list[bool]) -> Iterator["_Place"]:
        """The equations that some outputs depend on."""
        in_order = {v for v, is_in_order in self._constants.items() if is_in_order}
        jaxpr = self.once.jaxpr.jaxpr
        keys = {v for v in jaxpr.invars if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)}
        return _seen(jaxpr, self.twice.jaxpr.jaxpr, outputs, in_order, keys)

    @functools.cached_property
    def _constants(self) -> dict[Any, bool]:
        """Arrays closed over that grow with the batch and differ along it, and whether they count 0, 1, 2, ..."""
        found = {}
        small, large = self.once.jaxpr, self.twice.jaxpr
        for variable, x, y in zip(small.jaxpr.constvars, small.consts, large.consts, strict=False):
            known = is_array(x) and not _compat.is_tracer(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            if known and np.ndim(x) == np.ndim(y) and (grown := _grown(x, y)):
                array = np.asarray(x)
                if (array != array.take([0], axis=grown[0])).any():
                    found[variable] = np.array_equal(array.ravel(), np.arange(array.size))
        return found

    def _combined(self, seen: Iterable["_Place"]) -> dict[str, str]:
        """By line: what combines examples there."""
        found = {}
        for place in seen:
            masked = self.policy.sync_batch_norm and place.is_masked_mean and _is_batch_norm(place.small)
            what = place.combined(self.split.size)
            if masked or (what and not _is_batch_norm(place.small)):
                found[str(place)] = f"{what or 'a mean under a mask'} at {place}"
        return found

    def _counted(self, seen: Iterable["_Place"]) -> dict[str, str]:
        """By line: what depends there on how many examples there are."""
        found = ((place, place.counted(self._constants)) for place in seen)
        return {str(place): f"{what} at {place}" for place, what in found if what and not _is_batch_norm(place.small)}

    def _raise(self, places: Mapping[str, str]) -> None:
        where = [f"{self.call.where}: {place}" for place in sorted(places.values())]
        if not where:
            return
        if (noted := noted_mixing()) is not None:
            noted += where
            return
        shards, size = self.split.shards, self.split.size
        raise CallError(
            "A call combines examples of the batch, or depends on how many there are.",
            where=where,
            why=f"each of {shards} data shards would do so over its own {size // shards} of {size} examples, and give"
            " other numbers than one device.",
            do="with js.global_view(): step(model, batch)  # the numbers of one device, without a change to the model\n"
            "or compute it outside the model, from what the model returns for each example.\n"
            "In the model, js.per_shard(x) says that the examples of one data shard are meant, and js.batch_mean(x)"
            " that x is an unweighted mean over the examples.",
        )


def look_for_mixing(call: Call, split: BatchSplit, policy: UnitPolicy, traced: GlobalTrace) -> Mixing | None:
    """Traces the call with twice the batch; None, after a warning, if that fails."""
    try:
        doubled = trace_globally(call, split, policy.batch_dim, factor=2)
    except Exception as error:  # whatever a model says that insists on the size of its batch
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"{call.where} cannot be traced with twice its batch of {split.size} ({type(error).__name__}: {first}).\n"
            f"  Whether it combines examples is not known; each of {split.shards} data shards would combine its own"
            f" {split.size // split.shards}. js.check(model, x) compares the results with those of one device.",
            stacklevel=2,
        )
        return None
    return Mixing(call, split, policy, traced, doubled)


@dataclasses.dataclass(frozen=True)
class _Place:
    """An equation in the two traces.

    Args:
        small: in the trace with the batch.
        large: in the trace with twice the batch; None where the traces have other equations.
        is_index: it is used for the indices of gathers and scatters alone.
        is_alike: nothing that it uses is of a data shard's own: its examples, or a random key that the call is given.
        in_order: the indices of this gather or scatter come from counting the examples 0, 1, 2, ...
        around: the equation that has this one in its body.
    """

    small: Any
    large: Any
    is_index: bool
    is_alike: bool
    in_order: bool
    around: "_Place | None" = None

    def __str__(self) -> str:
        """`file:line`."""
        return _compat.user_frame(self.small) or (str(self.around) if self.around else "an unknown place")

    @property
    def is_masked_mean(self) -> bool:
        """Whether it divides by a count that is not the same on all data shards."""
        return self.small.primitive.name == "div" and not isinstance(self.small.invars[1], jex.Literal)

    def combined(self, batch: int) -> str:
        """What combines elements along a dim that grows with the batch; empty if nothing does."""
        if self.large is None:
            return "operations that the size of the batch decides"
        if self.small.primitive.name == "reshape" and _cuts(self.small, self.large, batch):
            return "reshape"
        return self.small.primitive.name if _combines(self.small, self.large, self.in_order) else ""

    def counted(self, constants: Collection[Any]) -> str:
        """What depends on the number of examples, or on a place among them; empty if it does not, or is an index.

        `constants` are arrays that differ from example to example.
        """
        if self.large is None:
            return ""
        if self.is_alike and self.small.primitive.name in ("random_bits", "random_split"):
            drawn = (eqn.outvars[0].aval for eqn in (self.small, self.large))
            return "random numbers whose key is not given to the call as a typed key" if _grown(*drawn) else ""
        if self.is_index:
            return ""
        (small, _), (large, _) = _operands(self.small), _operands(self.large)
        if _is_iota_over_batch(self.small, self.large) or any(_is_in(v, constants) for v in small):
            return "places in the batch"
        pairs = zip(small, large, strict=True)
        numbers = [(a.val, b.val) for a, b in pairs if isinstance(a, jex.Literal) and isinstance(b, jex.Literal)]
        return "the number of examples" if any(_differ(a, b) for a, b in numbers) else ""


def _seen(
    small: Any,
    large: Any,
    values: list[bool],
    in_order: Collection[Any] = (),
    own: Collection[Any] = (),
    *,
    indices: list[bool] | None = None,
    around: _Place | None = None,
) -> Generator[_Place, None, set[Any]]:
    """The equations of a program that its chosen outputs depend on, as far as nothing declares them.

    Returns the variables that they depend on. A loop's equations may come twice.

    Args:
        small: the program, with the batch.
        large: the same with twice the batch.
        values: which outputs are looked at.
        in_order: inputs that count the examples.
        own: inputs that come from those of a data shard's own.
        indices: which outputs are used as indices.
        around: the equation that has this program in it.
    """
    pairs = list(zip(small.eqns, large.eqns, strict=False))
    if len(small.eqns) != len(large.eqns) or any(not _alike(a, b) for a, b in pairs):
        unlike = next((a for a, b in pairs if not _alike(a, b)), (small.eqns or large.eqns)[-1])
        yield _Place(unlike, None, False, False, False, around)
        return set()
    varies = _varying(small, large, own)
    ordered = _in_order(pairs, set(in_order))
    of = lambda flags: {v for v, f in zip(small.outvars, flags, strict=True) if f and isinstance(v, jex.Var)}
    live, index = of(values), of(indices or [False] * len(values))
    for a, b in reversed(pairs):
        is_live, is_index = any(v in live for v in a.outvars), any(v in index for v in a.outvars)
        if not (is_live or is_index) or (a.primitive.name == "name" and a.params["name"] == DECLARED):
            continue
        of_values, of_indices = _operands(a)
        (live if is_live else index).update(v for v in of_values if isinstance(v, jex.Var))
        index.update(v for v in of_indices if isinstance(v, jex.Var))
        is_alike = not any(_is_in(v, varies) for v in a.invars)
        place = _Place(a, b, not is_live, is_alike, any(_is_in(v, ordered) for v in of_indices), around)
        yield place
        for one, two in zip(jex.jaxprs_in_params(a.params), jex.jaxprs_in_params(b.params), strict=False):
            flags = [[v in which for v in a.outvars] for which in (live, index)]
            if len(flags[0]) != len(one.outvars):
                flags = [[is_live] * len(one.outvars), [is_index] * len(one.outvars)]
            inner = list(zip(reversed(one.invars), reversed(a.invars), strict=False))
            given, owned = ({i for i, v in inner if _is_in(v, which)} for which in (ordered, varies))
            start, num_carried = _carry(a, one)
            while True:
                used = yield from _seen(one, two, flags[0], given, owned, indices=flags[1], around=place)
                carried = [
                    f or v in used for f, v in zip(flags[0], one.invars[start : start + num_carried], strict=False)
                ]
                if carried == flags[0][:num_carried]:
                    break
                flags[0][:num_carried] = carried
    return live


def _carry(eqn: Any, body: Any) -> tuple[int, int]:
    """Which inputs of a loop's body are its first outputs of the turn before: where they begin, and how many."""
    if eqn.primitive.name == "scan":  # rows and what is stacked come last, and have one dim more outside
        same = lambda outer, inner: sum(v.aval.ndim == w.aval.ndim for v, w in zip(outer, inner, strict=True))
        num_carried = same(eqn.outvars, body.outvars)
        return same(eqn.invars, body.invars) - num_carried, num_carried
    if eqn.primitive.name == "while" and len(body.outvars) == len(eqn.outvars) != 1:
        return eqn.params["body_nconsts"], len(body.outvars)
    return 0, 0


def _alike(a: Any, b: Any) -> bool:
    """Whether two equations do the same to arrays of the same ranks."""
    ranks = lambda eqn: [len(getattr(v.aval, "shape", ())) for v in eqn.invars]
    return a.primitive is b.primitive and ranks(a) == ranks(b)


def _varying(small: Any, large: Any, own: Collection[Any]) -> set[Any]:
    """The variables of a program that differ between data shards: from their examples, or from keys that are given."""
    inputs = zip(small.invars, large.invars, strict=True)
    found = {v for v, w in inputs if v in own or _grown(v.aval, w.aval)}
    for eqn in small.eqns:
        if any(v in found for v in _variables(eqn)):
            found |= set(eqn.outvars)
    return found


def _in_order(pairs: list[tuple[Any, Any]], found: set[Any]) -> set[Any]:
    """The variables of a program that come from counting the examples; `found` are such inputs."""
    for a, b in pairs:
        inner = zip(jex.jaxprs_in_params(a.params), jex.jaxprs_in_params(b.params), strict=False)
        if (
            _is_iota_over_batch(a, b)
            or any(v in found for v in _variables(a))
            or any(_in_order(list(zip(one.eqns, two.eqns, strict=False)), set()) for one, two in inner)
        ):
            found |= set(a.outvars)
    return found


def _operands(eqn: Any) -> tuple[list[Any], list[Any]]:
    """The operands whose elements are used, and those that say where."""
    name, operands = eqn.primitive.name, list(eqn.invars)
    if name == "gather":
        return operands[:1], operands[1:2]
    if name.startswith("scatter"):
        return [operands[0], operands[2]], [operands[1]]
    if name == "dynamic_slice":
        return operands[:1], operands[1:]
    if name == "dynamic_update_slice":
        return operands[:2], operands[2:]
    return operands, []


def _combines(a: Any, b: Any, in_order: bool) -> bool:
    """Whether an equation mixes elements along a dim that differs between its two traces."""
    name = a.primitive.name
    if name == "scan":  # without a carry, as of jax.lax.map, each turn has its own rows; its body is looked at, too
        return a.params["length"] != b.params["length"] and _carry(a, next(iter(jex.jaxprs_in_params(a.params))))[1] > 0
    if not a.invars or not hasattr(a.invars[0].aval, "shape"):
        return False
    shape, grown = a.invars[0].aval.shape, _grown(a.invars[0].aval, b.invars[0].aval)
    if name in ("slice", "dynamic_slice"):
        return any(a.outvars[0].aval.shape[d] != shape[d] for d in grown)
    if name == "dynamic_update_slice":
        return any(a.invars[1].aval.shape[d] != shape[d] for d in grown)
    if name == "gather":  # x[arange(batch), y] picks within examples; other indices along the batch mix them
        return not in_order and any(d in a.params["dimension_numbers"].start_index_map for d in grown)
    if name.startswith("scatter"):
        if not grown:
            return a.invars[2].aval.shape != b.invars[2].aval.shape
        return not in_order and any(d in a.params["dimension_numbers"].scatter_dims_to_operand_dims for d in grown)
    if name.startswith("reduce_window"):
        return any(a.params["window_dimensions"][d] != 1 for d in grown)
    if name == "conv_general_dilated":
        return _convolves(a, b, grown)
    return any(d in grown for d in _combined_dims(a))


def _cuts(a: Any, b: Any, batch: int) -> bool:
    """Whether a reshape puts examples into a dim of their own, before the one that still grows with the batch."""
    (x, y), (out, grown_out) = ((v.aval, w.aval) for v, w in ((a.invars[0], b.invars[0]), (a.outvars[0], b.outvars[0])))
    before, after = _grown(x, y), _grown(out, grown_out)
    if len(before) != 1 or len(after) != 1 or out.shape[after[0]] % batch == 0:
        return False
    return math.prod(out.shape[: after[0]]) > math.prod(x.shape[: before[0]])


def _convolves(a: Any, b: Any, grown: list[int]) -> bool:
    """Whether a convolution runs over the batch, or sums over it as its features; groups of examples stay apart."""
    _, features, *space = a.params["dimension_numbers"].lhs_spec
    _, _, *window = a.params["dimension_numbers"].rhs_spec
    wide = [d for d, w in zip(space, window, strict=True) if a.invars[1].aval.shape[w] != 1]
    is_grouped = a.params["feature_group_count"] != b.params["feature_group_count"]
    return any(d in grown for d in wide) or (features in grown and not is_grouped)


def _combined_dims(eqn: Any) -> tuple[int, ...]:
    """Dims of the first operand along which an operation mixes elements."""
    if eqn.primitive.name == "dot_general":
        return eqn.params["dimension_numbers"][0][0]
    if eqn.primitive.name not in _MIXING:
        return ()
    for name in _AXES:
        if name in eqn.params:
            dims = eqn.params[name]
            return tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    return ()


def _is_iota_over_batch(a: Any, b: Any) -> bool:
    return a.primitive.name == "iota" and a.params["dimension"] in _grown(a.outvars[0].aval, b.outvars[0].aval)


def _is_batch_norm(eqn: Any) -> bool:
    """Whether an equation comes from the call of a BatchNorm of Flax."""
    return _compat.made_in(eqn, _BATCH_NORM, "BatchNorm.")


def _grown(a: Any, b: Any) -> list[int]:
    """Dims that differ between two arrays of one rank."""
    return [d for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=False)) if n != m]


def _is_in(operand: Any, found: Collection[Any]) -> bool:
    return isinstance(operand, jex.Var) and operand in found


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if isinstance(v, jex.Var)]


def _differ(a: Any, b: Any) -> bool:
    return np.ndim(a) == np.ndim(b) == 0 and bool(a != b) and not (a != a and b != b)  # two nan are alike
