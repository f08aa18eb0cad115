"""A device holds its share and no more: parameters and optimizer state between steps, one unit at a time within."""

import jax
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.inspect.memory import memory_of, unit_bytes
from tests.helpers import Config, abstract, program, sharded, token_batch
from tests.wide import wide

# A tiny batch, so that weights and not activations fill the temporary memory.
SHALLOW = Config(layers=12, width=256, hidden=1024, vocab=64, scanned=True)
DEEP = Config(layers=24, width=256, hidden=1024, vocab=64, scanned=True)
WIDE = Config(layers=12, width=512, hidden=2048, vocab=64, scanned=True)


def bytes_on(device: jax.Device, tree: object) -> int:
    """Bytes of the arrays in a tree that are on a device."""
    shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device)
    return sum(s.data.nbytes for s in shards)


def gathered_layers(config: Config) -> int:
    """Bytes of all layers' gathered parameters; replicated ones have no other copy."""
    plan = js.plan(abstract(config, js.mesh()))
    return sum(leaf.placement.gathered_bytes for leaf in plan.unit_leaves("blocks") if leaf.placement.dim is not None)


def temporary(config: Config, **settings: object) -> int:
    return program(config, **settings).compiled.memory_analysis().temp_size_in_bytes


def test_the_state_of_an_optimizer_is_traced_once_for_all_meshes():
    calls = []
    adamw = optax.adamw(1e-3)

    def init(params):
        calls.append(params)
        return adamw.init(params)

    counted = optax.GradientTransformation(init, adamw.update)
    on_two, on_four = (
        memory_of(js.plan(abstract(Config(), js.mesh(fsdp=n, devices=n))), optimizer=counted) for n in (2, 4)
    )
    assert len(calls) == 1
    assert on_four.optimizer_bytes < on_two.optimizer_bytes


@pytest.mark.parametrize("replica", [wide(1), 2])
def test_each_device_holds_its_share_of_parameters_and_adamw(replica: int):
    mesh = js.mesh(replica=replica)
    model = sharded(Config(layers=2, width=128, hidden=512), mesh)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3))
    state = nnx.state(model, nnx.Param), nnx.state(optimizer)
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    plan = js.plan(model)
    replicated = 3 * sum(leaf.placement.logical_bytes for leaf in plan.replicated)  # with both moments of Adam
    assert replicated < 0.03 * total
    share = mesh.shape["fsdp"]
    for device in mesh.devices.flat:
        held = bytes_on(device, state)
        assert held == pytest.approx((total - replicated) / share + replicated, rel=0.01)
        assert held == memory_of(plan, optimizer=optax.adamw(1e-3)).held_bytes


def test_a_trained_step_keeps_the_shares():
    model = sharded(Config(), js.mesh())
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3))
    device = jax.devices()[3]
    before = bytes_on(device, (nnx.state(model), nnx.state(optimizer)))

    @nnx.jit
    def step(model, optimizer, inputs, targets):
        from tests.helpers import loss_fn

        loss, grads = nnx.value_and_grad(loss_fn)(model, inputs, targets)
        optimizer.update(model, grads)
        return loss, grads

    _, grads = step(model, optimizer, *token_batch(Config()))
    assert bytes_on(device, (nnx.state(model), nnx.state(optimizer))) == before
    assert bytes_on(device, grads) == memory_of(js.plan(model)).gradients_bytes


@pytest.mark.wide
@pytest.mark.parametrize("remat", [wide("none"), "full"])
def test_temporary_memory_does_not_grow_with_depth(remat: str):
    """Twelve more layers cost their activations, a small part of what their gathered parameters would."""
    growth = temporary(DEEP, remat=remat) - temporary(SHALLOW, remat=remat)
    more_layers = gathered_layers(DEEP) - gathered_layers(SHALLOW)
    assert growth < (0.12 if remat == "none" else 0.01) * more_layers


@pytest.mark.wide
def test_temporary_memory_grows_with_the_unit():
    """Four times the unit, at the same depth, takes about four times the memory, and less than two units."""
    small, large = (temporary(config, remat="full", prefetch=0) for config in (SHALLOW, WIDE))
    units = [gathered_layers(config) / config.layers for config in (SHALLOW, WIDE)]
    assert large / small == pytest.approx(units[1] / units[0], rel=0.15)
    assert units[0] < small < 2 * units[0]
    assert units[1] < large < 2 * units[1]


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["none", wide("full")])
def test_what_is_kept_is_what_reshard_says(remat: str):
    """Not resharding keeps every layer's gathered parameters, hpZ the part that was asked for."""
    reshard = temporary(SHALLOW, remat=remat, prefetch=0)
    keep = temporary(SHALLOW, remat=remat, prefetch=0, reshard_after_forward=False)
    assert keep - reshard == pytest.approx(gathered_layers(SHALLOW), rel=0.05)
    if remat == "none":
        half = temporary(SHALLOW, remat=remat, prefetch=0, reshard_after_forward=2)
        assert half - reshard == pytest.approx(gathered_layers(SHALLOW) / 2, rel=0.05)


def test_the_plan_says_what_is_kept():
    root = unit_bytes(js.plan(abstract(SHALLOW, js.mesh())), "(root)")
    kept = {k: memory_of(js.plan(abstract(SHALLOW, js.mesh(), reshard_after_forward=k))) for k in (True, False, 4)}
    layers = gathered_layers(SHALLOW)
    assert kept[True].kept_bytes == root
    assert kept[False].kept_bytes == root + layers
    assert kept[4].kept_bytes == root + layers // 4


def test_a_stack_is_gathered_one_layer_at_a_time():
    held = memory_of(js.plan(abstract(SHALLOW, js.mesh())))
    assert held.largest_unit == "blocks"
    assert held.largest_unit_bytes == held.largest_gradient_bytes == gathered_layers(SHALLOW) // SHALLOW.layers
