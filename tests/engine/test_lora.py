"""LoRA as Flax has it: adapters trained, the base frozen; saved and restored by themselves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.engine.test_frozen import sent
from tests.helpers import placed, with_placement
from tests.parity import flat

WIDTH, HIDDEN, RANK = 64, 128, 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


class Block(nnx.Module):
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


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, rank: int = RANK, scanned: bool = False):
        self.blocks = nnx.List([Block(rngs, rank=rank) for _ in range(2)])
        head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.LoRA(WIDTH, rank, WIDTH, base_module=head, rngs=rngs) if rank else head
        self.scanned = scanned

    def __call__(self, x):
        if self.scanned:
            return self.head(js.scan_layers(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, x):
    return (model(x).astype(jnp.float32) ** 2).mean()


def annotator(**settings):
    def annotate(model):
        for block in model.blocks:
            js.fully_shard(block, mesh=js.mesh(), **with_placement(**settings))
        js.fully_shard(model, mesh=js.mesh(), **with_placement(**settings))

    return annotate


def build(**settings):
    return lambda: Model(nnx.Rngs(0), **settings)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    optimizer.update(model, grads)
    return loss


def is_adapter(path: str) -> bool:
    return "lora_" in path


def test_only_adapters_are_reduced():
    """Large ones by a reduce-scatter; small ones, as most are, lie whole on every device."""
    grad = lambda m, x: nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(m, x)
    adapters = 2 * (WIDTH * RANK + RANK * HIDDEN) + 2 * WIDTH * RANK
    found = sent(grad, js.abstract_init(build(), annotator(min_size=256)), (X,))
    assert found["reduce_scatter"] == adapters and found["psum"] <= 8
    small = sent(grad, js.abstract_init(build(), annotator(min_size=2048)), (X,))
    assert small["reduce_scatter"] == 0 and adapters <= small["psum"] <= adapters + 8


def test_a_base_is_read_into_a_model_with_adapters_and_the_adapters_by_themselves(tmp_path):
    base = placed(build(rank=0), annotator())
    js.checkpoint.save(tmp_path / "base", {"model": base})
    model = placed(build(), annotator())
    start = flat(nnx.state(model, nnx.LoRAParam))
    head = {"model/head/base_module/kernel": "model/head/kernel", "model/head/base_module/bias": "model/head/bias"}
    settings = {"only": "params", "missing": "init", "rename": head}
    with pytest.warns(js.checkpoint.CheckpointWarning, match="6 leaves stay"):
        model = js.checkpoint.restore(tmp_path / "base", like={"model": model}, **settings)["model"]
    found = flat(nnx.state(model, nnx.Param))
    of_base = flat(nnx.state(base, nnx.Param))
    for path, x in found.items():
        np.testing.assert_array_equal(x, start[path] if is_adapter(path) else of_base[path.replace("base_module/", "")])

    optimizer = js.shard_optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    step(model, optimizer, X)
    js.checkpoint.save(tmp_path / "adapters", {"adapters": nnx.state(model, nnx.LoRAParam)})
    assert sum(f.stat().st_size for f in (tmp_path / "adapters").rglob("*") if f.is_file()) < 120_000
    again = placed(build(), annotator())
    like = {"adapters": nnx.state(again, nnx.LoRAParam)}
    nnx.update(again, js.checkpoint.restore(tmp_path / "adapters", like=like)["adapters"])
    trained = flat(nnx.state(model, nnx.LoRAParam))
    for path, x in flat(nnx.state(again, nnx.LoRAParam)).items():
        np.testing.assert_array_equal(x, trained[path])
        assert not re.search("lora_b", path) or (x != start[path]).any()
