"""Host memory and optimizer state: which devices have it, where each array is, updates in parts."""

import contextvars
import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.errors import MeshError
from jshard.plans.homes import Home, settle_in
from jshard.plans.mesh import NUMBERS, REPLICA, AnyMesh, is_concrete
from jshard.plans.padding import Padding, padding_of, store
from jshard.plans.placement import Placement, PlacementPolicy, place
from jshard.plans.plan import ShardPlan
from jshard.plans.policies import MixedPrecision

HOST_KIND = "pinned_host"
"""JAX's name for host memory that a device reads and writes directly."""


def check_offload(offload: str | None, mesh: AnyMesh, *, activations: bool = False) -> None:
    """Raises for an offload, of arrays or of activations, if devices of the mesh report no memory for it."""
    if not (offload or activations) or not isinstance(mesh, Mesh):
        return
    asked = f"offload={offload!r}" if offload else 'remat="offload"'
    kinds = {device: _compat.memory_kinds(device) for device in mesh.devices.flat}
    lacking = {device: found for device, found in kinds.items() if found and HOST_KIND not in found}
    if lacking:
        raise MeshError(
            "These devices have no host memory to offload to.",
            where=[f"{device}  memories: {', '.join(found)}" for device, found in lacking.items()],
            why=f"{asked} needs memory of the kind {HOST_KIND!r}; {len(lacking)} of {len(kinds)} devices lack it.",
            do='omit it; remat="full" and accumulate=2 save memory on the device.',
        )


def sharding_of(mesh: Any, spec: PartitionSpec, *, on_host: bool) -> NamedSharding:
    """A sharding in the host's memory, or the device's."""
    return _compat.host_sharding(mesh, spec) if on_host else NamedSharding(mesh, spec)


def home_in(mesh: AnyMesh, placement: Placement) -> Home | None:
    """Where the values of a parameter belong; None on a mesh without devices."""
    if not is_concrete(mesh):
        return None
    sharding = sharding_of(mesh, placement.partition_spec, on_host=placement.on_host)
    return Home(sharding, placement.stored_shape)


def place_variable(variable: nnx.Variable, placement: Placement, mesh: AnyMesh) -> None:
    """Stores the value of a variable as planned, where it is not, and gives the variable its home.

    A variable that was merged from a plain state, or that replaced another, has no home and no padding yet. What a
    program traces is left as it is.
    """
    home, value = home_in(mesh, placement), variable.get_raw_value()
    if home is None or _compat.is_tracer(value):
        return
    padding = Padding.of(placement)
    if padding is not None and padding_of(variable) is None and value.shape == placement.shape:
        with jax.ensure_compile_time_eval():  # else, in a trace, the variable would hold a value of the trace
            store(variable, padding, padding.pad(value))
    settle_in(variable, home)


def is_placed(variable: nnx.Variable, placement: Placement, mesh: AnyMesh) -> bool:
    """Whether `place_variable` would change nothing."""
    home, value = home_in(mesh, placement), variable.get_raw_value()
    if home is None or _compat.is_tracer(value) or isinstance(value, jax.ShapeDtypeStruct):
        return True
    is_unpadded = bool(placement.padding) and value.shape == placement.shape
    return not is_unpadded and not home.is_elsewhere(value)


def to_device(tree: Any) -> Any:
    """The tree, with arrays on the host copied to the device."""
    return jax.tree.map(fetched, tree)


def fetched(x: Any) -> Any:
    """An array, on the device."""
    return jax.device_put(x, jax.memory.Space.Device) if _compat.on_host(x) else x


def stored_array(x: jax.Array, placement: Placement, mesh: AnyMesh) -> jax.Array:
    """The array of a parameter as it is stored: padded, sharded, in its memory."""
    padding = Padding.of(placement)
    stored = x if padding is None else padding.pad(x)
    if is_concrete(mesh) and stored.ndim == len(placement.spec):  # not a layer in a loop
        stored = lax.with_sharding_constraint(stored, NamedSharding(mesh, placement.partition_spec))
    return to_host(stored) if placement.on_host else stored


def to_host(x: jax.Array) -> jax.Array:
    """An array, in the host's memory."""
    return x if _compat.on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """An array in the same memory as another array."""
    return to_host(x) if like is not None and _compat.on_host(like) else x


def back(tree: Any, like: Any) -> Any:
    """A tree of arrays, each in the same memory as its counterpart."""
    return jax.tree.map(placed_like, tree, like)


# Arrays in buffers of their own: a step that donates its arguments would give away a shared buffer twice, which ends
# the process. `jax.device_put` shares the buffer of the source on the device where that is.


def as_array(x: Any) -> Any:
    """An array for a number of Python or NumPy's; arrays of JAX and shapes are returned unchanged.

    NumPy's memory is copied: its owner may write to it. A number stays weakly typed, as under `jax.jit`.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return np.array(x, jax.typeof(x).dtype)
    return jnp.asarray(x) if isinstance(x, NUMBERS) else x


def placed_apart(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array with a sharding, which shares no buffer with the given one unless it is that one."""
    placed = jax.device_put(x, sharding)
    return placed if placed is x or not isinstance(x, jax.Array) else apart([x, placed])[1]


def apart(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, with a copy in place of each that shares a buffer with an earlier one."""
    used: set[tuple[int, int]] = set()
    result = []
    for x in arrays:
        if not used.isdisjoint(_buffers(x)):
            # Local, unlike jnp.copy: other processes may share none of their buffers, and need not take part.
            x = jax.device_put(x, x.sharding if x.committed else None, may_alias=False)
        used |= _buffers(x)
        result.append(x)
    return result


def _buffers(x: jax.Array) -> set[tuple[int, int]]:
    """The devices and addresses of this process's part of an array; none if it is empty or deleted."""
    if x.is_deleted() or not x.size:
        return set()
    pieces = [shard.data for shard in x.addressable_shards]
    return {(next(iter(piece.devices())).id, piece.unsafe_buffer_pointer()) for piece in pieces}


# Where each array of an optimizer's state is placed, and updates of arrays in host memory, in parts.

Keys = tuple[str, ...]
"""The keys of a path as text."""


class StatePlaces:
    """Where each array of an optimizer's state is, derived from shapes and paths alone.

    With `over_replica` the state of replicated parameters is sharded over `replica`.
    """

    def __init__(self, plan: ShardPlan, *, over_replica: bool = False) -> None:
        self._parameters = {tuple(map(str, leaf.keys[0])): leaf.placement for leaf in plan.leaves}
        self._over_replica, self._degrees = over_replica, dict(plan.mesh)

    def tail(self, path: Keys) -> Keys | None:
        """The path of the parameter that a path in the state ends in; None if there is no such parameter."""
        return tail_in(self._parameters, path)

    def parameter(self, path: Keys) -> Placement | None:
        """The placement of that parameter."""
        return self._parameters.get(self.tail(path) or ())

    def spec(self, path: Keys, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an array of the state."""
        parameter = self.parameter(path)
        if parameter is None:
            return PartitionSpec()
        if shape not in (parameter.shape, parameter.stored_shape):
            other = place("", shape, "float32", (), self._degrees, PlacementPolicy(), MixedPrecision(), pads=False)
            return other.partition_spec
        if parameter.dim is None and self._over_replica:
            return self._over_replicas(parameter)
        return parameter.partition_spec

    @property
    def offloaded(self) -> dict[Keys, Placement]:
        """The parameters whose state is in host memory."""
        return {path: placement for path, placement in self._parameters.items() if placement.offload is not None}

    def on_host(self, path: Keys, shape: tuple[int, ...]) -> bool:
        """Whether an array of the state is in host memory: if it has the shape of its offloaded parameter."""
        parameter = self.parameter(path)
        shapes = () if parameter is None or parameter.offload is None else (parameter.shape, parameter.stored_shape)
        return shape in shapes

    def on_host_itself(self, path: Keys) -> bool:
        """Whether the parameter at a path is in host memory itself, not only its state."""
        parameter = self.parameter(path)
        return parameter is not None and parameter.on_host

    def padding(self, path: Keys, shape: tuple[int, ...]) -> Padding | None:
        """The padding of an array of the state: that of its parameter, if the shapes are equal."""
        parameter = self.parameter(path)
        if parameter is None or shape not in (parameter.shape, parameter.stored_shape):
            return None
        return Padding.of(parameter)

    def held(self, tree: Any, mesh: AnyMesh, *, as_given: bool = False) -> Any:
        """A tree with arrays padded and constrained like their parameters, else the compiler chooses again.

        With `as_given`, arrays of other models, and logical arrays of parameters stored padded, stay as they are.
        """

        def hold(path: tuple, x: Any) -> Any:
            keys = key_texts(path)
            padding = self.padding(keys, x.shape)
            is_logical = padding is not None and padding.logical_shape(x.shape) == x.shape
            if as_given and (is_logical or (x.ndim and self.tail(keys) is None)):
                return x
            x = x if padding is None else padding.pad(x)
            return lax.with_sharding_constraint(x, NamedSharding(mesh, self.spec(keys, x.shape)))

        return jax.tree.map_with_path(hold, tree) if is_concrete(mesh) else tree

    def _over_replicas(self, parameter: Placement) -> PartitionSpec:
        size = self._degrees.get(REPLICA, 1)
        fits = [d for d, n in enumerate(parameter.shape) if n and n % size == 0 and parameter.spec[d] is None]
        if size == 1 or not fits:
            return parameter.partition_spec
        dim = max(fits, key=lambda d: parameter.shape[d])
        return PartitionSpec(*[REPLICA if d == dim else e for d, e in enumerate(parameter.spec)])


@dataclasses.dataclass(frozen=True)
class UpdateLayout:
    """Where the arrays of an optimizer's update are, by their paths and shapes, on a mesh."""

    places: StatePlaces
    mesh: AnyMesh


update_layout: contextvars.ContextVar[UpdateLayout | None] = contextvars.ContextVar("update_layout", default=None)
"""The placements of the current update; None outside a transformation of `js.shard_optimizer`."""


def tail_in(paths: Container[Keys], path: Keys) -> Keys | None:
    """The longest of some paths that a path ends in, or None."""
    return next((path[start:] for start in range(len(path)) if path[start:] in paths), None)


def key_texts(path: tuple) -> Keys:
    """The keys of a `jax.tree_util` path as text, without those that lead into a Flax variable or box."""
    while path and getattr(path[-1], "name", None) == "value":  # a parameter of that name has a `key`
        path = path[:-1]
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def paths_of(tree: Any) -> list[Keys]:
    """The paths of the arrays in a tree."""
    return [key_texts(path) for path, _ in jax.tree.leaves_with_path(tree)]


# An update of arrays in host memory, in parts: the device never holds all of it.

_PART_BYTES = 8 * 2**20  # of parameters on a device: large enough to copy well
_IN_FLIGHT = 2  # parts on the device at once: one is copied in or out while the other computes

Part = tuple[list[int], list[int]]
"""Matching positions of arguments and of results."""


def parts_of(
    offloaded: Mapping[Keys, Placement], arguments: Sequence[Keys], results: Sequence[Keys], gradients: Sequence[Keys]
) -> list[Part]:
    """Parameters grouped with their gradients and state, ordered by when the gradients arrive.

    The path of an argument or a result ends in that of a parameter, or belongs to no parameter. Parameters without a
    gradient are frozen, and in no part.
    """
    found: dict[Keys, Part] = {path: ([], []) for path in offloaded}
    for number, paths in enumerate((arguments, results)):
        for i, path in enumerate(paths):
            tail = tail_in(offloaded, path)
            if tail is not None:
                found[tail][number].append(i)
    trained = {tail_in(offloaded, path) for path in gradients}
    parts, size = [([], [])], 0
    for path in reversed([path for path in offloaded if path in trained]):
        for all_of, more in zip(parts[-1], found[path], strict=True):
            all_of.extend(more)
        size += offloaded[path].bytes_per_device
        if size >= _PART_BYTES:
            parts, size = [*parts, ([], [])], 0
    return [part for part in parts if part[0]]


def streamed(function: Callable[..., list], arguments: Sequence, parts: Sequence[Part], like: Sequence) -> list:
    """The results of a function on the device; those of each part are moved to their memory before a later part.

    Arrays on the host are fetched when their part begins. Results in no part are computed last; values only passed on
    stay where they are. The like of a result is an array whose memory it is moved to, or None for the device.
    """
    lazy = _Lazy(function, arguments)
    results = lazy.unchanged(like)
    done: list[list[int]] = []
    for given, made in parts:
        values = [arguments[i] for i in given]
        if len(done) >= _IN_FLIGHT:
            before = done[-_IN_FLIGHT]
            values, found = lax.optimization_barrier((values, [results[j] for j in before]))
            for j, x in zip(before, found, strict=True):
                results[j] = x
        else:
            values = lax.optimization_barrier(values)  # none is used before the last of them, a gradient, exists
        lazy.give(given, values)
        for j in made:
            results[j] = placed_like(lazy.result(j), like[j])
        done.append([j for j in made if _compat.on_host(results[j])])
    for j in [j for j, x in enumerate(results) if x is None]:
        results[j] = placed_like(lazy.result(j), like[j])
    return results


class _Lazy:
    """A traced function whose results are computed one by one, each with the missing values that it needs."""

    def __init__(self, function: Callable[..., list], arguments: Sequence) -> None:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
        closed = jax.make_jaxpr(function)(*shapes)
        if any(map(_is_call, closed.jaxpr.eqns)):  # calls of a whole tree would need all of it at once
            closed = jax.make_jaxpr(lambda *xs: _without_calls(closed, xs))(*shapes)
        self._inputs, self._results = closed.jaxpr.invars, closed.jaxpr.outvars
        self._arguments = dict(zip(self._inputs, arguments, strict=True))
        self._known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._makers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}

    def unchanged(self, like: Sequence) -> list[Any]:
        """The results that are unchanged arguments, such as frozen parameters; None for the others."""
        found = [None if isinstance(v, jex.Literal) else self._arguments.get(v) for v in self._results]
        stays = lambda x, y: x is not None and _compat.on_host(x) == (y is not None and _compat.on_host(y))
        return [x if stays(x, y) else None for x, y in zip(found, like, strict=True)]

    def give(self, positions: Sequence[int], values: Sequence) -> None:
        """Replaces some arguments from now on; values already used stay."""
        for i, x in zip(positions, values, strict=True):
            self._known.setdefault(self._inputs[i], fetched(x))

    def result(self, position: int) -> Any:
        """A result."""
        wanted = [self._results[position]]
        while wanted:
            v = wanted[-1]
            if self._is_there(v):
                wanted.pop()
            elif v in self._arguments:
                self._known[v] = fetched(self._arguments[v])
            elif missing := [x for x in self._makers[v].invars if not self._is_there(x)]:
                wanted += missing
            else:
                self._run(self._makers[v])
        return self._value(self._results[position])

    def _run(self, eqn: Any) -> None:
        found = _compat.bind(eqn, [self._value(v) for v in eqn.invars])
        self._known |= dict(zip(eqn.outvars, found, strict=True))

    def _is_there(self, v: Any) -> bool:
        return isinstance(v, jex.Literal) or v in self._known

    def _value(self, v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else self._known[v]


def _is_call(eqn: Any) -> bool:
    """Whether an equation is a `jax.jit` without further requirements."""
    asked = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return eqn.primitive.name == "jit" and not any(isinstance(x, jax.sharding.Sharding) for x in asked)


def _without_calls(closed: Any, arguments: Sequence) -> list:
    """The results of a program, with each jitted function in it traced equation by equation."""
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    value = lambda v: v.val if isinstance(v, jex.Literal) else known[v]
    for eqn in jaxpr.eqns:
        values = list(map(value, eqn.invars))
        found = _without_calls(eqn.params["jaxpr"], values) if _is_call(eqn) else _compat.bind(eqn, values)
        known |= dict(zip(eqn.outvars, found, strict=True))
    return list(map(value, jaxpr.outvars))
