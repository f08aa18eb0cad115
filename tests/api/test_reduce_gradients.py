"""Gradients of separate calls are added unreduced, and reduced once: the gradients of all their batches together."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import CallError
from tests import linen_models
from tests.engine import test_ungathered
from tests.helpers import compile_to_read
from tests.toy_models import Normed, ResidualLinear, Tied, Tower, TwoLayers

WIDTH, ROWS = 64, 16
ALL = js.PlacementPolicy(min_size=1)
RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(3)]


def tower() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([ResidualLinear(WIDTH, rngs) for _ in range(2)], nnx.Linear(WIDTH, 8, rngs=rngs))


def annotate(model: Tower, degrees: dict[str, int], **settings: Any) -> None:
    js.fully_shard(model, mesh=js.mesh(**degrees), units=ResidualLinear, placement=ALL, **settings)


def sharded(degrees: dict[str, int] | None = None, **settings: Any) -> Tower:
    return js.shard_init(tower, lambda model: annotate(model, degrees or {}, **settings))


def square(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.square(model(x).astype(jnp.float32)).mean()


def over_calls(model: nnx.Module, loss: Callable, batches: Any = BATCHES, **settings: Any) -> Any:
    """The gradients over separate calls, each one program, whose sums are donated to the next."""
    grad_fn = js.value_and_grad(loss, sync="none", **settings)

    @nnx.jit
    def first(model: nnx.Module, *batch: Any) -> Any:
        return grad_fn(model, *batch)[1]

    @functools.partial(nnx.jit, donate_argnums=1)
    def add(model: nnx.Module, total: js.PartialGradients, *batch: Any) -> Any:
        return jax.tree.map(jnp.add, total, grad_fn(model, *batch)[1])

    total = None
    for batch in batches:
        arrays = batch if isinstance(batch, tuple) else (batch,)
        total = first(model, *arrays) if total is None else add(model, total, *arrays)
    return nnx.jit(js.reduce_gradients)(model, total)


def of_all(model: nnx.Module, loss: Callable, batches: Any = BATCHES, wrt: Any = nnx.Param) -> Any:
    """The gradients of the mean over all batches, of the plain model."""
    one_batch = jnp.concatenate(batches)
    return nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model, one_batch)


def assert_close(result: Any, expected: Any, rtol: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        x = x[tuple(slice(size) for size in y.shape)]  # stored arrays may be padded
        assert np.abs(x - y).max() <= rtol * np.abs(y).max()


DEGREES = [{}, {"replica": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"replica": 8, "fsdp": 1}]


@pytest.mark.filterwarnings("ignore:.*replicated:UserWarning")
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_they_are_those_of_one_batch_of_all_rows_and_sharded_like_their_parameters(degrees):
    model = sharded(degrees)
    grads = over_calls(model, square)
    assert_close(grads, of_all(tower(), square))
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    for gradient, parameter in zip(jax.tree.leaves(grads), parameters, strict=True):
        assert gradient.sharding.is_equivalent_to(parameter.sharding, parameter.ndim)
        assert gradient.dtype == parameter.dtype


def test_they_equal_those_of_microbatches_bit_for_bit():
    model = sharded()
    batches = BATCHES[:2]
    rows = np.stack(batches, 1).reshape(-1, WIDTH)  # microbatch i has every second row
    grad_fn = js.value_and_grad(square, accumulate=2, sync="last")
    _, expected = nnx.jit(grad_fn)(model, rows)
    for x, y in zip(jax.tree.leaves(over_calls(model, square, batches)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_microbatches_within_a_call_count_as_calls():
    model = sharded()
    assert_close(over_calls(model, square, BATCHES, accumulate=2), of_all(tower(), square))


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    text = program.as_text()
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.parametrize("degrees", [{}, {"replica": 2, "fsdp": 4}], ids=str)
def test_calls_reduce_no_gradients_and_the_reduction_gathers_nothing(degrees):
    model = sharded(degrees)
    only_gradients = js.value_and_grad(square, sync="none")
    call = nnx.jit(lambda model, x: only_gradients(model, x)[1])
    compiled = compile_to_read(call.lower(model, BATCHES[0]).lowered)
    assert set(collectives(compiled)) == {"all-gather"}
    assert not js.audit(compiled, model=model, sync="none").differences
    assert js.audit(compiled, model=model, accumulate=2, sync="last").differences

    partial = call(model, BATCHES[0])
    reduction = compile_to_read(nnx.jit(js.reduce_gradients).lower(model, partial).lowered)
    plain = compile_to_read(
        nnx.jit(js.value_and_grad(square, accumulate=2, sync="last")).lower(model, BATCHES[0]).lowered
    )
    expected = collectives(plain)
    gathers = expected.pop("all-gather")
    assert gathers == collectives(compiled)["all-gather"]
    assert "all-gather" not in collectives(reduction)
    assert collectives(reduction).get("reduce-scatter") == expected.get("reduce-scatter")


def test_a_device_holds_the_full_gradients_once_and_a_shard_of_the_rest():
    model = sharded()
    partial = nnx.jit(js.value_and_grad(square, sync="none"))(model, BATCHES[0])[1]
    full_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(tower(), nnx.Param)))

    def bytes_of_a_device(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert bytes_of_a_device(partial.shards) == full_bytes
    assert bytes_of_a_device(partial.rest) == full_bytes / 8


@pytest.mark.wide
def test_without_jit():
    model = sharded()
    grad_fn = js.value_and_grad(square, sync="none")
    partials = [grad_fn(model, x)[1] for x in BATCHES]
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), partials)
    assert_close(js.reduce_gradients(model, total), of_all(tower(), square))


def penalised(model: Tower, x: jax.Array) -> jax.Array:
    return square(model, x) + 0.1 * jnp.square(model.head.kernel[...]).sum()


def test_a_parameter_that_the_loss_also_uses_outside_of_the_model():
    assert_close(over_calls(sharded(), penalised), of_all(tower(), penalised))


def only_head(path: tuple, variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and path[0] == "head"


def test_some_parameters():
    grads = over_calls(sharded(), square, wrt=only_head)
    assert_close(grads, of_all(tower(), square, wrt=only_head))


def test_parameters_in_host_memory():
    settings = {"placement": js.PlacementPolicy(min_size=1, offload="params")}
    model = js.shard_init(tower, lambda m: js.fully_shard(m, mesh=js.mesh(), units=ResidualLinear, **settings))
    grads = over_calls(model, square)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(grads)} == {"pinned_host"}
    assert_close(grads, of_all(tower(), square))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:.*replicated:UserWarning")
def test_padded_parameters():
    build = lambda: TwoLayers(WIDTH, 61, 7, nnx.Rngs(0))
    placement = js.PlacementPolicy(min_size=1, shard_dim=0)
    model = js.shard_init(build, lambda m: js.fully_shard(m, mesh=js.mesh(), placement=placement))
    js.shard_optimizer(model, optax.sgd(0.1))
    assert any(x.shape != y.shape for x, y in zip(*map(stored_arrays, (model, build())), strict=True))
    assert_close(over_calls(model, square), of_all(build(), square))


def stored_arrays(model: nnx.Module) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def test_tied_parameters():
    build = lambda: Tied(64, WIDTH, nnx.Rngs(0))
    ids = [RNG.integers(0, 64, (ROWS, 4)) for _ in range(2)]
    model = js.shard_init(build, lambda m: js.fully_shard(m, mesh=js.mesh(), placement=ALL))
    assert_close(over_calls(model, square, ids), of_all(build(), square, ids))


def test_state_of_a_model_passes_from_call_to_call():
    build = lambda: Normed(WIDTH, 8, nnx.Rngs(0))
    model = js.shard_init(build, lambda m: js.fully_shard(m, mesh=js.mesh(), placement=ALL))
    plain = build()
    over_calls(model, square)
    for x in BATCHES:
        square(plain, x)
    assert_close(nnx.state(model.norm, nnx.BatchStat), nnx.state(plain.norm, nnx.BatchStat))


def test_aux_is_that_of_the_call():
    def loss(model: Tower, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = model(x)
        return jnp.square(out).mean(), out.max()

    grad_fn = js.value_and_grad(loss, sync="none", has_aux=True)
    (value, aux), _ = nnx.jit(grad_fn)(sharded(), BATCHES[0])
    expected = loss(tower(), BATCHES[0])
    np.testing.assert_allclose([value, aux], expected, rtol=1e-5)


@pytest.mark.parametrize("degrees", [{"context": 2, "fsdp": 4}, {"expert": 2, "fsdp": 4}], ids=str)
def test_of_sequences_over_inner_axes(degrees):
    sequences = [RNG.normal(size=(ROWS, 8, WIDTH)).astype(np.float32) for _ in range(2)]
    assert_close(over_calls(sharded(degrees), square, sequences), of_all(tower(), square, sequences))


def test_a_batch_that_does_not_divide_over_the_devices():
    batches = [x[:12] for x in BATCHES]
    assert_close(over_calls(sharded(), square, batches), of_all(tower(), square, batches))


@pytest.mark.wide
def test_a_table_that_is_never_gathered():
    model = test_ungathered.placed(test_ungathered.build, test_ungathered.annotator(js.mesh(replica=2)))
    js.shard_optimizer(model, optax.sgd(0.1))
    grads = over_calls(model, test_ungathered.loss_fn, [test_ungathered.DATA] * 2)
    expected = nnx.grad(test_ungathered.loss_fn)(test_ungathered.build(), *test_ungathered.DATA)
    assert_close(grads, expected)


# Weighted means.


def masked(model: nnx.Module, x: jax.Array, mask: jax.Array) -> js.WeightedMean:
    losses = jnp.square(model(x).astype(jnp.float32)).mean(-1) * mask
    return js.WeightedMean(losses.sum(), mask.sum())


MASKED = [(x, np.arange(ROWS) < kept) for x, kept in zip(BATCHES, (16, 3, 0), strict=True)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_weighted_mean_divides_by_the_weights_of_all_calls(steps):
    grads = over_calls(sharded(), masked, MASKED, accumulate=steps)
    rows, mask = (np.concatenate(parts) for parts in zip(*MASKED, strict=True))
    expected = nnx.grad(lambda model: masked(model, rows, mask).mean)(tower())
    assert_close(grads, expected)


def test_a_weighted_mean_in_float16_is_refused():
    precision = js.MixedPrecision(param_dtype="float16", reduce_dtype="float16")
    with pytest.raises(CallError, match="cannot be summed over calls in float16"):
        over_calls(sharded(mixed_precision=precision), masked, MASKED)


@pytest.mark.parametrize("loss", [square, masked], ids=["mean", "weighted mean"])
def test_a_loss_scale_divides_the_sums_and_not_their_weight(loss):
    model = sharded()
    optimizer = js.shard_optimizer(model, js.LossScale(initial=2.0**10).around(optax.sgd(0.1)))
    batches = MASKED if loss is masked else [(x,) for x in BATCHES]

    @nnx.jit
    def run(model: nnx.Module, optimizer: nnx.Optimizer, *batch: Any) -> Any:
        return js.scaled_value_and_grad(loss, optimizer, sync="none")(model, *batch)

    results = [run(model, optimizer, *batch) for batch in batches]
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), [partial for _, partial in results])
    assert_close(js.reduce_gradients(model, total), over_calls(model, loss, batches))


# Linen.


def of_linen(model: Any) -> Callable:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(model.apply({"params": params}, x)).mean()

    return loss


@pytest.mark.filterwarnings("ignore:.*replicated:UserWarning")
@pytest.mark.parametrize("wrt", [nnx.Param, "*/kernel"], ids=["all", "kernels"])
@pytest.mark.parametrize("degrees", [{}, {"replica": 2, "fsdp": 4}], ids=str)
def test_a_linen_model(degrees, wrt):
    plain = linen_models.TwoLayers(61, 8)
    model = js.fully_shard(plain, mesh=js.mesh(**degrees), placement=ALL)
    js.shard_optimizer(model, optax.sgd(0.1))
    params = js.shard_init(lambda: model.init(jax.random.key(0), BATCHES[0])["params"], model)
    grad_fn = js.value_and_grad(of_linen(model), model=model, sync="none", wrt=wrt)
    grads_of = jax.jit(lambda params, x: grad_fn(params, x)[1])
    partials = [grads_of(params, x) for x in BATCHES]
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), partials)
    grads = jax.jit(functools.partial(js.reduce_gradients, model))(total)
    last = js.value_and_grad(of_linen(model), model=model, accumulate=3, sync="last", wrt=wrt)
    _, expected = jax.jit(last)(params, np.stack(BATCHES, 1).reshape(-1, WIDTH))
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert_close(grads, expected, rtol=1e-6)


# What is refused.


def test_sums_of_a_mean_and_of_a_weighted_mean_have_no_sum():
    model = sharded()
    mean = nnx.jit(js.value_and_grad(square, sync="none"))(model, BATCHES[0])[1]
    weighted = nnx.jit(js.value_and_grad(masked, sync="none"))(model, *MASKED[0])[1]
    with pytest.raises(ValueError, match=r"<a mean of Tower, 6 arrays, on js\.mesh"):
        jax.tree.map(jnp.add, mean, weighted)


def test_sums_of_another_mesh_are_refused():
    partial = nnx.jit(js.value_and_grad(square, sync="none"))(sharded(), BATCHES[0])[1]
    with pytest.raises(CallError, match="summed on another mesh"):
        js.reduce_gradients(sharded({"replica": 2, "fsdp": 4}), partial)


def test_sums_of_another_model_are_refused():
    partial = nnx.jit(js.value_and_grad(square, sync="none"))(sharded(), BATCHES[0])[1]
    other = js.shard_init(
        lambda: TwoLayers(WIDTH, WIDTH, 8, nnx.Rngs(0)), lambda m: js.fully_shard(m, mesh=js.mesh(), placement=ALL)
    )
    with pytest.raises(CallError, match="summed for another model"):
        js.reduce_gradients(other, partial)


def test_gradients_that_are_reduced_are_refused():
    model = sharded()
    with pytest.raises(CallError, match="Only gradients that were not reduced"):
        js.reduce_gradients(model, nnx.jit(js.value_and_grad(square))(model, BATCHES[0])[1])
