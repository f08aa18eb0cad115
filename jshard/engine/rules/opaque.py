"""Calls that are not partitioned inside (declared per example, kernels, a user's `shard_map`), and effects."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules import PARTIAL, Eqn, Partitioner, State, Value, array_bytes, free_dim, opened, rule, same
from jshard.errors import CallError
from jshard.plans.mesh import FSDP
from jshard.plans.placement import axes_of, spec_over

if TYPE_CHECKING:
    from jshard.engine.example_call import Body


@rule("per_example", converts_partial=True)
def per_example(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The function on the examples of this shard."""
    body: Body = eqn.params["body"]
    sizes = [p.full_shape(v)[d] for v, d in zip(values, body.ins, strict=True) if d is not None]
    own = [values[k] for k in body.from_forward]
    if not all(map(p.divides, sizes)) or (own and not all(v.is_split for v in own)):
        return None  # forward was computed whole, or this cannot be split
    xs = [p.whole(v).x if d is None else p.split(v, d).x for v, d in zip(values, body.ins, strict=True)]
    try:
        found = body.run(*xs)
    except CallError:
        raise
    except Exception as error:
        raise CallError(
            f"A function declared with js.per_example cannot run on the {sizes[0] // p.degree} examples of a shard.",
            where=[body.name, _compat.user_place(eqn)],
            why=f"{type(error).__name__}: {error}\nIt ran on all {sizes[0]} of the batch; each of the {p.degree} "
            "data shards runs it on its part.",
            do="y = fn(x)  # instead of js.per_example(fn)(x): every device computes it for the whole batch\n"
            "Or write fn for any number of examples.",
        ) from error
    _check_shapes(p, eqn, body, found)
    return [Value(x, state) for x, state in zip(found, body.outs, strict=True)]


def _check_shapes(p: Partitioner, eqn: Eqn, body: "Body", found: Any) -> None:
    wanted = [
        tuple(n // p.degree if i == state else n for i, n in enumerate(atom.aval.shape))
        for atom, state in zip(eqn.outvars, body.outs, strict=True)
    ]
    wrong = [f"{x.shape} instead of {shape}" for x, shape in zip(found, wanted, strict=False) if x.shape != shape]
    if wrong or len(found) != len(wanted):
        why = f"on the examples of one of {p.degree} data shards: {', '.join(wrong) or f'{len(found)} results'}."
        raise body.without_rows(why, _compat.user_place(eqn))


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", converts_partial=True)
def cudnn_attention(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """CuDNN attention: operands with a batch have it as dim 0.

    Pages of keys and values belong to no example. Dropout's mask depends on the position in the batch: whole. Queries
    that are split along their heads stay split. Over axes other than the data axes it runs on a part of the heads, as
    split by `tensor`.
    """
    query, batch = values[0], p.full_shape(values[0])[0]
    paged = any(v.ndim == 4 for v in values[8:10])
    if eqn.params["dropout_rate"] or query.ndim != 4:
        return None
    run = lambda *xs: p.bind(eqn, list(xs))
    run = _on_heads(eqn, run) if p.is_last else run
    ins, outs, sizes = _heads(eqn)
    if query.state == ins[0] and not paged and all(map(p.divides, sizes)):
        found = run(*[p.whole(v).x if d is None else p.split(v, d).x for v, d in zip(values, ins, strict=True)])
        return [Value(x, d) for x, d in zip(found, outs, strict=True)]
    if not p.divides(batch):
        return None
    has_batch = [
        0 not in v.shape and v.ndim > 0 and p.full_shape(v)[0] % batch == 0 and not (paged and k in (1, 2))
        for k, v in enumerate(values)
    ]
    states: list[State] = [0] * len(eqn.outvars)
    if len(states) == 4 and not has_batch[3]:  # a bias for all examples: its gradient is their sum
        states[3] = PARTIAL
    xs = [p.split(v, 0).x if each else p.whole(v).x for v, each in zip(values, has_batch, strict=True)]
    return [Value(x, state) for x, state in zip(run(*xs), states, strict=True)]


def _on_heads(eqn: Eqn, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """The call on a part of the heads, over axes that the compiler splits arrays over: it cannot split this one.

    If the devices do not divide the heads, each has all of them.
    """
    axes = _compat.automatic_axes()
    if not axes:
        return run
    *dims, sizes = _heads(eqn)
    over = None if any(n % math.prod(axes.values()) for n in sizes) else tuple(axes)
    ins, outs = ([P() if d is None else P(*[None] * d, over) for d in group] for group in dims)
    return jax.shard_map(run, in_specs=tuple(ins), out_specs=outs, axis_names=set(axes), check_vma=False)


def _heads(eqn: Eqn) -> tuple[list[int | None], list[int | None], list[int]]:
    """The dims of the heads of operands and of results, and their sizes."""
    in_array = 2 - eqn.params["layout"]  # (B, T, H, K), or (B, H, T, K)

    def dim(k: int, shape: tuple[int, ...]) -> int | None:
        """The dim of the heads: dim 1 for the bias, the sums of forward, and their gradients."""
        if 0 in shape or 4 <= k < 10:  # lengths and pages
            return None
        return 1 if k == 3 or len(shape) == 3 else in_array

    shapes = [[a.aval.shape for a in atoms] for atoms in (eqn.invars, eqn.outvars)]
    dims = [[dim(k, shape) for k, shape in enumerate(group)] for group in shapes]
    sizes = [shape[d] for group, of in zip(shapes, dims, strict=True) for shape, d in zip(group, of, strict=True) if d]
    return dims[0], dims[1], sizes


@rule("scaled_matmul_wrapper", "scaled_matmul")
def scaled_matmul(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """(batch, rows, contracted) times (batch, columns, contracted), each with its scales: batch or rows."""
    left, right, *scales = values
    if 0 in (left.state, right.state) and p.divides(p.full_shape(left)[0]):
        return same(p, eqn, [p.split(v, 0) for v in values], 0)
    if left.state == 1 and len(scales) == 2 and p.divides(p.full_shape(scales[0])[1]):
        return same(p, eqn, [left, p.whole(right), p.split(scales[0], 1), p.whole(scales[1])], 1)
    return None


@rule("custom_partitioning")
def custom_partitioning(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Its function for whole arrays, inlined, as JAX itself runs it where all axes are manual."""
    return p.run(*opened(eqn.params["call"]), values)


Dims = tuple[tuple[str, ...], ...]
"""For each dim the axes that it is split over, outermost first; those of degree 1 split nothing and are left out."""


@rule("shard_map", takes_partial=True)
def shard_map(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The user's `shard_map` on a data shard."""
    return _Inner(p, eqn).run(values)


class _Inner:
    """The user's `shard_map`, which may be over the region's axes (`data`) and over others, all of degree above 1."""

    def __init__(self, p: Partitioner, eqn: Eqn) -> None:
        self.p, self.eqn, params = p, eqn, eqn.params
        theirs, here = dict(params["mesh"].shape), jax.sharding.get_abstract_mesh()
        sizes = self.sizes = dict(here.shape)
        if wrong := [f"{a} of degree {theirs[a]}" for a in params["newly_manual_axes"] if sizes.get(a) != theirs[a]]:
            ours = ", ".join(f"{a}={n}" for a, n in sizes.items())
            do = "jax.shard_map(f, mesh=mesh, ...)  # the mesh that js.fully_shard was given"
            if FSDP in theirs:  # only then can parameters be sharded over it
                do = f"js.fully_shard(model, mesh=mesh)  # the mesh of the shard_map; or, in the model:\n{do}"
            raise CallError(
                "A shard_map inside the model uses a different mesh than the model.",
                where=_compat.user_place(eqn),
                why=f"it is over {', '.join(sorted(wrong))}; the model is over {ours}.",
                do=do,
            )
        specs = (*params["in_specs"], *params["out_specs"])
        if any(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None) for spec in specs):
            raise CallError(
                "A shard_map inside the model has an unreduced argument or result.",
                where=_compat.user_place(eqn),
                why="an unreduced array is a sum not computed yet, and the engine cannot cut one into data shards.",
                do="y = jax.lax.psum(y, axis)  # in the function, and out_specs without unreduced",
            )
        manual = [a for a in params["newly_manual_axes"] if sizes[a] > 1]
        self.data = tuple(a for a in p.axes if sizes[a] > 1)
        self.other = tuple(a for a in here.axis_names if a in manual and a not in p.axes)
        self.is_over_data = any(a in self.data for a in manual)
        dims = [self._dims(spec, a.aval.ndim) for spec, a in zip(specs, (*eqn.invars, *eqn.outvars), strict=True)]
        self.ins, self.outs = dims[: len(eqn.invars)], dims[len(eqn.invars) :]

    def _dims(self, spec: P, ndim: int) -> Dims:
        """The axes of each dim by a spec; raises for a dim that is split over a data axis inside another axis."""
        dims = tuple(tuple(a for a in axes_of(dim) if self.sizes[a] > 1) for dim in spec) + ((),) * (ndim - len(spec))
        for dim in dims:
            data_first = tuple(sorted(dim, key=lambda a: a not in self.data))
            if [a in self.data for a in dim] != [a in self.data for a in data_first]:
                raise CallError(
                    "A shard_map inside the model splits a dim over a data axis inside another axis.",
                    where=_compat.user_place(self.eqn),
                    why=f"{spec}: over {' then '.join(dim)}, where the batch is split over {', '.join(self.data)}.",
                    do=f"jax.P({data_first!r})  # the data axes first",
                )
        return dims

    def run(self, values: list[Value]) -> list[Value]:
        """Over data axes the body runs unchanged, on the parts by the specs; else it is split like any program."""
        body = _compat.without_varying(self.eqn.params["jaxpr"], ())
        if self.is_over_data:
            xs = [self._local(v, dims) for v, dims in zip(values, self.ins, strict=True)]
            return [self._result(x, dims) for x, dims in zip(self._nested(body)(*xs), self.outs, strict=True)]
        values = [v if v.is_partial else self.p.land(v) for v in values]  # the body computes the sums that it needs
        values = [self._apart(v, dims) for v, dims in zip(values, self.ins, strict=True)]
        states: list[State] = []

        def on_shard(*xs: Any) -> list[Any]:
            p, given = self.p, [v.with_array(x) for v, x in zip(values, xs, strict=True)]
            program = jax.make_jaxpr(body)(*[_full(p, v) for v in given])
            found = p.run(program.jaxpr, program.consts, given)
            found = [v if v.is_partial else p.land(v) for v in found]
            found = [self._apart(v, dims) for v, dims in zip(found, self.outs, strict=True)]
            states[:] = [v.state for v in found]
            return [v.x for v in found]

        found = self._nested(on_shard)(*[v.x for v in values])
        return [Value(x, state) for x, state in zip(found, states, strict=True)]

    def _nested(self, body: Callable) -> Callable[..., Sequence[Any]]:
        if not self.other:
            return body
        ins, outs = ([spec_over(self.other, dims) for dims in of] for of in (self.ins, self.outs))
        axes = set(self.other)
        return jax.shard_map(body, in_specs=tuple(ins), out_specs=outs, axis_names=axes, check_vma=False)

    def _apart(self, value: Value, dims: Dims) -> Value:
        """The value split along a dim that is not also split over the user's axes: those are outside the region's.

        JAX passes what backward needs of a `shard_map` with all its axes on dim 0, which are the examples as a rule.
        """
        if not value.is_split or not dims[value.dim]:
            return value
        dim = free_dim(self.p, self.p.full_shape(value), [i for i, axes in enumerate(dims) if axes])
        return self.p.whole(value) if dim is None else self.p.split(value, dim)

    def _local(self, value: Value, dims: Dims) -> Any:
        """A shard's part by `in_specs`, over the data axes."""
        own = self._over_data(dims)
        if [*own.values()] == [self.data]:
            return self.p.split(value, next(iter(own))).x
        x = self.p.whole(value).x
        for dim, over in own.items():
            size = x.shape[dim] // math.prod(self.sizes[a] for a in over)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(over) * size, size, dim)
        return x

    def _result(self, x: Any, dims: Dims) -> Value:
        """The value of which a shard has a part by `out_specs`; unsplit values are the same on all shards."""
        own = self._over_data(dims)
        if [*own.values()] == [self.data]:
            return Value(x, next(iter(own)))
        for dim, over in own.items():
            with self.p.sends("whole", self.eqn, array_bytes(x) * math.prod(self.sizes[a] for a in over)):
                x = lax.all_gather(x, over, axis=dim, tiled=True)
        return Value(x)

    def _over_data(self, dims: Dims) -> dict[int, tuple[str, ...]]:
        """The dims that are split over data axes; a dim over all of them is split like in the region."""
        own = {dim: tuple(a for a in over if a in self.data) for dim, over in enumerate(dims)}
        return {dim: over for dim, over in own.items() if over}


def _full(p: Partitioner, value: Value) -> jax.ShapeDtypeStruct:
    """The view that a program was written for: whole over the data axes, a part over the others."""
    return jax.ShapeDtypeStruct(p.full_shape(value), value.x.dtype)


# ---- collectives over axes that are not the region's, and over dims, as from a vmap with a named axis


_OVER_DIMS: dict[str, Callable[..., Any]] = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


@rule(*_OVER_DIMS, takes_partial=True)
def reduction(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Over dims first, which is what `jax.vmap(axis_name=...)` leaves. Then of each element; sums may stay open."""
    dims = tuple(a for a in eqn.params["axes"] if isinstance(a, int))
    names = tuple(a for a in eqn.params["axes"] if not isinstance(a, int))
    if dims:
        reduce = lambda *xs: [_OVER_DIMS[eqn.primitive.name](x, dims) for x in xs]
        program = jax.make_jaxpr(reduce)(*[_full(p, v) for v in values])
        values = p.run(program.jaxpr, program.consts, values)
    if not names:
        return values
    if eqn.primitive.name != "psum":
        values = [p.settle(v) for v in values]
    return [v.with_array(x) for v, x in zip(values, p.bind(eqn, [v.x for v in values], axes=names), strict=True)]


@rule("ppermute", "pbroadcast", "layout_constraint", takes_partial=True)
def linear_in_place(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Elementwise and linear: all states stay."""
    return [v.with_array(x) for v, x in zip(values, p.bind(eqn, [v.x for v in values]), strict=True)]


@rule("all_gather", "reduce_scatter", "all_to_all")
def moving_collective(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Split along a dim that it leaves alone: it stays split."""
    params, (value,) = eqn.params, values
    names = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
    dims = [params[name] for name in names if name in params]
    if eqn.primitive.name == "all_gather" and not params["tiled"]:
        return same(p, eqn, values, value.dim + (dims[0] <= value.dim))
    if value.dim in dims:
        return None
    if not params["tiled"]:  # the dim is removed; all_to_all adds another
        return None if len(dims) > 1 else same(p, eqn, values, value.dim - (dims[0] < value.dim))
    return same(p, eqn, values, value.dim)


# ---- effects of a program besides computing: constraints, memories, barriers, callbacks


@rule("sharding_constraint", "reshard", takes_partial=True)
def constraint(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """`with_sharding_constraint`, `reshard`, and Flax's constraints by logical axes: without the data axes."""
    sharding = eqn.params["sharding" if "sharding" in eqn.params else "dst_sharding"]
    free = eqn.params.get("unconstrained_dims", frozenset())
    return [placed(v, sharding, frozenset(free)) for v in values]


@rule("device_put", takes_partial=True)
def device_put(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """A memory, or a sharding without the data axes; a single device has no meaning here."""
    return [placed(v, to) for v, to in zip(values, eqn.params["devices"], strict=True)]


def placed(value: Value, to: Any, free: frozenset[int] = frozenset()) -> Value:
    """A value at a place (a memory, a sharding, a device); unchanged if that has no meaning on a shard.

    Its state stays. The user leaves the dims `free` to the compiler.
    """
    x, memory = value.x, to if isinstance(to, jax.memory.Space) else None
    if kind := getattr(to, "memory_kind", None):
        memory = jax.memory.Space.Host if kind.endswith("_host") else jax.memory.Space.Device
    if isinstance(to, NamedSharding) and (axes := _compat.automatic_axes()):
        dims: list[Any] = [*to.spec, *[None] * (value.ndim - len(to.spec))]
        for i, dim in enumerate(dims):  # without the axes that are not the compiler's
            if i in free or dim is P.UNCONSTRAINED:
                dims[i] = P.UNCONSTRAINED
            else:
                dims[i] = tuple(a for a in axes_of(dim) if a in axes) or None
        x = lax.with_sharding_constraint(x, P(*dims))
    if memory is not None and (memory == jax.memory.Space.Host) != _compat.on_host(x):
        x = jax.device_put(x, memory)
    return value if x is value.x else value.with_array(x)


@rule("optimization_barrier", takes_partial=True)
def optimization_barrier(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """States stay; known values need not wait."""
    values = [p.cross(v) for v in values]
    tied = iter(lax.optimization_barrier([v.x for v in values if not v.is_known]))
    return [v if v.is_known else v.with_array(next(tied)) for v in values]


@rule("debug_callback", "debug_print", "io_callback", "pure_callback", takes_partial=True)
def callback(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Called once, on the first shard, with whole values."""
    name, params = eqn.primitive.name, eqn.params
    is_ordered = params.get("ordered") or "Ordered" in type(params.get("effect")).__name__
    if p.degree > 1 and is_ordered and name.startswith("debug"):
        raise CallError(
            "An ordered debug callback inside the model cannot run on several devices.",
            where=_compat.user_place(eqn),
            why=f"the model runs on {p.degree} data shards, and JAX orders debug callbacks on one device only.",
            do="jax.experimental.io_callback(f, None, x, ordered=True)  # or ordered=False",
        )
    xs = [p.whole(v).x for v in values]
    nothing = lambda *xs: [jnp.zeros(a.aval.shape, a.aval.dtype) for a in eqn.outvars]
    found = lax.cond(p.shard == 0, lambda *xs: p.bind(eqn, xs), nothing, *xs)
    return [_of_first_shard(p, eqn, x) for x in found]


@rule("rng_uniform", takes_partial=True)
def rng_uniform(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """Numbers of the device's own generator: every shard gets those of the first shard."""
    return [_of_first_shard(p, eqn, x) for x in p.bind(eqn, [p.whole(v).x for v in values])]


def _of_first_shard(p: Partitioner, eqn: Eqn, x: Any) -> Value:
    with p.sends("move", eqn, array_bytes(x) * p.degree):
        return Value(p.gather(x[None], 0)[0])
