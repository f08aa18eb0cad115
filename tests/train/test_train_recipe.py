"""Model files and recipes: what a user can get wrong is said in four parts."""

import dataclasses
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from jshard.recipes.model_file import ModelFileError
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


def refused(text, name="mine.py"):
    """The error of a model file with this text."""
    Path(name).write_text(text)
    with pytest.raises(ModelFileError) as caught:
        load_model_file(name)
    return caught.value


def test_a_users_own_file_works_like_ours(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text((MODELS / "gpt.py").read_text())
    mine = load_model_file(path)
    assert mine.recipe()[0] == "tiny"
    assert mine.build is not load_model_file(MODELS / "gpt.py").build


def test_an_error_inside_the_file_is_its_own(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_model_file(path)


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


def test_a_name_with_a_dot(folder):
    (folder / "my-gpt.v2.py").write_text("class Config: ...\n" + NAMES + "build = Config\n")
    build = load_model_file("my-gpt.v2.py").build
    assert pickle.loads(pickle.dumps(build)) is build


def test_a_file_that_may_not_be_read(folder, monkeypatch):
    def read_bytes(path):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert refused(NAMES).why == "Permission denied."


def test_a_path_that_the_system_refuses(folder):
    with pytest.raises(ModelFileError, match="File name too long"):
        load_model_file("x" * 5000 + ".py")


def test_syntax_error_shows_the_line(folder):
    before = set(sys.modules)
    assert str(refused("x = 1\nbuild = (\n")) == (
        "The model file is not valid Python.\n"
        f"  where: {folder}/mine.py, line 2\n"
        "  why:   '(' was never closed.\n"
        "         build = (\n"
        "  do:    correct it; python -m py_compile mine.py shows the same."
    )
    assert set(sys.modules) == before


def test_a_package_that_is_missing(folder):
    assert str(refused("import os\nimport no_such_package.layers\n")) == (
        "The model file imports 'no_such_package', which is not there.\n"
        "  where: mine.py, line 2\n"
        f"  why:   no installed package and nothing in {folder} has that name.\n"
        "  do:    install the package that brings it (often: pip install no_such_package), or put no_such_package.py"
        " into that folder."
    )
    error = refused("import json.no_such_part\n")
    assert error.why == "there is 'json', but not this part of it."
    assert "pip" not in error.do


def test_a_file_that_ends_the_process(folder):
    error = refused("import sys\nsys.exit('done')\n")
    assert (error.where, error.why) == (("mine.py, line 2",), "it called sys.exit('done') while it was loaded.")


def test_recipes_that_cannot_be_made(folder):
    (folder / "mine.py").write_text(
        "def broken():\n    width = 100\n    raise ValueError(f'{width} does not split')\n"
        "RECIPES = {'broken': broken, 'none': lambda: None, 'dict': dict}\nbuild = annotate = print\n"
    )
    file = load_model_file("mine.py")
    with pytest.raises(ModelFileError) as caught:
        file.recipe()
    assert str(caught.value) == (
        "The recipe 'broken' cannot be made.\n"
        "  where: mine.py, line 3\n"
        "  why:   ValueError: 100 does not split\n"
        "  do:    correct that function in RECIPES; --debug shows the traceback."
    )
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ModelFileError, match="its function returns None"):
        file.recipe("none")
    with pytest.raises(ModelFileError, match="its function returns a dict"):
        file.recipe("dict")


@pytest.mark.parametrize(
    ("changes", "why", "do"),
    [
        ({"batch_size": 0}, "batch_size is at least 1.", "batch_size=1"),
        ({"sequence_length": 0}, "sequence_length is at least 1.", "sequence_length=1"),
        ({"accumulate": 0}, "accumulate is at least 1.", "accumulate=1"),
        ({"checkpoint_every": 0}, "checkpoint_every is at least 1.", "checkpoint_every=1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is at least 1.", "keep_checkpoints=1"),
        ({"eval_sequences": 0}, "eval_sequences is at least 1.", "eval_sequences=1"),
        ({"num_steps": True}, "num_steps is a bool, not an int.", "num_steps=1"),
        ({"num_steps": "10"}, "num_steps is a str, not an int.", "num_steps=1"),
        ({"seed": -1}, "seed is at least 0.", "seed=0"),
        ({"seed": 2**32}, "seed is below 2**32 = 4294967296.", "seed=0"),
        ({"learning_rate": float("nan")}, "learning_rate is a finite number, 0 or more.", "learning_rate=0.001"),
        (
            {"batch_size": 16, "accumulate": 3},
            "batch_size=16 does not split into 3 microbatches: 1 over.",
            "accumulate=2",
        ),
        (
            {"batch_size": 2, "accumulate": 3},
            "batch_size=2 does not split into 3 microbatches: 2 over.",
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


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NAMES + "RECIPES = [print]\n", "RECIPES is a list, not a dict of functions."),
        ("a\0b", "it is not text: there are"),
    ],
)
def test_a_file_that_is_no_model_file(folder, text, why):
    """The other reasons are in tests/golden/bad_input.txt."""
    assert refused(text).why.startswith(why)
