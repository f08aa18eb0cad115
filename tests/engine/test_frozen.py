"""A frozen parameter is gathered, and nothing more: no product, no reduction, no optimizer state; and it stays."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.helpers import (
    Config,
    Decoder,
    Scanning,
    abstract,
    annotator,
    equations_and_trips,
    loss_fn,
    mean_square,
    placed,
    token_batch,
    ups,
    with_placement,
)
from tests.parity import PARAMETER_TOLERANCE, flat

CONFIG = Config(layers=3, attends=False)
BATCH = token_batch(CONFIG)
KERNEL = CONFIG.width * CONFIG.hidden  # elements of a block's up, as of its down
TABLE = CONFIG.vocab * CONFIG.width


def tops(path, variable):
    """An nnx filter: what is above the blocks. The embedding is the head too, so backward needs no block."""
    return isinstance(variable, nnx.Param) and path[0] == "norm"


def grad_of(wrt, loss=loss_fn):
    return lambda model, *batch: nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, *batch)


def accumulated(wrt, sync):
    return lambda model, *batch: js.value_and_grad(loss_fn, accumulate=2, sync=sync, wrt=wrt)(model, *batch)


def scanned_model(**settings: Any) -> Decoder:
    return js.abstract_init(lambda: Scanning(CONFIG, nnx.Rngs(0)), annotator(js.mesh(), **settings))


# What is sent, counted in the program as it is written; loops opened.


def sent(run, model, batch=BATCH) -> dict[str, int]:
    """Elements that each kind of collective takes in, over all rounds of loops."""
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, *batch: run(nnx.merge(graphdef, state, copy=True), *batch))(state, *batch)
    return sent_in(jaxpr.jaxpr)


def sent_in(jaxpr: Any) -> dict[str, int]:
    """The same of a program."""
    found: dict[str, int] = {"all_gather": 0, "reduce_scatter": 0, "psum": 0}
    for eqn, trips in equations_and_trips(jaxpr):
        kind = eqn.primitive.name.replace("_invariant", "")
        if kind in found and eqn.params.get("axes") != ("replica",):  # of degree 1
            found[kind] += trips * sum(v.aval.size for v in eqn.invars)
    return found


CASES = {
    "zero3": (lambda: abstract(CONFIG, js.mesh()), grad_of, 1),
    "hpz": (lambda: abstract(CONFIG, js.mesh(), reshard_after_forward=2), grad_of, 1),
    "scan_layers": (scanned_model, grad_of, 1),
    "the user's scan": (lambda: abstract(Config(layers=3, attends=False, scanned=True), js.mesh()), grad_of, 1),
    "each": (lambda: abstract(CONFIG, js.mesh()), lambda wrt: accumulated(wrt, "each"), 2),
    "last": (lambda: abstract(CONFIG, js.mesh()), lambda wrt: accumulated(wrt, "last"), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_is_not_reduced(case):
    build, grad, times = CASES[case]
    found = sent(grad(ups), build())
    assert found["reduce_scatter"] == times * CONFIG.layers * KERNEL
    assert found["psum"] <= times * CONFIG.layers * CONFIG.hidden + 8  # their biases, and the loss
    everything = sent(grad(nnx.Param), build())
    assert everything["reduce_scatter"] == times * (2 * CONFIG.layers * KERNEL + TABLE)
    assert everything["all_gather"] >= found["all_gather"] > 0  # backward needs a frozen weight, where it continues


def test_what_backward_does_not_need_is_gathered_once():
    """Below the lowest trained parameter there is no backward: nothing is gathered again."""
    found = sent(grad_of(tops), abstract(CONFIG, js.mesh()))
    layer = 2 * KERNEL // 8  # what goes in is a shard
    assert found == {"all_gather": CONFIG.layers * layer + TABLE // 8, "reduce_scatter": 0, "psum": found["psum"]}
    assert found["psum"] <= CONFIG.width + 8


# What comes out.


@pytest.mark.parametrize("case", ["scan", "last"])
def test_trains_as_on_one_device_and_leaves_the_frozen_alone(case):
    kind = Scanning if case == "scan" else Decoder
    build = lambda: kind(CONFIG, nnx.Rngs(0))
    grad = accumulated(ups, case) if case == "last" else grad_of(ups)
    wanted, _, _ = trained(build(), nnx.Optimizer, grad_of(ups))
    found, optimizer, before = trained(placed(build, annotator(js.mesh())), js.shard_optimizer, grad)
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        if "up" in path.split("/"):
            assert (x != before[path]).any(), path
            assert np.linalg.norm(found[path] - x) <= 2 * PARAMETER_TOLERANCE * np.linalg.norm(x), path
        else:
            np.testing.assert_array_equal(found[path], before[path])
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert sum(x.size for x in moments) == 2 * CONFIG.layers * (KERNEL + CONFIG.hidden)


def trained(model, optimizer_of, grad):
    """Parameters after three steps, and before."""
    optimizer = optimizer_of(model, optax.adamw(1e-3), wrt=ups)
    before = flat(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, *batch):
        _, grads = grad(model, *batch)
        optimizer.update(model, grads)

    for _ in range(3):
        step(model, optimizer, *BATCH)
    return flat(nnx.state(model, nnx.Param)), optimizer, before


def test_the_plan_knows_what_is_frozen():
    model = abstract(CONFIG, js.mesh())
    every, some = js.plan(model), js.plan(model, wrt=ups)
    assert js.ShardPlan.from_json(some.to_json()) == some != every
    assert {leaf.path for leaf in some.leaves if leaf.trained} == {
        f"blocks/{i}/up/{name}" for i in range(CONFIG.layers) for name in ("kernel", "bias")
    }
    reduced = lambda plan: sum(t.full_bytes for t in js.explain(plan).traffic if t.kind == "reduce-scatter")
    assert reduced(some) == 4 * CONFIG.layers * KERNEL
    held = lambda plan: js.explain(plan, optimizer=optax.adamw(1e-3)).memory
    assert held(some).gradients_bytes == 4 * CONFIG.layers * (KERNEL // 8 + CONFIG.hidden)
    assert held(some).optimizer_bytes - 8 <= 2 * held(some).gradients_bytes < held(every).optimizer_bytes


# Parameters that are none of jshard's.


# ---- LoRA ----------------------------------------------------------------------------------------


WIDTH, HIDDEN, RANK = 64, 128, 8
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


class LoraBlock(nnx.Module):
    """One layer that is a LoRA itself, one that LoRA is put around; without adapters for a plain base."""

    def __init__(self, rngs: nnx.Rngs, *, rank: int = RANK):
        if rank:
            self.up = nnx.LoRALinear(WIDTH, HIDDEN, lora_rank=rank, rngs=rngs)
            self.up.lora.lora_b[...] = jax.random.normal(rngs.params(), (rank, HIDDEN)) / 8
        else:
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Lora(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, rank: int = RANK, scanned: bool = False):
        self.blocks = nnx.List([LoraBlock(rngs, rank=rank) for _ in range(2)])
        head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.LoRA(WIDTH, rank, WIDTH, base_module=head, rngs=rngs) if rank else head
        self.scanned = scanned

    def __call__(self, x):
        if self.scanned:
            return self.head(js.scan_layers(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def lora_annotator(**settings):
    def annotate(model):
        for block in model.blocks:
            js.fully_shard(block, mesh=js.mesh(), **with_placement(**settings))
        js.fully_shard(model, mesh=js.mesh(), **with_placement(**settings))

    return annotate


def build(**settings):
    return lambda: Lora(nnx.Rngs(0), **settings)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(mean_square, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    optimizer.update(model, grads)
    return loss


def is_adapter(path: str) -> bool:
    return "lora_" in path


def test_only_adapters_are_reduced():
    """Large ones by a reduce-scatter; small ones, as most are, are whole on every device."""
    grad = lambda m, x: nnx.value_and_grad(mean_square, argnums=nnx.DiffState(0, nnx.LoRAParam))(m, x)
    adapters = 2 * (WIDTH * RANK + RANK * HIDDEN) + 2 * WIDTH * RANK
    found = sent(grad, js.abstract_init(build(), lora_annotator(min_size=256)), (ROWS,))
    assert found["reduce_scatter"] == adapters and found["psum"] <= 8
    small = sent(grad, js.abstract_init(build(), lora_annotator(min_size=2048)), (ROWS,))
    assert small["reduce_scatter"] == 0 and adapters <= small["psum"] <= adapters + 8


@pytest.mark.wide
def test_a_base_is_read_into_a_model_with_adapters_and_the_adapters_by_themselves(tmp_path):
    base = placed(build(rank=0), lora_annotator())
    js.checkpoint.save(tmp_path / "base", {"model": base})
    model = placed(build(), lora_annotator())
    start = flat(nnx.state(model, nnx.LoRAParam))
    head = {"model/head/base_module/kernel": "model/head/kernel", "model/head/base_module/bias": "model/head/bias"}
    settings = {"only": "params", "missing": "init", "rename": head}
    with pytest.warns(js.checkpoint.CheckpointWarning, match="6 leaves keep their values"):
        model = js.checkpoint.restore(tmp_path / "base", like={"model": model}, **settings)["model"]
    found = flat(nnx.state(model, nnx.Param))
    of_base = flat(nnx.state(base, nnx.Param))
    for path, x in found.items():
        np.testing.assert_array_equal(x, start[path] if is_adapter(path) else of_base[path.replace("base_module/", "")])

    optimizer = js.shard_optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    step(model, optimizer, ROWS)
    js.checkpoint.save(tmp_path / "adapters", {"adapters": nnx.state(model, nnx.LoRAParam)})
    assert sum(f.stat().st_size for f in (tmp_path / "adapters").rglob("*") if f.is_file()) < 120_000
    again = placed(build(), lora_annotator())
    like = {"adapters": nnx.state(again, nnx.LoRAParam)}
    nnx.update(again, js.checkpoint.restore(tmp_path / "adapters", like=like)["adapters"])
    trained = flat(nnx.state(model, nnx.LoRAParam))
    for path, x in flat(nnx.state(again, nnx.LoRAParam)).items():
        np.testing.assert_array_equal(x, trained[path])
        assert not re.search("lora_b", path) or (x != start[path]).any()


class Scaled(nnx.Module):
    """A scalar whose gradient is stopped: in the backward program it is the literal 0."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * jax.lax.stop_gradient(self.scale[...])


def test_a_scalar_without_use_has_the_gradient_0():
    model = js.fully_shard(Scaled(nnx.Rngs(0)), mesh=js.mesh())
    grads = nnx.grad(lambda model, x: model(x).sum())(model, jnp.ones((8, 16)))
    assert grads["scale"][...] == 0
