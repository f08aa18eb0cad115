"""What a step takes, from its trace: what is live at once, the work of its kernels, and what data shards send."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard as js
from jshard.inspect.live_values import live_bytes
from jshard.inspect.traced_program import program_of
from jshard.inspect.traced_step import step_for_rows, traced_step
from jshard.inspect.traced_work import data_collectives, kernels
from tests.helpers import Config, abstract, loss_fn

F32 = 4
ROWS, WIDTH, HIDDEN, LAYERS = 8, 16, 64, 6


def program(function, *arguments, parameters=(), gradients=()):
    """The operations of a function; which arguments are parameters, and which results gradients."""
    closed = jax.make_jaxpr(function)(*arguments)
    num_inputs, num_outputs = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    return program_of(
        closed.jaxpr,
        parameters=[place in parameters for place in range(num_inputs)],
        gradients=[place in gradients for place in range(num_outputs)],
        num_shards=1,
    )


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


X, UP, DOWN = zeros(ROWS, WIDTH), zeros(WIDTH, HIDDEN), zeros(HIDDEN, WIDTH)


def test_elementwise_values_are_stored_for_a_product_only():
    """tanh, and what it reads, are computed where the sum reads them; for a second product tanh is stored."""
    to_sum = program(lambda x, up: jnp.tanh((x @ up) * 2 + 1).sum(), X, UP, parameters=(1,))
    assert live_bytes(to_sum).outside == F32 * (ROWS * WIDTH + ROWS * HIDDEN)
    to_product = program(lambda x, up, down: jnp.tanh((x @ up) * 2 + 1) @ down, X, UP, DOWN, parameters=(1, 2))
    # The first product ends where the second operand of the other one begins, in its place.
    assert live_bytes(to_product).outside == F32 * (ROWS * HIDDEN + ROWS * WIDTH)


def test_parameters_and_gradients_take_nothing():
    def gradient(up, x):
        return jax.grad(lambda up: jnp.sin(x @ up).sum())(up).astype(jnp.bfloat16).astype(jnp.float32)

    of_both = program(gradient, UP, X, parameters=(0,), gradients=(0,))
    of_none = program(gradient, UP, X)
    # x, the product, and its cotangent in the place of the product.
    assert live_bytes(of_both).outside == F32 * (ROWS * WIDTH + ROWS * HIDDEN)
    assert live_bytes(of_none).outside == live_bytes(of_both).outside + UP.nbytes


def test_a_loop_counts_its_stacks_once_and_its_body_once():
    stack = zeros(LAYERS, WIDTH, WIDTH)

    def run(x, stack):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), x), x, stack)

    live = live_bytes(program(run, X, stack, parameters=(1,))).in_layers
    saved = LAYERS * X.nbytes
    assert saved < live <= saved + 3 * X.nbytes


def test_values_in_layers_are_counted_apart():
    config = Config(layers=LAYERS, vocab=8)
    model = abstract(config, js.mesh(fsdp=8), remat="full")
    live = traced_step(model, loss_fn, _batch(8, config)).live
    head = Config(layers=LAYERS, vocab=2048)
    wide = traced_step(abstract(head, js.mesh(fsdp=8), remat="full"), loss_fn, _batch(8, head)).live
    assert wide.in_layers == pytest.approx(live.in_layers, rel=0.05)
    assert wide.outside > 2 * live.outside


@pytest.mark.parametrize(("unit", "is_layer"), [("blocks", True), ("blocks/3", True), ("(root)", False)])
def test_a_unit_is_a_layer_where_its_call_is_part_of_the_program_around_it(unit: str, is_layer: bool):
    def step(x, up):
        with jax.named_scope(f"jshard[{unit}]"), jax.named_scope("forward" if unit == "blocks" else "inside"):
            return x @ up

    (product,) = kernels(program(step, X, UP))
    assert product.in_layer is is_layer


def test_the_work_of_products_and_of_the_memory():
    def gradient(up, x):
        return jax.grad(lambda up: jnp.sin(x @ up).sum())(up)

    works = [kernel.work for kernel in kernels(program(gradient, UP, X, parameters=(0,), gradients=(0,)))]
    assert sum(work.total_flops for work in works) == 2 * 2 * ROWS * WIDTH * HIDDEN
    product, cotangent, of_parameter = works  # the sum itself is of no use
    assert product.memory_bytes == X.nbytes + UP.nbytes + F32 * ROWS * HIDDEN
    assert cotangent.memory_bytes == 2 * F32 * ROWS * HIDDEN
    assert of_parameter.memory_bytes == X.nbytes + F32 * ROWS * HIDDEN + UP.nbytes


def test_a_cast_back_is_the_value_that_was_cast():
    """A compiler removes both; one that loses digits on the way stays."""
    narrow, wide = X.astype(jnp.bfloat16), X
    there_and_back = program(lambda x: jnp.tanh(x).astype(jnp.float32).astype(jnp.bfloat16), narrow)
    assert there_and_back.outputs == [there_and_back.ops[0].results[0]]
    rounded = program(lambda x: jnp.tanh(x).astype(jnp.bfloat16).astype(jnp.float32), wide)
    assert rounded.outputs != [rounded.ops[0].results[0]]


def test_work_on_shards_of_gradients_is_told_apart():
    """Whole gradients are cast and reduced. What is cast afterwards is a shard, which is smaller on more devices."""
    mesh = js.mesh(fsdp=2, devices=jax.devices()[:2])

    def reduced(x):
        whole = (x.T @ x).astype(jnp.bfloat16)
        shard = jax.lax.psum_scatter(whole, "fsdp", tiled=True)
        return shard.astype(jnp.float32)

    spec = jax.sharding.PartitionSpec("fsdp")
    found = program(jax.shard_map(reduced, mesh=mesh, in_specs=spec, out_specs=spec), X, gradients=(0,))
    product, cast, cast_of_shard = kernels(found)
    assert [kernel.is_on_shards for kernel in (product, cast, cast_of_shard)] == [False, False, True]
    assert cast_of_shard.work.memory_bytes == (2 + F32) * WIDTH * WIDTH / 2
    # The product is that of a gradient: nothing else waits for it.
    assert product.is_independent and not next(kernels(program(lambda x: x.T @ x, X))).is_independent


def test_reductions_of_the_same_values_are_one_kernel():
    def moments(x):
        return x.sum(-1), jnp.square(x).sum(-1)

    (both,) = kernels(program(moments, X))
    assert both.work.memory_bytes == X.nbytes + F32 * ROWS


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def test_a_softmax_reads_the_scores_once():
    """What reduces a row, and computes with the row again, has it in registers."""
    q, k = X, zeros(HIDDEN, WIDTH)
    scores_bytes = F32 * ROWS * HIDDEN
    product, softmax, of_values = kernels(program(attention, q, k, k))
    assert product.work.products and of_values.work.products
    assert softmax.work.memory_bytes == pytest.approx(2 * scores_bytes, rel=0.1)


def test_reductions_of_other_rows_are_kernels_of_their_own():
    long = zeros(2**16, WIDTH)  # more than registers hold
    assert len(list(kernels(program(attention, X, long, long)))) == 5
    normed = lambda x: x / jnp.square(x).sum(-1, keepdims=True)  # no product makes the row
    assert len(list(kernels(program(normed, X)))) == 2

    def kept(q, k, v):
        largest = (q @ k.T).max(-1, keepdims=True)
        return jnp.exp(q @ k.T - largest) @ v, largest  # needed elsewhere, too

    assert len(list(kernels(program(kept, X, zeros(HIDDEN, WIDTH), zeros(HIDDEN, WIDTH))))) > 3


def test_a_collective_of_the_model_is_between_kernels():
    """It starts before what its result is not needed for, and what needs it waits."""
    mesh = js.mesh(fsdp=1, expert=2, devices=jax.devices()[:2])

    def exchanged(x, up):
        sent = jax.lax.all_to_all(x @ up, "expert", 0, 0, tiled=True)
        return sent @ up.T + jnp.sin(x) @ (up @ up.T)

    spec = jax.sharding.PartitionSpec("expert")
    whole = jax.sharding.PartitionSpec()
    found = list(kernels(program(jax.shard_map(exchanged, mesh=mesh, in_specs=(spec, whole), out_specs=spec), X, UP)))
    (start,) = [number for number, kernel in enumerate(found) if kernel.starts]
    (end,) = [number for number, kernel in enumerate(found) if kernel.waits]
    assert found[start].starts == found[end].waits
    assert (found[end].waits[0].kind, found[end].waits[0].axes) == ("all-to-all", {"expert"})
    assert found[start - 1].work.products and found[end].work.products


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_step_grows_linearly_with_its_rows(remat: str):
    config = Config()
    model = abstract(config, js.mesh(fsdp=8), remat=remat)
    low, high, wanted = (traced_step(model, loss_fn, _batch(8 * rows, config)) for rows in (2, 3, 7))
    result = step_for_rows(low, high, (2, 3), 7)
    assert result.live.outside == pytest.approx(wanted.live.outside, rel=0.01)
    assert result.live.in_layers == pytest.approx(wanted.live.in_layers, rel=0.01)
    assert result.kernels == wanted.kernels


def test_steps_of_different_kernels_are_scaled():
    config = Config()
    model = abstract(config, js.mesh(fsdp=8))
    low, high = (traced_step(model, loss_fn, _batch(8 * rows, config)) for rows in (2, 4))
    fewer = dataclasses.replace(low, kernels=low.kernels[1:])
    result = step_for_rows(fewer, high, (2, 4), 2)
    assert len(result.kernels) == len(high.kernels)
    assert result.live.outside == pytest.approx(high.live.outside / 2)
    flops = [sum(kernel.work.total_flops for kernel in step.kernels) for step in (result, high)]
    assert flops[0] == pytest.approx(flops[1] / 2)


class Normed(nnx.Module):
    """A linear layer, and a norm over the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


@pytest.mark.filterwarnings("ignore:.*mixes the examples")
def test_a_norm_over_the_batch_sends_values():
    model = js.abstract_init(lambda: Normed(nnx.Rngs(0)), lambda model: js.fully_shard(model, mesh=js.mesh(fsdp=8)))
    batch = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    collectives = traced_step(model, lambda model, x: jnp.square(model(x)).mean(), batch).collectives
    kinds = {collective.kind for collective in collectives}
    assert "all-reduce" in kinds
    assert {collective.phase for collective in collectives} == {"forward", "backward"}
    plain = abstract(Config(), js.mesh(fsdp=8))
    assert not traced_step(plain, loss_fn, _batch(8, Config())).collectives


def test_what_data_shards_scatter_is_sent():
    mesh = js.mesh(fsdp=2, devices=jax.devices()[:2])
    scattered = lambda x: jax.lax.psum_scatter(jnp.sin(x), "fsdp", tiled=True)
    gathered = lambda x: jax.lax.all_gather(jnp.sin(x), "fsdp", tiled=True)
    spec = jax.sharding.PartitionSpec("fsdp")
    for function, kind in ((scattered, "reduce-scatter"), (gathered, "all-gather")):
        found = program(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec), X)
        (sent,) = data_collectives(found)
        whole_bytes = X.nbytes // 2 if kind == "reduce-scatter" else X.nbytes
        assert (sent.kind, sent.full_bytes(2)) == (kind, whole_bytes)


def _batch(rows: int, config: Config) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((rows, 16), jnp.int32)
    return tokens, tokens
