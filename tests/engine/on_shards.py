"""A function on the shards of a mesh, by the partitioner alone, beside one device: its results and its gradients."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jshard.engine.mixing import Mixing
from jshard.engine.partitioner import Partitioner
from jshard.engine.rules import State, Value
from tests.parity import numbers_of

AXES = ("replica", "fsdp")


def mesh_of(replica: int, fsdp: int, tensor: int = 1) -> Mesh:
    """A mesh of data axes, and an axis that stays the compiler's."""
    shape, axes = ((replica, fsdp), AXES) if tensor == 1 else ((replica, fsdp, tensor), (*AXES, "tensor"))
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


ONE_BY_8, TWO_BY_4 = (1, 8), (2, 4)


@dataclasses.dataclass
class Found:
    """What a function gave on the shards.

    Attributes:
        outs: its results, flat and whole.
        grads: gradients of its floating arguments for random cotangents, flat.
        moved: collectives, forward and backward.
        text: StableHLO of both.
        compiled: the program, if it was compiled.
    """

    outs: list[jax.Array]
    grads: list[jax.Array]
    moved: list[Mixing]
    text: str
    compiled: Any = None


def batch_dims(args: Sequence[Any], batch: int) -> list[int | None]:
    """Arguments whose dim 0 has the size of the batch are split along it."""
    return [0 if x.ndim and x.shape[0] == batch else None for x in args]


def on_shards(
    fn: Callable, args: Sequence[Any], mesh: Mesh, *, batch: int = 32, gradients: bool = True, run: bool = True
) -> Found:
    """Runs a function as the engine does: traced and differentiated in global view, each program on the shards.

    Without `run` it is traced for the shards, and neither compiled nor run.
    """
    args = [jnp.asarray(x) for x in args]
    region = _Region(mesh, batch)
    dims = batch_dims(args, batch)
    if not gradients:
        closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(fn(*xs)))(*args)
        once = lambda *xs: region.run(closed, xs, dims)[0]
        if not run:
            return Found([], [], region.moved, str(jax.make_jaxpr(once)(*args)))
        lowered = jax.jit(once).lower(*args)
        compiled = lowered.compile()
        return Found(list(compiled(*args)), [], region.moved, lowered.as_text(), compiled)
    floats, num_outs, tree = [is_float(x) for x in args], [], []

    def forward(*xs: Any) -> list[Any]:
        outs, vjp, others = jax.vjp(lambda *fs: _outs(fn, _merge(floats, fs, xs)), *_pick(floats, xs), has_aux=True)
        residuals, structure = jax.tree.flatten(vjp)
        num_outs[:], tree[:] = [len(outs), len(others)], [structure]
        return [*outs, *others, *residuals]

    forward_program = jax.make_jaxpr(forward)(*args)
    n = sum(num_outs)

    def both(*xs: Any) -> tuple[list[Any], list[Any]]:
        found, states = region.run(forward_program, xs, dims)
        cotangents = cotangents_for(found[: num_outs[0]])
        operands = [*found[n:], *cotangents]
        backward = lambda *ys: jax.tree.unflatten(tree[0], ys[: len(found) - n])(list(ys[len(found) - n :]))
        program = jax.make_jaxpr(backward)(*operands)
        grads, _ = region.run(program, operands, [*states[n:], *states[: num_outs[0]]])
        return found[:n], grads

    if not run:
        return Found([], [], region.moved, str(jax.make_jaxpr(both)(*args)))
    lowered = jax.jit(both).lower(*args)
    compiled = lowered.compile()
    return Found(*compiled(*args), region.moved, lowered.as_text(), compiled)


@dataclasses.dataclass
class Alone:
    """What one program gave, with its results whole on every device.

    Attributes:
        outs: of each result the copies of all devices, one after the other.
        states: in which state each result came.
        moved: collectives before that.
        lowered: the program.
    """

    outs: list[jax.Array]
    states: list[State]
    moved: list[Mixing]
    lowered: Any


def run_alone(fn: Callable, args: Sequence[Any], mesh: Mesh, *, batch: int, gradients: Collection[int] = ()) -> Alone:
    """Runs a function that is differentiated already, if at all; `gradients` says which results are gradients."""
    traced, found = jax.make_jaxpr(fn)(*args), Alone([], [], [], None)
    dims, degree = batch_dims([jnp.asarray(x) for x in args], batch), mesh.shape["replica"] * mesh.shape["fsdp"]

    def on_shard(*xs: Any) -> list[Any]:
        p = Partitioner(AXES, degree, batch_sizes={batch})
        outs = p.run(traced.jaxpr, traced.consts, list(map(Value, xs, dims)), gradients=gradients)
        found.states, found.moved = [v.state for v in outs], p.moved
        return [p.whole(v).x[None] for v in outs]

    specs: Any = {"in_specs": tuple(map(_spec, dims)), "out_specs": P(AXES), "check_vma": False}
    found.lowered = jax.jit(jax.shard_map(on_shard, mesh=mesh, axis_names=set(AXES), **specs)).lower(*args)
    found.outs = found.lowered.compile()(*args)
    return found


def one_device(fn: Callable, args: Sequence[Any], *, gradients: bool = True) -> tuple[list[jax.Array], list[jax.Array]]:
    """The same of one device."""
    args = [jnp.asarray(x) for x in args]
    if not gradients:
        return jax.tree.leaves(jax.jit(fn)(*args)), []
    floats = [is_float(x) for x in args]

    @jax.jit
    def both(*fs: Any) -> Any:
        outs, vjp, others = jax.vjp(lambda *fs: _outs(fn, _merge(floats, fs, args)), *fs, has_aux=True)
        return [*outs, *others], list(vjp(cotangents_for(outs)))

    return both(*_pick(floats, args))


def check(fn: Callable, *args: Any, **how: Any) -> Found:
    """Asserts that results and gradients on 2 x 4 devices are those of one; what was found."""
    return check_on(mesh_of(*TWO_BY_4), fn, *args, **how)


def check_on(
    mesh: Mesh, fn: Callable, *args: Any, tolerance: float = 2e-6, batch: int = 32, gradients: bool = True
) -> Found:
    """The same on any mesh."""
    outs, grads = one_device(fn, args, gradients=gradients)
    found = on_shards(fn, args, mesh, batch=batch, gradients=gradients)
    for kind, wanted, got in (("result", outs, found.outs), ("gradient", grads, found.grads)):
        assert len(wanted) == len(got)
        for k, (a, b) in enumerate(zip(wanted, got, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype, (kind, k, a.shape, b.shape)
            assert difference(a, b) <= tolerance, (dict(mesh.shape), kind, k, difference(a, b), found.moved)
    return found


def difference(a: Any, b: Any) -> float:
    """The largest difference, in units of the largest element."""
    a, b = (np.asarray(numbers_of(x)).astype(np.float64) for x in (a, b))
    return float(np.abs(a - b).max(initial=0) / (np.abs(a).max(initial=0) + 1e-30))


def cotangents_for(outs: Sequence[jax.Array]) -> list[jax.Array]:
    """Numbers of both signs, other ones for each element."""
    return [jnp.asarray(np.cos(np.arange(x.size) * 1.7 + 0.3).reshape(x.shape) + 0.2, x.dtype) for x in outs]


class _Region:
    def __init__(self, mesh: Mesh, batch: int) -> None:
        self.mesh, self.batch = mesh, batch
        self.degree = mesh.shape["replica"] * mesh.shape["fsdp"]
        self.moved: list[Mixing] = []

    def run(self, closed: Any, xs: Sequence[Any], states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """A program on the shards; its results are whole or split, as the states say that come with them."""
        found: list[Any] = []
        specs: list[P] = []

        def on_shard(*xs: Any) -> list[Any]:
            p = Partitioner(AXES, self.degree, batch_sizes={self.batch})
            values = p.run(closed.jaxpr, closed.consts, [Value(x, s) for x, s in zip(xs, states, strict=True)])
            values = [p.materialize(p.reduce_partial(v)) for v in values]
            self.moved += p.moved
            found[:] = [v.state for v in values]
            specs[:] = [_spec(v.state) for v in values]
            return [v.x for v in values]

        region = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=tuple(map(_spec, states)),
            out_specs=specs,
            axis_names=set(AXES),
            check_vma=False,
        )
        return list(region(*xs)), list(found)


def _spec(dim: Any) -> P:
    return P() if dim is None else P(*[None] * dim, AXES)


def _outs(fn: Callable, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    outs = jax.tree.leaves(fn(*args))
    return [x for x in outs if is_float(x)], [x for x in outs if not is_float(x)]


def _merge(which: Sequence[bool], floats: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    given = iter(floats)
    return [next(given) if f else x for f, x in zip(which, args, strict=True)]


def _pick(which: Sequence[bool], xs: Sequence[Any]) -> list[Any]:
    return [x for x, f in zip(xs, which, strict=True) if f]


def is_float(x: Any) -> bool:
    """Whether an array may have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
