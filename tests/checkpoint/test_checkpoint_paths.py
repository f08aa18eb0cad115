"""A path that is no checkpoint is an error that says what it is, and what to give; files of torch.save are read."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as orbax

from jshard import checkpoint, cli
from jshard.checkpoint import CheckpointError, CheckpointWarning
from jshard.checkpoint.errors import DamagedError
from jshard.checkpoint.formats import TorchSource, foreign_source, write_safetensors
from jshard.cli.ckpt import verify as verify_command
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import Held
from tests.checkpoint.dcp_fixture import split, write_dcp
from tests.checkpoint.test_checkpoint_zero import save as torch_save

NAME = "pytorch_model.bin"
W = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(4, dtype=np.float32).astype(jnp.bfloat16)


def like():
    return {"model": {"layer": {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4, jnp.bfloat16)}}}


def check(restored):
    np.testing.assert_array_equal(restored["model"]["layer"]["w"], W)
    np.testing.assert_array_equal(restored["model"]["layer"]["b"], B)


def test_a_folder_with_pytorch_model_bin_is_read(tmp_path):
    """Alone in its folder, by its own path, and in several files with an index."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch_save(folder / "pytorch_model.bin", {"layer.w": W, "layer.b": B})
    for path in (folder, folder / "pytorch_model.bin"):
        assert isinstance(foreign_source(path), TorchSource)
        check(checkpoint.restore(path, like()))
    (folder / "pytorch_model.bin").unlink()
    index = {"layer.w": "pytorch_model-00001-of-00002.bin", "layer.b": "pytorch_model-00002-of-00002.bin"}
    torch_save(folder / index["layer.w"], {"layer.w": W})
    torch_save(folder / index["layer.b"], {"layer.b": B})
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for path in (folder, folder / "pytorch_model.bin.index.json"):
        check(checkpoint.restore(path, like()))
    torch_save(folder / index["layer.b"], {"other.b": B})
    with pytest.raises(CheckpointError, match=r"do not fit its index: 2 arrays differ"):
        checkpoint.restore(folder, like())


def test_nested_states_of_torch_save_are_read_by_their_keys(tmp_path):
    state = {"model": {"layer.w": W, "layer.b": B}, "optimizer": {"state": [{"exp_avg": W}]}, "epoch": 3}
    torch_save(tmp_path / "last.pt", state)
    check(checkpoint.restore(tmp_path / "last.pt", like()))
    assert checkpoint.restore(tmp_path / "last.pt", {**like(), "epoch": 0})["epoch"] == 3
    (tmp_path / "other.bin").write_bytes(b"a program's own")
    with pytest.raises(CheckpointError, match=r"is not one of torch\.save"):
        checkpoint.restore(tmp_path / "other.bin", like())
    torch_save(tmp_path / "one.pt", [W])
    with pytest.raises(CheckpointError, match="holds no parameters by name"):
        checkpoint.restore(tmp_path / "one.pt", like())


def photos(path):
    path.mkdir()
    (path / "a.jpg").write_text("a photo")


def two_files(path):
    path.mkdir()
    torch_save(path / "consolidated.00.pth", {"layer.w": W})
    torch_save(path / "consolidated.01.pth", {"layer.w": W})


def part_of_dcp(path):
    write_dcp(path.parent, {"w": split(W, 2)}, {})


WRONG = {
    "w.safetensors": (lambda path: None, "no such file."),
    "run": (lambda path: None, "no such folder."),
    "photos": (photos, "it holds no checkpoint of a known or registered format: a.jpg."),
    "meta": (two_files, "it holds 2 files that may be read, and nothing says which of them is the model."),
    "notes.txt": (lambda path: path.write_text("x"), "it is a file; single files that can be read are those of"),
    "dcp/__0_0.distcp": (part_of_dcp, "it is one file of a checkpoint; the checkpoint is its folder."),
    "unfinished": (lambda path: (path / "arrays").mkdir(parents=True), "save() did not complete this folder."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_path_that_is_no_checkpoint_says_what_it_is(tmp_path, name):
    make, why = WRONG[name]
    make(tmp_path / name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / name, like())
    assert caught.value.why.startswith(why)
    if name == "meta":
        assert f'restore("{tmp_path}/meta/consolidated.00.pth", like=...)' in caught.value.do
    if name.startswith("dcp"):
        assert caught.value.do == f'restore("{tmp_path}/dcp", like=...)'


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


DAMAGED = {
    "the manifest": lambda path: (checkpoint.save(path, like()), cut(path / "jshard.json")),
    "no manifest": lambda path: (checkpoint.save(path, like()), (path / "jshard.json").unlink()),
    "an array": lambda path: (checkpoint.save(path, like()), cut(next((path / "arrays").iterdir()))),
    "safetensors": lambda path: (write_safetensors(path, Held({"layer.w": W})), cut(path / "model.safetensors")),
    "DCP": lambda path: (write_dcp(path, {"layer.w": split(W, 2)}, {}), cut(path / ".metadata")),
    "torch.save": lambda path: (path.mkdir(), torch_save(path / NAME, {"w": W}), cut(path / NAME)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_is_a_checkpoint_error_and_a_run_error_with_the_exit_code_of_one(tmp_path, what, capsys):
    DAMAGED[what](tmp_path / "c")
    for kind in (CheckpointError, RunError):
        with pytest.raises(kind) as caught:
            checkpoint.restore(tmp_path / "c", like())
        assert isinstance(caught.value, DamagedError)
    command = "verify" if what == "an array" else "inspect"
    assert cli.main(["ckpt", command, str(tmp_path / "c")]) == 1


def test_inspect_shows_the_types_of_values_of_other_libraries(tmp_path, capsys):
    write_dcp(tmp_path / "c", {"layer.w": split(W, 2)}, {"step": 7, "name": "gpt", "list": [1]})
    assert cli.main(["ckpt", "inspect", str(tmp_path / "c"), "--json"]) == 0
    leaves = json.loads(capsys.readouterr().out)["leaves"]
    assert {name: leaf["dtype"] for name, leaf in leaves.items()} == {
        "layer/w": "float32",
        "step": "int",
        "name": "str",
        "list": "value",
    }


def test_a_restore_from_another_library_warns_once(tmp_path, recwarn):
    orbax.save(str(tmp_path / "c"), jax.tree.map(lambda x: x.astype(jnp.float16), like()))
    checkpoint.restore(tmp_path / "c", like())
    found = [str(warning.message) for warning in recwarn if warning.category is CheckpointWarning]
    assert len(found) == 1 and "2 leaves change dtype" in found[0] and "no checksums" in found[0]


def test_verify_prints_its_result_after_the_bar_and_counts_in_the_singular(tmp_path, capsys, monkeypatch):
    checkpoint.save(tmp_path / "c", {"w": jnp.zeros(3)})
    open_bars = []

    @contextlib.contextmanager
    def bar(what, total_bytes):
        open_bars.append(what)
        yield lambda num_bytes: None
        open_bars.remove(what)

    shown = []
    monkeypatch.setattr(verify_command, "progress", bar)
    monkeypatch.setattr(verify_command, "show", lambda text: shown.append((list(open_bars), text)))
    assert cli.main(["ckpt", "verify", str(tmp_path / "c")]) == 0
    ((bars, text),) = shown
    assert bars == [] and "(1 leaf, 12 B, 1 file)" in text


def test_import_leaves_arrays_out_only_on_purpose(tmp_path, capsys):
    arrays = {"h.0.weight": W, "h.1.weight": W}
    write_safetensors(tmp_path / "c", Held(arrays))
    (tmp_path / "m.py").write_text(
        "from tests.micro_gpt import RECIPES, annotate, build, loss_fn\n"
        "def hf_names(config):\n    return {'w': 'h.0.weight'}\n"
    )
    words = ["ckpt", "import", str(tmp_path / "c"), str(tmp_path / "out"), "--model", str(tmp_path / "m.py")]
    assert cli.main(words) == 2 and "--extra ignore" in capsys.readouterr().err
    assert cli.main([*words, "--extra", "ignore"]) == 0
    assert "1 array is left out: h.1.weight" in capsys.readouterr().err
