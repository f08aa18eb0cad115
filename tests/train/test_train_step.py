"""A `TrainStep` trains as the plain Flax step does, is traced once, and does not walk the model again."""

import contextlib
import dataclasses
import io
import sys
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError, ShardingError
from jshard.recipes.building import create
from jshard.train import EvalStep, Meter, Progress, Trackers, TrainStep, evaluate, fit, load_model_file
from jshard.train.records import Jsonl
from tests.micro_gpt import micro
from tests.parity import numbers_of
from tests.toy_models import Normed

GPT = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
FLAX = str(Path(flax.__file__).parent)


class Counted:
    """A loss function that knows how often it was traced."""

    def __init__(self, loss_fn):
        self.loss_fn, self.calls = loss_fn, 0

    def __call__(self, model, batch):
        self.calls += 1
        return self.loss_fn(model, batch)


def host_batches(count, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        text = random.integers(0, 256, (4, 9), dtype=np.int32)
        yield {"inputs": text[:, :-1], "targets": text[:, 1:]}


@pytest.fixture(scope="module")
def mesh():
    return js.mesh(devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def loss_fn():
    return Counted(GPT.loss_fn)


@pytest.fixture(scope="module")
def pair(mesh, loss_fn):
    """A `TrainStep`, and the plain step of Flax on a copy of its state."""
    small = {"n_layer": 1, "d_model": 32, "d_ff": 32, "block_size": 8, "dropout": 0.5}
    recipe = dataclasses.replace(micro(), model=dataclasses.replace(micro().model, **small), batch_size=4)
    model, optimizer = create(GPT, recipe, mesh)
    graphdef, state = nnx.split((model, optimizer))
    plain_objects = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))

    @nnx.jit
    def plain(model, optimizer, batch):
        loss, grads = js.value_and_grad(GPT.loss_fn)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    batch = js.shard_batch(next(host_batches(1)), mesh)
    return TrainStep(loss_fn, model, optimizer, batch), lambda batch: plain(*plain_objects, batch), plain_objects


@pytest.fixture(scope="module")
def eval_step(pair, mesh):
    step, _, _ = pair
    return EvalStep(GPT.loss_fn, step, js.shard_batch(next(host_batches(1)), mesh))


def arrays(objects):
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.state(objects))
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


class FlaxCalls:
    """Counts calls of Python functions of Flax in this thread."""

    def __enter__(self):
        self.names = []
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _seen(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(FLAX):
            self.names.append(frame.f_code.co_name)


def test_same_numbers_as_the_plain_step(pair, mesh):
    step, plain, plain_objects = pair
    nnx.update(plain_objects, jax.tree.map(jnp.copy, nnx.state((step.model, step.optimizer))))
    for host_batch in host_batches(3):
        batch = js.shard_batch(host_batch, mesh)
        ours, theirs = step(batch), plain(batch)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-6)
    ours, theirs = arrays((step.model, step.optimizer)), arrays(plain_objects)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        np.testing.assert_allclose(numbers_of(ours[path]), numbers_of(leaf), rtol=1e-5, atol=1e-7, err_msg=path)
    counts = [int(leaf) for path, leaf in ours.items() if "count" in path and leaf.ndim == 0]
    assert len(counts) > 3 and min(counts) >= 3  # of dropout and of the optimizer


def test_one_trace_in_place_and_with_the_same_shardings(pair, mesh, loss_fn):
    step, _, _ = pair
    before = arrays((step.model, step.optimizer))
    shardings = {path: leaf.sharding for path, leaf in before.items()}
    for host_batch in host_batches(3):
        step(js.shard_batch(host_batch, mesh))
    assert [path for path, leaf in before.items() if not leaf.is_deleted()] == []
    assert {path: leaf.sharding for path, leaf in arrays((step.model, step.optimizer)).items()} == shardings
    assert loss_fn.calls == 1


def test_no_flax_code_runs_in_the_loop(pair, eval_step, tmp_path):
    step, plain, _ = pair
    tracker = Trackers(Jsonl(tmp_path / "metrics.jsonl"), Progress(20, stream=io.StringIO()))
    with contextlib.closing(tracker), FlaxCalls() as calls:
        fit(step, host_batches(20), num_steps=20, tracker=tracker, meter=Meter(tokens_per_step=32))
        evaluate(step, eval_step, host_batches(5))
    assert calls.names == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20

    batch = js.shard_batch(next(host_batches(1)), step.mesh)
    with FlaxCalls() as calls:  # these are the calls that are saved
        plain(batch)
    assert len(calls.names) > 100


def test_evaluation_has_no_dropout_and_leaves_the_model_alone(pair, eval_step):
    step, _, _ = pair
    losses = [evaluate(step, eval_step, host_batches(2))["loss"] for _ in range(2)]
    assert losses[0] == losses[1]
    model = step.model
    assert not model.dropout.deterministic
    before = {path: np.asarray(numbers_of(leaf)) for path, leaf in arrays(model).items()}
    still = nnx.with_attributes(model, deterministic=True)
    loss_fn = nnx.jit(GPT.loss_fn)
    expected = np.mean([loss_fn(still, js.shard_batch(batch, step.mesh)) for batch in host_batches(2)])
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    for path, leaf in arrays(step.model).items():
        np.testing.assert_array_equal(numbers_of(leaf), before[path], err_msg=path)


def square(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def normed(mesh, *, use_running_average=False, optimizer=js.shard_optimizer):
    """A model with statistics, its optimizer and a batch."""
    statistics = {"use_running_average": use_running_average, "momentum": 0.5}
    model = js.shard_init(
        lambda: Normed(4, 8, nnx.Rngs(0), **statistics), lambda model: js.fully_shard(model, mesh=mesh), mesh=mesh
    )
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    return model, optimizer(model, optax.adam(1e-2)), js.shard_batch({"x": x}, mesh)


def test_evaluation_keeps_the_statistics(mesh):
    model, optimizer, batch = normed(mesh)
    step = TrainStep(square, model, optimizer, batch)
    step(batch)
    mean = np.asarray(step.model.norm.mean)
    assert np.abs(mean).max() > 0  # training moves them
    loss = EvalStep(square, step, batch)(step.model_leaves, batch)["loss"]
    np.testing.assert_array_equal(step.model.norm.mean, mean)
    assert not step.model.norm.use_running_average
    still = nnx.with_attributes(step.model, use_running_average=True)
    np.testing.assert_allclose(loss, square(still, batch), rtol=1e-5)
    step(batch)
    assert np.abs(np.asarray(step.model.norm.mean) - mean).max() > 0  # and continues doing so


def with_size(model, batch):
    y = model(batch["x"])
    return jnp.mean(y**2), {"size": jnp.abs(y).mean(), "share": (y > 0).mean()}


def test_gradients_may_be_reduced_once_a_step(mesh):
    """A step says when as `js.value_and_grad` does: it computes the same, and gathers and reduces less often."""
    recipe = dataclasses.replace(micro(), batch_size=8)
    batch = js.shard_batch({name: np.tile(x, (2, 1)) for name, x in next(host_batches(1)).items()}, mesh)
    losses, gathered, reduced = {}, {}, {}
    for sync in ("each", "last"):
        model, optimizer = create(GPT, recipe, mesh)
        step = TrainStep(GPT.loss_fn, model, optimizer, batch, accumulate=4, sync=sync)
        report = js.audit(step.compiled, model=model, accumulate=4, sync=sync)
        gathered[sync], reduced[sync] = report.amount("all-gather"), report.amount("reduce-scatter")
        losses[sync] = [float(step(batch)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses["last"], losses["each"], rtol=2e-2)
    assert gathered["each"] >= 3.5 * gathered["last"] > 0  # what is gathered for its loop alone counts in both
    assert reduced["each"] == pytest.approx(4 * reduced["last"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_metrics_of_the_loss_are_means_over_the_batch_and_stand_beside_it(mesh, accumulate):
    model, optimizer, batch = normed(mesh, use_running_average=True)
    loss, metrics = with_size(model, batch)
    schedule = optax.linear_schedule(0.5, 0.0, 10)
    step = TrainStep(with_size, model, optimizer, batch, accumulate=accumulate, learning_rate=schedule)
    scalars = step(batch)
    for name, value in {"loss": loss, **metrics}.items():
        np.testing.assert_allclose(scalars[name], value, rtol=1e-5, err_msg=name)
    assert float(scalars["learning_rate"]) == 0.5 and float(step(batch)["learning_rate"]) == pytest.approx(0.45)
    norm = optax.tree.norm(nnx.state(step.model, nnx.Param))
    np.testing.assert_allclose(step(batch)["param_norm"], norm, rtol=0.1)  # one update later
    assert set(evaluate(step, EvalStep(with_size, step, batch), [{"x": np.ones((8, 4), np.float32)}])) == {
        "loss",
        "size",
        "share",
    }


@pytest.mark.parametrize(
    ("metrics", "why"),
    [({"rows": jnp.ones(3)}, r"'rows' \(3,\)"), ({"val_x": 1.0}, "'val_x'"), ({"mfu": 1.0}, "'mfu'"), (1.0, "a float")],
)
def test_metrics_that_cannot_be_recorded_are_refused(mesh, metrics, why):
    model, optimizer, batch = normed(mesh)
    with pytest.raises(ShardingError, match=f"metrics of a loss function(.|\n)*{why}"):
        TrainStep(lambda model, batch: (square(model, batch), metrics), model, optimizer, batch)


def test_an_array_on_other_devices_is_refused_before_compilation(mesh):
    def refuse_to_trace(model, batch):
        raise AssertionError("traced before the state was looked at")

    model, optimizer, batch = normed(mesh)
    elsewhere = jax.devices()[5]
    model.linear.kernel = nnx.Param(jax.device_put(np.ones((4, 8), np.float32), elsewhere))
    with pytest.raises(AnnotationError, match="Not on the mesh of the run: 1 array of the state") as caught:
        TrainStep(refuse_to_trace, model, optimizer, batch)
    assert caught.value.where == (f"model/linear/kernel  on {elsewhere}",)
    assert "2 devices" in caught.value.why
    assert "js.shard_optimizer" in caught.value.do


def test_a_state_that_grows_is_refused(mesh):
    def keeps_its_output(model, batch):
        model.activation = nnx.Intermediate(model(batch["x"]))
        return jnp.mean(model.activation[...] ** 2)

    with pytest.raises(AnnotationError, match="changes the structure of the model or the optimizer") as caught:
        TrainStep(keeps_its_output, *normed(mesh))
    assert caught.value.where == ("model/activation  new",)
