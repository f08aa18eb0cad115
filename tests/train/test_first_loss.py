"""A first loss that is not finite is looked into: the error names the value and the place, not the learning rate."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.data import Data
from jshard.errors import RunError
from jshard.recipes.building import new_model
from jshard.recipes.model_file import ModelFile, next_token_loss
from jshard.train import Recipe, RunOptions, TrainStep, fit, run_recipe
from jshard.train.first_loss import explained
from tests.toy_models import Residual

HERE = pathlib.Path(__file__)
LENGTH, ROWS = 8, 50  # 8 devices store 50 rows padded


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = ROWS
    block_size: int = LENGTH
    spoiled: bool = False


class WithPositions(nnx.Module):
    """Looks tokens up in one table and positions in another."""

    def __init__(self, config, rngs):
        self.table = nnx.Embed(config.vocab_size, 512, rngs=rngs)
        self.places = nnx.Param(jax.random.normal(rngs.params(), (config.block_size, 512)))
        self.down = nnx.Linear(512, 128, rngs=rngs)
        self.blocks = nnx.List([Residual(128, 256, rngs)])
        self.head = nnx.Linear(128, config.vocab_size, rngs=rngs)
        if config.spoiled:
            self.down.kernel[...] = self.down.kernel[...].at[3, 5].set(jnp.nan)

    def __call__(self, ids):
        x = self.table(ids)
        x = x + jnp.take(self.places[...], jnp.arange(ids.shape[1]), axis=0)[None]
        return self.head(self.blocks[0](self.down(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(ROWS)(nn.Embed(ROWS, 512, name="table")(ids))


def annotate(model, mesh):
    return js.fully_shard(model, mesh=mesh, **({} if isinstance(model, nn.Module) else {"units": Residual}))


def file(loss_fn=next_token_loss, build=WithPositions):
    build = (lambda config, rngs: LinenModel()) if build is LinenModel else build
    return ModelFile(path=HERE, recipes={}, build=build, annotate=annotate, loss_fn=loss_fn)


def recipe(**config):
    length = config.pop("length", LENGTH)
    sizes = {"sequence_length": length, "batch_size": 8, "num_steps": 4, "eval_sequences": 8}
    return Recipe(model=Config(**config), learning_rate=1e-3, warmup_steps=1, **sizes)


def samples(token=7, at=3, length=LENGTH, number=16):
    """Samples of one token; one value in the middle of each is another."""
    inputs = np.full((number, length), 7, np.int32)
    inputs[:, at] = token
    return [{"inputs": row, "targets": np.zeros(length, np.int32)} for row in inputs]


def batch_of(rows):
    return js.shard_batch({key: np.stack([row[key] for row in rows[:8]]) for key in rows[0]}, js.mesh())


def reported(model_file, recipe, batch, wrong="loss"):
    model = new_model(model_file, recipe, js.mesh())
    settings = {"step": 1, "not_finite": {wrong: float("nan")}, "source": "as it is initialised"}
    return text_of(explained(model_file, recipe, model, batch, **settings))


def text_of(error):
    found = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "search for the cause failed" not in found
    assert "lower the learning rate" not in found
    return found


def line(text):
    """`file:line` of the only line of this file that has the text."""
    (number,) = [
        i for i, found in enumerate(HERE.read_text().splitlines(), 1) if text in found and "line(" not in found
    ]
    return f"{HERE.name}:{number}"


@pytest.mark.wide
@pytest.mark.parametrize("build", [WithPositions, LinenModel])
def test_a_token_beyond_the_table_is_named(build, tmp_path):
    rows = samples(token=60, at=5)
    data = Data(train=rows, held_out=samples(), description="ids", fingerprint="ids")
    with pytest.raises(RunError) as error:
        run_recipe(
            file(build=build), recipe(), RunOptions(mesh=js.mesh(), data=data, out=tmp_path / "run", sample_tokens=0)
        )
    found = text_of(error.value)
    place = line("x = self.table(ids)" if build is WithPositions else 'name="table")(ids)')
    assert found.startswith("Row 60 of table/embedding does not exist.\n")
    assert f"{place}: lookup in table/embedding" in found
    assert 'batch["inputs"][0, 5] = 60' in found
    assert "it has 50 rows, 0 to 49" in found and '8 of 64 values of batch["inputs"] are out of range' in found
    assert 'do:    --set model.vocab_size=61, or keep batch["inputs"] within 0 to 49' in found
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_a_position_beyond_the_table_is_named():
    found = reported(file(), recipe(length=12), batch_of(samples(length=12)))
    assert found.startswith("Row 8 of places does not exist.\n")
    assert line("jnp.take(self.places") in found and "index 8, which is not in the batch" in found
    assert "--set model.block_size=12, or --set sequence_length=8" in found


@pytest.mark.wide
def test_a_parameter_that_was_not_finite_before_is_named(tmp_path):
    data = Data(train=samples(), held_out=samples(), description="ids", fingerprint="ids")
    with pytest.raises(RunError) as error:
        run_recipe(
            file(), recipe(spoiled=True), RunOptions(mesh=js.mesh(), data=data, out=tmp_path / "run", sample_tokens=0)
        )
    found = text_of(error.value)
    assert found.startswith("down/kernel is not finite.\n")
    assert "down/kernel[3, 5] = nan" in found and "1 of its 65,536 values" in found
    assert f"as initialised by {HERE}" in found


def log_of_less_than_nothing(model, batch):
    logits = model(batch["inputs"])
    masked = jax.nn.softmax(jnp.where(jnp.arange(ROWS)[None, None] > 2, -jnp.inf, logits))  # a mask is no cause
    picked = masked[..., 10]
    return -jnp.log(picked - 1).mean()


def test_a_log_of_less_than_zero_is_named_and_a_mask_is_not():
    found = reported(file(log_of_less_than_nothing), recipe(), batch_of(samples()))
    assert found.startswith("`log` yields a value that is not finite.\n")
    assert f"where: {line('jnp.log(picked - 1)')}: log" in found


def root_in_a_scan(model, batch):
    def one(total, row):
        return total + jnp.sqrt(row * 0 - 1), row

    logits = model(batch["inputs"])
    return jax.lax.scan(one, jnp.zeros(LENGTH), logits[..., 0])[0].mean()


def test_a_line_inside_a_scan_is_named():
    found = reported(file(root_in_a_scan), recipe(), batch_of(samples()))
    assert f"where: {line('jnp.sqrt(row * 0 - 1)')}: sqrt" in found


def length_of_nothing(model, batch):
    distance = model(batch["inputs"]) * 0
    return jnp.sqrt(distance).sum()  # 0, with a gradient of 0 * inf


def test_a_gradient_that_is_not_finite_is_looked_into():
    found = reported(file(length_of_nothing), recipe(), batch_of(samples()), wrong="grad_norm")
    assert f"where: {line('distance = model')}: mul" in found and "the first operation of the gradient" in found
    assert "grad_norm = nan at step 1" in found


def weighted(model, batch):
    return (batch["weights"] * model(batch["inputs"])[..., 0]).mean()


def test_a_batch_that_is_not_finite_is_named():
    rows = [{**row, "weights": np.ones(LENGTH, np.float32)} for row in samples()]
    rows[5]["weights"][2] = np.inf
    found = reported(file(weighted), recipe(), batch_of(rows))
    assert 'batch["weights"][5, 2] = inf' in found and "1 of its 64 values" in found


def test_an_id_that_the_model_computes_is_named_with_what_it_is_from():
    shifted = lambda model, batch: model(batch["inputs"] + 100).mean()
    found = reported(file(shifted), recipe(), batch_of(samples()))
    assert found.startswith("Row 107 of table/embedding does not exist.\n")
    assert "index 107, which is not in the batch" in found


def test_a_label_beyond_the_logits_is_named():
    rows = samples()
    rows[2]["targets"][4] = 50
    found = reported(file(), recipe(), batch_of(rows))
    assert 'batch["targets"][2, 4] = 50' in found


def test_a_resumed_run_names_its_checkpoint(tmp_path):
    data = Data(train=samples(), held_out=samples(), description="ids", fingerprint="ids")
    how = {"mesh": js.mesh(), "data": data, "out": tmp_path / "run", "sample_tokens": 0, "say": lambda line: None}
    run_recipe(file(), dataclasses.replace(recipe(), num_steps=1), RunOptions(**how))
    with pytest.raises(RunError) as error:
        run_recipe(file(log_of_less_than_nothing), recipe(), RunOptions(resume=True, **how))
    found = text_of(error.value)
    assert found.startswith("`log` yields a value that is not finite.\n") and "at step 2, before any update" in found


def test_a_loop_of_ones_own_is_reported_that_no_update_was_made():
    model = new_model(file(), recipe(), js.mesh())
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3))
    batch = batch_of(samples(token=60))
    step = TrainStep(next_token_loss, model, optimizer, batch)
    with pytest.raises(RunError, match="NaN/inf at step 1, before any update") as error:
        fit(step, [batch], num_steps=1)
    text_of(error.value)
