"""The models that come with jshard: found by name in a checkout and in a wheel, recorded by name, copied by init."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from jshard import cli, recipes
from jshard.train import load_model_file
from tests.micro_gpt import MODELS

HELPERS = {"clicks", "digits", "rope", "spans"}  # they are imported by models
NAMES = {file.stem for file in MODELS.glob("*.py")} - HELPERS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder; what a file adds to `sys.path` is taken out again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    return tmp_path


def installed(folder):
    """The module as it is in a wheel: models inside of the package, and a stranger's `models` beside it."""
    package = folder / "site-packages" / "jshard"
    (package / "train").mkdir(parents=True)
    (folder / "site-packages" / "models").mkdir()
    (folder / "site-packages" / "models" / "gpt.py").write_text("RECIPES = {}")
    shutil.copytree(MODELS, package / "models")
    file = shutil.copy(recipes.__file__, package / "train")
    spec = importlib.util.spec_from_file_location("installed_shipped_models", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, package / "models"


def test_every_model_is_found_by_its_name_in_a_checkout_and_in_a_wheel(folder):
    assert recipes.shipped_models() == {name: MODELS / f"{name}.py" for name in sorted(NAMES)}
    module, models = installed(folder)
    assert module.shipped_models() == {name: models / f"{name}.py" for name in sorted(NAMES)}
    assert module.model_path(Path("gpt")) == models / "gpt.py"


def test_a_file_of_the_working_folder_comes_before_a_shipped_model(folder):
    assert recipes.model_path(Path("gpt")) == MODELS / "gpt.py"
    (folder / "gpt").mkdir()
    assert recipes.model_path(Path("gpt")) == MODELS / "gpt.py"  # a folder is no model
    (folder / "gpt.py").write_text("")
    assert recipes.model_path(Path("gpt")) == Path("gpt.py")
    (folder / "llama").write_text("")
    assert recipes.model_path(Path("llama")) == Path("llama")


@pytest.mark.parametrize("given", ["./gpt.py", "digits", "x" * 5000, ""])
def test_nothing_else_means_a_shipped_model(folder, given):
    assert recipes.model_path(Path(given)) == Path(given)


def test_a_shipped_model_loads_and_is_recorded_by_its_name(folder, capsys):
    file = load_model_file("llama")  # which imports rope, beside it
    assert file.path == MODELS / "llama.py" and file.name == "llama"
    assert cli.main(["train", "gpt", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["model_file"] == "gpt"
    shutil.copy(MODELS / "gpt.py", folder)
    assert load_model_file("gpt").name == "gpt.py"


def test_an_unknown_name_lists_the_models(folder, capsys):
    assert cli.main(["train", "gtp"]) == 2
    said = capsys.readouterr().err
    assert f"the included models are {', '.join(sorted(NAMES))}.\n" in said
    assert "an included model, such as gpt;\n         jshard init gpt my_gpt.py  # " in said


@pytest.mark.parametrize(
    ("name", "beside"),
    [("gpt", []), ("vdit", ["digits"]), ("llama", ["rope"]), ("gemma", ["llama", "rope"])],
)
def test_init_copies_a_model_with_the_files_that_it_imports(folder, capsys, name, beside):
    assert cli.main(["init", name, f"new/my_{name}.py"]) == 0
    copied = {f"my_{name}.py": name} | {f"{helper}.py": helper for helper in beside}
    assert {path.name for path in (folder / "new").iterdir()} == set(copied)
    for path, source in copied.items():
        assert (folder / "new" / path).read_bytes() == (MODELS / f"{source}.py").read_bytes()
    assert capsys.readouterr().out.endswith(f"train it: jshard train new/my_{name}.py\n")


def test_init_overwrites_nothing(folder, capsys):
    assert cli.main(["init", "resnet", "mine.py"]) == 0
    assert cli.main(["init", "vdit", "other.py"]) == 0  # digits.py is there already, and the same
    (folder / "digits.py").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    for line, where in (
        ("init vdit mine.py", "mine.py\n         digits.py"),
        ("init vdit digits.py", "digits.py"),
        ("init llama rope.py", "rope.py"),
        ("init gpt new", "new"),
    ):
        assert cli.main(line.split()) == 2
        said = capsys.readouterr().err
        assert f"\n  where: {where}\n" in said
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    do = said.partition("do:")[2].split()  # and what it says works
    assert cli.main(do[1:]) == 0, do


@pytest.mark.parametrize("path", recipes.shipped_models().values(), ids=lambda path: path.stem)
def test_a_model_file_stays_short(path):
    assert len(path.read_text().splitlines()) <= {"gpt": 445, "llama": 533, "moe": 455, "t5": 375}.get(path.stem, 407)


def test_a_file_imports_its_own_neighbours(folder):
    """And not those of a model file that was loaded between, though its own folder was in the path before."""
    model = (MODELS / "gpt.py").read_text()
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / "own_neighbour.py").write_text(f"FOLDER = {name!r}\n")
        (folder / name / "plain.py").write_text(model)
        load_model_file(folder / name / "plain.py")
    (folder / "first" / "importing.py").write_text(f"{model}\nfrom own_neighbour import FOLDER\n")
    loaded = load_model_file(folder / "first" / "importing.py")
    assert sys.modules[loaded.build.__module__].FOLDER == "first"
