"""`js.shard_matrices`: the updates of one device, two all-to-alls for matrices of one shape, each multiplied once."""

import functools
import os
import re
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jshard as js
from benchmarks.optimizers import shampoo
from jshard.errors import CallError
from jshard.inspect.audit import audit
from jshard.inspect.hlo.walk import read_schedule
from tests.micro_gpt import USERS_FILE
from tests.parity import distance, flat
from tests.wide import wide

WIDTH, HIDDEN, WIDE, STEPS = 32, 64, 512, 10
ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((16, WIDTH)), jnp.float32)

OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "muon, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.muon(1e-2, weight_decay=0.1)),
    "shampoo": lambda: shampoo(1e-2),
}


class Layers(nnx.Module):
    """So many matrices of 32 x 64, and others of one shape by themselves."""

    def __init__(self, layers: int, rngs: nnx.Rngs, hidden: int = HIDDEN):
        self.up = nnx.List([nnx.Linear(WIDTH, hidden, rngs=rngs) for _ in range(layers)])
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for up in self.up:
            x = x + 0.1 * self.down(jnp.tanh(up(x)))
        return x


def loss_fn(model: Layers, x: jax.Array) -> jax.Array:
    return ((model(x) - jnp.flip(x, 1)) ** 2).mean()


def sharded(layers: int, hidden: int = HIDDEN, **degrees: int) -> Layers:
    mesh = js.mesh(**degrees)

    def annotate(model: Layers) -> None:
        if mesh.shape["tensor"] > 1:
            for up in model.up:
                up.kernel.set_metadata(out_sharding=(None, "tensor"))
        js.fully_shard(model, units=nnx.Linear, mesh=mesh)

    with nnx.use_eager_sharding(False):
        return js.shard_init(lambda: Layers(layers, nnx.Rngs(0), hidden), annotate)


@nnx.jit
def step(model: Layers, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    optimizer.update(model, nnx.grad(loss_fn)(model, x))


def trained(model: Any, optimizer: nnx.Optimizer, steps: int = STEPS) -> dict[str, np.ndarray]:
    for _ in range(steps):
        step(model, optimizer, ROWS)
    return flat(nnx.state(model, nnx.Param))


@functools.cache
def on_one_device(name: str, layers: int) -> dict[str, np.ndarray]:
    model = Layers(layers, nnx.Rngs(0))
    return trained(model, nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param))


def assert_same_places(found: nnx.State, wanted: nnx.State) -> None:
    """The same arrays, sharded in the same way."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def compiled(tx: optax.GradientTransformation, layers: int, **degrees: int) -> jax.stages.Compiled:
    """The update alone, of gradients that are there."""
    model = sharded(layers, WIDE, **degrees)
    optimizer = js.shard_optimizer(model, tx)
    grads = nnx.jit(nnx.grad(loss_fn))(model, ROWS)
    return (
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
        .lower(model, optimizer, grads)
        .lowered.compile()
    )


def counted(program: jax.stages.Compiled) -> dict[str, int]:
    kinds = re.findall(r" (all-to-all|all-reduce|all-gather|reduce-scatter)(?:-start)?\(", program.as_text() or "")
    return {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize(
    ("name", "degrees", "layers"),
    [
        ("muon", {"fsdp": 8}, 16),
        ("muon", {"replica": 2, "fsdp": 4}, 6),  # two owners have one more
        ("muon", {"fsdp": 4, "tensor": 2}, 8),
        ("muon, clipped", {"fsdp": 8}, 9),
        ("shampoo", {"fsdp": 8}, 8),
        wide("shampoo", {"replica": 2, "fsdp": 4}, 6),
        wide("muon", {"fsdp": 8}, 3),  # too few: as before
    ],
)
def test_the_updates_of_one_device(name, degrees, layers):
    model = sharded(layers, **degrees)
    optimizer = js.shard_optimizer(model, js.shard_matrices(OPTIMIZERS[name]()))
    plain = nnx.state(js.shard_optimizer(model, OPTIMIZERS[name]()))
    assert_same_places(nnx.state(optimizer), plain)  # state as without, and so in a checkpoint
    start = flat(nnx.state(model, nnx.Param))
    found, wanted = trained(model, optimizer), on_one_device(name, layers)
    assert distance(found, wanted) <= 1e-6
    assert distance(start, wanted) > 1e-3
    assert_same_places(nnx.state(optimizer), plain)


def test_two_exchanges_of_what_a_device_holds():
    layers, devices = 16, 8
    before, after = (
        compiled(tx, layers, fsdp=8) for tx in (OPTIMIZERS["muon"](), js.shard_matrices(OPTIMIZERS["muon"]()))
    )
    alone = compiled(OPTIMIZERS["muon"](), 0, fsdp=8)  # the one matrix of its shape
    assert counted(after).pop("all-to-all") == 2
    assert counted(before)["all-reduce"] - counted(alone)["all-reduce"] >= 5 * layers - 1
    assert counted(after)["all-reduce"] <= counted(alone)["all-reduce"] + 1
    (rows,) = [[row for row in audit(after).rows if row.kind == "all-to-all"]]
    sent = sum(row.total_bytes for row in rows)  # of a device, with the part that stays
    assert 0 < sent <= 2.1 * layers * WIDTH * WIDE * 4 / devices
    flops = lambda program: read_schedule(program).flops  # of products
    one_device = jax.jit(lambda x: OPTIMIZERS["muon"]().update(x, OPTIMIZERS["muon"]().init(x), x)[0])
    whole = one_device.lower([jnp.ones((WIDTH, WIDE))] * layers).compile()
    assert 0 < flops(after) - flops(alone) <= 1.1 * flops(whole) / devices


def test_stacked_layers_are_split_by_layers():
    layers = 16

    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (layers, WIDTH, HIDDEN)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, w: (x + 0.1 * jnp.tanh(x @ w) @ w.T, None), x, self.up[...])[0]

    by_layer = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    tx = lambda: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: by_layer, params)
    )
    mesh, found = js.mesh(), []
    for change in (lambda tx: tx, js.shard_matrices):
        model = js.shard_init(
            lambda: Stacked(nnx.Rngs(0)),
            lambda model: js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(stacked=1)),
        )
        optimizer = js.shard_optimizer(model, change(tx()))
        program = step.lower(model, optimizer, ROWS).lowered.compile()
        found.append((trained(model, optimizer), counted(program)))
    (before, _), (after, kinds) = found
    assert distance(after, before) <= 1e-6
    assert kinds["all-to-all"] == 2


@pytest.mark.wide
def test_a_linen_model():
    class EightMatrices(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(8):
                x = x + 0.1 * jnp.tanh(nn.Dense(WIDTH, use_bias=False, name=f"up{i}")(x))
            return x

    def run(model, tx, params):
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        @jax.jit
        def step(state, x):
            loss = lambda params: ((model.apply({"params": params}, x) - jnp.flip(x, 1)) ** 2).mean()
            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        for _ in range(STEPS):
            state = step(state, ROWS)
        return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(state.params)}, step, state

    plain = EightMatrices()
    params = plain.init(jax.random.key(0), ROWS)["params"]
    wanted, _, _ = run(plain, OPTIMIZERS["muon"](), params)
    model = js.fully_shard(EightMatrices(), mesh=js.mesh())
    tx = js.shard_optimizer(model, js.shard_matrices(OPTIMIZERS["muon"]()))
    placed = js.shard_init(lambda: model.init(jax.random.key(0), ROWS), model)["params"]
    found, step, state = run(model, tx, placed)
    assert distance(found, wanted) <= 1e-6
    assert counted(step.lower(state, ROWS).compile())["all-to-all"] == 2


@pytest.mark.wide
def test_a_checkpoint_continues_without_it_and_on_another_mesh(tmp_path):
    model = sharded(8, fsdp=8)
    optimizer = js.shard_optimizer(model, js.shard_matrices(OPTIMIZERS["muon"]()))
    trained(model, optimizer, 5)
    js.checkpoint.save(tmp_path / "five", (model, optimizer))
    again = sharded(8, replica=2, fsdp=4)
    other = js.shard_optimizer(again, OPTIMIZERS["muon"]())
    again, other = js.checkpoint.restore(tmp_path / "five", (again, other))
    assert distance(trained(again, other, 5), on_one_device("muon", 8)) <= 1e-6


def test_without_shard_optimizer_it_says_what_is_missing():
    model = sharded(2)
    with pytest.raises(
        CallError, match=r"(?s)does not know where the arrays are.*js.shard_optimizer\(model, js.shard_matrices"
    ):
        step(model, nnx.Optimizer(model, js.shard_matrices(OPTIMIZERS["muon"]()), wrt=nnx.Param), ROWS)


_RECIPE = """
import dataclasses, optax, jshard as js
from jshard.train import Recipe
_micro = RECIPES["micro"]

@dataclasses.dataclass(frozen=True, kw_only=True)
class WithMuon(Recipe):
    owned: bool = True
    def optimizer(self):
        tx = optax.contrib.muon(1e-3)
        return js.shard_matrices(tx) if self.owned else tx

RECIPES = {"micro": lambda: WithMuon(**{f.name: getattr(_micro(), f.name) for f in dataclasses.fields(Recipe)})}
"""


@pytest.mark.wide
def test_two_processes_train_as_one_device_does(tmp_path):
    (tmp_path / "mine.py").write_text(USERS_FILE + _RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    losses = []
    for options in (["--mesh", "fsdp=1", "--set", "owned=false"], ["--processes", "2", "--mesh", "fsdp=8"]):
        out = tmp_path / str(len(losses))
        command = [
            sys.executable,
            "-m",
            "jshard",
            "train",
            "mine.py",
            "--data",
            "text.txt",
            "--out",
            str(out),
            *options,
        ]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        losses.append([float(x) for x in re.findall(r'"loss": ([0-9.]+)', (out / "metrics.jsonl").read_text())])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
