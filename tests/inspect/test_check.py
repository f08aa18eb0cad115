"""`js.check` finds a fault that is put back: each mutation gave wrong numbers once, silently."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.engine import accumulate, gathers, gradient_sums, nnx_call
from jshard.engine.context import in_global_view
from jshard.engine.schedule.program_schedule import ScheduledUnit
from jshard.engine.weighted import MeanShares
from jshard.errors import CallError
from jshard.plans import placement
from tests.toy_models import Tower

WIDTH = 32
SMALL = js.PlacementPolicy(min_size=1)
X = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(np.float32)


class OneMatrix(nnx.Module):
    """One parameter, and what is computed with it."""

    def __init__(self, value: jax.Array, compute: Callable[[jax.Array, jax.Array], jax.Array]):
        self.w = nnx.Param(value)
        self.compute = compute

    def __call__(self, x):
        return self.compute(x, self.w[...])


def complex_model(**precision: Any) -> tuple[nnx.Module, dict[str, Any]]:
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH), jnp.complex64)
    model = OneMatrix(w, lambda x, w: jnp.abs(x @ w))
    annotate(model, js.MixedPrecision(**precision, cast_inputs=False, output_dtype="float32"))
    return model, {}


def codes_model(**precision: Any) -> tuple[nnx.Module, dict[str, Any]]:
    codes = jnp.arange(WIDTH * WIDTH, dtype=jnp.int32).reshape(WIDTH, WIDTH) * 7919 % 100003
    model = OneMatrix(codes, lambda x, codes: x * (codes.sum(1) % 97)[None])
    annotate(model, js.MixedPrecision(**precision, cast_inputs=False))
    return model, {}


def half_model() -> tuple[nnx.Module, dict[str, Any]]:
    """Stored in half precision; the gradients of its three microbatches are 256, 1 and -256."""
    model = OneMatrix(jnp.zeros((WIDTH, WIDTH), jnp.bfloat16), lambda x, w: x @ w.astype(jnp.float32))
    annotate(model, js.MixedPrecision(reduce_dtype="float32"))
    loss_fn = lambda model, x: model(x).sum(-1).mean()
    return model, {"accumulate": 3, "loss_fn": loss_fn, "x": half_batch(), "tolerance": 1e-2}


def half_batch() -> np.ndarray:
    x = np.zeros((24, WIDTH), np.float32)
    x[0::3], x[1::3], x[2::3] = 256, 1, -256
    return x


class LinenMatrix(nn.Module):
    value: Any
    compute: Callable[[jax.Array, jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x):
        return self.compute(x, self.param("w", lambda key: self.value()))


def linen_complex_model() -> tuple[nn.Module, dict[str, Any]]:
    value = lambda: jax.random.normal(jax.random.key(0), (WIDTH, WIDTH), jnp.complex64)
    plain = LinenMatrix(value, lambda x, w: jnp.abs(x @ w))
    model = js.fully_shard(
        plain,
        mesh=js.mesh(),
        placement=SMALL,
        mixed_precision=js.MixedPrecision(reduce_dtype="float32", wire_dtype="bfloat16"),
    )
    return model, {}


def linen_half_model() -> tuple[nn.Module, dict[str, Any]]:
    value = lambda: jnp.zeros((WIDTH, WIDTH), jnp.bfloat16)
    plain = LinenMatrix(value, lambda x, w: (x @ w.astype(jnp.float32)).sum(-1).mean())
    model = js.fully_shard(
        plain, mesh=js.mesh(), placement=SMALL, mixed_precision=js.MixedPrecision(reduce_dtype="float32")
    )
    return model, {"accumulate": 3, "x": half_batch(), "tolerance": 1e-2}


def cast_model() -> tuple[nnx.Module, dict[str, Any]]:
    """Cast after it was annotated."""
    model = OneMatrix(jnp.ones((WIDTH, WIDTH)) / 3, lambda x, w: x.astype(w.dtype) @ w)
    annotate(model, js.MixedPrecision())
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    return model, {"tolerance": 0.1}  # of sums in half precision


def annotate(model: nnx.Module, precision: js.MixedPrecision) -> None:
    js.fully_shard(model, mesh=js.mesh(), placement=SMALL, mixed_precision=precision)


def replicas_model() -> tuple[nnx.Module, dict[str, Any]]:
    """On a mesh without sharding, with a dim that is asked for."""
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh(replica=8, fsdp=1), placement=js.PlacementPolicy(shard_dim=0))
    return model, {}


def hybrid_model() -> tuple[nnx.Module, dict[str, Any]]:
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    js.fully_shard(model, mesh=js.mesh(replica=2, fsdp=4), placement=SMALL)
    return model, {}


class ScalesRows(nnx.Module):
    """A kernel that half precision would round, and scales beside it."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.full((WIDTH, WIDTH), (1 + 0.99 * 2**-8) / WIDTH))
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return (x * self.scale[...][None]) @ self.kernel[...]


def pieces_model() -> tuple[nnx.Module, dict[str, Any]]:
    """Kept in pieces, with kernels that half precision would round."""
    model = Tower([ScalesRows() for _ in range(5)])
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("*kernel",), cast_inputs=False)
    how = {"mesh": js.mesh(), "placement": SMALL, "mixed_precision": precision, "reshard_after_forward": 2}
    for block in model.blocks:
        js.fully_shard(block, **how)
    js.fully_shard(model, mesh=js.mesh())
    return model, {"tolerance": 6e-3}  # of the scales, whose gradients are in half precision


# ---- mutations: the faults, put back


Patch = pytest.MonkeyPatch


def _policy_for_every_dtype(patch: Patch) -> None:
    """A policy applied to every parameter, and the plan's dtype instead of the stored one."""
    patch.setattr(placement, "is_real_float", lambda dtype: True)


def _sums_in_the_stored_dtype(patch: Patch) -> None:
    patch.setattr(accumulate, "_dtype_of_sum", lambda stored, reduced: stored)


def _dtypes_of_the_annotation(patch: Patch) -> None:
    patch.setattr(nnx_call, "as_stored", lambda leaf, dtype, units: leaf)


def _summed_twice_over_replicas(patch: Patch) -> None:
    """The sum of small gradients covers all axes; the second step, replicas again."""
    after = gradient_sums.PartialSum.after

    def forgetful(self: gradient_sums.PartialSum, array: Any, axes: Any) -> gradient_sums.PartialSum:
        done = after(self, array, axes)
        return gradient_sums.PartialSum(done.array, tuple(axis for axis in self.axes if axis == "replica"))

    patch.setattr(gradient_sums.PartialSum, "after", forgetful)


def _never_summed_over_replicas(patch: Patch) -> None:
    of = gradient_sums.PartialSum.of
    without = lambda part: dataclasses.replace(part, axes=tuple(axis for axis in part.axes if axis != "replica"))
    patch.setattr(gradient_sums.PartialSum, "of", classmethod(lambda cls, gradient, mesh: without(of(gradient, mesh))))


def _dtypes_of_neighbours(patch: Patch) -> None:
    """The dtypes of all gathered operands, for the stored ones among them."""

    def dtypes(self: ScheduledUnit) -> list[Any]:
        avals = self.unit.program.in_avals
        return [avals[i].dtype for i in self.unit.gathered_operands()[::-1]][: len(self.positions)]

    patch.setattr(ScheduledUnit, "dtypes", property(dtypes))


Model = Callable[[], tuple[Any, dict[str, Any]]]
FAULTS: dict[str, tuple[Model, Callable[[Patch], None]]] = {
    "gradients multiplied by replica": (replicas_model, _summed_twice_over_replicas),
    "gradients not summed over replicas": (hybrid_model, _never_summed_over_replicas),
    "complex gradients reduced as real": (lambda: complex_model(reduce_dtype="float32"), _policy_for_every_dtype),
    "complex parameters gathered as real": (lambda: complex_model(param_dtype="bfloat16"), _policy_for_every_dtype),
    "complex parameters sent in 8 bits": (lambda: complex_model(gather_dtype="float8_e4m3fn"), _policy_for_every_dtype),
    "integers sent in 8 bits": (lambda: codes_model(gather_dtype="float8_e4m3fn"), _policy_for_every_dtype),
    "integers gathered in half precision": (lambda: codes_model(param_dtype="bfloat16"), _policy_for_every_dtype),
    "sums over microbatches in the stored dtype": (half_model, _sums_in_the_stored_dtype),
    "complex gradients of a Linen model reduced as real": (linen_complex_model, _policy_for_every_dtype),
    "sums of a Linen model in the stored dtype": (linen_half_model, _sums_in_the_stored_dtype),
    "the dtypes of the annotation after a cast": (cast_model, _dtypes_of_the_annotation),
    "pieces gathered in the dtype of a neighbour": (pieces_model, _dtypes_of_neighbours),
}


def forget_programs() -> None:
    """Units of equal parameters share programs, which would outlive a mutation."""
    gathers.gather_unit.clear_cache()
    gradient_sums.reduce_unit.clear_cache()


def check(make: Model) -> Any:
    forget_programs()
    model, settings = make()
    x = settings.pop("x", X)
    variables = [model.init(jax.random.key(0), x)] if isinstance(model, nn.Module) else []
    return js.check(model, *variables, x, **settings)


@pytest.mark.filterwarnings("ignore:Casting from complex")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_put_back_is_found(fault, monkeypatch):
    make, mutate = FAULTS[fault]
    check(make)
    mutate(monkeypatch)
    with pytest.raises(CallError, match="do not agree"):
        check(make)
    monkeypatch.undo()
    forget_programs()


def test_a_placement_along_one_piece_multiplies_no_gradient(monkeypatch):
    """What is left to sum does not follow from the placement, which once said otherwise."""
    asked = placement._choose
    monkeypatch.setattr(placement, "DEGREE_ONE", "")

    def along_one_piece(path: str, shape: tuple[int, ...], *rest: Any) -> tuple[int | None, str]:
        dim, because = asked(path, shape, *rest)
        return (0, "") if because == "" else (dim, because)

    monkeypatch.setattr(placement, "_choose", along_one_piece)
    model, _ = replicas_model()
    assert {leaf.placement.dim for leaf in js.plan(model).leaves} == {0}
    assert js.check(model, X).worst < 1e-5


# ---- what is compared


class Everything(nnx.Module):
    """Parameters of all kinds, state and dropout."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.phase = nnx.Param(jnp.exp(1j * jnp.arange(WIDTH)))
        self.index = nnx.Param(jnp.arange(WIDTH)[::-1])
        self.mask = nnx.Param(jnp.arange(WIDTH) % 2 == 0)

    def __call__(self, x):
        x = self.dropout(self.norm(self.linear(x)))[:, self.index[...]]
        return jnp.where(self.mask[...][None], x, 0) * self.phase[...][None]


def everything() -> nnx.Module:
    return js.fully_shard(Everything(), mesh=js.mesh(replica=2), placement=SMALL)


def test_complex_results_and_parameters_without_gradients_are_compared():
    report = js.check(everything(), X)
    assert set(report.gradients) == {"linear/kernel", "linear/bias", "norm/scale", "norm/bias", "phase"}
    assert set(report.state) == {"norm/mean", "norm/var"}
    assert report.worst < 1e-4


@pytest.mark.parametrize("sync", ["each", "last", "none"])
def test_accumulation_is_compared_with_means_over_microbatches(sync):
    loss_fn = lambda model, x: (jnp.abs(model(x)) ** 2).mean()
    report = js.check(everything(), X, loss_fn=loss_fn, accumulate=3, sync=sync)
    assert set(report.gradients) == {"linear/kernel", "linear/bias", "norm/scale", "norm/bias", "phase"}
    assert set(report.state) == {"norm/mean", "norm/var"}  # after the last microbatch
    assert report.worst < 1e-4


def test_an_imaginary_part_that_differs_is_found():
    def loss_fn(model: nnx.Module, x: jax.Array) -> jax.Array:
        out = model(x)
        return out if in_global_view() else out.conj()

    with pytest.raises(CallError, match="output"):
        js.check(everything(), X, loss_fn=loss_fn)


def test_another_dtype_is_found_unless_a_policy_asks_for_it():
    def loss_fn(model: nnx.Module, x: jax.Array) -> jax.Array:
        out = jnp.ones_like(x) * model.scale[...]
        return out if in_global_view() else out.astype(jnp.bfloat16)

    class Scale(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))

    model = js.fully_shard(Scale(), mesh=js.mesh())
    with pytest.raises(CallError, match="output output  nan"):
        js.check(model, X, loss_fn=loss_fn)
    half = js.fully_shard(Scale(), mesh=js.mesh(), mixed_precision=js.MixedPrecision(output_dtype="bfloat16"))
    assert js.check(half, X, loss_fn=loss_fn).worst < 1e-4


@pytest.mark.parametrize("sync", ["each", "last"])
def test_a_masked_mean_is_compared_over_microbatches_by_its_weights(sync, monkeypatch):
    mask = (jnp.arange(len(X)) % 4 < 1 + jnp.arange(len(X)) // 12).astype(jnp.float32)

    def loss_fn(model: nnx.Module, x: jax.Array, mask: jax.Array) -> js.WeightedMean:
        return js.WeightedMean(((model(x) ** 2).mean(-1) * mask).sum(), mask.sum())

    model = js.fully_shard(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), mesh=js.mesh(), placement=SMALL)
    assert js.check(model, X, mask, loss_fn=loss_fn).worst < 1e-4
    assert js.check(model, X, mask, loss_fn=loss_fn, accumulate=3, sync=sync).worst < 1e-4
    monkeypatch.setattr(
        MeanShares, "of", classmethod(lambda cls, before, weight: cls(before / (before + 1), 1 / (before + 1)))
    )
    with pytest.raises(CallError, match="gradient"):  # as means of the microbatches' means
        js.check(model, X, mask, loss_fn=loss_fn, accumulate=3, sync=sync)
