"""A policy of dtypes is about real floats: every other parameter is stored, sent and computed with as it is."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.api.loss_scale import LossScale, scaled_value_and_grad
from tests.parity import flat
from tests.toy_models import TwoLayers

WIDTH = 32
SMALL = js.PlacementPolicy(min_size=1)
# Everything that a policy can ask for at once; inputs are left alone, so that only parameters can be cast.
ALL = js.MixedPrecision(
    param_dtype="bfloat16",
    reduce_dtype="float32",
    gather_dtype="float8_e4m3fn",
    wire_dtype="bfloat16",
    output_dtype="float32",
    cast_inputs=False,
)
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def complex_matrix() -> jax.Array:
    return (normal(0, WIDTH, WIDTH) + 1j * normal(1, WIDTH, WIDTH)).astype(jnp.complex64)


OTHERS: dict[str, Callable[[], jax.Array]] = {
    "complex": complex_matrix,
    "codes": lambda: jnp.arange(WIDTH * WIDTH, dtype=jnp.int32).reshape(WIDTH, WIDTH) * 7919 % 100003,
    "nibbles": lambda: (jnp.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 15 - 7).astype(jnp.int4),
    "signs": lambda: (jnp.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 3 - 1).astype(jnp.int2),
    "mask": lambda: jnp.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) % 3 == 0,
    "eighths": lambda: normal(2, WIDTH, WIDTH).astype(jnp.float8_e4m3fn),
    "keys": lambda: jax.random.split(jax.random.key(3), WIDTH),
}
DTYPES = {
    "complex": "complex64",
    "codes": "int32",
    "nibbles": "int4",
    "signs": "int2",
    "mask": "bool",
    "eighths": "float8_e4m3fn",
}


def parts(x: jax.Array, w: jax.Array, others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Results of which each reads one parameter."""
    noise = jax.vmap(jax.random.uniform)(others["keys"])
    return {
        "real": x @ w,
        "complex": jnp.abs(x @ others["complex"]),
        "codes": x * (others["codes"].sum(1) % 97)[None],
        "nibbles": x @ others["nibbles"].astype(x.dtype),
        "signs": x @ others["signs"].astype(x.dtype),
        "mask": x * jnp.where(others["mask"], 1.0, -1.0).sum(0)[None],
        "eighths": x * others["eighths"].astype(x.dtype).sum(0)[None],
        "keys": x * noise[None],
    }


class Mixed(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(normal(4, WIDTH, WIDTH))
        self.others = nnx.Dict({name: nnx.Param(make()) for name, make in OTHERS.items()})

    def __call__(self, x):
        return parts(x, self.w[...], {name: param[...] for name, param in self.others.items()})


class LinenMixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", lambda key: normal(4, WIDTH, WIDTH))
        others = {name: self.param(name, lambda key, make=make: make()) for name, make in OTHERS.items()}
        return parts(x, w, others)


def loss_of(outputs: dict[str, jax.Array]) -> jax.Array:
    """A loss in which the gradient of the complex matrix depends on no other parameter."""
    return (outputs["complex"] ** 3).mean() + (outputs["real"] ** 2).mean()


MODES = {"one": {}, "each": {"accumulate": 2, "sync": "each"}, "last": {"accumulate": 2, "sync": "last"}}


def in_nnx(model: Mixed, **settings: Any) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    """Outputs, and gradients of the matrices."""
    trained = nnx.Any(nnx.PathContains("w"), nnx.PathContains("complex"))
    loss_fn = lambda model, x: loss_of(model(x))

    @nnx.jit
    def run(model: Mixed, x: jax.Array) -> Any:
        if settings:
            grads = js.value_and_grad(loss_fn, wrt=trained, **settings)(model, x)[1]
        else:
            grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, trained))(model, x)
        return model(x), grads

    outputs, grads = run(model, X)
    return outputs, {path.split("/")[-1]: g for path, g in flat(grads).items()}


def is_matrix(path: tuple[str, ...], _: Any) -> bool:
    return path[-1] in ("w", "complex")


def in_linen(model: nn.Module, **settings: Any) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    params = model.init(jax.random.key(0), X)["params"]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return loss_of(model.apply({"params": params}, x))

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        outputs = model.apply({"params": params}, x)
        if settings:
            _, grads = js.value_and_grad(loss_fn, model=model, wrt=is_matrix, **settings)(params, x)
            return outputs, {name: grads[name] for name in ("w", "complex")}
        of_matrices = lambda trained: loss_fn({**params, **trained}, x)
        return outputs, jax.grad(of_matrices)({name: params[name] for name in ("w", "complex")})

    outputs, grads = run(params, X)
    return outputs, {name: np.asarray(g) for name, g in grads.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_no_policy_changes_what_is_not_a_real_float(kind, mode):
    if kind == "nnx":
        model = js.fully_shard(Mixed(), mesh=js.mesh(replica=2), placement=SMALL, mixed_precision=ALL)
        wanted, wanted_grads = in_nnx(Mixed())
        outputs, grads = in_nnx(model, **MODES[mode])
    else:
        model = js.fully_shard(LinenMixed(), mesh=js.mesh(replica=2), placement=SMALL, mixed_precision=ALL)
        wanted, wanted_grads = in_linen(LinenMixed())
        outputs, grads = in_linen(model, **MODES[mode])
    for name in OTHERS:
        np.testing.assert_allclose(outputs[name], wanted[name], rtol=2e-6, atol=2e-6, err_msg=name)
    assert (np.asarray(outputs["real"]) != wanted["real"]).any()  # the policy is at work
    scale = np.abs(wanted_grads["complex"]).max()
    assert grads["complex"].dtype == np.complex64
    assert np.abs(grads["complex"].imag).max() > scale / 2
    np.testing.assert_allclose(grads["complex"], wanted_grads["complex"], atol=2e-6 * scale)


def test_a_plan_has_the_dtypes_of_what_is_not_a_real_float():
    model = js.fully_shard(Mixed(), mesh=js.mesh(), placement=SMALL, mixed_precision=ALL)
    plan = js.plan(model)
    placed = {leaf.path.split("/")[-1]: leaf.placement for leaf in plan.leaves}
    assert placed.keys() == {"w", *DTYPES}  # random keys have no bytes to split, and no place in a plan
    for name, dtype in DTYPES.items():
        place = placed[name]
        assert (place.dtype, place.gathered_dtype, place.gather_wire, place.reduce_wire) == (dtype, dtype, "", "")
        assert place.dim is not None
    assert placed["eighths"].reduce_dtype == "float32"  # a sum in 8 bits would round after each addend
    assert placed["complex"].reduce_dtype == "complex64"
    assert "complex64" in js.explain(model).to_json()


def test_the_audit_counts_other_dtypes():
    model = js.fully_shard(Mixed(), mesh=js.mesh(replica=2), placement=SMALL)
    trained = nnx.Any(nnx.PathContains("w"), nnx.PathContains("complex"))
    loss_fn = lambda model, x: sum(part.sum() for part in model(x).values())
    step = nnx.jit(lambda model, x: nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, trained))(model, x))
    audit = js.audit(step.lower(model, X).lowered, plan=js.plan(model, wrt=trained))
    assert audit.ok, audit.differences
    assert {row.dtype for row in audit.rows if row.kind == "all-gather"} >= {"c64", "s32", "pred"}


# Sums over microbatches.


class Stored(nnx.Module):
    def __init__(self, dtype: Any):
        self.w = nnx.Param(jnp.zeros((WIDTH, WIDTH), dtype))

    def __call__(self, x):
        return x @ self.w[...].astype(jnp.float32)


class LinenStored(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.zeros, (WIDTH, WIDTH), self.dtype).astype(jnp.float32)


def microbatches_of(*values: float) -> np.ndarray:
    """A batch of which each microbatch has one value."""
    x = np.zeros((8 * len(values), WIDTH), np.float32)
    for i, value in enumerate(values):
        x[i :: len(values)] = value
    return x


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_microbatches_are_summed_in_the_reduce_dtype(kind, sync):
    x = microbatches_of(256, 1, -256)  # in bfloat16, 256 + 1 is 256
    settings = {"accumulate": 3, "sync": sync}
    how = {"mesh": js.mesh(), "placement": SMALL, "mixed_precision": js.MixedPrecision(reduce_dtype="float32")}
    if kind == "nnx":
        model = js.fully_shard(Stored(jnp.bfloat16), **how)
        grad_fn = js.value_and_grad(lambda model, x: model(x).sum(-1).mean(), **settings)
        (grad,) = jax.tree.leaves(nnx.jit(lambda model, x: grad_fn(model, x)[1])(model, x))
    else:
        model = js.fully_shard(LinenStored(jnp.bfloat16), **how)
        params = model.init(jax.random.key(0), x)
        loss_fn = lambda params, x: model.apply(params, x).sum(-1).mean()
        (grad,) = jax.tree.leaves(jax.jit(js.value_and_grad(loss_fn, model=model, **settings))(params, x)[1])
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(grad), 1 / 3, rtol=2**-8)


# A model that is cast after it was annotated.


def cast(module: nnx.Module, dtype: Any) -> None:
    nnx.update(module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param)))


def two_layers() -> TwoLayers:
    return TwoLayers(WIDTH, WIDTH, WIDTH, nnx.Rngs(0), nnx.relu)


CASTS: dict[str, Callable[[TwoLayers], Any]] = {
    "to half": lambda model: cast(model, jnp.bfloat16),
    "a part": lambda model: cast(model.up, jnp.bfloat16),
    "to another half": lambda model: cast(model, jnp.float16),
}


@pytest.mark.parametrize("how", CASTS)
def test_a_model_that_is_cast_after_its_annotation_computes_as_plain_flax(how):
    plain, model = two_layers(), two_layers()
    js.fully_shard(model.up, mesh=js.mesh(), placement=SMALL)
    js.fully_shard(model, mesh=js.mesh(), placement=SMALL)
    for one in (plain, model):
        CASTS[how](one)
    x = jnp.asarray(X, plain.up.kernel.dtype)
    wanted, found = plain(x), model(x)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.float32(found), np.float32(wanted))
    for leaf in js.plan(model).leaves:
        dtype = (model.up if leaf.path.startswith("up/") else model.down).kernel.dtype.name
        assert (leaf.placement.dtype, leaf.placement.gathered_dtype, leaf.placement.reduce_dtype) == (dtype,) * 3
    loss_fn = lambda model, x: (model(x).astype(jnp.float32) ** 2).mean()
    step = nnx.jit(lambda model, x: nnx.grad(loss_fn)(model, x))
    grads = step(model, x)
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda g: g.dtype, nnx.grad(loss_fn)(plain, x))
    assert js.audit(step.lower(model, x).lowered, model=model).ok


def test_a_policy_still_holds_after_a_cast():
    model = two_layers()
    half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("up/*",))
    js.fully_shard(model, mesh=js.mesh(), placement=SMALL, mixed_precision=half)
    cast(model, jnp.float16)
    assert model(X).dtype == jnp.float32  # float16 and bfloat16 together
    dtypes = {leaf.path: (leaf.placement.dtype, leaf.placement.gathered_dtype) for leaf in js.plan(model).leaves}
    assert dtypes["up/kernel"] == ("float16", "float16")
    assert dtypes["down/kernel"] == ("float16", "bfloat16")
    assert {leaf.placement.reduce_dtype for leaf in js.plan(model).leaves} == {"float32"}


@pytest.mark.parametrize("sync", ["each", "last"])
def test_microbatches_follow_a_cast(sync):
    model = js.fully_shard(Stored(jnp.float32), mesh=js.mesh(), placement=SMALL)
    cast(model, jnp.bfloat16)
    grad_fn = js.value_and_grad(lambda model, x: model(x).sum(-1).mean(), accumulate=2, sync=sync)
    traced = jax.make_jaxpr(lambda w, x: _grads(model, w, grad_fn, x))(model.w.get_raw_value(), microbatches_of(2, 4))
    gathered = {line for line in str(traced).splitlines() if "all_gather[" in line}
    assert gathered and all(":bf16[" in line for line in gathered), gathered


def _grads(model: nnx.Module, w: jax.Array, grad_fn: Callable, x: jax.Array) -> Any:
    graphdef, state = nnx.split(model)
    live = nnx.merge(graphdef, jax.tree.map(lambda _: w, state))
    return jax.tree.leaves(grad_fn(live, x)[1])


class LinenTwo(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.head(nn.relu(nn.Dense(WIDTH, name="a")(x)))

    @nn.nowrap
    def head(self, x):
        return nn.Dense(WIDTH, name="b")(x)


@pytest.mark.parametrize("part", [("a", "b"), ("a",)])
def test_a_linen_model_follows_its_parameters(part):
    plain = LinenTwo()
    model = js.fully_shard(LinenTwo(), mesh=js.mesh(), placement=SMALL, units="a")
    params = model.init(jax.random.key(0), X)
    halved = {
        name: jax.tree.map(lambda x, name=name: x.astype(jnp.bfloat16) if name in part else x, leaves)
        for name, leaves in params["params"].items()
    }
    x = jnp.asarray(X, jnp.bfloat16)
    wanted, found = plain.apply({"params": halved}, x), model.apply({"params": halved}, x)
    assert found.dtype == wanted.dtype
    # Four units of the last place of 16 bits: compilers sum products of two rows in another order than those of all.
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), atol=4 * 2**-8)
    for leaf in js.plan(model).leaves:
        dtype = "bfloat16" if leaf.path.split("/")[0] in part else "float32"
        assert (leaf.placement.dtype, leaf.placement.gathered_dtype) == (dtype, dtype)
    loss_fn = lambda params, x: (model.apply({"params": params}, x).astype(jnp.float32) ** 2).mean()
    grad_fn = functools.partial(js.value_and_grad, loss_fn, model=model, accumulate=2)
    for sync in ("each", "last"):
        grads = jax.jit(grad_fn(sync=sync))(halved, x)[1]
        assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, halved)


# Floats of 8 bits, which have no common dtype with others.


class Eighths(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(normal(0, WIDTH, WIDTH).astype(jnp.float8_e4m3fn))

    def __call__(self, x):
        return x @ self.w[...].astype(x.dtype)


def test_a_loss_scale_takes_parameters_in_8_bits():
    model = js.fully_shard(Eighths(), mesh=js.mesh(), placement=SMALL)
    optimizer = js.shard_optimizer(model, LossScale(initial=4.0).around(optax.sgd(1e-2)))
    loss_fn = lambda model, x: (model(x) ** 2).mean()
    grads = nnx.jit(lambda model, x: scaled_value_and_grad(loss_fn, optimizer)(model, x)[1])(model, X)
    (wanted,) = jax.tree.leaves(nnx.grad(loss_fn)(Eighths(), X))
    (found,) = jax.tree.leaves(grads)
    np.testing.assert_allclose(found, np.float32(wanted), rtol=2**-3, atol=2**-9)  # both rounded to 3 bits


def test_the_largest_of_the_batch_in_8_bits():
    model = js.fully_shard(Eighths(), mesh=js.mesh(), placement=SMALL)
    largest = lambda model, x: model(x).astype(jnp.float8_e4m3fn).max(0)
    found = jax.jit(lambda x: largest(model, x))(X)
    np.testing.assert_array_equal(np.float32(found), np.float32(largest(Eighths(), X)))


# Parameters without elements.


@pytest.mark.parametrize("shape", [(0, WIDTH), (WIDTH, 0), (0,)])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_parameter_without_elements_is_not_sharded(kind, shape):
    placement = js.PlacementPolicy(min_size=0, shard_dim=0)
    how = {"mesh": js.mesh(), "placement": placement, "mixed_precision": js.MixedPrecision(reduce_dtype="float32")}
    if kind == "nnx":
        model = OneOf(shape)
        js.fully_shard(model, **how)
        loss, grads = nnx.jit(lambda model, x: nnx.value_and_grad(lambda model: model(x).mean())(model))(model, X)
    else:
        linen = js.fully_shard(LinenOneOf(shape), **how)
        params = linen.init(jax.random.key(0), X)
        loss, grads = jax.jit(jax.value_and_grad(lambda params, x: linen.apply(params, x).mean()))(params, X)
        model = linen
    leaves = {leaf.path: leaf.placement for leaf in js.plan(model).leaves}
    assert leaves["empty"].dim is None
    assert leaves["empty"].because == "it has no elements"
    assert leaves["w"].dim == 0
    assert np.isfinite(loss)
    assert shape in {g.shape for g in jax.tree.leaves(grads)}


class OneOf(nnx.Module):
    def __init__(self, shape: tuple[int, ...]):
        self.w = nnx.Param(jnp.ones((WIDTH, WIDTH)))
        self.empty = nnx.Param(jnp.zeros(shape))

    def __call__(self, x):
        return x @ self.w[...] + self.empty[...].sum()


class LinenOneOf(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        empty = self.param("empty", nn.initializers.zeros, self.shape)
        return x @ self.param("w", nn.initializers.ones, (WIDTH, WIDTH)) + empty.sum()
