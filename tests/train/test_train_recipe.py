"""Model files and recipes: what a user can get wrong is said in four parts."""

import dataclasses
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from jshard.recipes.recipe import RecipeError, check_recipe
from jshard.train import load_model_file
from tests.micro_gpt import MODELS, micro

NAMES = "RECIPES = {'a': print}\nbuild = annotate = print\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder; what a file adds to `sys.path` is taken out again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_users_own_file_works_like_ours(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text((MODELS / "gpt.py").read_text())
    mine = load_model_file(path)
    assert mine.recipe()[0] == "tiny"
    assert mine.build is not load_model_file(MODELS / "gpt.py").build


def test_the_files_neighbours_can_be_imported_from_any_folder(folder, monkeypatch):
    (folder / "project").mkdir()
    (folder / "project" / "my_layers.py").write_text("WIDTH = 3\n")
    (folder / "project" / "mine.py").write_text("import my_layers\n" + NAMES)
    (folder / "link").symlink_to("project/mine.py")
    for path in ("project/mine.py", "link", folder / "project" / "mine.py"):
        assert load_model_file(path).path == Path(path)
    assert sys.path.count(str(folder / "project")) == 1
    monkeypatch.chdir("project")
    load_model_file("mine.py")
    assert sys.path[0] == str(folder / "project")


def test_files_of_one_name_do_not_meet(folder):
    files = []
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "gpt.py").write_text(f"class Config:\n    value = {value}\n" + NAMES + "build = Config\n")
        files.append(load_model_file(folder / name / "gpt.py"))
    files.append(load_model_file(folder / "a" / "gpt.py"))
    assert [file.build.value for file in files] == [1, 2, 1]
    for file in files:
        assert pickle.loads(pickle.dumps(file.build)) is file.build


@pytest.mark.parametrize(
    ("changes", "why", "do"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1.", "batch_size=1"),
        ({"num_steps": True}, "num_steps is a bool, not an int.", "num_steps=1"),
        ({"seed": 2**32}, "seed must be below 2**32 = 4294967296.", "seed=0"),
        ({"sync": "none"}, "sync must be one of each, last.", "sync=each"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, 0 or more.", "learning_rate=0.001"),
        (
            {"batch_size": 16, "accumulate": 3},
            "batch_size=16 does not split into 3 microbatches: 1 over.",
            "accumulate=2",
        ),
    ],
    ids=str,
)
def test_recipe_values_that_cannot_work(changes, why, do):
    with pytest.raises(RecipeError) as caught:
        check_recipe(dataclasses.replace(micro(), **changes))
    assert caught.value.why == why
    assert caught.value.do.splitlines()[0] == f"--set {do}"


def test_recipe_values_that_work():
    for name in load_model_file(MODELS / "gpt.py").recipes:
        check_recipe(load_model_file(MODELS / "gpt.py").recipe(name)[1])
    check_recipe(dataclasses.replace(micro(), num_steps=np.int64(3), warmup_steps=0, seed=2**32 - 1, learning_rate=0))


def test_schedule_warms_up_and_falls_to_a_tenth():
    recipe = dataclasses.replace(micro(), num_steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [float(recipe.schedule()(step)) for step in (0, 5, 10, 99, 100)]
    np.testing.assert_allclose(rates[:3], [0.0, 0.5, 1.0], rtol=1e-6)
    assert 0.1 <= rates[4] <= rates[3] < 0.101


def test_weight_decay_leaves_biases_and_norms_alone():
    recipe = dataclasses.replace(micro(), warmup_steps=0, learning_rate=1.0, weight_decay=0.5)
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    tx = recipe.optimizer()
    updates, _ = tx.update({k: np.zeros_like(v) for k, v in params.items()}, tx.init(params), params)
    assert (updates["kernel"] < 0).all()
    assert not updates["bias"].any()
