"""Model files and recipes: what a user can get wrong is said in four parts."""

import dataclasses

import numpy as np
import pytest

from jshard.train import ModelFileError, load_model_file
from tests.micro_gpt import MODELS, micro


def test_a_users_own_file_works_like_ours(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text((MODELS / "gpt.py").read_text())
    mine = load_model_file(path)
    assert mine.recipe()[0] == "tiny"
    assert mine.build is not load_model_file(MODELS / "gpt.py").build


def test_missing_file(tmp_path):
    with pytest.raises(ModelFileError) as caught:
        load_model_file(tmp_path / "gone.py")
    assert str(caught.value).splitlines()[0] == "The model file cannot be read."
    assert "no such file" in caught.value.why
    with pytest.raises(ModelFileError, match="it is a folder"):
        load_model_file(tmp_path)


def test_missing_names_are_all_told_at_once(tmp_path):
    path = tmp_path / "half.py"
    path.write_text("RECIPES = {}\ndef build(config, rngs): ...\n")
    with pytest.raises(ModelFileError, match=r"The model file lacks RECIPES, annotate\."):
        load_model_file(path)


def test_unknown_recipe_names_the_known_ones():
    with pytest.raises(ModelFileError, match="tiny, gpt2_small, gpt2_xl, gpt3_175b"):
        load_model_file(MODELS / "gpt.py").recipe("huge")


def test_an_error_inside_the_file_is_its_own(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_model_file(path)


def test_schedule_warms_up_and_falls_to_a_tenth():
    recipe = dataclasses.replace(micro(), num_steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [float(recipe.schedule()(step)) for step in (0, 5, 10, 99, 100)]
    np.testing.assert_allclose(rates[:3], [0.0, 0.5, 1.0], rtol=1e-6)
    assert 0.1 <= rates[4] <= rates[3] < 0.101


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_schedule_of_a_run_shorter_than_its_warmup(num_steps):
    recipe = dataclasses.replace(micro(), num_steps=num_steps, warmup_steps=50)
    assert all(np.isfinite(recipe.schedule()(step)) for step in range(num_steps))


def test_weight_decay_leaves_biases_and_norms_alone():
    recipe = dataclasses.replace(micro(), warmup_steps=0, learning_rate=1.0, weight_decay=0.5)
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    tx = recipe.optimizer()
    updates, _ = tx.update({k: np.zeros_like(v) for k, v in params.items()}, tx.init(params), params)
    assert (updates["kernel"] < 0).all()
    assert not updates["bias"].any()
