"""A file of `torch.save` is read in each form that PyTorch gives it: views, dtypes, and the format before archives."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import TorchSource
from jshard.checkpoint.formats.torch_pickle import DTYPES
from jshard.checkpoint.formats.torch_writer import PickledCall, PickledGlobal, PickledObject
from jshard.cli import main
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import check_source
from tests.checkpoint.torch_fixture import SYSTEM, View, parameter, save, save_legacy

W = np.arange(24, dtype=np.float32).reshape(4, 6)
B = np.arange(3, dtype=jnp.bfloat16)
STATE = {"model": {"layer.w": W, "layer.b": B}, "optimizer": {"state": {0: {"exp_avg": W + 1}}}, "step": 7}
ARRAYS = {"model.layer.w": W, "model.layer.b": B, "optimizer.state.0.exp_avg": W + 1}
SAVES = {"archive": save, "legacy": save_legacy}


@pytest.fixture(params=SAVES)
def write(request):
    return SAVES[request.param]


def like():
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    return {
        "model": {"layer": {"w": jax.ShapeDtypeStruct((4, 6), np.float32, sharding=rows), "b": jnp.zeros(3, B.dtype)}}
    }


@pytest.mark.parametrize("name", ["state.pt", "state.pth", "state.bin", "state.ckpt"])
def test_a_state_dict_among_others_is_restored(write, name, tmp_path):
    write(tmp_path / name, STATE)
    restored = js.checkpoint.restore(tmp_path / name, {**like(), "step": 0})
    np.testing.assert_array_equal(restored["model"]["layer"]["w"], W)
    assert restored["step"] == 7


def test_a_file_is_inspected_and_imported(write, tmp_path, capsys):
    write(tmp_path / "state.pt", STATE)
    assert main(["ckpt", "inspect", str(tmp_path / "state.pt")]) == 0
    shown = capsys.readouterr().out
    assert "(4, 6)" in shown and "exp_avg" in shown
    assert main(["ckpt", "import", str(tmp_path / "state.pt"), str(tmp_path / "ours")]) == 0
    restored = js.checkpoint.restore(tmp_path / "ours", like())
    np.testing.assert_array_equal(restored["model"]["layer"]["w"], W)


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_names_of_a_wrapper_are_renamed(write, prefix, tmp_path):
    write(tmp_path / "state.pt", {f"{prefix}.layer.w": W, f"{prefix}.layer.b": B})
    restored = js.checkpoint.restore(tmp_path / "state.pt", like(), rename={"model": prefix})
    np.testing.assert_array_equal(restored["model"]["layer"]["w"], W)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_each_dtype_is_read(write, dtype, tmp_path):
    array = np.arange(6).reshape(2, 3).astype(DTYPES[dtype])
    write(tmp_path / "state.pt", {"w": array, "other": W})
    check_source(TorchSource(tmp_path / "state.pt"), {"w": array, "other": W})


def test_views_are_read_with_their_strides(write, tmp_path):
    views = {
        "transposed": View(W, 0, (6, 4), (1, 6)),
        "some columns": View(W, 7, (2, 3), (6, 2)),
        "tied": View(W, 0, (4, 6), (6, 1)),
        "expanded": View(W, 3, (5, 2), (0, 1)),
        "overlapping": View(W, 0, (20, 5), (1, 1)),
        "a number": View(W, 5, (), ()),
        "empty": View(W, 0, (0, 4), (4, 1)),
    }
    write(tmp_path / "state.pt", dict(views))
    flat = W.ravel()
    expected = {}
    for name, view in views.items():
        steps = tuple(4 * stride for stride in view.strides)
        expected[name] = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, steps)
    check_source(TorchSource(tmp_path / "state.pt"), expected)


def test_a_parameter_is_its_tensor(write, tmp_path):
    write(tmp_path / "state.pt", {"w": parameter(W)})
    check_source(TorchSource(tmp_path / "state.pt"), {"w": W})


@pytest.mark.parametrize("metadata", [{"conj": True}, {"neg": True}])
def test_a_view_that_changes_its_numbers_is_refused(write, metadata, tmp_path):
    array = np.array([1 + 2j, 3 - 4j], np.complex64)
    write(tmp_path / "state.pt", {"w": View(array, 0, (2,), (1,), metadata)})
    with pytest.raises(CheckpointError, match="conjugated or negated"):
        TorchSource(tmp_path / "state.pt")


def test_a_tensor_expanded_to_any_size_is_refused(write, tmp_path):
    write(tmp_path / "state.pt", {"w": View(W, 0, (1 << 40,), (0,))})
    with pytest.raises(CheckpointError, match="expanded from too few numbers"):
        TorchSource(tmp_path / "state.pt")


def test_a_tensor_beyond_its_storage_is_refused(write, tmp_path):
    write(tmp_path / "state.pt", {"w": View(W, 1, (4, 6), (6, 1))})
    with pytest.raises(RunError, match="damaged"):
        TorchSource(tmp_path / "state.pt")


def named(module, name, *args, state=None):
    call = PickledCall(PickledGlobal(module, name), args)
    return call if state is None else PickledObject(PickledGlobal(module, name), state)


def test_what_a_training_script_saves_beside_tensors_does_not_hinder(write, tmp_path):
    beside = {
        "args": named("argparse", "Namespace", state={"lr": 0.1}),
        "best": named("numpy._core.multiarray", "scalar", named("numpy", "dtype", "f8", False, True), "x"),
        "counts": named("collections", "Counter", {"a": 2}),
        "seen": named("collections", "defaultdict", PickledGlobal("builtins", "int")),
        "path": named("pathlib", "PosixPath", "/", "data"),
        "at": named("datetime", "timedelta", 1, 2, 3),
        "where": named("torch", "device", "cuda:0"),
    }
    write(tmp_path / "state.pt", {"w": W, **beside})
    source = TorchSource(tmp_path / "state.pt")
    check_source(source, {"w": W})
    assert source.values["counts.a"].value() == 2


def test_tensors_without_plain_numbers_are_noted_and_not_read(write, tmp_path):
    on_meta = named(
        "torch._utils", "_rebuild_meta_tensor_no_storage", PickledGlobal("torch", "float32"), (2,), (1,), False
    )
    sparse = named("torch._utils", "_rebuild_sparse_tensor", "layout", ())
    write(tmp_path / "state.pt", {"w": W, "meta": on_meta, "sparse": sparse})
    source = TorchSource(tmp_path / "state.pt")
    check_source(source, {"w": W})
    assert source.notes == [
        "not read, as it is on the meta device, and has no numbers: meta",
        "not read, as it is sparse: sparse",
    ]
    meta_like = {"meta": jax.ShapeDtypeStruct((2,), np.float32), "w": W}
    with pytest.raises(CheckpointError, match="meta  stored nothing"):
        js.checkpoint.restore(tmp_path / "state.pt", meta_like, extra="ignore")


@pytest.mark.parametrize("name", [("os", "system"), ("builtins", "eval"), ("torch.nn", "Linear")])
def test_other_names_are_refused_and_not_run(write, name, tmp_path):
    write(tmp_path / "state.pt", {"w": W, "x": named(*name, f"touch {tmp_path / 'ran'}")})
    with pytest.raises(CheckpointError, match="names something that may run code"):
        TorchSource(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()


def test_two_values_of_one_name_are_refused(write, tmp_path):
    write(tmp_path / "state.pt", {"a.b": W, "a": {"b": W + 1}})
    with pytest.raises(CheckpointError, match="have the same name"):
        TorchSource(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"system": {**SYSTEM, "little_endian": False}}, "not little-endian"),
        ({"keys": ["0"]}, "does not have"),
        ({"keys": ["1", "0"]}, "a storage of"),
        ({"keys": ["0", "1", "2"]}, "which no tensor is in"),
        ({"keys": [[], "1"]}, "which no tensor is in"),
    ],
)
def test_a_list_of_storages_that_does_not_fit_is_damage(change, why, tmp_path):
    save_legacy(tmp_path / "state.pt", {"w": W, "b": B}, **change)
    with pytest.raises(RunError, match=why):
        TorchSource(tmp_path / "state.pt")


def test_a_file_of_another_program_is_refused(tmp_path):
    (tmp_path / "state.ckpt").write_bytes(b"a program's own")
    with pytest.raises(CheckpointError, match=r"is not one of torch\.save"):
        js.checkpoint.restore(tmp_path / "state.ckpt", like())


REAL = """
import sys, torch
folder = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
base = torch.arange(24.0).reshape(4, 6)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "views": [base.t(), base[1:3, ::2], base]}
for name in "bfloat16 float16 float8_e4m3fn float8_e5m2 int8 bool complex64".split():
    state[name] = base.to(getattr(torch, name))
torch.save(state, f"{folder}/archive.pt")
for name in ("float8_e4m3fn", "float8_e5m2"):
    del state[name]
torch.save(state, f"{folder}/legacy.pt", _use_new_zipfile_serialization=False)
"""


def test_files_that_pytorch_wrote_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", REAL, str(tmp_path)], check=True)
    for name in ("archive.pt", "legacy.pt"):
        source = TorchSource(tmp_path / name)
        state = torch.load(tmp_path / name, weights_only=True)
        for key, tensor in {**state["model"], "bfloat16": state["bfloat16"], "complex64": state["complex64"]}.items():
            stored = f"model.{key}" if key in state["model"] else key
            read = source.read(stored, tuple(slice(0, size) for size in tensor.shape))
            assert read.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), key
        for number, tensor in enumerate(state["views"]):
            read = source.read(f"views.{number}", (slice(None), slice(None)))
            np.testing.assert_array_equal(read, tensor.numpy())
