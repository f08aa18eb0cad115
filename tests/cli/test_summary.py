"""What `jshard train` prints of a run before it begins, and that wrong inputs are refused before any slow work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import save_file

import jshard as js
from jshard import cli
from jshard.cli import _training
from jshard.cli._arguments import TrainArgs
from jshard.cli._recipe_request import explained
from jshard.cli._request import request_of
from jshard.cli._summary import summary
from jshard.data import load_text
from jshard.inspect.plan_tables import beyond_the_sums
from tests.cli.test_cli import folder  # noqa: F401


@pytest.fixture
def request_here(folder):  # noqa: F811
    """The request for a small model; compiled programs and folders are not needed."""
    return request_of(TrainArgs(model=folder / "my_model.py", set=("model.n_layer=1",)))


def lines_of(request, mesh, explanation=None):
    """The six lines, by their names, and the lines after them."""
    data = load_text(["text.txt"], sequence_length=request.recipe.sequence_length)
    explanation = explanation or explained(request, mesh, data)
    lines = list(summary(request, explanation, mesh, data, "runs/x"))
    return {line.split()[0]: line for line in lines[:6]}, lines[6:]


def test_six_lines_have_the_sums_of_the_tables(request_here):
    mesh = js.mesh(replica=2)
    explanation = explained(request_here, mesh)
    lines, others = lines_of(request_here, mesh, explanation)
    assert list(lines) == ["model", "mesh", "memory", "traffic", "data", "folder"] and others == []
    assert lines["mesh"].startswith("mesh     replica=2,fsdp=4 on 8 x cpu, simulated on ")
    assert lines["folder"] == "folder   runs/x (all tables of the plan: --dry-run)"

    tables = str(explanation).splitlines()
    cells = {name: next(line for line in tables if line.startswith(f" {name} ")).split() for name in SUMS}
    held, step, total = (" ".join(cells[name][at : at + 2]) for name, at in SUMS.items())
    assert lines["model"] == f"model    my_model, recipe micro: {tables[0].partition(' = P')[0]}"
    assert lines["memory"] == f"memory   {held} per device between steps, {step} in a step (estimate)"
    times = cells["total"][3]
    assert lines["traffic"] == f"traffic  {total} sent per device and step, {times} x the gathered parameters"

    # Every microbatch gathers and reduces once more.
    twice = dataclasses.replace(request_here, recipe=dataclasses.replace(request_here.recipe, accumulate=2))
    lines, _ = lines_of(twice, mesh, explanation)
    assert float(lines["traffic"].split()[8]) == pytest.approx(2 * float(times), abs=0.02)


SUMS = {"held between steps": 3, "in a step": 3, "total": 1}  # and the first of their cells


def test_a_line_where_nothing_is_sharded_though_there_are_devices(request_here):
    _, others = lines_of(request_here, js.mesh(replica=8))
    assert others == ["Replicated: all parameters: the fsdp axis has degree 1"]
    _, others = lines_of(request_here, js.mesh(devices=jax.devices()[:1]))
    assert others == []


class Parts(nnx.Module):
    """A layer with arrays that are in no sum."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((64, 64)))
        self.averages = nnx.List([nnx.Variable(jnp.zeros((64, 64))) for _ in range(2)])


def test_a_line_on_arrays_that_are_in_no_sum():
    explanation = js.explain(js.fully_shard(Parts(), mesh=js.mesh()))
    lines = list(beyond_the_sums(explanation.plan, explanation.others))
    assert lines == ["Not parameters: 2 float arrays, 32.00 KiB on every device, in no figure above"]


def test_the_tables_of_a_run_are_its_command_with_dry_run(folder, capsys):  # noqa: F811
    (folder / "mine").mkdir()
    (folder / "mine" / "run.json").write_text("{}")
    assert cli.main(["train", "my_model.py", "--out", "mine", "--set", "model.n_layer=1", "--dry-run"]) == 0
    assert "Memory of one device" in capsys.readouterr().out
    assert cli.main(["train", "my_model.py", "--out", "mine"]) == 2


WRONG = {
    "a tokenizer with more ids than the model": (["--tokenizer", "words.json"], "The model's vocabulary is smaller"),
    "parameters of another model": (["--init-from", "other.safetensors"], "other.safetensors"),
    "a model that cannot be built": (["--set", "model.vocab_size=0"], "The model refuses the batches"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_refused_before_data_are_read(folder, case, capsys, monkeypatch):  # noqa: F811
    words = {f"word{number}": number for number in range(1000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0")).save("words.json")
    save_file({"a": np.ones(3, np.float32)}, "other.safetensors")
    monkeypatch.setattr(_training, "_read_data", lambda request: pytest.fail("data were read"))
    options, text = WRONG[case]
    assert cli.main(["train", "my_model.py", "--data", "text.txt", "--out", "mine", *options]) == 2
    assert text in capsys.readouterr().err
    assert not (folder / "mine").exists()
