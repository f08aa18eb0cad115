"""The trainer's loss and metrics by their weights: over microbatches, over held-out samples, on two processes."""

import json
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.data import Data, Loader
from jshard.train import EvalStep, TrainStep, evaluate
from tests.test_docs_commands import run

LENGTH = 4
SIZES = shlex.split(
    "--mesh fsdp=4 --set model.n_layer=1 --set model.d_model=64 --set model.n_head=4 --set batch_size=16"
    " --set sequence_length=32 --set eval_sequences=16 --sample-tokens 0"
)


class Samples:
    """Rows whose numbers of kept positions differ widely."""

    def __init__(self, count):
        random = np.random.default_rng(0)
        self.x = random.normal(size=(count, LENGTH, 8)).astype(np.float32)
        self.kept = np.array([4, 0, 1, 2])[np.arange(count) % 4]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "mask": np.arange(LENGTH) < self.kept[index]}

    @property
    def batch(self):
        return {"x": self.x, "mask": np.arange(LENGTH)[None] < self.kept[:, None]}


def masked_loss(model, batch):
    losses, hits = _parts(model, batch)
    count = batch["mask"].sum()
    return js.WeightedMean(losses.sum(), count), {"hits": js.WeightedMean(hits.sum(), count), "plain": hits.mean()}


def plain_loss(model, batch):
    losses, hits = _parts(model, batch)
    return losses.mean(), {"hits": hits.mean()}


def _parts(model, batch):
    out = model(batch["x"])
    return jnp.square(out).sum(-1) * batch["mask"], (out[..., 0] > 0) * batch["mask"]


def means(loss_fn, batch):
    """The loss and the metrics on one device."""
    loss, metrics = loss_fn(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), batch)
    return {
        name: float(getattr(x, "mean", x) if isinstance(x, js.WeightedMean) else x)
        for name, x in {"loss": loss, **metrics}.items()
    }


def created(mesh):
    model = js.fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh, placement=js.PlacementPolicy(min_size=1))
    return model, js.shard_optimizer(model, optax.sgd(0.1))


@pytest.fixture(scope="module")
def mesh():
    return js.mesh(devices=jax.devices()[:2])


def test_a_step_over_microbatches_has_the_loss_and_the_update_of_the_whole_batch(mesh):
    batch = Samples(16).batch
    steps = {}
    for accumulate in (1, 4):
        model, optimizer = created(mesh)
        on_mesh = js.shard_batch(batch, mesh)
        steps[accumulate] = TrainStep(masked_loss, model, optimizer, on_mesh, accumulate=accumulate)
        scalars = steps[accumulate](on_mesh)
        for name, value in means(masked_loss, batch).items():
            np.testing.assert_allclose(scalars[name], value, rtol=1e-6, err_msg=name)
    for x, y in zip(steps[1].model_leaves, steps[4].model_leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("loss_fn", [plain_loss, masked_loss])
@pytest.mark.parametrize("degrees", [{"fsdp": 2}, {"replica": 2, "fsdp": 2}], ids=str)
def test_an_evaluation_is_the_mean_over_all_held_out_samples(loss_fn, degrees):
    samples = Samples(29)
    loader = Loader(
        data=Data(train=samples, held_out=samples, description="", fingerprint=""),
        batch_size=8,
        seed=0,
        rows=range(8),
    )
    mesh = js.mesh(**degrees, devices=jax.devices()[: np.prod(list(degrees.values()))])
    model, optimizer = created(mesh)
    batch = js.shard_batch(Samples(8).batch, mesh)
    step = TrainStep(loss_fn, model, optimizer, batch)
    found = evaluate(step, EvalStep(loss_fn, step, batch), loader.held_out(29))
    expected = means(loss_fn, samples.batch)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


def test_a_batch_without_any_weight_does_not_spoil_an_evaluation(mesh):
    model, optimizer = created(mesh)
    batch = Samples(8).batch
    empty = {**batch, "mask": np.zeros_like(batch["mask"])}
    on_mesh = js.shard_batch(batch, mesh)
    step = TrainStep(masked_loss, model, optimizer, on_mesh)
    found = evaluate(step, EvalStep(masked_loss, step, on_mesh), [empty, batch])
    np.testing.assert_allclose(found["loss"], means(masked_loss, batch)["loss"], rtol=1e-6)


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_t5_over_microbatches_and_two_processes_has_the_losses_of_one(tmp_path):
    losses = []
    for name, options in {"one": [], "four": ["--set", "accumulate=4", "--processes", "2"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        code, shown = run(["train", "t5", *SIZES, "--steps", "3", *options, "--out", "run"], folder)
        assert code == 0, shown
        records = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
        losses.append([record[key] for record in records for key in ("loss", "val_loss") if key in record])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=2e-5)
