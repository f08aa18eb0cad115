"""Microbatches add the gradients of a loop over layers to their sum in place, where that is what the program means."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.engine.region_call import RegionCall
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import Config, Decoder, abstract, compile_to_read, loss_fn, mean_square, sharded, token_batch
from tests.parity import flat
from tests.wide import wide

# Of the first the gradients of layers are most of what a step has in memory.
DEEP = Config(layers=16, width=128, hidden=512, vocab=64, scanned=True, attends=False)
SMALL = Config(layers=5, width=16, hidden=64, vocab=64, scanned=True, attends=False)
BATCH = token_batch(SMALL, batch=32, length=4)
LAYER_PARAMETERS = 5  # of the blocks: a scale, two kernels and two biases


@dataclasses.dataclass
class Calls:
    """How many gradients calls have added to sums themselves."""

    num_in_place: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()
    with_sums = RegionCall.with_sums

    def counting(call: RegionCall, sums: Mapping[int, Any]) -> RegionCall:
        counted.num_in_place += len(sums)
        return with_sums(call, sums)

    monkeypatch.setattr(RegionCall, "with_sums", counting)
    return counted


def never_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each microbatch stack its gradients, which are then added to the sum."""
    monkeypatch.setattr(RegionCall, "adds_in_place", lambda call, position: False)


def gradients(model: Decoder, loss: Callable = loss_fn) -> dict[str, np.ndarray]:
    """Those of four microbatches."""
    run = nnx.jit(lambda model, *batch: js.value_and_grad(loss, accumulate=4)(model, *batch)[1])
    return flat(run(model, *BATCH))


# ---- memory


def temporaries_bytes(**settings: Any) -> int:
    """Of loss and gradients over four microbatches, with settings of the layers."""
    run = nnx.jit(lambda model, *batch: js.value_and_grad(loss_fn, accumulate=4)(model, *batch))
    lowered = run.lower(abstract(DEEP, js.mesh(), **settings), *token_batch(DEEP, batch=32, length=8))
    memory = compile_to_read(lowered.lowered).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("prefetch", [1, 0])
def test_a_microbatch_has_no_stack_of_gradients_beside_the_sum(monkeypatch, prefetch):
    in_place = temporaries_bytes(prefetch=prefetch)
    never_in_place(monkeypatch)
    stack_bytes = DEEP.layers * 2 * DEEP.width * DEEP.hidden * 4 // 8  # the kernels, a shard of them
    assert in_place < temporaries_bytes(prefetch=prefetch) - 0.7 * stack_bytes


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
def test_the_gpu_compiler_adds_without_a_copy():
    layers, width = 24, 512
    sizes = {"n_layer": layers, "d_model": width, "n_head": 8, "d_ff": 4 * width, "vocab_size": 512, "block_size": 128}
    settings = [f"model.{name}={size}" for name, size in sizes.items()]
    request = CompileRequest(
        model="gpt",
        recipe="gpt2_xl",
        topology="h100:1x8",
        settings=(*settings, "sequence_length=128", "batch_size=16", "accumulate=2"),
        mesh={"fsdp": 8},
        profile="fastest",
    )
    stack_bytes = layers * 12 * width**2 * 4 // 8
    # The sum, and as much for two layers' parameters and gradients; with a stack beside the sum it is 3 times as much.
    assert compile_step(request).memory.temporaries_bytes < 2.4 * stack_bytes


# ---- numbers


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"fsdp": 8}, {}),
        ({"replica": 2, "fsdp": 4}, {"remat": "full"}),
        ({"fsdp": 4, "tensor": 2}, {"prefetch": 2}),
        wide({"fsdp": 4, "context": 2}, {}),
        wide({"fsdp": 8}, {"reshard_after_forward": False}),
        wide({"fsdp": 8}, {"reshard_after_forward": 2}),
        wide({"fsdp": 8}, {"prefetch": 0}),
    ],
    ids=str,
)
def test_the_sum_is_the_same_bit_for_bit(monkeypatch, calls, degrees, settings):
    model = sharded(SMALL, js.mesh(**degrees), **settings)
    in_place = gradients(model)
    assert calls.num_in_place == LAYER_PARAMETERS
    never_in_place(monkeypatch)
    assert_same_bits(in_place, gradients(model))


def assert_same_bits(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    for path, x in others.items():
        np.testing.assert_array_equal(some[path], x, err_msg=path)


class Layers(nnx.Module):
    """A loop over linear layers, whose dims do not divide."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=5)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(13, 13, param_dtype=dtype, dtype=dtype, rngs=rngs)

        self.dtype = dtype
        self.layers = stack(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return js.scan_layers(self.layers, x.astype(self.dtype)).astype(jnp.float32)


def layers(dtype: Any = jnp.float32) -> Layers:
    """On eight devices: padded, and with gradients summed in float32."""
    model = Layers(dtype, nnx.Rngs(0))
    precision = js.MixedPrecision(param_dtype=jnp.dtype(dtype).name, reduce_dtype="float32")
    last_dim = js.PlacementPolicy(shard_dim=lambda path, shape: len(shape) - 1, min_size=1, stacked=1)
    js.fully_shard(model.layers, mesh=js.mesh(), mixed_precision=precision, placement=last_dim)
    js.fully_shard(model, mesh=js.mesh(), mixed_precision=precision)
    js.shard_optimizer(model, optax.sgd(0.1))  # it sees logical arrays, so padded ones may be differentiated
    return model


ROWS = np.random.default_rng(0).normal(size=(32, 13)).astype(np.float32)
ROWS_GRADIENTS = js.value_and_grad(mean_square, accumulate=4)


def test_padded_parameters_that_are_narrower_than_their_sum(monkeypatch, calls):
    run = lambda: flat(nnx.jit(lambda model, x: ROWS_GRADIENTS(model, x)[1])(layers(jnp.bfloat16), ROWS))
    in_place = run()
    assert calls.num_in_place == 2
    never_in_place(monkeypatch)
    assert_same_bits(in_place, run())


# ---- where the program means something else


def squares(state: nnx.State) -> jax.Array:
    return jnp.stack([(x**2).sum() for x in jax.tree.leaves(state)]).sum()


def twice(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return loss_fn(model, inputs, targets) + loss_fn(model, targets, inputs)


def with_a_penalty(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return loss_fn(model, inputs, targets) + squares(nnx.state(model, nnx.Param))


def with_its_own_gradients(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return squares(nnx.grad(loss_fn)(model, inputs, targets))


def weighted(model: Decoder, inputs: jax.Array, targets: jax.Array) -> js.WeightedMean:
    weight = (targets % 2).sum()
    return js.WeightedMean(loss_fn(model, inputs, targets) * weight, weight)


@pytest.mark.parametrize("loss", [twice, with_a_penalty, weighted, wide(with_its_own_gradients)])
def test_what_else_reads_a_gradient_has_that_of_its_microbatch(calls, loss):
    found = gradients(sharded(SMALL, js.mesh()), loss)
    assert calls.num_in_place == 0
    plain = sharded(SMALL, js.mesh(devices=jax.devices()[:1]))
    for path, x in gradients(plain, loss).items():
        np.testing.assert_allclose(
            found[path], x, rtol=1e-4, atol=2e-6 * max(1.0, float(np.abs(x).max())), err_msg=path
        )


def test_it_is_differentiated_and_mapped(monkeypatch, calls):
    graphdef, params = nnx.split(layers())

    def norm(params: nnx.State, x: jax.Array) -> jax.Array:
        return squares(ROWS_GRADIENTS(nnx.merge(graphdef, params), x)[1])

    def run() -> list[jax.Array]:
        second = jax.jit(jax.grad(norm))(params, ROWS)
        mapped = jax.jit(jax.vmap(norm, in_axes=(None, 0)))(params, np.stack([ROWS, ROWS[::-1]]))
        return jax.tree.leaves((second, mapped))

    in_place = run()
    assert calls.num_in_place > 0
    never_in_place(monkeypatch)
    for x, y in zip(in_place, run(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
